//! Reads of a partition's memory: docs/protocol.md §3.4 over batches in age order and the active
//! list.
//!
//! The blocks that are not hidden have no duplicate ids (commit ensures that), so a cursor
//! identifies one position. It is found through the id tables, not by a scan.

use bytes::Bytes;
use croaring::Treemap;
use smallvec::SmallVec;

use super::list::{BlockList, Gather};
use crate::region::Slice;
use uniffle_wire::types::{BlockId, BlockMeta, TaskAttemptId};

/// Maximum number of blocks in one response, which limits the time under the buffer's lock. Clients
/// request by bytes; with tiny blocks a response would be mostly header (36 B per block). A client
/// continues from its cursor until a response is empty, so a short response is harmless.
pub const READ_BLOCKS_MAX: usize = 16 << 10;

/// Heap of one block of a response: its metadata and its entry in the header, including spare room
/// of growing lists.
const ANSWERED_BLOCK_BYTES: u64 = 128;
/// Heap of one piece of a response: the slice and its `Bytes`, including spare room of growing
/// lists.
const ANSWERED_PIECE_BYTES: u64 = 192;

/// Pieces smaller than this may be copied together, because a separate frame costs more than the
/// copy.
pub const SMALL_PIECE_BYTES: usize = 4 << 10;

/// Returns the maximum heap of a response with `blocks` blocks, each a separate piece.
#[must_use]
pub fn answer_heap_bytes(blocks: usize) -> u64 {
    blocks as u64 * (ANSWERED_BLOCK_BYTES + ANSWERED_PIECE_BYTES)
}

/// The result of a memory read.
#[derive(Debug, Default)]
pub struct MemoryRead {
    /// The blocks, in the order of their bytes in `data`.
    pub blocks: Vec<BlockMeta>,
    /// The bytes, with neighbours merged.
    pub data: Vec<Bytes>,
    /// Total bytes.
    pub length: u64,
    /// True when no limit was reached, so there was nothing more. Always true for an empty result.
    pub is_end: bool,
}

/// Blocks found under the lock, still as slices. The conversion to `Bytes` happens after the lock
/// is released.
#[derive(Debug)]
pub(super) struct BlockSlices {
    blocks: Vec<BlockMeta>,
    slices: Vec<Slice>,
    length: u64,
    is_end: bool,
}

impl MemoryRead {
    /// Returns the heap that the result needs.
    #[must_use]
    pub fn heap_bytes(&self) -> u64 {
        self.blocks.len() as u64 * ANSWERED_BLOCK_BYTES + self.data.len() as u64 * ANSWERED_PIECE_BYTES
    }

    /// Returns the additional bytes that copies of its small pieces would need.
    #[must_use]
    pub fn small_bytes(&self) -> u64 {
        let small = self.data.iter().map(Bytes::len).filter(|bytes| *bytes < SMALL_PIECE_BYTES);
        small.map(|bytes| bytes as u64).sum()
    }
}

impl From<BlockSlices> for MemoryRead {
    fn from(found: BlockSlices) -> Self {
        let BlockSlices { blocks, slices, length, is_end } = found;
        Self { blocks, data: slices.into_iter().map(Slice::into_bytes).collect(), length, is_end }
    }
}

/// Size at which a read from memory ends.
#[derive(Debug, Clone, Copy)]
pub struct ReadLimit {
    /// Number of bytes. The last block may exceed it.
    pub bytes: u64,
    /// Number of blocks, at most [`READ_BLOCKS_MAX`].
    pub blocks: usize,
}

/// Walks `lists` from the block after `after` (from the head, if `after` is unknown) until `limit`
/// is reached. Returns at least one block if any qualifies.
pub(super) fn walk(
    lists: &SmallVec<[&BlockList; 8]>,
    after: Option<BlockId>,
    limit: ReadLimit,
    tasks: Option<&Treemap>,
) -> BlockSlices {
    let (limit_bytes, limit_blocks) = (limit.bytes, limit.blocks.clamp(1, READ_BLOCKS_MAX));
    // A hidden block may be present again after a resend, and readers know only the resent copy.
    let shown = |list: &BlockList, id| list.find(id).filter(|at| !list.is_hidden(*at));
    let place = |id| lists.iter().enumerate().find_map(|(n, list)| Some((n, shown(list, id)? + 1)));
    let (first, mut from) = after.and_then(place).unwrap_or((0, 0));
    let mut filter = CachedTaskFilter { tasks, last: None };
    let mut gather = Gather::default();
    let mut blocks = Vec::new();
    let mut length = 0;
    'all: for list in &lists[first.min(lists.len())..] {
        for at in from..list.len() {
            if list.is_hidden(at) || !filter.admits(list.task(at)) {
                continue;
            }
            let meta = list.meta(at);
            list.gather(at, &mut gather);
            blocks.push(meta);
            length += u64::from(meta.length);
            if length >= limit_bytes || blocks.len() >= limit_blocks {
                break 'all;
            }
        }
        from = 0;
    }
    let full = length >= limit_bytes || blocks.len() >= limit_blocks;
    let is_end = !full || blocks.is_empty();
    BlockSlices { blocks, slices: gather.into_slices(), length, is_end }
}

/// The filter with its last verdict. Blocks of a request are adjacent and belong to one task
/// attempt.
struct CachedTaskFilter<'a> {
    tasks: Option<&'a Treemap>,
    last: Option<(TaskAttemptId, bool)>,
}

impl CachedTaskFilter<'_> {
    fn admits(&mut self, task: TaskAttemptId) -> bool {
        let Some(tasks) = self.tasks else { return true };
        if let Some((last, verdict)) = self.last
            && last == task
        {
            return verdict;
        }
        let verdict = tasks.contains(task.0.cast_unsigned());
        self.last = Some((task, verdict));
        verdict
    }
}
