//! Reading a partition's memory: docs/protocol.md §3.4 over batches in age order and the active list.
//!
//! The sequence has no duplicate ids (commit sees to that), so a cursor names one place; it is found through the id
//! tables, not by a scan.

use bytes::Bytes;
use croaring::Treemap;
use smallvec::SmallVec;

use super::list::{BlockList, Gather};
use super::region::Slice;
use uniffle_wire::types::{BlockId, BlockMeta, TaskAttemptId};

/// Most blocks of one answer: what is found in a millisecond, under the buffer's lock. Clients ask by bytes; of tiny blocks
/// an answer would be mostly head (36 B a block). A client goes on from its cursor until an answer is empty, so a short one is fine.
pub const READ_BLOCKS_MAX: usize = 16 << 10;

/// Heap of one block of an answer: what is known of it, its place in the answer's head, with the room that lists grow by.
const ANSWERED_BLOCK_BYTES: u64 = 128;
/// Heap of one piece of an answer: the slice and the `Bytes` made of it, in lists that grow.
const ANSWERED_PIECE_BYTES: u64 = 192;

/// Pieces of fewer bytes may be copied together: below this a frame of its own costs more than the copy.
pub const SMALL_PIECE_BYTES: usize = 4 << 10;

/// What an answer with so many blocks takes of the heap at most, if each is a piece of its own.
#[must_use]
pub fn answer_heap_bytes(blocks: usize) -> u64 {
    blocks as u64 * (ANSWERED_BLOCK_BYTES + ANSWERED_PIECE_BYTES)
}

/// The answer to a memory read.
#[derive(Debug, Default)]
pub struct MemoryRead {
    /// The blocks, in the order of their bytes in `data`.
    pub blocks: Vec<BlockMeta>,
    /// The bytes, neighbours coalesced.
    pub data: Vec<Bytes>,
    /// Bytes in all.
    pub length: u64,
    /// True when there was nothing more: no limit was reached (always true for an empty answer).
    pub is_end: bool,
}

/// What was found, still as slices, so that the lock can go before `Bytes` are made of them.
#[derive(Debug)]
pub(super) struct Found {
    blocks: Vec<BlockMeta>,
    slices: Vec<Slice>,
    length: u64,
    is_end: bool,
}

impl MemoryRead {
    /// What it takes of the heap.
    #[must_use]
    pub fn heap_bytes(&self) -> u64 {
        self.blocks.len() as u64 * ANSWERED_BLOCK_BYTES + self.data.len() as u64 * ANSWERED_PIECE_BYTES
    }

    /// What copies of its small pieces would take beside.
    #[must_use]
    pub fn small_bytes(&self) -> u64 {
        let small = self.data.iter().map(Bytes::len).filter(|bytes| *bytes < SMALL_PIECE_BYTES);
        small.map(|bytes| bytes as u64).sum()
    }
}

impl From<Found> for MemoryRead {
    fn from(found: Found) -> Self {
        let Found { blocks, slices, length, is_end } = found;
        Self { blocks, data: slices.into_iter().map(Slice::into_bytes).collect(), length, is_end }
    }
}

/// Walks `lists` from behind `after` (or from the head, if that is gone) until `limit_bytes` or as many blocks are reached: at
/// least one block if any qualifies, and at most one block more than the bytes.
pub(super) fn walk(
    lists: &SmallVec<[&BlockList; 8]>,
    after: Option<BlockId>,
    (limit_bytes, limit_blocks): (u64, usize),
    tasks: Option<&Treemap>,
) -> Found {
    let limit_blocks = limit_blocks.clamp(1, READ_BLOCKS_MAX);
    // One that is withheld may be there once more, sent again: a reader knows that one only.
    let shown = |list: &BlockList, id| list.find(id).filter(|at| !list.is_withheld(*at));
    let place = |id| lists.iter().enumerate().find_map(|(n, list)| Some((n, shown(list, id)? + 1)));
    let (first, mut from) = after.and_then(place).unwrap_or((0, 0));
    let mut filter = TaskFilter { tasks, last: None };
    let mut gather = Gather::default();
    let mut blocks = Vec::new();
    let mut length = 0;
    'all: for list in &lists[first.min(lists.len())..] {
        for at in from..list.len() {
            if list.is_withheld(at) || !filter.admits(list.task(at)) {
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
    Found { blocks, slices: gather.into_slices(), length, is_end }
}

/// The filter with its last verdict: a request's blocks stand together and are of one task attempt.
struct TaskFilter<'a> {
    tasks: Option<&'a Treemap>,
    last: Option<(TaskAttemptId, bool)>,
}

impl TaskFilter<'_> {
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
