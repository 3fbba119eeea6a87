//! Builds the tiers below memory for the configured store type, in the order in which data moves
//! down, and the flusher that writes to them.
//!
//! At most one tier may be read through the worker. An object store below local disks forms one
//! tier with them. Tiers recover their own state here; `service` restores registrations and reports
//! from it.

use std::sync::Arc;

use anyhow::Context as _;
use axum::Router;
use futures::FutureExt as _;
use prometheus::Registry;
use rustix::process::{Resource, getrlimit};

use crate::config::Config;
use crate::flush::Flusher;
use crate::log::HandOff;
use crate::memory::Memory;
use crate::remote::hdfs::HdfsStore;
use crate::runtime::Tasks;
use crate::store::{LocalConfig, LocalStore, Tier, TierHeap, Tiers};

/// Inputs of the tiers besides the configuration.
pub(super) struct TierInputs {
    /// The id reported to coordinators. It names remote files and the prefix of objects.
    pub(in crate::server) server_id: String,
    pub(super) precheck: Precheck,
    /// State of the metadata log at the end of the previous process.
    pub(in crate::server) hand_off: Option<HandOff>,
    /// Further tiers, placed after the configured ones.
    pub(in crate::server) further_tiers: Vec<Arc<dyn Tier>>,
}

/// Whether a start checks remote paths.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(in crate::server) enum Precheck {
    /// Remote paths are checked if `precheck_enable` of the tier is set.
    AsConfigured,
    /// The rehearsal has just checked remote paths, and the predecessor has already ended.
    Done,
}

/// Starts the tiers and the flusher. Returns `None` if there is no tier below memory.
pub(super) async fn start(
    config: &Config,
    inputs: TierInputs,
    memory: &Arc<Memory>,
    tasks: &Tasks,
    registry: &Registry,
) -> anyhow::Result<Option<Arc<Flusher>>> {
    let mut tiers: Vec<Arc<dyn Tier>> = Vec::new();
    let store_type = config.worker.store_type;
    if store_type.has_local() && !store_type.has_object() {
        let settings = local_config(config, inputs.hand_off.clone(), memory);
        let disks = settings.real_disks();
        let store = LocalStore::open(settings, disks, heap_of(memory), registry).await;
        tiers.push(store.context("localfile_store.data_paths")?);
    }
    if store_type.has_hdfs() {
        tiers.push(start_hdfs(config, inputs.server_id.clone(), inputs.precheck, tasks, registry).await?);
    }
    if store_type.has_object() {
        tiers.push(start_object(config, &inputs, memory, tasks, registry).await?);
    }
    tiers.extend(inputs.further_tiers);
    if tiers.is_empty() {
        return Ok(None);
    }
    let tiers = Tiers::new(tiers).context("only one tier may be read through the worker")?;
    for tier in tiers.maintained() {
        tasks.spawn("tier maintenance", tier.maintain(tasks.cancelled().boxed()));
    }
    let flusher = Flusher::start(config.flush.clone(), Arc::clone(memory), tiers, tasks.clone(), registry)?;
    Ok(Some(flusher))
}

/// Returns the budgets charged for heap memory of the tiers.
fn heap_of(memory: &Memory) -> TierHeap {
    TierHeap { extents: memory.extents().clone(), heap: Some(memory.heap().clone()) }
}

/// Returns the configuration of the local tier. If an earlier process left blocks in memory, the
/// data directories must know their shuffles.
fn local_config(config: &Config, hand_off: Option<HandOff>, memory: &Memory) -> LocalConfig {
    let read_memory_bytes = config.memory.read_capacity_bytes;
    let recoverable = memory.recoverable_shuffles();
    let in_memory = || format!("memory_store.backing has {recoverable} shuffles of this worker");
    let had_data = (recoverable > 0).then(in_memory);
    let file_bytes_max = getrlimit(Resource::Fsize).current.unwrap_or(u64::MAX);
    LocalConfig { read_memory_bytes, hand_off, had_data, file_bytes_max, ..config.local.clone() }
}

#[cfg(feature = "hdfs")]
pub(in crate::server) async fn start_hdfs(
    config: &Config,
    server_id: String,
    precheck: Precheck,
    tasks: &Tasks,
    registry: &Registry,
) -> anyhow::Result<Arc<HdfsStore>> {
    use crate::remote::hdfs::HdfsConfig;

    let section = &config.hdfs;
    let connector = Arc::new(hdfs_connector(config)?);
    let store =
        HdfsStore::new(HdfsConfig { server_id, ..section.clone() }, connector, tasks.clone(), registry)?;
    if section.precheck && precheck == Precheck::AsConfigured {
        for location in &section.allowed.0 {
            store.precheck(location).await.map_err(|error| {
                anyhow::anyhow!("hdfs_store.precheck_enable: cannot use {location}: {error}")
            })?;
        }
    }
    Ok(store)
}

/// Reads the files of Hadoop and Kerberos. Connects to no server.
#[cfg(feature = "hdfs")]
pub(super) fn hdfs_connector(config: &Config) -> anyhow::Result<crate::remote::hdfs::client::HdfsConnector> {
    use crate::remote::hdfs::client::HdfsConnector;
    use crate::remote::hdfs::hadoop::HadoopConf;
    use crate::remote::hdfs::kerberos::Login;

    let section = &config.hdfs;
    let conf = match &section.hadoop_conf_dir {
        Some(directory) => HadoopConf::read(directory).context("HADOOP_CONF_DIR")?,
        None => HadoopConf::default(),
    };
    let mut login = Login {
        keytab: section.keytab_path.clone().zip(section.principal.clone()),
        act_as_users: section.proxy_user,
        cache_user: None,
    };
    if login.is_required() || conf.is_secure() {
        login.check(section.ticket_cache.as_deref()).context("Kerberos login for HDFS")?;
    }
    Ok(HdfsConnector { conf, login })
}

#[cfg(not(feature = "hdfs"))]
pub(in crate::server) async fn start_hdfs(
    _: &Config,
    _: String,
    _: Precheck,
    _: &Tasks,
    _: &Registry,
) -> anyhow::Result<Arc<HdfsStore>> {
    anyhow::bail!("store_type: this build has no HDFS (feature `hdfs`)")
}

/// Starts the object tier. A worker with the id of an ended one continues with its objects, on any
/// machine.
#[cfg(feature = "object")]
async fn start_object(
    config: &Config,
    TierInputs { server_id, precheck, hand_off, .. }: &TierInputs,
    memory: &Memory,
    tasks: &Tasks,
    registry: &Registry,
) -> anyhow::Result<Arc<dyn Tier>> {
    use std::time::SystemTime;

    use crate::store::object::client::Client;
    use crate::store::object::layout::part_of;
    use crate::store::object::{Bucket, ObjectSettings};
    use crate::store::offload::{LocalDisks, OffloadSettings, OffloadTier, Watermarks};

    let section = &config.object;
    let client = Client::open(section, tasks, registry).context("[object_store]")?;
    let root = part_of(server_id);
    if section.precheck && *precheck == Precheck::AsConfigured {
        client.probe(&root).await.context("object_store.precheck_enable")?;
    }
    let (prefix, began) = (object_store::path::Path::from(root.as_str()), SystemTime::now());
    let settings = ObjectSettings {
        segment_bytes: section.segment_bytes,
        part_bytes: section.part_bytes,
        read_memory_bytes: config.memory.read_capacity_bytes,
        answers_ahead: section.max_concurrency / 2,
        cache_disks: section.cache_disks(),
        cache_bytes: section.cache_bytes,
        ..ObjectSettings::new(root)
    };
    let (store, extents) = (client.store(), memory.extents());
    let opened = Bucket::open(store, settings, extents, tasks.clone(), registry).await;
    let object = opened.with_context(|| client.url().to_string())?;
    // After the claim: before it, the uploads may belong to a process that still runs.
    match client.abort_uploads(&prefix, began).await {
        Ok(0) => {}
        Ok(uploads) => tracing::info!(uploads, "aborted unfinished uploads of an earlier process"),
        Err(error) => tracing::warn!(%error, "cannot abort unfinished uploads of an earlier process"),
    }
    let (heap, tasks) = (heap_of(memory), tasks.clone());
    if !config.worker.store_type.has_local() {
        let opened = OffloadTier::without_disks(object, heap, tasks, registry).await;
        return Ok(opened.context("object_store.url")?);
    }
    let pass_bytes = PASS_OBJECTS * section.segment_bytes;
    let settings = OffloadSettings {
        watermarks: Watermarks { high: section.offload_high, low: section.offload_low },
        cold_bytes: config.flush.cold_bytes,
        pass_bytes,
    };
    let config = LocalConfig { data_log_bytes: pass_bytes, ..local_config(config, hand_off.clone(), memory) };
    let local = LocalDisks { disks: config.real_disks(), config };
    let opened = OffloadTier::open(settings, local, object, heap, tasks, registry).await;
    Ok(opened.context("localfile_store.data_paths, object_store.url")?)
}

/// Checks that the store accepts a worker with this id. A start without access to the store fails.
#[cfg(feature = "object")]
pub(in crate::server) async fn ask_object_store(config: &Config, server_id: &str) -> anyhow::Result<()> {
    use crate::store::object::Bucket;
    use crate::store::object::client::Client;
    use crate::store::object::layout::part_of;

    let tasks = Tasks::new();
    let client =
        Client::open(&config.object, &tasks, &crate::metrics::registry()?).context("[object_store]")?;
    let root = part_of(server_id);
    let checks = async {
        client.probe(&root).await?;
        // Refuses an upgrade from a program with another layout before it begins.
        anyhow::Ok(Bucket::require_layout(&*client.store(), &root).await?)
    };
    let checked = checks.await;
    tasks.cancel();
    checked.with_context(|| client.url().to_string())
}

#[cfg(not(feature = "object"))]
pub(in crate::server) async fn ask_object_store(_: &Config, _: &str) -> anyhow::Result<()> {
    anyhow::bail!("store_type: this build has no object storage (feature `object`)")
}

/// Number of segments moved per shuffle in one pass before the next shuffle is chosen. A data log
/// on a disk holds as much.
#[cfg(feature = "object")]
const PASS_OBJECTS: u64 = 4;

#[cfg(not(feature = "object"))]
async fn start_object(
    _: &Config,
    _: &TierInputs,
    _: &Memory,
    _: &Tasks,
    _: &Registry,
) -> anyhow::Result<Arc<dyn Tier>> {
    anyhow::bail!("store_type: this build has no object storage (feature `object`)")
}

/// Returns the administration routes of single tiers.
#[cfg(feature = "object")]
pub(in crate::server) fn admin_routes(tiers: &Tiers) -> Router {
    use crate::listeners::http::admin::orphans;
    use crate::store::offload::OffloadTier;

    let objects = tiers.find::<OffloadTier>().map(|tier| Arc::clone(tier.objects()));
    objects.map_or_else(Router::new, orphans::routes)
}

#[cfg(not(feature = "object"))]
pub(in crate::server) fn admin_routes(_: &Tiers) -> Router {
    Router::new()
}
