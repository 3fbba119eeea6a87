//! Names of keys: aliases, misspellings, wrong tables, duplicates, and all keys of riffle.

use super::{ConfigError, only_problem, parse};
use crate::compat::NO_EFFECT;

#[test]
fn aliases_of_keys_are_read() {
    let text = "[metrics]\nhttp_port = 7\n[localfile_store]\nmin_number_of_available_disks = 1";
    let config = parse(text).unwrap();
    assert_eq!((config.worker.http_port, config.local.min_disks), (7, 1));
    let tls = "[tls]\ncert_file = \"/a\"\nkey_file = \"/b\"\n";
    let config = parse(&format!("{tls}doors = [\"http\"]")).unwrap();
    assert_eq!(config, parse(&format!("{tls}listeners = [\"http\"]")).unwrap());
}

#[test]
fn unknown_keys_name_the_nearest() {
    assert!(only_problem("gprc_port = 1").contains("did you mean grpc_port?"));
    assert!(only_problem("[memory_store]\ncapasity = 1").contains("did you mean memory_store.capacity?"));
    assert!(only_problem("[memory_stor]\ncapacity = 1").contains("did you mean [memory_store]?"));
    assert!(only_problem("zzzzqqqqxxxx = 1").ends_with("unknown key"));
}

/// Names over 100 bytes, and names after the 50th problem, are compared with no key.
#[test]
fn oversized_or_many_names_are_not_compared() {
    let long = "k".repeat(900_000);
    let problem = only_problem(&format!("{long} = 1"));
    assert!(problem.len() < 300 && problem.ends_with("unknown key"), "{}", problem.len());
    let secret = only_problem(&format!("{long}_password = \"hush\""));
    assert!(!secret.contains("hush"), "{secret}");
    let many: String = (0..20_000).map(|number| format!("gprc_port{number} = 1\n")).collect();
    let ConfigError::Invalid { problems, .. } = parse(&many).unwrap_err() else {
        panic!("expected the error of an invalid configuration")
    };
    let offered = problems.iter().filter(|it| it.to_string().contains("did you mean")).count();
    assert_eq!((problems.len(), offered), (20_000, 50));
}

#[test]
fn keys_outside_their_table_name_the_table() {
    assert!(only_problem("capacity = 1").contains("belongs in the table [memory_store]"));
    assert!(only_problem("[log]\ntags = []").contains("belongs at the top level"));
    assert!(only_problem("memory_store = 5").contains("must be a table"));
}

#[test]
fn key_and_alias_together_are_refused() {
    assert!(only_problem("http_port = 1\n[metrics]\nhttp_port = 1").contains("given twice"));
}

/// One value for each key in riffle's examples and its `config.rs`. `allowed_paths` is not
/// riffle's: it is required with HDFS and a `coordinator_quorum`.
pub(super) const RIFFLE: &str = r#"
        store_type = "MEMORY_LOCALFILE_HDFS"
        coordinator_quorum = ["c:1"]
        tags = ["riffle"]
        grpc_port = 1
        urpc_port = 2
        http_port = 3
        heartbeat_interval_seconds = 2
        fallback_random_ports_enable = true
        initial_unhealthy_status_enable = false
        conf_reload_enable = true
        [memory_store]
        capacity = "1G"
        buffer_ticket_timeout_sec = 300
        buffer_ticket_check_interval_sec = 10
        dashmap_shard_amount = 128
        [localfile_store]
        data_paths = ["/a", "/b"]
        min_number_of_available_disks = 1
        launch_purge_enable = false
        disk_high_watermark = 0.8
        disk_low_watermark = 0.7
        disk_max_concurrency = 2000
        disk_write_buf_capacity = "1M"
        disk_read_buf_capacity = "1M"
        disk_healthy_check_interval_sec = 60
        direct_io_enable = false
        direct_io_read_enable = true
        direct_io_append_enable = true
        io_duration_threshold_sec = 300
        index_consistency_detection_enable = false
        io_limiter = { capacity = "1G", read_enable = true, write_enable = true }
        read_io_sendfile_enable = false
        read_ahead_options = { batch_size = "14M", batch_number = 4 }
        [hdfs_store]
        max_concurrency = 50
        partition_write_max_concurrency = 20
        allowed_paths = ["hdfs://ns/uniffle"]
        precheck_enable = false
        kerberos_security_config = { keytab_path = "/k", principal = "a@B" }
        [hybrid_store]
        memory_spill_high_watermark = 0.8
        memory_spill_low_watermark = 0.2
        memory_single_buffer_max_spill_size = "256M"
        memory_spill_to_cold_threshold_size = "64M"
        memory_spill_to_localfile_concurrency = 4000
        memory_spill_to_hdfs_concurrency = 500
        memory_spill_max_concurrency = 1000
        huge_partition_memory_spill_to_hdfs_threshold_size = "64M"
        huge_partition_fallback_enable = false
        sensitive_watermark_spill_enable = false
        async_watermark_spill_trigger_enable = false
        async_watermark_spill_trigger_interval_ms = 500
        [runtime_config]
        read_thread_num = 100
        localfile_write_thread_num = 100
        hdfs_write_thread_num = 20
        http_thread_num = 2
        default_thread_num = 10
        dispatch_thread_num = 100
        write_thread_num = 200
        grpc_thread_num = 100
        [metrics]
        push_gateway_endpoint = "http://gateway:1"
        push_interval_sec = 10
        labels = { env = "x" }
        [log]
        path = "/log"
        rotation = "Hourly"
        max_file_size = "512M"
        max_log_files = 10
        log_level = "INFO"
        [app_config]
        app_heartbeat_timeout_min = 5
        partition_limit_enable = true
        partition_limit_threshold = "20G"
        partition_limit_memory_backpressure_ratio = 0.2
        block_id_manager_type = "DEFAULT"
        partition_split_enable = false
        partition_split_threshold = "40G"
        [tracing]
        jaeger_reporter_endpoint = "http://jaeger:4317"
        jaeger_service_name = "riffle"
        [health_service_config]
        alive_app_number_max_limit = 100
        disk_used_ratio_health_threshold = 0.9
        memory_allocated_threshold = "10G"
        service_hang_of_mem_continuous_unchange_sec = 600
        service_hang_of_app_valid_number = 10
        [historical_apps_config]
        retention_days = 1
        backend = "SLED"
        db_path = "/db"
    "#;

#[test]
fn riffle_configuration_with_every_option_is_read() {
    let mut text = RIFFLE.to_owned();
    if !cfg!(feature = "hdfs") {
        text = text.replace("MEMORY_LOCALFILE_HDFS", "MEMORY_LOCALFILE");
    }
    if !cfg!(feature = "otlp") {
        text = text.replace("jaeger_reporter_endpoint = \"http://jaeger:4317\"", "");
    }
    let config = parse(&text).unwrap();
    let has_one_warning = |key: &str| {
        let text = format!("{key} has no effect");
        config.warnings.iter().filter(|warning| warning.starts_with(&text)).count() == 1
    };
    assert!(NO_EFFECT.iter().all(|(key, _)| has_one_warning(key)), "{:?}", config.warnings);
    assert_eq!((config.log.filter.as_str(), config.log.files_max), ("INFO", 10));
}
