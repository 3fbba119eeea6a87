//! Compares the buffer with a model of plain vectors under random interleavings of fills, commits,
//! aborts, seals, closes, releases and reads.

use proptest::prelude::*;

use super::*;

#[derive(Debug, Clone)]
enum Step {
    /// Reserve and write a block. The id may have been used before.
    Fill {
        id: i64,
        task: i64,
        len: usize,
    },
    /// Reserve and write only a part, to be aborted.
    Partial {
        len: usize,
    },
    /// Commit some of the pending fills, in any order.
    Commit {
        first: prop::sample::Index,
        count: usize,
    },
    Abort(prop::sample::Index),
    Seal,
    /// Close a batch, as its write does.
    Close(prop::sample::Index),
    Release(prop::sample::Index),
    Read {
        after: i64,
        limit: u64,
        filter: Option<i64>,
    },
    DropDead,
}

fn steps() -> impl Strategy<Value = Vec<Step>> {
    let len = prop_oneof![4 => 0usize..300, 4 => 1usize..20_000, 1 => 1usize..400_000];
    let short = prop_oneof![1usize..300, 1usize..50_000];
    let at = any::<prop::sample::Index>();
    let step = prop_oneof![
        6 => (0i64..60, 0i64..4, len).prop_map(|(id, task, len)| Step::Fill { id, task, len }),
        1 => short.prop_map(|len| Step::Partial { len }),
        4 => (at.clone(), 1usize..5).prop_map(|(first, count)| Step::Commit { first, count }),
        1 => at.clone().prop_map(Step::Abort),
        1 => Just(Step::Seal),
        1 => at.clone().prop_map(Step::Close),
        1 => at.prop_map(Step::Release),
        2 => (-1i64..60, 0u64..40_000, prop::option::of(0i64..4))
            .prop_map(|(after, limit, filter)| Step::Read { after, limit, filter }),
        1 => Just(Step::DropDead),
    ];
    prop::collection::vec(step, 1..120)
}

/// Expected visible blocks: batches, oldest first, then the active ones.
#[derive(Debug, Default)]
struct Model {
    batches: Vec<ModelBatch>,
    active: Vec<BlockMeta>,
}

#[derive(Debug)]
struct ModelBatch {
    chain: u64,
    is_open: bool,
    blocks: Vec<BlockMeta>,
}

impl Model {
    fn sequence(&self) -> impl Iterator<Item = &BlockMeta> {
        self.batches.iter().flat_map(|batch| &batch.blocks).chain(&self.active)
    }

    fn push(&mut self, meta: BlockMeta, chain: u64) {
        let batch = self.batches.iter_mut().find(|batch| batch.is_open && batch.chain == chain);
        batch.map_or(&mut self.active, |batch| &mut batch.blocks).push(meta);
    }

    /// Reads after the block `after`, or from the start if it is not visible.
    fn read(&self, after: i64, limit: u64, filter: Option<i64>) -> (Vec<BlockMeta>, bool) {
        let found = self.sequence().position(|block| block.block_id.0 == after);
        let (mut blocks, mut length) = (Vec::new(), 0);
        for block in self.sequence().skip(found.map_or(0, |at| at + 1)) {
            if filter.is_some_and(|task| task != block.task_attempt_id.0) {
                continue;
            }
            blocks.push(*block);
            length += u64::from(block.length);
            if length >= limit {
                break;
            }
        }
        let is_end = blocks.is_empty() || length < limit;
        (blocks, is_end)
    }
}

struct Run {
    memory: Arc<Memory>,
    buffer: Arc<Buffer>,
    funds: Reservation,
    model: Model,
    pending: Vec<(BlockMeta, BlockFill)>,
    partial: Vec<BlockFill>,
    batches: Vec<Arc<SealedBatch>>,
}

impl Run {
    fn new() -> Self {
        // `funds` reserves all but 1 MiB, so that segments shrink and overdrafts happen.
        let memory = memory(48 * MIB);
        let buffer = buffer(&memory);
        let funds = funds(&memory, 47 * MIB);
        let (pending, partial, batches) = (Vec::new(), Vec::new(), Vec::new());
        Self { memory, buffer, funds, model: Model::default(), pending, partial, batches }
    }

    fn step(&mut self, step: Step) {
        match step {
            Step::Fill { id, task, len } => {
                // Different ids have different lengths. A resend may have another length than the
                // copy in memory, which is kept.
                let len = len / 64 * 64 + usize::try_from(id).unwrap();
                self.pending.push(fill(&self.buffer, id, task, len, &mut self.funds));
            }
            Step::Partial { len } => {
                let mut fill = self.buffer.reserve(u32::try_from(len).unwrap(), &mut self.funds).unwrap();
                fill.write(&vec![0xAA; len / 2]);
                self.partial.push(fill);
            }
            Step::Commit { first, count } if !self.pending.is_empty() => self.commit(first, count),
            Step::Abort(at) => {
                if !self.pending.is_empty() {
                    self.pending.swap_remove(at.index(self.pending.len()));
                }
                self.partial.pop();
            }
            Step::Seal => self.seal(),
            Step::Close(at) if !self.batches.is_empty() => self.close(at.index(self.batches.len())),
            Step::Release(at) if !self.batches.is_empty() => {
                let at = at.index(self.batches.len());
                self.buffer.release(&self.batches.remove(at));
                self.model.batches.remove(at);
            }
            Step::Read { after, limit, filter } => self.read(after, limit, filter),
            Step::DropDead => self.buffer.drop_dead(),
            Step::Commit { .. } | Step::Close(_) | Step::Release(_) => {}
        }
        self.check_counters();
    }

    fn commit(&mut self, first: prop::sample::Index, count: usize) {
        let mut blocks = Vec::new();
        for _ in 0..count.min(self.pending.len()) {
            blocks.push(self.pending.swap_remove(first.index(self.pending.len())));
        }
        let mut expected = CommitOutcome::default();
        for (meta, fill) in &blocks {
            if self.model.sequence().any(|block| block.block_id == meta.block_id) {
                expected.duplicate_blocks += 1;
                expected.duplicate_bytes += u64::from(meta.length);
            } else {
                expected.blocks += 1;
                expected.bytes += u64::from(meta.length);
                self.model.push(*meta, fill.chain());
            }
        }
        assert_eq!(self.buffer.commit(blocks, &mut self.funds).unwrap(), expected);
    }

    fn seal(&mut self) {
        let batch = self.buffer.seal();
        assert_eq!(batch.is_some(), !self.model.active.is_empty());
        let Some(batch) = batch else { return };
        let (chain, blocks) = (batch.list().chain.id(), std::mem::take(&mut self.model.active));
        self.model.batches.push(ModelBatch { chain, is_open: true, blocks });
        self.batches.push(batch);
    }

    fn close(&mut self, at: usize) {
        let (batch, model) = (&self.batches[at], &mut self.model.batches[at]);
        model.is_open = false;
        let normal = batch.extent(Distribution::Normal);
        checked_ids(&normal);
        let (mut got, mut expected) = (normal.blocks, model.blocks.clone());
        got.sort_by_key(|block| block.block_id);
        expected.sort_by_key(|block| block.block_id);
        assert_eq!(got, expected);
        let sorted = batch.extent(Distribution::LocalOrder);
        checked_ids(&sorted);
        assert!(sorted.blocks.is_sorted_by_key(|block| block.task_attempt_id));
        if !is_aligned(&sorted) {
            let mut stable = model.blocks.clone();
            stable.sort_by_key(|block| block.task_attempt_id);
            assert_eq!(sorted.blocks, stable);
        }
    }

    fn read(&self, after: i64, limit: u64, filter: Option<i64>) {
        let tasks = filter.map(|task| Treemap::from_iter([task.cast_unsigned()]));
        let cursor = (after != -1).then_some(BlockId(after));
        let got = self.buffer.read(cursor, limit, tasks.as_ref());
        ids(&got);
        assert_eq!((got.blocks, got.is_end), self.model.read(after, limit, filter));
    }

    /// Checks that a client's walk sees every block exactly once, if nothing changes meanwhile.
    fn walk(&self, limit: u64) {
        let (mut cursor, mut seen) = (None, Vec::new());
        loop {
            let read = self.buffer.read(cursor, limit, None);
            ids(&read);
            seen.extend(read.blocks.iter().copied());
            cursor = seen.last().map(|block| block.block_id);
            if read.is_end {
                break;
            }
        }
        assert_eq!(seen, self.model.sequence().copied().collect::<Vec<_>>());
    }

    fn check_counters(&self) {
        let total = |blocks: &[BlockMeta]| blocks.iter().map(|block| u64::from(block.length)).sum::<u64>();
        assert_eq!(self.buffer.active_bytes(), total(&self.model.active));
        assert_eq!(
            self.buffer.in_flight_bytes(),
            self.model.batches.iter().map(|batch| total(&batch.blocks)).sum::<u64>()
        );
        assert_eq!(self.buffer.in_flight_batches(), self.batches.len());
        assert_eq!(self.buffer.block_count(), self.model.sequence().count());
        let paid = self.buffer.block_count() as u64 + self.funds.paid_blocks();
        assert_eq!(self.memory.block_count(), paid);
    }

    fn end(self) {
        let Self { memory, buffer, funds, pending, partial, batches, .. } = self;
        drop((funds, pending, partial));
        for batch in batches {
            buffer.release(&batch);
        }
        if let Some(rest) = buffer.seal() {
            buffer.release(&rest);
        }
        buffer.drop_dead();
        // Only the segments that an empty chain keeps for later blocks are left; a purge frees them
        // too.
        drop(memory.forget(&key()));
        assert_empty(&memory);
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(200))]
    #[test]
    fn buffer_follows_a_vec(steps in steps()) {
        let mut run = Run::new();
        for step in steps {
            run.step(step);
        }
        for limit in [0, 1000, 100_000] {
            run.walk(limit);
        }
        run.end();
    }
}
