//! The object tier over its client, on a store with faulty responses.
//!
//! Whatever happens to a request, acknowledged batches are read unchanged, and errors name the
//! object. Other shuffles are not affected, and the next process finds everything.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use prometheus::Registry;
use uniffle_client::block::{Block, IdLayout};
use uniffle_testkit::block_generator::BlockGenerator;
use uniffle_testkit::s3::S3Server;
use uniffle_testkit::s3::faults::{On, ResponseFault};
use uniffle_wire::index::records;
use uniffle_wire::types::{AppId, PartitionId, ShuffleId, ShuffleKey, TaskAttemptId};
use uniffle_worker::memory::{Budget, ReadPool};
use uniffle_worker::runtime::Tasks;
use uniffle_worker::store::object::client::Client;
use uniffle_worker::store::object::{Bucket, ObjectSettings};
use uniffle_worker::store::offload::OffloadTier;
use uniffle_worker::store::{
    ChunkRead, ExtentData, ExtentWrite, MetadataTier as _, ObjectConfig, Recovered, ServedTier as _,
    StoreError, Tier as _,
};

/// The shuffle whose requests have faults, or the first of several.
const AFFECTED: i32 = 2;
/// A shuffle whose requests have no faults.
const BESIDE: i32 = 1;
const P: PartitionId = PartitionId(0);
/// Length of a block. Two exceed an upload part.
const LARGE: u32 = 3 << 20;
const SMALL: u32 = 300;

/// Returns faults of any request, by the store or a gateway.
fn faults() -> Vec<ResponseFault> {
    vec![
        ResponseFault::Refuse(500, "InternalError"),
        ResponseFault::Refuse(503, "SlowDown"),
        ResponseFault::Refuse(403, "ExpiredToken"),
        ResponseFault::Refuse(403, "RequestTimeTooSkewed"),
        ResponseFault::Slow(Duration::from_millis(50)),
        ResponseFault::Close,
        ResponseFault::LoseAnswer,
        ResponseFault::Hang,
    ]
}

/// Returns faults of responses with content, including those of any request.
fn faults_of_reads() -> Vec<ResponseFault> {
    let more = [
        ResponseFault::Cut(100),
        ResponseFault::Stall(100),
        ResponseFault::Shorter,
        ResponseFault::OtherRange,
        ResponseFault::WrongByte,
        ResponseFault::Unranged,
    ];
    faults().into_iter().chain(more).collect()
}

/// A worker process.
struct Process {
    tier: Arc<OffloadTier>,
    tasks: Tasks,
}

impl Process {
    async fn start(server: &S3Server) -> Result<Self, StoreError> {
        // No retries, so that one fault is one error. Timeouts are short, so that faults end soon,
        // but long enough for a request without a fault on an overloaded machine.
        let config = ObjectConfig {
            request_timeout: Duration::from_millis(3000),
            stall_timeout: Duration::from_millis(1500),
            retry_timeout: Duration::ZERO,
            ..server.config("uniffle")
        };
        let (tasks, registry) = (Tasks::new(), Registry::new());
        let client = Client::open(&config, &tasks, &registry).unwrap();
        let settings = ObjectSettings { part_bytes: 5 << 20, ..ObjectSettings::new("worker-1") };
        let budget = Budget::new(u64::MAX);
        let objects = Bucket::open(client.store(), settings, &budget, tasks.clone(), &registry).await?;
        let tier = OffloadTier::without_disks(objects, &budget, tasks.clone(), &registry).await?;
        Ok(Self { tier, tasks })
    }

    async fn with_both_shuffles(server: &S3Server) -> Self {
        let process = Self::start(server).await.unwrap();
        for shuffle in [BESIDE, AFFECTED] {
            process.register(shuffle).await;
        }
        process.write(BESIDE, &blocks(0..3, SMALL)).await.unwrap();
        process
    }

    async fn register(&self, shuffle: i32) {
        Arc::clone(&self.tier).prepare(None).unwrap().unwrap()(&key(shuffle), &[]);
        self.note(shuffle, "registration").await.unwrap();
    }

    async fn note(&self, shuffle: i32, text: &'static str) -> Result<(), StoreError> {
        self.tier.metadata_log(&key(shuffle)).unwrap().append(Bytes::from_static(text.as_bytes())).await
    }

    async fn write(&self, shuffle: i32, blocks: &[Block]) -> Result<(), StoreError> {
        let data: Vec<Bytes> = blocks.iter().map(|block| block.data.clone()).collect();
        let extent = ExtentWrite {
            partition: P,
            blocks: blocks.iter().map(|block| block.meta).collect(),
            length: data.iter().map(|bytes| bytes.len() as u64).sum(),
            data: ExtentData::Pieces(data),
        };
        self.tier.shuffle(&key(shuffle)).unwrap().write(vec![extent].into()).await
    }

    /// Returns the blocks by id.
    async fn read(&self, shuffle: i32) -> Result<BTreeMap<i64, Bytes>, StoreError> {
        let index = self.tier.index(&key(shuffle), P)?;
        let data_length = u32::try_from(index.data_length).unwrap();
        let index = all(index.chunks).await?;
        let data = match data_length {
            0 => Bytes::new(),
            length => all(self.tier.data(&key(shuffle), P, 0, length)?.chunks).await?.into(),
        };
        let place = |offset: i64, length: i32| {
            let at = usize::try_from(offset).unwrap();
            at..at + usize::try_from(length).unwrap()
        };
        Ok(records(&index).map(|it| (it.block_id, data.slice(place(it.offset, it.length)))).collect())
    }

    async fn end(self) {
        self.tasks.cancel();
        self.tasks.close();
        drop(self.tier);
        self.tasks.drained().await;
    }
}

async fn all(mut read: Box<dyn ChunkRead>) -> Result<Vec<u8>, StoreError> {
    let pool = ReadPool::new(8 << 20).unwrap();
    let mut bytes = Vec::new();
    while let Some(chunk) = read.next_chunk(&pool).await? {
        bytes.extend_from_slice(&chunk);
    }
    Ok(bytes)
}

fn key(shuffle: i32) -> ShuffleKey {
    ShuffleKey::new(AppId::parse("app").unwrap(), ShuffleId(shuffle))
}

fn blocks(numbers: std::ops::Range<u32>, bytes: u32) -> Vec<Block> {
    let generator = BlockGenerator::new(3, IdLayout::SPARK);
    numbers.map(|n| generator.block(P, TaskAttemptId(1), n, bytes)).collect()
}

fn expected(blocks: &[Block]) -> BTreeMap<i64, Bytes> {
    blocks.iter().map(|block| (block.meta.block_id.0, block.data.clone())).collect()
}

async fn records_of(recovered: &mut Recovered, shuffle: i32) -> Vec<Bytes> {
    let mut stored = Vec::new();
    while let Some((of, record)) = recovered.records.next().await.unwrap() {
        stored.extend((of == key(shuffle)).then_some(record));
    }
    stored
}

/// Asserts that the affected shuffle has the blocks `written` and [`BESIDE`] is unchanged.
async fn assert_reads(process: &Process, affected: i32, written: &[Block], what: &str) {
    assert!(process.read(affected).await.unwrap() == expected(written), "{what}");
    assert!(process.read(BESIDE).await.unwrap() == expected(&blocks(0..3, SMALL)), "{what}");
}

fn assert_named(error: &StoreError, what: &str) {
    assert!(error.to_string().contains("worker-1"), "{what}: the error lacks the key: {error}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn acknowledged_uploads_survive_any_fault() {
    for on in [On::Put, On::Create, On::Part, On::Complete] {
        let server = S3Server::start().await;
        let process = Process::with_both_shuffles(&server).await;
        let bytes = if on == On::Put { SMALL } else { LARGE };
        let batch = blocks(0..2, bytes);
        for (shuffle, fault) in (AFFECTED..).zip(faults()) {
            let what = format!("{fault:?} on {on:?}");
            process.register(shuffle).await;
            server.faults.plan(on, 1, &fault);
            if let Err(error) = process.write(shuffle, &batch).await {
                assert_named(&error, &what);
                assert!(!matches!(fault, ResponseFault::Slow(_)), "{what}: {error}");
                server.faults.clear();
                assert_reads(&process, shuffle, &[], &what).await;
                process.write(shuffle, &batch).await.unwrap();
            }
            assert_reads(&process, shuffle, &batch, &what).await;
        }
        process.end().await;
        let process = Process::start(&server).await.unwrap();
        let recovered = process.tier.take_recovered();
        assert!(
            recovered.shuffles.iter().all(|it| it.incomplete.is_none() && it.reason.is_empty()),
            "{on:?}"
        );
        for (shuffle, fault) in (AFFECTED..).zip(faults()) {
            assert_reads(&process, shuffle, &batch, &format!("{fault:?} on {on:?}, the next process")).await;
        }
        process.end().await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn acknowledged_records_survive_any_fault_of_a_log_write() {
    // The write of a log object, also of its copy, and the read of the claim.
    for (on, times) in [(On::Put, 1), (On::Put, 2), (On::Get, 1)] {
        let server = S3Server::start().await;
        let process = Process::with_both_shuffles(&server).await;
        let (mut acknowledged, mut refused) = (vec![Bytes::from_static(b"registration")], 0);
        for fault in faults() {
            let what = format!("{fault:?} on {on:?}");
            server.faults.plan(on, times, &fault);
            match process.note(AFFECTED, "report").await {
                Ok(()) => acknowledged.push(Bytes::from_static(b"report")),
                Err(error) => {
                    assert_named(&error, &what);
                    assert!(!matches!(fault, ResponseFault::Slow(_)), "{what}: {error}");
                    refused += 1;
                }
            }
            server.faults.clear();
        }
        assert!(refused > 0, "{on:?}");
        process.note(AFFECTED, "the last").await.unwrap();
        acknowledged.push(Bytes::from_static(b"the last"));
        process.end().await;
        let process = Process::start(&server).await.unwrap();
        let mut recovered = process.tier.take_recovered();
        assert!(recovered.shuffles.iter().all(|it| it.incomplete.is_none()), "{recovered:?}");
        // Unacknowledged records may be known, too.
        let stored = records_of(&mut recovered, AFFECTED).await;
        let mut remaining = stored.iter();
        assert!(acknowledged.iter().all(|one| remaining.any(|it| it == one)), "{on:?} {times}: {stored:?}");
        assert_reads(&process, AFFECTED, &[], "the next process").await;
        process.end().await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn faulty_reads_return_right_bytes_or_name_the_object() {
    let server = S3Server::start().await;
    let process = Process::with_both_shuffles(&server).await;
    let written = blocks(0..2, LARGE);
    process.write(AFFECTED, &written).await.unwrap();
    process.end().await;
    // The new process has no index in memory.
    let process = Process::start(&server).await.unwrap();
    for times in [1, 10] {
        for fault in faults_of_reads() {
            let what = format!("{times} × {fault:?}");
            server.faults.plan(On::Get, times, &fault);
            match process.read(AFFECTED).await {
                Ok(read) => assert!(read == expected(&written), "{what}"),
                Err(error) => {
                    assert_named(&error, &what);
                    assert!(!matches!(fault, ResponseFault::Slow(_)), "{what}: {error}");
                }
            }
            server.faults.clear();
            assert_reads(&process, AFFECTED, &written, &what).await;
        }
    }
    process.end().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn faulty_starts_find_everything_or_fail() {
    let server = S3Server::start().await;
    let process = Process::with_both_shuffles(&server).await;
    let written = blocks(0..2, LARGE);
    process.write(AFFECTED, &written).await.unwrap();
    process.end().await;
    let mut failed = 0;
    // Lists, reads of the claim, the log, tails and indexes, and the first write.
    let requests = [(On::List, 0), (On::Get, 0), (On::Get, 2), (On::Get, 5), (On::Get, 8), (On::Put, 0)];
    for (on, nth) in requests {
        let faults = if on == On::Get { faults_of_reads() } else { faults() };
        for fault in faults {
            let what = format!("{fault:?} on {on:?} {nth}");
            server.faults.plan(on, nth, &ResponseFault::None);
            server.faults.plan(on, 1, &fault);
            let started = Process::start(&server).await;
            server.faults.clear();
            let process = match started {
                Ok(process) => process,
                Err(error) => {
                    assert_named(&error, &what);
                    failed += 1;
                    continue;
                }
            };
            let recovered = process.tier.take_recovered();
            let is_whole =
                recovered.shuffles.iter().all(|it| it.incomplete.is_none() && it.reason.is_empty());
            assert!(is_whole, "{what}: {recovered:?}");
            assert_eq!(recovered.blocks, 5, "{what}");
            assert_reads(&process, AFFECTED, &written, &what).await;
            process.end().await;
        }
    }
    assert!(failed > 10, "only {failed} starts failed");
    let process = Process::start(&server).await.unwrap();
    assert_reads(&process, AFFECTED, &written, "at last").await;
    process.end().await;
}
