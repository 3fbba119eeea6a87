//! The ledgers of lost blocks: which acknowledged blocks are readable, and which are lost.

pub(crate) mod loss;
pub(crate) mod partition;
pub(crate) mod shuffle;
