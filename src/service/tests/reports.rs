//! Reports for shuffles that change meanwhile, or whose ids are on disk.

use super::super::ingest::spill::{merge_runs, move_table};
use super::*;
use crate::app::{QuotaKind, QuotaResource, QuotaSubject};
use crate::log::PartitionBlockIds;
use uniffle_testkit::fault::ENOSPC;
use uniffle_wire::types::ShuffleId;

#[tokio::test(start_paused = true)]
async fn report_is_not_logged_for_a_later_incarnation() {
    let fixture = Fixture::new(PartitionLimits::default(), quiet()).await;
    let app = fixture.service.parts.app(APP).unwrap();
    let before = app.shuffle(ShuffleId(0)).unwrap();
    // The report waits for a verification that nobody runs.
    before.ledger.with(PartitionId(3), |it| it.mark_unverified(None));
    let report = ReportRequest {
        app: APP,
        shuffle: 0,
        task_attempt: 0,
        bitmap_count: 1,
        partitions: vec![PartitionBlockIds { partition: PartitionId(3), block_ids: vec![1] }],
        records: Vec::new(),
    };
    let again = async {
        tokio::time::sleep(Duration::from_secs(1)).await;
        fixture.service.lifecycle.unregister_shuffle(APP, 0).unwrap();
        fixture.register(APP, &[]).await;
    };
    let (reported, ()) = tokio::join!(fixture.service.ingest.report(report), again);
    assert!(matches!(reported, Err(ServiceError::NotRegisteredPart(_))), "{reported:?}");
    drop((before, app));
    fixture.stop().await;
}

/// Returns `count` ids of a partition, far from each other.
fn far_ids(partition: i32, count: i64) -> Vec<i64> {
    let spread =
        |n: i64| (n + 1_000_000 * i64::from(partition)).wrapping_mul(0x61c8_8646_80b5_83eb) & i64::MAX;
    (0..count).map(spread).collect()
}

async fn report_far(fixture: &Fixture, partitions: std::ops::Range<i32>, count: i64) {
    let ids = |id| PartitionBlockIds { partition: PartitionId(id), block_ids: far_ids(id, count) };
    let report = ReportRequest {
        app: APP,
        shuffle: 0,
        task_attempt: 0,
        bitmap_count: 1,
        partitions: partitions.map(ids).collect(),
        records: Vec::new(),
    };
    fixture.service.ingest.report(report).await.unwrap();
}

async fn assert_told(fixture: &Fixture, partitions: std::ops::Range<i32>, count: i64) {
    let partition_ids: Vec<i32> = partitions.collect();
    let results = fixture.service.reads.results(APP, 0, &partition_ids, None).await.unwrap();
    let ids = partition_ids.iter().flat_map(|id| far_ids(*id, count)).map(i64::unsigned_abs);
    assert!(
        results.bitmap == uniffle_wire::bitmap::encode(&ids.collect()),
        "the result lacks ids of partitions {partition_ids:?}"
    );
}

#[tokio::test(start_paused = true)]
async fn spilled_ids_are_returned_with_those_in_memory() {
    let fixture = Fixture::new(PartitionLimits::default(), quiet()).await;
    let app = fixture.service.parts.app(APP).unwrap();
    let shuffle = app.shuffle(ShuffleId(0)).unwrap();
    let scratch = fixture.service.tiers().metadata().unwrap().scratch().unwrap();
    let disk = QuotaKind { subject: QuotaSubject::App, resource: QuotaResource::DiskBytes };
    let on_disk = || app.usage.used(disk);
    for round in 1..10 {
        // In each round some ids are known on disk, and some partitions are new.
        report_far(&fixture, 0..20 * round, 40 * i64::from(round)).await;
        assert_told(&fixture, 0..20 * round, 40 * i64::from(round)).await;
        move_table(&scratch, &app, &shuffle).await.unwrap();
        assert_eq!(shuffle.reports.block_ids.lock().table_bytes(), 0);
        assert_told(&fixture, 0..20 * round, 40 * i64::from(round)).await;
        merge_runs(&scratch, &app, &shuffle).await.unwrap();
        assert!(shuffle.reports.block_ids.lock().runs().len() < 4, "too many runs in round {round}");
        assert_told(&fixture, 0..20 * round, 40 * i64::from(round)).await;
    }
    assert!(
        app.budgets.reported_ids.used() < 4000,
        "reported ids take {} bytes of heap",
        app.budgets.reported_ids.used()
    );
    assert!(on_disk() > 0);
    // A known report changes nothing, wherever its ids are.
    report_far(&fixture, 0..180, 360).await;
    assert_eq!(shuffle.reports.block_ids.lock().table_bytes(), 0);
    assert_told(&fixture, 170..180, 360).await;
    fixture.service.lifecycle.unregister_shuffle(APP, 0).unwrap();
    drop(shuffle);
    assert_eq!((app.budgets.reported_ids.used(), on_disk()), (0, 0));
    drop(app);
    fixture.stop().await;
}

#[tokio::test(start_paused = true)]
async fn ids_stay_readable_when_the_disk_refuses_them() {
    let fixture = Fixture::new(PartitionLimits::default(), quiet()).await;
    let app = fixture.service.parts.app(APP).unwrap();
    let shuffle = app.shuffle(ShuffleId(0)).unwrap();
    let scratch = fixture.service.tiers().metadata().unwrap().scratch().unwrap();
    report_far(&fixture, 0..9, 300).await;
    fixture.faults.add(Rule::once(Operation::Write, Fault::Errno(ENOSPC)));
    move_table(&scratch, &app, &shuffle).await.unwrap_err();
    assert_told(&fixture, 0..9, 300).await;
    report_far(&fixture, 5..12, 300).await;
    move_table(&scratch, &app, &shuffle).await.unwrap();
    assert_told(&fixture, 0..12, 300).await;
    drop((shuffle, app));
    fixture.stop().await;
}
