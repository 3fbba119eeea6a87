//! Tiers whose files clients read themselves. The protocol defines names, formats and the order in
//! which files become visible (docs/protocol.md §6), so none of these may change here.

pub mod hdfs;
