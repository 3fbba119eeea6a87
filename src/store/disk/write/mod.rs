//! Writes of batches: one sequential range of a data log each, then its index group.

pub(super) mod append;
pub(super) mod batch;
pub(super) mod pending;
mod publish;
