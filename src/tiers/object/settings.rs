//! What the tier is told: sizes of segments and parts. Where the store is, and how it is reached, is its client's.

use std::sync::Arc;
use std::time::Duration;

use uniffle_io::Disk;

/// How segments are made.
#[derive(Debug, Clone)]
pub struct ObjectSettings {
    /// What keys begin with: the configured prefix and the name of this worker in the cluster. Two workers that run at
    /// the same time never have the same.
    pub root: String,
    /// Payload after which a segment takes no more batches.
    pub segment_bytes: u64,
    /// Bytes of a part of an upload. A segment that is no longer than this is one request.
    pub part_bytes: usize,
    /// Parts of one segment that are on their way at a time.
    pub parts_in_flight: usize,
    /// Batches that are written at a time; those of one shuffle share segments.
    pub writers: usize,
    /// Heap for what segments in the making hold beside their blocks: records, extents, lists of pieces.
    pub making_bytes: u64,
    /// Memory for reads of clients, of which those that wait for the store have a part.
    pub read_memory_bytes: u64,
    /// Answers at a time that are longer than a chunk of their readers, each on a connection that waits for its reader: fewer
    /// than there are connections.
    pub answers_ahead: usize,
    /// Memory for index records of segments.
    pub index_cache_bytes: u64,
    /// Where chunks of segments are kept that were read; none = they are not kept.
    pub cache_disks: Vec<Arc<dyn Disk>>,
    /// Bytes of chunks that are kept, on all disks together.
    pub cache_bytes: u64,
    /// Whether data comes from local disks, which know its extents and write the metadata log.
    pub is_below_disks: bool,
    /// How long a store may fail before readers are told so instead of being sent away to try again.
    pub expected_back: Duration,
}

impl ObjectSettings {
    /// The defaults, for a worker whose keys begin with `root`.
    #[must_use]
    pub fn new(root: impl Into<String>) -> Self {
        Self {
            root: root.into(),
            segment_bytes: 128 << 20,
            part_bytes: 8 << 20,
            parts_in_flight: 4,
            writers: 16,
            making_bytes: 16 << 20,
            read_memory_bytes: 64 << 20,
            answers_ahead: 8,
            index_cache_bytes: 16 << 20,
            cache_disks: Vec::new(),
            cache_bytes: 0,
            is_below_disks: false,
            expected_back: Duration::from_secs(120),
        }
    }
}
