//! Hand-off of the metadata log to the successor that this process becomes.
//!
//! The outgoing process closes its log and says what is durable in every copy ([`HandOff`]). The successor appends to
//! these copies, in the same generation and epoch, if all is as it was told: the same directories, each of which knows the epoch,
//! both copies with exactly these records, and no gap. Otherwise, and after a crash, it begins a generation
//! (`generation`), because what it reads may never have reached the device.

use std::collections::BTreeSet;
use std::path::PathBuf;

use futures::future::join_all;
use serde::{Deserialize, Serialize};

use super::frame::{Encoder, Member};
use super::proof::{CopySeen, Judgement, Present};
use super::read::within;
use super::writer::{Copy, Writer};
use uniffle_io::{Lane, WriteOpen};

/// Hand-off record of the outgoing process: the log is closed and its `frames` records are durable in every copy. A successor
/// of another version reads it: fields are only added, with a default.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct HandOff {
    /// Id of the newest epoch.
    pub(super) epoch: u64,
    /// Acknowledged frames in it.
    pub(super) frames: u64,
    /// Generation of the files that hold them.
    pub(super) generation: u64,
}

/// Copies to which a successor may append.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Resumable {
    /// Directories and files, in the order of the directories.
    copies: Vec<(usize, PathBuf)>,
    /// The encoder behind the last frame of each copy.
    encoder: Encoder,
    /// Bytes of each copy.
    bytes: u64,
}

impl Resumable {
    /// Creates it for copies that [`resumable_copies`] has chosen, which are all like `seen`.
    pub(super) fn new(copies: Vec<(usize, PathBuf)>, seen: &CopySeen) -> Self {
        Self { copies, encoder: Encoder::after(seen.generation, seen.frames, seen.crc), bytes: seen.bytes }
    }
}

/// Returns the copies to which a start may append, by directory and copy. Returns none if a generation has to begin. Pure.
pub(super) fn resumable_copies(
    present: &[Present],
    judged: &Judgement,
    hand_off: Option<&HandOff>,
) -> Option<Vec<(usize, usize)>> {
    let epoch = &judged.epoch;
    let hand_off = hand_off.filter(|it| (it.generation, it.epoch) == (judged.generation, epoch.id))?;
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
        |copy: &CopySeen| (copy.frames, copy.bytes, copy.crc) == (hand_off.frames, first.bytes, first.crc);
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

impl Writer {
    /// Opens the copies that the process before handed off, to append to them. Returns false if a generation has to begin.
    pub(super) async fn resume(&mut self) -> bool {
        let Some(resumable) = self.resumable.take() else { return false };
        let directories: Vec<usize> = resumable.copies.iter().map(|(directory, _)| *directory).collect();
        let all: BTreeSet<usize> = (0..self.directories.len()).collect();
        // A disk that takes nothing any more has no part in the next generation.
        let is_the_same = self.places(&BTreeSet::new()) == directories && self.usable_now() == all;
        if self.is_blind || !is_the_same {
            return false;
        }
        let opened = resumable.copies.iter().map(|(directory, path)| {
            let how = WriteOpen { lane: Lane::Metadata, is_named: true, ..WriteOpen::default() };
            within(self.deadlines.name, self.directories[*directory].io.open_write(path, how))
        });
        let opened = join_all(opened.collect::<Vec<_>>()).await;
        let mut copies = Vec::new();
        for ((directory, path), file) in resumable.copies.iter().zip(opened) {
            match file {
                Ok(file) => {
                    let (directory, path) = (*directory, path.clone());
                    copies.push(Copy { directory, generation: self.generation, path, file });
                }
                Err(error) => {
                    self.blame(*directory, path, &error);
                    return false;
                }
            }
        }
        (self.encoder, self.end) = (resumable.encoder, resumable.bytes);
        self.opened(copies, all);
        tracing::debug!(generation = self.generation, "metadata log resumed");
        true
    }
}
