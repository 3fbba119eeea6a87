//! What the tests of the worker share: disks that fail on purpose, blocks from a seed, recorded sessions.
//!
//! | disk | for |
//! | --- | --- |
//! | [`memory_disk::MemoryDisk`] | a tree in memory with an optional capacity, and power loss |
//! | [`fault::FaultDisk`] | any disk, with faults on purpose |
//!
//! [`block_generator`] makes blocks that another process can verify; [`recording`] is a real client's session in a file.

pub mod block_generator;
pub mod fault;
pub mod memory_disk;
pub mod recording;
