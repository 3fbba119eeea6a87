//! The memory region and its dependencies for Miri; `memory/` links to the worker's own files.

#![allow(dead_code, missing_docs, reason = "only the region's tests are of interest")]

pub mod budget;

pub mod memory {
    mod buddy;
    pub mod region;
}
