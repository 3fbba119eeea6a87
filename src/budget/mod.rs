//! Bounded amounts as values with `Drop`, the budget of the heap, how what the process may hold is divided, and whose turn it is.
//!
//! Not here: any memory, and any decision about who gets it. Used by every layer, so it knows none.

pub mod allowance;
pub mod heap;
pub mod ledger;
pub mod left;
pub(crate) mod line;
pub mod places;
pub mod rounds;
pub mod turns;

pub use heap::{Heap, HeapFull, HeapKind};
pub use ledger::{Budget, Charge, NoCapacity};
pub use rounds::Rounds;
