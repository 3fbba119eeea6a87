//! Fast path for the ids of a report without record counts. A start may read several hundred
//! thousand lists of one id, and each would be allocated in a [`Report`](super::record::Report).
//!
//! Every accepted report is also accepted by [`Record::decode`](super::record::Record::decode),
//! with the same result. Other records and versions, and reports with an id beyond 63 bits, are
//! left to it. Pure.

use serde::de::DeserializeOwned;
use uniffle_wire::types::PartitionId;

use super::record::{REPORT, VERSION};

/// Fills `ids` with the ids of a report and their partitions, in their order, and returns its
/// `bitmapNum`. Returns `None` if `record` is not a plain report. The content of `ids` is then
/// undefined.
pub fn plain_ids(record: &[u8], ids: &mut Vec<(PartitionId, i64)>) -> Option<i32> {
    ids.clear();
    let (&[REPORT, VERSION], mut fields) = record.split_first_chunk::<2>()? else { return None };
    let bitmap_count = take(&mut fields)?;
    let _task_attempt: i64 = take(&mut fields)?;
    for _ in 0..take::<u64>(&mut fields)? {
        let partition = PartitionId(take(&mut fields)?);
        let mut id = 0u64;
        for _ in 0..take::<u64>(&mut fields)? {
            id = id.checked_add(take(&mut fields)?)?;
            ids.push((partition, i64::try_from(id).ok()?));
        }
    }
    fields.is_empty().then_some(bitmap_count)
}

/// Removes the first integer of a record and returns it.
fn take<T: DeserializeOwned>(fields: &mut &[u8]) -> Option<T> {
    let (value, rest) = postcard::take_from_bytes(fields).ok()?;
    *fields = rest;
    Some(value)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::format::record::tests::any_records;
    use crate::{PartitionBlockIds, Record, Report};

    /// Returns the ids as read by [`Record::decode`].
    fn decoded(bytes: &[u8]) -> Option<(i32, Vec<(PartitionId, i64)>)> {
        let Ok(Record::Report(Report { bitmap_count, partitions, records, .. })) = Record::decode(bytes)
        else {
            return None;
        };
        let ids =
            partitions.into_iter().flat_map(|it| it.block_ids.into_iter().map(move |id| (it.partition, id)));
        let ids: Vec<_> = ids.collect();
        let is_plain = records.is_empty() && bytes[1] == VERSION && ids.iter().all(|(_, id)| *id >= 0);
        is_plain.then_some((bitmap_count, ids))
    }

    fn plain(bytes: &[u8]) -> Option<(i32, Vec<(PartitionId, i64)>)> {
        let mut ids = vec![(PartitionId(1), 1)];
        let count = plain_ids(bytes, &mut ids)?;
        Some((count, ids))
    }

    proptest! {
        #[test]
        fn plain_reports_read_as_decoded(
            head in any::<(i32, i64)>(),
            partitions in prop::collection::vec((any::<i32>(), prop::collection::btree_set(any::<i64>(), 0..5)), 0..5),
            records in any_records(2),
            damage in prop::option::of(any::<(prop::sample::Index, u8)>()),
        ) {
            let partitions = partitions.into_iter().map(|(partition, ids)| PartitionBlockIds {
                partition: PartitionId(partition),
                block_ids: ids.into_iter().collect(),
            });
            let partitions = partitions.collect();
            let report = Report { bitmap_count: head.0, task_attempt: head.1, partitions, records };
            let mut bytes = Record::Report(report).encode();
            if let Some((at, byte)) = damage {
                let at = at.index(bytes.len());
                bytes[at] = byte;
            }
            prop_assert_eq!(plain(&bytes), decoded(&bytes));
            bytes.pop();
            prop_assert_eq!(plain(&bytes), decoded(&bytes));
        }

        #[test]
        fn arbitrary_bytes_read_as_decoded(bytes in prop::collection::vec(prop_oneof![Just(0x80u8), any::<u8>(), 0u8..4], 0..40)) {
            let bytes = [&[REPORT, VERSION], &bytes[..]].concat();
            prop_assert_eq!(plain(&bytes), decoded(&bytes));
        }
    }
}
