//! The rule of recovery: whether the present directories prove that no acknowledged record is
//! missing.
//!
//! It is proven if
//! 1. no newer epoch can exist on an absent directory: of one or two voters all are present, of
//!    more a majority, and no member that may recover alone is absent
//!    ([`Member::may_recover_alone`]). A successor that was handed the newest epoch knows this
//!    anyway ([`HandOff`]);
//! 2. no present directory was used alone: every epoch seen is a predecessor of the newest one;
//! 3. one copy of the newest generation is whole. A record is acknowledged once it is on the device
//!    in every copy, so a whole copy has all of them. Its end may be torn (the last write before a
//!    loss of power) only if another copy is present, because at most one is damaged. If both are,
//!    a mark beside one of them shows what was acknowledged (`mark`).
//!
//! A majority suffices for three and more voters: every record is acknowledged under an epoch that
//! a majority knows ([`members_after`]). With two voters there is no majority without both. The
//! remaining one continues alone, and later starts with only one of them are not proven. Pure: no
//! I/O, no clock.

use std::cmp::Reverse;

use serde::{Deserialize, Serialize};
use uuid::Uuid;

use crate::format::frame::{Epoch, Gap, Member};

/// Hand-off record of the outgoing process: the log is closed and its `frames` records are durable
/// in every copy. Successors of other versions read it, so fields are only added, with a default.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct HandOff {
    /// Id of the newest epoch.
    pub(crate) epoch: u64,
    /// Number of acknowledged frames in the files of the newest generation.
    pub(crate) frames: u64,
    /// The newest generation.
    pub(crate) generation: u64,
}

/// Metadata read from a present directory.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct DirectoryScan {
    /// Identity of the directory.
    pub uuid: Uuid,
    /// Path of the directory.
    pub path: String,
    /// Epochs that it knows, with the generation in which they were written.
    pub epochs: Vec<(u64, Epoch)>,
    /// Copies of the log in it.
    pub copies: Vec<CopySeen>,
    /// Descriptions of its damaged metadata.
    pub damaged: Vec<String>,
    /// True if it does not answer. Its content is unknown, and nothing is written there.
    pub is_unread: bool,
}

impl DirectoryScan {
    /// Returns whether its metadata is lost permanently. It is then written anew, as if it had been
    /// empty.
    fn is_unreadable(&self) -> bool {
        self.epochs.is_empty() && !self.is_unread && !(self.damaged.is_empty() && self.copies.is_empty())
    }
}

/// A copy of the log.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CopySeen {
    /// Path of the file, for messages.
    pub path: String,
    /// Generation in the file's name.
    pub generation: u64,
    /// Id of its epoch, or `None` if its beginning cannot be read.
    pub epoch: Option<u64>,
    /// Number of valid frames from the beginning.
    pub frames: u64,
    /// Number of bytes of these frames.
    pub bytes: u64,
    /// Checksum of the last of these frames.
    pub crc: u32,
    /// Sequence of the newest frame, and the number of frames before it that were written with it.
    pub newest: (u64, u64),
    /// Number of acknowledged frames according to the mark beside it.
    pub acknowledged: u64,
    /// Position where it stops being valid, or `None` if the file ends there.
    pub torn: Option<Torn>,
}

/// Position of a copy in a survey: its directory, and its number there.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct CopyPlace {
    /// Position of the directory.
    pub directory: usize,
    /// Position of the copy in the directory's [`DirectoryScan::copies`].
    pub copy: usize,
}

/// Position where a copy stops being valid.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Torn {
    /// Number of bytes before it.
    pub at: u64,
    /// Description of the damage.
    pub why: String,
    /// True if whole frames follow.
    pub frames_follow: bool,
}

/// Recovery decision derived from the directories.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RecoveryDecision {
    /// The newest readable epoch, or the default if there is none.
    pub epoch: Epoch,
    /// The highest generation seen.
    pub generation: u64,
    /// Copies to read. Exactly one if it is proven, and none if it is fresh.
    pub sources: Vec<CopyPlace>,
    /// Reason why it is not proven.
    pub gap: Option<Gap>,
    /// True if nothing was ever written here.
    pub is_fresh: bool,
    /// Directories that are present and were not used alone.
    returned: Vec<[u8; 16]>,
}

impl RecoveryDecision {
    /// Returns whether the directories that an earlier start missed have returned.
    #[must_use]
    pub fn is_over(&self, gap: &Gap) -> bool {
        let all_have_returned = gap.until_returned.iter().all(|uuid| self.returned.contains(uuid));
        self.gap.is_none() && !gap.until_returned.is_empty() && all_have_returned
    }

    /// Returns the gap that applies from now on, given one of `earlier` starts.
    #[must_use]
    pub fn carried(&self, earlier: Option<&Gap>) -> Option<Gap> {
        let earlier = earlier.filter(|gap| !self.is_over(gap));
        match (earlier, &self.gap) {
            (None, now) => now.clone(),
            (Some(earlier), None) => Some(earlier.clone()),
            (Some(earlier), Some(_)) if earlier.until_returned.is_empty() => Some(earlier.clone()),
            (Some(_), Some(now)) if now.until_returned.is_empty() => Some(now.clone()),
            (Some(earlier), Some(now)) => {
                let mut both = now.clone();
                both.until_returned.extend(&earlier.until_returned);
                both.until_returned.sort_unstable();
                both.until_returned.dedup();
                Some(both)
            }
        }
    }
}

/// The log in an object store, which may lag behind the directories.
#[derive(Debug, Clone, Copy)]
pub struct StoreSeen<'a> {
    /// The newest epoch in the store.
    pub epoch: &'a Epoch,
    /// Reason why its records may be missing.
    pub gap: Option<&'a str>,
}

impl RecoveryDecision {
    /// Returns whether the log in the store is needed in addition to these directories. It is if
    /// they prove nothing alone, or if other directories continued with the store.
    #[must_use]
    pub fn needs(&self, store: StoreSeen<'_>) -> bool {
        self.is_fresh || self.gap.is_some() || !self.epoch.follows(store.epoch)
    }

    /// Returns the decision with the state of the store added. Empty directories take over what the
    /// store proves. Directories that do not know the store's newest epoch were left behind by
    /// others. Those others may have newer metadata if they have registered shuffles
    /// (`has_strangers`), or if records of them are missing in the store.
    #[must_use]
    pub fn with_store(mut self, store: StoreSeen<'_>, has_strangers: bool) -> Self {
        // A store that has lost its epoch does not tell whether there were others.
        let may_lack_records = store.gap.is_some() && store.epoch.id != 0;
        let gap = if self.is_fresh {
            store.gap.map(str::to_owned)
        } else if self.epoch.follows(store.epoch) || !(has_strangers || may_lack_records) {
            None
        } else {
            Some(
                "other data directories of this worker continued the log in the object store and may have newer metadata; \
                 unregister the shuffle or rerun its application"
                    .to_owned(),
            )
        };
        if self.gap.is_none() {
            self.gap = gap.map(|reason| Gap { reason, until_returned: Vec::new() });
        }
        self
    }
}

/// Returns the recovery decision for the present directories and the hand-off record, by the rule
/// above.
#[must_use]
pub fn decide_recovery(present: &[DirectoryScan], hand_off: Option<&HandOff>) -> RecoveryDecision {
    let epochs = || present.iter().flat_map(|it| &it.epochs);
    let copies = || present.iter().flat_map(|it| &it.copies);
    let generation = epochs().map(|(generation, _)| *generation);
    let generation = generation.chain(copies().map(|copy| copy.generation)).max().unwrap_or(0);
    let is_fresh =
        present.iter().all(|it| it.epochs.is_empty() && it.copies.is_empty() && it.damaged.is_empty());
    let newest = epochs().max_by_key(|(generation, _)| *generation);
    let epoch = newest.map(|(_, epoch)| epoch.clone()).unwrap_or_else(Epoch::default);
    let returned = present.iter().filter(|it| !it.epochs.is_empty()).map(|it| it.uuid.into_bytes()).collect();
    let mut decision =
        RecoveryDecision { epoch, generation, sources: Vec::new(), gap: None, is_fresh, returned };
    if is_fresh {
        return decision;
    }
    let hand_off = hand_off.filter(|it| it.epoch == decision.epoch.id);
    let promised = hand_off.map_or(0, |it| it.frames);
    let whole = choose(present, &decision.epoch, generation, promised);
    let separate = separate_use(present, &decision.epoch);
    let is_forked = separate.is_some();
    decision.gap = separate.or_else(|| whole.as_ref().err().cloned()).map_or_else(
        || if hand_off.is_some() { None } else { missing(present, &decision.epoch) },
        |reason| Some(Gap { reason, until_returned: Vec::new() }),
    );
    decision.sources = match whole {
        Ok(copy) if !is_forked => vec![copy],
        Ok(_) | Err(_) => newest_copies(present),
    };
    decision
}

/// Returns the copy that has every acknowledged record, or a description of the damage of all
/// copies.
fn choose(
    present: &[DirectoryScan],
    epoch: &Epoch,
    generation: u64,
    promised: u64,
) -> Result<CopyPlace, String> {
    let copies: Vec<(CopyPlace, &CopySeen)> = copies_seen(present)
        .filter(|(_, copy)| copy.generation == generation && copy.epoch == Some(epoch.id))
        .collect();
    let newest = copies.iter().map(|(_, copy)| copy.newest).max().unwrap_or_default();
    // Marks also count if their copy is missing, or was replaced by an older one.
    let of_generation =
        |copy: &CopySeen| copy.generation == generation && copy.epoch.is_none_or(|it| it == epoch.id);
    let marked = copies_seen(present).filter(|(_, copy)| of_generation(copy));
    let acknowledged = marked.map(|(_, copy)| copy.acknowledged).max().unwrap_or(0).max(promised);
    let has_all = |copy: &CopySeen| {
        let reaches_the_last_write = copy.frames >= newest.0.saturating_sub(newest.1);
        let ends_well = match &copy.torn {
            None => true,
            Some(torn) => !torn.frames_follow && copies.len() > 1,
        };
        copy.frames >= acknowledged.max(1) && reaches_the_last_write && ends_well
    };
    let whole = copies.iter().filter(|(_, copy)| has_all(copy)).max_by_key(|(_, copy)| copy.frames);
    if let Some((place, _)) = whole {
        return Ok(*place);
    }
    let all = copies_seen(present).filter(|(_, copy)| copy.generation == generation);
    let mut damage: Vec<String> = all.map(|(_, copy)| describe(copy, acknowledged)).collect();
    damage.extend(present.iter().flat_map(|it| it.damaged.iter().cloned()));
    if damage.is_empty() {
        damage.push("no copy of the metadata log exists".to_owned());
    }
    Err(format!("{}; unregister the shuffle or rerun its application", damage.join("; ")))
}

fn describe(copy: &CopySeen, acknowledged: u64) -> String {
    match &copy.torn {
        Some(torn) => {
            format!("{} is corrupt at record {} (byte {}): {}", copy.path, copy.frames, torn.at, torn.why)
        }
        None => {
            let last = copy.newest.0.max(acknowledged.saturating_sub(1));
            format!("{} ends before record {last}", copy.path)
        }
    }
}

/// Iterates over all copies, with their places.
pub(super) fn copies_seen(present: &[DirectoryScan]) -> impl Iterator<Item = (CopyPlace, &CopySeen)> {
    present.iter().enumerate().flat_map(|(directory, it)| {
        it.copies.iter().enumerate().map(move |(copy, seen)| (CopyPlace { directory, copy }, seen))
    })
}

/// Returns every directory's newest copies, the newest generation first.
fn newest_copies(present: &[DirectoryScan]) -> Vec<CopyPlace> {
    let newest_of = |directory: usize| present[directory].copies.iter().map(|it| it.generation).max();
    let mut all: Vec<_> = copies_seen(present)
        .filter(|(place, copy)| Some(copy.generation) == newest_of(place.directory))
        .collect();
    all.sort_by_key(|(_, copy)| Reverse((copy.generation, copy.frames)));
    all.into_iter().map(|(place, _)| place).collect()
}

/// Returns a description if two directories were used separately.
fn separate_use(present: &[DirectoryScan], newest: &Epoch) -> Option<String> {
    let strange = |it: &&DirectoryScan| it.epochs.iter().any(|(_, epoch)| !newest.follows(epoch));
    let strange = present.iter().find(strange)?;
    Some(format!(
        "data directory {} was used separately from the others; unregister the shuffle or rerun its \
         application",
        strange.path
    ))
}

/// Returns a gap if the absence of a member leaves open which other records were acknowledged.
fn missing(present: &[DirectoryScan], epoch: &Epoch) -> Option<Gap> {
    let speaks =
        |member: &&&Member| present.iter().any(|it| it.uuid == member.uuid() && !it.epochs.is_empty());
    let voters = epoch.voters();
    let votes = voters.iter().filter(speaks).count();
    let alone = epoch.members.iter().find(|member| member.may_recover_alone && !speaks(&member));
    let needed = if voters.len() <= 2 { voters.len() } else { voters.len() / 2 + 1 };
    let absent: Vec<&&Member> = voters.iter().filter(|member| !speaks(member)).collect();
    let first = match (votes < needed, alone) {
        (false, None) => return None,
        (_, Some(alone)) => alone,
        (true, None) => absent.first()?,
    };
    let path = &first.path;
    let reason = match present.iter().find(|it| it.uuid == first.uuid()) {
        Some(it) if it.is_unread => format!("{}; restart when it is readable", it.damaged.join("; ")),
        Some(_) => format!(
            "cannot read the list of data directories in {path}; unregister the shuffle or rerun its \
             application"
        ),
        None if is_put_back(present, epoch, path) => format!(
            "data directory {path} is an earlier one, and its replacement (id {}), which may have newer \
             metadata, is missing; mount the replacement too, at its own path, and restart, or unregister \
             the shuffle or rerun its application",
            first.uuid()
        ),
        None => format!(
            "data directory {path} is missing and may have newer metadata; bring it back and restart, or \
             replace it permanently by an empty directory"
        ),
    };
    let silent: Vec<Uuid> = absent.iter().map(|it| it.uuid()).chain(alone.map(Member::uuid)).collect();
    let is_for_good = present.iter().any(|it| it.is_unreadable() && silent.contains(&it.uuid));
    let until_returned =
        if is_for_good { Vec::new() } else { silent.iter().map(|it| it.into_bytes()).collect() };
    Some(Gap { reason, until_returned })
}

/// Returns whether the path of an absent voter has another directory that was used before and is no
/// longer a voter. That directory was absent itself, was replaced, and has returned.
fn is_put_back(present: &[DirectoryScan], epoch: &Epoch, path: &str) -> bool {
    let votes = |it: &DirectoryScan| epoch.voters().iter().any(|member| member.uuid() == it.uuid);
    present.iter().any(|it| it.path == path && !it.epochs.is_empty() && !votes(it))
}

/// Returns the members of an epoch that begins on `usable` directories after `epoch`.
///
/// # Errors
/// A description if too few of the voters are usable or replaced to acknowledge anything.
pub fn members_after(epoch: &Epoch, usable: &[Member]) -> Result<Vec<Member>, String> {
    let is_usable = |member: &Member| usable.iter().any(|it| it.uuid() == member.uuid());
    let is_replaced = |member: &Member| !is_usable(member) && usable.iter().any(|it| it.path == member.path);
    let voters = epoch.voters();
    let counted = voters.iter().filter(|it| is_usable(it) || is_replaced(it)).count();
    if voters.len() > 2 && counted <= voters.len() / 2 {
        let missing: Vec<&str> =
            voters.iter().filter(|it| !is_usable(it)).map(|member| member.path.as_str()).collect();
        return Err(format!(
            "only {counted} of {} data directories are writable, which is no majority; bring back {}, or \
             replace them permanently by empty directories",
            voters.len(),
            missing.join(", ")
        ));
    }
    let mut members = usable.to_vec();
    // The majority excludes absent members. Their records alone are no longer valid.
    let without_absent = voters.len() > 2 && usable.len() > 2;
    for member in epoch.members.iter().filter(|member| !is_usable(member)) {
        let mut away = member.clone();
        away.may_recover_alone |= member.votes && voters.len() <= 2;
        away.votes &= !without_absent || away.may_recover_alone;
        if is_replaced(member) {
            (away.votes, away.may_recover_alone) = (false, false);
        }
        members.push(away);
    }
    Ok(members)
}

#[cfg(test)]
mod tests;
