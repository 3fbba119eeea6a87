//! The end of idle connections before an upgrade, and the order in which a full table evicts.

use std::net::Ipv4Addr;

use proptest::prelude::*;
use tokio::time::advance;

use super::*;

const PEER: IpAddr = IpAddr::V4(Ipv4Addr::LOCALHOST);

fn take(limiter: &ConnectionLimiter) -> (ConnectionGuard, Option<ConnectionActivity>) {
    take_for(limiter, PEER)
}

fn take_for(limiter: &ConnectionLimiter, peer: IpAddr) -> (ConnectionGuard, Option<ConnectionActivity>) {
    let (held, closed) = limiter.take(peer, closing().0);
    (held, closed.map(|(stage, _)| stage))
}

fn peer(number: u8) -> IpAddr {
    IpAddr::from([10, 0, 0, number])
}

fn is_closed(held: &ConnectionGuard) -> bool {
    held.state.close.is_aborted()
}

/// Regression test: one silent peer delayed an upgrade, and all connects, for ten seconds.
#[tokio::test(start_paused = true)]
async fn quiet_connection_without_request_is_idle() {
    let limiter = ConnectionLimiter::new(1);
    let held = take(&limiter).0;
    advance(LEAVING_DEADLINE * 5).await;
    let mut idle = std::pin::pin!(held.state().wait_until_idle(LEAVING_DEADLINE, || false));
    let mut waits = async |time| tokio::time::timeout(time, &mut idle).await.is_err();
    assert!(waits(LEAVING_DEADLINE * 3 / 4).await, "time before the call must not count");
    held.state().progressed();
    assert!(waits(LEAVING_DEADLINE * 3 / 4).await, "closed despite progress");
    let request = held.state().request();
    assert!(waits(LEAVING_DEADLINE * 5).await, "closed during a response");
    drop(request);
    assert!(waits(LEAVING_DEADLINE * 3 / 4).await, "the end of the response may not have arrived yet");
    for _ in 0..2 {
        held.state().progressed();
        assert!(waits(LEAVING_DEADLINE / 2).await, "the peer is still reading the response");
    }
    held.state().progressed();
    assert!(!waits(LEAVING_DEADLINE / 2).await, "not closed after the deadline");
}

/// Regression test: a peer that continued to send after its request was refused delayed an
/// upgrade by twice the time of a silent one.
#[tokio::test(start_paused = true)]
async fn received_bytes_do_not_delay_a_settled_connection() {
    let limiter = ConnectionLimiter::new(1);
    let (held, is_written) = (take(&limiter).0, std::cell::Cell::new(true));
    let request = held.state().request();
    let mut idle = std::pin::pin!(held.state().wait_until_idle(LEAVING_DEADLINE, || is_written.get()));
    let sends = async |looks: u32| {
        for _ in 0..2 * looks {
            held.state().progressed();
            tokio::time::sleep(REST_POLL_INTERVAL / 2).await;
        }
    };
    let mut waits =
        async |looks: u32| tokio::select! { biased; () = &mut idle => false, () = sends(looks) => true };
    assert!(waits(100).await, "closed during a response");
    drop(request);
    is_written.set(false);
    assert!(waits(10).await, "the socket is still taking the response");
    let short = held.state().request();
    drop(short);
    is_written.set(true);
    assert!(waits(1).await, "the last response may not be written yet");
    assert!(!waits(2).await, "still open after the response");
}

#[tokio::test(start_paused = true)]
async fn settled_connection_gets_time_to_announce_requests() {
    let limiter = ConnectionLimiter::new(1);
    let held = take(&limiter).0;
    let mut idle = std::pin::pin!(held.state().wait_until_idle(LEAVING_DEADLINE, || true));
    for _ in 0..LEAVING_DEADLINE.as_millis() / REST_POLL_INTERVAL.as_millis() - 1 {
        held.state().progressed();
        assert!(
            tokio::time::timeout(REST_POLL_INTERVAL, &mut idle).await.is_err(),
            "requests may still be on their way"
        );
    }
    held.state().progressed();
    assert!(tokio::time::timeout(2 * REST_POLL_INTERVAL, &mut idle).await.is_ok());
}

#[tokio::test(start_paused = true)]
async fn connection_is_not_idle_during_a_pause() {
    crate::clock::testing::ticked(async {
        let limiter = ConnectionLimiter::new(1);
        let held = take(&limiter).0;
        let mut idle = std::pin::pin!(held.state().wait_until_idle(LEAVING_DEADLINE, || false));
        assert!(futures::poll!(&mut idle).is_pending());
        advance(LEAVING_DEADLINE * 100).await;
        assert!(futures::poll!(&mut idle).is_pending());
        idle.await;
    })
    .await;
}

#[tokio::test(start_paused = true)]
async fn opening_then_unused_connections_are_evicted() {
    let limiter = ConnectionLimiter::new(3);
    let (used, unused, opening) = (take(&limiter).0, take(&limiter).0, take(&limiter).0);
    used.state().opened();
    let request = used.state().request();
    unused.state().opened();
    advance(Duration::from_secs(9)).await;
    opening.state().progressed();
    let (first, closed) = take(&limiter);
    assert_eq!((closed, is_closed(&opening)), (Some(ConnectionActivity::Opening), true));
    first.state().opened();
    advance(Duration::from_secs(1)).await;
    first.state().progressed();
    let (second, closed) = take(&limiter);
    assert_eq!(
        (closed, is_closed(&unused), is_closed(&first)),
        (Some(ConnectionActivity::Unused), true, false)
    );
    second.state().opened();
    drop(request);
    advance(Duration::from_secs(1)).await;
    second.state().progressed();
    let (third, closed) = limiter.take(PEER, closing().0);
    let expected = Some((ConnectionActivity::Unused, Duration::from_secs(1)));
    assert_eq!(
        (closed, is_closed(&first)),
        (expected, true),
        "expected the idle time of the evicted connection"
    );
    drop((used, unused, opening, first, second, third));
    assert!(limiter.table.lock().open.is_empty());
    assert_eq!(take(&limiter).1, None);
}

#[tokio::test(start_paused = true)]
async fn chosen_connection_that_starts_stays() {
    let limiter = ConnectionLimiter::new(10);
    let all: Vec<ConnectionGuard> = (0..10).map(|_| take(&limiter).0).collect();
    all[..3].iter().for_each(|held| held.state().opened());
    let first = take(&limiter);
    assert!(first.1 == Some(ConnectionActivity::Opening) && is_closed(&all[3]));
    all[4].state().opened();
    advance(Duration::from_secs(1)).await;
    let storm: Vec<_> = (0..100).map(|_| take(&limiter)).collect();
    assert!(storm.iter().all(|(_, stage)| *stage == Some(ConnectionActivity::Opening)));
    let stayed = [0, 1, 2, 4].iter().all(|at| !is_closed(&all[*at]));
    assert!(stayed && all[5..].iter().all(is_closed));
}

#[tokio::test(start_paused = true)]
async fn connection_without_completed_request_is_evicted_first() {
    let limiter = ConnectionLimiter::new(4);
    let honest: Vec<ConnectionGuard> = (0..2).map(|number| take_for(&limiter, peer(number)).0).collect();
    for held in &honest {
        held.state().opened();
        drop(held.state().request());
    }
    let fill = [take_for(&limiter, peer(8)).0, take_for(&limiter, peer(9)).0];
    let mut storm: Vec<(ConnectionGuard, Request)> = Vec::new();
    for number in 10..60 {
        advance(Duration::from_millis(50)).await;
        let (held, closed) = take_for(&limiter, peer(number));
        let expected = if number < 12 { ConnectionActivity::Opening } else { ConnectionActivity::First };
        assert_eq!(closed, Some(expected), "{number}");
        held.state().opened();
        let request = held.state().request();
        storm.push((held, request));
    }
    assert!(fill.iter().all(is_closed) && !honest.iter().any(is_closed));
    let closed = storm.iter().filter(|(held, _)| is_closed(held)).count();
    assert_eq!(closed, 48, "each new connection must evict an older one");
    let (last, request) = storm.pop().unwrap();
    drop(request);
    advance(Duration::from_millis(50)).await;
    assert_eq!(take_for(&limiter, peer(60)).1, Some(ConnectionActivity::First));
    assert!(!is_closed(&last), "the last connection has completed a request and must stay");
}

#[tokio::test(start_paused = true)]
async fn dominant_address_is_evicted_although_busy() {
    let limiter = ConnectionLimiter::new(8);
    let honest: Vec<ConnectionGuard> = (0..3).map(|number| take_for(&limiter, peer(number)).0).collect();
    honest.iter().for_each(|held| held.state().opened());
    let hostile: Vec<ConnectionGuard> = (0..5).map(|_| take_for(&limiter, peer(99)).0).collect();
    let requests: Vec<Request> = hostile
        .iter()
        .map(|held| {
            held.state().opened();
            drop(held.state().request());
            held.state().request()
        })
        .collect();
    advance(Duration::from_secs(1)).await;
    hostile[0].state().progressed();
    let newcomer = take_for(&limiter, peer(3));
    assert_eq!(
        newcomer.1,
        Some(ConnectionActivity::Busy),
        "expected the eviction of the idlest connection of the dominant address"
    );
    assert!(is_closed(&hostile[1]) && !is_closed(&hostile[0]) && !honest.iter().any(is_closed));
    // The address now has only half of the entries, so the newcomer, which has not begun, ranks
    // lowest.
    let again = take_for(&limiter, peer(99));
    assert!(again.1 == Some(ConnectionActivity::Opening) && is_closed(&newcomer.0));
    let storm: Vec<_> = (0..50).map(|_| take_for(&limiter, peer(99))).collect();
    assert!(storm.iter().all(|(_, stage)| *stage == Some(ConnectionActivity::Opening)));
    assert!(!honest.iter().any(is_closed), "an address that is not dominant lost a connection");
    drop((requests, newcomer, again, storm, hostile, honest));
    let table = limiter.table.lock();
    assert!(table.open.is_empty() && table.of_peers.is_empty());
}

#[tokio::test(start_paused = true)]
async fn formerly_dominant_address_is_not_evicted() {
    let limiter = ConnectionLimiter::new(4);
    let mut dominant: Vec<ConnectionGuard> = (0..3).map(|_| take_for(&limiter, peer(1)).0).collect();
    dominant.iter().for_each(|held| held.state().opened());
    let mapped = IpAddr::V6(Ipv4Addr::new(10, 0, 0, 1).to_ipv6_mapped());
    dominant.push(take_for(&limiter, mapped).0);
    dominant.truncate(2);
    let others = [take_for(&limiter, peer(2)).0, take_for(&limiter, peer(3)).0];
    advance(Duration::from_secs(1)).await;
    assert_eq!(take_for(&limiter, peer(4)).1, Some(ConnectionActivity::Opening));
    assert!(is_closed(&others[0]) && !dominant.iter().any(is_closed));
}

#[tokio::test(start_paused = true)]
async fn few_evicted_connections_finish_at_a_time() {
    let limiter = ConnectionLimiter::new(1).with_leaving(2);
    let (opening, first) = (take(&limiter).0, take(&limiter).0);
    assert!(is_closed(&opening), "an unopened connection has no request to lose and is evicted first");
    let begun = |held: &ConnectionGuard| held.state().opened();
    begun(&first);
    let second = take(&limiter).0;
    begun(&second);
    let third = take(&limiter).0;
    begun(&third);
    for held in [&first, &second] {
        held.state().leaving().await;
        assert!(!is_closed(held));
    }
    let fourth = take(&limiter).0;
    assert!(is_closed(&third), "while two evicted connections finish their calls, a third must be closed");
    begun(&fourth);
    drop((first, third));
    let _fifth = take(&limiter).0;
    fourth.state().leaving().await;
    assert!(!is_closed(&fourth));
    drop((second, fourth));
    assert!(limiter.table.lock().leaving.is_empty());
}

proptest! {
    #[test]
    fn single_address_is_evicted_in_the_usual_order(
        ranks in prop::collection::vec((0u8..5, 0u64..50), 1..40),
    ) {
        let limiter = ConnectionLimiter::new(ranks.len());
        let held: Vec<ConnectionGuard> = ranks.iter().map(|_| take(&limiter).0).collect();
        let mut requests = Vec::new();
        for (held, (stage, at)) in held.iter().zip(&ranks) {
            let state = held.state();
            if *stage > 0 {
                state.opened();
            }
            if *stage > 2 {
                drop(state.request());
            }
            if [2, 4].contains(stage) {
                requests.push(state.request());
            }
            state.progressed_ns.store(*at, Ordering::Relaxed);
        }
        let least = held.iter().map(|held| held.state().candidate(held.number)).min();
        let _newcomer = take(&limiter);
        let closed = held.iter().find(|held| is_closed(held)).map(|held| held.state().candidate(held.number));
        prop_assert_eq!(closed, least);
    }

    #[test]
    fn evicted_connections_are_the_least_active(
        ranks in prop::collection::vec((0u8..5, 0u64..50), 0..300),
    ) {
        let stages = [ConnectionActivity::Opening, ConnectionActivity::Unused, ConnectionActivity::First, ConnectionActivity::Idle, ConnectionActivity::Busy];
        let stage = |number| stages[usize::from(number)];
        let rank = |(number, at): &(u8, u64)| EvictionRank { stage: stage(*number), progressed_ns: *at };
        let open = ranks.iter().map(rank).zip(0..);
        let open: Vec<_> = open.map(|(rank, number)| EvictionCandidate { rank, number }).collect();
        let mut chosen = choose(open.clone());
        chosen.reverse();
        let mut sorted = open;
        sorted.sort_unstable();
        let opening = sorted.iter().take_while(|it| it.rank.stage == ConnectionActivity::Opening).count();
        sorted.truncate(opening.clamp(1, CHOSEN));
        prop_assert_eq!(chosen, sorted);
    }
}
