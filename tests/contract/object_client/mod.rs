//! The client of object stores, against a store with faults in this process, SeaweedFS, and memory.

mod access;
mod calls;
mod faults;
mod fixture;
mod seaweedfs;
