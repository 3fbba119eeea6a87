//! The node table: accepted and refused heartbeats, candidates, limits, lost and restored nodes.

use super::*;

fn heartbeat(id: &str) -> ShuffleServerHeartBeatRequest {
    ShuffleServerHeartBeatRequest {
        server_id: Some(ShuffleServerId {
            id: id.into(),
            ip: "10.0.0.1".into(),
            port: 21100,
            ..Default::default()
        }),
        tags: vec!["ss_v5".into(), "GRPC".into()],
        ..Default::default()
    }
}

/// The coordinator's own worker, with another port than the other nodes.
fn own() -> ShuffleServerHeartBeatRequest {
    let mut own = heartbeat("own");
    own.server_id.as_mut().unwrap().port = 21099;
    own
}

fn table() -> NodeTable {
    NodeTable::new(Duration::from_secs(30), HashSet::from(["excluded".to_owned()]))
}

fn candidates(table: &NodeTable, tags: &[&str], faulty: &[&str]) -> Vec<String> {
    let tags: Vec<String> = tags.iter().map(|&t| t.to_owned()).collect();
    let faulty = faulty.iter().copied().collect();
    table.candidates(&tags, &faulty).into_iter().map(|c| c.id).collect()
}

#[test]
fn candidates_are_active_tagged_and_not_excluded() {
    let now = Instant::now();
    let mut table = table();
    table.accept(heartbeat("good"), Joins::Configured, now).unwrap();
    table.accept(heartbeat("excluded"), Joins::Configured, now).unwrap();
    let mut leaving = heartbeat("leaving");
    leaving.status = Some(ServerStatus::Decommissioning.into());
    table.accept(leaving, Joins::Configured, now).unwrap();
    assert_eq!(candidates(&table, &["ss_v5", "GRPC"], &[]), ["good"]);
    assert!(candidates(&table, &["ss_v5", "GRPC_NETTY"], &[]).is_empty());
    assert!(candidates(&table, &[], &["good"]).is_empty());
    let expected = NodeCounts { total: 3, active: 1, unhealthy: 0, lost: 0, excluded: 1 };
    assert_eq!(table.counts(), expected);
}

#[test]
fn is_healthy_overrides_status_as_in_java() {
    let mut request = heartbeat("n");
    request.status = Some(ServerStatus::Decommissioning.into());
    request.is_healthy = Some(true);
    assert_eq!(status_of(&request), ServerStatus::Active);
    request.is_healthy = Some(false);
    assert_eq!(status_of(&request), ServerStatus::Unhealthy);
    request.is_healthy = None;
    request.status = Some(77);
    assert_eq!(status_of(&request), ServerStatus::Unhealthy);
}

#[test]
fn heartbeat_replaces_tags_and_resets_assignments() {
    let now = Instant::now();
    let mut table = table();
    table.accept(heartbeat("n"), Joins::Configured, now).unwrap();
    table.count_assigned("n", 7);
    assert_eq!(table.candidates(&[], &HashSet::new())[0].assigned_since_heartbeat, 7);
    let mut second = heartbeat("n");
    second.tags = vec!["other".into()];
    table.accept(second, Joins::Configured, now).unwrap();
    assert_eq!(table.candidates(&[], &HashSet::new())[0].assigned_since_heartbeat, 0);
    assert!(candidates(&table, &["GRPC"], &[]).is_empty());
}

#[test]
fn malformed_heartbeats_are_refused() {
    let now = Instant::now();
    let mut table = table();
    assert!(table.accept(ShuffleServerHeartBeatRequest::default(), Joins::Configured, now).is_err());
    assert!(table.accept(heartbeat(""), Joins::Configured, now).is_err());
    assert!(table.accept(heartbeat(&"x".repeat(256)), Joins::Configured, now).is_err());
    for port in [0, -1, 65_536] {
        let mut request = heartbeat("n");
        request.server_id.as_mut().unwrap().port = port;
        assert!(table.accept(request, Joins::Configured, now).is_err(), "{port}");
    }
    let mut request = heartbeat("n");
    request.tags = vec!["t".into(); TAGS_MAX + 1];
    assert!(table.accept(request, Joins::Configured, now).is_err());
    let mut java = heartbeat("n");
    java.server_id.as_mut().unwrap().netty_port = -1;
    java.available_memory = -5;
    table.accept(java, Joins::Configured, now).unwrap();
    assert_eq!(table.counts().total, 1);
}

#[test]
fn heartbeat_cannot_impersonate_the_own_worker() {
    let now = Instant::now();
    let mut table = table();
    // Before the own worker's first report, nothing protects its id.
    table.accept(heartbeat("own"), Joins::Configured, now).unwrap();
    let mut own = heartbeat("own");
    own.available_memory = 7;
    table.accept_own(own, now).unwrap();
    let mut elsewhere = heartbeat("own");
    elsewhere.server_id.as_mut().unwrap().ip = "10.6.6.6".into();
    let mut other_ports = heartbeat("own");
    other_ports.server_id.as_mut().unwrap().netty_port = 7;
    let mut other_spelling = heartbeat("another name for its address, which is spelled otherwise");
    other_spelling.server_id.as_mut().unwrap().ip = "::ffff:a00:1".into();
    let forged = [
        (elsewhere, OWN_ID_ELSEWHERE),
        (heartbeat("another name for its address"), OWN_ADDRESS_BY_ANOTHER_ID),
        (other_ports, OWN_BUT_OTHER_PORTS),
        (other_spelling, OWN_ADDRESS_BY_ANOTHER_ID),
    ];
    for (forged, reason) in forged {
        assert_eq!(table.accept(forged, Joins::Configured, now), Err(InvalidHeartbeat::Own(reason)));
    }
    // Own heartbeats over the network are answered and ignored.
    table.accept(heartbeat("own"), Joins::Configured, now).unwrap();
    assert_eq!(table.server("own").unwrap().ip, "10.0.0.1");
    assert_eq!((table.counts().total, table.candidates(&[], &HashSet::new())[0].available_bytes), (1, 7));
}

/// Otherwise GRPC_NETTY clients would send data to the own worker under an unknown name.
#[test]
fn heartbeat_with_the_own_workers_tcp_port_is_refused() {
    let now = Instant::now();
    let mut table = table();
    let with = |id: &str, port: i32, netty_port: i32| {
        let mut heartbeat = heartbeat(id);
        let server = heartbeat.server_id.as_mut().unwrap();
        (server.port, server.netty_port) = (port, netty_port);
        heartbeat
    };
    table.accept_own(with("own", 21100, 21200), now).unwrap();
    let refused = table.accept(with("alias", 7, 21200), Joins::Configured, now);
    assert_eq!(refused, Err(InvalidHeartbeat::Own(OWN_ADDRESS_BY_ANOTHER_ID)));
    table.accept(with("neighbour", 21101, 21201), Joins::Configured, now).unwrap();
    let mut table = self::table();
    table.accept_own(with("own", 21100, -1), now).unwrap();
    table.accept(with("neighbour", 21101, -1), Joins::Configured, now).unwrap();
}

/// Ids appear in the log.
#[test]
fn control_characters_are_refused() {
    let now = Instant::now();
    let mut table = table();
    let mut tagged = heartbeat("tagged");
    tagged.tags = vec!["a\u{1b}[31m".to_owned()];
    for forged in [heartbeat("a\nERROR forged"), heartbeat("a\u{9b}31m"), tagged] {
        let refused = table.accept(forged, Joins::Configured, now).unwrap_err().to_string();
        assert!(refused.contains("control character"), "{refused}");
    }
    table.accept(heartbeat("wörker-1"), Joins::Configured, now).unwrap();
}

#[test]
fn full_table_has_room_for_the_own_worker() {
    let now = Instant::now();
    let mut table = table();
    for n in 0..NODES_MAX {
        table.accept(heartbeat(&format!("n{n}")), Joins::Configured, now).unwrap();
    }
    table.accept_own(heartbeat("own"), now).unwrap();
    assert!(table.server("own").is_some());
}

#[test]
fn node_details_are_charged_until_removed() {
    let start = Instant::now();
    let mut table = table();
    let with_app = |id: &str, app: &str| {
        let mut heartbeat = heartbeat(id);
        let app = crate::proto::ApplicationInfo { app_id: app.to_owned(), ..Default::default() };
        heartbeat.application_info.push(app);
        heartbeat
    };
    table.accept(with_app("a", "app-1"), Joins::Configured, start).unwrap();
    let one = table.detail_bytes;
    table.accept(with_app("b", "app-1"), Joins::Configured, start).unwrap();
    table.accept(with_app("a", "app-2"), Joins::Configured, start).unwrap();
    assert_eq!(table.detail_bytes, 2 * one);
    table.accept(with_app("c", &"x".repeat(details::BYTES_MAX)), Joins::Configured, start).unwrap();
    let view = table.view(false, start);
    let cut: Vec<bool> = view.nodes.iter().map(|known| known.node.details.is_cut).collect();
    assert_eq!(cut, [false, false, true]);
    table.expire(start + Duration::from_secs(31));
    assert_eq!(
        (table.detail_bytes, table.view(false, start).lost),
        (0, vec!["a".into(), "b".into(), "c".into()])
    );
}

#[test]
fn full_table_accepts_only_known_nodes() {
    let now = Instant::now();
    let mut table = table();
    for n in 0..NODES_MAX {
        table.accept(heartbeat(&format!("n{n}")), Joins::Configured, now).unwrap();
    }
    assert_eq!(table.accept(heartbeat("another"), Joins::Configured, now), Err(InvalidHeartbeat::Full));
    table.accept(heartbeat("n5"), Joins::Configured, now).unwrap();
}

#[test]
fn silent_node_is_lost_until_its_next_report() {
    let start = Instant::now();
    let mut table = table();
    table.accept(heartbeat("n"), Joins::Configured, start).unwrap();
    table.expire(start + Duration::from_secs(30));
    assert_eq!(table.counts().total, 1);
    table.expire(start + Duration::from_millis(30_001));
    assert_eq!((table.counts().total, table.counts().lost), (0, 1));
    table.accept(heartbeat("n"), Joins::Configured, start + Duration::from_secs(60)).unwrap();
    assert_eq!((table.counts().total, table.counts().lost), (1, 0));
}

#[test]
fn lost_node_is_removed_after_a_day() {
    let start = Instant::now();
    let mut table = table();
    table.accept(heartbeat("n"), Joins::Configured, start).unwrap();
    let leaving = ShuffleServerHeartBeatRequest {
        status: Some(ServerStatus::Decommissioned.into()),
        is_healthy: None,
        ..heartbeat("leaving")
    };
    table.accept(leaving, Joins::Configured, start).unwrap();
    let silent = start + Duration::from_secs(31);
    table.expire(silent);
    assert_eq!(table.view(false, silent).lost, ["n"]);
    table.expire(silent + lost::KEPT);
    assert_eq!((table.counts().lost, table.lost.bytes), (0, 0));
}

#[test]
fn forgotten_lost_node_is_not_listed() {
    let start = Instant::now();
    let mut table = table();
    table.accept(heartbeat("n"), Joins::Configured, start).unwrap();
    assert!(!table.forget_lost("n", start), "a live node was forgotten");
    assert_eq!(table.counts().total, 1);
    let silent = start + Duration::from_secs(31);
    assert!(
        table.forget_lost("n", silent),
        "a silent node must be forgotten even if nothing called `expire` before"
    );
    assert!(!table.forget_lost("n", silent), "a node was forgotten twice");
    assert_eq!((table.view(false, silent).lost, table.lost.bytes), (vec![], 0));
    table.accept(heartbeat("n"), Joins::Configured, silent).unwrap();
    table.expire(silent + Duration::from_secs(31));
    assert_eq!(table.counts().lost, 1, "the returned node must be lost again");
}

#[test]
fn ids_of_lost_nodes_are_bounded_in_bytes() {
    let mut now = Instant::now();
    let mut table = table();
    let honest: Vec<String> =
        (0..NODES_MAX).map(|n| format!("10.100.{}.{}-21100-21200", n / 250, n % 250)).collect();
    let mut come_and_go = |table: &mut NodeTable, ids: &[String]| {
        ids.iter().for_each(|id| table.accept(heartbeat(id), Joins::Configured, now).unwrap());
        now += Duration::from_secs(31);
        table.expire(now);
    };
    come_and_go(&mut table, &honest);
    assert_eq!(table.counts().lost, NODES_MAX, "all nodes of a large cluster must fit");
    let made_up: Vec<String> = (0..4000).map(|n| format!("{n:0255}")).collect();
    come_and_go(&mut table, &made_up);
    let bytes = |table: &NodeTable| table.lost.iter().map(|(id, _)| lost::bytes(id)).sum::<usize>();
    assert_eq!(table.lost.bytes, bytes(&table));
    assert!((lost::BYTES_MAX - 400..=lost::BYTES_MAX).contains(&table.lost.bytes), "{}", table.lost.bytes);
    // Nodes that return make room for others.
    honest.iter().for_each(|id| table.accept(heartbeat(id), Joins::Configured, now).unwrap());
    assert_eq!(table.lost.bytes, bytes(&table));
    assert!(table.lost.bytes < lost::BYTES_MAX / 2 && table.counts().lost > 0, "{}", table.lost.bytes);
}

#[test]
fn ids_addresses_and_tags_of_nodes_are_bounded_in_bytes() {
    let now = Instant::now();
    let mut table = table();
    table.accept_own(own(), now).unwrap();
    let hostile = |n: usize| {
        let mut heartbeat = heartbeat(&format!("{n:0255}"));
        heartbeat.tags = vec!["t".repeat(255); TAGS_MAX];
        heartbeat
    };
    let refused =
        (0..NODES_MAX).find_map(|n| table.accept(hostile(n), Joins::Configured, now).err()).unwrap();
    assert_eq!(refused, InvalidHeartbeat::NoRoom { nodes: table.nodes.len(), used: table.bytes });
    assert!(table.bytes <= BYTES_MAX && table.bytes > BYTES_MAX - 32_000, "{}", table.bytes);
    assert!(refused.to_string().contains("ids, addresses and tags"), "{refused}");
    // Known nodes stay, and may shrink.
    table.accept(hostile(7), Joins::Configured, now).unwrap();
    let mut small = hostile(7);
    small.tags.truncate(1);
    table.accept(small, Joins::Configured, now).unwrap();
    table.accept_own(hostile(0), now).unwrap();
    assert_eq!(table.bytes, table.nodes.values().map(RegisteredNode::bytes).sum::<usize>());
    table.expire(now + Duration::from_secs(31));
    assert_eq!((table.bytes, table.counts().total), (0, 0));
}

#[test]
fn table_has_room_for_ten_thousand_nodes() {
    let now = Instant::now();
    let mut table = table();
    for n in 0..NODES_MAX {
        let mut heartbeat = heartbeat(&format!("10.100.{}.{}-21100-21200", n / 250, n % 250));
        heartbeat.tags.push("GRPC_NETTY".into());
        heartbeat.tags.push("ssd-of-rack-17".into());
        table.accept(heartbeat, Joins::Configured, now).unwrap();
    }
    assert!(table.bytes < BYTES_MAX, "{}", table.bytes);
}

#[test]
fn few_workers_outside_the_networks_join() {
    let now = Instant::now();
    let mut table = table();
    table.accept_own(own(), now).unwrap();
    table.accept(heartbeat("named"), Joins::Configured, now).unwrap();
    for n in 0..LOCAL_MAX {
        table.accept(heartbeat(&format!("n{n}")), Joins::Local, now).unwrap();
    }
    for id in ["another", "named"] {
        let refused = table.accept(heartbeat(id), Joins::Local, now).unwrap_err();
        assert_eq!(refused, InvalidHeartbeat::TooManyLocal, "{id}");
        assert!(refused.to_string().contains("embedded_coordinator.worker_networks"), "{refused}");
    }
    table.accept(heartbeat("n3"), Joins::Local, now).unwrap();
    table.accept(heartbeat("another"), Joins::Configured, now).unwrap();
    let later = now + Duration::from_secs(31);
    table.accept(heartbeat("n100"), Joins::Local, later).unwrap();
    assert_eq!(table.counts().total, 1);
}

/// Passes the nodes of `table` to a new process, which starts after `pause`.
fn next_process(table: &NodeTable, now: Instant, pause: Duration) -> NodeTable {
    let unix_now = Duration::from_secs(1_700_000_000);
    let saved = table.saved(now, unix_now);
    let mut next = self::table();
    next.restore(&saved, now + pause, unix_now + pause);
    next
}

#[test]
fn lost_nodes_survive_the_process() {
    let start = Instant::now();
    let mut table = table();
    table.accept_own(own(), start).unwrap();
    for id in ["gone", "forgotten"] {
        table.accept(heartbeat(id), Joins::Configured, start).unwrap();
    }
    let lost = start + Duration::from_secs(31);
    table.accept_own(own(), lost).unwrap();
    assert!(table.forget_lost("forgotten", lost));
    let hour = Duration::from_secs(3600);
    let mut next = next_process(&table, lost, hour);
    assert_eq!(next.view(false, lost + hour).lost, ["gone"]);
    assert_eq!(next.counts(), NodeCounts { lost: 1, excluded: 1, ..NodeCounts::default() });
    next.expire(lost + lost::KEPT - Duration::from_secs(1));
    assert_eq!(next.counts().lost, 1);
    next.expire(lost + lost::KEPT);
    assert_eq!(
        (next.counts().lost, next.lost.bytes),
        (0, 0),
        "a node must be forgotten one day after its loss, not after the start"
    );
    next.restore(&[SavedNode { id: "a\nb".into(), lost_at: None }], lost, hour);
    assert_eq!(next.lost.bytes, 0);
}

#[test]
fn node_that_dies_with_the_coordinator_becomes_lost() {
    let start = Instant::now();
    let mut table = table();
    table.accept_own(own(), start).unwrap();
    let leaving = ShuffleServerHeartBeatRequest {
        status: Some(ServerStatus::Decommissioned.into()),
        is_healthy: None,
        ..heartbeat("leaving")
    };
    table.accept(leaving, Joins::Configured, start).unwrap();
    for id in ["dies", "stays"] {
        table.accept(heartbeat(id), Joins::Configured, start).unwrap();
    }
    // Two processes in a row, before any heartbeat.
    let first = next_process(&table, start, Duration::ZERO);
    let mut next = next_process(&first, start, Duration::ZERO);
    assert_eq!(next.counts().lost, 0);
    assert_eq!(next.view(false, start).awaited, ["dies", "stays"]);
    let is_starting = [&self::table(), &next].map(|table| table.view(true, start).is_starting);
    assert_eq!(is_starting, [true, false], "only a coordinator without saved nodes is starting");
    next.accept(heartbeat("stays"), Joins::Configured, start + Duration::from_secs(10)).unwrap();
    let late = start + Duration::from_secs(31);
    let before = next.version();
    assert_eq!((next.view(false, late).lost.len(), next.counts().total), (0, 1));
    next.expire(late);
    assert_eq!(
        (next.view(false, late).lost, next.view(false, late).awaited.len()),
        (vec!["dies".to_owned()], 0)
    );
    assert!(next.version() > before);
    next.accept(heartbeat("dies"), Joins::Configured, late).unwrap();
    assert_eq!((next.counts().lost, next.counts().total, next.lost.bytes), (0, 2, 0));
}
