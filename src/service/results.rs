//! What reducers are to expect: the reported block ids of partitions as Java's bitmap.
//!
//! A request names any number of partitions, repeated at will, and an answer is as large as what was reported; so
//! partitions are bounded and each is asked once, sets are shared out of the lock a few at a time, and whatever takes
//! more than about a millisecond is done on a blocking thread. Memory for the merged set and the answer is charged
//! before either is made.

use std::sync::Arc;

use bytes::Bytes;
use croaring::Treemap;
use tokio::time::timeout;

use crate::app::{PartitionRecords, ShuffleState};
use crate::budget::heap::HeapFull;
use crate::budget::{Charge, HeapKind};
use crate::durability::IdSet;
use uniffle_wire::bitmap;
use uniffle_wire::types::PartitionId;

use super::ServiceError;
use super::aside::aside;
use super::known::shuffle_of;
use super::read::Reads;

/// Above this many ids a result is built on a blocking thread: about a millisecond when no two are neighbours. What is asked
/// for counts and not what else the shuffle has: every reducer asks, and a hop to another thread takes longer than its ids.
const INLINE_IDS_MAX: u64 = 10_000;

/// ... or partitions that are asked.
const INLINE_PARTITIONS_MAX: usize = 1000;

/// A record number on its way: copied, in a message, and encoded.
const RECORD_BYTES: u64 = 64;

/// Sets shared under one hold of the shuffle's lock.
const SETS_AT_ONCE: usize = 1024;

/// Bits of a block id (docs/protocol.md §3.1): they add up to 63.
const BLOCK_ID_BITS: i32 = 63;

/// Bits of the task attempt when a client does not tell its layout.
const TASK_BITS_DEFAULT: i32 = 21;

/// Reported ids, as they are answered.
#[derive(Debug)]
pub struct Results {
    /// Java's bitmap.
    pub bitmap: Bytes,
    /// Record numbers by task attempt, per partition, where clients reported them.
    pub records: Vec<PartitionRecords>,
    /// To be kept until the bytes are on their way.
    pub held: Charge,
}

impl Reads {
    /// The reported ids of `partitions` as Java's bitmap; a partition without reports has none.
    ///
    /// # Errors
    /// Unknown app or shuffle: after its application has expired and is back, or after a restart without disks, no ids
    /// would be taken for an empty shuffle. Too many partitions, a layout whose widths are not 1..=31 each and 63 together, reports that may be
    /// missing, a shuffle that an earlier process may have known, or no heap for the answer in time.
    pub async fn results(
        &self,
        app: &str,
        shuffle: i32,
        partitions: &[i32],
        layout: Option<(i32, i32, i32)>,
    ) -> Result<Results, ServiceError> {
        let app = self.known.touched_app(app)?;
        if let Some(layout) = layout {
            check_layout(layout)?;
        }
        let task_bits = layout.map_or(TASK_BITS_DEFAULT, |(_, _, task)| task);
        app.learn_task_bits(task_bits.unsigned_abs());
        let (size, max) = (partitions.len(), self.partitions_max);
        if size > max {
            return Err(ServiceError::FieldTooLarge { field: "partitions", size, unit: "entries", max });
        }
        let answers = self.memory.heap().of(HeapKind::Answers);
        let Some((_, shuffle)) = shuffle_of(&app, shuffle) else {
            return match self.tiers.metadata().and_then(|tier| tier.metadata_gap()) {
                None => Err(ServiceError::NotRegisteredPart(format!("shuffle {}/{shuffle}", app.id()))),
                Some(reason) => Err(self.refuse_unknown(app.id().as_str(), shuffle, &reason)),
            };
        };
        if let Some(reason) = shuffle.ledger().incomplete() {
            let key = shuffle.key();
            let text = format!("results of shuffle {key} are refused, reports may be missing: {reason}");
            return Err(ServiceError::Lost(text));
        }
        let are_few = size <= INLINE_PARTITIONS_MAX;
        let partitions = partitions.to_vec();
        let asked = Arc::clone(&shuffle);
        let (sets, partitions, numbers) = aside(are_few, move || Sets::of(&asked, partitions)).await?;
        let is_small = are_few && sets.are_small() && numbers <= INLINE_IDS_MAX;
        let (sets, answer_bytes) = aside(is_small, move || sets.weighed()).await?;
        let answer_bytes = answer_bytes + RECORD_BYTES * numbers;
        let charged = timeout(self.heap_wait, answers.charge(answer_bytes));
        let full = |refusal| ServiceError::NoHeap(HeapFull::of(HeapKind::Answers, refusal));
        let mut held = match charged.await {
            Ok(charged) => charged.map_err(full)?,
            Err(_elapsed) => answers.try_charge(answer_bytes).map_err(full)?,
        };
        let made = move || (bitmap::encode(&sets.merged()), shuffle.records().lock().of(&partitions));
        let (bitmap, records) = aside(is_small, made).await?;
        let unused = held.bytes().saturating_sub(bitmap.len() as u64 + RECORD_BYTES * numbers);
        drop(held.split_up_to(unused));
        Ok(Results { bitmap, records, held })
    }

    fn refuse_unknown(&self, app: &str, shuffle: i32, reason: &str) -> ServiceError {
        self.known.metrics.unknown_shuffles_refused.inc();
        ServiceError::Lost(format!("whether shuffle {app}/{shuffle} was registered is not known: {reason}"))
    }
}

/// Each of `partitions` once.
fn distinct(mut partitions: Vec<i32>) -> Vec<PartitionId> {
    partitions.sort_unstable();
    partitions.dedup();
    partitions.into_iter().map(PartitionId).collect()
}

/// The sets of a request, shared with the shuffle.
struct Sets(Vec<IdSet>);

impl Sets {
    /// Of each of `partitions` once; also which these are, and how many record numbers they have.
    fn of(shuffle: &ShuffleState, partitions: Vec<i32>) -> (Self, Vec<PartitionId>, u64) {
        let mut sets = Vec::new();
        let partitions = distinct(partitions);
        for some in partitions.chunks(SETS_AT_ONCE) {
            let ids = shuffle.block_ids().lock();
            sets.extend(some.iter().filter_map(|partition| ids.set(*partition)));
        }
        let numbers = shuffle.records().lock().count(&partitions) as u64;
        (Self(sets), partitions, numbers)
    }

    /// Whether there are at most [`INLINE_IDS_MAX`] ids; ends at the first part that is beyond.
    fn are_small(&self) -> bool {
        let mut left = INLINE_IDS_MAX;
        let mut fit = |ids: u64| {
            let less = left.checked_sub(ids);
            left = less.unwrap_or_default();
            less.is_some()
        };
        self.0.iter().all(|set| match set {
            IdSet::Few(ids) => fit(ids.len() as u64),
            IdSet::Many(ids) => ids.map.values().all(|part| fit(part.cardinality())),
        })
    }

    /// With what the merged set and the answer take at most.
    fn weighed(self) -> (Self, u64) {
        let answer_bytes = self.0.iter().map(IdSet::bitmap_bytes).sum();
        (self, answer_bytes)
    }

    fn merged(self) -> Treemap {
        let mut all = Treemap::new();
        for set in self.0 {
            set.add_to(&mut all);
        }
        all
    }
}

fn check_layout((sequence, partition, task): (i32, i32, i32)) -> Result<(), ServiceError> {
    let widths = [sequence, partition, task];
    let legal =
        widths.iter().all(|bits| (1..=31).contains(bits)) && widths.iter().sum::<i32>() == BLOCK_ID_BITS;
    if legal {
        return Ok(());
    }
    Err(ServiceError::InvalidField {
        field: "blockIdLayout",
        value: widths.iter().map(|bits| i64::from(*bits)).sum(),
        allowed: "three widths of 1 to 31 bits that add up to 63 are allowed",
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn layouts() {
        for legal in [(18, 24, 21), (21, 20, 22), (31, 1, 31)] {
            assert!(check_layout(legal).is_ok());
        }
        for illegal in [(0, 32, 31), (32, 10, 21), (-1, 32, 32), (18, 24, 20), (i32::MAX, i32::MAX, 65)] {
            assert!(check_layout(illegal).is_err());
        }
    }

    #[test]
    fn few_ids_are_answered_at_once_however_they_are_kept() {
        let many =
            |ids: std::ops::Range<u64>| IdSet::Many(std::sync::Arc::new(ids.map(|id| id << 31).collect()));
        let (few, most) = (IdSet::Few(vec![1, 2, 3]), INLINE_IDS_MAX);
        assert!(Sets(Vec::new()).are_small());
        assert!(Sets(vec![few.clone(), many(0..most - 3)]).are_small());
        assert!(!Sets(vec![few.clone(), many(0..most - 2)]).are_small());
        assert!(!Sets(vec![many(0..most + 1), few]).are_small());
    }

    #[test]
    fn partitions_are_asked_once_each() {
        assert_eq!(distinct(vec![3, 1, 3, 3, -1]), [-1, 1, 3].map(PartitionId));
    }
}
