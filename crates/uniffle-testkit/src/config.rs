//! Configurations of tests: the text that a user would write, and a worker in this process that
//! uses it.

use std::collections::HashMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use uniffle_worker::config::{Config, Machine};
use uniffle_worker::server::{ConfigOrigin, Environment, Inherited, Worker};
use uniffle_worker::store::Tier;

/// Listeners that do not conflict with other processes: loopback, and ports that the system
/// chooses.
const OWN_LISTENERS: &[(&str, &str)] =
    &[("bind_address", "\"127.0.0.1\""), ("grpc_port", "0"), ("http_port", "0")];
/// Watermarks that ignore how full the machine's disk is.
const ROOMY_DISKS: &[(&str, &str)] = &[("disk_high_watermark", "1.0"), ("disk_low_watermark", "0.9999")];

/// Settings of a test. Settings in `top` and `local` replace the defaults of the harness.
#[derive(Debug, Clone, Copy)]
pub struct ConfigLines<'a> {
    /// `store_type`.
    pub store_type: &'a str,
    /// `memory_store.capacity`.
    pub capacity: &'a str,
    /// Lines before the first table.
    pub top: &'a str,
    /// More lines of `[memory_store]`.
    pub memory: &'a str,
    /// More lines of `[localfile_store]`.
    pub local: &'a str,
    /// Further tables.
    pub tables: &'a str,
}

impl Default for ConfigLines<'_> {
    fn default() -> Self {
        Self { store_type: "MEMORY_LOCALFILE", capacity: "32MiB", top: "", memory: "", local: "", tables: "" }
    }
}

impl ConfigLines<'_> {
    /// Returns the configuration of a worker with data in `data_paths`, whose names must be
    /// printable ASCII.
    pub fn text(&self, data_paths: &[impl AsRef<Path>]) -> String {
        let Self { store_type, capacity, top, memory, local, tables } = self;
        let data_paths: Vec<&Path> = data_paths.iter().map(AsRef::as_ref).collect();
        let roomy = unless_set(ROOMY_DISKS, local);
        format!(
            "store_type = \"{store_type}\"\n{top}\n\
             [memory_store]\ncapacity = \"{capacity}\"\n{memory}\n\
             [localfile_store]\ndata_paths = {data_paths:?}\n{roomy}{local}\n\
             {tables}\n"
        )
    }

    /// Returns the configuration of a worker in this process.
    pub fn own_text(&self, data_paths: &[impl AsRef<Path>]) -> String {
        let top = unless_set(OWN_LISTENERS, self.top) + self.top;
        ConfigLines { top: &top, ..*self }.text(data_paths)
    }

    /// Starts a worker in this process.
    pub async fn start(&self, data_paths: &[impl AsRef<Path>]) -> Worker {
        let config = parse(&self.own_text(data_paths));
        Worker::start(&config).await.expect("the worker did not start")
    }

    /// Starts a worker with `tiers` after the configured ones.
    pub async fn start_with_tiers(
        &self,
        tiers: Vec<Arc<dyn Tier>>,
        data_paths: &[impl AsRef<Path>],
    ) -> Worker {
        let environment = Environment { tiers, ..Environment::default() };
        let config = parse(&self.own_text(data_paths));
        Worker::start_in(environment, Inherited::default(), &config).await.expect("the worker did not start")
    }
}

/// Starts a worker in this process that re-reads `file` on a reload.
pub async fn start_from(file: &Path) -> Worker {
    let origin = ConfigOrigin { env: env(), machine: machine() };
    let config = Config::load(Some(file), &origin.env, &origin.machine).unwrap();
    let environment = Environment { origin: Some(origin), ..Environment::default() };
    Worker::start_in(environment, Inherited::default(), &config).await.expect("the worker did not start")
}

/// Parses a configuration for a fixed machine.
pub fn parse(text: &str) -> Config {
    Config::parse(text, &env(), &machine())
        .unwrap_or_else(|error| panic!("the configuration is refused: {error}\n{text}"))
}

/// Environment of a worker that is only reachable on this machine.
fn env() -> HashMap<String, String> {
    HashMap::from([("WORKER_IP".to_owned(), "127.0.0.1".to_owned())])
}

fn machine() -> Machine {
    Machine { memory_bytes: 8 << 30, cores: 2, state_dir: PathBuf::from("/nonexistent") }
}

/// Returns a line for each of `defaults` whose key is not set in `chosen`.
pub(crate) fn unless_set(defaults: &[(&str, &str)], chosen: &str) -> String {
    let is_set = |key: &str| chosen.lines().any(|line| line.split(['=', ' ']).next() == Some(key));
    let unset = defaults.iter().filter(|(key, _)| !is_set(key));
    unset.map(|(key, value)| format!("{key} = {value}\n")).collect()
}
