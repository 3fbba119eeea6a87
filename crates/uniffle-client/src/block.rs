//! Blocks of writers and readers, and the layouts of block ids (docs/protocol.md §3.1).

use bytes::Bytes;

use uniffle_wire::types::{BlockId, BlockMeta, PartitionId, TaskAttemptId};

/// Division of the 63 bits of a block id into fields.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct IdLayout {
    /// Upper bits: sequence number of the block.
    pub sequence_bits: u32,
    /// Middle bits: partition.
    pub partition_bits: u32,
    /// Lower bits: task attempt.
    pub task_bits: u32,
}

impl IdLayout {
    /// Java's `DEFAULT`, which also applies to a request without a layout.
    pub const HISTORIC: Self = Self { sequence_bits: 18, partition_bits: 24, task_bits: 21 };
    /// Layout of Uniffle's Spark clients since 0.9 with default settings.
    pub const SPARK: Self = Self { sequence_bits: 21, partition_bits: 20, task_bits: 22 };

    /// Returns the layout that Spark's clients since 0.9 derive from
    /// `spark.rss.blockId.maxPartitions`, `spark.task.maxFailures` and speculation. Returns `None`
    /// if the fields do not fit.
    #[must_use]
    pub fn for_spark(partitions_max: u32, failures_max: u32, speculation: bool) -> Option<Self> {
        let partition_bits = bit_length(partitions_max.checked_sub(1)?);
        let task_bits = partition_bits + Self::attempt_bits(failures_max, speculation);
        let sequence_bits = 63_u32.checked_sub(partition_bits + task_bits)?;
        // Bits that the sequence number cannot use, rounded up to an even number, are split between
        // the other two fields.
        let surplus = sequence_bits.saturating_sub(31).next_multiple_of(2);
        let layout = Self {
            sequence_bits: sequence_bits - surplus,
            partition_bits: partition_bits + surplus / 2,
            task_bits: task_bits + surplus / 2,
        };
        layout.is_legal().then_some(layout)
    }

    /// Returns the number of bits that distinguish the attempts of one task in a task attempt id.
    #[must_use]
    pub fn attempt_bits(failures_max: u32, speculation: bool) -> u32 {
        bit_length((failures_max.max(1) - 1).saturating_add(u32::from(speculation)))
    }

    /// Returns true if the three fields have 1 to 31 bits each and 63 in total.
    #[must_use]
    pub fn is_legal(self) -> bool {
        let fields = [self.sequence_bits, self.partition_bits, self.task_bits];
        fields.iter().all(|bits| (1..=31).contains(bits)) && fields.iter().sum::<u32>() == 63
    }

    /// Composes a block id. Returns `None` if a part does not fit its bits or the layout is not
    /// legal.
    #[must_use]
    pub fn block_id(self, sequence: u32, partition: PartitionId, task: TaskAttemptId) -> Option<BlockId> {
        let Self { sequence_bits, partition_bits, task_bits } = self;
        if !self.is_legal() {
            return None;
        }
        let fits = |part: i64, bits: u32| part >= 0 && part >> bits == 0;
        let (sequence, partition, task) = (i64::from(sequence), i64::from(partition.0), task.0);
        let all_fit =
            fits(sequence, sequence_bits) && fits(partition, partition_bits) && fits(task, task_bits);
        all_fit.then_some(BlockId(sequence << (partition_bits + task_bits) | partition << task_bits | task))
    }

    /// Returns the partition field of `id`.
    #[must_use]
    pub fn partition_of(self, id: BlockId) -> i64 {
        (id.0 >> self.task_bits) & ((1 << self.partition_bits) - 1)
    }

    /// Returns the task attempt field of `id`.
    #[must_use]
    pub fn task_of(self, id: BlockId) -> TaskAttemptId {
        TaskAttemptId(id.0 & ((1 << self.task_bits) - 1))
    }
}

/// Returns the id of attempt number `attempt` at task number `task`, as Spark's clients compute it
/// (docs/protocol.md §3.1). Returns `None` if the attempt number does not fit its bits.
#[must_use]
pub fn task_attempt_id(task: u32, attempt: u32, attempt_bits: u32) -> Option<TaskAttemptId> {
    let fits = bit_length(attempt) <= attempt_bits && attempt_bits < 31;
    fits.then(|| TaskAttemptId(i64::from(task) << attempt_bits | i64::from(attempt)))
}

fn bit_length(number: u32) -> u32 {
    u32::BITS - number.leading_zeros()
}

/// A block and its metadata.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Block {
    /// Ids, lengths and checksum.
    pub meta: BlockMeta,
    /// Payload.
    pub data: Bytes,
}

impl Block {
    /// Creates a block of `data` with its CRC. The uncompressed length is that of `data`.
    ///
    /// # Panics
    /// Panics if `data` is longer than an `i32` can express.
    #[must_use]
    pub fn new(block_id: BlockId, task_attempt_id: TaskAttemptId, data: Bytes) -> Self {
        let length = u32::try_from(data.len()).ok().filter(|&len| i32::try_from(len).is_ok());
        let length = length.expect("lengths of the protocol fit into i32");
        let crc = crc32fast::hash(&data);
        let meta = BlockMeta { block_id, task_attempt_id, length, uncompressed_length: length, crc };
        Self { meta, data }
    }
}

/// Creates a block of `length` bytes for the unit tests. Its content is derived from its id.
#[cfg(test)]
pub(crate) fn sample(partition: PartitionId, task: TaskAttemptId, sequence: u32, length: usize) -> Block {
    let id = IdLayout::SPARK.block_id(sequence, partition, task).unwrap();
    let content: Vec<u8> = id.0.to_le_bytes().into_iter().cycle().take(length).collect();
    Block::new(id, task, content.into())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn block_ids_match_the_vectors_of_the_protocol() {
        let id = |layout: IdLayout| layout.block_id(1, PartitionId(2), TaskAttemptId(3));
        assert_eq!(id(IdLayout::HISTORIC), Some(BlockId(35_184_376_283_139)));
        assert_eq!(id(IdLayout::SPARK), Some(BlockId(4_398_054_899_715)));
        assert_eq!(IdLayout::SPARK.partition_of(BlockId(4_398_054_899_715)), 2);
        assert_eq!(IdLayout::SPARK.task_of(BlockId(4_398_054_899_715)), TaskAttemptId(3));
    }

    #[test]
    fn layout_derivation_matches_spark() {
        assert_eq!(IdLayout::for_spark(1 << 20, 4, false), Some(IdLayout::SPARK));
        let speculating = IdLayout { sequence_bits: 20, partition_bits: 20, task_bits: 23 };
        assert_eq!(IdLayout::for_spark(1 << 20, 4, true), Some(speculating));
        // 10 + 12 bits leave 41 for the sequence number, of which 31 can be used.
        let few = IdLayout { sequence_bits: 31, partition_bits: 15, task_bits: 17 };
        assert_eq!(IdLayout::for_spark(1 << 10, 4, false), Some(few));
        assert_eq!(IdLayout::for_spark(0, 4, false), None);
        assert_eq!(IdLayout::for_spark(u32::MAX, 4, false), None);
        assert_eq!(task_attempt_id(5, 3, 2), Some(TaskAttemptId(23)));
        assert_eq!(task_attempt_id(5, 4, 2), None);
    }

    #[test]
    fn oversized_id_parts_are_refused() {
        let spark = IdLayout::SPARK;
        assert_eq!(spark.block_id(1 << 21, PartitionId(0), TaskAttemptId(0)), None);
        assert_eq!(spark.block_id(0, PartitionId(1 << 20), TaskAttemptId(0)), None);
        assert_eq!(spark.block_id(0, PartitionId(-1), TaskAttemptId(0)), None);
        assert_eq!(spark.block_id(0, PartitionId(0), TaskAttemptId(-1)), None);
        let broken = IdLayout { sequence_bits: 32, partition_bits: 10, task_bits: 21 };
        assert_eq!(broken.block_id(0, PartitionId(0), TaskAttemptId(0)), None);
    }
}
