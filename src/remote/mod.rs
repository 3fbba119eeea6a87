//! Tiers whose files clients read themselves, at present HDFS alone.
//!
//! The protocol defines names, formats and the order in which files become visible
//! (docs/protocol.md §6), so none of these may change here. Tiers read through the worker are in
//! `store`.

pub mod hdfs;
