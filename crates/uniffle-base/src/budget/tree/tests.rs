//! Limits of budgets, their waiters, and a model of a counter.

use std::pin::Pin;
use std::task::{Context, Waker};

use proptest::prelude::*;

use super::*;

#[test]
fn charge_beyond_capacity_is_refused_completely() {
    let budget = Budget::new(100);
    let held = budget.try_charge(60).unwrap();
    assert_eq!(budget.try_charge(41).unwrap_err(), NoCapacity { requested: 41, free: 40 });
    assert_eq!(budget.try_charge(u64::MAX).unwrap_err().free, 40);
    assert_eq!(budget.used(), 60);
    drop(held);
    assert_eq!(budget.used(), 0);
}

#[test]
fn overdrawn_budget_refuses_until_repaid() {
    let budget = Budget::new(10);
    let over = budget.charge_unchecked(15);
    assert_eq!(budget.free(), 0);
    assert!(budget.try_charge(1).is_err());
    drop(over);
    assert!(budget.try_charge(10).is_ok());
}

#[test]
fn charge_steps_are_reported_despite_releases() {
    static STEPS: AtomicUsize = AtomicUsize::new(0);
    let steps = || STEPS.load(Ordering::Relaxed);
    let whole = Budget::with_step(100, 50, || {
        STEPS.fetch_add(1, Ordering::Relaxed);
    });
    let part = whole.child(60);
    for charged in 0..10 {
        drop(part.try_charge(10).unwrap());
        assert_eq!(steps(), (charged + 1) / 5);
    }
    assert!(part.try_charge(61).is_err());
    assert_eq!(steps(), 2, "a refused charge must not be counted");
    let mut held = part.charge_unchecked(45);
    held.try_grow(5).unwrap();
    assert_eq!(steps(), 3);
}

#[test]
fn child_budget_is_bounded_by_itself_and_its_parents() {
    let whole = Budget::new(100);
    let (some, other) = (whole.child(80), whole.child(80));
    let mut held = some.try_charge(60).unwrap();
    assert_eq!(some.try_charge(21).unwrap_err().free, 20);
    assert_eq!(other.try_charge(41).unwrap_err(), NoCapacity { requested: 41, free: 40 });
    assert_eq!((other.used(), other.free(), whole.used()), (0, 40, 60));
    held.try_grow(20).unwrap();
    assert!(held.try_grow(1).is_err());
    let part = held.split(30).unwrap();
    drop(held);
    assert_eq!((some.used(), whole.used()), (30, 30));
    assert!(!some.is_unshared(), "a charge must keep its budget alive");
    drop((part, other.charge_unchecked(90)));
    assert!(some.is_unshared());
    assert_eq!((some.used(), other.used(), whole.used()), (0, 0, 0));
}

#[tokio::test]
async fn waiter_is_charged_after_release_by_another_child() {
    let whole = Budget::new(100);
    let (some, other) = (whole.child(100), whole.child(50));
    assert!(other.charge(51).await.is_err(), "a charge above the limit must fail at once");
    let held = some.try_charge(80).unwrap();
    let mut waits = std::pin::pin!(other.charge(30));
    assert!(futures::poll!(&mut waits).is_pending());
    drop(held);
    assert_eq!(waits.await.unwrap().bytes(), 30);
    assert_eq!((whole.used(), whole.0.waiters.load(Ordering::SeqCst)), (0, 0));
}

#[tokio::test]
async fn request_beyond_the_margin_does_not_wait() {
    let whole = Budget::new(100);
    let part = whole.child_leaving(40, 80);
    assert_eq!((part.max_charge(), part.child(90).max_charge(), whole.child(90).max_charge()), (60, 60, 90));
    assert_eq!(part.charge(61).await.unwrap_err(), NoCapacity { requested: 61, free: 60 });
    assert_eq!(part.charge(60).await.unwrap().bytes(), 60);
}

/// Polls a future until it is pending, and replaces it after each completion. Returns false if
/// it was never pending until `is_over`.
fn becomes_pending<F: Future>(
    mut future: Pin<&mut F>,
    next: impl Fn() -> F,
    is_over: impl Fn() -> bool,
) -> bool {
    let mut context = Context::from_waker(Waker::noop());
    while !is_over() {
        if future.as_mut().poll(&mut context).is_pending() {
            return true;
        }
        future.set(next());
    }
    false
}

/// Waits for a charge of 5 bytes to `child` while another thread calls `refused` again and
/// again. Returns whether such a waiter is served after the last call.
fn waiter_is_served_after(child: &Budget, refused: impl Fn() + Sync) -> bool {
    (0..100).all(|_| {
        let mut waits = std::pin::pin!(child.charge(5));
        let is_pending = std::thread::scope(|scope| {
            let other = scope.spawn(|| (0..10_000).for_each(|_| refused()));
            becomes_pending(waits.as_mut(), || child.charge(5), || other.is_finished())
        });
        let mut context = Context::from_waker(Waker::noop());
        !is_pending || waits.poll(&mut context).is_ready()
    })
}

#[test]
fn refused_charge_does_not_delay_a_waiter() {
    let whole = Budget::new(100);
    let child = whole.child(30);
    let _held = (whole.try_charge(75).unwrap(), child.try_charge(15).unwrap());
    let refused = || assert!(child.try_charge(12).is_err());
    assert!(waiter_is_served_after(&child, refused));
    let rolled_back = || assert!(child.take_path(12, 0).is_err());
    assert!(waiter_is_served_after(&child, rolled_back), "a rolled back charge must wake waiters");
    assert_eq!((child.used(), whole.used()), (15, 90));
}

async fn takes_again_and_again(budget: Budget, bytes: u64) {
    for _ in 0..500 {
        let held = budget.charge(bytes).await.unwrap();
        tokio::task::yield_now().await;
        drop(held);
    }
}

#[tokio::test]
async fn every_waiter_is_served() {
    let whole = Budget::new(7);
    let part = whole.child(5);
    let many = (0..8).map(|n| {
        let budget = if n % 2 == 0 { whole.clone() } else { part.clone() };
        takes_again_and_again(budget, 1 + n % 4)
    });
    futures::future::join_all(many).await;
    assert_eq!((whole.used(), part.used()), (0, 0));
}

proptest! {
    #[test]
    fn budget_follows_a_counter(steps in prop::collection::vec((0u8..5, 0u64..60, any::<prop::sample::Index>()), 1..200)) {
        let budget = Budget::new(100);
        let mut charges: Vec<Charge> = Vec::new();
        let mut used = 0u64;
        for (what, bytes, at) in steps {
            match what {
                0 => {
                    let granted = budget.try_charge(bytes);
                    prop_assert_eq!(granted.is_ok(), bytes == 0 || used + bytes <= 100);
                    if let Ok(charge) = granted { used += bytes; charges.push(charge); }
                }
                1 => { used += bytes; charges.push(budget.charge_unchecked(bytes)); }
                2 if !charges.is_empty() => { let i = at.index(charges.len()); used -= charges.swap_remove(i).bytes(); }
                3 if !charges.is_empty() => {
                    let i = at.index(charges.len());
                    let had = charges[i].bytes();
                    let part = charges[i].split(bytes);
                    prop_assert_eq!(part.is_some(), bytes <= had);
                    charges.extend(part);
                }
                4 if charges.len() > 1 => { let other = charges.pop().unwrap(); charges[0].merge(other); }
                _ => {}
            }
            prop_assert_eq!(budget.used(), used);
            prop_assert_eq!(charges.iter().map(Charge::bytes).sum::<u64>(), used);
        }
        charges.clear();
        prop_assert_eq!(budget.used(), 0);
    }
}
