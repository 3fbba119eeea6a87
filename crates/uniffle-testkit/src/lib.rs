//! What the tests of the worker share: disks that fail on purpose.
//!
//! | disk | for |
//! | --- | --- |
//! | [`memory_disk::MemoryDisk`] | a tree in memory with an optional capacity, and power loss |
//! | [`fault::FaultDisk`] | any disk, with faults on purpose |

pub mod fault;
pub mod memory_disk;
