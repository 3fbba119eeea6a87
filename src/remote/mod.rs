//! Tiers whose files clients read themselves.

pub mod hdfs;
