//! Expected block ids for reducers: the reported ids of partitions as Java's bitmap.
//!
//! A request may name any number of partitions, repeatedly, and a response is as large as the
//! reports. The number of partitions is therefore bounded, and each is queried once. Sets are
//! cloned under the lock, at most 1024 at a time, and work of more than about a millisecond runs on
//! a blocking thread. The response is encoded while the sets are merged, without a union in memory.
//!
//! The memory of a response is charged before it is built. Sets are cloned before their charge,
//! since clones share most of their heap. Ids on disk are charged after they are read. Results of a
//! shuffle whose reports may be missing must be refused, because short results lose data silently.

use std::sync::Arc;

use bytes::Bytes;

use crate::app::{Reports, ShuffleState};
use crate::clock::timeout;
use crate::log::{IdSet, LOOKUP_BYTES, PartitionRecordCounts, union};
use uniffle_base::budget::heap::HeapFull;
use uniffle_base::budget::{Budget, Charge, HeapKind, NoCapacity};
use uniffle_wire::bitmap;
use uniffle_wire::types::PartitionId;

use super::Reads;
use crate::service::ServiceError;
use crate::service::ingest::spill::{StoredIds, refused};
use crate::service::parts::{HEAP_WAIT, PARTITIONS_PER_REQUEST_MAX, run_blocking, shuffle_of};

/// Number of ids above which a result is built on a blocking thread: about a millisecond if no two
/// are adjacent. Only requested ids count, because every reducer asks, and a thread switch takes
/// longer than a few ids.
const INLINE_IDS_MAX: u64 = 10_000;

/// Number of partitions above which a result is built on a blocking thread.
const INLINE_PARTITIONS_MAX: usize = 1000;

/// Heap of a record count in a response: copied, in a message, and encoded.
const RECORD_BYTES: u64 = 64;

/// Heap of a cloned set besides its ids: the set itself and the ids that are decoded at a time.
const COPY_BYTES: u64 = 2304;

/// Number of partitions whose sets are cloned under one acquisition of the shuffle's lock.
const SETS_AT_ONCE: usize = 1024;

/// Number of bits of a block id (docs/protocol.md §3.1), the sum of its parts.
const BLOCK_ID_BITS: i32 = 63;

/// Bits of the task attempt if the client does not send its layout.
const TASK_BITS_DEFAULT: i32 = 21;

/// Reported ids as sent to the client.
#[derive(Debug)]
pub struct Results {
    /// Java's bitmap.
    pub bitmap: Bytes,
    /// Record counts by task attempt, per partition, as far as clients reported them.
    pub records: Vec<PartitionRecordCounts>,
    /// Charge to hold until the bytes are sent.
    pub held: Charge,
}

/// Widths in bits of a block id's fields, as sent.
#[derive(Debug, Clone, Copy)]
pub struct IdWidths {
    /// Sequence number.
    pub sequence: i32,
    /// Partition id.
    pub partition: i32,
    /// Task attempt id.
    pub task: i32,
}

impl Reads {
    /// Returns the reported ids of `partitions` as Java's bitmap. A partition without reports has
    /// none.
    ///
    /// # Errors
    /// - Unknown app or shuffle. An empty result would be wrong, because the application may have
    ///   expired and returned, or the worker restarted without disks.
    /// - Too many partitions, or a layout whose widths are not 1..=31 each and 63 together.
    /// - Reports that may be missing, or a shuffle that an earlier process may have known.
    /// - Ids on disk that cannot be read.
    /// - No heap for the response in time.
    pub async fn results(
        &self,
        app: &str,
        shuffle: i32,
        partitions: &[i32],
        layout: Option<IdWidths>,
    ) -> Result<Results, ServiceError> {
        let app = self.parts.touched_app(app)?;
        if let Some(layout) = layout {
            check_layout(layout)?;
        }
        let task_bits = layout.map_or(TASK_BITS_DEFAULT, |widths| widths.task);
        app.client.learn_task_bits(task_bits.unsigned_abs());
        let (size, max) = (partitions.len(), PARTITIONS_PER_REQUEST_MAX);
        if size > max {
            return Err(ServiceError::FieldTooLarge { field: "partitions", size, unit: "entries", max });
        }
        let answers = self.parts.memory.heap().of(HeapKind::Answers);
        let Some((_, shuffle)) = shuffle_of(&app, shuffle) else {
            return match self.parts.tiers.metadata().and_then(|tier| tier.metadata_gap()) {
                None => Err(ServiceError::NotRegisteredPart(format!("shuffle {}/{shuffle}", app.id()))),
                Some(reason) => Err(self.refuse_unknown(app.id().as_str(), shuffle, &reason)),
            };
        };
        if let Some(reason) = shuffle.ledger.incomplete() {
            let key = shuffle.key();
            let text =
                format!("results of shuffle {key} are refused because reports may be missing: {reason}");
            return Err(ServiceError::Lost(text));
        }
        if !shuffle.reports.block_ids.lock().has_runs() {
            let weight = self.weigh(&shuffle, partitions).await?;
            let held = self.charged(answers, weight.bytes).await?;
            // The closure owns the charge: if the caller is dropped, work that has begun still
            // finishes.
            let (is_small, of) = (weight.is_small, Arc::clone(&shuffle));
            let answer =
                run_blocking(&self.parts.pool, is_small, move || weight.answer(&of.reports, held)).await?;
            // The response may lack ids that were moved to disk meanwhile.
            if !shuffle.reports.block_ids.lock().has_runs() {
                return answer;
            }
        }
        self.read_runs(shuffle, distinct(partitions.to_vec()), answers).await
    }

    /// Returns the results of a shuffle with ids on disk. Each set from disk is charged after it is
    /// read, because its size is not known before.
    async fn read_runs(
        &self,
        shuffle: Arc<ShuffleState>,
        partitions: Vec<PartitionId>,
        answers: &Budget,
    ) -> Result<Results, ServiceError> {
        let record_counts = shuffle.reports.records.lock().count(&partitions) as u64;
        let mut held = self.charged(answers, LOOKUP_BYTES + RECORD_BYTES * record_counts).await?;
        let mut sets = Vec::new();
        for some in partitions.chunks(SETS_AT_ONCE) {
            let StoredIds { sets: in_memory, runs } = StoredIds::of(&shuffle.reports, some);
            held.merge(self.charged(answers, in_memory.iter().map(answer_bytes).sum()).await?);
            sets.extend(in_memory);
            for run in runs {
                for partition in some {
                    let set = run.ids(*partition).await.map_err(refused)?;
                    held.merge(self.charged(answers, answer_bytes(&set) + set.heap_bytes()).await?);
                    sets.push(set);
                }
            }
        }
        let weight = Weight { partitions, record_counts, bytes: held.bytes(), is_small: false };
        run_blocking(&self.parts.pool, false, move || weight.encoded(&shuffle.reports, &Sets(sets), held))
            .await
    }

    /// Waits for the heap of a response, at most as long as a request may wait.
    async fn charged(&self, answers: &Budget, bytes: u64) -> Result<Charge, ServiceError> {
        match timeout(HEAP_WAIT, answers.charge(bytes)).await {
            Ok(charged) => charged.map_err(full),
            Err(_elapsed) => answers.try_charge(bytes).map_err(full),
        }
    }

    /// Returns the weight of a response. More than a few ids are counted on a blocking thread.
    async fn weigh(&self, shuffle: &Arc<ShuffleState>, partitions: &[i32]) -> Result<Weight, ServiceError> {
        let are_few = partitions.len() <= INLINE_PARTITIONS_MAX;
        let partitions = partitions.to_vec();
        if are_few
            && let Some(weight) = Weight::of(&shuffle.reports, distinct(partitions.clone()), INLINE_IDS_MAX)
        {
            return Ok(weight);
        }
        let shuffle = Arc::clone(shuffle);
        let weight = move || Weight::of(&shuffle.reports, distinct(partitions), u64::MAX);
        let weight = run_blocking(&self.parts.pool, false, weight).await?;
        // Without a limit on ids the weight is always returned.
        weight.map(|weight| Weight { is_small: false, ..weight }).ok_or(ServiceError::Stopping)
    }

    fn refuse_unknown(&self, app: &str, shuffle: i32, reason: &str) -> ServiceError {
        self.parts.metrics.unknown_shuffles_refused.inc();
        ServiceError::Lost(format!(
            "cannot determine whether shuffle {app}/{shuffle} was registered: {reason}"
        ))
    }
}

/// Returns `partitions` without duplicates.
fn distinct(mut partitions: Vec<i32>) -> Vec<PartitionId> {
    partitions.sort_unstable();
    partitions.dedup();
    partitions.into_iter().map(PartitionId).collect()
}

/// Size of a response before anything is charged for it, since the request may have to wait for
/// heap.
struct Weight {
    /// The partitions, without duplicates.
    partitions: Vec<PartitionId>,
    /// Number of record counts.
    record_counts: u64,
    /// Heap of the ids while they are copied, merged and encoded, and of the record counts.
    bytes: u64,
    /// True if the response is built inline.
    is_small: bool,
}

impl Weight {
    /// Returns the weight, or `None` if there are more than `ids_max` ids or record counts. Stops
    /// at the first excess.
    fn of(reports: &Reports, partitions: Vec<PartitionId>, ids_max: u64) -> Option<Self> {
        let (mut bytes, mut remaining) = (0, ids_max);
        for some in partitions.chunks(SETS_AT_ONCE) {
            let sets = Sets::of(reports, some);
            remaining = sets.leave_of(remaining)?;
            bytes += sets.bytes();
        }
        let record_counts = reports.records.lock().count(&partitions) as u64;
        let is_small = record_counts <= ids_max;
        is_small.then(|| Self {
            partitions,
            record_counts,
            bytes: bytes + RECORD_BYTES * record_counts,
            is_small,
        })
    }

    /// Builds the response from the current ids, for which `held` is charged. Charges more for ids
    /// reported meanwhile.
    fn answer(self, reports: &Reports, mut held: Charge) -> Result<Results, ServiceError> {
        let sets = Sets::of(reports, &self.partitions);
        let more = (sets.bytes() + RECORD_BYTES * self.record_counts).saturating_sub(held.bytes());
        held.try_grow(more).map_err(full)?;
        Ok(self.encoded(reports, &sets, held))
    }

    /// Builds the response from `sets`, for which `held` is charged.
    fn encoded(self, reports: &Reports, sets: &Sets, mut held: Charge) -> Results {
        let bytes = bitmap::encoded_bytes(union(&sets.0));
        let bitmap = bitmap::encode_ascending(union(&sets.0), usize::try_from(bytes).unwrap_or(usize::MAX));
        let records = reports.records.lock().get(&self.partitions);
        let unused = held.bytes().saturating_sub(bitmap.len() as u64 + RECORD_BYTES * self.record_counts);
        drop(held.split_up_to(unused));
        Results { bitmap, records, held }
    }
}

fn full(refusal: NoCapacity) -> ServiceError {
    ServiceError::NoHeap(HeapFull::of(HeapKind::Answers, refusal))
}

/// The sets of some partitions. They share most of their ids with the shuffle.
struct Sets(Vec<IdSet>);

impl Sets {
    fn of(reports: &Reports, partitions: &[PartitionId]) -> Self {
        Self(partitions.chunks(SETS_AT_ONCE).flat_map(|some| StoredIds::of(reports, some).sets).collect())
    }

    /// Returns `remaining` minus the number of these ids, or `None` if there are more.
    fn leave_of(&self, remaining: u64) -> Option<u64> {
        self.0.iter().try_fold(remaining, |remaining, set| remaining.checked_sub(set.len()))
    }

    /// Returns an upper bound of the heap for the sets and the response.
    fn bytes(&self) -> u64 {
        self.0.iter().map(answer_bytes).sum()
    }
}

/// Returns an upper bound of the heap for a clone of a set and its part of a response.
fn answer_bytes(set: &IdSet) -> u64 {
    COPY_BYTES + set.clone_bytes() + bitmap::encoded_bytes(set.iter())
}

fn check_layout(IdWidths { sequence, partition, task }: IdWidths) -> Result<(), ServiceError> {
    let widths = [sequence, partition, task];
    let legal =
        widths.iter().all(|bits| (1..=31).contains(bits)) && widths.iter().sum::<i32>() == BLOCK_ID_BITS;
    if legal {
        return Ok(());
    }
    Err(ServiceError::InvalidField {
        field: "blockIdLayout",
        value: widths.iter().map(|bits| i64::from(*bits)).sum(),
        allowed: "must be three widths of 1 to 31 bits with a sum of 63",
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn small_answer_is_made_inline() {
        let many = |ids: std::ops::Range<u64>| ids.map(|id| id << 31).collect::<IdSet>();
        let (few, most) = (IdSet::from([1, 2, 3]), INLINE_IDS_MAX);
        let remaining = |sets: Vec<IdSet>| Sets(sets).leave_of(most);
        assert_eq!(remaining(Vec::new()), Some(most));
        assert_eq!(remaining(vec![few.clone(), many(0..most - 3)]), Some(0));
        assert_eq!(remaining(vec![few.clone(), many(0..most - 2)]), None);
        assert_eq!(remaining(vec![many(0..most + 1), few]), None);
    }

    #[test]
    fn partitions_are_asked_once_each() {
        assert_eq!(distinct(vec![3, 1, 3, 3, -1]), [-1, 1, 3].map(PartitionId));
    }
}
