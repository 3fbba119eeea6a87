//! Conversion of typical configurations of the Java server and of riffle.

use std::path::PathBuf;

use super::RIFFLE;
use crate::config::*;

fn machine() -> Machine {
    Machine { memory_bytes: 10 << 30, cores: 4, state_dir: PathBuf::from("/state") }
}

fn parse(text: &str) -> Config {
    Config::parse(text, &HashMap::new(), &machine())
        .unwrap_or_else(|error| panic!("import failed: {error}\n{text}"))
}

/// The example of Uniffle's guide, with common additions: keys with a counterpart, and some
/// without.
const SERVER_CONF: &str = "
# a comment
! another
rss.rpc.server.port 19999
rss.jetty.http.port=19998
rss.rpc.server.type GRPC_NETTY
rss.server.netty.port : 17001
rss.rpc.executor.size 2000
rss.storage.type MEMORY_LOCALFILE_HDFS
rss.coordinator.quorum c1:19999, c2:19999
rss.storage.basePath /data1/rssdata,\\
    /data2/rssdata
rss.server.tags ssd,rack-7
rss.server.flush.thread.alive 10
rss.server.flush.localfile.threadPool.size 20
rss.server.buffer.capacity 330g
rss.server.read.buffer.capacity 20g
rss.server.heartbeat.interval 10000
rss.server.decommission.check.interval 1500
rss.server.decommission.shutdown false
rss.server.health.check.enable true
rss.server.health.max.storage.usage.percentage 95
rss.server.health.storage.recovery.usage.percentage 85.5
rss.server.buffer.blockCount.capacity 1000000
rss.rpc.message.max.size 1073741824
rss.server.preAllocation.expired 120000
rss.server.commit.timeout 600000
rss.server.app.expired.withoutHeartbeat 120000
rss.server.memory.shuffle.highWaterMark.percentage 70.0
rss.server.memory.shuffle.lowWaterMark.percentage 10.0
rss.server.flush.cold.storage.threshold.size 128m
rss.server.single.buffer.flush.threshold 129m
rss.server.max.concurrency.of.per-partition.write 20
rss.server.huge-partition.size.threshold 20g
rss.server.huge-partition.memory.limit.ratio 0.2
rss.server.huge-partition.split.limit 40g
rss.server.huge-partition.size.hard.limit 9223372036854775807
rss.security.hadoop.kerberos.enable true
rss.security.hadoop.kerberos.keytab.file /etc/rss.keytab
rss.security.hadoop.kerberos.principal rss/_HOST@REALM
rss.security.hadoop.kerberos.proxy.user.enable true
rss.security.hadoop.kerberos.krb5-conf.file /etc/krb5.conf
rss.server.hadoop.fs.defaultFS hdfs://ns
rss.server.merge.enable true
rss.server.made.up 7
";

#[test]
#[cfg(feature = "hdfs")]
fn server_conf_is_imported_without_losing_keys() {
    let imported = import("server.conf", SERVER_CONF, &machine()).unwrap();
    assert_eq!(imported.missing, Vec::<String>::new(), "{}", imported.text);
    let config = parse(&imported.text);
    assert!(
        config.warnings.iter().all(|warning| !warning.contains("has no effect")),
        "{:?}",
        config.warnings
    );
    let keys: Vec<_> = SERVER_CONF.lines().filter_map(|line| line.split([' ', '=']).next()).collect();
    for key in keys.iter().filter(|key| key.starts_with("rss.")) {
        assert_eq!(
            imported.text.matches(&format!("# {key} ")).count(),
            1,
            "expected one comment about {key}: {}",
            imported.text
        );
    }
    let entries = config.entries();
    for (key, value) in [
        ("store_type", "\"MEMORY_LOCALFILE_HDFS\""),
        ("grpc_port", "19999"),
        ("urpc_port", "17001"),
        ("coordinator_quorum", "[\"c1:19999\", \"c2:19999\"]"),
        ("localfile_store.data_paths", "[\"/data1/rssdata\", \"/data2/rssdata\"]"),
        ("localfile_store.disk_low_watermark", "0.855"),
        ("tags", "[\"ssd\", \"rack-7\"]"),
        ("memory_store.capacity", "\"330GiB\""),
        ("memory_store.buffer_ticket_timeout_sec", "120"),
        ("decommission_check_interval_sec", "\"1s 500ms\""),
        ("hybrid_store.memory_spill_high_watermark", "0.7"),
        ("app_config.partition_split_enable", "true"),
        ("hdfs_store.allowed_paths", "[\"*\"]"),
    ] {
        assert_eq!(entries.get(key).map(String::as_str), Some(value), "{key}");
    }
    for part in ["remote merge is not supported", "rss.server.made.up 7: not a key", "treated as unset"] {
        assert!(imported.text.contains(part), "the import lacks {part}: {}", imported.text);
    }
}

#[test]
fn differing_java_defaults_are_written() {
    let imported =
        import("x", "rss.storage.type MEMORY_LOCALFILE\nrss.storage.basePath /d", &machine()).unwrap();
    let config = parse(&imported.text);
    assert_eq!((config.worker.grpc_port, config.worker.urpc_port), (19_999, Some(17_000)));
    let limits = &config.flush.limits;
    assert_eq!((limits.high_watermark, limits.low_watermark), (0.75, 0.25));
    assert!(config.worker.decommission_shutdown);
    assert!(
        imported.text.contains("# rss.rpc.server.port is not set; its default is 19999\ngrpc_port = 19999\n")
    );
    let grpc = import("x", "rss.rpc.server.type GRPC\nrss.server.netty.port 7", &machine()).unwrap();
    assert!(grpc.text.contains("# rss.server.netty.port 7: rss.rpc.server.type is GRPC"), "{}", grpc.text);
}

#[test]
fn storage_types_without_memory_get_a_memory_buffer() {
    for (theirs, ours, has_remote_paths) in [
        ("LOCALFILE", "MEMORY_LOCALFILE", false),
        ("HDFS", "MEMORY_HDFS", true),
        ("LOCALFILE_HDFS", "MEMORY_LOCALFILE_HDFS", true),
        ("localfile_hdfs", "MEMORY_LOCALFILE_HDFS", true),
    ] {
        let text = format!("rss.storage.type {theirs}\nrss.coordinator.quorum c:1\nrss.storage.basePath /d");
        let imported = import("x", &text, &machine()).unwrap();
        // Without the feature both are refused with the name of the store type.
        let is_built = cfg!(feature = "hdfs") || !has_remote_paths;
        let line = format!(
            "# rss.storage.type {theirs}: memory remains the buffer; clients keep their type\n{}store_type = \"{ours}\"",
            if is_built { "" } else { "# " }
        );
        assert!(imported.text.contains(&line), "the import lacks line {line}: {}", imported.text);
        assert_eq!(imported.text.contains("allowed_paths = [\"*\"]"), has_remote_paths, "{}", imported.text);
        if is_built {
            assert_eq!((&imported.missing, &imported.refused), (&Vec::new(), &Vec::new()));
            assert_eq!(parse(&imported.text).entries()["store_type"], format!("\"{ours}\""));
        }
    }
    let with_memory =
        import("x", "rss.storage.type MEMORY_LOCALFILE\nrss.storage.basePath /d", &machine()).unwrap();
    assert!(!with_memory.text.contains("remains the buffer"), "{}", with_memory.text);
}

#[test]
fn refused_values_become_comments_with_the_reason() {
    let text = "rss.storage.type S3\nrss.rpc.server.port 99999\nrss.server.tags a b\n\
                rss.server.buffer.capacity lots\nrss.coordinator.quorum c:1\nrss.storage.basePath /d";
    let imported = import("x", text, &machine()).unwrap();
    assert_eq!(imported.missing, Vec::<String>::new());
    parse(&imported.text);
    for part in [
        "# store_type = \"S3\": rejected, must be MEMORY, MEMORY_LOCALFILE",
        "# grpc_port = 99999: rejected, must be a port",
        "# tags = [\"a b\"]: rejected, must be tags of 1 to 100",
        "# rss.server.buffer.capacity lots: must be a size",
    ] {
        assert!(imported.text.contains(part), "the import lacks {part}: {}", imported.text);
    }
}

#[test]
fn refused_and_unreadable_values_are_reported() {
    let text = "rss.storage.type S3\nrss.server.tags a b\nrss.server.buffer.capacity 40xx\n\
                rss.coordinator.quorum c:1:2\nrss.storage.basePath relative\nrss.server.made.up 7";
    let imported = import("x", text, &machine()).unwrap();
    for part in [
        "store_type = \"S3\" (from rss.storage.type S3): rejected, must be MEMORY, MEMORY_LOCALFILE",
        "tags = [\"a b\"] (from rss.server.tags a b): rejected",
        "coordinator_quorum = [\"c:1:2\"] (from rss.coordinator.quorum c:1:2): rejected",
        "localfile_store.data_paths = [\"relative\"] (from rss.storage.basePath relative): rejected",
        "rss.server.buffer.capacity 40xx: must be a size such as 20g",
    ] {
        assert!(
            imported.refused.iter().any(|line| line.starts_with(part)),
            "no refused key starts with {part}: {:?}",
            imported.refused
        );
    }
    assert_eq!(imported.refused.len(), 5, "{:?}", imported.refused);
}

#[test]
fn input_without_keys_is_refused() {
    for text in ["", "\n", "# rss.storage.type MEMORY\n", "[metrics]\n", "[package]\nname = \"x\"\n"] {
        let error = import("x", text, &machine()).unwrap_err();
        assert!(error.contains("no known keys found"), "{error}");
    }
}

#[test]
fn imported_comments_contain_no_secrets() {
    let java = "rss.storage.type MEMORY\nrss.http.basic.authorizationCredentials dXNlcjpodXNo\n\
                rss.server.hadoop.fs.s3a.secret.key dXNlcjpodXNo\nrss.jetty.ssl.keymanager.password dXNlcjpodXNo\n";
    let riffle = "store_type = \"MEMORY\"\n[s3]\nsecret_access_key = \"dXNlcjpodXNo\"\n\
                  [metrics]\npush_gateway_endpoint = \"http://u:dXNlcjpodXNo@g:1\"\n";
    for text in [java, riffle] {
        let imported = import("x", text, &machine()).unwrap();
        assert!(imported.text.contains("<removed>"), "{}", imported.text);
        assert!(!format!("{imported:?}").contains("dXNlcjpodXNo"), "{imported:?}");
    }
}

#[test]
fn secret_keys_are_named_without_their_values() {
    let text = "store_type = \"MEMORY\"\n[embedded_coordinator]\nremote_storage_path = [\"s3a://ns\"]\n\
                remote_storage_conf = { ns = \"fs.s3a.secret.key=hush\" }\n\
                client_conf = { \"rss.client.password\" = \"hush\", \"rss.x\" = 1 }\n\
                [metrics]\nlabels = { zone = \"a\" }\npush_gateway_endpoint = \"http://u:hush@g:1\"\n";
    let imported = import("x", text, &machine()).unwrap();
    // A refused endpoint becomes a comment without its secret.
    assert_eq!(
        imported.secrets,
        ["embedded_coordinator.client_conf", "embedded_coordinator.remote_storage_conf"],
        "{}",
        imported.text
    );
    assert!(!format!("{:?}", (&imported.secrets, &imported.refused)).contains("hush"), "{imported:?}");
    assert_eq!(import("x", "rss.storage.type MEMORY", &machine()).unwrap().secrets, Vec::<String>::new());
}

#[test]
fn required_manual_additions_are_reported() {
    let imported = import("x", "rss.coordinator.quorum c:1", &machine()).unwrap();
    assert_eq!(imported.missing.len(), 1, "{imported:?}");
    assert!(imported.text.contains("# MISSING: localfile_store.data_paths"), "{}", imported.text);
    assert!(import("x", "this is nothing", &machine()).is_err());
}

#[test]
#[cfg(all(feature = "hdfs", feature = "otlp"))]
fn riffle_configuration_with_every_option_is_imported() {
    let with_unknown = format!("{RIFFLE}\n[urpc]\nportt = 1\n[app_config.more]\nx = \"a\\nb\"\n");
    for text in [RIFFLE, &with_unknown] {
        let imported = import("riffle.toml", text, &machine()).unwrap();
        assert_eq!(imported.missing, Vec::<String>::new(), "{}", imported.text);
        let config = parse(&imported.text);
        assert_eq!(config.entries(), parse(RIFFLE).entries());
        assert!(
            !config.warnings.iter().any(|warning| warning.contains("has no effect")),
            "{:?}",
            config.warnings
        );
        for (key, why) in crate::compat::NO_EFFECT {
            let is_expected = |line: &str| line.starts_with(&format!("# {key} = ")) && line.ends_with(why);
            assert_eq!(
                imported.text.lines().filter(|line| is_expected(line)).count(),
                1,
                "expected one line for {key}: {}",
                imported.text
            );
        }
        assert_eq!(imported.text.contains("# urpc.portt = 1: unknown"), text.len() > RIFFLE.len());
    }
}
