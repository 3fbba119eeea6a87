//! Reports whose shuffle does not stay what it was.

use super::*;
use uniffle_wire::types::ShuffleId;

#[tokio::test(start_paused = true)]
async fn a_report_is_not_written_down_for_a_shuffle_that_has_its_name_by_now() {
    let fixture = Fixture::new(PartitionLimits::default(), quiet()).await;
    let app = fixture.service.lifecycle.known.app(APP).unwrap();
    let before = app.shuffle(ShuffleId(0)).unwrap();
    // It waits until it is known what is there, and nobody looks.
    before.ledger().with(PartitionId(3), |it| it.question(None));
    let report = ReportRequest {
        app: APP,
        shuffle: 0,
        task_attempt: 0,
        bitmap_count: 1,
        partitions: vec![(PartitionId(3), vec![1])],
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
