use futures::FutureExt as _;
use futures::future::BoxFuture;
use proptest::prelude::*;

use super::*;
use crate::budget::permit_pool::PermitPool;
use crate::budget::turns::{Turns, UNIT_BYTES};

fn reader(name: &str, weight: u32) -> Reader {
    Reader { app: Some(AppId::parse(name).unwrap()), weight }
}

fn waiting(line: &Arc<Line>, reader: &Reader, bytes: u64) -> BoxFuture<'static, Permit> {
    let (line, reader) = (Arc::clone(line), reader.clone());
    let mut waiting = async move { line.take(&reader, bytes).await }.boxed();
    assert!((&mut waiting).now_or_never().is_none(), "it has to wait");
    waiting
}

fn is_served(waiting: &mut BoxFuture<'static, Permit>) -> Option<Permit> {
    waiting.now_or_never()
}

#[test]
fn greedy_application_leaves_room_for_another() {
    let line = Line::new(160);
    let (flood, honest) = (reader("flood", 1), reader("honest", 1));
    let held: Vec<_> = std::iter::from_fn(|| line.try_take(&flood, 10)).collect();
    assert_eq!(held.len(), 14);
    let next = waiting(&line, &flood, 10);
    assert!(line.try_take(&honest, 20).is_none(), "others wait");
    let small = line.take(&honest, 20).now_or_never();
    assert!(small.is_some(), "but it is its turn");
    drop(small);
    drop((next, held));
    assert_eq!(line.0.lock().free, 160);
}

#[test]
fn greedy_applications_leave_room_for_an_idle_one() {
    let line = Line::new(160);
    let crowd: Vec<_> = ["a", "b", "c"].iter().map(|name| reader(name, 1)).collect();
    let mut held = Vec::new();
    loop {
        let before = held.len();
        held.extend(crowd.iter().filter_map(|reader| line.try_take(reader, 10)));
        if held.len() == before {
            break;
        }
    }
    assert_eq!(held.len(), 14, "seven eighths");
    let queued: Vec<_> = crowd.iter().map(|reader| waiting(&line, reader, 10)).collect();
    let honest = reader("honest", 1);
    for _ in 0..9 {
        let answer = line.take(&honest, 20).now_or_never();
        assert!(answer.is_some(), "one response at a time continues");
    }
    assert!(queued.len() == 3 && line.0.lock().holders == 3);
    drop((queued, held));
    let state = line.0.lock();
    assert_eq!((state.free, state.holders, state.readers.len()), (160, 0, 0));
}

#[test]
fn stalled_readers_leave_permits_for_another_application() {
    let line = Line::new(32);
    let (hog, honest) = (reader("hog", 1), reader("honest", 1));
    let held: Vec<_> = std::iter::from_fn(|| line.try_take(&hog, 1)).collect();
    assert_eq!(held.len(), 28);
    let queued: Vec<_> = (0..30).map(|_| waiting(&line, &hog, 1)).collect();
    let mut place = line.take(&honest, 1).now_or_never().expect("an eighth is kept");
    for _ in 0..9 {
        let mut next = waiting(&line, &honest, 1);
        drop(place);
        place = is_served(&mut next).expect("it holds nothing any more");
    }
    drop((queued, held, place));
    let state = line.0.lock();
    assert_eq!((state.free, state.waiting, state.readers.len()), (32, 0, 0));
}

#[test]
fn nothing_is_reserved_of_one_permit_or_none() {
    let (one, other) = (reader("one", 1), reader("other", 1));
    drop(waiting(&Line::new(0), &one, 1));
    let line = Line::new(1);
    let place = line.try_take(&one, 1).expect("it is free");
    let mut next = waiting(&line, &other, 1);
    drop(place);
    assert!(is_served(&mut next).is_some());
}

#[test]
fn large_request_is_awaited_only_among_several_applications() {
    let line = Line::new(160);
    let (one, other) = (reader("one", 1), reader("other", 1));
    let mut held: Vec<_> = std::iter::from_fn(|| line.try_take(&one, 10)).collect();
    assert_eq!(held.len(), 14);
    held.truncate(8);
    let of_other = line.try_take(&other, 10).unwrap();
    // 70 are free, of which 20 are reserved.
    let mut large = waiting(&line, &other, 60);
    let mut small = waiting(&line, &one, 10);
    held.pop();
    let large = is_served(&mut large).expect("80 are free");
    assert!(is_served(&mut small).is_none());
    drop(large);
    assert!(is_served(&mut small).is_some());
    drop(of_other);
}

#[test]
fn waiter_with_the_smallest_share_is_served_next() {
    let line = Line::new(128);
    let (flood, other, heavy) = (reader("flood", 1), reader("other", 1), reader("heavy", 4));
    let whole = line.try_take(&Reader { app: None, weight: 1 }, 32).unwrap();
    let mut held = vec![line.try_take(&flood, 30).unwrap(), line.try_take(&flood, 10).unwrap()];
    let of_heavy = line.try_take(&heavy, 40).unwrap();
    let mut of_flood = waiting(&line, &flood, 10);
    let mut first = waiting(&line, &other, 30);
    let mut second = waiting(&line, &other, 10);
    let mut third = waiting(&line, &heavy, 10);
    drop(held.pop());
    assert!(is_served(&mut first).is_none(), "it is next, and waited for until there is room");
    drop(held.pop());
    let first = is_served(&mut first).unwrap();
    let of_flood = is_served(&mut of_flood);
    assert!(of_flood.is_some(), "it holds nothing any more");
    assert!(is_served(&mut third).is_none(), "the rest is for applications that hold nothing");
    drop(of_flood);
    let third = is_served(&mut third);
    assert!(third.is_some(), "by weight it holds 10, the other 30");
    assert!(is_served(&mut second).is_none());
    drop(of_heavy);
    assert!(is_served(&mut second).is_some());
    drop((whole, first, third));
    let state = line.0.lock();
    assert!(state.readers.is_empty());
    assert_eq!((state.free, state.holders), (128, 0));
}

#[test]
fn cancelled_waiter_blocks_nobody() {
    let line = Line::new(100);
    let (a, b) = (reader("a", 1), reader("b", 1));
    let held = line.try_take(&Reader { app: None, weight: 1 }, 90).unwrap();
    let large = waiting(&line, &a, 50);
    let mut small = waiting(&line, &b, 10);
    assert!(line.try_take(&b, 10).is_none(), "others wait");
    drop(large);
    assert!(is_served(&mut small).is_some());
    // Granted, and dropped before it was polled.
    let unseen = waiting(&line, &a, 50);
    drop(held);
    drop(unseen);
    let state = line.0.lock();
    assert_eq!((state.free, state.waiting), (100, 0));
}

fn turn_at(shares: &[&Arc<PermitPool>], units: usize) -> Arc<dyn ReadPermits> {
    Arc::new(Turns::new(&AppId::parse("any").unwrap(), shares.iter().copied(), units * UNIT_BYTES))
}

type Waiting = BoxFuture<'static, Given>;

fn with_turn(line: &Arc<Line>, reader: &Reader, bytes: u64, turn: Arc<dyn ReadPermits>) -> Waiting {
    let (line, reader) = (Arc::clone(line), reader.clone());
    async move { line.take_with(&reader, bytes, Some(turn)).await }.boxed()
}

#[test]
fn waiter_for_bytes_holds_no_permit_and_vice_versa() {
    let (line, disk) = (Line::new(80), PermitPool::new(4));
    let (hog, honest) = (reader("hog", 1), reader("honest", 1));
    let held: Vec<_> = std::iter::from_fn(|| line.try_take(&hog, 10)).collect();
    assert_eq!(held.len(), 7);
    let mut hogs: Vec<_> = (0..9).map(|_| with_turn(&line, &hog, 10, turn_at(&[&disk], 1))).collect();
    assert!(hogs.iter_mut().all(|it| it.now_or_never().is_none()));
    assert!(line.is_waited_for() && disk.has_room(4), "they wait for bytes");
    let served = with_turn(&line, &honest, 10, turn_at(&[&disk], 4)).now_or_never();
    assert!(served.is_some(), "it is its turn");
    drop((served, hogs, held));

    let all = disk.try_take(4).unwrap();
    let mut stuck: Vec<_> = (0..9).map(|_| with_turn(&line, &hog, 10, turn_at(&[&disk], 1))).collect();
    assert!(stuck.iter_mut().all(|it| it.now_or_never().is_none()));
    assert!(!line.is_waited_for() && line.0.lock().free == 80, "they wait for a disk");
    let other = PermitPool::new(4);
    assert!(line.has_waiting(), "so nobody reads ahead of them");
    assert!(line.try_take(&hog, 10).is_some());
    assert!(with_turn(&line, &hog, 10, turn_at(&[&other], 1)).now_or_never().is_some());
    let both = with_turn(&line, &honest, 10, turn_at(&[&disk, &other], 1)).now_or_never();
    assert!(both.is_none() && other.has_room(4), "nothing of one disk is held while another is waited for");
    drop(all);
    let served = stuck.iter_mut().filter_map(|it| it.now_or_never()).collect::<Vec<_>>();
    assert_eq!(served.len(), 4);
    drop((served, stuck));
    let state = line.0.lock();
    assert_eq!((state.free, state.waiting, state.readers.len(), disk.has_room(4)), (80, 0, 0, true));
}

#[test]
fn large_read_is_not_starved_by_small_ones() {
    let (line, disk) = (Line::new(1000), PermitPool::new(4));
    let (one, other) = (reader("one", 1), reader("other", 1));
    let mut small = with_turn(&line, &one, 10, turn_at(&[&disk], 2)).now_or_never().unwrap();
    let mut large = with_turn(&line, &other, 10, turn_at(&[&disk], 4));
    assert!((&mut large).now_or_never().is_none());
    let mut next = with_turn(&line, &one, 10, turn_at(&[&disk], 2));
    assert!((&mut next).now_or_never().is_none(), "there would be room");
    small.1 = None;
    let large = large.now_or_never().expect("its disk is free");
    assert!((&mut next).now_or_never().is_none());
    drop(large);
    assert!(next.now_or_never().is_some());
}

/// Collects the grants. It polls twice because a later poll may serve an earlier waiter.
fn look(waiting: &mut Vec<Waiting>, given: &mut Vec<Given>) {
    for _ in 0..2 {
        waiting.retain_mut(|it| it.now_or_never().map(|it| given.push(it)).is_none());
    }
}

proptest! {
    /// Whatever is taken, released or cancelled: nobody waits for free capacity, and nothing is
    /// lost.
    #[test]
    fn free_capacity_is_granted_at_once(steps in proptest::collection::vec((0..8u8, 0..3usize, 1..40u64, 1..5usize, 0..4usize), 1..120)) {
        let line = Line::new(80);
        let disks = [PermitPool::new(4), PermitPool::new(4)];
        let apps = ["a", "b", "c"].map(|name| reader(name, 1));
        let (mut waiting, mut given) = (Vec::<Waiting>::new(), Vec::<Given>::new());
        for (step, app, bytes, units, which) in steps {
            match step {
                0..=3 => {
                    let of: &[&Arc<PermitPool>] = match which {
                        0 => &[&disks[0]],
                        1 => &[&disks[1]],
                        2 => &[&disks[0], &disks[1]],
                        _ => &[],
                    };
                    waiting.push(with_turn(&line, &apps[app], bytes, turn_at(of, units)));
                }
                4 if !waiting.is_empty() => drop(waiting.swap_remove(units % waiting.len())),
                5 if !given.is_empty() => {
                    let at = units % given.len();
                    given[at].1 = None;
                }
                _ if !given.is_empty() => drop(given.swap_remove(units % given.len())),
                _ => {}
            }
            look(&mut waiting, &mut given);
        }
        while !given.is_empty() {
            given.clear();
            look(&mut waiting, &mut given);
        }
        prop_assert_eq!(waiting.len(), 0);
        let state = line.0.lock();
        prop_assert_eq!((state.free, state.waiting, state.readers.len()), (80, 0, 0));
        prop_assert!(disks.iter().all(|disk| disk.has_room(4)));
    }
}
