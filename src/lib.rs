//! `uniffle-worker`: a shuffle server for Apache Spark that speaks Apache Uniffle's protocols.
//!
//! | layer | modules | does |
//! | --- | --- | --- |
//! | composition | [`server`], [`config`] | builds every part from the configuration, ordered shutdown |
//! | listeners | [`listeners`], [`coordinator`] | translate, never decide |
//! | service | [`service`] | decides: register, write, report, read, purge |
//! | flush | [`flush`] | memory → tiers, at its own pace |
//! | state | [`app`], [`memory`], [`tiers`] | siblings that do not know each other |
//! | durability | [`durability`] | the metadata log, and whether it is complete |
//! | words | [`budget`], [`clock`], [`profile`], [`runtime`], [`telemetry`], [`metrics`], [`proto`], [`schema`] | used everywhere |
//!
//! Imports point down this table only; `tests/static_checks/layers.rs` holds that. Formats (`uniffle-wire`) and disks (`uniffle-io`)
//! are crates below all of it.
//!
//! *One send*: the listener reads the header → [`service`] refuses cheaply (state, app, ticket) → per block the listener asks
//! for room in the partition's chain and puts the bytes there → commit publishes the blocks' metadata → reply.
//!
//! *One read*: memory (in-flight batches in order, then the active chain) → local index → local data. A block is
//! visible in memory until its index record is readable in the next tier.

pub mod server;

pub mod config;

pub mod coordinator;
pub mod listeners;

pub mod service;

pub mod flush;

pub mod app;
pub mod memory;
pub mod tiers;

pub mod durability;

pub mod profile;

pub mod runtime;
pub mod telemetry;

pub mod budget;
pub mod clock;
pub mod metrics;
pub mod proto;
pub mod schema;
