//! Copies of the metadata log to which a successor may append, in the same generation and epoch.
//! Pure: no I/O.
//!
//! The state must match the record of the outgoing process ([`HandOff`]): the same directories,
//! which all know the epoch, both copies with exactly these records, and no gap. Otherwise, and
//! after a crash, a new generation begins (`generation`), because data that is read may never have
//! reached the device.

use std::path::PathBuf;

use super::proof::{CopyPlace, CopySeen, DirectoryScan, HandOff, RecoveryDecision, copies_seen};
use crate::format::frame::{Encoder, Member};

/// File of a copy, and the position of its directory.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct ResumableCopy {
    pub(crate) directory: usize,
    pub(crate) path: PathBuf,
}

/// Copies to which a successor may append.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Resumable {
    /// In the order of the directories.
    pub(crate) copies: Vec<ResumableCopy>,
    /// Encoder positioned after the last frame of each copy.
    pub(crate) encoder: Encoder,
    /// Size of each copy in bytes.
    pub(crate) bytes: u64,
}

impl Resumable {
    /// Creates it from copies chosen by [`resumable_copies`], which are all like `seen`.
    pub(crate) fn new(copies: Vec<ResumableCopy>, seen: &CopySeen) -> Self {
        Self { copies, encoder: Encoder::after(seen.generation, seen.frames, seen.crc), bytes: seen.bytes }
    }
}

/// Returns the copies to which a start may append. Returns `None` if a generation has to begin.
pub(super) fn resumable_copies(
    present: &[DirectoryScan],
    decision: &RecoveryDecision,
    hand_off: Option<&HandOff>,
) -> Option<Vec<CopyPlace>> {
    let epoch = &decision.epoch;
    let hand_off = hand_off.filter(|it| (it.generation, it.epoch) == (decision.generation, epoch.id))?;
    let is_known =
        |it: &DirectoryScan| it.damaged.is_empty() && it.epochs.iter().any(|(_, known)| known.id == epoch.id);
    let here: Vec<Member> = present.iter().map(|it| Member::new(it.uuid, &it.path)).collect();
    let is_all = here == epoch.members && present.iter().all(is_known);
    let has_gap = decision.gap.is_some() || epoch.gap.is_some();
    let newest: Vec<_> =
        copies_seen(present).filter(|(_, copy)| copy.generation == decision.generation).collect();
    let (_, first) = newest.first()?;
    let ends_there =
        |copy: &CopySeen| (copy.frames, copy.bytes, copy.crc) == (hand_off.frames, first.bytes, first.crc);
    let is_whole = |copy: &CopySeen| copy.epoch == Some(epoch.id) && copy.torn.is_none() && ends_there(copy);
    let are_whole = newest.iter().all(|(_, copy)| is_whole(copy));
    let sorted = |mut holders: Vec<[u8; 16]>| {
        holders.sort_unstable();
        holders
    };
    let holders = newest.iter().map(|(place, _)| present[place.directory].uuid.into_bytes()).collect();
    let are_all = sorted(holders) == sorted(epoch.holders.clone());
    let fits = is_all && !has_gap && are_whole && are_all;
    fits.then(|| newest.into_iter().map(|(place, _)| place).collect())
}
