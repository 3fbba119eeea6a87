//! Generates the messages of each task: their partitions and blocks.
//!
//! Invariant: the messages of a task depend only on the plan, the task's number and the limits of
//! its messages, so that runs with the same options send the same blocks. The bytes of a block
//! follow from its id ([`super::content`]).

use std::collections::HashMap;
use std::sync::Arc;

use uniffle_client::block::IdLayout;
use uniffle_wire::types::{PartitionId, TaskAttemptId};

use crate::content::{BlockDescription, ContentPool, SplitMix};

/// Layout of all block ids.
pub(crate) const LAYOUT: IdLayout = IdLayout::SPARK;
/// Separates the random numbers of a plan from others with the same seed.
const SEED_TAG: u64 = 0x5eed;
/// Maximum number of partitions that the layout allows.
pub(crate) const PARTITIONS_MAX: u32 = 1 << 20;

/// One block of a message.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct PlannedBlock {
    pub(crate) id: i64,
    pub(crate) block: BlockDescription,
}

/// Content of one `sendShuffleData`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct PlannedMessage {
    pub(crate) task: TaskAttemptId,
    pub(crate) partitions: Vec<(PartitionId, Vec<PlannedBlock>)>,
    pub(crate) payload_bytes: u64,
    pub(crate) blocks: usize,
}

/// Size of one message.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct MessageShape {
    /// Minimum payload. The message ends with the block that reaches it.
    pub(crate) bytes: u64,
    pub(crate) partitions: u32,
}

/// Parameters of the generated work.
#[derive(Clone)]
pub(crate) struct WorkPlan {
    pub(crate) pool: Arc<ContentPool>,
    pub(crate) seed: u64,
    pub(crate) partitions: u32,
    /// Shapes, one of which is drawn for each message.
    messages: Arc<[MessageShape]>,
    /// Prefix sums of the partitions' weights. Empty if all weights are equal.
    cumulative_weights: Arc<[f64]>,
}

impl WorkPlan {
    /// Creates a plan in which partition n has the weight 1/(n+1)^`skew` (0 = equal weights).
    pub(crate) fn new(pool: Arc<ContentPool>, seed: u64, partitions: u32, skew: f64) -> Self {
        let skewed = if skew > 0.0 { partitions } else { 0 };
        let cumulative_weights = prefix_sums((0..skewed).map(|n| (f64::from(n) + 1.0).powf(-skew)));
        let message = MessageShape { bytes: 14 << 20, partitions: partitions.min(8) };
        Self { pool, seed, partitions, messages: [message].into(), cumulative_weights }
    }

    /// Returns the plan with messages of one shape. 0 partitions mean all.
    pub(crate) fn with_messages(self, bytes: u64, partitions: u32) -> Self {
        let partitions = if partitions == 0 { self.partitions } else { partitions };
        self.with_shapes(&[MessageShape { bytes, partitions }])
    }

    /// Returns the plan with messages of `shapes`, which must not be empty.
    pub(crate) fn with_shapes(self, shapes: &[MessageShape]) -> Self {
        let clamped = |shape: &MessageShape| MessageShape {
            bytes: shape.bytes.max(1),
            partitions: shape.partitions.clamp(1, self.partitions),
        };
        Self { messages: shapes.iter().map(clamped).collect(), ..self }
    }

    /// Returns the plan with the given weights of the partitions.
    pub(crate) fn with_weights(self, weights: &[u64]) -> Self {
        Self { cumulative_weights: prefix_sums(weights.iter().map(|&weight| weight as f64)), ..self }
    }

    /// Returns the endless sequence of messages of `task`.
    pub(crate) fn messages_of(&self, task: u32) -> TaskMessages {
        let mut random = SplitMix::new(self.seed ^ (u64::from(task) << 32 | SEED_TAG));
        let first = u32::try_from(random.below(u64::from(self.partitions)))
            .expect("a remainder is less than its u32 divisor");
        let id = TaskAttemptId(i64::from(task));
        TaskMessages { plan: self.clone(), task: id, random, round_robin: first, sequences: HashMap::new() }
    }
}

/// Returns the prefix sums.
fn prefix_sums(weights: impl Iterator<Item = f64>) -> Arc<[f64]> {
    let mut sum = 0.0;
    let add = |weight| {
        sum += weight;
        sum
    };
    weights.map(add).collect()
}

/// Generator of one task's messages.
pub(crate) struct TaskMessages {
    plan: WorkPlan,
    task: TaskAttemptId,
    random: SplitMix,
    round_robin: u32,
    sequences: HashMap<u32, u32>,
}

impl TaskMessages {
    /// Generates the next message. It exceeds `limit_bytes` by less than one block: it ends with
    /// the block that reaches the limit.
    pub(crate) fn next_message(&mut self, limit_bytes: u64) -> PlannedMessage {
        let shape = self.next_shape();
        let wanted = shape.bytes.min(limit_bytes);
        let mut targets: Vec<u32> = (0..shape.partitions).map(|_| self.next_partition()).collect();
        targets.sort_unstable();
        targets.dedup();
        let mut partitions: Vec<(PartitionId, Vec<PlannedBlock>)> =
            targets.iter().map(|&p| (PartitionId(p.cast_signed()), Vec::new())).collect();
        let (mut payload_bytes, mut blocks) = (0, 0);
        'full: loop {
            for (&partition, (_, planned)) in targets.iter().zip(&mut partitions) {
                let next = self.next_block(partition);
                planned.push(next);
                payload_bytes += u64::from(next.block.length);
                blocks += 1;
                if payload_bytes >= wanted {
                    break 'full;
                }
            }
        }
        partitions.retain(|(_, planned)| !planned.is_empty());
        PlannedMessage { task: self.task, partitions, payload_bytes, blocks }
    }

    fn next_shape(&mut self) -> MessageShape {
        match &*self.plan.messages {
            [only] => *only,
            shapes => {
                let index = self.random.below(shapes.len() as u64);
                shapes[usize::try_from(index).expect("the index is less than the number of shapes")]
            }
        }
    }

    fn next_block(&mut self, partition: u32) -> PlannedBlock {
        let sequence = self.sequences.entry(partition).or_default();
        let id = LAYOUT.block_id(*sequence, PartitionId(partition.cast_signed()), self.task);
        let id = id.expect("options bound partitions and tasks, and 2^21 blocks of a task are not reached").0;
        *sequence += 1;
        PlannedBlock { id, block: self.plan.pool.describe(id) }
    }

    /// Draws a partition by weight, or returns the next in turn if all weights are equal.
    fn next_partition(&mut self) -> u32 {
        let Some(&sum) = self.plan.cumulative_weights.last() else {
            let partition = self.round_robin;
            self.round_robin = (self.round_robin + 1) % self.plan.partitions;
            return partition;
        };
        let point = self.random.unit() * sum;
        let index = self.plan.cumulative_weights.partition_point(|&weight| weight <= point);
        u32::try_from(index).expect("there are at most u32::MAX partitions").min(self.plan.partitions - 1)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn plan(partitions: u32, skew: f64) -> WorkPlan {
        let pool = Arc::new(ContentPool::new(5, "tiny".parse().unwrap()));
        WorkPlan::new(pool, 5, partitions, skew).with_messages(10_000, 4)
    }

    #[test]
    fn task_messages_are_deterministic() {
        let messages = |task| {
            let mut task = plan(100, 1.0).messages_of(task);
            (0..20).map(|_| task.next_message(u64::MAX)).collect::<Vec<_>>()
        };
        assert_eq!(messages(3), messages(3));
        assert_ne!(messages(3), messages(4));
    }

    #[test]
    fn messages_have_requested_size_and_unique_ids() {
        let mut task = plan(100, 0.0).messages_of(7);
        let mut ids = std::collections::HashSet::new();
        for _ in 0..50 {
            let message = task.next_message(u64::MAX);
            assert!((10_000..11_000).contains(&message.payload_bytes));
            assert!((1..=4).contains(&message.partitions.len()));
            for (partition, planned) in &message.partitions {
                for planned in planned {
                    assert!(ids.insert(planned.id));
                    let id = uniffle_wire::types::BlockId(planned.id);
                    assert_eq!(LAYOUT.partition_of(id), i64::from(partition.0));
                }
            }
        }
        assert!(task.next_message(1).blocks == 1, "the limit must cut a message short");
    }

    #[test]
    fn partitions_are_round_robin_without_skew() {
        let counts = |skew| {
            let mut task = plan(50, skew).messages_of(0);
            let mut counts = vec![0_u32; 50];
            for _ in 0..1_000 {
                counts[usize::try_from(task.next_partition()).unwrap()] += 1;
            }
            counts
        };
        assert!(counts(0.0).iter().all(|&n| n == 20));
        let skewed = counts(1.2);
        assert!(skewed[0] > 5 * skewed[10] && skewed.iter().sum::<u32>() == 1_000, "{skewed:?}");
    }
}
