//! The copies of the log that a process has left whole, to which its successor may append (`go_on`). Pure: no I/O.
//!
//! A start after a crash may not: what it reads may never have reached the device, which only a generation of its own has. So it
//! takes the word of a process that has ended its log and writes nothing more ([`Vouch`]), and that all is as it says: the
//! same directories, each of which knows the epoch, both copies with exactly so many records, and nothing that this start has to
//! say otherwise.

use std::path::PathBuf;

use super::frame::{Encoder, Member};
use super::proof::{CopySeen, Judgement, Present};
use super::vouch::Vouch;

/// Copies that can be appended to.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Left {
    /// Directories and files, in the order of the directories.
    pub(super) copies: Vec<(usize, PathBuf)>,
    /// As they are at their end, each of so many bytes.
    pub(super) encoder: Encoder,
    pub(super) bytes: u64,
}

impl Left {
    /// Of copies that [`left_whole`] has chosen.
    pub(super) fn of(copies: Vec<(usize, PathBuf)>, seen: &CopySeen) -> Self {
        Self { copies, encoder: Encoder::after(seen.generation, seen.frames, seen.crc), bytes: seen.bytes }
    }
}

/// The copies that a start may append to, by directory and copy, by the word of the process before; none if a generation has to begin.
pub(super) fn left_whole(
    present: &[Present],
    judged: &Judgement,
    vouch: Option<&Vouch>,
) -> Option<Vec<(usize, usize)>> {
    let epoch = &judged.epoch;
    let vouch =
        vouch.filter(|it| it.is_of_all() && (it.generation, it.epoch) == (judged.generation, epoch.id))?;
    let is_known =
        |it: &Present| it.damaged.is_empty() && it.epochs.iter().any(|(_, known)| known.id == epoch.id);
    let here: Vec<Member> = present.iter().map(|it| Member::new(it.uuid, &it.path)).collect();
    let is_all = here == epoch.members && present.iter().all(is_known);
    let has_gap = judged.gap.is_some() || epoch.gap.is_some();
    let all = present.iter().enumerate().flat_map(|(directory, it)| {
        it.copies.iter().enumerate().map(move |(number, copy)| (directory, number, copy))
    });
    let newest: Vec<_> = all.filter(|(_, _, copy)| copy.generation == judged.generation).collect();
    let (_, _, first) = newest.first()?;
    let ends_there =
        |copy: &CopySeen| (copy.frames, copy.bytes, copy.crc) == (vouch.frames, first.bytes, first.crc);
    let is_whole = |copy: &CopySeen| copy.epoch == Some(epoch.id) && copy.torn.is_none() && ends_there(copy);
    let are_whole = newest.iter().all(|(_, _, copy)| is_whole(copy));
    let sorted = |mut holders: Vec<[u8; 16]>| {
        holders.sort_unstable();
        holders
    };
    let holders = newest.iter().map(|(directory, ..)| present[*directory].uuid.into_bytes()).collect();
    let are_all = sorted(holders) == sorted(epoch.holders.clone());
    let fits = is_all && !has_gap && are_whole && are_all;
    fits.then(|| newest.into_iter().map(|(directory, number, _)| (directory, number)).collect())
}
