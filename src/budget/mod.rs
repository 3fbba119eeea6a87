//! Bounded amounts as values with `Drop`, the budget of the heap, the division of the process's
//! memory, and fair wait queues.
//!
//! This module holds no memory and decides nothing about its use. Every layer uses it, so it knows
//! none of them.

pub mod allowance;
pub mod heap;
pub mod ledger;
pub mod left;
pub(crate) mod line;
pub mod permit_pool;
pub mod rounds;
pub mod turns;

pub use heap::{Heap, HeapFull, HeapKind};
pub use ledger::{Budget, Charge, NoCapacity};
pub use rounds::Rounds;
