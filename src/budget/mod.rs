//! Bounded amounts as values with `Drop`, the budget of the heap, and how what the process may hold is divided.
//!
//! Not here: any memory, and any decision about who gets it. Used by every layer, so it knows none.

pub mod allowance;
pub mod heap;
pub mod ledger;

pub use heap::{Heap, HeapFull, HeapKind};
pub use ledger::{Budget, Charge, NoCapacity};
