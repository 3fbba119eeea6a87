//! The HDFS tier: over a file system in memory, and over a real NameNode and DataNode.
//!
//! Whatever fails, a block that was acknowledged is visible in a tier at every moment: `rig` reads all of them the way
//! clients do, and every test asks it.

#![cfg(feature = "hdfs")]
#![allow(clippy::panic, reason = "to panic is how a test fails")]
#![allow(clippy::unwrap_used, reason = "the same")]

#[path = "support/coordinator.rs"]
mod coordinator;
mod support;

#[path = "hdfs/checker.rs"]
mod checker;
#[path = "hdfs/contract.rs"]
mod contract;
#[path = "hdfs/faults.rs"]
mod faults;
#[path = "hdfs/ha.rs"]
mod ha;
#[path = "hdfs/kerberos.rs"]
mod kerberos;
#[path = "hdfs/losses.rs"]
mod losses;
#[path = "hdfs/reader.rs"]
mod reader;
#[path = "hdfs/real.rs"]
mod real;
#[path = "hdfs/rig.rs"]
mod rig;
#[path = "hdfs/speed.rs"]
mod speed;
#[path = "hdfs/tiers.rs"]
mod tiers;
#[path = "hdfs/worker.rs"]
mod worker;
