//! The metrics and their page: `docs/metrics.md` matches the tables in the code, and a worker
//! exports exactly these metrics.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::fmt::Write as _;
use std::sync::Arc;
use std::time::Duration;

use prometheus::proto::{MetricFamily, MetricType};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::time::{Instant, sleep};
use uniffle_client::block::IdLayout;
use uniffle_client::grpc::{ReadOptions, ShuffleClient};
use uniffle_client::send::SendForm;
use uniffle_coordinator::proto::coordinator_server_client::CoordinatorServerClient;
use uniffle_testkit::block_generator::BlockGenerator;
use uniffle_testkit::config::ConfigLines;
use uniffle_wire::types::{AppId, PartitionId, ShuffleId, ShuffleKey, TaskAttemptId};
use uniffle_worker::metrics::Description;
use uniffle_worker::proto::ApplicationInfoRequest;
use uniffle_worker::remote::hdfs::HdfsStore;
use uniffle_worker::server::{Worker, metric_descriptions};
use uniffle_worker::store::{LocalStore, RemoteStorage};

const WAIT_MAX: Duration = Duration::from_secs(20);

/// Exported once HDFS contains data, which `tests/hdfs/tiers.rs` checks.
const OF_DATA_IN_HDFS: &str = "topN_of_on_hadoop_data_size_for_app";

const PAGE: &str = "docs/metrics.md";

/// Text before the tables.
const INTRODUCTION: &str = "# Metrics

<!-- Generated: `UPDATE_DOCS=1 cargo test --test contract metrics` writes this page from the tables in the code. -->

`GET /metrics` returns Prometheus text, `/metrics/all` the same as JSON in the Java server's shape. Metrics have the names of
the Java server and of riffle if those have a counterpart, so existing dashboards work. Some values therefore have two names.
`service_is_healthy`, `is_healthy` and `local_disk_is_healthy` are 0 when healthy, and `local_storage_is_writable` is 0 when
writable. `used_buffer_size` includes `allocated_buffer_size`.

Summaries of the Java server are histograms here: use `histogram_quantile`. Transport times (`…_transport_latency`) compare the
clocks of two machines. Negative times, times over an hour and requests without a timestamp do not count.

Not exported: Java's `jvm_*` and `JvmPauseMonitor*`, direct memory, LAB chunks, remote merge, `committed_block_count` (commits
are counted by call) and executor threads; riffle's event bus, permits and alignment pool.

Metrics of a tier exist if the store type has the tier. Those of the embedded coordinator exist if it is enabled, and those of
heartbeats with a `coordinator_quorum`.
";

/// Returns all metrics: those of the tables and those of the process from the client library.
fn described() -> Vec<Description> {
    let process = uniffle_worker::metrics::registry().unwrap().gather();
    let process = process.iter().map(|family| Description {
        name: family.name().to_owned(),
        kind: kind(family),
        labels: &[],
        help: family.help().to_owned(),
        module: "prometheus",
    });
    metric_descriptions().into_iter().chain(process).collect()
}

fn kind(family: &MetricFamily) -> &'static str {
    match family.get_field_type() {
        MetricType::COUNTER => "counter",
        MetricType::GAUGE => "gauge",
        MetricType::HISTOGRAM => "histogram",
        other => panic!("unexpected type {other:?} of {}", family.name()),
    }
}

/// Headings of the page by module.
const TOPICS: &[(&str, &str)] = &[
    ("service", "Applications, sends, reads and losses"),
    ("service::reads", "Reads in progress"),
    ("service::quota", "Quotas"),
    ("service::diagnostics::top_apps", "Largest applications"),
    ("uniffle_memory", "Memory"),
    ("flush", "Flushing"),
    ("store::disk", "Local disks"),
    ("remote::hdfs", "HDFS"),
    ("store::object", "Object store"),
    ("store::object::client", "Requests to the object store"),
    ("store::offload::tier", "Offload to the object store"),
    ("listeners::grpc", "gRPC listener"),
    ("listeners::tcp", "Raw TCP listener"),
    ("listeners::http", "HTTP listener"),
    ("listeners::http::push", "Pushgateway"),
    ("listeners::http::admin::guard", "Administration listener"),
    ("uniffle_coordinator::embedded", "Embedded coordinator"),
    ("uniffle_coordinator::heartbeat", "Heartbeats"),
    ("server::settings::reload", "Reload"),
    ("server::upgrade", "Upgrade"),
    ("server", "Build"),
    ("uniffle_base::runtime", "Runtime"),
    ("uniffle_base::allocator::jemalloc", "Allocator"),
    ("uniffle_telemetry", "Logs and traces"),
    ("prometheus", "Process"),
];

/// Returns the page, with a table per module.
fn page(metrics: &[Description]) -> String {
    let mut page = INTRODUCTION.to_owned();
    let module =
        |it: &Description| it.module.trim_start_matches("uniffle_worker::").trim_end_matches("::metrics");
    for of_module in metrics.chunk_by(|a, b| module(a) == module(b)) {
        let head = "| name | type | labels | |\n| --- | --- | --- | --- |\n";
        let module = module(&of_module[0]);
        let topic = TOPICS.iter().find(|(known, _)| *known == module).expect("every module has a heading").1;
        write!(page, "\n## {topic}\n\n{head}").expect("writing to a string cannot fail");
        let mut rows: Vec<_> = of_module.iter().collect();
        rows.sort_by_key(|it| &it.name);
        for Description { name, kind, labels, help, .. } in rows {
            let labels = labels.join(", ");
            writeln!(page, "| `{name}` | {kind} | {labels} | {help} |")
                .expect("writing to a string cannot fail");
        }
    }
    page
}

#[test]
fn metrics_page_is_current() {
    let path = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join(PAGE);
    let page = page(&described());
    if std::env::var_os("UPDATE_DOCS").is_some() {
        return std::fs::write(path, page).unwrap();
    }
    let current = std::fs::read_to_string(path).unwrap_or_default() == page;
    assert!(current, "{PAGE} differs from the tables; run UPDATE_DOCS=1 cargo test --test contract metrics");
}

/// Returns name, type and help of every exported metric, with the number of occurrences.
async fn scrape(worker: &Worker) -> BTreeMap<(String, String, String), usize> {
    let mut stream = tokio::net::TcpStream::connect(worker.addresses().http).await.unwrap();
    stream.write_all(b"GET /metrics HTTP/1.0\r\nHost: x\r\n\r\n").await.unwrap();
    let mut answer = String::new();
    stream.read_to_string(&mut answer).await.unwrap();
    let mut exported = BTreeMap::new();
    let mut helps = HashMap::new();
    for line in answer.lines() {
        if let Some((name, help)) = line.strip_prefix("# HELP ").and_then(|rest| rest.split_once(' ')) {
            helps.insert(name, help);
        } else if let Some((name, kind)) = line.strip_prefix("# TYPE ").and_then(|rest| rest.split_once(' '))
        {
            let help = helps.get(name).copied().unwrap_or_default();
            *exported.entry((name.to_owned(), kind.to_owned(), help.to_owned())).or_insert(0) += 1;
        }
    }
    exported
}

async fn worker(directory: &std::path::Path, store_type: &str, top: &str) -> Worker {
    let top = format!("heartbeat_interval_seconds = \"100ms\"\n{top}");
    let tables = "[metrics]\npush_gateway_endpoint = \"http://127.0.0.1:1\"\n[admin]\nport = 0";
    let lines =
        ConfigLines { store_type, top: &top, local: "sync = \"group\"", tables, ..ConfigLines::default() };
    lines.start(&[directory.join("data")]).await
}

/// Writes, flushes, reads and unregisters a shuffle. Returns the metrics while its application was
/// known.
async fn traffic(worker: &Worker) -> BTreeMap<(String, String, String), usize> {
    let client = ShuffleClient::connect(worker.addresses().grpc).await.unwrap();
    let key = ShuffleKey::new(AppId::parse("app").unwrap(), ShuffleId(1));
    let partition = PartitionId(0);
    client.register(&key, &[(0, 0)]).await.unwrap();
    let block = BlockGenerator::new(1, IdLayout::SPARK).block(partition, TaskAttemptId(1), 0, 10_000);
    client.push(&key, SendForm::Classic, &[(partition, vec![block])]).await.unwrap();
    let mut exported = scrape(worker).await;
    let local = worker.service().tiers().find::<LocalStore>().unwrap();
    worker.service().flusher().unwrap().flush_all();
    let start = Instant::now();
    while local.view(&key, partition).map_or(0, |view| view.bytes) == 0 {
        assert!(start.elapsed() < WAIT_MAX, "the blocks were not flushed");
        sleep(Duration::from_millis(10)).await;
    }
    let read = client.read_partition(&key, partition, &ReadOptions::default()).await.unwrap();
    assert_eq!(read.blocks.len(), 1);
    exported.extend(scrape(worker).await);
    client.unregister_app("app").await.unwrap();
    let channel = format!("http://{}", worker.addresses().grpc);
    let mut coordinator = CoordinatorServerClient::connect(channel).await.unwrap();
    let info = ApplicationInfoRequest { app_id: "app".into(), user: "u".into(), ..Default::default() };
    coordinator.register_application_info(info).await.unwrap();
    exported
}

/// Starts a worker on an object store. Returns it with the registries of its tier and of a tier
/// with a disk above a store.
#[cfg(feature = "object")]
async fn above_objects(directory: &std::path::Path) -> (Worker, [prometheus::Registry; 2]) {
    use object_store::ObjectStoreExt as _;
    use uniffle_testkit::memory_disk::MemoryDisk;
    use uniffle_testkit::object_fault::FaultyObjects;
    use uniffle_testkit::s3::S3Server;
    use uniffle_worker::store::LocalConfig;
    use uniffle_worker::store::object::client::Client;
    use uniffle_worker::store::object::{Bucket, ObjectSettings};
    use uniffle_worker::store::offload::{LocalDisks, OffloadSettings, OffloadTier, Watermarks};
    let registries = [prometheus::Registry::new(), prometheus::Registry::new()];
    let extents = uniffle_worker::memory::Budget::new(u64::MAX);
    let tasks = uniffle_worker::runtime::Tasks::new();
    let server = S3Server::start().await;
    let client = Client::open(&server.config("x"), &tasks, &registries[0]).expect("cannot open the client");
    // The duration of requests is exported after the first one.
    client.store().head(&"missing".into()).await.unwrap_err();
    drop(client);
    server.stop().await;
    let open = async |registry| {
        let settings = ObjectSettings::new("worker");
        let store = Arc::new(FaultyObjects::default());
        Bucket::open(store, settings, &extents, tasks.clone(), registry).await.unwrap()
    };
    let (alone, below) = (open(&registries[0]).await, open(&registries[1]).await);
    let tier = OffloadTier::without_disks(alone, &extents, tasks.clone(), &registries[0]).await;
    let tier = tier.unwrap();
    let watermarks = Watermarks { high: 0.6, low: 0.5 };
    let settings = OffloadSettings { watermarks, cold_bytes: u64::MAX, pass_bytes: 1 << 20 };
    let disk: Arc<dyn uniffle_io::Disk> = Arc::new(MemoryDisk::new("/disk", None));
    let local = LocalDisks { config: LocalConfig::default(), disks: vec![disk] };
    let above = OffloadTier::open(settings, local, below, &extents, tasks.clone(), &registries[1]).await;
    drop(above.unwrap());
    let lines = ConfigLines { store_type: "MEMORY", ..ConfigLines::default() };
    let worker = lines.start_with_tiers(vec![tier], &[directory.join("unused")]).await;
    (worker, registries)
}

#[tokio::test]
async fn metrics_page_matches_the_exported_metrics() {
    // Others are exported once their placeholders are known.
    let fixed = described().into_iter().filter(|it| !it.name.contains('{'));
    let described: Vec<_> = fixed.map(|it| (it.name, it.kind.to_owned(), it.help)).collect();
    let names: BTreeSet<&String> = described.iter().map(|(name, ..)| name).collect();
    assert_eq!(names.len(), described.len(), "a name is described more than once");

    let (dir_a, dir_b) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    let a = worker(dir_a.path(), "MEMORY_LOCALFILE", "").await;
    let quorum = format!("coordinator_quorum = [\"{}\"]", a.addresses().grpc);
    let top = format!("{quorum}\nhdfs_store.allowed_paths = [\"*\"]");
    let b = worker(dir_b.path(), "MEMORY_LOCALFILE_HDFS", &top).await;
    // A remote store has metrics once an application has named it, before any connection.
    let path = "hdfs://127.0.0.1:1/uniffle".to_owned();
    let storage = RemoteStorage { path, ..RemoteStorage::default() };
    let hdfs = b.service().tiers().find::<HdfsStore>().unwrap();
    let named = hdfs.prepare(&storage).unwrap();
    let mut exported = traffic(&a).await;
    #[cfg(feature = "object")]
    {
        let (c, objects) = above_objects(dir_a.path()).await;
        exported.extend(scrape(&c).await);
        for family in objects.iter().flat_map(|registry| registry.gather()) {
            exported
                .insert((family.name().to_owned(), kind(&family).to_owned(), family.help().to_owned()), 1);
        }
        assert_eq!(c.stop().await, 0);
    }
    // Worker A exports the coordinator's metrics, and B those of heartbeats and HDFS. Some appear
    // only at the next heartbeat or sweep.
    let start = Instant::now();
    let missing = loop {
        for answer in [scrape(&a).await, scrape(&b).await] {
            for (name, count) in answer {
                let most = exported.entry(name).or_insert(0);
                *most = count.max(*most);
            }
        }
        let missing: Vec<_> =
            described.iter().filter(|it| it.0 != OF_DATA_IN_HDFS && !exported.contains_key(*it)).collect();
        if missing.is_empty() || start.elapsed() > WAIT_MAX {
            break missing;
        }
        sleep(Duration::from_millis(20)).await;
    };
    let repeated: Vec<_> = exported.iter().filter(|(_, count)| **count != 1).collect();
    assert!(repeated.is_empty(), "metrics are exported more than once: {repeated:?}");
    let undescribed: Vec<_> = exported.keys().filter(|it| !described.contains(it)).collect();
    assert!(
        undescribed.is_empty() && missing.is_empty(),
        "undescribed metrics: {undescribed:?}\nmissing metrics: {missing:?}"
    );
    drop(named);
    assert_eq!(b.stop().await + a.stop().await, 0);
}
