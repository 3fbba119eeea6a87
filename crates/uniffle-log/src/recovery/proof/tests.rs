//! The recovery rule against directories over several process lifetimes, and case by case.

use std::collections::{BTreeMap, BTreeSet};

use proptest::prelude::*;

use super::*;
use crate::format::frame::{LINEAGE_AWAY_MAX, LINEAGE_MAX};

/// Directories over several process lifetimes, each with some of them.
#[derive(Debug, Default)]
struct Fixture {
    directories: Vec<Directory>,
    /// Everything that was ever acknowledged, by shuffle.
    acknowledged: BTreeMap<u64, BTreeSet<u64>>,
    next_id: u64,
}

#[derive(Debug, Default, Clone)]
struct Directory {
    list: Option<(u64, Epoch)>,
    copies: Vec<Copied>,
}

#[derive(Debug, Clone)]
struct Copied {
    generation: u64,
    epoch: Epoch,
    log: Log,
}

/// Content of a log.
#[derive(Debug, Clone, Default)]
struct Log {
    records: BTreeMap<u64, BTreeSet<u64>>,
    incomplete: BTreeMap<u64, Gap>,
}

fn uuid(directory: usize) -> Uuid {
    Uuid::from_u128(directory as u128 + 1)
}

impl Fixture {
    fn of(directories: usize) -> Self {
        Self { directories: vec![Directory::default(); directories], ..Self::default() }
    }

    fn see(&self, here: &[usize]) -> Vec<DirectoryScan> {
        let seen = here.iter().map(|at| {
            let directory = &self.directories[*at];
            let copies = directory.copies.iter().map(|copy| {
                let frames = copy.log.records.values().map(|it| it.len() as u64).sum::<u64>();
                CopySeen {
                    path: format!("/{at}/log"),
                    generation: copy.generation,
                    epoch: Some(copy.epoch.id),
                    frames: frames + 1,
                    bytes: 0,
                    crc: 0,
                    newest: (frames, 0),
                    acknowledged: frames + 1,
                    torn: None,
                }
            });
            let heads = directory.copies.iter().map(|copy| (copy.generation, copy.epoch.clone()));
            DirectoryScan {
                uuid: uuid(*at),
                path: format!("/{at}"),
                epochs: directory.list.iter().cloned().chain(heads).collect(),
                copies: copies.collect(),
                ..DirectoryScan::default()
            }
        });
        seen.collect()
    }

    /// Simulates one process lifetime on the directories `here`. Each of `shuffles` reports once if
    /// that is acknowledged.
    fn live(&mut self, here: &[usize], shuffles: &[u64]) {
        let seen = self.see(here);
        let decision = decide_recovery(&seen, None);
        if decision.is_fresh && self.next_id > 0 {
            // Directories that have never met the others know nothing about them.
            return;
        }
        let mut log = Log::default();
        for place in &decision.sources {
            let source = &self.directories[here[place.directory]].copies[place.copy].log;
            for (shuffle, ids) in &source.records {
                log.records.entry(*shuffle).or_default().extend(ids);
            }
            log.incomplete.extend(source.incomplete.clone());
        }
        for shuffle in log.records.keys() {
            match decision.carried(log.incomplete.get(shuffle)) {
                Some(gap) => log.incomplete.insert(*shuffle, gap),
                None => log.incomplete.remove(shuffle),
            };
        }
        let gap = decision.carried(decision.epoch.gap.as_ref());
        for (shuffle, ids) in &self.acknowledged {
            // The shuffle is neither refused as incomplete nor, if unknown, because of the gap.
            // Then it must be complete.
            let is_refused = match log.records.contains_key(shuffle) {
                true => log.incomplete.contains_key(shuffle),
                false => gap.is_some(),
            };
            let found = log.records.get(shuffle).cloned().unwrap_or_default();
            assert!(
                is_refused || found.is_superset(ids),
                "acknowledged records of shuffle {shuffle} are missing on {here:?}: {seen:#?}"
            );
        }
        let usable: Vec<_> = here.iter().map(|at| Member::new(uuid(*at), &format!("/{at}"))).collect();
        let Ok(members) = members_after(&decision.epoch, &usable) else { return };
        self.next_id += 1;
        let remembered = if members.len() == usable.len() { LINEAGE_MAX } else { LINEAGE_AWAY_MAX };
        let epoch = Epoch { members, gap, ..decision.epoch.next(self.next_id, remembered) };
        for (shuffle, id) in shuffles.iter().zip(self.next_id * 1000..) {
            let promised = self.acknowledged.entry(*shuffle).or_default();
            if !log.records.contains_key(shuffle) {
                // The shuffle is registered again, so its earlier records are no longer promised.
                promised.clear();
            }
            promised.insert(id);
            log.records.entry(*shuffle).or_default().insert(id);
        }
        let generation = decision.generation + 1;
        for at in here {
            self.directories[*at] = Directory { list: Some((generation, epoch.clone())), copies: Vec::new() };
        }
        for at in [here[0], here[1 % here.len()]] {
            let copy = Copied { generation, epoch: epoch.clone(), log: log.clone() };
            self.directories[at].copies.push(copy);
        }
    }
}

/// Generates lifetimes with some of `count` directories, in any order.
fn lives(count: usize) -> impl Strategy<Value = Vec<(Vec<usize>, Vec<u64>)>> {
    let all: Vec<usize> = (0..count).collect();
    let some = prop::sample::subsequence(all, 1..=count).prop_shuffle();
    prop::collection::vec((some, prop::collection::vec(0u64..4, 0..3)), 1..12)
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(2000))]

    /// Whichever directories are absent in turn, results that are not refused are complete.
    #[test]
    fn proven_results_are_complete_without_any_directory(lives in (1usize..=5).prop_flat_map(lives)) {
        let mut fixture = Fixture::of(5);
        for (here, shuffles) in lives {
            fixture.live(&here, &shuffles);
        }
    }
}

fn two_copies(records: [(u64, Option<bool>); 2]) -> Vec<DirectoryScan> {
    let epoch = Epoch { id: 1, members: vec![Member::new(uuid(0), "/0")], ..Epoch::default() };
    let copies = records.map(|(frames, torn)| CopySeen {
        path: "/0/log".into(),
        generation: 3,
        epoch: Some(1),
        frames,
        bytes: 0,
        crc: 0,
        newest: (frames.max(1) - 1, 0),
        acknowledged: 0,
        torn: torn.map(|frames_follow| Torn { at: 9, why: "bad".into(), frames_follow }),
    });
    let epochs = vec![(3, epoch)];
    vec![DirectoryScan {
        uuid: uuid(0),
        path: "/0".into(),
        epochs,
        copies: copies.to_vec(),
        ..DirectoryScan::default()
    }]
}

#[test]
fn one_damaged_copy_is_repaired_and_two_are_not() {
    let proven = |records| decide_recovery(&two_copies(records), None).gap.is_none();
    assert!(proven([(9, None), (9, None)]));
    assert!(proven([(9, None), (4, Some(true))]) && proven([(9, None), (0, Some(true))]));
    assert!(proven([(9, None), (3, None)]));
    assert!(
        proven([(9, Some(false)), (9, Some(false))]),
        "the last write before a loss of power may be incomplete"
    );
    assert!(!proven([(9, Some(true)), (4, Some(true))]));
    let marked = |records, acknowledged: u64| {
        let mut seen = two_copies(records);
        seen[0].copies[1].acknowledged = acknowledged;
        decide_recovery(&seen, None).gap.map(|gap| gap.reason)
    };
    assert_eq!(
        marked([(9, Some(false)), (9, Some(false))], 9),
        None,
        "only unacknowledged records are damaged"
    );
    assert!(
        marked([(9, Some(false)), (9, Some(false))], 10).is_some(),
        "the last acknowledged record is damaged in both copies"
    );
    let reason = marked([(7, None), (7, None)], 10).unwrap();
    assert!(reason.contains("/0/log ends before record 9"), "{reason}");
    assert_eq!(marked([(7, None), (10, None)], 10), None, "one copy is complete");
    let mut restored = two_copies([(7, None), (0, Some(false))]);
    (restored[0].copies[1].epoch, restored[0].copies[1].acknowledged) = (None, 10);
    let reason = decide_recovery(&restored, None).gap.unwrap().reason;
    assert!(reason.contains("/0/log ends before record 9"), "the mark has no copy beside it: {reason}");
    let decision = decide_recovery(&two_copies([(7, None), (3, None)]), None);
    assert_eq!(decision.sources, [CopyPlace { directory: 0, copy: 0 }]);
    let mut one = two_copies([(9, Some(false)), (9, None)]);
    one[0].copies.truncate(1);
    let gap = decide_recovery(&one, None).gap.unwrap();
    assert!(gap.reason.contains("/0/log is corrupt at record 9 (byte 9): bad"), "{}", gap.reason);
}

#[test]
fn single_directory_of_two_waits_for_the_other() {
    let mut fixture = Fixture::of(2);
    fixture.live(&[0, 1], &[1]);
    let decision = decide_recovery(&fixture.see(&[0]), None);
    let gap = decision.gap.unwrap();
    assert!(gap.reason.contains("data directory /1 is missing"), "{}", gap.reason);
    fixture.live(&[0], &[1, 2]);
    let decision = decide_recovery(&fixture.see(&[0, 1]), None);
    assert!(decision.gap.is_none() && decision.is_over(&gap));
    assert_eq!(decision.carried(Some(&gap)), None);
    fixture.live(&[1], &[2]);
    let gap = decide_recovery(&fixture.see(&[0, 1]), None).gap.unwrap();
    assert!(gap.reason.contains("was used separately from the others") && gap.until_returned.is_empty());
}

/// A directory that was used alone, and at the next start does not answer or is damaged.
#[test]
fn unread_directory_is_awaited_and_damaged_one_not() {
    let mut fixture = Fixture::of(2);
    fixture.live(&[0, 1], &[1]);
    fixture.live(&[1], &[1]);
    let mut seen = fixture.see(&[0, 1]);
    let damaged = vec!["/1 cannot be listed".to_owned()];
    seen[1] = DirectoryScan { uuid: uuid(1), path: "/1".into(), damaged, ..DirectoryScan::default() };
    let unreadable = decide_recovery(&seen, None).gap.unwrap();
    assert!(unreadable.until_returned.is_empty(), "{unreadable:?}");
    seen[1].is_unread = true;
    let unread = decide_recovery(&seen, None).gap.unwrap();
    assert_eq!(unread.until_returned, [uuid(1).into_bytes()]);
    assert!(unread.reason.contains("/1 cannot be listed; restart"), "{}", unread.reason);
}

#[test]
fn directory_is_followed_after_hundreds_of_absent_starts() {
    for (all, rest) in [(2, vec![0]), (3, vec![0, 1])] {
        let mut fixture = Fixture::of(all);
        let every: Vec<usize> = (0..all).collect();
        fixture.live(&every, &[1]);
        (0..300).for_each(|_| fixture.live(&rest, &[1]));
        assert_eq!(
            decide_recovery(&fixture.see(&every), None).gap,
            None,
            "all {all} directories are present"
        );
        fixture.live(&every, &[1]);
        let lineage = decide_recovery(&fixture.see(&every), None).epoch.lineage.len();
        assert_eq!(lineage, LINEAGE_MAX, "old epochs must be forgotten");
    }
}

#[test]
fn hand_off_proves_only_its_own_epoch() {
    let mut fixture = Fixture::of(2);
    fixture.live(&[0, 1], &[1]);
    let all = fixture.see(&[0, 1]);
    let epoch = decide_recovery(&all, None).epoch.id;
    let hand_off = |epoch, frames| HandOff { epoch, frames, generation: 0 };
    assert_eq!(decide_recovery(&all, Some(&hand_off(epoch, 2))).gap, None);
    let gap = decide_recovery(&all, Some(&hand_off(epoch, 9))).gap.unwrap();
    assert!(gap.reason.contains("/0/log ends before record 8"), "{}", gap.reason);
    assert_eq!(
        decide_recovery(&all, Some(&hand_off(epoch + 1, 9))).gap,
        None,
        "the hand-off of another epoch must be ignored"
    );
}

/// The outgoing process had the log to itself, so an absent directory has nothing newer.
#[test]
fn hand_off_proves_the_log_without_an_absent_directory() {
    let mut fixture = Fixture::of(2);
    fixture.live(&[0, 1], &[1]);
    let one = fixture.see(&[0]);
    let decision = decide_recovery(&one, None);
    assert!(decision.gap.is_some());
    let hand_off = |epoch, frames| HandOff { epoch, frames, generation: decision.generation };
    assert_eq!(decide_recovery(&one, Some(&hand_off(decision.epoch.id, 2))).gap, None);
    assert!(
        decide_recovery(&one, Some(&hand_off(decision.epoch.id, 9))).gap.is_some(),
        "the copy has fewer records than the hand-off"
    );
    assert_eq!(
        decide_recovery(&one, Some(&hand_off(decision.epoch.id + 1, 2))).gap,
        decision.gap,
        "the hand-off of another epoch must be ignored"
    );
}

#[test]
fn majority_of_three_is_proof_and_one_is_not() {
    let mut fixture = Fixture::of(3);
    fixture.live(&[0, 1, 2], &[1]);
    assert!(decide_recovery(&fixture.see(&[0, 2]), None).gap.is_none());
    let decision = decide_recovery(&fixture.see(&[1]), None);
    let error = members_after(&decision.epoch, &[Member::new(uuid(1), "/1")]).unwrap_err();
    assert!(error.contains("only 1 of 3 data directories") && error.contains("bring back /0, /2"), "{error}");
    let replaced = [Member::new(uuid(1), "/1"), Member::new(uuid(7), "/2")];
    assert!(members_after(&decision.epoch, &replaced).is_ok(), "an empty directory is in its place");
}
