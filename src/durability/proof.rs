//! The rule of recovery: whether the directories that are present prove that no acknowledged record is missing.
//!
//! It is proven when
//! 1. no newer epoch can exist on a directory that is away: of one or two voters all are here, of more a majority, and
//!    no member that may go on by itself is absent ([`Member::may_go_alone`]). One that the process before vouches for
//!    counts as here (`vouch`);
//! 2. no directory that is here has gone on by itself: every epoch seen led to the newest one;
//! 3. of the newest generation one copy is whole. A record is acknowledged once it is on the device in every copy, so a
//!    whole one has all; its end may be torn (the last write before a loss of power) only if another copy is there, as
//!    at most one is damaged. Where both are, a mark beside one of them says what was acknowledged (`mark`).
//!
//! Why a majority and not one is enough for three and more: whatever is acknowledged is acknowledged under an epoch that a
//! majority knows ([`members_after`]). With two there is no majority without both, and one that is left goes on alone: then
//! every start with one of them is not proven. Pure: no I/O, no clock.

use std::cmp::Reverse;

use uuid::Uuid;

use super::frame::{Epoch, Gap, Member};
use super::vouch::Vouch;

/// What was read of a directory that is here.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Present {
    /// Its identity.
    pub uuid: Uuid,
    /// Where it is.
    pub path: String,
    /// What it says of epochs, with the generation in which it was written.
    pub epochs: Vec<(u64, Epoch)>,
    /// Its copies of the log.
    pub copies: Vec<CopySeen>,
    /// What of it should say something and cannot be read.
    pub damaged: Vec<String>,
    /// It does not answer: what it has is not known, and nothing is written there.
    pub is_unread: bool,
}

impl Present {
    /// Whether what it said is gone for good: it is written anew, and speaks then as if nothing had been.
    fn is_spoilt(&self) -> bool {
        self.epochs.is_empty() && !self.is_unread && !(self.damaged.is_empty() && self.copies.is_empty())
    }
}

/// A copy of the log.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CopySeen {
    /// Its file, for messages.
    pub path: String,
    /// Which number the file has.
    pub generation: u64,
    /// Id of its epoch; none when its beginning cannot be read.
    pub epoch: Option<u64>,
    /// Frames from the beginning that fit.
    pub frames: u64,
    /// The newest frame seen, and how many frames before it were written with it.
    pub newest: (u64, u64),
    /// So many frames are acknowledged, by the mark beside it.
    pub acknowledged: u64,
    /// Where it stops to fit; none when the file ends there.
    pub torn: Option<Torn>,
}

/// Where a copy stops to fit.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Torn {
    /// Bytes before it.
    pub at: u64,
    /// What is wrong there.
    pub why: String,
    /// Whether whole frames follow.
    pub frames_follow: bool,
}

/// What follows from what was read.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Judgement {
    /// The newest epoch that can be read; the default when there is none.
    pub epoch: Epoch,
    /// The highest generation seen.
    pub generation: u64,
    /// Copies to be read, by directory and copy: one when it is proven.
    pub sources: Vec<(usize, usize)>,
    /// Why it is not proven.
    pub gap: Option<Gap>,
    /// Nothing was ever written here.
    pub is_fresh: bool,
    /// Directories that are here and have not gone on by themselves.
    back: Vec<[u8; 16]>,
}

impl Judgement {
    /// Where an earlier version was the last.
    pub(super) fn of_earlier_version(epoch: Epoch, gap: Option<Gap>) -> Self {
        Self { epoch, generation: 0, sources: Vec::new(), gap, is_fresh: false, back: Vec::new() }
    }

    /// Whether what an earlier start found missing is here again.
    #[must_use]
    pub fn is_over(&self, gap: &Gap) -> bool {
        let all_are_back = gap.until_back.iter().all(|uuid| self.back.contains(uuid));
        self.gap.is_none() && !gap.until_back.is_empty() && all_are_back
    }

    /// What holds from now on of something that `earlier` starts knew.
    #[must_use]
    pub fn carried(&self, earlier: Option<&Gap>) -> Option<Gap> {
        let earlier = earlier.filter(|gap| !self.is_over(gap));
        match (earlier, &self.gap) {
            (None, now) => now.clone(),
            (Some(earlier), None) => Some(earlier.clone()),
            (Some(earlier), Some(_)) if earlier.until_back.is_empty() => Some(earlier.clone()),
            (Some(_), Some(now)) if now.until_back.is_empty() => Some(now.clone()),
            (Some(earlier), Some(now)) => {
                let mut both = now.clone();
                both.until_back.extend(&earlier.until_back);
                both.until_back.sort_unstable();
                both.until_back.dedup();
                Some(both)
            }
        }
    }
}

/// See the module.
#[must_use]
pub fn judge(present: &[Present], vouch: Option<&Vouch>) -> Judgement {
    let epochs = || present.iter().flat_map(|it| &it.epochs);
    let copies = || present.iter().flat_map(|it| &it.copies);
    let generation = epochs().map(|(generation, _)| *generation);
    let generation = generation.chain(copies().map(|copy| copy.generation)).max().unwrap_or(0);
    let is_fresh =
        present.iter().all(|it| it.epochs.is_empty() && it.copies.is_empty() && it.damaged.is_empty());
    let newest = epochs().max_by_key(|(generation, _)| *generation);
    let epoch = newest.map(|(_, epoch)| epoch.clone()).unwrap_or_else(Epoch::default);
    let back = present.iter().filter(|it| !it.epochs.is_empty()).map(|it| it.uuid.into_bytes()).collect();
    let mut judgement = Judgement { epoch, generation, sources: Vec::new(), gap: None, is_fresh, back };
    if is_fresh {
        return judgement;
    }
    let vouch = vouch.filter(|vouch| vouch.epoch == judgement.epoch.id);
    let promised = vouch.map_or(0, |vouch| vouch.frames);
    let whole = choose(present, &judgement.epoch, generation, promised);
    let separate = gone_separately(present, &judgement.epoch);
    let is_forked = separate.is_some();
    judgement.gap = separate.or_else(|| whole.as_ref().err().cloned()).map_or_else(
        || missing(present, &judgement.epoch, vouch),
        |reason| Some(Gap { reason, until_back: Vec::new() }),
    );
    judgement.sources = match whole {
        Ok(copy) if !is_forked => vec![copy],
        Ok(_) | Err(_) => everything(present),
    };
    judgement
}

/// The copy that has every acknowledged record, or what is wrong with all.
fn choose(
    present: &[Present],
    epoch: &Epoch,
    generation: u64,
    promised: u64,
) -> Result<(usize, usize), String> {
    let copies: Vec<(usize, usize, &CopySeen)> = places(present)
        .filter(|(_, _, copy)| copy.generation == generation && copy.epoch == Some(epoch.id))
        .collect();
    let newest = copies.iter().map(|(_, _, copy)| copy.newest).max().unwrap_or_default();
    // Also beside a copy that is gone, or an older one that was put in its place.
    let of_generation =
        |copy: &CopySeen| copy.generation == generation && copy.epoch.is_none_or(|it| it == epoch.id);
    let marked = places(present).filter(|(_, _, copy)| of_generation(copy));
    let acknowledged = marked.map(|(_, _, copy)| copy.acknowledged).max().unwrap_or(0).max(promised);
    let has_all = |copy: &CopySeen| {
        let reaches_the_last_write = copy.frames >= newest.0.saturating_sub(newest.1);
        let ends_well = match &copy.torn {
            None => true,
            Some(torn) => !torn.frames_follow && copies.len() > 1,
        };
        copy.frames >= acknowledged.max(1) && reaches_the_last_write && ends_well
    };
    let whole = copies.iter().filter(|(_, _, copy)| has_all(copy)).max_by_key(|(_, _, copy)| copy.frames);
    if let Some((directory, copy, _)) = whole {
        return Ok((*directory, *copy));
    }
    let all = places(present).filter(|(_, _, copy)| copy.generation == generation);
    let mut damage: Vec<String> = all.map(|(_, _, copy)| describe(copy, acknowledged)).collect();
    damage.extend(present.iter().flat_map(|it| it.damaged.iter().cloned()));
    if damage.is_empty() {
        damage.push("no copy of the metadata log is left".to_owned());
    }
    Err(format!("{}: unregister the shuffle or run its application again", damage.join("; ")))
}

fn describe(copy: &CopySeen, acknowledged: u64) -> String {
    match &copy.torn {
        Some(torn) => {
            format!("{} is damaged at record {} (byte {}): {}", copy.path, copy.frames, torn.at, torn.why)
        }
        None => {
            let last = copy.newest.0.max(acknowledged.saturating_sub(1));
            format!("{} ends before record {last}", copy.path)
        }
    }
}

fn places(present: &[Present]) -> impl Iterator<Item = (usize, usize, &CopySeen)> {
    let of = |(directory, it): (usize, &'_ Present)| (directory, it.copies.len());
    let places: Vec<_> = present.iter().enumerate().map(of).collect();
    places.into_iter().flat_map(move |(directory, copies)| {
        (0..copies).map(move |copy| (directory, copy, &present[directory].copies[copy]))
    })
}

/// Every directory's newest copies, the newest generation first.
fn everything(present: &[Present]) -> Vec<(usize, usize)> {
    let newest_of = |directory: usize| present[directory].copies.iter().map(|it| it.generation).max();
    let mut all: Vec<_> = places(present)
        .filter(|(directory, _, copy)| Some(copy.generation) == newest_of(*directory))
        .collect();
    all.sort_by_key(|(_, _, copy)| Reverse((copy.generation, copy.frames)));
    all.into_iter().map(|(directory, copy, _)| (directory, copy)).collect()
}

/// Two directories that went on without each other.
fn gone_separately(present: &[Present], newest: &Epoch) -> Option<String> {
    let strange = |it: &&Present| it.epochs.iter().any(|(_, epoch)| !newest.follows(epoch));
    let strange = present.iter().find(strange)?;
    Some(format!(
        "data directory {} was used without the others since they were together: unregister the shuffle or run its \
         application again",
        strange.path
    ))
}

/// Whose absence leaves open what else was acknowledged.
fn missing(present: &[Present], epoch: &Epoch, vouch: Option<&Vouch>) -> Option<Gap> {
    let speaks = |member: &&&Member| {
        let is_vouched_for = vouch.is_some_and(|vouch| vouch.is_for(member.uuid()));
        is_vouched_for || present.iter().any(|it| it.uuid == member.uuid() && !it.epochs.is_empty())
    };
    let voters = epoch.voters();
    let votes = voters.iter().filter(speaks).count();
    let alone = epoch.members.iter().find(|member| member.may_go_alone && !speaks(&member));
    let needed = if voters.len() <= 2 { voters.len() } else { voters.len() / 2 + 1 };
    let absent: Vec<&&Member> = voters.iter().filter(|member| !speaks(member)).collect();
    let first = match (votes < needed, alone) {
        (false, None) => return None,
        (_, Some(alone)) => alone,
        (true, None) => absent.first()?,
    };
    let path = &first.path;
    let reason = match present.iter().find(|it| it.uuid == first.uuid()) {
        Some(it) if it.is_unread => format!("{}: start again when it can be read", it.damaged.join("; ")),
        Some(_) => format!(
            "the list of data directories in {path} cannot be read: unregister the shuffle or run its application again"
        ),
        None => format!(
            "data directory {path} is missing, which may have newer metadata: bring it back and start again, or put an \
             empty directory in its place for good"
        ),
    };
    let silent: Vec<Uuid> = absent.iter().map(|it| it.uuid()).chain(alone.map(Member::uuid)).collect();
    let is_for_good = present.iter().any(|it| it.is_spoilt() && silent.contains(&it.uuid));
    let until_back = if is_for_good { Vec::new() } else { silent.iter().map(|it| it.into_bytes()).collect() };
    Some(Gap { reason, until_back })
}

/// The members of an epoch that begins on `usable` directories after `epoch`.
///
/// # Errors
/// Too few of the voters are usable for anything to be acknowledged, in words.
pub fn members_after(epoch: &Epoch, usable: &[(Uuid, String)]) -> Result<Vec<Member>, String> {
    let is_usable = |member: &Member| usable.iter().any(|(uuid, _)| *uuid == member.uuid());
    let is_replaced =
        |member: &Member| !is_usable(member) && usable.iter().any(|(_, path)| *path == member.path);
    let voters = epoch.voters();
    let counted = voters.iter().filter(|it| is_usable(it) || is_replaced(it)).count();
    if voters.len() > 2 && counted <= voters.len() / 2 {
        let missing: Vec<&str> =
            voters.iter().filter(|it| !is_usable(it)).map(|member| member.path.as_str()).collect();
        return Err(format!(
            "of {} data directories only {counted} can be written, which is no majority: bring back {}, or put empty \
             directories in their places for good",
            voters.len(),
            missing.join(", ")
        ));
    }
    let mut members: Vec<Member> = usable.iter().map(|(uuid, path)| Member::new(*uuid, path)).collect();
    // A majority without them: what they alone say counts for nothing any more.
    let without_absent = voters.len() > 2 && usable.len() > 2;
    for member in epoch.members.iter().filter(|member| !is_usable(member)) {
        let mut away = member.clone();
        away.may_go_alone |= member.votes && voters.len() <= 2;
        away.votes &= !without_absent || away.may_go_alone;
        if is_replaced(member) {
            (away.votes, away.may_go_alone) = (false, false);
        }
        members.push(away);
    }
    Ok(members)
}

#[cfg(test)]
mod tests {
    use std::collections::{BTreeMap, BTreeSet};

    use proptest::prelude::*;

    use super::super::frame::{LINEAGE_AWAY_MAX, LINEAGE_MAX};
    use super::*;

    /// Directories over several lives, each of which sees some of them.
    #[derive(Debug, Default)]
    struct World {
        directories: Vec<Directory>,
        /// All that was ever acknowledged, by shuffle.
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

    /// What a log says.
    #[derive(Debug, Clone, Default)]
    struct Log {
        records: BTreeMap<u64, BTreeSet<u64>>,
        incomplete: BTreeMap<u64, Gap>,
    }

    fn uuid(directory: usize) -> Uuid {
        Uuid::from_u128(directory as u128 + 1)
    }

    impl World {
        fn of(directories: usize) -> Self {
            Self { directories: vec![Directory::default(); directories], ..Self::default() }
        }

        fn see(&self, here: &[usize]) -> Vec<Present> {
            let seen = here.iter().map(|at| {
                let directory = &self.directories[*at];
                let copies = directory.copies.iter().map(|copy| {
                    let frames = copy.log.records.values().map(|it| it.len() as u64).sum::<u64>();
                    CopySeen {
                        path: format!("/{at}/log"),
                        generation: copy.generation,
                        epoch: Some(copy.epoch.id),
                        frames: frames + 1,
                        newest: (frames, 0),
                        acknowledged: frames + 1,
                        torn: None,
                    }
                });
                let heads = directory.copies.iter().map(|copy| (copy.generation, copy.epoch.clone()));
                Present {
                    uuid: uuid(*at),
                    path: format!("/{at}"),
                    epochs: directory.list.iter().cloned().chain(heads).collect(),
                    copies: copies.collect(),
                    ..Present::default()
                }
            });
            seen.collect()
        }

        /// One life on the directories `here`, in which every one of `shuffles` reports once if that is acknowledged.
        fn live(&mut self, here: &[usize], shuffles: &[u64]) {
            let seen = self.see(here);
            let judged = judge(&seen, None);
            if judged.is_fresh && self.next_id > 0 {
                // Directories that have never met the others say nothing of them.
                return;
            }
            let mut log = Log::default();
            for (at, copy) in &judged.sources {
                let source = &self.directories[here[*at]].copies[*copy].log;
                for (shuffle, ids) in &source.records {
                    log.records.entry(*shuffle).or_default().extend(ids);
                }
                log.incomplete.extend(source.incomplete.clone());
            }
            for shuffle in log.records.keys() {
                match judged.carried(log.incomplete.get(shuffle)) {
                    Some(gap) => log.incomplete.insert(*shuffle, gap),
                    None => log.incomplete.remove(shuffle),
                };
            }
            let gap = judged.carried(judged.epoch.gap.as_ref());
            for (shuffle, ids) in &self.acknowledged {
                // Neither refused as incomplete, nor, being unknown, for the gap: then it has to be all there.
                let is_refused = match log.records.contains_key(shuffle) {
                    true => log.incomplete.contains_key(shuffle),
                    false => gap.is_some(),
                };
                let found = log.records.get(shuffle).cloned().unwrap_or_default();
                assert!(is_refused || found.is_superset(ids), "shuffle {shuffle} on {here:?}: {seen:#?}");
            }
            let usable: Vec<_> = here.iter().map(|at| (uuid(*at), format!("/{at}"))).collect();
            let Ok(members) = members_after(&judged.epoch, &usable) else { return };
            self.next_id += 1;
            let remembered = if members.len() == usable.len() { LINEAGE_MAX } else { LINEAGE_AWAY_MAX };
            let epoch = Epoch { members, gap, ..judged.epoch.next(self.next_id, remembered) };
            for (shuffle, id) in shuffles.iter().zip(self.next_id * 1000..) {
                let promised = self.acknowledged.entry(*shuffle).or_default();
                if !log.records.contains_key(shuffle) {
                    // It is registered anew: what it said before, if it did, is promised no more.
                    promised.clear();
                }
                promised.insert(id);
                log.records.entry(*shuffle).or_default().insert(id);
            }
            let generation = judged.generation + 1;
            for at in here {
                self.directories[*at] =
                    Directory { list: Some((generation, epoch.clone())), copies: Vec::new() };
            }
            for at in [here[0], here[1 % here.len()]] {
                let copy = Copied { generation, epoch: epoch.clone(), log: log.clone() };
                self.directories[at].copies.push(copy);
            }
        }
    }

    /// Lives with some of so many directories, in any order.
    fn lives(count: usize) -> impl Strategy<Value = Vec<(Vec<usize>, Vec<u64>)>> {
        let all: Vec<usize> = (0..count).collect();
        let some = prop::sample::subsequence(all, 1..=count).prop_shuffle();
        prop::collection::vec((some, prop::collection::vec(0u64..4, 0..3)), 1..12)
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(2000))]

        /// Whichever directories are away in turn: what is not refused is complete.
        #[test]
        fn what_is_proven_is_complete_whichever_directories_are_away(lives in (1usize..=5).prop_flat_map(lives)) {
            let mut world = World::of(5);
            for (here, shuffles) in lives {
                world.live(&here, &shuffles);
            }
        }
    }

    fn two_copies(records: [(u64, Option<bool>); 2]) -> Vec<Present> {
        let epoch = Epoch { id: 1, members: vec![Member::new(uuid(0), "/0")], ..Epoch::default() };
        let copies = records.map(|(frames, torn)| CopySeen {
            path: "/0/log".into(),
            generation: 3,
            epoch: Some(1),
            frames,
            newest: (frames.max(1) - 1, 0),
            acknowledged: 0,
            torn: torn.map(|frames_follow| Torn { at: 9, why: "bad".into(), frames_follow }),
        });
        let epochs = vec![(3, epoch)];
        vec![Present {
            uuid: uuid(0),
            path: "/0".into(),
            epochs,
            copies: copies.to_vec(),
            ..Present::default()
        }]
    }

    #[test]
    fn one_damaged_copy_is_made_good_by_the_other_and_two_are_not() {
        let proven = |records| judge(&two_copies(records), None).gap.is_none();
        assert!(proven([(9, None), (9, None)]));
        assert!(
            proven([(9, None), (4, Some(true))]) && proven([(9, None), (0, Some(true))]),
            "in the middle"
        );
        assert!(proven([(9, None), (3, None)]), "cut short");
        assert!(proven([(9, Some(false)), (9, Some(false))]), "the last write before a loss of power");
        assert!(!proven([(9, Some(true)), (4, Some(true))]), "both");
        let marked = |records, acknowledged: u64| {
            let mut seen = two_copies(records);
            seen[0].copies[1].acknowledged = acknowledged;
            judge(&seen, None).gap.map(|gap| gap.reason)
        };
        assert_eq!(marked([(9, Some(false)), (9, Some(false))], 9), None, "what was not acknowledged");
        assert!(
            marked([(9, Some(false)), (9, Some(false))], 10).is_some(),
            "the last record of both is damaged"
        );
        let reason = marked([(7, None), (7, None)], 10).unwrap();
        assert!(reason.contains("/0/log ends before record 9"), "cut alike: {reason}");
        assert_eq!(marked([(7, None), (10, None)], 10), None, "one is whole");
        let mut restored = two_copies([(7, None), (0, Some(false))]);
        (restored[0].copies[1].epoch, restored[0].copies[1].acknowledged) = (None, 10);
        let reason = judge(&restored, None).gap.unwrap().reason;
        assert!(reason.contains("/0/log ends before record 9"), "a mark beside no copy: {reason}");
        let judged = judge(&two_copies([(7, None), (3, None)]), None);
        assert_eq!(judged.sources, [(0, 0)]);
        let mut one = two_copies([(9, Some(false)), (9, None)]);
        one[0].copies.truncate(1);
        let gap = judge(&one, None).gap.unwrap();
        assert!(gap.reason.contains("/0/log is damaged at record 9 (byte 9): bad"), "{}", gap.reason);
    }

    #[test]
    fn a_lone_directory_of_two_is_not_believed_until_the_other_is_back() {
        let mut world = World::of(2);
        world.live(&[0, 1], &[1]);
        let judged = judge(&world.see(&[0]), None);
        let gap = judged.gap.unwrap();
        assert!(gap.reason.contains("data directory /1 is missing"), "{}", gap.reason);
        world.live(&[0], &[1, 2]);
        let judged = judge(&world.see(&[0, 1]), None);
        assert!(judged.gap.is_none() && judged.is_over(&gap));
        assert_eq!(judged.carried(Some(&gap)), None);
        world.live(&[1], &[2]);
        let gap = judge(&world.see(&[0, 1]), None).gap.unwrap();
        assert!(gap.reason.contains("was used without the others") && gap.until_back.is_empty());
    }

    /// A directory that went on alone, and cannot be read at the next start.
    #[test]
    fn what_cannot_be_read_is_awaited_and_what_is_damaged_is_gone_for_good() {
        let mut world = World::of(2);
        world.live(&[0, 1], &[1]);
        world.live(&[1], &[1]);
        let mut seen = world.see(&[0, 1]);
        let damaged = vec!["/1 cannot be listed".to_owned()];
        seen[1] = Present { uuid: uuid(1), path: "/1".into(), damaged, ..Present::default() };
        let spoilt = judge(&seen, None).gap.unwrap();
        assert!(spoilt.until_back.is_empty(), "{spoilt:?}");
        seen[1].is_unread = true;
        let unread = judge(&seen, None).gap.unwrap();
        assert_eq!(unread.until_back, [uuid(1).into_bytes()]);
        assert!(unread.reason.contains("/1 cannot be listed: start again"), "{}", unread.reason);
    }

    #[test]
    fn a_directory_that_was_away_for_hundreds_of_starts_is_still_followed() {
        for (all, rest) in [(2, vec![0]), (3, vec![0, 1])] {
            let mut world = World::of(all);
            let every: Vec<usize> = (0..all).collect();
            world.live(&every, &[1]);
            (0..300).for_each(|_| world.live(&rest, &[1]));
            assert_eq!(judge(&world.see(&every), None).gap, None, "of {all}");
            world.live(&every, &[1]);
            let lineage = judge(&world.see(&every), None).epoch.lineage.len();
            assert_eq!(lineage, LINEAGE_MAX, "what nobody asks for is forgotten");
        }
    }

    /// The process before holds the directory that is away, and says that nothing newer is there.
    #[test]
    fn d5_the_word_of_the_process_before_is_proof_of_its_own_epoch_and_of_no_other() {
        let mut world = World::of(2);
        world.live(&[0, 1], &[1]);
        let said = |world: &World, without: usize| {
            let epoch = judge(&world.see(&[0]), None).epoch.id;
            Vouch { epoch, frames: 2, without: vec![uuid(without).into_bytes()] }
        };
        let vouch = said(&world, 1);
        assert!(judge(&world.see(&[0]), None).gap.is_some());
        assert_eq!(judge(&world.see(&[0]), Some(&vouch)).gap, None);
        assert!(judge(&world.see(&[0]), Some(&said(&world, 2))).gap.is_some(), "of another directory");
        let more = Vouch { frames: 9, ..vouch.clone() };
        let gap = judge(&world.see(&[0]), Some(&more)).gap.unwrap();
        assert!(gap.reason.contains("/0/log ends before record 8"), "{}", gap.reason);
        // A start has followed: what was said before it counts for nothing.
        world.live(&[0], &[1]);
        assert!(judge(&world.see(&[0]), Some(&vouch)).gap.is_some());
    }

    #[test]
    fn of_three_a_majority_is_proof_and_one_acknowledges_nothing() {
        let mut world = World::of(3);
        world.live(&[0, 1, 2], &[1]);
        assert!(judge(&world.see(&[0, 2]), None).gap.is_none());
        let judged = judge(&world.see(&[1]), None);
        let error = members_after(&judged.epoch, &[(uuid(1), "/1".into())]).unwrap_err();
        assert!(
            error.contains("of 3 data directories only 1") && error.contains("bring back /0, /2"),
            "{error}"
        );
        let replaced = [(uuid(1), "/1".to_owned()), (uuid(7), "/2".to_owned())];
        assert!(members_after(&judged.epoch, &replaced).is_ok(), "an empty directory in its place");
    }
}
