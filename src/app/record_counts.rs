//! How many records task attempts say they wrote, partition by partition: newer clients report that beside their blocks,
//! get it back with the result of many partitions, and compare it with what they read (docs/protocol.md §2.8, §2.9).
//!
//! Opaque here, and charged to the heap before it is kept. A retried report changes nothing; of two numbers for the same
//! attempt and partition the later one counts.

use std::collections::HashMap;
use std::collections::hash_map::Entry;

use uniffle_wire::types::PartitionId;

use crate::budget::heap::HeapFull;
use crate::budget::{Budget, Charge, HeapKind};

/// A partition's place in the table.
const PARTITION_BYTES: u64 = 96;
/// A task attempt and its number, with the room that a list grows by.
const ENTRY_BYTES: u64 = 32;

/// Records by task attempt, of one partition.
pub type PartitionRecords = (PartitionId, Vec<(i64, i64)>);

/// Record numbers of one shuffle.
#[derive(Debug)]
pub struct RecordCounts {
    /// Sorted by attempt.
    partitions: HashMap<PartitionId, Vec<(i64, i64)>>,
    charge: Charge,
}

impl RecordCounts {
    /// None; what is added is charged to `heap`.
    #[must_use]
    pub fn new(heap: &Budget) -> Self {
        Self { partitions: HashMap::new(), charge: heap.nothing() }
    }

    /// Whether [`RecordCounts::report`] would change anything.
    ///
    /// # Errors
    /// No heap for it.
    pub fn would_learn(&self, reported: &[PartitionRecords]) -> Result<bool, HeapFull> {
        let is_known = |partition: &PartitionId, entry: &(i64, i64)| {
            self.partitions.get(partition).is_some_and(|known| known.binary_search(entry).is_ok())
        };
        let learns =
            reported.iter().any(|(partition, tasks)| tasks.iter().any(|entry| !is_known(partition, entry)));
        let (asked, free) = (self.cost(reported), self.charge.budget().free());
        if asked > free {
            return Err(HeapFull { kind: HeapKind::ReportedIds.name(), asked, free });
        }
        Ok(learns)
    }

    /// What it takes more at most: repeated attempts count again.
    fn cost(&self, reported: &[PartitionRecords]) -> u64 {
        let cost = |(partition, tasks): &PartitionRecords| match self.partitions.get(partition) {
            None => PARTITION_BYTES + ENTRY_BYTES * tasks.len() as u64,
            Some(known) => {
                let is_new = |task: i64| known.binary_search_by_key(&task, |(task, _)| *task).is_err();
                ENTRY_BYTES * tasks.iter().filter(|(task, _)| is_new(*task)).count() as u64
            }
        };
        reported.iter().map(cost).sum()
    }

    /// Adds what a task attempt reported.
    ///
    /// # Errors
    /// No heap for it; then all is as before.
    pub fn report(&mut self, reported: &[PartitionRecords]) -> Result<(), HeapFull> {
        let charged = self.charge.try_grow(self.cost(reported));
        charged.map_err(|refusal| HeapFull::of(HeapKind::ReportedIds, refusal))?;
        self.enter(reported);
        Ok(())
    }

    /// As [`RecordCounts::report`], of a report that an earlier process acknowledged.
    pub fn take_over(&mut self, reported: &[PartitionRecords]) {
        let more = self.charge.budget().force_charge(self.cost(reported));
        self.charge.merge(more);
        self.enter(reported);
    }

    fn enter(&mut self, reported: &[PartitionRecords]) {
        for (partition, tasks) in reported.iter().filter(|(_, tasks)| !tasks.is_empty()) {
            let known = match self.partitions.entry(*partition) {
                Entry::Occupied(known) => known.into_mut(),
                Entry::Vacant(place) => place.insert(Vec::new()),
            };
            for (task, records) in tasks {
                match known.binary_search_by_key(task, |(task, _)| *task) {
                    Ok(at) => known[at].1 = *records,
                    Err(at) => known.insert(at, (*task, *records)),
                }
            }
        }
    }

    /// How many numbers there are of `partitions`.
    pub fn count(&self, partitions: &[PartitionId]) -> usize {
        partitions.iter().filter_map(|partition| self.partitions.get(partition)).map(Vec::len).sum()
    }

    /// Those of `partitions`, as far as there are any.
    pub fn of(&self, partitions: &[PartitionId]) -> Vec<PartitionRecords> {
        let known = |partition: &PartitionId| Some((*partition, self.partitions.get(partition)?.clone()));
        partitions.iter().filter_map(known).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const P0: PartitionId = PartitionId(0);
    const P1: PartitionId = PartitionId(1);

    #[test]
    fn a_retried_report_changes_nothing_and_all_is_charged() {
        let heap = Budget::new(1 << 20);
        let mut counts = RecordCounts::new(&heap);
        let report = [(P0, vec![(7, 100), (3, 5)]), (P1, Vec::new())];
        assert!(counts.would_learn(&report).unwrap());
        counts.report(&report).unwrap();
        let charged = heap.used();
        assert!(charged >= PARTITION_BYTES + 2 * ENTRY_BYTES);
        assert!(!counts.would_learn(&report).unwrap());
        assert_eq!(counts.of(&[P0, P1, PartitionId(9)]), [(P0, vec![(3, 5), (7, 100)])]);
        let again = [(P0, vec![(7, 101)])];
        assert!(counts.would_learn(&again).unwrap());
        counts.report(&again).unwrap();
        assert_eq!((counts.of(&[P0]), counts.count(&[P0])), (vec![(P0, vec![(3, 5), (7, 101)])], 2));
        drop(counts);
        assert_eq!(heap.used(), 0);
    }

    #[test]
    fn what_has_no_heap_is_refused_and_what_was_acknowledged_is_kept() {
        let heap = Budget::new(200);
        let mut counts = RecordCounts::new(&heap);
        let many = [(P0, (0..100).map(|task| (task, 1)).collect::<Vec<_>>())];
        assert!(counts.would_learn(&many).is_err() && counts.report(&many).is_err());
        assert_eq!((counts.count(&[P0]), heap.used()), (0, 0));
        counts.take_over(&many);
        assert_eq!(counts.count(&[P0]), 100);
    }
}
