//! The memory region and its dependencies for Miri. All other files are links to those of
//! `uniffle-memory` and `uniffle-base`.

#![allow(dead_code, missing_docs, reason = "only the region's tests are of interest")]

// The region's files name the crate of the budgets.
extern crate self as uniffle_base;

pub mod budget;

pub mod sched {
    pub mod shares;
}

pub mod region;
