//! Offload from disks to an object store: in the background above a watermark, and by a drain.

use std::path::PathBuf;

use uniffle_client::block::{Block, IdLayout};
use uniffle_testkit::ports::free_port;
use uniffle_testkit::s3::{ACCESS_KEY, BUCKET, S3Server, SECRET_KEY};
use uniffle_wire::types::{PartitionId, ShuffleKey, TaskAttemptId};
use uniffle_worker::service::WorkerState;

use super::blocks::{batch, blocks};
use super::fixture::{Setup, WorkerFixture, eventually, key};

const P: PartitionId = PartitionId(0);

/// The object store, credentials and ports of a worker, which stay when its directories are lost.
struct Home {
    server: S3Server,
    ports: (u16, u16),
    keys: tempfile::TempDir,
}

impl Home {
    async fn new() -> Self {
        let keys = tempfile::tempdir().unwrap();
        let text =
            format!("[default]\naws_access_key_id = {ACCESS_KEY}\naws_secret_access_key = {SECRET_KEY}\n");
        std::fs::write(keys.path().join("keys"), text).unwrap();
        Self { server: S3Server::start().await, ports: (free_port(), free_port()), keys }
    }

    /// Starts a worker on empty directories.
    async fn start(&self, watermarks: &str) -> WorkerFixture {
        let dir = tempfile::tempdir().unwrap();
        let disks: Vec<PathBuf> = (0..2).map(|disk| dir.path().join(format!("disk{disk}"))).collect();
        let tables = format!(
            "[object_store]\nurl = \"s3://{BUCKET}/uniffle\"\nendpoint = \"{}\"\ncredentials = \"file\"\n\
             credentials_file = {:?}\nretry_timeout_sec = 0\n{watermarks}",
            self.server.endpoint(),
            self.keys.path().join("keys")
        );
        let top = format!("grpc_port = {}\nurpc_port = {}", self.ports.0, self.ports.1);
        let setup =
            Setup { store_type: "MEMORY_LOCALFILE_OBJECT", top: &top, tables: &tables, ..Setup::default() };
        WorkerFixture::on(setup, dir, disks).await
    }

    /// Ends the worker and its applications, which deletes its objects.
    async fn finish(self, fixture: WorkerFixture) {
        for app in fixture.worker.service().apps().apps() {
            fixture.client.unregister_app(app.id().as_str()).await.unwrap();
        }
        let objects = || super::objects::files_in(&self.server.files().join("uniffle"));
        eventually("the segments are deleted", || match objects() {
            remaining if remaining.is_empty() => Ok(()),
            remaining => Err(format!("{remaining:?}")),
        })
        .await;
        fixture.finish().await;
        self.server.stop().await;
    }
}

/// Watermarks that no disk of this machine reaches, so that only a drain moves data.
const ONLY_TO_DRAIN: &str = "offload_high_watermark = 1.0\noffload_low_watermark = 0.9999";

async fn report(fixture: &WorkerFixture, key: &ShuffleKey, task: i64, blocks: &[Block]) {
    let ids = blocks.iter().map(|block| block.meta.block_id).collect();
    fixture.client.report(key, TaskAttemptId(task), &[(P, ids)]).await.unwrap();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn blocks_stay_readable_during_offload() {
    let home = Home::new().await;
    // Below the fill level of this machine's disk.
    let marks = "offload_high_watermark = 0.000002\noffload_low_watermark = 0.000001";
    let (fixture, key) = (home.start(marks).await, key("app-1", 1));
    fixture.client.register(&key, &[(0, 1)]).await.unwrap();
    let (first, other, second) = (blocks(0, 1, 0..300), blocks(1, 1, 0..5), blocks(0, 2, 0..40));
    fixture.push(&key, &batch(0, &first)).await;
    fixture.push(&key, &batch(1, &other)).await;
    fixture.flush().await;
    let moved = || match fixture.metric("offload_bytes") {
        bytes if bytes > 0.0 => Ok(()),
        _ => Err("nothing yet".to_owned()),
    };
    eventually("the shuffle is offloaded", moved).await;
    fixture.assert_reads(&key, 0, &first).await;
    fixture.push(&key, &batch(0, &second)).await;
    fixture.flush().await;
    fixture.assert_reads(&key, 0, &[first, second].concat()).await;
    fixture.assert_reads(&key, 1, &other).await;
    home.finish(fixture).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn worker_resumes_on_empty_machine_after_drain() {
    let home = Home::new().await;
    let (one, other) = (key("app-1", 1), key("app-1", 2));
    let (first, second) = (blocks(0, 1, 0..60), blocks(0, 2, 0..20));
    let fixture = home.start(ONLY_TO_DRAIN).await;
    for key in [&one, &other] {
        fixture.client.register(key, &[(0, 1)]).await.unwrap();
        fixture.push(key, &batch(0, &first)).await;
        report(&fixture, key, 1, &first).await;
    }
    fixture.flush().await;
    // This batch stays in memory.
    fixture.push(&one, &batch(0, &second)).await;
    report(&fixture, &one, 2, &second).await;
    let lifecycle = &fixture.worker.service().lifecycle;
    assert!(!lifecycle.drain().is_complete());
    let empty = || match lifecycle.drain() {
        drained if drained.is_complete() => Ok(()),
        remaining => Err(format!("{remaining:?}")),
    };
    eventually("the machine may go", empty).await;
    assert_eq!(fixture.worker.service().status().state(), WorkerState::Decommissioning);
    let refused = fixture.client.register(&key("app-2", 1), &[(0, 1)]).await.unwrap_err();
    assert!(refused.to_string().contains("NO_BUFFER") || refused.to_string().contains("stop"), "{refused}");
    fixture.assert_reads(&one, 0, &[first.clone(), second.clone()].concat()).await;
    let WorkerFixture { worker, client, dir, .. } = fixture;
    drop(client);
    assert_eq!(worker.stop().await, 0);
    drop(dir);

    let fixture = home.start(ONLY_TO_DRAIN).await;
    fixture.assert_reads(&one, 0, &[first.clone(), second.clone()].concat()).await;
    fixture.assert_reads(&other, 0, &first).await;
    for (key, count) in [(&one, 80), (&other, 60)] {
        let reported = fixture.client.results(key, &[P], Some(IdLayout::SPARK)).await.unwrap();
        assert_eq!(reported.cardinality(), count);
    }
    let third = self::blocks(0, 3, 0..7);
    fixture.push(&one, &batch(0, &third)).await;
    report(&fixture, &one, 3, &third).await;
    fixture.flush().await;
    fixture.assert_reads(&one, 0, &[first, second, third].concat()).await;
    home.finish(fixture).await;
}
