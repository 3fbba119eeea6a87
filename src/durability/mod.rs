//! Durable knowledge about shuffles: the metadata log, the rule that decides whether it is complete
//! (`proof`), and the ledger of lost blocks.
//!
//! An acknowledged record survives any end of the process or the machine. The log has two copies on
//! the data directories, and can be copied to an object store. Block ids are held in compressed
//! sets, and in unnamed files if they exceed the heap.
//!
//! Data and index files belong to `tiers::local`, and responses to clients to `service`.

mod checkpoint;
mod contents;
mod error;
pub mod frame;
mod generation;
mod hand_off;
mod id_chunk;
mod id_run;
mod id_set;
mod ledger;
mod log;
mod loss;
mod mark;
mod object_file;
mod objects;
mod on_damage;
mod plain;
mod present;
pub mod proof;
mod read;
mod record;
mod resumable;
mod resume;
mod scratch;
mod ship;
mod shipped;
mod shuffle_ledger;
mod spare;
mod take_over;
mod window;
mod writer;

pub use self::contents::FoundShuffle;
pub use self::error::LogError;
pub use self::frame::{Epoch, Incarnation, Member};
pub use self::hand_off::HandOff;
pub use self::id_run::{IdRun, RUN_WINDOW_BYTES, RunWriter, runs_to_merge};
pub use self::id_set::{IdSet, union};
pub use self::ledger::{Ledger, Look, Phase, Verdict};
pub use self::log::{LogInStore, MetadataLog, Said};
pub use self::loss::{Blame, Entered, Loss, LostExtent, ranges};
pub use self::objects::{ListedObject, LogObject, LogObjects, OBJECT_COPIES};
pub use self::on_damage::{Hearer, OnDamage};
pub use self::plain::plain_ids;
pub use self::present::{HeldIds, PresentIds, SLICE_IDS, slices};
pub use self::read::{Directory, Health, METADATA, Survey, newest_epoch};
pub use self::record::{Record, RecordError, Registration, Report};
pub use self::scratch::Scratch;
pub use self::ship::{REFRESH, Shipper};
pub use self::shipped::ShippedLog;
pub use self::shuffle_ledger::ShuffleLedger;
pub use self::take_over::Found;
pub use self::window::{FileWindow, within};
pub use self::writer::Deadlines;
