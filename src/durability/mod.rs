//! What was acknowledged and must be known after any end of the process or the machine: the metadata log, the rule that
//! says whether it is complete, and the ledger of what is lost.
//!
//! | file | does |
//! | --- | --- |
//! | `record` | what a shuffle says: its registrations and reports, as bytes (pure) |
//! | `plain` | the ids of most reports, read without a `Report` (pure) |
//! | `frame` | the frames of the log, and the epoch: who holds it (pure) |
//! | `proof` | the rule of recovery: is anything acknowledged missing? (pure) |
//! | `read` | what the data directories have of it |
//! | `log` | its handle |
//! | `writer`, `contents` | the one writer: two copies, synced in groups; how much of them is dead |
//! | `generation` | begun anew where a copy fails or most is dead |
//! | `hand_off`, `resumable`, `resume` | or resumed: what the process before says; whether it may be (pure); that it is |
//! | `take_over` | what an earlier process left in it |
//! | `objects`, `shipped`, `ship` | the log in an object store: names, as a start finds it, on its way there |
//! | `mark` | how much of a copy is acknowledged, beside it |
//! | `ledger`, `loss` | which blocks of a partition are there or lost, by id (pure); why |
//! | `on_damage` | who hears of blocks that are gone |
//! | `id_chunk`, `id_set` | block ids in at most 8 bytes each (pure) |
//! | `id_run`, `scratch` | block ids in files without a name |
//! | `present` | ids that are in the tiers, charged to their application (pure) |
//! | `shuffle_ledger` | those of all partitions of a shuffle, shared |
//!
//! Not here: data and index files (`tiers::local`), what is answered to clients (`service`).

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
#[cfg(test)]
mod measure;
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
mod take_over;
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
pub use self::objects::{LogObject, LogObjects, OBJECT_COPIES};
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
pub use self::writer::Deadlines;
