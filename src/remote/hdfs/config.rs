//! Keys of the HDFS tier.
//!
//! Paths and Hadoop settings come with each registration. `HdfsConfig::allowed` limits the paths,
//! because the worker writes and deletes below each path that a client names.

use std::path::PathBuf;
use std::time::Duration;

use super::location::{AllowList, AllowedPath};
use crate::schema::kind::{HOUR, Kind, SECOND, count, flag, list, optional, parsed, path, seconds, text};
use crate::schema::section;

section! {
    /// How the tier works.
    #[table(
        "hdfs_store",
        "HDFS. Remote paths and Hadoop settings come with each application; the settings are \
         applied on top of core-site.xml and hdfs-site.xml in HADOOP_CONF_DIR. The worker writes \
         and deletes below the paths that applications use."
    )]
    #[table(
        "hdfs_store.kerberos_security_config",
        "Kerberos, if Hadoop's security is on. Without a keytab the tickets of KRB5CCNAME are used, \
         which must be renewed externally."
    )]
    pub struct HdfsConfig {
        /// Concurrently written files per file system.
        #[key("hdfs_store.max_concurrency", count(1..=10_000), Restart)]
        pub max_concurrency: usize = 10,
        /// Concurrently written files per partition, unless the application sets it.
        #[key("hdfs_store.partition_write_max_concurrency", count(1..=1000), Restart)]
        pub partition_write_max_concurrency: usize = 20,
        /// Upper bound of maxConcurrencyPerPartitionToWrite, which applications set; higher values
        /// are reduced to it.
        #[key("hdfs_store.partition_write_concurrency_limit", count(1..=1000), Restart)]
        pub partition_write_concurrency_limit: usize = 1000,
        /// Remote paths, subdirectories included, that applications may use; "*" = any. Required
        /// with a coordinator_quorum. Default: remote_storage_path, else any, with a warning.
        #[key("hdfs_store.allowed_paths", list(256, location()), Restart)]
        pub allowed_paths: Vec<AllowedPath> = Vec::new(),
        /// Timeout of a batch, plus one second per MiB; then it goes to local disks or is retried.
        #[key("hdfs_store.write_timeout_sec", seconds(SECOND..=HOUR), Restart)]
        pub write_timeout: Duration = 60 * SECOND,
        /// Write, read and delete a file in every allowed path at start, and refuse to start on
        /// failure.
        #[key("hdfs_store.precheck_enable", flag(), Restart)]
        pub precheck: bool = false,
        /// Keytab of the worker's login; needs a principal.
        #[key("hdfs_store.kerberos_security_config.keytab_path", optional(path()), Restart, example "\"/etc/uniffle.keytab\"")]
        pub keytab_path: Option<PathBuf> = None,
        /// Principal in the keytab.
        #[key("hdfs_store.kerberos_security_config.principal", optional(principal()), Restart, example "\"uniffle/host@REALM\"")]
        pub principal: Option<String> = None,
        /// Write as the application's user; the NameNodes need hadoop.proxyuser settings for the
        /// principal.
        #[key("hdfs_store.kerberos_security_config.proxy_user_enable", flag(), Restart)]
        pub proxy_user: bool = true,
        /// Directory of the worker's own core-site.xml and hdfs-site.xml.
        #[env("HADOOP_CONF_DIR", optional(text("a directory", |text| Ok(PathBuf::from(text)), |path| path.display().to_string())))]
        pub hadoop_conf_dir: Option<PathBuf> = None,
        /// Kerberos ticket cache, used without a keytab. Default: Kerberos' default cache.
        #[env("KRB5CCNAME", optional(parsed("a ticket cache", |text| Ok(text.to_owned()))))]
        pub ticket_cache: Option<String> = None,
        /// Partitions flushed to HDFS concurrently; further ones go to local disks if there are
        /// any.
        #[key("hybrid_store.memory_spill_to_hdfs_concurrency", count(1..=10_000), Restart)]
        pub in_flight_max: usize = 500,
        /// Id announced to coordinators: clients look for files whose names begin with it.
        pub server_id: String = String::new(),
        /// Paths that clients may name: `allowed_paths`, else the embedded coordinator's. Default:
        /// everything.
        pub allowed: AllowList = AllowList::default(),
    }
}

fn location() -> Kind<AllowedPath> {
    let convert = |text: &str| {
        AllowedPath::parse(text)
            .map_err(|why| format!("paths such as \"hdfs://nameservice/uniffle\"; this path {why}"))
    };
    parsed("paths such as hdfs://nameservice/uniffle, or *", convert)
}

const PRINCIPAL_BYTES_MAX: usize = 1024;

fn principal() -> Kind<String> {
    let convert = |text: &str| {
        let is_plain = |c: char| !c.is_control() && !c.is_whitespace();
        let is_principal =
            text.split_once('@').is_some_and(|(name, realm)| !name.is_empty() && !realm.is_empty());
        if is_principal && text.len() <= PRINCIPAL_BYTES_MAX && text.chars().all(is_plain) {
            Ok(text.to_owned())
        } else {
            Err("a Kerberos principal such as \"uniffle/host@REALM\"".to_owned())
        }
    };
    parsed("a Kerberos principal", convert)
}
