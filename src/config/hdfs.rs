//! `[hdfs_store]`: reading, checking and printing of its keys in one place.

use std::collections::HashMap;
use std::path::PathBuf;
use std::time::Duration;

use toml::Table;

use super::print::{duration, number, put};
use super::reader::{Reader, Unit, absolute_path};
use super::{Config, HdfsSection};
use crate::tiers::hdfs::RemoteLocation;

const ALLOWED_PATHS_MAX: usize = 256;
const PRINCIPAL_BYTES_MAX: usize = 1024;

const KEYTAB: &str = "hdfs_store.kerberos_security_config.keytab_path";
const PRINCIPAL: &str = "hdfs_store.kerberos_security_config.principal";

pub(super) fn read(reader: &mut Reader, env: &HashMap<String, String>) -> HdfsSection {
    let second = Duration::from_secs(1);
    let set = |name: &str| env.get(name).filter(|text| !text.trim().is_empty()).cloned();
    HdfsSection {
        max_concurrency: reader.count("hdfs_store.max_concurrency", 10, 1..=10_000),
        partition_write_max_concurrency: reader.count(
            "hdfs_store.partition_write_max_concurrency",
            20,
            1..=1000,
        ),
        allowed_paths: reader
            .texts("hdfs_store.allowed_paths", ALLOWED_PATHS_MAX, location)
            .unwrap_or_default(),
        write_timeout: reader.duration(
            "hdfs_store.write_timeout_sec",
            60 * second,
            second..=3600 * second,
            Unit::Seconds,
        ),
        precheck_enable: reader.boolean("hdfs_store.precheck_enable", false),
        keytab_path: reader.text(KEYTAB, absolute_path),
        principal: reader.text(PRINCIPAL, principal),
        proxy_user_enable: reader.boolean("hdfs_store.kerberos_security_config.proxy_user_enable", true),
        hadoop_conf_dir: set("HADOOP_CONF_DIR").map(PathBuf::from),
        ticket_cache: set("KRB5CCNAME"),
    }
}

fn location(text: &str) -> Result<RemoteLocation, String> {
    RemoteLocation::parse(text)
        .map_err(|why| format!("paths such as \"hdfs://nameservice/uniffle\"; this one {why}"))
}

fn principal(text: &str) -> Result<String, String> {
    let is_sound = |c: char| !c.is_control() && !c.is_whitespace();
    let is_principal =
        text.split_once('@').is_some_and(|(name, realm)| !name.is_empty() && !realm.is_empty());
    if is_principal && text.len() <= PRINCIPAL_BYTES_MAX && text.chars().all(is_sound) {
        Ok(text.to_owned())
    } else {
        Err("a Kerberos principal such as \"uniffle/host@REALM\"".to_owned())
    }
}

pub(super) fn check(reader: &mut Reader, config: &mut Config) {
    if config.store_type.has_hdfs() && !cfg!(feature = "hdfs") {
        let allowed =
            "MEMORY or MEMORY_LOCALFILE: this build has no HDFS (it was made without the feature `hdfs`)";
        reader.refuse("store_type", config.store_type.as_str(), allowed);
    }
    let section = &config.hdfs;
    match (&section.keytab_path, &section.principal) {
        (Some(_), None) => reader.refuse(PRINCIPAL, "(absent)", "needed with a keytab_path"),
        (None, Some(_)) => reader.refuse(KEYTAB, "(absent)", "needed with a principal"),
        _ => {}
    }
    if section.precheck_enable && config.store_type.has_hdfs() && allowed(config).is_empty() {
        reader.refuse("hdfs_store.precheck_enable", true, "false, or hdfs_store.allowed_paths to check");
    }
    if config.store_type.has_hdfs() && allowed(config).is_empty() {
        config.warnings.push(
            "hdfs_store.allowed_paths is empty: clients may name any remote path, and the worker writes and deletes there"
                .to_owned(),
        );
    }
    let is_default = section.keytab_path.is_none() && section.allowed_paths.is_empty();
    if !config.store_type.has_hdfs() && !is_default {
        config
            .warnings
            .push(format!("[hdfs_store] has no effect with store_type {}", config.store_type.as_str()));
    }
}

/// What clients may name: the keys' paths, else those that the embedded coordinator hands out. Empty = everything.
pub(super) fn allowed(config: &Config) -> Vec<RemoteLocation> {
    if !config.hdfs.allowed_paths.is_empty() || !config.is_embedded() {
        return config.hdfs.allowed_paths.clone();
    }
    let paths = &config.embedded_coordinator.remote_storage_paths;
    paths.iter().filter_map(|path| RemoteLocation::parse(path).ok()).collect()
}

pub(super) fn print(section: &HdfsSection) -> Table {
    let mut table = Table::new();
    put(&mut table, "max_concurrency", number(section.max_concurrency));
    put(&mut table, "partition_write_max_concurrency", number(section.partition_write_max_concurrency));
    let allowed: Vec<String> = section.allowed_paths.iter().map(ToString::to_string).collect();
    put(&mut table, "allowed_paths", allowed);
    put(&mut table, "write_timeout_sec", duration(section.write_timeout, 1));
    put(&mut table, "precheck_enable", section.precheck_enable);
    let mut kerberos = Table::new();
    if let Some(path) = &section.keytab_path {
        put(&mut kerberos, "keytab_path", path.display().to_string());
    }
    if let Some(principal) = &section.principal {
        put(&mut kerberos, "principal", principal.clone());
    }
    put(&mut kerberos, "proxy_user_enable", section.proxy_user_enable);
    put(&mut table, "kerberos_security_config", kerberos);
    table
}
