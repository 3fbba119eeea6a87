//! The client of object stores, against a store in this process whose answers can be spoiled, SeaweedFS, and memory where
//! that fits.

mod access;
mod calls;
mod faults;
mod fixture;
mod weed;
