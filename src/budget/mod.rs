//! Bounded amounts as values with `Drop`, and the budget of the heap.
//!
//! Not here: any memory, and any decision about who gets it. Used by every layer, so it knows none.

pub mod heap;
pub mod ledger;

pub use heap::{Heap, HeapFull, HeapKind};
pub use ledger::{Budget, Charge, NoCapacity};
