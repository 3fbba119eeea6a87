//! Bounded amounts as values with `Drop`, the budget of the heap, and the division of the process's
//! memory.
//!
//! This module holds no memory and decides nothing about its use. Every layer uses it, so it knows
//! none of them.

pub mod heap;
pub mod memory_plan;
mod tree;

pub use heap::{Heap, HeapFull, HeapKind};
pub use tree::{Budget, Charge, NoCapacity};
