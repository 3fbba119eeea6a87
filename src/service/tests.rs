//! The service's rules over real memory, flusher and store, on an in-memory disk with faults.

mod answers;
mod crowded_start;
mod damage;
mod fairness;
mod places;
mod registrations;
mod reports;
mod start;

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use prometheus::Registry;

use super::*;
use crate::app::AppConfig;
use crate::flush::{FlushConfig, policy};
use crate::memory::{Buffer, MemoryConfig};
use crate::proto::StatusCode;
use crate::runtime::Tasks;
use crate::store::{LocalConfig, LocalStore};
use uniffle_io::Disk;
use uniffle_testkit::fault::{Fault, FaultDisk, Faults, Operation, Rule};
use uniffle_testkit::memory_disk::MemoryDisk;
use uniffle_wire::types::{AppId, Distribution, PartitionId};

const APP: &str = "app-1";
const CAPACITY: u64 = 16 << 20;
/// Received bytes above which a partition is huge.
const HUGE: u64 = 100_000;
/// Bytes in memory that a huge partition may have.
const HUGE_SHARE: u64 = 50_000;
const BATCHES_MAX: usize = 2;

fn target(app: &str, partition: i32) -> RequestedPartition<'_> {
    RequestedPartition { app, shuffle: 0, partition }
}

struct Fixture {
    service: Arc<Service>,
    memory: Arc<Memory>,
    flusher: Arc<Flusher>,
    faults: Faults,
    registry: Registry,
    tasks: Tasks,
    next_block: i64,
}

fn quiet() -> policy::Limits {
    policy::Limits {
        high_watermark: 0.9,
        low_watermark: 0.2,
        single_buffer_bytes_max: u64::MAX,
        huge_partition_bytes: HUGE,
        huge_buffer_bytes_max: u64::MAX,
        huge_share_bytes: u64::MAX,
        in_flight_batches_max: BATCHES_MAX,
        blocks_high: 9_000,
        blocks_low: 2_000,
    }
}

fn limits() -> PartitionLimits {
    PartitionLimits {
        huge_bytes: Some(HUGE),
        huge_in_memory_bytes_max: Some(HUGE_SHARE),
        ..PartitionLimits::default()
    }
}

fn memory_config(backing: crate::memory::Backing) -> MemoryConfig {
    MemoryConfig {
        capacity_bytes: CAPACITY,
        read_capacity_bytes: 4 << 20,
        heap_bytes: 96 << 20,
        ticket_timeout: Duration::from_secs(30),
        tickets_max: 100,
        blocks_max: 10_000,
        backing,
        ..MemoryConfig::default()
    }
}

impl Fixture {
    async fn new(partition_limits: PartitionLimits, flush_limits: policy::Limits) -> Self {
        Self::with(LocalConfig::default(), partition_limits, flush_limits).await
    }

    async fn with(
        local: LocalConfig,
        partition_limits: PartitionLimits,
        flush_limits: policy::Limits,
    ) -> Self {
        let (registry, tasks, faults) = (Registry::new(), Tasks::new(), Faults::default());
        let memory = Memory::new(&memory_config(Default::default()), &registry).unwrap();
        let disk = Arc::new(MemoryDisk::new("/disk", None));
        let disk: Arc<dyn Disk> = Arc::new(FaultDisk::new(disk, faults.clone()));
        let store = LocalStore::open(local, vec![disk], memory.extents(), &registry).await.unwrap();
        let flush = FlushConfig {
            limits: flush_limits,
            cold_bytes: u64::MAX,
            batch_bytes_max: 1 << 20,
            tick: Duration::from_secs(1),
            retry_pause_min: Duration::from_millis(100),
            retry_pause_max: Duration::from_secs(2),
            traces: crate::telemetry::traces::Traces::off(),
        };
        let flusher =
            Flusher::start(flush, Arc::clone(&memory), Arc::clone(&store), tasks.clone(), &registry).unwrap();
        let service = Service::new(
            ServiceConfig { partition_limits, ..ServiceConfig::default() },
            Arc::new(AppRegistry::new(AppConfig::default(), memory.heap(), memory.answered())),
            Arc::clone(&memory),
            Some(Arc::clone(&flusher)),
            tasks.clone(),
            &registry,
        )
        .unwrap();
        service.lifecycle.restore(store.take_recovered()).await;
        let expiry =
            Arc::clone(&service.lifecycle).run_expiry(Duration::from_secs(5), Duration::from_secs(10));
        tasks.spawn("expiry", expiry);
        let fixture = Self { service, memory, flusher, faults, registry, tasks, next_block: 0 };
        fixture.register(APP, &[]).await;
        fixture
    }

    async fn register(&self, app: &str, properties: &[(&str, &str)]) {
        let properties = properties.iter().map(|(key, value)| ((*key).to_owned(), (*value).to_owned()));
        let request = RegisterRequest {
            app,
            shuffle: 0,
            ranges: vec![(0, 9)],
            user: String::new(),
            distribution: Distribution::Normal,
            properties: properties.collect(),
            remote_storage: None,
            from: None,
        };
        self.service.lifecycle.register(request).await.unwrap();
    }

    fn require(&self, partitions: &[i32], partition_sizes: &[i32]) -> Result<RequireGrant, ServiceError> {
        let bytes = partition_sizes.iter().sum::<i32>().max(1000);
        let request = RequireRequest { app: APP, shuffle: 0, bytes, partitions, partition_sizes };
        self.service.ingest.require_buffer(request)
    }

    /// Sends blocks with a ticket requested without the partition, so that only the limits of the
    /// send apply.
    fn send(&mut self, partition: i32, bytes: usize) -> Result<(), ServiceError> {
        self.send_of(APP, partition, bytes)
    }

    /// Begins a send with a block of `bytes` bytes, which is still to be written.
    fn begin_send_of(
        &self,
        app: &str,
        partition: i32,
        bytes: usize,
    ) -> Result<super::SendSession, ServiceError> {
        let length = i32::try_from(bytes).unwrap();
        let request =
            RequireRequest { app, shuffle: 0, bytes: length + 32, partitions: &[], partition_sizes: &[] };
        let ticket = self.service.ingest.require_buffer(request)?.ticket;
        let header = IncomingSend { app, shuffle: 0, ticket, message_bytes: bytes as u64 + 200 };
        let mut session = self.service.ingest.begin_send(header)?;
        session.partition(partition)?;
        session.begin_block(u32::try_from(bytes).unwrap())?;
        Ok(session)
    }

    fn send_of(&mut self, app: &str, partition: i32, bytes: usize) -> Result<(), ServiceError> {
        let mut session = self.begin_send_of(app, partition, bytes)?;
        session.write(&vec![7; bytes])?;
        let length = i32::try_from(bytes).unwrap();
        self.next_block += 1;
        let block = BlockHeader { block_id: self.next_block, length, ..BlockHeader::default() };
        session.end_block(block)?;
        session.commit()
    }

    fn fill(&mut self, partition: i32, bytes: u64) {
        for _ in 0..bytes / 10_000 {
            self.send(partition, 10_000).unwrap();
        }
    }

    fn buffer(&self, partition: i32) -> Arc<Buffer> {
        self.buffer_of(APP, partition)
    }

    fn buffer_of(&self, app: &str, partition: i32) -> Arc<Buffer> {
        let shuffle = self.service.parts.app(app).unwrap().shuffles()[0].key().clone();
        self.memory.shuffle(&shuffle).unwrap().existing(PartitionId(partition)).unwrap()
    }

    fn metric(&self, name: &str) -> u64 {
        self.service.diagnostics.refresh_metrics(&self.service.diagnostics.app_statistics());
        let families = self.registry.gather();
        let family = families.iter().find(|family| family.name() == name);
        let metric = &family.unwrap_or_else(|| panic!("metric {name} does not exist")).get_metric()[0];
        let value = metric.get_counter().get_value() + metric.get_gauge().get_value();
        format!("{value}").parse().unwrap()
    }

    /// Waits until flushed bytes have left memory.
    async fn settle(&self) {
        within_time("batches are in the store", || self.flusher.unfinished() == 0).await;
    }

    async fn stop(self) {
        self.faults.clear();
        self.service.lifecycle.unregister_app(APP).unwrap();
        self.faults.release().await;
        tokio::time::sleep(Duration::from_secs(100)).await;
        assert_eq!(self.flusher.unfinished(), 0, "batches are still being flushed");
        assert_eq!(self.memory.budget().used(), 0, "bytes are still charged");
        assert_eq!(self.memory.in_flight_bytes(), 0, "bytes are still in flight");
        assert_eq!(self.memory.in_flight_blocks(), 0, "blocks are still in flight");
        assert_eq!(self.memory.block_count(), 0, "blocks are still counted");
        assert_eq!(self.metric("huge_partition_num"), 0, "huge partitions are still counted");
        self.tasks.cancel();
        self.tasks.drained().await;
    }
}

/// Waits for `condition`. Time is paused: it advances only when there is nothing to do.
async fn within_time(what: &str, condition: impl Fn() -> bool) {
    for _ in 0..1000 {
        if condition() {
            return;
        }
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    panic!("timed out after 10 s: {what}");
}

fn code<T: std::fmt::Debug>(result: Result<T, ServiceError>) -> StatusCode {
    result.unwrap_err().status()
}

/// Regression test: a flush worker waited up to 150 ms for such blocks, so that a few slow senders
/// stopped the flushes of all applications.
#[tokio::test(start_paused = true)]
async fn flush_does_not_wait_for_a_block_that_is_being_written() {
    let mut fixture = Fixture::new(limits(), quiet()).await;
    let unfinished = fixture.begin_send_of(APP, 3, 10_000).unwrap();
    fixture.send(3, 10_000).unwrap();
    let key = fixture.service.parts.app(APP).unwrap().shuffles()[0].key().clone();
    let buffers = fixture.memory.shuffle(&key).unwrap();
    let deadline = crate::clock::Instant::now() + Duration::from_millis(100);
    assert!(fixture.flusher.flush_shuffle(&buffers, deadline).await, "the committed block is not on disk");
    drop(unfinished);
    fixture.stop().await;
}

#[tokio::test(start_paused = true)]
async fn first_full_partition_refuses_the_whole_ticket() {
    let mut fixture = Fixture::new(limits(), quiet()).await;
    fixture.fill(3, 90_000);
    let used = fixture.memory.used_bytes();
    fixture.require(&[1, 3, 2], &[90_000, 10_000, 90_000]).unwrap();
    let refused = fixture.require(&[1, 3, 2], &[90_000, 10_001, 90_000]).unwrap_err();
    assert_eq!(refused.status(), StatusCode::NoBufferForHugePartition);
    assert!(refused.to_string().starts_with("Huge partition is limited to writing."), "{refused}");
    assert!(refused.to_string().contains("partition 3 has received 90000 bytes"), "{refused}");
    assert_eq!(fixture.memory.tickets().count(), 1);
    assert_eq!(fixture.metric("total_require_buffer_failed_for_huge_partition"), 1);
    assert_eq!(fixture.metric("total_require_buffer_failed"), 1);
    // The first failing partition decides, regardless of the others.
    assert_eq!(code(fixture.require(&[3, 1], &[10_001, -1])), StatusCode::NoBufferForHugePartition);
    assert_eq!(code(fixture.require(&[1, 3], &[-1, 10_001])), StatusCode::InvalidRequest);
    fixture.memory.tickets().forget_app(&AppId::parse(APP).unwrap());
    fixture.settle().await;
    assert!(fixture.memory.used_bytes() < used, "the refused request began no flush");
    fixture.stop().await;
}

#[tokio::test(start_paused = true)]
async fn clients_without_sizes_are_limited_by_received_bytes() {
    let mut fixture = Fixture::new(limits(), quiet()).await;
    fixture.fill(3, 100_000);
    fixture.require(&[3], &[]).unwrap();
    fixture.fill(3, 10_000);
    assert_eq!(code(fixture.require(&[1, 3], &[])), StatusCode::NoBufferForHugePartition);
    // A list of another length is ignored.
    assert_eq!(code(fixture.require(&[1, 3], &[5])), StatusCode::NoBufferForHugePartition);
    fixture.require(&[], &[]).unwrap();
    fixture.stop().await;
}

#[tokio::test(start_paused = true)]
async fn bytes_in_flight_count_against_a_huge_partitions_share() {
    let mut fixture = Fixture::new(limits(), quiet()).await;
    fixture.faults.add(Rule::always(Operation::Write, Fault::Hang));
    fixture.fill(3, 110_000);
    assert_eq!(code(fixture.require(&[3], &[1])), StatusCode::NoBufferForHugePartition);
    // The refusal has put everything in flight. These bytes still count, and are not cut into small
    // batches.
    let buffer = fixture.buffer(3);
    assert_eq!((buffer.active_bytes(), buffer.in_flight_bytes()), (0, 110_000));
    fixture.fill(3, 10_000);
    assert_eq!(code(fixture.require(&[3], &[1])), StatusCode::NoBufferForHugePartition);
    assert_eq!(buffer.in_flight_batches(), 1);
    within_time("a write hangs", || fixture.faults.hung() == 1).await;
    fixture.faults.clear();
    fixture.faults.release().await;
    fixture.settle().await;
    assert_eq!(buffer.received_bytes(), 120_000, "a flush must not reduce the size of the partition");
    fixture.require(&[3], &[1]).unwrap();
    fixture.stop().await;
}

#[tokio::test(start_paused = true)]
async fn huge_partitions_are_flushed_by_their_own_threshold() {
    let mut fixture =
        Fixture::new(limits(), policy::Limits { huge_buffer_bytes_max: 20_000, ..quiet() }).await;
    fixture.fill(3, 100_000);
    assert_eq!(fixture.metric("huge_partition_num"), 0);
    assert_eq!(fixture.flusher.unfinished(), 0);
    fixture.fill(3, 10_000);
    assert_eq!(fixture.flusher.unfinished(), 1);
    fixture.settle().await;
    fixture.fill(3, 20_000);
    assert_eq!(fixture.flusher.unfinished(), 0, "a partition below its threshold must not be flushed");
    fixture.fill(4, 110_000);
    for (name, value) in [
        ("huge_partition_num", 2),
        ("total_huge_partition_num", 2),
        ("app_with_huge_partition_num", 1),
        ("total_app_with_huge_partition_num", 1),
    ] {
        assert_eq!(fixture.metric(name), value, "{name}");
    }
    fixture.stop().await;
}

#[tokio::test(start_paused = true)]
async fn hard_limit_uses_a_status_that_clients_know() {
    let hard = PartitionLimits { bytes_max: Some(50_000), ..PartitionLimits::default() };
    let mut fixture = Fixture::new(hard, quiet()).await;
    fixture.fill(3, 40_000);
    fixture.require(&[3], &[10_000]).unwrap();
    assert_eq!(code(fixture.require(&[3], &[10_001])), StatusCode::NoRegister);
    assert_eq!(code(fixture.send(3, 10_001)), StatusCode::NoRegister);
    assert_eq!(fixture.buffer(3).received_bytes(), 40_000, "the refused send stored a block");
    fixture.register(APP, &[("spark.anything", "1")]).await;
    assert_eq!(code(fixture.require(&[3], &[10_001])), StatusCode::ExceedHugePartitionHardLimit);
    assert_eq!(code(fixture.send(3, 10_001)), StatusCode::ExceedHugePartitionHardLimit);
    assert_eq!(fixture.metric("total_huge_partition_exceed_hard_limit_num"), 4);
    fixture.send(3, 10_000).unwrap();
    fixture.stop().await;
}

#[tokio::test(start_paused = true)]
async fn partitions_to_be_split_are_named_and_still_served() {
    let split = PartitionLimits { split_bytes: Some(20_000), ..PartitionLimits::default() };
    let mut fixture = Fixture::new(split, quiet()).await;
    fixture.fill(3, 20_000);
    assert_eq!(fixture.require(&[3, 1, 5], &[0, 0, 0]).unwrap().split_partitions, Vec::<i32>::new());
    assert_eq!(fixture.require(&[3, 1, 5], &[1, 0, 20_001]).unwrap().split_partitions, [3, 5]);
    // Too few disks accept data: all partitions should go elsewhere.
    fixture.service.status().set_without_room(true);
    assert_eq!(fixture.require(&[3, 1], &[0, 0]).unwrap().split_partitions, [3, 1]);
    fixture.service.status().set_without_room(false);
    assert_eq!(fixture.require(&[3, 1], &[0, 0]).unwrap().split_partitions, Vec::<i32>::new());
    fixture.stop().await;
}

#[tokio::test(start_paused = true)]
async fn batches_of_one_buffer_in_flight_are_limited() {
    let mut fixture = Fixture::new(
        PartitionLimits::default(),
        policy::Limits { single_buffer_bytes_max: 9_999, ..quiet() },
    )
    .await;
    fixture.faults.add(Rule::always(Operation::Write, Fault::Hang));
    fixture.fill(3, 100_000);
    fixture.flusher.flush_all();
    let buffer = fixture.buffer(3);
    assert_eq!(buffer.in_flight_batches(), BATCHES_MAX);
    assert_eq!((buffer.active_bytes(), buffer.in_flight_bytes()), (80_000, 20_000));
    fixture.stop().await;
}

#[tokio::test(start_paused = true)]
async fn buffer_with_many_batches_is_flushed_after_one_ends() {
    let oversized = policy::Limits { single_buffer_bytes_max: 9_999, ..quiet() };
    for (limits, by_an_operator) in [(quiet(), true), (oversized, false)] {
        let mut fixture = Fixture::new(PartitionLimits::default(), limits).await;
        fixture.faults.add(Rule::always(Operation::Write, Fault::Hang));
        for _ in 0..BATCHES_MAX + 2 {
            fixture.fill(3, 10_000);
            if by_an_operator {
                fixture.flusher.flush_all();
            }
        }
        let buffer = fixture.buffer(3);
        assert_eq!((buffer.in_flight_batches(), buffer.active_bytes()), (BATCHES_MAX, 20_000));
        within_time("writes hang", || fixture.faults.hung() > 0).await;
        fixture.faults.clear();
        fixture.faults.release().await;
        fixture.settle().await;
        assert_eq!(
            fixture.memory.block_count(),
            0,
            "blocks remain in memory, flushed by an operator: {by_an_operator}"
        );
        fixture.stop().await;
    }
}

#[tokio::test(start_paused = true)]
async fn small_blocks_are_flushed_when_there_are_too_many() {
    let mut fixture = Fixture::new(
        PartitionLimits::default(),
        policy::Limits { blocks_high: 50, blocks_low: 5, ..quiet() },
    )
    .await;
    for block in 0..51 {
        fixture.send(block % 10, 1).unwrap();
    }
    assert_eq!(fixture.memory.block_count(), 51);
    tokio::time::sleep(Duration::from_millis(10)).await;
    fixture.settle().await;
    assert!(
        fixture.memory.block_count() <= 5 + 5,
        "{} blocks were not flushed",
        fixture.memory.block_count()
    );
    fixture.stop().await;
}

#[tokio::test(start_paused = true)]
async fn decommission_ends_at_a_check_after_the_last_app() {
    let fixture = Fixture::new(PartitionLimits::default(), quiet()).await;
    let service = Arc::clone(&fixture.service);
    // Expiry would otherwise remove the app.
    fixture.register(APP, &[("spark.rss.riffle.appHeartbeatTimeoutMinutes", "600")]).await;
    tokio::time::sleep(Duration::from_secs(50)).await;
    service.lifecycle.decommission();
    tokio::time::sleep(Duration::from_secs(400)).await;
    assert_eq!(service.status().state(), WorkerState::Decommissioning);
    service.lifecycle.cancel_decommission();
    assert_eq!(service.status().state(), WorkerState::Active);
    service.lifecycle.unregister_app(APP).unwrap();
    tokio::time::sleep(Duration::from_secs(30)).await;
    service.lifecycle.decommission();
    let before = tokio::time::Instant::now();
    service.status().decommissioned().await;
    assert!(before.elapsed() < Duration::from_secs(1), "an idle worker must be checked at once");
    assert_eq!(service.status().state(), WorkerState::Decommissioned);
    fixture.register(APP, &[]).await;
    tokio::time::sleep(Duration::from_secs(61)).await;
    assert_eq!(
        service.status().state(),
        WorkerState::Decommissioning,
        "the worker serves an application again and must wait for it"
    );
    service.lifecycle.cancel_decommission();
    fixture.stop().await;
}

#[tokio::test(start_paused = true)]
async fn statistics_are_summed_over_partitions() {
    let mut fixture = Fixture::new(PartitionLimits::default(), quiet()).await;
    fixture.register("app-10", &[]).await;
    fixture.fill(3, 20_000);
    fixture.flusher.flush_all();
    fixture.settle().await;
    fixture.fill(4, 10_000);
    let all = fixture.service.diagnostics.app_statistics();
    let by_name: HashMap<&str, &AppStatistics> = all.iter().map(|app| (app.app.as_str(), app)).collect();
    let (busy, idle) = (by_name[APP], by_name["app-10"]);
    assert_eq!((busy.received_bytes, busy.in_memory_bytes, busy.in_memory_blocks), (30_000, 10_000, 1));
    assert_eq!((busy.local_bytes, busy.local_files, busy.partitions), (20_000, 2, 10));
    assert_eq!((idle.received_bytes, idle.partitions, idle.average_block_bytes()), (0, 10, None));
    assert_eq!(fixture.metric("topN_of_total_data_size_for_app"), 30_000);
    assert_eq!(fixture.metric("topN_of_on_localfile_data_size_for_app"), 20_000);
    assert_eq!(fixture.metric("bottomN_of_in_memory_avg_block_size_for_app"), 10_000);
    fixture.service.lifecycle.unregister_app("app-10").unwrap();
    fixture.stop().await;
}

#[tokio::test(start_paused = true)]
async fn next_chunk_is_read_ahead_with_spare_memory() {
    const BYTES: i32 = 3_000_000;
    let mut fixture = Fixture::new(PartitionLimits::default(), quiet()).await;
    fixture.fill(3, 3_000_000);
    fixture.flusher.flush_all();
    fixture.settle().await;
    let (pool, reads) = (fixture.memory.read_pool().clone(), Arc::clone(&fixture.service.reads));

    let answer = reads
        .read_data(&reads.read_limits(), target(APP, 3), ReadRange { offset: 0, length: BYTES })
        .await
        .unwrap();
    fixture.faults.add(Rule::always(Operation::Read, Fault::Hang));
    let mut ahead = ReadAhead::of(answer.chunks);
    let first = ahead.next().await.unwrap().unwrap();
    assert_eq!((first.len(), fixture.faults.hung(), pool.used_bytes()), (1 << 20, 1, 2 << 20));
    drop((first, ahead));
    fixture.faults.clear();
    fixture.faults.release().await;
    within_time("a dropped response holds no memory", || pool.used_bytes() == 0).await;

    let answer = reads
        .read_data(&reads.read_limits(), target(APP, 3), ReadRange { offset: 0, length: BYTES })
        .await
        .unwrap();
    let others = pool.try_acquire(1 << 20).unwrap();
    fixture.faults.add(Rule::always(Operation::Read, Fault::Hang));
    let mut ahead = ReadAhead::of(answer.chunks);
    let mut read = ahead.next().await.unwrap().unwrap().len();
    assert_eq!(fixture.faults.hung(), 0, "the read must not use more than half of the read memory");
    fixture.faults.clear();
    drop(others);
    while let Some(chunk) = ahead.next().await.unwrap() {
        read += chunk.len();
    }
    assert_eq!(read, 3_000_000);
    fixture.stop().await;
}

#[tokio::test(start_paused = true)]
async fn hand_off_stops_acknowledgements_and_returns_tickets() {
    let mut fixture = Fixture::new(limits(), quiet()).await;
    fixture.send(1, 1000).unwrap();
    let ticket = |fixture: &Fixture| {
        let request =
            RequireRequest { app: APP, shuffle: 0, bytes: 2000, partitions: &[], partition_sizes: &[] };
        fixture.service.ingest.require_buffer(request).unwrap().ticket
    };
    let open = |fixture: &Fixture, ticket| {
        fixture.service.ingest.begin_send(IncomingSend { app: APP, shuffle: 0, ticket, message_bytes: 1200 })
    };
    let late = ticket(&fixture);
    let mut under_way = open(&fixture, ticket(&fixture)).unwrap();
    under_way.partition(2).unwrap();
    under_way.begin_block(1000).unwrap();
    fixture.service.ingest.refuse_sends();
    assert_eq!(code(open(&fixture, late)), StatusCode::NoBuffer);
    under_way.write(&[7; 1000]).unwrap();
    under_way.end_block(BlockHeader { block_id: 99, length: 1000, ..BlockHeader::default() }).unwrap();
    assert_eq!(code(under_way.commit()), StatusCode::NoBuffer);
    assert_eq!(fixture.memory.contents()[0].blocks, 1, "only the acknowledged block may be stored");
    assert_eq!(fixture.memory.tickets().count(), 0, "a refused send must spend its ticket");
    // The stop is cancelled.
    fixture.service.resume();
    fixture.send(2, 1000).unwrap();
    assert_eq!(fixture.memory.contents()[0].blocks, 2);
    fixture.stop().await;
}
