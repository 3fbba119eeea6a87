//! Concurrent and long requests run with bounded concurrency, without delaying other work.

use std::sync::mpsc;

use futures::FutureExt as _;
use parking_lot::Mutex;
use tokio::task::yield_now;
use tokio::time::{pause, timeout};
use uniffle_wire::{BlockSink as _, SendHeader as WireHeader};

use super::*;
use crate::log::PartitionBlockIds;
use crate::runtime::BlockingPool;

/// Time after which work on a thread of its own would have finished.
const LONG_ENOUGH: Duration = Duration::from_millis(200);

/// Occupies all slots of a pool until it is dropped.
struct Busy(#[expect(dead_code, reason = "its drop ends the work")] mpsc::Sender<()>);

/// Occupies all slots; a pool has at most eight.
async fn occupy(fixture: &Fixture, pool: &BlockingPool) -> Busy {
    let (until, ends) = mpsc::channel();
    let ends = Arc::new(Mutex::new(ends));
    for _ in 0..8 {
        let (pool, ends) = (pool.clone(), Arc::clone(&ends));
        let work = move || {
            let _ended = ends.lock().recv();
        };
        fixture.tasks.spawn("holds a place", async move { drop(pool.run(work).await) });
    }
    for _ in 0..10 {
        yield_now().await;
    }
    Busy(until)
}

/// Lets real time pass while the test's time is paused.
fn wait() {
    let (_kept, never) = mpsc::channel::<()>();
    let _elapsed = never.recv_timeout(LONG_ENOUGH);
}

/// Begins a send with more runs than are committed inline.
fn large_send(fixture: &mut Fixture) -> SendSink {
    let request =
        RequireRequest { app: APP, shuffle: 0, bytes: 1 << 20, partitions: &[], partition_sizes: &[] };
    let ticket = fixture.service.ingest.require_buffer(request).unwrap().ticket;
    let mut sink = SendSink::new(Arc::clone(&fixture.service.ingest), 1 << 20);
    sink.header(WireHeader { app: APP, shuffle: 0, ticket }).unwrap();
    for number in 0..1100 {
        sink.partition(number % 10).unwrap();
        sink.begin_block(100).unwrap();
        sink.write(&[7; 100]).unwrap();
        fixture.next_block += 1;
        let block = BlockHeader { block_id: fixture.next_block, length: 100, ..BlockHeader::default() };
        sink.end_block(block).unwrap();
    }
    sink
}

fn committing(mut sink: SendSink) -> Committing {
    match sink.commit() {
        Commit::Background(committing) => committing,
        Commit::Done(stored) => panic!("a large commit was stored at once: {stored:?}"),
    }
}

#[tokio::test]
async fn large_sends_commit_without_a_waiting_caller() {
    let mut fixture = Fixture::new(PartitionLimits::default(), quiet()).await;
    let busy = occupy(&fixture, &fixture.service.ingest.committing).await;
    let mut send = committing(large_send(&mut fixture));
    drop(committing(large_send(&mut fixture)));
    yield_now().await;
    wait();
    assert!(send.outcome().now_or_never().is_none());
    assert_eq!(fixture.buffer(3).received_bytes(), 0);
    drop(busy);
    send.outcome().await.unwrap();
    pause();
    within_time("both are there", || fixture.buffer(3).received_bytes() == 2 * 110 * 100).await;
    fixture.stop().await;
}

#[tokio::test]
async fn aborted_large_sends_do_not_delay_commits() {
    let mut fixture = Fixture::new(PartitionLimits::default(), quiet()).await;
    let busy = occupy(&fixture, &fixture.service.ingest.aborting).await;
    drop(large_send(&mut fixture));
    yield_now().await;
    wait();
    assert_eq!(
        fixture.service.parts.metrics.rejected_sends.get(),
        0,
        "the aborted send was counted as rejected too early"
    );
    let mut next = committing(large_send(&mut fixture));
    timeout(Duration::from_secs(20), next.outcome()).await.unwrap().unwrap();
    drop(busy);
    pause();
    within_time("the send is aborted", || fixture.service.parts.metrics.rejected_sends.get() == 1).await;
    fixture.stop().await;
}

#[tokio::test]
async fn purges_and_reports_do_not_wait_for_each_other() {
    let fixture = Fixture::new(PartitionLimits::default(), quiet()).await;
    let wait_max = Duration::from_secs(20);
    fixture.register("app-2", &[]).await;
    let reports = occupy(&fixture, &fixture.service.parts.pool).await;
    let ended = timeout(wait_max, fixture.service.lifecycle.end_app("app-2")).await;
    ended.expect("the end of an application had to wait for reports").unwrap();
    drop(reports);
    let ends = occupy(&fixture, &fixture.service.lifecycle.ends).await;
    let report = ReportRequest {
        app: APP,
        shuffle: 0,
        task_attempt: 0,
        bitmap_count: 1,
        partitions: vec![PartitionBlockIds {
            partition: PartitionId(3),
            block_ids: (0..100_000).map(|id| id << 45).collect(),
        }],
        records: Vec::new(),
    };
    let reported = timeout(wait_max, fixture.service.ingest.report(report)).await;
    reported.expect("a report had to wait for ended applications").unwrap();
    drop(ends);
    pause();
    fixture.stop().await;
}

#[tokio::test(start_paused = true)]
async fn expired_applications_are_deleted_a_few_at_a_time() {
    let mut fixture = Fixture::new(PartitionLimits::default(), quiet()).await;
    for number in 0..200 {
        let app = format!("silent-{number}");
        fixture.register(&app, &[]).await;
        fixture.send_of(&app, 0, 1000).unwrap();
    }
    fixture.flusher.flush_all();
    fixture.settle().await;
    fixture.faults.add(Rule::always(Operation::Rename, Fault::Hang));
    let before = fixture.tasks.running();
    let apps = || fixture.service.apps().app_count();
    for _ in 0..1000 {
        if apps() == 0 {
            break;
        }
        tokio::time::sleep(Duration::from_secs(10)).await;
    }
    assert_eq!(apps(), 0, "applications have not expired");
    let deleting = fixture.tasks.running() - before;
    assert!((1..=16).contains(&deleting), "{deleting} deletion tasks run for 201 applications");
    fixture.faults.clear();
    fixture.faults.release().await;
    within_time("all are deleted", || fixture.tasks.running() <= before).await;
    fixture.register(APP, &[]).await;
    fixture.stop().await;
}
