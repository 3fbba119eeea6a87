//! Reloads the configuration while the worker runs.
//!
//! A file is applied as a whole or not at all. If it has errors, all are logged and the old
//! configuration remains. Changed keys are merged into the running configuration
//! ([`Config::renewed`]), which must stay valid. The new values are handed to the listeners, the
//! service and the tiers. Keys that need a restart are listed in a warning.
//!
//! Certificates are read again on each reload. A value that an operator set through the API remains
//! until the file's own value changes.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use parking_lot::Mutex;
use prometheus::{IntCounterVec, Registry};
use tokio::time::{MissedTickBehavior, interval};

use crate::config::{self, Config, Machine};
use crate::listeners::http::admin::Control;
use crate::metrics;
use crate::service::Service;
use crate::store::LocalStore;
use crate::telemetry::AUDIT;

use super::RuntimeSettings;
use crate::server::tls::Tls;

/// Interval at which the file is polled.
const WATCH_INTERVAL: Duration = Duration::from_secs(2);

/// Inputs of a configuration besides its file.
#[derive(Debug, Clone)]
pub struct ConfigOrigin {
    /// Environment of the process.
    pub env: HashMap<String, String>,
    /// Detected properties of the machine.
    pub machine: Machine,
}

/// Keys that a reload found changed.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct ReloadOutcome {
    /// Keys in effect now.
    pub changed: Vec<String>,
    /// Keys in effect after the next start.
    pub waiting: Vec<String>,
}

/// Reloads the configuration and applies changes to the running worker.
#[derive(Debug)]
pub(in crate::server) struct Reloader {
    origin: Option<ConfigOrigin>,
    running: Mutex<Config>,
    service: Arc<Service>,
    live: Arc<RuntimeSettings>,
    tls: Tls,
    reloads: IntCounterVec,
}

metrics::table! {
    pub(in crate::server) struct ReloadMetrics {
        reloads: IntCounterVec["result"] =
            "config_reloads_total", "Reloads of the configuration, by result";
    }
}

/// A validated configuration, ready to apply.
struct Next {
    config: Config,
    tls: Tls,
    changed: Vec<String>,
    waiting: Vec<String>,
    warnings: Vec<String>,
}

impl Reloader {
    pub(in crate::server) fn new(
        config: &Config,
        origin: Option<ConfigOrigin>,
        service: Arc<Service>,
        live: Arc<RuntimeSettings>,
        tls: Tls,
        registry: &Registry,
    ) -> prometheus::Result<Self> {
        let ReloadMetrics { reloads } = ReloadMetrics::new(registry)?;
        for result in ["ok", "refused"] {
            reloads.with_label_values(&[result]);
        }
        Ok(Self { origin, running: Mutex::new(config.clone()), service, live, tls, reloads })
    }

    /// Returns the configuration in effect by key, without secrets.
    pub(in crate::server) fn entries(&self) -> BTreeMap<&'static str, String> {
        self.running.lock().redacted_entries()
    }

    /// Reloads the file. `trigger` is logged. Blocks on file I/O.
    ///
    /// # Errors
    /// Every error of the file, or that there is no file. Nothing has changed then.
    pub(super) fn read_again(&self, trigger: &str) -> Result<ReloadOutcome, String> {
        let mut running = self.running.lock();
        let outcome = self.read(running.source.as_deref()).and_then(|new| self.prepare(&running, &new));
        let outcome = outcome.map(|next| {
            let Next { config, tls, mut changed, waiting, warnings } = next;
            for warning in warnings {
                tracing::warn!("configuration: {warning}");
            }
            self.apply(&config, &changed);
            changed.extend(self.tls.different(&tls).into_iter().map(str::to_owned));
            changed.sort();
            changed.dedup();
            self.tls.renew(&tls);
            *running = config;
            ReloadOutcome { changed, waiting }
        });
        drop(running);
        match &outcome {
            Ok(ReloadOutcome { changed, waiting }) => {
                self.reloads.with_label_values(&["ok"]).inc();
                tracing::info!(target: AUDIT, action = "reload", trigger, result = "ok", ?changed);
                if !waiting.is_empty() {
                    tracing::warn!(keys = ?waiting, "changed keys need a restart to take effect");
                }
            }
            Err(reasons) => {
                self.reloads.with_label_values(&["refused"]).inc();
                let reasons = reasons.replace(":\n  ", ": ").replace("\n  ", "; ");
                tracing::error!(
                    target: AUDIT,
                    action = "reload",
                    trigger,
                    result = "refused",
                    "reload refused, the old configuration remains: {reasons}"
                );
            }
        }
        outcome
    }

    /// Calls [`Reloader::read_again`] on a blocking thread.
    pub(in crate::server) async fn reload_on_thread(
        self: &Arc<Self>,
        trigger: &'static str,
    ) -> Result<ReloadOutcome, String> {
        let reloader = Arc::clone(self);
        let outcome = tokio::task::spawn_blocking(move || reloader.read_again(trigger)).await;
        outcome.unwrap_or_else(|error| Err(error.to_string()))
    }

    fn origin(&self) -> Result<&ConfigOrigin, String> {
        self.origin.as_ref().ok_or_else(|| "this worker has no configuration to reload".to_owned())
    }

    fn read(&self, path: Option<&Path>) -> Result<Config, String> {
        let path = path.ok_or("the worker was started without a configuration file")?;
        let ConfigOrigin { env, machine } = self.origin()?;
        Config::load(Some(path), env, machine).map_err(|error| error.to_string())
    }

    /// Performs all steps whose failure refuses the reload.
    fn prepare(&self, running: &Config, new: &Config) -> Result<Next, String> {
        let config = running.renewed(new);
        let ConfigOrigin { env, machine } = self.origin()?;
        if let Err(error) = Config::parse(&config.to_toml(), env, machine) {
            return Err(format!("invalid with the running values of keys that need a restart: {error}"));
        }
        let tls = Tls::load(&config).map_err(|error| error.to_string())?;
        let (changed, waiting) = (different(running, &config), different(&config, new));
        let is_new = |warning: &&String| !running.warnings.contains(warning);
        let warnings = new.warnings.iter().filter(is_new).cloned().collect();
        Ok(Next { config, tls, changed, waiting, warnings })
    }

    /// Returns whether the files differ from the running configuration, or are invalid. They may
    /// have changed between the start and the first poll, or the worker has resumed after a failed
    /// upgrade.
    fn is_behind(&self) -> bool {
        let running = self.running.lock();
        let next = self.read(running.source.as_deref()).and_then(|new| self.prepare(&running, &new));
        next.map_or(true, |next| {
            !(next.changed.is_empty() && next.waiting.is_empty() && self.tls.different(&next.tls).is_empty())
        })
    }

    /// Applies the changes to the running worker. Tags and log filter are applied only if the
    /// file's own value changed, since an operator may have set others.
    fn apply(&self, config: &Config, changed: &[String]) {
        let has_changed = |prefix: &str| changed.iter().any(|key| key.starts_with(prefix));
        if has_changed("tags") {
            self.live.reload_tags(config.worker.tags.clone());
        }
        if has_changed("log.filter")
            && let Err(error) = self.live.set_log_filter(&config.log.filter)
        {
            tracing::warn!(%error, "cannot apply log.filter; the previous filter remains");
        }
        if has_changed("heartbeat_interval_seconds") {
            self.live.set_heartbeat_interval(config.heartbeat.interval);
        }
        let service = &self.service;
        service.memory().tickets().set_max_count(config.memory.tickets_max);
        service.apps().set_heartbeat_timeout(config.app.heartbeat_timeout);
        service.ingest.set_partition_limits(config.service.partition_limits);
        service.lifecycle.set_fairness(&config.service.fairness);
        service.lifecycle.set_quotas(&config.service.quota);
        if let Some(flusher) = service.flusher() {
            flusher.set_limits(config.flush.limits);
        }
        if let Some(store) = service.tiers().find::<LocalStore>() {
            store.set_min_disks(config.local.min_disks);
            store.set_watermarks(config.local.high_watermark, config.local.low_watermark);
        }
    }

    /// Reloads whenever the configuration or a file of `[tls]` has changed, until `stop`.
    pub(in crate::server) async fn watch(self: Arc<Self>, stop: impl Future<Output = ()>) {
        if self.watched().is_empty() || self.origin.is_none() {
            return;
        }
        let mut ticks = interval(WATCH_INTERVAL);
        ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
        tokio::pin!(stop);
        let mut taken = None;
        let mut seen = Vec::new();
        loop {
            tokio::select! {
                biased;
                () = &mut stop => return,
                _ = ticks.tick() => {}
            }
            let mut now = Vec::new();
            for path in self.watched() {
                now.push(FileStamp::of(&path).await);
            }
            // A file is read once it has been unchanged for one poll interval. A file missing for a
            // moment, as with some editors, is no change.
            let has_rested = now == seen && now.first().is_some_and(Option::is_some);
            seen.clone_from(&now);
            if !has_rested || taken.as_ref() == Some(&now) {
                continue;
            }
            let is_first_look = taken.replace(now).is_none();
            let reloader = Arc::clone(&self);
            let _ = tokio::task::spawn_blocking(move || {
                if !is_first_look || reloader.is_behind() {
                    let _ = reloader.read_again("file"); // errors have been logged
                }
            })
            .await;
        }
    }

    /// Returns the watched files, the configuration first. Empty without a configuration file.
    fn watched(&self) -> Vec<PathBuf> {
        let running = self.running.lock();
        let Some(source) = &running.source else { return Vec::new() };
        let tls = &running.tls;
        let tls = [&tls.cert_file, &tls.key_file, &tls.client_ca_file, &tls.ca_file].into_iter().flatten();
        std::iter::once(source).chain(tls).cloned().collect()
    }
}

/// Fingerprint that detects changes of a file.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct FileStamp {
    modified: Option<SystemTime>,
    bytes: u64,
    inode: u64,
}

impl FileStamp {
    async fn of(path: &Path) -> Option<Self> {
        use std::os::unix::fs::MetadataExt as _;
        let metadata = tokio::fs::metadata(path).await.ok()?;
        Some(Self { modified: metadata.modified().ok(), bytes: metadata.len(), inode: metadata.ino() })
    }
}

/// Returns the keys whose values differ.
fn different(left: &Config, right: &Config) -> Vec<String> {
    let (left, right) = (left.entries(), right.entries());
    let keys: BTreeSet<&str> = left.keys().chain(right.keys()).copied().collect();
    keys.into_iter().filter(|key| left.get(key) != right.get(key)).map(str::to_owned).collect()
}

impl Control for Reloader {
    fn set_tags(&self, tags: Vec<String>) -> Result<(), String> {
        config::check_tags(&tags)?;
        self.live.set_tags(tags);
        Ok(())
    }

    fn set_log_filter(&self, filter: &str) -> Result<(), String> {
        self.live.set_log_filter(filter)
    }

    fn reload(&self) -> Result<(Vec<String>, Vec<String>), String> {
        let ReloadOutcome { changed, waiting } = self.read_again("call")?;
        Ok((changed, waiting))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(text: &str) -> Config {
        let machine = Machine { memory_bytes: 1 << 30, cores: 2, state_dir: PathBuf::from("/state") };
        Config::parse(text, &HashMap::new(), &machine).unwrap()
    }

    #[test]
    fn reload_changes_certificates_but_not_encryption() {
        let files = |name: &str| format!("[tls]\ncert_file = \"/{name}\"\nkey_file = \"/key\"\n");
        let next = |running: &str, new: &str| {
            let (running, new) = (parse(running), parse(new));
            let next = running.renewed(&new);
            (different(&running, &next), different(&next, &new))
        };
        let keys = |names: &[&str]| names.iter().map(|name| (*name).to_owned()).collect::<Vec<_>>();
        assert_eq!(next(&files("a"), &files("b")), (keys(&["tls.cert_file"]), keys(&[])));
        let both = keys(&["tls.cert_file", "tls.key_file"]);
        assert_eq!(next(&files("a"), ""), (keys(&[]), both.clone()));
        assert_eq!(next("", &files("a")), (keys(&[]), both));
        let others = "[tls]\nca_file = \"/ca\"\n";
        assert_eq!(
            next("", others),
            (keys(&["tls.ca_file"]), keys(&[])),
            "a CA without a listener that uses TLS has no effect"
        );
        assert_eq!(next(others, &files("a")).0, keys(&["tls.ca_file"]));
        let fewer = files("a") + "listeners = [\"http\"]";
        assert_eq!(next(&files("a"), &fewer), (keys(&[]), keys(&["tls.listeners"])));
    }

    #[test]
    fn reload_separates_changeable_keys() {
        let running = parse("tags = [\"a\"]\ngrpc_port = 1");
        let new = parse(
            "tags = [\"b\"]\ngrpc_port = 2\nheartbeat_interval_seconds = 5\n[memory_store]\ncapacity = \"64MiB\"\n\
             [hybrid_store]\nmemory_spill_high_watermark = 0.5\n[app_config]\npartition_hard_limit = \"1TB\"\n\
             [log]\nfilter = \"debug\"\nmax_files = 3",
        );
        let next = running.renewed(&new);
        let changed = different(&running, &next);
        assert_eq!(
            changed,
            [
                "app_config.partition_hard_limit",
                "heartbeat_interval_seconds",
                "hybrid_store.memory_spill_high_watermark",
                "log.filter",
                "tags"
            ]
        );
        let waiting = different(&next, &new);
        assert_eq!(
            waiting,
            [
                "grpc_port",
                "log.max_files",
                "memory_store.block_max_count",
                "memory_store.capacity",
                "memory_store.heap_capacity"
            ]
        );
        assert!(different(&new, &new.clone()).is_empty());
    }
}
