//! Durable knowledge about shuffles: the metadata log, the rule that decides whether it is complete
//! ([`recovery::proof`]), and the ledger of lost blocks.
//!
//! An acknowledged record survives a kill of the process and a power loss. The log has two copies
//! on the data directories, and can be copied to an object store, which is its only holder if there
//! are no directories. Block ids are held in compressed sets, and in unnamed files if they exceed
//! the heap.
//!
//! Data and index files belong to the worker's `store::disk`, and responses to clients to its
//! `service`.

mod contents;
pub mod format;
mod ids;
mod ledger;
mod metadata_log;
mod objects;
pub mod recovery;
mod window;
mod write;

use std::io;
use std::path::{Path, PathBuf};

pub use self::contents::FoundShuffle;
pub use self::format::frame::{Epoch, Incarnation, METADATA, Member};
pub use self::format::plain::plain_ids;
pub use self::format::record::{
    PartitionBlockIds, PartitionRecordCounts, Record, RegistrationRecord, Report, TaskRecordCount,
};
pub use self::ids::id_run::{IdRun, LOOKUP_BYTES, RunWriter, runs_to_merge};
pub use self::ids::id_set::{IdSet, union};
pub use self::ids::present::{HeldIds, PresentIds, SLICE_IDS, slices};
pub use self::ids::scratch::Scratch;
pub use self::ledger::loss::{Loss, LossCause, LostExtent, NewLosses, ranges};
pub use self::ledger::partition::{Availability, Ledger, LedgerPhase, ScanResult};
pub use self::ledger::shuffle::ShuffleLedger;
pub use self::metadata_log::{LogInStore, MetadataLog, RecordReader};
pub use self::objects::object::{ListedObject, LogObject, LogObjects, OBJECT_COPIES};
pub use self::objects::ship::{REFRESH, Shipper};
pub use self::objects::shipped::ShippedLog;
pub use self::recovery::proof::HandOff;
pub use self::recovery::read::{Directory, DirectoryHealth, Survey, newest_epoch};
pub use self::recovery::take_over::FoundLog;
pub use self::window::{FileWindow, within};
pub use self::write::writer::Deadlines;

/// Reason why the metadata log was not written or read.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{text}")]
pub struct LogError {
    /// Directory or file concerned, or [`METADATA`] if none is known.
    pub path: PathBuf,
    /// Kind of the failure.
    pub kind: io::ErrorKind,
    /// True if the object store failed.
    pub is_remote: bool,
    text: String,
}

impl LogError {
    pub(crate) fn new(path: impl AsRef<Path>, error: &io::Error) -> Self {
        Self {
            path: path.as_ref().to_path_buf(),
            kind: error.kind(),
            is_remote: false,
            text: error.to_string(),
        }
    }

    /// Returns an error of the object store's part of the log.
    #[must_use]
    pub fn of(kind: io::ErrorKind, text: &str) -> Self {
        Self { path: METADATA.into(), kind, is_remote: true, text: text.to_owned() }
    }

    /// Returns an error that only has a reason.
    #[must_use]
    pub fn other(text: &str) -> Self {
        Self { path: METADATA.into(), kind: io::ErrorKind::Other, is_remote: false, text: text.to_owned() }
    }
}

impl From<io::Error> for LogError {
    fn from(error: io::Error) -> Self {
        Self::new(METADATA, &error)
    }
}

impl From<LogError> for io::Error {
    fn from(error: LogError) -> Self {
        Self::new(error.kind, error)
    }
}
