//! Keys of a worker in a cluster.

use super::{only_problem, parse, problems};
#[cfg(feature = "hdfs")]
use crate::remote::hdfs::RemoteLocation;

#[test]
fn coordinator_without_joining_networks_is_reported() {
    let with = |quorum: &str, rest: &str| {
        let text = format!("coordinator_quorum = [{quorum}]\n[embedded_coordinator]\nenable = true\n{rest}");
        let text = format!("{text}\n[localfile_store]\ndata_paths = [\"/d\"]");
        parse(&text).unwrap().warnings
    };
    let open = with("\"a:1\", \"b:1\"", "");
    assert!(open.iter().any(|warning| warning.contains("embedded_coordinator.worker_networks")), "{open:?}");
    assert!(with("\"a:1\", \"b:1\"", "worker_networks = [\"10.0.0.0/8\"]").is_empty());
    assert!(with("\"localhost:1\", \"127.0.0.1:2\", \"[::1]:3\"", "").is_empty());
}

#[test]
#[cfg(feature = "hdfs")]
fn cluster_requires_explicit_remote_paths() {
    let with = |line: &str| {
        format!("store_type = \"MEMORY_HDFS\"\ncoordinator_quorum = [\"c:1\"]\n[hdfs_store]\n{line}")
    };
    let refused = only_problem(&with(""));
    assert!(
        refused.starts_with("hdfs_store.allowed_paths = []: is required with a coordinator_quorum"),
        "{refused}"
    );
    let location = |text: &str| RemoteLocation::parse(text).unwrap();
    let named = parse(&with("allowed_paths = [\"hdfs://ns/a\"]")).unwrap();
    assert!(named.hdfs.allowed.permits(&location("hdfs://ns/a/b")));
    assert!(!named.hdfs.allowed.permits(&location("hdfs://ns/b")) && named.warnings.is_empty());
    let open = parse(&with("allowed_paths = [\"hdfs://ns/a\", \"*\"]")).unwrap();
    assert!(open.hdfs.allowed.permits(&location("hdfs://ns/b")));
    assert!(open.warnings.iter().any(|warning| warning.contains("hdfs_store.allowed_paths")));
    assert_eq!(parse(&open.to_toml()).unwrap(), open);
}

#[test]
fn coordinator_addresses_need_host_and_port() {
    let config = parse("store_type = \"memory\"\ncoordinator_quorum = \"a-1.b:21000, [::1]:5\"").unwrap();
    let shown: Vec<String> = config.heartbeat.coordinators.iter().map(ToString::to_string).collect();
    assert_eq!(shown, ["a-1.b:21000", "[::1]:5"]);
    for bad in ["a", "a:", ":1", "a:0", "a:65536", "a b:1", "::1:5", "http://a:1", "[x]:1"] {
        assert_eq!(
            problems(&format!("store_type = \"MEMORY\"\ncoordinator_quorum = [\"{bad}\"]")).len(),
            1,
            "{bad}"
        );
    }
}
