//! Bounded amounts as values with `Drop`, the budget of the heap, and the division of the process's
//! memory.
//!
//! This module counts memory but holds none. It decides how much each kind of use may take, not
//! what the memory is used for. All layers above use it, so it knows none of them.

pub mod heap;
pub mod memory_plan;
mod tree;

pub use heap::{Heap, HeapFull, HeapKind};
pub use tree::{Budget, Charge, NoCapacity};
