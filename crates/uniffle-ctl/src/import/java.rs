//! Maps the keys of the Java server's `server.conf` (`ShuffleServerConf.java`, `RssBaseConf.java`,
//! version 0.10) to ours.
//!
//! Where our default differs from Java's, the import writes Java's default, so that the worker
//! behaves like the server it replaces.

use std::collections::BTreeMap;

use toml::Value;

use super::found::{ImportedKeys, OldEntry};

/// Conversion of a Java value.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum As {
    /// Unchanged: a number, a boolean or a word.
    Same,
    /// A storage type.
    StoreType,
    /// A comma-separated list.
    List,
    /// Bytes, or a text such as `20g`, in which g is 2^30.
    Size,
    /// Milliseconds.
    Millis,
    /// A percentage: 75 becomes 0.75.
    Percent,
}

const THREADS: &str = "the number of threads depends on cores and disks";
const JVM: &str = "no JVM and no Netty";
const BUILT_IN: &str = "not configurable";
const BUFFERS: &str = "buffers are allocated automatically";
const MERGE: &str = "remote merge is not supported";
const KERBEROS: &str = "rss.security.hadoop.kerberos.enable is not true";
const RETRY: &str = "a failed batch is retried on other disks or tiers until it is written";
const WITH_MEMORY: &str = "memory remains the buffer; clients keep their type";
const HEALTH: &str = "health of the disks is determined automatically";

/// Java key, our key, conversion, and Java's default if ours differs.
const KEYS: &[(&str, &str, As, Option<&str>)] = &[
    ("rss.storage.type", "store_type", As::StoreType, None),
    ("rss.rpc.server.port", "grpc_port", As::Same, Some("19999")),
    ("rss.server.netty.port", "urpc_port", As::Same, Some("17000")),
    ("rss.jetty.http.port", "http_port", As::Same, None),
    ("rss.coordinator.quorum", "coordinator_quorum", As::List, None),
    ("rss.server.tags", "tags", As::List, None),
    ("rss.server.heartbeat.interval", "heartbeat_interval_seconds", As::Millis, None),
    ("rss.server.decommission.check.interval", "decommission_check_interval_sec", As::Millis, None),
    ("rss.server.decommission.shutdown", "decommission_shutdown", As::Same, Some("true")),
    ("rss.storage.basePath", "localfile_store.data_paths", As::List, None),
    (
        "rss.server.health.max.storage.usage.percentage",
        "localfile_store.disk_high_watermark",
        As::Percent,
        Some("90"),
    ),
    (
        "rss.server.health.storage.recovery.usage.percentage",
        "localfile_store.disk_low_watermark",
        As::Percent,
        Some("80"),
    ),
    ("rss.server.buffer.capacity", "memory_store.capacity", As::Size, None),
    ("rss.server.buffer.blockCount.capacity", "memory_store.block_max_count", As::Same, None),
    ("rss.server.preAllocation.expired", "memory_store.buffer_ticket_timeout_sec", As::Millis, None),
    (
        "rss.server.memory.shuffle.highWaterMark.percentage",
        "hybrid_store.memory_spill_high_watermark",
        As::Percent,
        Some("75"),
    ),
    (
        "rss.server.memory.shuffle.lowWaterMark.percentage",
        "hybrid_store.memory_spill_low_watermark",
        As::Percent,
        Some("25"),
    ),
    (
        "rss.server.single.buffer.flush.threshold",
        "hybrid_store.memory_single_buffer_max_spill_size",
        As::Size,
        Some("128m"),
    ),
    (
        "rss.server.flush.cold.storage.threshold.size",
        "hybrid_store.memory_spill_to_cold_threshold_size",
        As::Size,
        Some("64m"),
    ),
    (
        "rss.server.app.expired.withoutHeartbeat",
        "app_config.app_heartbeat_timeout_min",
        As::Millis,
        Some("60000"),
    ),
    (
        "rss.server.huge-partition.size.threshold",
        "app_config.partition_limit_threshold",
        As::Size,
        Some("20g"),
    ),
    (
        "rss.server.huge-partition.memory.limit.ratio",
        "app_config.partition_limit_memory_backpressure_ratio",
        As::Same,
        None,
    ),
    ("rss.server.huge-partition.split.limit", "app_config.partition_split_threshold", As::Size, None),
    ("rss.server.huge-partition.size.hard.limit", "app_config.partition_hard_limit", As::Size, None),
    ("rss.rpc.message.max.size", "grpc.max_message_size", As::Size, None),
    (
        "rss.server.max.concurrency.of.per-partition.write",
        "hdfs_store.partition_write_max_concurrency",
        As::Same,
        Some("30"),
    ),
    (
        "rss.server.max.concurrency.limit.of.per-partition.write",
        "hdfs_store.partition_write_concurrency_limit",
        As::Same,
        None,
    ),
    (
        "rss.security.hadoop.kerberos.keytab.file",
        "hdfs_store.kerberos_security_config.keytab_path",
        As::Same,
        None,
    ),
    (
        "rss.security.hadoop.kerberos.principal",
        "hdfs_store.kerberos_security_config.principal",
        As::Same,
        None,
    ),
    (
        "rss.security.hadoop.kerberos.proxy.user.enable",
        "hdfs_store.kerberos_security_config.proxy_user_enable",
        As::Same,
        None,
    ),
];

/// Java keys, or prefixes that end in a dot, without a counterpart. The first match applies.
const OTHERS: &[(&str, &str)] = &[
    ("rss.rpc.server.type", "urpc_port opens the raw TCP listener in addition to gRPC"),
    (
        "rss.server.read.buffer.capacity",
        "the default of memory_store.read_buffer_capacity is enough, for reads from disk only",
    ),
    ("rss.server.buffer.capacity.ratio", "share of the JVM's memory; set memory_store.capacity"),
    (
        "rss.server.health.min.storage.percentage",
        "see localfile_store.healthy_check_min_disks, a number of disks",
    ),
    (
        "rss.server.health.check.interval.ms",
        "see localfile_store.disk_healthy_check_interval_sec, for checks that write",
    ),
    ("rss.server.health.", HEALTH),
    (
        "rss.server.localstorage.initialize.max.fail.number",
        "failed disks are avoided; healthy_check_min_disks is the required number",
    ),
    ("rss.server.disk.capacity.ratio", "see localfile_store.disk_high_watermark, a share of the file system"),
    ("rss.server.read.buffer.capacity.ratio", "share of the JVM's memory"),
    ("rss.server.disk.capacity", "see localfile_store.disk_high_watermark, a share of the file system"),
    (
        "rss.server.disk-capacity.watermark.check.enabled",
        "watermarks are always shares of the whole file system",
    ),
    ("rss.server.high.watermark.write", "see localfile_store.disk_high_watermark"),
    ("rss.server.low.watermark.write", "see localfile_store.disk_low_watermark"),
    ("rss.server.cleanup.threshold", BUILT_IN),
    ("rss.server.flush.", THREADS),
    ("rss.server.heartbeat.threadNum", THREADS),
    ("rss.rpc.executor.", THREADS),
    ("rss.jetty.corePool.size", THREADS),
    ("rss.jetty.maxPool.size", THREADS),
    ("rss.jetty.http.idle.timeout", "see http.request_timeout_sec"),
    ("rss.jetty.stop.timeout", "see shutdown.flush_timeout_sec"),
    ("rss.jetty.", "TLS needs PEM files, see [tls]"),
    ("rss.server.heartbeat.delay", "the first heartbeat is sent when the listeners are open"),
    ("rss.server.heartbeatReportOnUnregisterEnabled", BUILT_IN),
    ("rss.server.netty.handler.idle.timeout", "see tcp.idle_timeout_sec"),
    ("rss.server.netty.", JVM),
    ("rss.rpc.netty.", JVM),
    ("rss.rpc.metrics.enabled", "metrics are always enabled"),
    ("rss.jvm.", JVM),
    ("rss.kryo.", JVM),
    ("rss.io.serializations", JVM),
    ("rss.server.commit.", "a commit waits for up to 600 s"),
    ("rss.server.write.slow.threshold", "see /api/v1/apps/APP/explain"),
    ("rss.server.write.retry.max", RETRY),
    ("rss.server.pending.event.timeout.sec", RETRY),
    ("rss.server.hybrid.storage.", RETRY),
    ("rss.server.multistorage.", RETRY),
    (
        "rss.server.storage.flushOperationTimeoutSec",
        "see hdfs_store.write_timeout_sec; hung local disks are detected",
    ),
    ("rss.server.storage.resourceRemoveOperationTimeoutSec", "deletions run in the background"),
    ("rss.server.storage.audit.log.enabled", "the log target audit has applications and losses, not files"),
    (
        "rss.server.rpc.audit.log.",
        "the log target audit has applications and losses, not calls; see [tracing]",
    ),
    ("rss.server.storageMediaProvider.", "the medium is read from the kernel"),
    ("rss.storage.media.provider.", "the medium is read from the kernel"),
    (
        "rss.server.single.buffer.flush.enabled",
        "always enabled; see hybrid_store.memory_single_buffer_max_spill_size",
    ),
    ("rss.server.single.buffer.flush.blocksNumberThreshold", "see memory_store.block_max_count"),
    ("rss.server.shuffle.flush.threshold", BUILT_IN),
    ("rss.server.shuffleBufferManager.trigger.flush.interval", "flushing is triggered by memory pressure"),
    ("rss.server.shuffleBuffer.type", BUILT_IN),
    ("rss.server.buffer.", "memory is one region, divided into segments"),
    ("rss.server.event.size.threshold.", "histogram buckets are fixed"),
    ("rss.server.index.size.hint", BUFFERS),
    ("rss.server.leak.shuffledata.check.interval", "leftovers are deleted periodically"),
    ("rss.server.topN.", BUILT_IN),
    ("rss.server.summary.metric.", "summaries are histograms"),
    ("rss.server.metrics.", "histogram buckets are fixed"),
    ("rss.server.displayMetricsList", BUILT_IN),
    ("rss.server.log.app.detail.", "see /api/v1/apps/APP/explain"),
    ("rss.server.blockIdManagerClass", BUILT_IN),
    ("rss.server.localStorageManagerClass", "a batch goes to any disk, so a partition may be on several"),
    ("rss.server.merge.", MERGE),
    ("rss.server.hadoop.", "set Hadoop's settings in the files of HADOOP_CONF_DIR"),
    ("rss.server.id", "the id consists of address and ports"),
    ("rss.storage.data.replica", "set by clients: spark.rss.data.replica"),
    ("rss.storage.localFileWriterClass", "see localfile_store.direct_io"),
    ("rss.storage.", BUFFERS),
    ("rss.coordinator.rpc.client.type", "gRPC"),
    ("rss.security.hadoop.kerberos.enable", "enabled by keytab_path and principal"),
    ("rss.security.hadoop.kerberos.krb5-conf.file", "set the variable KRB5_CONFIG"),
    ("rss.security.hadoop.kerberos.relogin.interval.sec", "tickets are renewed automatically"),
    ("rss.test.mode.enable", BUILT_IN),
    ("rss.metrics.reporter.class", "see metrics.push_gateway_endpoint"),
    ("rss.metrics.", "see [metrics]"),
    ("rss.reconfigure.interval.sec", "a changed file is reloaded within seconds"),
    ("rss.random.port.", "port 0 selects a free one"),
    ("rss.port.max.retry", "a port in use fails the start"),
    ("rss.http.basic.", "see [admin], which has a bearer token"),
];

/// Parses `text` if it is a `server.conf`.
pub(super) fn read(text: &str) -> Option<ImportedKeys> {
    let mut given = properties(text);
    given.keys().find(|key| key.starts_with("rss."))?;
    let mut found = ImportedKeys::default();
    // Java ignores Kerberos keys unless Kerberos is enabled, and the Netty port if the type of the
    // server is GRPC.
    let is_true = |value: Option<&String>| value.is_some_and(|value| value.eq_ignore_ascii_case("true"));
    let has_kerberos = is_true(given.get("rss.security.hadoop.kerberos.enable"));
    let is_grpc_only =
        given.get("rss.rpc.server.type").is_some_and(|value| value.eq_ignore_ascii_case("GRPC"));
    for &(java, ours, kind, default) in KEYS {
        let value = given.remove(java);
        let why = match () {
            () if !has_kerberos && java.starts_with("rss.security.hadoop.kerberos.") => KERBEROS,
            () if is_grpc_only && ours == "urpc_port" => "rss.rpc.server.type is GRPC",
            () => "",
        };
        match (&value, default) {
            (Some(value), _) if !why.is_empty() => found.leave(&was(java, value), why),
            (Some(value), _) => take(&mut found, java, ours, kind, value),
            (None, Some(default)) if why.is_empty() => {
                if let Some(value) = kind.read(default) {
                    found.take(ours, value, Some(format!("{java} is not set; its default is {default}")));
                }
            }
            (None, _) => {}
        }
    }
    if found.has("app_config.partition_split_threshold") {
        found.take("app_config.partition_split_enable", Value::Boolean(true), None);
    }
    for (java, value) in given {
        let known = OTHERS.iter().find(|(known, _)| match known.ends_with('.') {
            true => java.starts_with(known),
            false => java == *known,
        });
        found.leave(&was(&java, &value), known.map_or("not a key of the Java server 0.10", |(_, why)| *why));
    }
    Some(found)
}

fn take(found: &mut ImportedKeys, java: &str, ours: &str, kind: As, text: &str) {
    let was = was(java, text);
    match kind.read(text) {
        // Java treats -1 and the largest number as "not set".
        Some(Value::Integer(i64::MIN..=-1 | i64::MAX)) => found.leave(&was, "treated as unset"),
        Some(value) => {
            let is_given_memory = kind == As::StoreType && with_memory(text).is_some();
            let note = if is_given_memory { format!(": {WITH_MEMORY}") } else { String::new() };
            found.take(ours, value, Some(format!("{}{note}", was.shown())));
        }
        None => found.refuse(&was, format!("must be {}", kind.name())),
    }
}

/// Returns our store type for a Java type without memory. Memory is always a tier here.
fn with_memory(text: &str) -> Option<&'static str> {
    match text.trim().to_ascii_uppercase().as_str() {
        "LOCALFILE" => Some("MEMORY_LOCALFILE"),
        "HDFS" => Some("MEMORY_HDFS"),
        "LOCALFILE_HDFS" => Some("MEMORY_LOCALFILE_HDFS"),
        _ => None,
    }
}

fn was<'a>(key: &'a str, value: &'a str) -> OldEntry<'a> {
    OldEntry { key, between: " ", value }
}

impl As {
    fn name(self) -> &'static str {
        match self {
            Self::Same => "a value",
            Self::StoreType => "a storage type",
            Self::List => "a list",
            Self::Size => "a size such as 20g",
            Self::Millis => "a number of milliseconds",
            Self::Percent => "a percentage",
        }
    }

    /// Returns the converted value, or `None` if `text` is invalid.
    fn read(self, text: &str) -> Option<Value> {
        let text = text.trim();
        let whole = || text.parse::<i64>().ok();
        Some(match self {
            Self::Same => match (whole(), text.parse::<f64>(), text) {
                (Some(number), ..) => Value::Integer(number),
                (None, Ok(number), _) => Value::Float(number),
                (None, Err(_), "true" | "TRUE") => Value::Boolean(true),
                (None, Err(_), "false" | "FALSE") => Value::Boolean(false),
                (None, Err(_), text) => Value::from(text),
            },
            Self::StoreType => with_memory(text).map_or_else(|| Value::from(text), Value::from),
            Self::List => {
                let parts = text.split(',').map(str::trim).filter(|part| !part.is_empty());
                Value::Array(parts.map(Value::from).collect())
            }
            Self::Size => Value::Integer(bytes(text)?),
            Self::Millis => match whole()? {
                number if number < 0 => Value::Integer(number),
                number if number % 1000 == 0 => Value::from(format!("{}s", number / 1000)),
                number => Value::from(format!("{number}ms")),
            },
            Self::Percent => Value::Float(text.parse::<f64>().ok().filter(|it| it.is_finite())? / 100.0),
        })
    }
}

/// Parses a Java size: a letter is a power of 1024, with an optional b (`UnitConverter.java`).
fn bytes(text: &str) -> Option<i64> {
    let lower = text.to_ascii_lowercase();
    let digits = lower.find(|c: char| !c.is_ascii_digit() && c != '-').unwrap_or(lower.len());
    let (number, unit) = lower.split_at(digits);
    let shift = match unit.trim().trim_end_matches('b') {
        "" => 0,
        "k" => 10,
        "m" => 20,
        "g" => 30,
        "t" => 40,
        "p" => 50,
        _ => return None,
    };
    number.parse::<i64>().ok()?.checked_mul(1 << shift)
}

/// Parses a Java properties file. The last occurrence of a key counts.
fn properties(text: &str) -> BTreeMap<String, String> {
    let mut found = BTreeMap::new();
    let mut line = String::new();
    for part in text.lines() {
        line.push_str(part.trim_start());
        if line.ends_with('\\') && !line.starts_with(['#', '!']) {
            line.pop();
            continue;
        }
        let whole = std::mem::take(&mut line);
        let whole = whole.trim();
        if whole.is_empty() || whole.starts_with(['#', '!']) {
            continue;
        }
        let end = whole.find(|c: char| c.is_whitespace() || c == '=' || c == ':').unwrap_or(whole.len());
        let (key, value) = whole.split_at(end);
        let value = value.trim_start();
        let value = value.strip_prefix(['=', ':']).unwrap_or(value).trim();
        found.insert(key.to_owned(), value.to_owned());
    }
    found
}

/// Returns the table of keys for docs/migration.md.
#[cfg(test)]
pub(super) fn reference() -> String {
    let mut text = "| Java (`server.conf`) | here | |\n|---|---|---|\n".to_owned();
    for (java, ours, kind, default) in KEYS {
        let read = match kind {
            As::Same => "",
            As::StoreType => {
                "`LOCALFILE`, `HDFS` and `LOCALFILE_HDFS` get the prefix `MEMORY_`: memory remains the \
                 buffer"
            }
            As::List => "commas become a list",
            As::Size => "20g is 20 × 2^30",
            As::Millis => "milliseconds become a duration",
            As::Percent => "75 becomes 0.75",
        };
        let default = default.map(|default| format!("Java's default is {default}"));
        let notes: Vec<&str> =
            [read].into_iter().chain(default.as_deref()).filter(|note| !note.is_empty()).collect();
        text.push_str(&format!("| `{java}` | `{ours}` | {} |\n", notes.join("; ")));
    }
    for (java, why) in OTHERS {
        let all = if java.ends_with('.') { "…" } else { "" };
        text.push_str(&format!("| `{java}{all}` | – | {why} |\n"));
    }
    text
}
