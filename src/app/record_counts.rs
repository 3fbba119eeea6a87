//! Counts of the shuffle records (Spark's rows) that task attempts wrote to each partition. Newer
//! clients report the counts beside their blocks. They get them back with the result of several
//! partitions and compare them with the records they read (docs/protocol.md §2.8, §2.9).
//!
//! The counts are opaque to this module and charged to the heap before they are stored. A retried
//! report changes nothing. If two reports differ for the same attempt and partition, the later one
//! applies.

use std::collections::HashMap;
use std::collections::hash_map::Entry;

use uniffle_wire::types::PartitionId;

use uniffle_base::budget::{Budget, Charge};

use crate::log::{PartitionRecordCounts, TaskRecordCount};

/// Heap of a partition's table entry.
const PARTITION_BYTES: u64 = 96;
/// Heap of a task attempt and its count, including spare capacity of the list.
const ENTRY_BYTES: u64 = 32;

/// Record counts of one shuffle.
#[derive(Debug)]
pub struct RecordCounts {
    /// Each list is sorted by attempt, which is the first field in the order of its entries.
    partitions: HashMap<PartitionId, Vec<TaskRecordCount>>,
    charge: Charge,
}

impl RecordCounts {
    /// Creates an empty table. Added entries are charged to `heap`.
    #[must_use]
    pub fn new(heap: &Budget) -> Self {
        Self { partitions: HashMap::new(), charge: heap.empty_charge() }
    }

    /// Returns whether a report contains a count that is not stored yet.
    #[must_use]
    pub fn would_change(&self, reported: &[PartitionRecordCounts]) -> bool {
        let is_known = |partition: &PartitionId, entry: &TaskRecordCount| {
            self.partitions.get(partition).is_some_and(|known| known.binary_search(entry).is_ok())
        };
        reported.iter().any(|counts| counts.tasks.iter().any(|entry| !is_known(&counts.partition, entry)))
    }

    /// Returns an upper bound of the additional bytes for a report. In a known partition, counts
    /// that are already stored cost nothing. An attempt that the report names twice costs twice. A
    /// count that replaces another costs too, because the metadata log stores both.
    #[must_use]
    pub fn cost_of(&self, reported: &[PartitionRecordCounts]) -> u64 {
        let cost = |PartitionRecordCounts { partition, tasks }: &_| match self.partitions.get(partition) {
            None => PARTITION_BYTES + ENTRY_BYTES * tasks.len() as u64,
            Some(known) => {
                let is_new = |entry: &&TaskRecordCount| known.binary_search(entry).is_err();
                ENTRY_BYTES * tasks.iter().filter(is_new).count() as u64
            }
        };
        reported.iter().map(cost).sum()
    }

    /// Inserts a report of a task attempt, charged from the reserved `paid`. If `paid` is too small
    /// by now, the rest is charged beyond the capacity.
    pub fn insert(&mut self, reported: &[PartitionRecordCounts], mut paid: Charge) {
        let bytes = self.cost_of(reported);
        let charge = paid.split_up_to(bytes);
        let excess = self.charge.budget().charge_unchecked(bytes - charge.bytes());
        self.charge.merge(charge);
        self.charge.merge(excess);
        self.add(reported);
    }

    /// Inserts a report that an earlier process acknowledged, charged even beyond the capacity.
    pub fn insert_recovered(&mut self, reported: &[PartitionRecordCounts]) {
        self.insert(reported, self.charge.budget().empty_charge());
    }

    fn add(&mut self, reported: &[PartitionRecordCounts]) {
        for PartitionRecordCounts { partition, tasks } in
            reported.iter().filter(|counts| !counts.tasks.is_empty())
        {
            let known = match self.partitions.entry(*partition) {
                Entry::Occupied(known) => known.into_mut(),
                Entry::Vacant(vacant) => vacant.insert(Vec::new()),
            };
            for task in tasks {
                match known.binary_search_by_key(&task.task_attempt, |known| known.task_attempt) {
                    Ok(index) => known[index] = *task,
                    Err(index) => known.insert(index, *task),
                }
            }
        }
    }

    /// Returns the counts of a report that are not stored yet.
    #[must_use]
    pub fn new_entries(&self, reported: &[PartitionRecordCounts]) -> Vec<PartitionRecordCounts> {
        let new_in = |PartitionRecordCounts { partition, tasks }: &_| {
            let known = self.partitions.get(partition);
            let is_new =
                |entry: &&TaskRecordCount| known.is_none_or(|known| known.binary_search(entry).is_err());
            PartitionRecordCounts {
                partition: *partition,
                tasks: tasks.iter().filter(is_new).copied().collect(),
            }
        };
        reported.iter().map(new_in).filter(|counts| !counts.tasks.is_empty()).collect()
    }

    /// Returns how many counts are stored for `partitions`.
    pub fn count(&self, partitions: &[PartitionId]) -> usize {
        partitions.iter().filter_map(|partition| self.partitions.get(partition)).map(Vec::len).sum()
    }

    /// Returns the stored counts of `partitions`.
    pub fn get(&self, partitions: &[PartitionId]) -> Vec<PartitionRecordCounts> {
        let known = |&partition: &PartitionId| {
            let tasks = self.partitions.get(&partition)?.clone();
            Some(PartitionRecordCounts { partition, tasks })
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

    fn counts_of(partition: PartitionId, tasks: &[(i64, i64)]) -> PartitionRecordCounts {
        let task = |&(task_attempt, records): &_| TaskRecordCount { task_attempt, records };
        PartitionRecordCounts { partition, tasks: tasks.iter().map(task).collect() }
    }

    fn report(counts: &mut RecordCounts, reported: &[PartitionRecordCounts]) -> Result<(), NoCapacity> {
        let paid = counts.charge.budget().try_charge(counts.cost_of(reported))?;
        counts.insert(reported, paid);
        Ok(())
    }

    #[test]
    fn counts_are_charged_and_retries_change_nothing() {
        let heap = Budget::new(1 << 20);
        let mut counts = RecordCounts::new(&heap);
        let first = [counts_of(P0, &[(7, 100), (3, 5)]), counts_of(P1, &[])];
        assert!(counts.would_change(&first));
        report(&mut counts, &first).unwrap();
        let charged = heap.used();
        assert!(charged >= PARTITION_BYTES + 2 * ENTRY_BYTES);
        assert!(!counts.would_change(&first));
        assert_eq!(counts.get(&[P0, P1, PartitionId(9)]), [counts_of(P0, &[(3, 5), (7, 100)])]);
        let again = [counts_of(P0, &[(7, 101)])];
        assert_eq!(
            (counts.would_change(&again), counts.cost_of(&again)),
            (true, ENTRY_BYTES),
            "a changed record count must replace the old one"
        );
        assert_eq!(counts.new_entries(&[counts_of(P0, &[(3, 5), (7, 101)]), counts_of(P1, &[])]), again);
        report(&mut counts, &again).unwrap();
        assert_eq!((counts.get(&[P0]), counts.count(&[P0])), (vec![counts_of(P0, &[(3, 5), (7, 101)])], 2));
        drop(counts);
        assert_eq!(heap.used(), 0);
    }

    #[test]
    fn counts_without_heap_are_refused_and_acknowledged_ones_stay() {
        let heap = Budget::new(200);
        let mut counts = RecordCounts::new(&heap);
        let many = [counts_of(P0, &(0..100).map(|task| (task, 1)).collect::<Vec<_>>())];
        assert!(report(&mut counts, &many).is_err());
        assert_eq!((counts.count(&[P0]), heap.used()), (0, 0));
        counts.insert_recovered(&many);
        assert_eq!(counts.count(&[P0]), 100);
        drop(counts);
        assert_eq!(heap.used(), 0);
    }
}
