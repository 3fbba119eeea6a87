//! Rebuilds the state of the store from the files of an earlier process, with the same bases.
//!
//! Extents in objects take precedence over the same ones on disks. Index groups of all disks are
//! merged. If a group or the data of an extent is missing, the stream keeps a hole of the same
//! length, so that all other offsets remain as promised to clients. If the end of a stream may be
//! missing (a disk is absent or does not answer, a sequence number is missing), new extents begin
//! after a gap.
//!
//! The caller determines which blocks are missing, because it knows the reports. Recovery writes no
//! file. It renames directories of earlier incarnations, and data logs whose content is in objects,
//! into the trash, and removes empty directories of applications, but nothing that missing state
//! may refer to.

use std::collections::{BTreeMap, HashMap, HashSet};
use std::ops::ControlFlow;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use futures::StreamExt;
use futures::stream;
use rand::RngExt as _;
use uuid::Uuid;

use super::scan::{DiskScan, FoundDirectory, FoundFile, LogReader};
use crate::clock::Instant;
use crate::log::{FoundLog, FoundShuffle, PresentIds, RecordReader};
use crate::metrics::clamped;
use crate::store::disk::core::DiskCore;
use crate::store::disk::directories::directory::LocalDisk;
use crate::store::disk::log_file::{Log, LogKind};
use crate::store::disk::shuffle::{DiskShuffle, RestoredStreams};
use crate::store::disk::store::LocalStore;
use crate::store::extents::extent::Extent;
use crate::store::extents::streams::{Partition, Partitions, SequencedExtent, sort_extents};
use crate::store::index::codec::{GroupEntry, IndexGroup};
use crate::store::recovered::{Stored, StoredShuffle, overlapping};
use crate::store::{LostExtent, Recovered, RecoveredShuffle, StoreError};
use uniffle_io::BLOCK_ALIGN;
use uniffle_wire::index::IndexRecord;
use uniffle_wire::types::{BlockId, PartitionId, ShuffleKey};

/// Size of the gap at the end of a stream whose end may be missing.
const TAIL_GAP_BYTES: u64 = 256 << 20;
/// Size of a range of numbers: incarnations, and the sequence numbers of a shuffle's index groups.
/// Unrelated to the epochs of the metadata log. Numbers are assigned in ascending order within a
/// range. If unknown ones may be in use, the next range begins. Sequence numbers have no gap within
/// a range unless an index group is missing.
const NUMBERS_PER_RANGE: u64 = 1 << 32;
/// Number of shuffles rebuilt concurrently.
const REBUILDS: usize = 8;
/// Maximum number of reasons stored as text per shuffle. Blocks are always counted.
const REASONS_MAX: usize = 64;

/// State of the disks according to the metadata log and the scan.
#[derive(Debug, Default)]
pub(super) struct Known {
    /// Directories that are missing and may have files.
    pub(super) absent: Vec<(Uuid, String)>,
    /// Number of earlier starts that may have missed shuffles.
    pub(super) blind_starts: u32,
    /// Reason why unknown shuffles may exist, if this start found it.
    pub(in crate::store) gap: Option<String>,
    /// Present directories of which a part could not be read.
    pub(in crate::store) unread: Vec<String>,
}

impl LocalStore {
    /// Rebuilds the shuffles found on the disks or in the log.
    pub(in crate::store) async fn recover(
        &self,
        scans: Vec<DiskScan>,
        found: FoundLog,
        records: RecordReader,
        mut stored: Stored,
    ) -> Recovered {
        let started = Instant::now();
        let core = &self.core;
        let FoundLog { mut shuffles, absent, gap, has_new_gap, blind_starts, next_incarnation } = found;
        if !self.has_disks() {
            // Only its objects show that a shuffle was registered whose record is missing.
            for (key, stored) in &stored.shuffles {
                let incarnation = stored.incarnation;
                let unlogged = || FoundShuffle { incarnation, incomplete: gap.clone(), is_moved: true };
                shuffles.entry(key.clone()).or_insert_with(unlogged);
            }
        }
        let scanned = core.disks.iter().zip(&scans);
        let unread =
            scanned.filter(|(_, scan)| scan.has_unread).map(|(disk, _)| disk.label.clone()).collect();
        let known = &Known { absent, blind_starts, gap: gap.filter(|_| has_new_gap), unread };
        let absent = known.absent.as_slice();
        let mut by_key: BTreeMap<ShuffleKey, FoundState> = BTreeMap::new();
        for (key, logged) in shuffles {
            by_key.entry(key).or_default().logged = Some(logged);
        }
        let mut highest_incarnation = next_incarnation.saturating_sub(1);
        let mut incomplete = !absent.is_empty() || known.gap.is_some();
        for (disk, scan) in core.disks.iter().zip(scans) {
            incomplete |= scan.has_unread;
            highest_incarnation = highest_incarnation.max(scan.highest_other);
            // While something is missing, unknown files may belong to it.
            disk.note_unread(scan.has_unread || !absent.is_empty() || known.gap.is_some());
            for path in scan.empty_apps {
                // An application that returns creates its directory again.
                let _ = disk.io.remove_dir(&path).await;
            }
            for directory in scan.directories {
                highest_incarnation = highest_incarnation.max(directory.incarnation);
                by_key.entry(directory.key.clone()).or_default().directories.push(directory);
            }
        }
        let first = next_number(Some(highest_incarnation), incomplete.then_some(known.blind_starts));
        // Two starts that do not see each other count from the same number. Their shuffles must not
        // be mistaken for each other.
        let random_offset = if incomplete { rand::rng().random_range(0..NUMBERS_PER_RANGE / 2) } else { 0 };
        let next = first.saturating_add(random_offset).max(stored.incarnations_from);
        self.next_incarnation.store(next, Ordering::Relaxed);
        let rebuilds = by_key.into_iter().map(|(key, found)| {
            let found = FoundState { stored: stored.shuffles.remove(&key), ..found };
            self.rebuild(key, found, known)
        });
        let mut recovered = Recovered { records, ..Recovered::default() };
        let mut rebuilds = stream::iter(rebuilds).buffered(REBUILDS);
        while let Some((shuffle, bytes, blocks)) = rebuilds.next().await {
            recovered.bytes += bytes;
            recovered.blocks += blocks;
            recovered.shuffles.push(shuffle);
        }
        core.found_ids.end();
        recovered.missing_disks = absent.iter().map(|(_, path)| path.clone()).collect();
        recovered.took = started.elapsed();
        recovered
    }

    async fn rebuild(
        &self,
        key: ShuffleKey,
        found: FoundState,
        known: &Known,
    ) -> (RecoveredShuffle, u64, u64) {
        let (core, FoundState { logged, directories, stored }) = (&self.core, found);
        let incarnation = match &logged {
            None => directories.iter().map(|found| found.incarnation).max().unwrap_or(0),
            Some(logged) => logged.incarnation,
        };
        let (present, others): (Vec<_>, Vec<_>) =
            directories.into_iter().partition(|found| found.incarnation == incarnation);
        // A later start may need directories whose shuffle is not known to have ended.
        let superseded = others.into_iter().filter(|_| known.gap.is_none() && known.absent.is_empty());
        for directory in superseded {
            if let Err(error) = directory.disk.discard(&directory.path).await {
                tracing::warn!(
                    disk = %directory.disk.label,
                    shuffle = %key,
                    %error,
                    "cannot delete an older incarnation of the shuffle"
                );
            }
        }
        let shuffle = Arc::new(DiskShuffle::new(key.clone(), incarnation, core.disks.len(), &core.extents));
        let mut rebuild = Rebuild::new(core, &shuffle, &present, known);
        rebuild.stored = stored.filter(|stored| stored.incarnation == incarnation);
        if logged.is_none() && rebuild.incomplete.is_none() {
            // A shuffle that is not in the log may still have been registered.
            rebuild.incomplete.clone_from(&known.gap);
        }
        for directory in &present {
            rebuild.read_indexes(directory).await;
        }
        rebuild.note_found(&present);
        if !known.unread.is_empty() || !known.absent.is_empty() {
            shuffle.set_out_of_reach();
        }
        let rebuilt = rebuild.finish(logged.unwrap_or_default()).await;
        self.shuffles.insert(key, shuffle);
        rebuilt
    }
}

/// State of a shuffle in the metadata log, on the disks and in the object store.
#[derive(Debug, Default)]
struct FoundState {
    logged: Option<FoundShuffle>,
    directories: Vec<FoundDirectory>,
    stored: Option<StoredShuffle>,
}

/// Name of a data log, as index groups refer to it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
struct DataLogName {
    disk: Uuid,
    number: u32,
}

/// A data log that extents refer to.
#[derive(Debug)]
struct FoundDataLog {
    disk: Arc<LocalDisk>,
    file: FoundFile,
    /// Set once an extent refers to it.
    log: Option<Arc<Log>>,
}

/// A shuffle that is being rebuilt.
struct Rebuild<'a> {
    core: &'a DiskCore,
    shuffle: &'a Arc<DiskShuffle>,
    known: &'a Known,
    sources: HashMap<DataLogName, FoundDataLog>,
    sequences: HashSet<u64>,
    /// The lowest file number, by disk, above all numbers that groups refer to.
    next_numbers: HashMap<Uuid, u32>,
    extents: HashMap<PartitionId, Vec<SequencedExtent>>,
    present: PresentIds,
    lost: Vec<LostExtent>,
    reasons: HashMap<String, Arc<str>>,
    /// Reason why part of the shuffle may be unknown.
    incomplete: Option<String>,
    /// Data of the shuffle in the object store.
    stored: Option<StoredShuffle>,
    /// Data logs with blocks at offsets where objects have different ones. They are not served, and
    /// their files stay.
    conflicting_logs: HashSet<DataLogName>,
}

impl<'a> Rebuild<'a> {
    fn new(
        core: &'a DiskCore,
        shuffle: &'a Arc<DiskShuffle>,
        directories: &[FoundDirectory],
        known: &'a Known,
    ) -> Self {
        let mut sources = HashMap::new();
        let mut incomplete =
            known.absent.first().map(|(_, path)| format!("data directory {path} is missing"));
        for found in directories {
            for file in found.files_of(LogKind::Data) {
                let name = DataLogName { disk: found.disk.uuid, number: file.number };
                sources.insert(name, FoundDataLog { disk: Arc::clone(&found.disk), file: *file, log: None });
            }
        }
        let unread = || known.unread.first().map(|path| format!("cannot read all files of {path}"));
        let gap = || known.gap.clone().filter(|_| !core.disks.is_empty());
        incomplete = incomplete.or_else(unread).or_else(gap);
        Self {
            core,
            shuffle,
            known,
            sources,
            sequences: HashSet::new(),
            next_numbers: HashMap::new(),
            extents: HashMap::new(),
            present: core.found_ids.of(&shuffle.key),
            lost: Vec::new(),
            reasons: HashMap::new(),
            incomplete,
            stored: None,
            conflicting_logs: HashSet::new(),
        }
    }

    /// Notes the files found on each disk. Groups may refer to files that were removed because
    /// their content is in objects. New files do not reuse such numbers: a later start would
    /// take their bytes for the removed ones.
    fn note_found(&self, directories: &[FoundDirectory]) {
        let next_numbers = |disk: &LocalDisk| self.next_numbers.get(&disk.uuid).copied();
        for found in directories {
            let next = found.next_number().max(next_numbers(&found.disk).unwrap_or(0));
            self.shuffle.found_on(&found.disk, next, found.bytes());
        }
        // The directory may have been removed with its last file.
        for disk in &self.core.disks {
            if let Some(next) = next_numbers(disk) {
                self.shuffle.found_on(disk, next, 0);
            }
        }
    }

    async fn read_indexes(&mut self, found: &FoundDirectory) {
        for file in found.files_of(LogKind::Index) {
            let path = self.shuffle.log_path(LogKind::Index, file.number);
            if let Err(error) = self.read_index(&found.disk, &path, file).await {
                self.failed(&found.disk, &path, &error);
            }
        }
    }

    async fn read_index(
        &mut self,
        disk: &Arc<LocalDisk>,
        path: &Path,
        file: &FoundFile,
    ) -> Result<(), StoreError> {
        let failed = |error| StoreError::io(disk.io.root().join(path), error);
        let mut reader = LogReader::open(self.core, disk, path, file.bytes).await.map_err(failed)?;
        let mut log = None;
        while let Some((offset, group)) = reader.next_group().await.map_err(failed)? {
            let is_own = group.header.incarnation == self.shuffle.incarnation;
            if !is_own || !self.sequences.insert(group.header.sequence) {
                continue;
            }
            let next_numbers = self.next_numbers.entry(group.header.disk).or_default();
            *next_numbers = (*next_numbers).max(group.header.file_number.saturating_add(1));
            let log = match &log {
                Some(log) => log,
                None => log.insert(adopt_log(self.core, self.shuffle, disk, LogKind::Index, file)?),
            };
            let slot = log.slot;
            self.take_group(&group, offset, slot)?;
        }
        log_damage(disk, path, &reader);
        Ok(())
    }

    fn take_group(&mut self, group: &IndexGroup, offset: u64, index_log: u16) -> Result<(), StoreError> {
        let source = DataLogName { disk: group.header.disk, number: group.header.file_number };
        for (entry, records) in &group.entries {
            let stored = self.stored.as_ref().and_then(|it| it.extents.get(&entry.partition));
            let place = entry.base..entry.base + entry.length;
            if let Some(copy) = stored.and_then(|extents| overlapping(extents, place)) {
                if !is_copy(copy, entry) && self.sources.contains_key(&source) {
                    self.conflicting_logs.insert(source);
                }
                continue;
            }
            let end = entry.data_offset + entry.length;
            let data_log = self.data_log(source, end, group.header.sequence)?;
            let page = u32::try_from(entry.data_offset / BLOCK_ALIGN as u64).ok();
            let extent = match data_log.zip(page) {
                Some((data_log, data_page)) => {
                    let ids = records.iter().map(|record| record.block_id.unsigned_abs());
                    self.present.add(entry.partition, &ids.collect::<Vec<_>>());
                    Extent {
                        base: entry.base,
                        length: entry.length,
                        index_offset: offset + entry.place.offset,
                        data_page,
                        blocks: entry.blocks,
                        records_crc: entry.place.crc,
                        data_log,
                        index_log,
                    }
                }
                None => {
                    let blocks =
                        records.iter().map(|it| (BlockId(it.block_id), it.length.unsigned_abs())).collect();
                    let reason = self.reason(source);
                    self.lost.push(LostExtent { partition: entry.partition, blocks, reason });
                    // The hole has no records. A block that is sent again has the same id, and with
                    // a record readers would take the hole for it.
                    Extent::gap(entry.base, entry.length)
                }
            };
            let extent = SequencedExtent { sequence: group.header.sequence, extent };
            self.extents.entry(entry.partition).or_default().push(extent);
        }
        Ok(())
    }

    /// Removes data logs whose content is entirely in objects, unless an index group that could not
    /// be read may refer to them.
    async fn remove_left_over(&self) {
        if self.stored.is_none() || self.incomplete.is_some() {
            return;
        }
        if !self.conflicting_logs.is_empty() {
            let (shuffle, files) = (&self.shuffle.key, self.conflicting_logs.len());
            tracing::warn!(
                %shuffle,
                files,
                "files have blocks that are not in the object store; keeping them"
            );
        }
        let unused = self
            .sources
            .iter()
            .filter(|(name, source)| source.log.is_none() && !self.conflicting_logs.contains(name));
        for (_, source) in unused {
            let adopted = adopt_log(self.core, self.shuffle, &source.disk, LogKind::Data, &source.file);
            let removed = match adopted {
                Ok(log) => self.core.remove_log(self.shuffle, &log).await,
                Err(error) => Err(error),
            };
            if let Err(error) = removed {
                tracing::warn!(shuffle = %self.shuffle.key, %error, "cannot delete an obsolete file");
            }
        }
    }

    /// Returns the slot of a data log with at least `end` bytes, to which the group `sequence`
    /// refers. Returns `None` if there is no such log.
    fn data_log(&mut self, name: DataLogName, end: u64, sequence: u64) -> Result<Option<u16>, StoreError> {
        let Some(found) = self.sources.get_mut(&name).filter(|found| end <= found.file.bytes) else {
            return Ok(None);
        };
        let log = match &found.log {
            Some(log) => log,
            None => {
                let log = adopt_log(self.core, self.shuffle, &found.disk, LogKind::Data, &found.file)?;
                found.log.insert(log)
            }
        };
        log.found_in_group(sequence);
        Ok(Some(log.slot))
    }

    /// Returns the reason why data cannot be read, as text.
    fn reason(&mut self, name: DataLogName) -> Arc<str> {
        let DataLogName { disk, number } = name;
        let place = self.core.disks.iter().find(|it| it.uuid == disk);
        let text = match (place, self.sources.contains_key(&name)) {
            (None, _) => match self.known.absent.iter().find(|(uuid, _)| *uuid == disk) {
                Some((_, path)) => format!("data directory {path} is missing"),
                None => format!("the data directory with id {disk} is missing"),
            },
            (Some(place), found) => {
                let path = place.io.root().join(self.shuffle.log_path(LogKind::Data, number));
                let what = if found { "is truncated" } else { "is missing" };
                format!("{} {what}", path.display())
            }
        };
        if let Some(reason) = self.reasons.get(&text) {
            return Arc::clone(reason);
        }
        if self.reasons.len() >= REASONS_MAX {
            return Arc::from("data files are missing");
        }
        let reason: Arc<str> = Arc::from(text.as_str());
        self.reasons.insert(text, Arc::clone(&reason));
        reason
    }

    fn failed(&mut self, disk: &LocalDisk, path: &Path, error: &StoreError) {
        tracing::error!(%error, "cannot read a file of the shuffle");
        disk.note_unread(true);
        self.shuffle.set_out_of_reach();
        let path = disk.io.root().join(path);
        self.incomplete.get_or_insert_with(|| format!("cannot read {}", path.display()));
    }

    /// Finishes the shuffle. Returns it with its bytes and its blocks.
    async fn finish(mut self, logged: FoundShuffle) -> (RecoveredShuffle, u64, u64) {
        let highest = self.sequences.iter().max().copied();
        if has_gap(self.sequences.iter().copied()) {
            self.incomplete.get_or_insert_with(|| "an index group is missing".to_owned());
        }
        let may_lack_end = self.incomplete.is_some();
        let blind_starts = may_lack_end.then_some(self.known.blind_starts);
        let next_sequence = next_number(highest, blind_starts);
        // Streams without known extents may have been begun by any earlier start that missed
        // shuffles.
        let first_base =
            blind_starts.map_or(0, |starts| (u64::from(starts) + 1).saturating_mul(TAIL_GAP_BYTES));
        let mut partitions = Partitions::new();
        let mut overlapped = Vec::new();
        let (mut bytes, mut blocks) = (0, 0);
        let mut found = std::mem::take(&mut self.extents);
        let in_objects = self.stored.as_mut().map(|it| std::mem::take(&mut it.extents)).unwrap_or_default();
        for (id, extents) in in_objects {
            // None of the others overlaps them, so their sequence does not matter.
            let extents = extents.into_values().map(|extent| SequencedExtent { sequence: 0, extent });
            found.entry(id).or_default().extend(extents);
        }
        for (id, extents) in found {
            let (mut partition, left_out) = sort_extents(extents);
            bytes += partition.extents.iter().filter(|it| !it.is_lost()).map(|it| it.length).sum::<u64>();
            blocks += partition.blocks;
            if left_out {
                overlapped.push(id);
            }
            if may_lack_end {
                partition.extend_to((partition.bytes + TAIL_GAP_BYTES).max(first_base));
            }
            partitions.insert(id, partition);
        }
        for id in overlapped {
            self.reread_present(id, &partitions[&id]).await;
        }
        let extents = partitions.values().flat_map(Partition::on_disks).count();
        self.core.metrics.extents.add(clamped(extents));
        self.shuffle.publish_lock.lock().await.resume_at(next_sequence);
        self.shuffle.restore(RestoredStreams { partitions, first_base });
        self.remove_left_over().await;
        let mut reason = self.incomplete.unwrap_or_default();
        if let Some(stored) = self.stored {
            self.present.merge(stored.present);
            reason = if reason.is_empty() { stored.reason } else { reason };
        }
        let recovered = RecoveredShuffle {
            key: self.shuffle.key.clone(),
            incomplete: logged.incomplete,
            is_moved: logged.is_moved,
            present: self.present,
            lost: self.lost,
            reason,
        };
        (recovered, bytes, blocks)
    }

    /// Determines the present blocks of a partition on disks again, after some of its extents were
    /// left out.
    async fn reread_present(&mut self, id: PartitionId, partition: &Partition) {
        self.present.clear(id);
        for extent in partition.on_disks() {
            let mut ids = Vec::new();
            let add = |record: &IndexRecord| {
                ids.push(record.block_id.unsigned_abs());
                ControlFlow::Continue(())
            };
            if let Err(error) = self.core.visit_records(self.shuffle, extent, 0, add).await {
                tracing::error!(%error, "cannot read the index records of an extent");
            }
            self.present.add(id, &ids);
        }
    }
}

/// Returns whether an extent in an object has the blocks of an entry, at their place.
fn is_copy(copy: &Extent, entry: &GroupEntry) -> bool {
    (copy.base, copy.length, copy.records_crc) == (entry.base, entry.length, entry.place.crc)
}

/// Adds a log to a shuffle's table, for reading only.
fn adopt_log(
    core: &DiskCore,
    shuffle: &DiskShuffle,
    disk: &Arc<LocalDisk>,
    kind: LogKind,
    file: &FoundFile,
) -> Result<Arc<Log>, StoreError> {
    let log = shuffle.add_log(core.files.next_id(), disk, kind, file.number)?;
    log.adopt(file.bytes);
    Ok(log)
}

/// Returns the number after `highest`. `blind_starts` is given if unknown numbers may be in use:
/// the result is then at least the first of the next range ([`NUMBERS_PER_RANGE`]), in which none
/// was assigned.
fn next_number(highest: Option<u64>, blind_starts: Option<u32>) -> u64 {
    let next = highest.map_or(0, |highest| highest + 1);
    blind_starts.map_or(next, |starts| next.max((u64::from(starts) + 1) * NUMBERS_PER_RANGE))
}

/// Returns whether a sequence number is missing within a range.
fn has_gap(numbers: impl Iterator<Item = u64>) -> bool {
    let mut ranges: HashMap<u64, (u64, u64)> = HashMap::new();
    for number in numbers {
        let (count, highest) = ranges.entry(number / NUMBERS_PER_RANGE).or_default();
        *count += 1;
        *highest = (*highest).max(number % NUMBERS_PER_RANGE);
    }
    ranges.values().any(|(count, highest)| *count <= *highest)
}

fn log_damage(disk: &LocalDisk, path: &Path, reader: &LogReader<'_>) {
    let damage = reader.damage();
    let path = disk.io.root().join(path);
    if damage.holes_bytes > 0 {
        tracing::warn!(
            path = %path.display(),
            bytes = damage.holes_bytes,
            "index log has corrupt bytes between records; ignoring them"
        );
    }
    if damage.tail_bytes > 0 {
        tracing::info!(
            path = %path.display(),
            bytes = damage.tail_bytes,
            "index log ends with an incomplete record; ignoring it"
        );
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_continue_and_gaps_are_noticed() {
        assert_eq!([next_number(None, None), next_number(Some(7), None)], [0, 8]);
        assert_eq!(
            [next_number(None, Some(0)), next_number(Some(7), Some(2))],
            [NUMBERS_PER_RANGE, 3 * NUMBERS_PER_RANGE]
        );
        assert_eq!(next_number(Some(3 * NUMBERS_PER_RANGE + 9), Some(0)), 3 * NUMBERS_PER_RANGE + 10);
        assert!(!has_gap([0, 1, 2, NUMBERS_PER_RANGE, NUMBERS_PER_RANGE + 1].into_iter()));
        assert!(has_gap([0, 2].into_iter()) && has_gap([0, NUMBERS_PER_RANGE + 1].into_iter()));
        assert!(!has_gap(std::iter::empty()));
    }
}
