//! `uniffle-worker`: a shuffle server for Apache Spark that speaks Apache Uniffle's protocols.
//!
//! | layer | modules | does |
//! | --- | --- | --- |
//! | composition | [`server`], [`config`] | builds and stops all parts in order |
//! | listeners | [`listeners`] | translate; decide only whom they serve |
//! | service | [`service`] | decides: register, write, report, read, purge |
//! | flush | [`flush`] | moves data from memory to the tiers, at its own pace |
//! | remote | [`remote`] | tiers whose files clients read themselves |
//! | state | [`app`], [`memory`] (`uniffle-memory`), [`store`] | siblings that do not know each other |
//! | `uniffle-log` | [`log`] | the metadata log, and whether it is complete |
//! | `uniffle-telemetry` | [`telemetry`] | logs and traces |
//! | shared | [`build`], [`compat`], [`proto`] | used everywhere |
//! | `uniffle-base` | `allocator`, `budget`, `damage`, `log_limiter`, `sched`, [`clock`], [`metrics`], [`runtime`], [`schema`] | the same for every crate |
//!
//! Imports point only down this table; `tests/static_checks/layers.rs` enforces that. Formats
//! (`uniffle-wire`), disks (`uniffle-io`) and the coordinator protocol (`uniffle-coordinator`) are
//! crates below all layers.
//!
//! *A send*: the listener reads the header. [`service`] refuses cheaply (state, app, ticket). For
//! each block it reserves room in the partition's chain, and copies the bytes there that the
//! listener reads. The commit publishes the blocks' metadata, then the listener replies.
//!
//! *A read*: memory (in-flight batches in order, then the active chain), then the local index, then
//! local data. A block is visible in memory until its index record is readable in the next tier.

pub mod server;

pub mod config;

pub mod listeners;

pub mod service;

pub mod flush;

pub mod remote;

pub mod app;
pub mod store;
pub use uniffle_memory as memory;

pub mod build;
pub mod compat;
pub mod proto;

pub use uniffle_base::{clock, metrics, runtime, schema};
pub use uniffle_log as log;
pub use uniffle_telemetry as telemetry;
