//! A burst of four times the memory against a disk that is slower than its writers, on the clock of
//! a simulated device.
//!
//! Only the time to write all memory matters, here two seconds, and a batch that is small beside
//! it. `cargo test --test contract burst -- --nocapture` prints the figure of docs/benchmarks.md.

use std::sync::Arc;

use tokio::sync::Semaphore;
use tokio::task::JoinSet;
use tokio::time::{Duration, Instant, sleep};
use uniffle_client::block::{Block, IdLayout};
use uniffle_testkit::in_process::{InProcess, send_block};
use uniffle_testkit::service::{ServiceBuilder, ServiceFixture, memory_disks, quiet};
use uniffle_wire::types::{BlockId, ShuffleKey, TaskAttemptId};
use uniffle_worker::flush::FlushConfig;
use uniffle_worker::flush::policy::Limits;
use uniffle_worker::memory::MemoryConfig;
use uniffle_worker::schema::SpareMemory;
use uniffle_worker::service::{RequireRequest, SendHeader, ServiceError};
use uniffle_worker::tiers::LocalConfig;

use super::grpc::fixture::key;

const MIB: u64 = 1 << 20;
const CAPACITY: u64 = 64 * MIB;
/// Bytes that the disk writes per second.
const SPEED: u64 = CAPACITY / 2;
const BATCH: u64 = CAPACITY / 16;
const WRITERS: i64 = 8;
/// Sends of one MiB of each writer.
const SENDS: i64 = 32;

async fn service(page_cache_bytes: u64) -> ServiceFixture {
    let usual = ServiceBuilder::default();
    let limits = Limits { high_watermark: 0.6, low_watermark: 0.2, ..quiet() };
    let (spare_memory, direct_io) = (SpareMemory::Always(u64::MAX), true);
    let fixture = ServiceBuilder {
        memory: MemoryConfig { capacity_bytes: CAPACITY, ..usual.memory },
        flush: FlushConfig { limits, batch_bytes_max: BATCH, ..usual.flush },
        local: LocalConfig { page_cache_bytes, spare_memory, direct_io, ..LocalConfig::default() },
        disks: memory_disks(1),
        ..ServiceBuilder::default()
    };
    let fixture = fixture.start().await;
    fixture.faults[0].set_speed(SPEED);
    fixture
}

/// Sends one MiB to a partition. Retries a refused send after a second, as clients do.
async fn send(client: &InProcess, key: &ShuffleKey, (partition, number): (i32, i64)) {
    let (app, shuffle, waiting) = (key.app.as_str(), key.shuffle.0, Semaphore::new(1));
    let request =
        RequireRequest { app, shuffle, bytes: 1 << 20, partitions: &[partition], partition_sizes: &[] };
    let ingest = &client.service.ingest;
    let ticket = loop {
        match ingest.require_buffer_in_line(request, &waiting).await {
            Ok(grant) => break grant.ticket,
            Err(ServiceError::Memory(_)) => sleep(Duration::from_secs(1)).await,
            Err(other) => panic!("{other}"),
        }
    };
    let header = SendHeader { app, shuffle, ticket, message_bytes: MIB };
    let mut session = ingest.begin_send(header).unwrap();
    session.partition(partition).unwrap();
    let block = Block::new(BlockId(number), TaskAttemptId(1), vec![7; (1 << 20) - 64].into());
    send_block(&mut session, &block).unwrap();
    session.commit().unwrap();
}

#[expect(clippy::print_stdout, reason = "the figure of docs/benchmarks.md")]
/// Returns the speed of accepting a burst of four times the memory, as a multiple of the disk's
/// speed.
async fn speed_of_a_burst(page_cache_bytes: u64) -> f64 {
    let fixture = service(page_cache_bytes).await;
    let (key, layout) = (key("app-1", 1), IdLayout::SPARK);
    let client = Arc::new(InProcess { service: Arc::clone(&fixture.service), layout });
    client.register(&key, i32::try_from(WRITERS).unwrap()).await.unwrap();
    // The worker estimates the disk's speed from earlier writes.
    for number in 0..4 {
        send(&client, &key, (0, 1 << 40 | number)).await;
    }
    fixture.flusher.flush_all();
    fixture.flushed().await;

    let began = Instant::now();
    let mut writers = JoinSet::new();
    for writer in 0..WRITERS {
        let (client, key) = (Arc::clone(&client), key.clone());
        writers.spawn(async move {
            for number in 0..SENDS {
                send(&client, &key, (i32::try_from(writer).unwrap(), writer << 20 | number)).await;
            }
        });
    }
    writers.join_all().await;
    let took = began.elapsed();
    assert!(fixture.memory.budget().used() <= CAPACITY);
    let bytes = WRITERS * SENDS * (1 << 20);
    fixture.finish().await;
    #[expect(clippy::cast_precision_loss, reason = "a ratio")]
    let speed = bytes as f64 / took.as_secs_f64() / SPEED as f64;
    println!(
        "{} MiB of page cache: a burst that the disk needs 8 s for takes {took:?}",
        page_cache_bytes >> 20
    );
    speed
}

#[tokio::test(start_paused = true)]
async fn burst_is_accepted_at_three_times_the_disk_speed() {
    let (without, with) = (speed_of_a_burst(0).await, speed_of_a_burst(4 * CAPACITY).await);
    assert!(without < 2.0, "{without}: that is what the disk and the memory take");
    assert!(with >= 3.0, "{with}");
}
