//! Keys of the HDFS tier.

use std::path::PathBuf;
use std::time::Duration;

use super::location::{AllowList, AllowedPath};
use crate::schema::kind::{HOUR, Kind, SECOND, count, flag, list, optional, parsed, path, seconds, text};
use crate::schema::section;

section! {
    /// How the tier works.
    #[table("hdfs_store", "HDFS. Remote paths and Hadoop settings come with each application; HADOOP_CONF_DIR names a directory with the worker's own core-site.xml and hdfs-site.xml, over which an application's settings are laid.")]
    #[table("hdfs_store.kerberos_security_config", "Where Hadoop's security is on. Without a keytab the tickets of KRB5CCNAME are used, which must be renewed from outside.")]
    pub struct HdfsConfig {
        /// Files written at a time per file system.
        #[key("hdfs_store.max_concurrency", count(1..=10_000), Restart)]
        pub max_concurrency: usize = 10,
        /// Files of one partition written at a time, where the application does not say how many.
        #[key("hdfs_store.partition_write_max_concurrency", count(1..=1000), Restart)]
        pub partition_write_max_concurrency: usize = 20,
        /// What an application may ask for instead (maxConcurrencyPerPartitionToWrite); more is cut to it.
        #[key("hdfs_store.partition_write_concurrency_limit", count(1..=1000), Restart)]
        pub partition_write_concurrency_limit: usize = 1000,
        /// Remote paths that applications may name, with everything below: the worker writes and deletes what they name.
        /// Needed with a coordinator_quorum; "*" permits every path. None with the embedded coordinator: those of its
        /// remote_storage_path, else all, with a warning.
        #[key("hdfs_store.allowed_paths", list(256, location()), Restart)]
        pub allowed_paths: Vec<AllowedPath> = Vec::new(),
        /// Time to write a batch; every MiB of it adds a second. Then it goes to local disks, or is tried again.
        #[key("hdfs_store.write_timeout_sec", seconds(SECOND..=HOUR), Restart)]
        pub write_timeout: Duration = 60 * SECOND,
        /// Write, read and delete a file in every allowed path at start, and do not start if that fails.
        #[key("hdfs_store.precheck_enable", flag(), Restart)]
        pub precheck: bool = false,
        /// Keytab of the worker's login, with a principal.
        #[key("hdfs_store.kerberos_security_config.keytab_path", optional(path()), Restart, example "\"/etc/uniffle.keytab\"")]
        pub keytab_path: Option<PathBuf> = None,
        /// Principal in the keytab.
        #[key("hdfs_store.kerberos_security_config.principal", optional(principal()), Restart, example "\"uniffle/host@REALM\"")]
        pub principal: Option<String> = None,
        /// Write as the application's user; the NameNodes need hadoop.proxyuser settings for the principal.
        #[key("hdfs_store.kerberos_security_config.proxy_user_enable", flag(), Restart)]
        pub proxy_user: bool = true,
        /// Directory with the worker's own core-site.xml and hdfs-site.xml.
        #[env("HADOOP_CONF_DIR", optional(text("a directory", |text| Ok(PathBuf::from(text)), |path| path.display().to_string())))]
        pub hadoop_conf_dir: Option<PathBuf> = None,
        /// Where the Kerberos tickets are when there is no keytab; by default where Kerberos has them.
        #[env("KRB5CCNAME", optional(parsed("a ticket cache", |text| Ok(text.to_owned()))))]
        pub ticket_cache: Option<String> = None,
        /// Partitions on their way to HDFS at once. More than that go to local disks where there are any.
        #[key("hybrid_store.memory_spill_to_hdfs_concurrency", count(1..=10_000), Restart)]
        pub in_flight_max: usize = 500,
        /// As told to coordinators: clients look for files that begin with it.
        pub server_id: String = String::new(),
        /// What clients may name: `allowed_paths`, else the embedded coordinator's. Default: everything.
        pub allowed: AllowList = AllowList::default(),
        /// Time for one call that moves no data.
        pub call_timeout: Duration = 60 * SECOND,
        /// How long a deletion is tried.
        pub purge_timeout: Duration = 600 * SECOND,
    }
}

fn location() -> Kind<AllowedPath> {
    let convert = |text: &str| {
        AllowedPath::parse(text)
            .map_err(|why| format!("paths such as \"hdfs://nameservice/uniffle\"; this one {why}"))
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
