//! Durable knowledge about shuffles: the metadata log, the rule that decides whether it is complete
//! ([`recovery::proof`]), and the ledger of lost blocks.
//!
//! An acknowledged record survives any end of the process or the machine. The log has two copies on
//! the data directories, and can be copied to an object store. Block ids are held in compressed
//! sets, and in unnamed files if they exceed the heap.
//!
//! Data and index files belong to `store::disk`, and responses to clients to `service`.

mod contents;
mod error;
pub mod format;
mod ids;
mod ledger;
mod metadata_log;
mod objects;
pub mod recovery;
mod window;
mod write;

pub use self::contents::FoundShuffle;
pub use self::error::LogError;
pub use self::format::frame::{Epoch, Incarnation, Member};
pub use self::format::plain::plain_ids;
pub use self::format::record::{Record, RegistrationRecord, Report};
pub use self::ids::id_run::{IdRun, RUN_WINDOW_BYTES, RunWriter, runs_to_merge};
pub use self::ids::id_set::{IdSet, union};
pub use self::ids::present::{HeldIds, PresentIds, SLICE_IDS, slices};
pub use self::ids::scratch::Scratch;
pub use self::ledger::loss::{Loss, LossReasons, LostExtent, NewLosses, ranges};
pub use self::ledger::partition::{Availability, Ledger, LedgerPhase, Look};
pub use self::ledger::shuffle::ShuffleLedger;
pub use self::metadata_log::{LogInStore, MetadataLog, RecordReader};
pub use self::objects::object::{ListedObject, LogObject, LogObjects, OBJECT_COPIES};
pub use self::objects::ship::{REFRESH, Shipper};
pub use self::objects::shipped::ShippedLog;
pub use self::recovery::proof::HandOff;
pub use self::recovery::read::{Directory, DirectoryHealth, METADATA, Survey, newest_epoch};
pub use self::recovery::take_over::FoundLog;
pub use self::window::{FileWindow, within};
pub use self::write::writer::Deadlines;
