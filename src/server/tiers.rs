//! The tiers below memory, as the store type asks for them.

use std::sync::Arc;

use anyhow::Context as _;
use prometheus::Registry;

use crate::config::Config;
use crate::flush::{FlushConfig, Flusher, Stores};
use crate::memory::Memory;
use crate::runtime::Tasks;
use crate::service::Tiers;
use crate::tiers::{HdfsStore, LocalConfig, LocalStore};

/// Starts the tiers; none for store type MEMORY. `server_id` is what coordinators are told, and names remote files.
pub(super) async fn start(
    config: &Config,
    server_id: String,
    memory: &Arc<Memory>,
    tasks: &Tasks,
    registry: &Registry,
) -> anyhow::Result<Option<Tiers>> {
    let (mut local, mut disks) = (None, 0);
    if config.worker.store_type.has_local() {
        let settings = LocalConfig { boot: boot_id(), ..config.local.clone() };
        let opened = settings.real_disks();
        disks = opened.len();
        let store =
            LocalStore::open(settings, opened, registry).await.context("localfile_store.data_paths")?;
        tasks.spawn("store maintenance", Arc::clone(&store).maintain(tasks.cancelled()));
        local = Some(store);
    }
    let hdfs = match config.worker.store_type.has_hdfs() {
        true => Some(start_hdfs(config, server_id, tasks, registry).await?),
        false => None,
    };
    if local.is_none() && hdfs.is_none() {
        return Ok(None);
    }
    let stores = Stores { local: local.clone(), hdfs: hdfs.clone() };
    let settings =
        FlushConfig { workers: disks * config.local.write_concurrency_per_disk, ..config.flush.clone() };
    let flusher = Flusher::start(settings, Arc::clone(memory), stores, tasks.clone(), registry)?;
    Ok(Some(Tiers { local, hdfs, flusher }))
}

/// The id that Linux gives to each start of its own; empty where there is none.
fn boot_id() -> String {
    let id = std::fs::read_to_string("/proc/sys/kernel/random/boot_id").unwrap_or_default();
    id.split_whitespace().collect()
}

#[cfg(feature = "hdfs")]
async fn start_hdfs(
    config: &Config,
    server_id: String,
    tasks: &Tasks,
    registry: &Registry,
) -> anyhow::Result<Arc<HdfsStore>> {
    use crate::tiers::HdfsConfig;
    use crate::tiers::hdfs::client::HdfsConnector;
    use crate::tiers::hdfs::hadoop::HadoopConf;
    use crate::tiers::hdfs::kerberos::Login;

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
        login.check(section.ticket_cache.as_deref()).context("Hadoop's security is on")?;
    }
    let connector = Arc::new(HdfsConnector { conf, login });
    let store =
        HdfsStore::new(HdfsConfig { server_id, ..section.clone() }, connector, tasks.clone(), registry)?;
    tasks.spawn("remote probe", Arc::clone(&store).keep_probing());
    if section.precheck {
        for location in &section.allowed.0 {
            store.precheck(location).await.map_err(|error| {
                anyhow::anyhow!("hdfs_store.precheck_enable: {location} cannot be used: {error}")
            })?;
        }
    }
    Ok(store)
}

#[cfg(not(feature = "hdfs"))]
#[expect(clippy::unused_async, reason = "as the other one")]
async fn start_hdfs(_: &Config, _: String, _: &Tasks, _: &Registry) -> anyhow::Result<Arc<HdfsStore>> {
    anyhow::bail!("store_type: this build has no HDFS (it was made without the feature `hdfs`)")
}
