//! Registrations that are refused.

use super::*;
use crate::service::quota::QuotaConfig;
use uniffle_wire::types::ShuffleId;

/// Regression test: a registration whose record was refused stayed in effect.
#[tokio::test(start_paused = true)]
async fn refused_registration_changes_nothing() {
    let fixture = Fixture::new(PartitionLimits::default(), quiet()).await;
    let register = |ranges: Vec<(i32, i32)>| {
        let request = RegisterRequest {
            app: APP,
            shuffle: 0,
            ranges,
            user: "other".to_owned(),
            distribution: Distribution::Normal,
            properties: HashMap::from([("spark.rss.a".to_owned(), "1".to_owned())]),
            remote_storage: None,
            from: None,
        };
        fixture.service.lifecycle.register(request)
    };
    let app = fixture.service.parts.app(APP).unwrap();
    let registered = || {
        let ranges = app.shuffle(ShuffleId(0)).unwrap().partitions.ranges().to_vec();
        (ranges, app.client.property("spark.rss.a"))
    };
    fixture.service.lifecycle.set_quotas(&QuotaConfig { app_disk: 1, ..QuotaConfig::default() });
    let refused = register(vec![(20, 29)]).await.unwrap_err();
    assert!(refused.to_string().contains("quota.app_disk"), "{refused}");
    assert_eq!(registered(), (vec![(0, 9)], None));
    fixture.service.lifecycle.set_quotas(&QuotaConfig::default());
    register(vec![(20, 29)]).await.unwrap();
    assert_eq!(registered(), (vec![(0, 9), (20, 29)], Some("1".to_owned())));
    drop(app);
    fixture.stop().await;
}
