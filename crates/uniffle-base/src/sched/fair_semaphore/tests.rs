use futures::FutureExt as _;
use futures::future::BoxFuture;
use proptest::prelude::*;

use super::*;

/// Bytes of one unit of a device's share.
const UNIT: usize = uniffle_io::BLOCK_ALIGN;

fn holder(name: &str, weight: u32) -> Holder {
    Holder { app: Some(AppId::parse(name).unwrap()), weight }
}

fn waiting(semaphore: &Arc<FairSemaphore>, holder: &Holder, bytes: u64) -> BoxFuture<'static, Permit> {
    let (semaphore, holder) = (Arc::clone(semaphore), holder.clone());
    let mut waiting = async move { semaphore.acquire(&holder, bytes).await }.boxed();
    assert!((&mut waiting).now_or_never().is_none(), "the request was granted at once");
    waiting
}

/// Returns the number of free permits, of waiters and of holders.
fn rest(semaphore: &Arc<FairSemaphore>) -> (u64, usize, usize) {
    let state = semaphore.0.lock();
    (state.free, state.waiters.len(), state.held.len())
}

fn is_served(waiting: &mut BoxFuture<'static, Permit>) -> Option<Permit> {
    waiting.now_or_never()
}

#[test]
fn greedy_application_leaves_room_for_another() {
    let semaphore = FairSemaphore::new(160, Reserve::Eighth);
    let (flood, honest) = (holder("flood", 1), holder("honest", 1));
    let held: Vec<_> = std::iter::from_fn(|| semaphore.try_acquire(&flood, 10)).collect();
    assert_eq!(held.len(), 14, "an application must get seven eighths");
    let next = waiting(&semaphore, &flood, 10);
    assert!(semaphore.try_acquire(&honest, 20).is_none());
    let small = semaphore.acquire(&honest, 20).now_or_never();
    assert!(small.is_some(), "the other application must be served next");
    drop(small);
    drop((next, held));
    assert_eq!(semaphore.0.lock().free, 160);
}

#[test]
fn greedy_applications_leave_room_for_an_idle_one() {
    let semaphore = FairSemaphore::new(160, Reserve::Eighth);
    let holders: Vec<_> = ["a", "b", "c"].iter().map(|name| holder(name, 1)).collect();
    let mut held = Vec::new();
    loop {
        let before = held.len();
        held.extend(holders.iter().filter_map(|holder| semaphore.try_acquire(holder, 10)));
        if held.len() == before {
            break;
        }
    }
    assert_eq!(held.len(), 14, "applications must get seven eighths");
    let queued: Vec<_> = holders.iter().map(|holder| waiting(&semaphore, holder, 10)).collect();
    let honest = holder("honest", 1);
    for _ in 0..9 {
        let answer = semaphore.acquire(&honest, 20).now_or_never();
        assert!(answer.is_some(), "one response at a time must continue");
    }
    assert_eq!((queued.len(), semaphore.0.lock().held.len()), (3, 3));
    drop((queued, held));
    assert_eq!(rest(&semaphore), (160, 0, 0));
}

#[test]
fn stalled_readers_leave_permits_for_another_application() {
    let semaphore = FairSemaphore::new(32, Reserve::Eighth);
    let (hog, honest) = (holder("hog", 1), holder("honest", 1));
    let held: Vec<_> = std::iter::from_fn(|| semaphore.try_acquire(&hog, 1)).collect();
    assert_eq!(held.len(), 28, "an application must get seven eighths");
    let queued: Vec<_> = (0..30).map(|_| waiting(&semaphore, &hog, 1)).collect();
    let mut place =
        semaphore.acquire(&honest, 1).now_or_never().expect("an eighth is reserved for other applications");
    for _ in 0..9 {
        let mut next = waiting(&semaphore, &honest, 1);
        drop(place);
        place = is_served(&mut next).expect("an application without permits must be served");
    }
    drop((queued, held, place));
    assert_eq!(rest(&semaphore), (32, 0, 0));
}

#[test]
fn nothing_is_reserved_of_one_permit_or_none() {
    let (one, other) = (holder("one", 1), holder("other", 1));
    drop(waiting(&FairSemaphore::new(0, Reserve::Eighth), &one, 1));
    let semaphore = FairSemaphore::new(1, Reserve::Eighth);
    let place = semaphore.try_acquire(&one, 1).expect("the permit is free");
    let mut next = waiting(&semaphore, &other, 1);
    drop(place);
    assert!(is_served(&mut next).is_some());
}

#[test]
fn capacity_is_collected_for_a_large_request() {
    let semaphore = FairSemaphore::new(160, Reserve::Eighth);
    let (one, other) = (holder("one", 1), holder("other", 1));
    let mut held: Vec<_> = std::iter::from_fn(|| semaphore.try_acquire(&one, 10)).collect();
    assert_eq!(held.len(), 14);
    held.truncate(8);
    let of_other = semaphore.try_acquire(&other, 10).unwrap();
    // 70 are free, of which 20 are reserved.
    let mut large = waiting(&semaphore, &other, 60);
    let mut small = waiting(&semaphore, &one, 10);
    held.pop();
    let large = is_served(&mut large).expect("80 permits are free");
    assert!(is_served(&mut small).is_none());
    drop(large);
    assert!(is_served(&mut small).is_some());
    drop(of_other);
}

#[test]
fn waiter_with_the_smallest_share_is_served_next() {
    let semaphore = FairSemaphore::new(128, Reserve::Eighth);
    let (flood, other, heavy) = (holder("flood", 1), holder("other", 1), holder("heavy", 4));
    let whole = semaphore.try_acquire(&Holder { app: None, weight: 1 }, 32).unwrap();
    let mut held =
        vec![semaphore.try_acquire(&flood, 30).unwrap(), semaphore.try_acquire(&flood, 10).unwrap()];
    let of_heavy = semaphore.try_acquire(&heavy, 40).unwrap();
    let mut of_flood = waiting(&semaphore, &flood, 10);
    let mut first = waiting(&semaphore, &other, 30);
    let mut second = waiting(&semaphore, &other, 10);
    let mut third = waiting(&semaphore, &heavy, 10);
    drop(held.pop());
    assert!(is_served(&mut first).is_none(), "the next waiter has no room yet");
    drop(held.pop());
    let first = is_served(&mut first).unwrap();
    let of_flood = is_served(&mut of_flood);
    assert!(of_flood.is_some(), "an application without permits must be served");
    assert!(
        is_served(&mut third).is_none(),
        "the remaining bytes are reserved for applications without permits"
    );
    drop(of_flood);
    let third = is_served(&mut third);
    assert!(third.is_some(), "the waiter holds less than its weighted share and must be served");
    assert!(is_served(&mut second).is_none());
    drop(of_heavy);
    assert!(is_served(&mut second).is_some());
    drop((whole, first, third));
    assert_eq!(rest(&semaphore), (128, 0, 0));
}

#[test]
fn cancelled_waiter_blocks_nobody() {
    let semaphore = FairSemaphore::new(100, Reserve::Eighth);
    let (a, b) = (holder("a", 1), holder("b", 1));
    let held = semaphore.try_acquire(&Holder { app: None, weight: 1 }, 90).unwrap();
    let large = waiting(&semaphore, &a, 50);
    let mut small = waiting(&semaphore, &b, 10);
    assert!(semaphore.try_acquire(&b, 10).is_none());
    drop(large);
    assert!(is_served(&mut small).is_some());
    // Granted, and dropped before it was polled.
    let unseen = waiting(&semaphore, &a, 50);
    drop(held);
    drop(unseen);
    assert_eq!(rest(&semaphore), (100, 0, 0));
}

/// Creates a device's share of four units.
fn device() -> Arc<DeviceShare> {
    DeviceShare::new(4 * UNIT as u64)
}

fn parts_of(shares: &[&Arc<DeviceShare>], units: usize) -> ShareParts {
    ShareParts::of(shares.iter().copied(), units * UNIT)
}

type Waiting = BoxFuture<'static, Grant>;

fn with_parts(semaphore: &Arc<FairSemaphore>, holder: &Holder, bytes: u64, parts: ShareParts) -> Waiting {
    let (semaphore, holder) = (Arc::clone(semaphore), holder.clone());
    async move { semaphore.acquire_with(&holder, bytes, parts).await }.boxed()
}

#[test]
fn waiter_for_bytes_or_device_holds_neither() {
    let (semaphore, disk) = (FairSemaphore::new(80, Reserve::Eighth), device());
    let (hog, honest) = (holder("hog", 1), holder("honest", 1));
    let held: Vec<_> = std::iter::from_fn(|| semaphore.try_acquire(&hog, 10)).collect();
    assert_eq!(held.len(), 7);
    let mut hogs: Vec<_> = (0..9).map(|_| with_parts(&semaphore, &hog, 10, parts_of(&[&disk], 1))).collect();
    assert!(hogs.iter_mut().all(|it| it.now_or_never().is_none()));
    assert!(semaphore.is_short() && disk.has_room(4 * UNIT), "the waiters must lack bytes, not the disk");
    let served = with_parts(&semaphore, &honest, 10, parts_of(&[&disk], 4)).now_or_never();
    assert!(served.is_some(), "the other application must be served next");
    drop((served, hogs, held));

    let all = semaphore.try_acquire_with(&honest, 0, &parts_of(&[&disk], 4)).unwrap();
    let mut stuck: Vec<_> = (0..9).map(|_| with_parts(&semaphore, &hog, 10, parts_of(&[&disk], 1))).collect();
    assert!(stuck.iter_mut().all(|it| it.now_or_never().is_none()));
    assert!(
        !semaphore.is_short() && semaphore.0.lock().free == 80,
        "the waiters must lack the disk, not bytes"
    );
    let other = device();
    assert!(semaphore.has_waiters(), "prefetching must stop while requests wait");
    assert!(semaphore.try_acquire(&hog, 10).is_some());
    assert!(with_parts(&semaphore, &hog, 10, parts_of(&[&other], 1)).now_or_never().is_some());
    let both = with_parts(&semaphore, &honest, 10, parts_of(&[&disk, &other], 1)).now_or_never();
    assert!(both.is_none() && other.has_room(4 * UNIT), "a waiter for two disks holds a part of one of them");
    drop(all);
    let served = stuck.iter_mut().filter_map(|it| it.now_or_never()).collect::<Vec<_>>();
    assert_eq!(served.len(), 4);
    drop((served, stuck));
    assert_eq!((rest(&semaphore), disk.has_room(4 * UNIT)), ((80, 0, 0), true));
}

#[test]
fn large_read_is_not_starved_by_small_ones() {
    let (semaphore, disk) = (FairSemaphore::new(1000, Reserve::Eighth), device());
    let (one, other) = (holder("one", 1), holder("other", 1));
    let (_small, device) = with_parts(&semaphore, &one, 10, parts_of(&[&disk], 2)).now_or_never().unwrap();
    let mut large = with_parts(&semaphore, &other, 10, parts_of(&[&disk], 4));
    assert!((&mut large).now_or_never().is_none());
    let mut next = with_parts(&semaphore, &one, 10, parts_of(&[&disk], 2));
    assert!((&mut next).now_or_never().is_none(), "the large read must be served first");
    drop(device);
    let large = large.now_or_never().expect("the disk is free");
    assert!((&mut next).now_or_never().is_none());
    drop(large);
    assert!(next.now_or_never().is_some());
}

#[test]
fn applications_that_hold_nothing_alternate() {
    let semaphore = FairSemaphore::new(2, Reserve::None);
    let (hog, honest) = (holder("hog", 1), holder("honest", 1));
    let open = semaphore.try_acquire(&hog, 2).unwrap();
    let mut hogs: Vec<_> = (0..128).map(|_| waiting(&semaphore, &hog, 1)).collect();
    let mut other = waiting(&semaphore, &honest, 2);
    drop(open);
    let of_hog = is_served(&mut hogs.remove(0)).expect("the first waiter must be served");
    assert!(is_served(&mut hogs[0]).is_none(), "later waiters must not overtake the large next one");
    assert!(semaphore.try_acquire(&hog, 1).is_none() && !semaphore.has_room(1));
    drop(of_hog);
    let other = is_served(&mut other).expect("the other application must be served next");
    assert!(is_served(&mut hogs[0]).is_none());
    drop(other);
    // Granted, and dropped before they were polled.
    drop(hogs);
    assert_eq!(rest(&semaphore), (2, 0, 0));
    assert!(semaphore.has_room(2));
}

#[test]
fn equal_holders_are_served_by_turns_and_not_by_arrival() {
    let semaphore = FairSemaphore::new(1, Reserve::None);
    let (hog, honest) = (holder("hog", 1), holder("honest", 1));
    let mut open = semaphore.try_acquire(&hog, 1).unwrap();
    let mut hogs: Vec<_> = (0..4).map(|_| waiting(&semaphore, &hog, 1)).collect();
    let mut others: Vec<_> = (0..2).map(|_| waiting(&semaphore, &honest, 1)).collect();
    for is_hogs in [true, false, true, false, true, true] {
        drop(open);
        let waiters = if is_hogs { &mut hogs } else { &mut others };
        open = is_served(&mut waiters.remove(0)).expect("the applications must be served in turns");
    }
}

/// A share that is full with reads of a stuck device leaves the memory to reads of others.
#[test]
fn stuck_reads_leave_memory_for_other_devices() {
    let semaphore = FairSemaphore::new(100, Reserve::None);
    // A part is at most the whole share.
    let (store, cache, app) = (device(), device(), holder("app", 1));
    let stuck = with_parts(&semaphore, &app, 40, parts_of(&[&store], 9)).now_or_never().unwrap();
    assert!(!store.has_room(1));
    let mut next = with_parts(&semaphore, &app, 40, parts_of(&[&store], 1));
    assert!((&mut next).now_or_never().is_none());
    assert!(with_parts(&semaphore, &app, 60, parts_of(&[&cache], 9)).now_or_never().is_some());
    drop(stuck);
    assert!(next.now_or_never().is_some());
}

/// Collects the grants.
fn poll_all(waiting: &mut Vec<Waiting>, granted: &mut Vec<(Permit, Option<DevicePermit>)>) {
    waiting.retain_mut(|it| {
        let grant = it.now_or_never();
        grant.map(|(permit, device)| granted.push((permit, Some(device)))).is_none()
    });
}

proptest! {
    /// Whatever is acquired, released or cancelled, free and held permits add up to the capacity,
    /// and a semaphore whose permits are all free has no waiters.
    #[test]
    fn capacity_is_neither_lost_nor_stuck(steps in proptest::collection::vec((0..8u8, 0..3usize, 1..40u64, 1..5usize, 0..4usize), 1..120)) {
        let semaphore = FairSemaphore::new(80, Reserve::Eighth);
        let disks = [device(), device()];
        let apps = ["a", "b", "c"].map(|name| holder(name, 1));
        let (mut waiting, mut granted) = (Vec::<Waiting>::new(), Vec::new());
        for (step, app, bytes, units, which) in steps {
            match step {
                0..=3 => {
                    let of: &[&Arc<DeviceShare>] = match which {
                        0 => &[&disks[0]],
                        1 => &[&disks[1]],
                        2 => &[&disks[0], &disks[1]],
                        _ => &[],
                    };
                    let mut next = with_parts(&semaphore, &apps[app], bytes, parts_of(of, units));
                    match (&mut next).now_or_never() {
                        Some((permit, device)) => granted.push((permit, Some(device))),
                        None => waiting.push(next),
                    }
                }
                4 if !waiting.is_empty() => drop(waiting.swap_remove(units % waiting.len())),
                5 if !granted.is_empty() => {
                    let at = units % granted.len();
                    granted[at].1 = None;
                }
                _ if !granted.is_empty() => drop(granted.swap_remove(units % granted.len())),
                _ => {}
            }
            poll_all(&mut waiting, &mut granted);
            let held: u64 = granted.iter().map(|(permit, _)| permit.amount).sum();
            prop_assert_eq!(semaphore.0.lock().free, 80 - held, "free and held permits must add up to the total");
            prop_assert!(!granted.is_empty() || waiting.is_empty(), "a waiter is stuck although all is free");
        }
        while !granted.is_empty() {
            granted.clear();
            poll_all(&mut waiting, &mut granted);
        }
        prop_assert_eq!(waiting.len(), 0);
        prop_assert_eq!(rest(&semaphore), (80, 0, 0));
        prop_assert!(disks.iter().all(|disk| disk.has_room(4 * UNIT)));
    }

    /// Compares the semaphore with a model of the granted and the requested amounts.
    #[test]
    fn waiter_that_holds_least_is_next(
        steps in proptest::collection::vec((0..5u8, 0..3usize, 1..40u64, any::<prop::sample::Index>()), 1..150),
        is_reserved in any::<bool>(),
    ) {
        let reserve = if is_reserved { Reserve::Eighth } else { Reserve::None };
        let semaphore = FairSemaphore::new(80, reserve);
        let reserved = if is_reserved { 10 } else { 0 };
        let apps = [("a", 1), ("b", 1), ("c", 3)].map(|(name, weight)| holder(name, weight));
        let (mut waiting, mut granted) = (Vec::<(usize, u64, BoxFuture<'static, Permit>)>::new(), Vec::new());
        for (step, app, amount, at) in steps {
            match step {
                0 | 1 => {
                    let (semaphore, holder) = (Arc::clone(&semaphore), apps[app].clone());
                    let mut next = async move { semaphore.acquire(&holder, amount).await }.boxed();
                    match (&mut next).now_or_never() {
                        Some(permit) => granted.push((app, permit)),
                        None => waiting.push((app, amount, next)),
                    }
                }
                2 if !waiting.is_empty() => drop(waiting.remove(at.index(waiting.len()))),
                _ if !granted.is_empty() => drop(granted.swap_remove(at.index(granted.len()))),
                _ => {}
            }
            waiting.retain_mut(|(app, _, it)| it.now_or_never().map(|it| granted.push((*app, it))).is_none());
            let held = |app: usize| granted.iter().filter(|it| it.0 == app).map(|it| it.1.amount).sum::<u64>();
            let free = 80 - (0..3).map(held).sum::<u64>();
            prop_assert_eq!(semaphore.0.lock().free, free);
            // If applications wait, one of those that hold least by their weight lacks capacity.
            let firsts: Vec<_> = (0..3).filter_map(|app| waiting.iter().find(|it| it.0 == app)).collect();
            let rank = |app: usize| held(app) / u64::from(apps[app].weight);
            let least = firsts.iter().map(|it| rank(it.0)).min();
            let is_alone = (0..3).filter(|app| held(*app) > 0).count() <= 1;
            let lacks = |app: usize, amount: u64| {
                let may_use_all = held(app) == 0 || (is_alone && held(app) + amount <= 40);
                amount + if may_use_all { 0 } else { reserved } > free
            };
            let next = firsts.iter().filter(|it| Some(rank(it.0)) == least);
            prop_assert!(firsts.is_empty() || next.clone().any(|it| lacks(it.0, it.1)));
        }
        drop((waiting, granted));
        prop_assert_eq!(rest(&semaphore), (80, 0, 0));
    }

    #[test]
    fn single_application_leaves_the_reserve(amounts in proptest::collection::vec(1..40u64, 1..40)) {
        let semaphore = FairSemaphore::new(80, Reserve::Eighth);
        let app = holder("app", 1);
        let held: Vec<_> = amounts.iter().filter_map(|amount| semaphore.try_acquire(&app, *amount)).collect();
        prop_assert!(semaphore.0.lock().free >= 10);
        prop_assert!(semaphore.try_acquire(&holder("other", 1), 10).is_some());
        drop(held);
    }
}
