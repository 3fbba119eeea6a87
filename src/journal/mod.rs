//! What the notes of a shuffle say: its registrations and the reports of its tasks. FROZEN as version 1 (see the
//! golden test).
//!
//! A note is one byte kind, one byte version, then fields: integers as LEB128 (signed ones zigzag), text and lists with
//! their length before them. Block ids are sorted and written as differences. Not here: how notes reach a disk
//! (`store`), what they do (`service`). Pure: no I/O.

mod codec;

use uniffle_wire::types::{Distribution, PartitionId};

use self::codec::{Reader, Writer};

const VERSION: u8 = 1;
const REGISTRATION: u8 = 1;
const REPORT: u8 = 2;

/// A note.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Note {
    /// The shuffle was registered.
    Registration(Registration),
    /// A task attempt reported its blocks.
    Report(Report),
}

/// What a registration said.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Registration {
    /// Closed ranges of partitions.
    pub ranges: Vec<(i32, i32)>,
    /// Order of blocks in extents.
    pub distribution: Distribution,
    /// Spark user.
    pub user: String,
    /// Kept properties, sorted by key.
    pub properties: Vec<(String, String)>,
    /// Whether the client sent any properties.
    pub sent_properties: bool,
    /// What the app wants instead of the configured timeout.
    pub heartbeat_timeout_ms: Option<u64>,
    /// Stage attempt known then.
    pub stage_attempt: i32,
    /// Remote storage of the shuffle, in its own encoding; empty when it has none.
    pub remote_storage: Vec<u8>,
}

/// What a report said.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Report {
    /// `bitmapNum`.
    pub bitmap_count: i32,
    /// The task attempt.
    pub task_attempt: i64,
    /// Block ids per partition.
    pub partitions: Vec<(PartitionId, Vec<i64>)>,
}

/// Why bytes are no note.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum NoteError {
    /// A later program wrote it.
    #[error("note of kind {kind} and version {version} is not known")]
    Unknown {
        /// First byte.
        kind: u8,
        /// Second byte.
        version: u8,
    },
    /// It ends too early, or a field cannot be what it is.
    #[error("note is malformed")]
    Malformed,
}

impl Note {
    /// The note's bytes.
    #[must_use]
    pub fn encode(&self) -> Vec<u8> {
        match self {
            Self::Registration(registration) => registration.encode(),
            Self::Report(report) => report.encode(),
        }
    }

    /// Reads a note. Whatever the bytes are, nothing is allocated that they do not pay for.
    ///
    /// # Errors
    /// [`NoteError`].
    pub fn decode(bytes: &[u8]) -> Result<Self, NoteError> {
        let (&[kind, version], fields) = bytes.split_first_chunk::<2>().ok_or(NoteError::Malformed)?;
        let mut reader = Reader::new(fields);
        let note = match (kind, version) {
            (REGISTRATION, VERSION) => Registration::decode(&mut reader).map(Self::Registration),
            (REPORT, VERSION) => Report::decode(&mut reader).map(Self::Report),
            _ => return Err(NoteError::Unknown { kind, version }),
        };
        note.filter(|_| reader.is_empty()).ok_or(NoteError::Malformed)
    }
}

impl Registration {
    fn encode(&self) -> Vec<u8> {
        let mut writer = Writer::new(REGISTRATION, VERSION);
        writer.count(self.ranges.len());
        for (start, end) in &self.ranges {
            writer.signed(i64::from(*start));
            writer.signed(i64::from(*end));
        }
        writer.unsigned(match self.distribution {
            Distribution::Normal => 0,
            Distribution::LocalOrder => 1,
        });
        writer.bytes(self.user.as_bytes());
        writer.count(self.properties.len());
        for (key, value) in &self.properties {
            writer.bytes(key.as_bytes());
            writer.bytes(value.as_bytes());
        }
        writer.unsigned(u64::from(self.sent_properties));
        // 0 = none; a timeout is at least a minute.
        writer.unsigned(self.heartbeat_timeout_ms.unwrap_or(0));
        writer.signed(i64::from(self.stage_attempt));
        writer.bytes(&self.remote_storage);
        writer.finish()
    }

    fn decode(reader: &mut Reader<'_>) -> Option<Self> {
        let mut ranges = Vec::new();
        for _ in 0..reader.count()? {
            ranges.push((reader.signed_as()?, reader.signed_as()?));
        }
        let distribution = match reader.unsigned()? {
            0 => Distribution::Normal,
            1 => Distribution::LocalOrder,
            _ => return None,
        };
        let user = reader.text()?;
        let mut properties = Vec::new();
        for _ in 0..reader.count()? {
            properties.push((reader.text()?, reader.text()?));
        }
        Some(Self {
            ranges,
            distribution,
            user,
            properties,
            sent_properties: reader.unsigned()? != 0,
            heartbeat_timeout_ms: Some(reader.unsigned()?).filter(|ms| *ms > 0),
            stage_attempt: reader.signed_as()?,
            remote_storage: reader.bytes()?.to_vec(),
        })
    }
}

impl Report {
    fn encode(&self) -> Vec<u8> {
        let mut writer = Writer::new(REPORT, VERSION);
        writer.signed(i64::from(self.bitmap_count));
        writer.signed(self.task_attempt);
        writer.count(self.partitions.len());
        for (partition, ids) in &self.partitions {
            writer.signed(i64::from(partition.0));
            writer.count(ids.len());
            let mut sorted: Vec<u64> = ids.iter().map(|id| id.cast_unsigned()).collect();
            sorted.sort_unstable();
            let mut before = 0;
            for id in sorted {
                writer.unsigned(id - before);
                before = id;
            }
        }
        writer.finish()
    }

    fn decode(reader: &mut Reader<'_>) -> Option<Self> {
        let (bitmap_count, task_attempt) = (reader.signed_as()?, reader.signed()?);
        let mut partitions = Vec::new();
        for _ in 0..reader.count()? {
            let partition = PartitionId(reader.signed_as()?);
            let count = reader.count()?;
            let mut ids = Vec::with_capacity(count);
            let mut id = 0u64;
            for _ in 0..count {
                id = id.checked_add(reader.unsigned()?)?;
                ids.push(id.cast_signed());
            }
            partitions.push((partition, ids));
        }
        Some(Self { bitmap_count, task_attempt, partitions })
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn hex(note: &Note) -> String {
        note.encode().iter().map(|byte| format!("{byte:02x}")).collect()
    }

    /// The format is a promise to every later version: these bytes must not change while the version is 1.
    #[test]
    fn version_1_is_frozen() {
        let registration = Registration {
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
            hex(&Note::Registration(registration)),
            "010102007e8c018c010103616e6e010161013101e0d403040107"
        );
        let report = Report {
            bitmap_count: 1,
            task_attempt: 300,
            partitions: vec![(PartitionId(5), vec![130, 2]), (PartitionId(6), vec![])],
        };
        assert_eq!(hex(&Note::Report(report)), "020102d804020a020280010c00");
    }

    fn note() -> impl Strategy<Value = Note> {
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
                    Note::Registration(Registration {
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
        let report =
            (any::<(i32, i64)>(), partitions).prop_map(|((bitmap_count, task_attempt), partitions)| {
                let partitions = partitions
                    .into_iter()
                    .map(|(id, ids)| (PartitionId(id), ids.into_iter().collect()))
                    .collect();
                Note::Report(Report { bitmap_count, task_attempt, partitions })
            });
        prop_oneof![registration, report]
    }

    proptest! {
        #[test]
        fn every_note_survives(note in note(), cut: prop::sample::Index) {
            let bytes = note.encode();
            prop_assert_eq!(Note::decode(&bytes), Ok(note));
            prop_assert!(Note::decode(&bytes[..cut.index(bytes.len())]).is_err());
        }

        #[test]
        fn no_bytes_make_it_panic(bytes: Vec<u8>, kind in 0u8..4) {
            let _ = Note::decode(&[&[kind, VERSION], &bytes[..]].concat());
        }
    }
}
