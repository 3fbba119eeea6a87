//! The metrics and their documentation: every name that a worker exports stands once in the README's table, and every
//! name of the table is exported once.

#![allow(clippy::panic, reason = "to panic is how a test fails")]

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::path::PathBuf;

use std::time::Duration;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::time::{Instant, sleep};
use uniffle_client::block::IdLayout;
use uniffle_client::grpc::{ReadOptions, ShuffleClient};
use uniffle_client::send::SendForm;
use uniffle_testkit::block_generator::BlockGenerator;
use uniffle_wire::types::{AppId, PartitionId, ShuffleId, ShuffleKey, TaskAttemptId};
use uniffle_worker::config::{Config, Machine};
use uniffle_worker::proto::ApplicationInfoRequest;
use uniffle_worker::proto::coordinator_server_client::CoordinatorServerClient;
use uniffle_worker::server::Worker;
use uniffle_worker::tiers::RemoteStorage;

const PATIENCE: Duration = Duration::from_secs(20);

/// What is exported once data is in HDFS, of which there is none here; `tests/hdfs/tiers.rs` looks for it.
const OF_DATA_IN_HDFS: &str = "topN_of_on_hadoop_data_size_for_app";

const README: &str = include_str!("../README.md");

/// Names of the README's table: the code spans of first cells between the chapter's heading and the next.
fn documented() -> Vec<String> {
    let chapter = README.split("\n## Metrics\n").nth(1).expect("the README has a chapter Metrics");
    let chapter = chapter.split("\n## ").next().expect("split gives a part");
    let rows = chapter.lines().filter(|line| line.starts_with("| `"));
    rows.flat_map(|row| {
        let cell = row.split('|').nth(1).expect("a row has cells");
        cell.split('`').skip(1).step_by(2).map(str::to_owned).collect::<Vec<_>>()
    })
    .collect()
}

/// Names by the `# TYPE` lines of the answer; counts how often each stands there.
async fn scrape(worker: &Worker) -> BTreeMap<String, usize> {
    let mut stream = tokio::net::TcpStream::connect(worker.addresses().http).await.expect("a connection");
    stream.write_all(b"GET /metrics HTTP/1.0\r\nHost: x\r\n\r\n").await.expect("sent");
    let mut answer = String::new();
    stream.read_to_string(&mut answer).await.expect("an answer");
    let mut names = BTreeMap::new();
    for line in answer.lines().filter_map(|line| line.strip_prefix("# TYPE ")) {
        let name = line.split(' ').next().expect("a name");
        *names.entry(name.to_owned()).or_insert(0) += 1;
    }
    names
}

async fn worker(directory: &std::path::Path, top: &str) -> Worker {
    let text = format!(
        "bind_address = \"127.0.0.1\"\ngrpc_port = 0\nhttp_port = 0\nheartbeat_interval_seconds = \"100ms\"\n{top}\n\
         [metrics]\npush_gateway_endpoint = \"http://127.0.0.1:1\"\n\
         [memory_store]\ncapacity = \"32MiB\"\n[localfile_store]\nsync = \"group\"\ndata_paths = [{:?}]\n[admin]\nport = 0\n",
        directory.join("data")
    );
    let env = HashMap::from([("WORKER_IP".to_owned(), "127.0.0.1".to_owned())]);
    let machine = Machine { memory_bytes: 1 << 30, cores: 2, state_dir: PathBuf::from("/nonexistent") };
    Worker::start(&Config::parse(&text, &env, &machine).expect("a configuration")).await.expect("a worker")
}

/// A shuffle is written, flushed, read from disk, and forgotten. Returns what was exported while its app was known.
async fn traffic(worker: &Worker) -> BTreeMap<String, usize> {
    let client = ShuffleClient::connect(worker.addresses().grpc).await.expect("a connection");
    let key = ShuffleKey::new(AppId::parse("app").expect("an id"), ShuffleId(1));
    let partition = PartitionId(0);
    client.register(&key, &[(0, 0)]).await.expect("registered");
    let block = BlockGenerator::new(1, IdLayout::SPARK).block(partition, TaskAttemptId(1), 0, 10_000);
    client.push(&key, SendForm::Classic, &[(partition, vec![block])]).await.expect("sent");
    let mut exported = scrape(worker).await;
    let tiers = worker.tiers().expect("tiers");
    let local = tiers.local.as_ref().expect("a local tier");
    tiers.flusher.flush_all();
    let start = Instant::now();
    while local.partition_bytes(&key, partition) == 0 {
        assert!(start.elapsed() < PATIENCE, "not flushed");
        sleep(Duration::from_millis(10)).await;
    }
    let read = client.read_partition(&key, partition, &ReadOptions::default()).await.expect("read");
    assert_eq!(read.blocks.len(), 1);
    exported.extend(scrape(worker).await);
    client.unregister_app("app").await.expect("unregistered");
    let channel = format!("http://{}", worker.addresses().grpc);
    let mut coordinator = CoordinatorServerClient::connect(channel).await.expect("a connection");
    let info = ApplicationInfoRequest { app_id: "app".into(), user: "u".into(), ..Default::default() };
    coordinator.register_application_info(info).await.expect("registered");
    // The gauges of users are set at the coordinator's next sweep, and those of removed files by then too.
    sleep(Duration::from_millis(300)).await;
    exported
}

#[tokio::test]
async fn the_readme_and_the_worker_name_the_same_metrics() {
    let names = documented();
    let unique: BTreeSet<&String> = names.iter().collect();
    let twice: Vec<_> =
        unique.iter().filter(|name| names.iter().filter(|it| it == *name).count() > 1).collect();
    assert!(twice.is_empty(), "documented more than once: {twice:?}");

    let (dir_a, dir_b) = (tempfile::tempdir().expect("a dir"), tempfile::tempdir().expect("a dir"));
    let a = worker(dir_a.path(), "").await;
    let quorum = format!("coordinator_quorum = [\"{}\"]", a.addresses().grpc);
    let b = worker(dir_b.path(), &format!("{quorum}\nstore_type = \"MEMORY_LOCALFILE_HDFS\"")).await;
    // A remote store has metrics as soon as an application has named it; nobody connects yet.
    let path = "hdfs://127.0.0.1:1/uniffle".to_owned();
    let storage = RemoteStorage { path, ..RemoteStorage::default() };
    let hdfs = b.tiers().and_then(|tiers| tiers.hdfs.clone()).expect("a remote tier");
    let named = hdfs.prepare(&storage).expect("a sound path");
    let mut exported = traffic(&a).await;
    // The embedded coordinator's metrics are A's, the heartbeats' and those of HDFS are B's.
    for answer in [scrape(&a).await, scrape(&b).await] {
        for (name, count) in answer {
            let most = exported.entry(name).or_insert(0);
            *most = count.max(*most);
        }
    }
    let repeated: Vec<_> = exported.iter().filter(|(_, count)| **count != 1).collect();
    assert!(repeated.is_empty(), "exported more than once: {repeated:?}");
    exported.insert(OF_DATA_IN_HDFS.to_owned(), 1);
    let undocumented: Vec<_> = exported.keys().filter(|name| !unique.contains(name)).collect();
    let missing: Vec<_> = unique.iter().filter(|name| !exported.contains_key(**name)).collect();
    assert!(
        undocumented.is_empty() && missing.is_empty(),
        "undocumented {undocumented:?}\nmissing {missing:?}"
    );
    drop(named);
    assert_eq!(b.stop().await + a.stop().await, 0);
}
