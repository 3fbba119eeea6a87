//! Registrations, their limits, removals and expiry, without a service.

use std::collections::HashMap;

use super::*;
use crate::clock::testing::ticked;
use crate::log::PartitionBlockIds;
use uniffle_wire::types::{Distribution, PartitionId, ShuffleId};

fn registration(app: &str, shuffle: i32, ranges: &[(i32, i32)]) -> Registration {
    Registration {
        key: ShuffleKey::new(AppId::parse(app).unwrap(), ShuffleId(shuffle)),
        ranges: PartitionRanges::parse(ranges).unwrap(),
        distribution: Distribution::Normal,
        user: "u".into(),
        properties: HashMap::new(),
        sent_properties: false,
        heartbeat_timeout: None,
        other_modules_bytes: 0,
        from: None,
    }
}

/// Stands for the state of a removed shuffle, which may be slow to drop. It records whether others
/// could register meanwhile.
struct Large<'a>(&'a AppRegistry, &'a std::cell::Cell<u32>);

impl Drop for Large<'_> {
    fn drop(&mut self) {
        self.1.set(self.1.get() + u32::from(self.0.lifecycle.try_lock().is_some()));
    }
}

#[tokio::test]
async fn registration_proceeds_while_removed_apps_are_dropped() {
    let registry = registry();
    let free = std::cell::Cell::new(0);
    for shuffle in [1, 2] {
        registry.register(registration("app", shuffle, &[(0, 0)]), || ()).unwrap();
    }
    let id = AppId::parse("app").unwrap();
    drop(registry.remove_shuffle(&ShuffleKey::new(id.clone(), ShuffleId(1)), || Large(&registry, &free)));
    drop(registry.remove_app(&id, |_| Large(&registry, &free)));
    assert_eq!(free.get(), 2);
}

#[tokio::test]
async fn reported_ids_are_dropped_outside_the_registry_lock() {
    let registry = registry();
    for shuffle in [1, 2] {
        registry.register(registration("app", shuffle, &[(0, 0)]), || ()).unwrap();
    }
    let app = registry.find(&AppId::parse("app").unwrap()).unwrap();
    let of = |shuffle| Arc::downgrade(&app.shuffle(ShuffleId(shuffle)).unwrap());
    let (first, second) = (of(1), of(2));
    let key = ShuffleKey::new(app.id().clone(), ShuffleId(1));
    let (_, is_whole) = registry.remove_shuffle(&key, || first.upgrade().is_some());
    assert_eq!((is_whole, first.upgrade().is_none()), (Some(true), true));
    let is_whole = registry.remove_app(app.id(), |_| second.upgrade().is_some());
    assert_eq!((is_whole, second.upgrade().is_none()), (Some(true), true));
}

fn registry() -> AppRegistry {
    registry_of(AppConfig::default(), &Heap::new(64 << 20))
}

fn registry_of(config: AppConfig, heap: &Heap) -> AppRegistry {
    AppRegistry::new(config, heap, &Budget::new(1 << 20))
}

#[tokio::test]
async fn reregistration_adds_ranges_and_keeps_reports() {
    let registry = registry();
    registry.register(registration("a", 1, &[(0, 1)]), || ()).unwrap();
    let shuffle = registry.find(&AppId::parse("a").unwrap()).unwrap().shuffle(ShuffleId(1)).unwrap();
    let reported = [PartitionBlockIds { partition: PartitionId(0), block_ids: vec![1] }];
    shuffle.reports.block_ids.lock().insert_recovered(1, &reported).unwrap();
    registry.register(registration("a", 1, &[(4, 4)]), || ()).unwrap();
    assert_eq!(shuffle.partitions.count(), 3);
    assert!(shuffle.partitions.contains(PartitionId(4)) && !shuffle.partitions.contains(PartitionId(2)));
    assert_eq!(registry.block_id_count(), 1);
}

#[tokio::test(start_paused = true)]
async fn app_used_between_check_and_purge_stays() {
    let registry = registry();
    registry.register(registration("a", 1, &[(0, 1)]), || ()).unwrap();
    tokio::time::advance(Duration::from_secs(301)).await;
    let expired = registry.expired();
    assert_eq!(expired.len(), 1);
    registry.touch(&registry.find(&expired[0]).unwrap());
    assert!(registry.remove_app_if_expired(&expired[0], |_| ()).is_none());
    assert_eq!(registry.app_count(), 1);
    tokio::time::advance(Duration::from_secs(301)).await;
    registry.remove_app_if_expired(&expired[0], |_| ()).unwrap();
    assert_eq!(registry.app_count(), 0);
}

#[tokio::test(start_paused = true)]
async fn app_timeout_overrides_the_default() {
    let registry = registry();
    let patient = Some(Duration::from_secs(3600));
    let request = Registration { heartbeat_timeout: patient, ..registration("patient", 1, &[(0, 1)]) };
    registry.register(request, || ()).unwrap();
    registry.register(registration("usual", 1, &[(0, 1)]), || ()).unwrap();
    tokio::time::advance(Duration::from_secs(301)).await;
    assert_eq!(registry.expired(), [AppId::parse("usual").unwrap()]);
    tokio::time::advance(Duration::from_secs(3300)).await;
    assert_eq!(registry.expired().len(), 2);
}

#[tokio::test(start_paused = true)]
async fn registry_is_abandoned_once_unknown_apps_are_silent() {
    let registry = registry();
    let patient = Some(Duration::from_secs(3600));
    let request = Registration { heartbeat_timeout: patient, ..registration("a", 1, &[(0, 1)]) };
    registry.register(request, || ()).unwrap();
    tokio::time::advance(Duration::from_secs(4000)).await;
    assert!(!registry.is_abandoned(), "a worker with an application counts as abandoned");
    registry.note_unknown_call();
    registry.remove_app(&AppId::parse("a").unwrap(), |_| ()).unwrap();
    tokio::time::advance(Duration::from_secs(3600)).await;
    assert!(!registry.is_abandoned(), "an unknown application may still have the longest timeout");
    tokio::time::advance(Duration::from_secs(1)).await;
    assert!(registry.is_abandoned());
    registry.touch_all();
    assert!(!registry.is_abandoned(), "after a start all applications get their full timeout");
}

#[tokio::test]
async fn marks_persist_and_are_reported_once() {
    let registry = registry();
    let newer = Registration { sent_properties: true, ..registration("a", 1, &[(0, 1)]) };
    registry.register(newer, || ()).unwrap();
    registry.register(registration("a", 2, &[(0, 1)]), || ()).unwrap();
    let app = registry.find(&AppId::parse("a").unwrap()).unwrap();
    assert!(app.client.is_since_0_10());
    assert!(app.account.mark_huge() && !app.account.mark_huge());
    let shuffle = app.shuffle(ShuffleId(1)).unwrap();
    assert!(shuffle.partitions.mark_huge(PartitionId(0)) && !shuffle.partitions.mark_huge(PartitionId(0)));
    assert!(shuffle.partitions.mark_huge(PartitionId(1)));
    assert_eq!(shuffle.partitions.huge_count(), 2);
}

#[tokio::test]
async fn too_many_apps_are_refused_with_the_limit() {
    let few = AppConfig { apps_max: 1, shuffles_per_app_max: 1, ..AppConfig::default() };
    let registry = registry_of(few, &Heap::new(64 << 20));
    registry.register(registration("a", 1, &[(0, 1)]), || ()).unwrap();
    let max = QuotaExceeded { max: 1 };
    let refused = |app, shuffle| registry.register(registration(app, shuffle, &[(0, 1)]), || ());
    assert_eq!(refused("b", 1), Err(RegisterError::Apps(max)));
    assert_eq!(refused("a", 2), Err(RegisterError::Shuffles(max)));
    assert_eq!(registry.app_count(), 1);
}

#[tokio::test]
async fn registrations_are_bounded_by_the_heap() {
    let heap = Heap::new(64 << 20);
    let registry = registry_of(AppConfig::default(), &heap);
    let kept = heap.of(HeapKind::Registrations);
    let refused = (0..100_000).find_map(|app| {
        let with =
            Registration { user: "u".repeat(1000), ..registration(&format!("app-{app}"), 1, &[(0, 1)]) };
        registry.register(with, || ()).err()
    });
    assert!(
        matches!(refused, Some(RegisterError::NoHeap(full)) if full.kind == "registrations"),
        "{refused:?}"
    );
    let apps = registry.app_count();
    assert!(
        (1000..10_000).contains(&apps) && kept.used() <= kept.capacity(),
        "{apps} applications were registered within the budget"
    );
    let known = registry.apps()[0].id().clone();
    assert!(registry.remove_app(&known, |_| ()).is_some());
    registry.register(registration("late", 1, &[(0, 1)]), || ()).unwrap();
    for app in registry.apps() {
        registry.remove_app(app.id(), |_| ());
    }
    assert_eq!(heap.whole().used(), 0);
}

#[tokio::test]
async fn one_address_leaves_registrations_for_others() {
    let heap = Heap::new(64 << 20);
    let registry = registry_of(AppConfig::default(), &heap);
    let from = |address: [u8; 4], app: &str, shuffle: i32| {
        let from = Some(address.into());
        let user = format!("user of {app}");
        registry.register(Registration { from, user, ..registration(app, shuffle, &[(0, 1)]) }, || ())
    };
    let (flood, honest) = ([10, 0, 0, 1], [10, 0, 0, 2]);
    from(honest, "known", 0).unwrap();
    let refused = (0..100_000).find_map(|app| from(flood, &format!("flood-{app}"), 0).err());
    assert!(matches!(refused, Some(RegisterError::NoHeap(_))), "{refused:?}");
    from(honest, "known", 1).unwrap();
    (0..10).for_each(|app| from(honest, &format!("new-{app}"), 0).unwrap());
    for app in registry.apps() {
        registry.remove_app(app.id(), |_| ());
    }
    from(flood, "late", 0).unwrap();
    registry.remove_app(&AppId::parse("late").unwrap(), |_| ());
    assert_eq!(heap.whole().used(), 0);
}

#[tokio::test]
async fn full_application_can_repeat_its_registrations() {
    let heap = Heap::new(16 << 20);
    let registry = registry_of(AppConfig::default(), &heap);
    let with = |user: usize, shuffle: i32| Registration {
        user: "u".repeat(user),
        ..registration("a", shuffle, &[(0, 1)])
    };
    registry.register(with(1000, 0), || ()).unwrap();
    let first = heap.whole().used();
    let refused = (1..).find_map(|shuffle| registry.register(with(1000, shuffle), || ()).err());
    assert!(matches!(refused, Some(RegisterError::NoHeap(_))), "{refused:?}");
    let used = heap.whole().used();
    registry.register(with(1000, 0), || ()).unwrap();
    assert_eq!(heap.whole().used(), used);
    registry.register(with(10, 0), || ()).unwrap();
    assert_eq!(heap.whole().used(), used - 990);
    registry.register(with(1000, 0), || ()).unwrap();
    assert_eq!(heap.whole().used(), used);
    registry.register(registration("other", 0, &[(0, 1)]), || ()).unwrap();
    assert!(heap.whole().used() > used + first / 2);
    for app in ["a", "other"] {
        registry.remove_app(&AppId::parse(app).unwrap(), |_| ()).unwrap();
    }
    assert_eq!(heap.whole().used(), 0);
}

#[tokio::test]
async fn earlier_registrations_are_recovered_in_any_order() {
    let before = registry_of(AppConfig::default(), &Heap::new(16 << 20));
    let mut known = Vec::new();
    for app in ["first", "second"] {
        let all = (0..).map(|shuffle| registration(app, shuffle, &[(0, 1)]));
        let taken = all.take_while(|it| before.register(it.clone(), || ()).is_ok());
        known.extend(taken);
    }
    known.reverse();
    let heap = Heap::new(16 << 20);
    let after = registry_of(AppConfig::default(), &heap);
    for registration in known {
        after.take_over(registration, || ()).unwrap();
    }
    assert_eq!(heap.whole().used(), before.heap.whole().used());
    assert!(after.register(registration("first", i32::MAX, &[(0, 1)]), || ()).is_err());
    after.register(registration("third", 0, &[(0, 1)]), || ()).unwrap();
}

#[tokio::test]
async fn ranges_of_one_shuffle_are_bounded_and_merged() {
    let heap = Heap::new(256 << 20);
    let registry = registry_of(AppConfig::default(), &heap);
    let scattered = |from: i32| (0..100_000).map(|n| (2 * (from + n), 2 * (from + n))).collect::<Vec<_>>();
    for from in [0, 100_000] {
        registry.register(registration("a", 1, &scattered(from)), || ()).unwrap();
    }
    let used = heap.whole().used();
    let refused = registry.register(registration("a", 1, &scattered(200_000)), || ()).unwrap_err();
    assert_eq!(refused, RegisterError::Ranges { ranges: 300_000 });
    assert!(refused.to_string().starts_with("partitionRanges has 300000 disjoint ranges"), "{refused}");
    let shuffle = registry.apps()[0].shuffle(ShuffleId(1)).unwrap();
    assert_eq!(
        (shuffle.partitions.count(), heap.whole().used()),
        (200_000, used),
        "a refused registration left partitions or heap behind"
    );
    registry.register(registration("a", 1, &[(0, 399_999)]), || ()).unwrap();
    assert_eq!(shuffle.partitions.count(), 400_000);
    registry.register(registration("a", 1, &scattered(200_000)), || ()).unwrap();
}

/// A cluster of clients begins thousands of applications, each from another address.
#[tokio::test(start_paused = true)]
async fn known_applications_register_while_others_fill_the_heap() {
    let heap = Heap::new(16 << 20);
    let registry = registry_of(AppConfig::default(), &heap);
    let from = |app: &str, address: u32, shuffle| Registration {
        from: Some(std::net::Ipv4Addr::from_bits(address).into()),
        ..registration(app, shuffle, &[(0, 1)])
    };
    let register = |registration| registry.register(registration, || ());
    register(from("running", 1, 0)).unwrap();
    tokio::time::advance(Duration::from_secs(60)).await;
    let flood =
        |shuffle| (2..9000).filter(|n| register(from(&format!("new{n}"), *n, shuffle)).is_ok()).count();
    assert!(flood(0) > 100);
    let refused = register(from("late", 1, 0)).unwrap_err();
    assert!(refused.to_string().contains("memory_store.heap_capacity"), "{refused}");
    for round in 1..10 {
        // Applications of the flood do not become established. Room too small for an application
        // may suffice for a shuffle or two.
        tokio::time::advance(Duration::from_secs(60)).await;
        assert!(flood(round) <= if round == 1 { 3 } else { 0 });
        register(from("running", 1, round)).unwrap();
    }
    for app in registry.apps() {
        registry.remove_app(app.id(), |_| ()).unwrap();
    }
    register(from("late", 1, 0)).unwrap();
}

#[tokio::test(start_paused = true)]
async fn app_expiry_does_not_count_pauses_of_the_process() {
    ticked(async {
        let registry = registry();
        registry.register(registration("app", 1, &[(0, 0)]), || ()).unwrap();
        for _ in 0..5 {
            tokio::time::advance(Duration::from_secs(3600)).await;
            assert!(
                registry.expired().is_empty(),
                "applications expired during a time without heartbeats for any of them"
            );
            tokio::time::sleep(Duration::from_secs(50)).await;
        }
        tokio::time::sleep(Duration::from_secs(40)).await;
        assert!(registry.expired().is_empty());
        tokio::time::sleep(Duration::from_secs(11)).await;
        assert_eq!(registry.expired().len(), 1);
    })
    .await;
}
