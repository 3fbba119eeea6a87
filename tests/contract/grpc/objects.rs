//! A worker on an object store without disks, as clients of local data see it, and its refused
//! start on an unusable store.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use prometheus::Registry;
use uniffle_client::block::{Block, IdLayout};
use uniffle_testkit::config::{ConfigLines, parse};
use uniffle_testkit::object_fault::{Call, FaultyObjects, ObjectFault};
use uniffle_testkit::s3::faults::{On, ResponseFault};
use uniffle_testkit::s3::{ACCESS_KEY, BUCKET, S3Server, SECRET_KEY};
use uniffle_wire::types::{PartitionId, ShuffleKey, TaskAttemptId};
use uniffle_worker::memory::Budget;
use uniffle_worker::proto::StatusCode;
use uniffle_worker::runtime::Tasks;
use uniffle_worker::server::Worker;
use uniffle_worker::store::object::location::CLAIM;
use uniffle_worker::store::object::{Bucket, ObjectSettings};
use uniffle_worker::store::offload::OffloadTier;

use super::blocks::{batch, blocks, payload};
use super::fixture::{Setup, WorkerFixture, eventually, key};
use super::restarts::{crashed, process};

const P: PartitionId = PartitionId(0);

/// Starts a worker whose only tier is the store.
async fn above(store: &FaultyObjects) -> WorkerFixture {
    let (budget, objects) = (Budget::new(u64::MAX), Arc::new(store.clone()));
    let settings = ObjectSettings { part_bytes: 64 << 10, ..ObjectSettings::new("shuffle/worker-1") };
    let (tasks, registry) = (Tasks::new(), Registry::new());
    let objects = Bucket::open(objects, settings, &budget, tasks.clone(), &registry).await.unwrap();
    let tier = OffloadTier::without_disks(objects, &budget, tasks, &registry).await.unwrap();
    WorkerFixture::with_tier(tier).await
}

async fn report(fixture: &WorkerFixture, key: &ShuffleKey, task: i64, blocks: &[Block]) {
    let ids = blocks.iter().map(|block| block.meta.block_id).collect();
    fixture.client.report(key, TaskAttemptId(task), &[(P, ids)]).await.unwrap();
}

/// Objects but those of the metadata log.
async fn segments(store: &FaultyObjects) -> Vec<(String, u64)> {
    let mut objects = store.objects().await;
    objects.retain(|(key, _)| !key.contains("/!log/"));
    objects
}

fn joined(blocks: &[Block]) -> Vec<u8> {
    blocks.iter().flat_map(|block| block.data.iter().copied()).collect()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn objects_are_read_as_local_data_over_both_transports() {
    let store = FaultyObjects::default();
    let (fixture, key) = (above(&store).await, key("app-1", 1));
    fixture.client.register(&key, &[(0, 1)]).await.unwrap();
    let (flushed, other, fresh) = (blocks(0, 1, 0..300), blocks(1, 1, 0..5), blocks(0, 2, 0..4));
    fixture.push(&key, &batch(0, &flushed)).await;
    fixture.push(&key, &batch(1, &other)).await;
    fixture.flush().await;
    fixture.assert_reads(&key, 0, &flushed).await;
    fixture.assert_reads(&key, 1, &other).await;
    let objects = segments(&store).await;
    assert!(objects.len() <= 3, "expected at most three segments: {objects:?}");

    let tcp = fixture.tcp_client().await;
    let index = tcp.read_index(&key, P).await.unwrap();
    assert_eq!(index.body.len(), 40 * flushed.len());
    let whole = i32::try_from(payload(&flushed)).unwrap();
    let data = tcp.read_data(&key, P, 0, whole).await.unwrap();
    assert!(data.body == joined(&flushed));
    drop((index, data, tcp));

    fixture.push(&key, &batch(0, &fresh)).await;
    let all = [flushed, fresh].concat();
    fixture.assert_reads(&key, 0, &all).await;
    fixture.flush().await;
    fixture.assert_reads(&key, 0, &all).await;
    assert!(fixture.metric("total_memory_spill_to_object") > 0.0);
    fixture.finish().await;
    assert_eq!(segments(&store).await, []);
}

#[test]
fn killed_worker_loses_only_blocks_that_were_not_uploaded() {
    let store = FaultyObjects::default();
    let (whole, torn) = (key("app-1", 1), key("app-1", 2));
    let (first, second) = (blocks(0, 1, 0..40), blocks(0, 2, 0..40));
    let (_home, before) = process(async {
        let fixture = above(&store).await;
        for key in [&whole, &torn] {
            fixture.client.register(key, &[(0, 0)]).await.unwrap();
            fixture.push(key, &batch(0, &first)).await;
            report(&fixture, key, 1, &first).await;
        }
        fixture.flush().await;
        fixture.push(&torn, &batch(0, &second)).await;
        report(&fixture, &torn, 2, &second).await;
        let index = fixture.client.read_index(&whole, P).await.unwrap();
        (crashed(fixture), index)
    });
    process(async {
        let fixture = above(&store).await;
        assert_eq!(fixture.client.read_index(&whole, P).await.unwrap().records, before.records);
        fixture.assert_reads(&whole, 0, &first).await;
        let reported = fixture.client.results(&whole, &[P], Some(IdLayout::SPARK)).await.unwrap();
        assert_eq!(reported.cardinality(), 40);
        let refused = fixture.client.read_memory(&torn, P, None, 1 << 20, None).await.unwrap_err();
        let text = refused.to_string();
        assert!(text.contains("lost") && text.contains("40"), "{text}");

        // The shuffle accepts further blocks.
        let third = blocks(0, 3, 0..10);
        fixture.push(&whole, &batch(0, &third)).await;
        fixture.flush().await;
        fixture.assert_reads(&whole, 0, &[first.clone(), third].concat()).await;
        fixture.finish().await;
    });
    process(async { assert_eq!(segments(&store).await, []) });
}

/// A failing store opens the circuit breaker. Blocks stay in memory, and readers are refused.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn failing_store_keeps_blocks_in_memory_and_refuses_readers() {
    let store = FaultyObjects::default();
    let (fixture, key) = (above(&store).await, key("app-1", 1));
    fixture.client.register(&key, &[(0, 0)]).await.unwrap();
    let (flushed, kept) = (blocks(0, 1, 0..20), blocks(0, 2, 0..20));
    fixture.push(&key, &batch(0, &flushed)).await;
    fixture.flush().await;

    store.set(|call, _| {
        if matches!(call, Call::Get | Call::Put | Call::List) {
            ObjectFault::Refuse
        } else {
            ObjectFault::None
        }
    });
    fixture.push(&key, &batch(0, &kept)).await;
    fixture.begin_flush();
    eventually("a segment is refused", || {
        match store.calls().iter().filter(|it| it.0 == Call::Put).count() {
            // The claim, twice; the log's checkpoint and the registration with their copies; and
            // the first segment.
            0..=7 => Err("not yet".to_owned()),
            _ => Ok(()),
        }
    })
    .await;
    let memory = fixture.client.read_memory(&key, P, None, 1 << 20, None).await.unwrap();
    assert_eq!(memory.blocks.len(), 20, "blocks that were not written must stay in memory");
    let request = uniffle_worker::proto::GetLocalShuffleDataRequest {
        app_id: "app-1".to_owned(),
        shuffle_id: 1,
        length: 100,
        partition_num: 1,
        partition_num_per_range: 1,
        ..Default::default()
    };
    let answer = fixture.client.raw().get_local_shuffle_data(request).await.unwrap().into_inner();
    assert_eq!(answer.status(), StatusCode::NoBuffer, "{}", answer.ret_msg);

    store.heal();
    fixture.flush().await;
    fixture.assert_reads(&key, 0, &[flushed, kept].concat()).await;
    fixture.finish().await;
    assert_eq!((segments(&store).await, store.open_uploads()), (vec![], 0));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn configured_worker_stores_blocks_over_s3() {
    let server = S3Server::start().await;
    let dir = tempfile::tempdir().unwrap();
    let keys = dir.path().join("keys");
    let text = format!("[default]\naws_access_key_id = {ACCESS_KEY}\naws_secret_access_key = {SECRET_KEY}\n");
    std::fs::write(&keys, text).unwrap();
    let tables = format!(
        "[object_store]\nurl = \"s3://{BUCKET}/uniffle\"\nendpoint = \"{}\"\npath_style = true\n\
         credentials = \"file\"\ncredentials_file = {keys:?}\nprecheck_enable = true\npart_size = \"5MiB\"\n\
         cache_dirs = [{:?}]\ncache_capacity = \"64MiB\"",
        server.endpoint(),
        dir.path().join("cache"),
    );
    let setup = Setup { store_type: "MEMORY_OBJECT", tables: &tables, ..Setup::default() };
    let unused = vec![dir.path().join("unused")];
    let (fixture, key) = (WorkerFixture::on(setup, dir, unused).await, key("app-1", 1));
    fixture.client.register(&key, &[(0, 0)]).await.unwrap();
    // Exceeds an upload part.
    let generator = uniffle_testkit::block_generator::BlockGenerator::new(3, IdLayout::SPARK);
    let flushed: Vec<Block> = (0..12).map(|n| generator.block(P, TaskAttemptId(1), n, 600_000)).collect();
    for some in flushed.chunks(4) {
        fixture.push(&key, &batch(0, some)).await;
    }
    fixture.flush().await;
    assert!(!files_in(&server.files().join("uniffle")).is_empty());
    fixture.assert_reads(&key, 0, &flushed).await;
    let gets = server.faults.requests(On::Get);
    fixture.assert_reads(&key, 0, &flushed).await;
    assert_eq!(server.faults.requests(On::Get), gets, "a cached block was requested");
    assert!(fixture.metric("object_cache_hits") >= 1.0 && fixture.metric("object_cache_bytes") > 0.0);
    assert!(fixture.metric("object_segments_written") >= 1.0);
    fixture.client.unregister_app("app-1").await.unwrap();
    eventually("the segments are deleted", || match files_in(&server.files().join("uniffle")) {
        remaining if remaining.is_empty() => Ok(()),
        remaining => Err(format!("{remaining:?}")),
    })
    .await;
    fixture.finish().await;
    server.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn unusable_store_fails_the_start_with_key_and_remedy() {
    let (server, dir) = (S3Server::start().await, tempfile::tempdir().unwrap());
    let tables = format!(
        "[object_store]\nurl = \"s3://{BUCKET}/uniffle\"\nendpoint = \"{}\"\npath_style = true\n\
         credentials = \"none\"\nprecheck_enable = true",
        server.endpoint()
    );
    let lines = ConfigLines { store_type: "MEMORY_OBJECT", tables: &tables, ..ConfigLines::default() };
    let config = parse(&lines.own_text(&[dir.path().join("unused")]));
    server.faults.plan(On::Put, 1, &ResponseFault::Refuse(403, "AccessDenied"));
    let Err(error) = Worker::start(&config).await else { panic!("expected a refused start") };
    let text = format!("{error:#}");
    for part in ["object_store.precheck_enable", "write an object", "AccessDenied", "s3:PutObject"] {
        assert!(text.contains(part), "{part} is missing: {text}");
    }
    server.stop().await;
}

/// Returns the files below `dir`, without the claim and the metadata log, which stay.
pub(crate) fn files_in(dir: &Path) -> Vec<PathBuf> {
    let entries = std::fs::read_dir(dir).into_iter().flatten().flatten().map(|entry| entry.path());
    let objects = entries.filter(|path| !path.ends_with(CLAIM) && !path.ends_with("!log"));
    objects.flat_map(|path| if path.is_dir() { files_in(&path) } else { vec![path] }).collect()
}
