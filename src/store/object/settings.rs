//! Settings of the tier: sizes and limits. The address of the store and the settings of its client
//! are in `config`.

use std::sync::Arc;

use uniffle_io::Disk;

/// Sizes and limits of the tier.
#[derive(Debug, Clone)]
pub struct ObjectSettings {
    /// Prefix of all keys: the configured prefix and this worker's id in the cluster. Workers that
    /// run concurrently must have different prefixes.
    pub root: String,
    /// Payload size at which a segment takes no more batches.
    pub segment_bytes: u64,
    /// Size of a part of an upload. A segment with a smaller payload is uploaded with one request.
    pub part_bytes: usize,
    /// Maximum number of concurrently written batches. Batches of one shuffle share segments.
    pub writers: usize,
    /// Heap for records, extents and lists of pieces of segments that are being made.
    pub segment_heap_bytes: u64,
    /// Memory for reads of clients. Reads from the store and from the read cache may each use a
    /// part.
    pub read_memory_bytes: u64,
    /// Maximum number of open responses that are longer than one chunk of their reader. Each
    /// occupies a connection that waits for the reader, so there must be more connections.
    pub answers_ahead: usize,
    /// Memory for index records of segments.
    pub index_cache_bytes: u64,
    /// Disks of the read cache, which stores chunks of segments. Empty for no read cache.
    pub cache_disks: Vec<Arc<dyn Disk>>,
    /// Capacity of the read cache on all its disks.
    pub cache_bytes: u64,
}

impl ObjectSettings {
    /// Returns the defaults for a worker whose keys begin with `root`.
    #[must_use]
    pub fn new(root: impl Into<String>) -> Self {
        Self {
            root: root.into(),
            segment_bytes: 128 << 20,
            part_bytes: 8 << 20,
            writers: 16,
            segment_heap_bytes: 16 << 20,
            read_memory_bytes: 64 << 20,
            answers_ahead: 8,
            index_cache_bytes: 16 << 20,
            cache_disks: Vec::new(),
            cache_bytes: 0,
        }
    }
}
