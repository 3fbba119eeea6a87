//! The HDFS tier over a file system in memory, and over a real NameNode and DataNode.
//!
//! At every moment each acknowledged block must be visible in some tier. `fixture` reads all of
//! them as clients do, and the tests in `tiers` and `faults` check it. `client`, `ha`, `kerberos`,
//! `losses` and `speed` start worker processes. `contract` has the rules of every tier, also of
//! disks and object stores.

#![cfg(feature = "hdfs")]
#![allow(clippy::panic, reason = "tests fail by panicking")]
#![allow(clippy::unwrap_used, reason = "the same")]

mod checker;
mod client;
mod contract;
mod faults;
mod fixture;
mod ha;
mod kerberos;
mod losses;
mod reader;
mod real;
mod speed;
mod tiers;
mod worker;
