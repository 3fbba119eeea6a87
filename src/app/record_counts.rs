//! Numbers of records that task attempts wrote to each partition. Newer clients report them beside
//! their blocks. They get them back with the result of several partitions and compare them with the
//! records they read (docs/protocol.md §2.8, §2.9).
//!
//! The numbers are opaque to this module and charged to the heap before they are stored. A retried
//! report changes nothing. If two reports differ for the same attempt and partition, the later one
//! counts.

use std::collections::HashMap;
use std::collections::hash_map::Entry;

use uniffle_wire::types::PartitionId;

use uniffle_base::budget::{Budget, Charge};

use crate::log::{PartitionRecords, TaskRecords};

/// Heap of a partition's table entry.
const PARTITION_BYTES: u64 = 96;
/// Heap of a task attempt and its number, including spare capacity of the list.
const ENTRY_BYTES: u64 = 32;

/// Record counts of one shuffle.
#[derive(Debug)]
pub struct RecordCounts {
    /// Each list is sorted by attempt.
    partitions: HashMap<PartitionId, Vec<TaskRecords>>,
    charge: Charge,
}

impl RecordCounts {
    /// Creates an empty table. Added entries are charged to `heap`.
    #[must_use]
    pub fn new(heap: &Budget) -> Self {
        Self { partitions: HashMap::new(), charge: heap.empty_charge() }
    }

    /// Returns whether a report contains an unknown number.
    #[must_use]
    pub fn would_change(&self, reported: &[PartitionRecords]) -> bool {
        let is_known = |partition: &PartitionId, entry: &TaskRecords| {
            self.partitions.get(partition).is_some_and(|known| known.binary_search(entry).is_ok())
        };
        reported.iter().any(|it| it.tasks.iter().any(|entry| !is_known(&it.partition, entry)))
    }

    /// Returns an upper bound of the additional bytes for a report. Repeated attempts count again,
    /// and so does a number that replaces another, because the metadata log stores both.
    #[must_use]
    pub fn price_of(&self, reported: &[PartitionRecords]) -> u64 {
        let cost = |PartitionRecords { partition, tasks }: &_| match self.partitions.get(partition) {
            None => PARTITION_BYTES + ENTRY_BYTES * tasks.len() as u64,
            Some(known) => {
                let is_new = |entry: &&TaskRecords| known.binary_search(entry).is_err();
                ENTRY_BYTES * tasks.iter().filter(is_new).count() as u64
            }
        };
        reported.iter().map(cost).sum()
    }

    /// Adds a report of a task attempt, settled from `paid`. If `paid` is too small by now, the
    /// rest is charged beyond the capacity.
    pub fn enter(&mut self, reported: &[PartitionRecords], mut paid: Charge) {
        let bytes = self.price_of(reported);
        let charge = paid.split_up_to(bytes);
        let beyond = self.charge.budget().charge_unchecked(bytes - charge.bytes());
        self.charge.merge(charge);
        self.charge.merge(beyond);
        self.add(reported);
    }

    /// Adds a report that an earlier process acknowledged, as [`RecordCounts::enter`] does.
    pub fn take_over(&mut self, reported: &[PartitionRecords]) {
        self.enter(reported, self.charge.budget().empty_charge());
    }

    fn add(&mut self, reported: &[PartitionRecords]) {
        for PartitionRecords { partition, tasks } in reported.iter().filter(|it| !it.tasks.is_empty()) {
            let known = match self.partitions.entry(*partition) {
                Entry::Occupied(known) => known.into_mut(),
                Entry::Vacant(place) => place.insert(Vec::new()),
            };
            for task in tasks {
                match known.binary_search_by_key(&task.task_attempt, |it| it.task_attempt) {
                    Ok(at) => known[at] = *task,
                    Err(at) => known.insert(at, *task),
                }
            }
        }
    }

    /// Returns the unknown numbers of a report.
    #[must_use]
    pub fn unknown(&self, reported: &[PartitionRecords]) -> Vec<PartitionRecords> {
        let unknown = |PartitionRecords { partition, tasks }: &_| {
            let known = self.partitions.get(partition);
            let is_new = |entry: &&TaskRecords| known.is_none_or(|known| known.binary_search(entry).is_err());
            PartitionRecords { partition: *partition, tasks: tasks.iter().filter(is_new).copied().collect() }
        };
        reported.iter().map(unknown).filter(|it| !it.tasks.is_empty()).collect()
    }

    /// Returns how many numbers are stored for `partitions`.
    pub fn count(&self, partitions: &[PartitionId]) -> usize {
        partitions.iter().filter_map(|partition| self.partitions.get(partition)).map(Vec::len).sum()
    }

    /// Returns the stored numbers of `partitions`.
    pub fn of(&self, partitions: &[PartitionId]) -> Vec<PartitionRecords> {
        let known = |&partition: &PartitionId| {
            let tasks = self.partitions.get(&partition)?.clone();
            Some(PartitionRecords { partition, tasks })
        };
        partitions.iter().filter_map(known).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use uniffle_base::budget::NoCapacity;

    const P0: PartitionId = PartitionId(0);
    const P1: PartitionId = PartitionId(1);

    fn of(partition: PartitionId, tasks: &[(i64, i64)]) -> PartitionRecords {
        let task = |&(task_attempt, records): &_| TaskRecords { task_attempt, records };
        PartitionRecords { partition, tasks: tasks.iter().map(task).collect() }
    }

    fn report(counts: &mut RecordCounts, reported: &[PartitionRecords]) -> Result<(), NoCapacity> {
        let paid = counts.charge.budget().try_charge(counts.price_of(reported))?;
        counts.enter(reported, paid);
        Ok(())
    }

    #[test]
    fn retried_report_changes_nothing_and_is_fully_charged() {
        let heap = Budget::new(1 << 20);
        let mut counts = RecordCounts::new(&heap);
        let first = [of(P0, &[(7, 100), (3, 5)]), of(P1, &[])];
        assert!(counts.would_change(&first));
        report(&mut counts, &first).unwrap();
        let charged = heap.used();
        assert!(charged >= PARTITION_BYTES + 2 * ENTRY_BYTES);
        assert!(!counts.would_change(&first));
        assert_eq!(counts.of(&[P0, P1, PartitionId(9)]), [of(P0, &[(3, 5), (7, 100)])]);
        let again = [of(P0, &[(7, 101)])];
        assert_eq!(
            (counts.would_change(&again), counts.price_of(&again)),
            (true, ENTRY_BYTES),
            "a changed record count must replace the old one"
        );
        assert_eq!(counts.unknown(&[of(P0, &[(3, 5), (7, 101)]), of(P1, &[])]), again);
        report(&mut counts, &again).unwrap();
        assert_eq!((counts.of(&[P0]), counts.count(&[P0])), (vec![of(P0, &[(3, 5), (7, 101)])], 2));
        drop(counts);
        assert_eq!(heap.used(), 0);
    }

    #[test]
    fn counts_without_heap_are_refused_and_acknowledged_ones_stay() {
        let heap = Budget::new(200);
        let mut counts = RecordCounts::new(&heap);
        let many = [of(P0, &(0..100).map(|task| (task, 1)).collect::<Vec<_>>())];
        assert!(report(&mut counts, &many).is_err());
        assert_eq!((counts.count(&[P0]), heap.used()), (0, 0));
        counts.take_over(&many);
        assert_eq!(counts.count(&[P0]), 100);
        drop(counts);
        assert_eq!(heap.used(), 0);
    }
}
