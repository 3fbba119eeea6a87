//! Records of the metadata log: a shuffle's registrations and the reports of its tasks. Versions 1
//! and 2 are FROZEN (see the golden tests). Earlier programs do not know version 2. It is only
//! written for a report with record counts, and for a registration that repeats all earlier ones,
//! so that those can be dropped.
//!
//! A record is one byte kind, one byte version, then the fields in postcard's format: integers as
//! LEB128 (signed ones zigzag), text and lists prefixed by their length. The rest of the worker
//! uses prost, but this format is frozen and postcard writes it byte for byte. Block ids are sorted
//! and written as differences.
//!
//! `service` encodes and applies records; `write` and `objects` store them. Pure: no I/O.

use bytes::Bytes;
use serde::{Deserialize, Deserializer, Serialize, Serializer};
use uniffle_wire::types::{Distribution, PartitionId};

use super::frame::whole;
use crate::LogError;

pub(super) const VERSION: u8 = 1;
/// Version of a report with record counts.
const WITH_RECORDS: u8 = 2;
/// Version of a registration that replaces earlier ones. The fields are the same.
const REPLACES: u8 = 2;
const REGISTRATION: u8 = 1;
pub(super) const REPORT: u8 = 2;

/// A record of the log.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Record {
    /// The shuffle was registered.
    Registration(RegistrationRecord),
    /// A task attempt reported its blocks.
    Report(Report),
}

/// A registration, with its fields in the order in which they are written.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct RegistrationRecord {
    /// Closed ranges of partitions.
    pub ranges: Vec<(i32, i32)>,
    /// Order of blocks in extents.
    #[serde(with = "DistributionNumber")]
    pub distribution: Distribution,
    /// Spark user.
    pub user: String,
    /// Stored properties, sorted by key.
    pub properties: Vec<(String, String)>,
    /// True if the client sent any properties.
    pub sent_properties: bool,
    /// Timeout that the application requested instead of the configured one.
    #[serde(serialize_with = "zero_for_none", deserialize_with = "none_for_zero")]
    pub heartbeat_timeout_ms: Option<u64>,
    /// Not used: written as 0 and ignored by readers. The frozen format has it.
    pub stage_attempt: i32,
    /// Remote storage of the shuffle, and the ranges that name its directories there, as JSON
    /// (`service`). Empty if clients read no tier directly.
    pub remote_storage: Vec<u8>,
}

/// Counts of the shuffle records that task attempts wrote to a partition. The fields are in the
/// order in which they are encoded.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct PartitionRecordCounts {
    /// The partition.
    #[serde(with = "PartitionNumber")]
    pub partition: PartitionId,
    /// Counts of the task attempts.
    pub tasks: Vec<TaskRecordCount>,
}

/// Count of the shuffle records that a task attempt wrote, encoded like [`PartitionRecordCounts`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub struct TaskRecordCount {
    /// The task attempt.
    pub task_attempt: i64,
    /// Number of records.
    pub records: i64,
}

/// Block ids of a partition.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PartitionBlockIds<Ids = Vec<i64>> {
    /// The partition.
    pub partition: PartitionId,
    /// The ids.
    pub block_ids: Ids,
}

/// A report of a task attempt.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Report {
    /// The `bitmapNum` of the client.
    pub bitmap_count: i32,
    pub task_attempt: i64,
    /// Block ids per partition.
    pub partitions: Vec<PartitionBlockIds>,
    /// Count of the shuffle records that each task attempt wrote, per partition.
    pub records: Vec<PartitionRecordCounts>,
}

impl Record {
    /// Encodes the record.
    pub fn encode(&self) -> Vec<u8> {
        match self {
            Self::Registration(registration) => record(REGISTRATION, VERSION, registration),
            Self::Report(report) => report.encode(),
        }
    }

    /// Encodes a registration that includes the content of all earlier ones of its shuffle.
    #[must_use]
    pub fn encode_replacing(registration: &RegistrationRecord) -> Vec<u8> {
        record(REGISTRATION, REPLACES, registration)
    }

    /// Returns whether an encoded record is a registration that replaces earlier ones.
    #[must_use]
    pub fn replaces_registrations(bytes: &[u8]) -> bool {
        bytes.starts_with(&[REGISTRATION, REPLACES])
    }

    /// Returns the same record without the replacement of earlier ones.
    #[must_use]
    pub fn without_replacing(bytes: &Bytes) -> Bytes {
        match bytes.strip_prefix(&[REGISTRATION, REPLACES]) {
            Some(fields) => [&[REGISTRATION, VERSION], fields].concat().into(),
            None => bytes.clone(),
        }
    }

    /// Returns whether an encoded record is a registration.
    #[must_use]
    pub fn is_registration(bytes: &[u8]) -> bool {
        bytes.first() == Some(&REGISTRATION)
    }

    /// Decodes a record. Allocations are bounded by the length of `bytes`, whatever their content.
    ///
    /// # Errors
    /// The bytes are not a record, or a later program version wrote them.
    pub fn decode(bytes: &[u8]) -> Result<Self, LogError> {
        let malformed = || LogError::other("record is malformed");
        let (&[kind, version], fields) = bytes.split_first_chunk::<2>().ok_or_else(malformed)?;
        let record = match (kind, version) {
            (REGISTRATION, VERSION | REPLACES) => whole(fields).map(Self::Registration),
            (REPORT, VERSION) => {
                whole(fields).and_then(|fields| Report::from_fields(fields, Vec::new())).map(Self::Report)
            }
            (REPORT, WITH_RECORDS) => whole(fields)
                .and_then(|(fields, records)| Report::from_fields(fields, records))
                .map(Self::Report),
            _ => {
                let text = format!("record has unknown kind {kind} and version {version}");
                return Err(LogError::other(&text));
            }
        };
        record.ok_or_else(malformed)
    }
}

fn record(kind: u8, version: u8, fields: &impl Serialize) -> Vec<u8> {
    postcard::to_extend(fields, vec![kind, version])
        .expect("tuples and lists of known length always have a form")
}

/// Distribution, encoded as its number: 0 or 1.
#[derive(Serialize, Deserialize)]
#[serde(remote = "Distribution")]
enum DistributionNumber {
    Normal,
    LocalOrder,
}

/// Partition, encoded as its number.
#[derive(Serialize, Deserialize)]
#[serde(remote = "PartitionId")]
struct PartitionNumber(i32);

/// Encodes a missing timeout as 0, which is free because a timeout is at least a minute.
fn zero_for_none<S: Serializer>(value: &Option<u64>, serializer: S) -> Result<S::Ok, S::Error> {
    value.unwrap_or(0).serialize(serializer)
}

fn none_for_zero<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Option<u64>, D::Error> {
    Ok(Some(u64::deserialize(deserializer)?).filter(|value| *value > 0))
}

/// Encoded fields of a report.
#[derive(Serialize, Deserialize)]
struct ReportFields {
    bitmap_count: i32,
    task_attempt: i64,
    /// Differences of the sorted ids of each partition.
    partitions: Vec<(i32, Vec<u64>)>,
}

impl Report {
    fn encode(&self) -> Vec<u8> {
        let differences = |ids: &[i64]| {
            let mut ids: Vec<u64> = ids.iter().map(|id| id.cast_unsigned()).collect();
            ids.sort_unstable();
            let mut before = 0;
            ids.iter_mut().for_each(|id| *id -= std::mem::replace(&mut before, *id));
            ids
        };
        let partitions = self.partitions.iter().map(|it| (it.partition.0, differences(&it.block_ids)));
        let fields = ReportFields {
            bitmap_count: self.bitmap_count,
            task_attempt: self.task_attempt,
            partitions: partitions.collect(),
        };
        if self.records.is_empty() {
            return record(REPORT, VERSION, &fields);
        }
        record(REPORT, WITH_RECORDS, &(fields, &self.records))
    }

    /// Converts decoded fields. Returns `None` for ids beyond 64 bits.
    fn from_fields(fields: ReportFields, records: Vec<PartitionRecordCounts>) -> Option<Self> {
        let ReportFields { bitmap_count, task_attempt, partitions } = fields;
        let ids = |differences: Vec<u64>| -> Option<Vec<i64>> {
            let mut id = 0u64;
            let next = |difference: u64| {
                id = id.checked_add(difference)?;
                Some(id.cast_signed())
            };
            differences.into_iter().map(next).collect()
        };
        let partitions = partitions.into_iter().map(|(partition, differences)| {
            Some(PartitionBlockIds { partition: PartitionId(partition), block_ids: ids(differences)? })
        });
        let partitions = partitions.collect::<Option<_>>()?;
        Some(Self { bitmap_count, task_attempt, partitions, records })
    }
}

#[cfg(test)]
pub(super) mod tests {
    use proptest::prelude::*;

    use super::*;

    fn hex(record: &Record) -> String {
        record.encode().iter().map(|byte| format!("{byte:02x}")).collect()
    }

    /// The format is a promise to every later version: these bytes must not change while the
    /// version is 1.
    #[test]
    fn version_1_is_frozen() {
        let registration = RegistrationRecord {
            ranges: vec![(0, 63), (70, 70)],
            distribution: Distribution::LocalOrder,
            user: "ann".into(),
            properties: vec![("a".into(), "1".into())],
            sent_properties: true,
            heartbeat_timeout_ms: Some(60_000),
            stage_attempt: 2,
            remote_storage: vec![7],
        };
        assert_eq!(
            hex(&Record::Registration(registration)),
            "010102007e8c018c010103616e6e010161013101e0d403040107"
        );
        let report = Report {
            bitmap_count: 1,
            task_attempt: 300,
            partitions: vec![
                PartitionBlockIds { partition: PartitionId(5), block_ids: vec![130, 2] },
                PartitionBlockIds { partition: PartitionId(6), block_ids: vec![] },
            ],
            records: vec![],
        };
        assert_eq!(hex(&Record::Report(report)), "020102d804020a020280010c00");
    }

    #[test]
    fn registration_of_version_2_is_frozen() {
        let registration =
            RegistrationRecord { ranges: vec![(0, 63)], user: "ann".into(), ..RegistrationRecord::default() };
        let replacing = Record::encode_replacing(&registration);
        let hex: String = replacing.iter().map(|byte| format!("{byte:02x}")).collect();
        assert_eq!(hex, "010201007e0003616e6e0000000000");
        assert!(Record::is_registration(&replacing) && Record::replaces_registrations(&replacing));
        let record = Record::Registration(registration);
        assert_eq!(Record::decode(&replacing).as_ref(), Ok(&record));
        assert_eq!(Record::without_replacing(&replacing.into()), record.encode());
        assert!(!Record::replaces_registrations(&record.encode()));
    }

    /// Version 1 followed by a list of partitions, each with attempts and numbers.
    #[test]
    fn version_2_is_frozen() {
        let task = |task_attempt, records| TaskRecordCount { task_attempt, records };
        let report = Report {
            bitmap_count: 1,
            task_attempt: 300,
            partitions: vec![PartitionBlockIds { partition: PartitionId(5), block_ids: vec![2, 130] }],
            records: vec![
                PartitionRecordCounts { partition: PartitionId(5), tasks: vec![task(300, 64), task(7, -1)] },
                PartitionRecordCounts { partition: PartitionId(6), tasks: vec![] },
            ],
        };
        let record = Record::Report(report);
        assert_eq!(hex(&record), "020202d804010a02028001020a02d80480010e010c00");
        assert_eq!(Record::decode(&record.encode()), Ok(record));
    }

    /// Returns record counts of fewer than `limit` partitions.
    pub(in crate::format) fn any_records(limit: usize) -> impl Strategy<Value = Vec<PartitionRecordCounts>> {
        let task = |(task_attempt, records)| TaskRecordCount { task_attempt, records };
        let records = any::<(i32, Vec<(i64, i64)>)>().prop_map(move |(id, tasks)| PartitionRecordCounts {
            partition: PartitionId(id),
            tasks: tasks.into_iter().map(task).collect(),
        });
        prop::collection::vec(records, 0..limit)
    }

    fn any_record() -> impl Strategy<Value = Record> {
        let text = || "[a-zé.]{0,12}";
        let registration = (
            prop::collection::vec(any::<(i32, i32)>(), 0..5),
            any::<bool>(),
            text(),
            prop::collection::vec((text(), text()), 0..5),
            any::<(bool, Option<std::num::NonZeroU64>, i32, Vec<u8>)>(),
        )
            .prop_map(
                |(ranges, ordered, user, properties, (sent, timeout, stage_attempt, remote_storage))| {
                    let distribution = if ordered { Distribution::LocalOrder } else { Distribution::Normal };
                    let heartbeat_timeout_ms = timeout.map(std::num::NonZeroU64::get);
                    let sent_properties = sent;
                    Record::Registration(RegistrationRecord {
                        ranges,
                        distribution,
                        user,
                        properties,
                        sent_properties,
                        heartbeat_timeout_ms,
                        stage_attempt,
                        remote_storage,
                    })
                },
            );
        let partitions =
            prop::collection::vec((any::<i32>(), prop::collection::btree_set(0i64.., 0..20)), 0..5);
        let report = (any::<(i32, i64)>(), partitions, any_records(5)).prop_map(
            |((bitmap_count, task_attempt), partitions, records)| {
                let partitions = partitions.into_iter().map(|(partition, ids)| PartitionBlockIds {
                    partition: PartitionId(partition),
                    block_ids: ids.into_iter().collect(),
                });
                let partitions = partitions.collect();
                Record::Report(Report { bitmap_count, task_attempt, partitions, records })
            },
        );
        prop_oneof![registration, report]
    }

    proptest! {
        #[test]
        fn records_round_trip(record in any_record(), cut: prop::sample::Index) {
            let bytes = record.encode();
            prop_assert_eq!(Record::decode(&bytes), Ok(record));
            prop_assert!(Record::decode(&bytes[..cut.index(bytes.len())]).is_err());
        }

        #[test]
        fn arbitrary_bytes_do_not_panic(bytes: Vec<u8>, kind in 0u8..4, version in 0u8..4) {
            let _ = Record::decode(&[&[kind, version], &bytes[..]].concat());
        }
    }
}
