//! A worker in this process with an open admin listener, and a data client.

use std::path::Path;

use reqwest::{Method, RequestBuilder, StatusCode};
use serde_json::Value;
use tempfile::TempDir;
use uniffle_client::block::IdLayout;
use uniffle_client::grpc::ShuffleClient;
use uniffle_client::send::SendForm;
use uniffle_coordinator::proto::coordinator_server_client::CoordinatorServerClient;
use uniffle_testkit::block_generator::BlockGenerator;
use uniffle_testkit::config::ConfigLines;
pub(crate) use uniffle_testkit::config::{parse, start_from};
pub(crate) use uniffle_testkit::eventually;
use uniffle_testkit::s3::{ACCESS_KEY, BUCKET, S3Server, SECRET_KEY};
use uniffle_wire::types::{AppId, PartitionId, ShuffleId, ShuffleKey, TaskAttemptId};
use uniffle_worker::proto::{ShuffleServerHeartBeatRequest, ShuffleServerId, StatusCode as Code};
use uniffle_worker::server::Worker;

pub(crate) struct AdminFixture {
    pub(crate) worker: Worker,
    pub(crate) client: ShuffleClient,
    http: reqwest::Client,
    dir: TempDir,
}

impl AdminFixture {
    pub(crate) async fn start() -> Self {
        Self::with("").await
    }

    /// Starts a worker. `tables` holds whole tables, or lines of `[admin]` before the first table.
    pub(crate) async fn with(tables: &str) -> Self {
        let dir = tempfile::tempdir().unwrap();
        let worker = Worker::start(&parse(&config_text(dir.path(), "", tables))).await.unwrap();
        Self::of(worker, dir).await
    }

    /// Like [`AdminFixture::with`], with an object store below the disks.
    pub(crate) async fn above_objects(server: &S3Server, tables: &str) -> Self {
        let dir = tempfile::tempdir().unwrap();
        let tables = format!("{tables}\n{}", object_store_table(server, dir.path()));
        let text = text_of("MEMORY_LOCALFILE_OBJECT", dir.path(), "", &tables);
        let worker = Worker::start(&parse(&text)).await.unwrap();
        Self::of(worker, dir).await
    }

    /// Starts a worker that can reload `config.toml` in its directory.
    pub(crate) async fn with_file(top: &str, tables: &str) -> Self {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("config.toml");
        std::fs::write(&file, config_text(dir.path(), top, tables)).unwrap();
        Self::of(start_from(&file).await, dir).await
    }

    /// Starts a worker whose coordinator is embedded in the worker of `other`.
    pub(crate) async fn in_cluster_of(other: &Self) -> Self {
        Self::in_cluster_of_with(other, "").await
    }

    /// Like [`AdminFixture::in_cluster_of`], with `tables` as in [`AdminFixture::with`].
    pub(crate) async fn in_cluster_of_with(other: &Self, tables: &str) -> Self {
        let top = format!("coordinator_quorum = [\"{}\"]", other.worker.addresses().grpc);
        let dir = tempfile::tempdir().unwrap();
        let worker = Worker::start(&parse(&config_text(dir.path(), &top, tables))).await.unwrap();
        Self::of(worker, dir).await
    }

    async fn of(worker: Worker, dir: TempDir) -> Self {
        let client = ShuffleClient::connect(worker.addresses().grpc).await.unwrap();
        Self { worker, client, http: reqwest::Client::new(), dir }
    }

    /// Replaces the file of [`AdminFixture::with_file`] atomically, as editors do.
    pub(crate) fn rewrite(&self, top: &str, tables: &str) {
        self.write(&config_text(self.dir.path(), top, tables));
    }

    /// Replaces the file with any text.
    pub(crate) fn write(&self, text: &str) {
        std::fs::write(self.dir.path().join("new"), text).unwrap();
        std::fs::rename(self.dir.path().join("new"), self.dir.path().join("config.toml")).unwrap();
    }

    /// Returns the text of the file.
    pub(crate) fn written(&self) -> String {
        std::fs::read_to_string(self.dir.path().join("config.toml")).unwrap()
    }

    /// Returns a request to the admin listener, without a token.
    pub(crate) fn admin(&self, method: Method, path: &str) -> RequestBuilder {
        self.http.request(method, format!("http://{}{path}", self.worker.addresses().admin.unwrap()))
    }

    /// Sends an admin call with a JSON body. Returns the response.
    pub(crate) async fn call(&self, path: &str, body: &str) -> (StatusCode, Value) {
        let answer = self.admin(Method::POST, path).body(body.to_owned()).send().await.unwrap();
        let status = answer.status();
        (status, serde_json::from_str(&answer.text().await.unwrap()).unwrap())
    }

    /// Registers one shuffle of `app` and sends some blocks to each of its partitions.
    pub(crate) async fn push(&self, app: &str, partitions: i32) -> ShuffleKey {
        let key = ShuffleKey::new(AppId::parse(app).unwrap(), ShuffleId(1));
        self.client.register(&key, &[(0, partitions - 1)]).await.unwrap();
        let generator = BlockGenerator::new(1, IdLayout::SPARK);
        let block = |partition, sequence| generator.block(partition, TaskAttemptId(1), sequence, 10_000);
        let batch: Vec<_> = (0..partitions)
            .map(PartitionId)
            .map(|partition| {
                (partition, (0..=partition.0.unsigned_abs().min(7)).map(|n| block(partition, n)).collect())
            })
            .collect();
        self.client.push(&key, SendForm::Classic, &batch).await.unwrap();
        key
    }

    /// Sends one heartbeat of a node that does not exist to the embedded coordinator.
    pub(crate) async fn heartbeat_once(&self, id: &str) {
        let channel = format!("http://{}", self.worker.addresses().grpc);
        let mut coordinator = CoordinatorServerClient::connect(channel).await.unwrap();
        let server_id =
            ShuffleServerId { id: id.to_owned(), ip: "127.0.0.1".to_owned(), port: 1, ..Default::default() };
        let heartbeat = ShuffleServerHeartBeatRequest { server_id: Some(server_id), ..Default::default() };
        let answer = coordinator.heartbeat(heartbeat).await.unwrap().into_inner();
        assert_eq!(answer.status, Code::Success as i32, "{}", answer.ret_msg);
    }

    /// Returns the sum of a metric over its series with a label of the value `label`, or over all
    /// if that is empty.
    pub(crate) fn metric(&self, name: &str, label: &str) -> f64 {
        let families = self.worker.registry().gather();
        let family = families.iter().find(|family| family.name() == name);
        let metrics = family.map(|family| family.get_metric()).unwrap_or_default();
        let labelled = metrics
            .iter()
            .filter(|metric| label.is_empty() || metric.get_label().iter().any(|pair| pair.value() == label));
        labelled.map(|metric| metric.get_counter().get_value() + metric.get_gauge().get_value()).sum()
    }

    /// Unregisters all apps and asserts that no memory is charged and no task is left.
    pub(crate) async fn finish(self) {
        for app in self.worker.service().apps().apps() {
            self.worker.service().lifecycle.unregister_app(app.id().as_str()).unwrap();
        }
        let memory = self.worker.memory();
        eventually("the memory is free", || match (memory.used_bytes(), memory.block_count()) {
            (0, 0) => Ok(()),
            remaining => Err(format!("{remaining:?}")),
        })
        .await;
        drop(self.client);
        assert_eq!(self.worker.stop().await, 0);
        drop(self.dir);
    }
}

pub(crate) fn config_text(dir: &Path, top: &str, tables: &str) -> String {
    text_of("MEMORY_LOCALFILE", dir, top, tables)
}

fn text_of(store_type: &str, dir: &Path, top: &str, tables: &str) -> String {
    let (top, tables) =
        (format!("heartbeat_interval_seconds = 1\n{top}"), format!("[admin]\nport = 0\n{tables}"));
    let lines = ConfigLines { store_type, top: &top, tables: &tables, ..ConfigLines::default() };
    lines.own_text(&[dir.join("data")])
}

/// Returns the table of the object store `server`. Writes its keys to a file in `dir`.
pub(crate) fn object_store_table(server: &S3Server, dir: &Path) -> String {
    let keys = dir.join("keys");
    let text = format!("[default]\naws_access_key_id = {ACCESS_KEY}\naws_secret_access_key = {SECRET_KEY}\n");
    std::fs::write(&keys, text).unwrap();
    format!(
        "[object_store]\nurl = \"s3://{BUCKET}/uniffle\"\nendpoint = \"{}\"\npath_style = true\n\
         credentials = \"file\"\ncredentials_file = {keys:?}",
        server.endpoint()
    )
}
