//! The ledgers of lost blocks: which acknowledged blocks are readable, and which are lost.

pub(super) mod loss;
pub(super) mod partition;
pub(super) mod shuffle;
