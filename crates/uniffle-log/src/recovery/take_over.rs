//! Recovers the metadata log of an earlier process: which shuffles are living, and whether all of
//! their records are known.
//!
//! Records are not kept in memory. They are delivered one at a time, before this start begins a
//! generation of its own unless an entry is appended first. Invariant: the log is not written while
//! they are delivered.

use std::collections::{BTreeMap, HashSet};
use std::io;
use std::sync::Arc;

use croaring::Treemap;
use tokio::sync::mpsc;
use uuid::Uuid;

use super::proof::RecoveryDecision;
use super::read::{Directory, LogCopies, Survey};
use crate::LogError;
use crate::contents::FoundShuffle;
use crate::format::frame::{FrameContent, Gap, Incarnation, METADATA, Member};
use crate::objects::shipped::ShippedLog;
use crate::write::writer::{Deadlines, MetadataWriter, RecoveredRecord};
use uniffle_wire::types::ShuffleKey;

/// Recovered state of an earlier process.
#[derive(Debug, Default)]
pub struct FoundLog {
    /// Shuffles that were not purged.
    pub shuffles: BTreeMap<ShuffleKey, FoundShuffle>,
    /// Absent directories that may have data of these shuffles.
    pub absent: Vec<(Uuid, String)>,
    /// Reason why unknown shuffles may exist, found now or by an earlier start.
    pub gap: Option<String>,
    /// True if this start found the gap.
    pub has_new_gap: bool,
    /// Number of earlier starts that may have missed shuffles.
    pub blind_starts: u32,
    /// Number greater than any incarnation in the log.
    pub next_incarnation: u64,
}

impl MetadataWriter {
    /// Creates a writer that continues with the result of a survey, by the rule (`proof`). Also
    /// returns the recovered state.
    pub(crate) async fn on(
        directories: Vec<Directory>,
        deadlines: Deadlines,
        survey: &Survey,
        shipped: Option<Arc<ShippedLog>>,
    ) -> (Self, FoundLog) {
        let mut decision = survey.decision();
        decision.generation = decision.generation.max(survey.generation);
        let shipped = shipped.filter(|log| log.has_content() && decision.needs(log.seen()));
        let source = survey.source(&decision.sources, decision.gap.is_none());
        let unread = survey.unread();
        for reason in unread.values() {
            tracing::error!(reason, "excluding a data directory from the metadata log until it is readable");
        }
        let mut writer = Self { unread, ..Self::new(directories, deadlines, decision.clone(), source) };
        writer.resumable = survey.resumable(&decision).filter(|_| shipped.is_none());
        writer.shipped = shipped;
        let found = writer.take_over(&decision).await;
        (writer, found)
    }

    /// Surveys directories again that could not be read at start, while nothing was written since:
    /// they may have the whole log. Results stay refused until the next start, which then finds
    /// everything.
    pub(crate) async fn look_again(&mut self) {
        if !self.has_sent_records || self.is_open || !self.copies.is_empty() || self.unread.is_empty() {
            return;
        }
        let survey = Survey::take(&self.directories, self.deadlines.name).await;
        if survey.unread().len() >= self.unread.len() || survey.is_fresh() {
            return;
        }
        let (next, found) =
            Self::on(self.directories.clone(), self.deadlines, &survey, self.shipped.clone()).await;
        let served = self.contents.living().into_iter().map(|shuffle| shuffle.number);
        let (is_blind, generation) = (self.is_blind, next.generation.max(self.generation));
        let (is_begun, was_tried) = (Arc::clone(&self.is_begun), self.was_tried.clone());
        let (mut contents, shipper) = (std::mem::take(&mut self.contents), self.shipper.clone());
        let damage = self.damage.clone();
        let latest: Treemap = found.shuffles.values().map(|found| found.incarnation).collect();
        let mut outdated = std::mem::take(&mut self.outdated);
        outdated.extend(served.filter(|number| !latest.contains(*number)));
        let next = Self {
            shipper,
            is_blind,
            generation,
            has_sent_records: true,
            damage,
            is_begun,
            was_tried,
            ..next
        };
        contents.replace_with(next.contents);
        let unserved = found.shuffles.iter().map(|(key, found)| (key.clone(), found.incarnation)).collect();
        *self = Self { contents, unserved, outdated, ..next };
        tracing::warn!(
            shuffles = found.shuffles.len(),
            "the metadata log is readable again; restart the worker to recover its shuffles"
        );
    }

    /// Reads the whole log.
    async fn take_over(&mut self, decision: &RecoveryDecision) -> FoundLog {
        let (source, directories) = (self.source.clone(), self.directories.clone());
        let mut reader = source.read(&directories, self.deadlines.name);
        let unread = loop {
            match reader.next().await {
                Ok(Some(entry)) => self.contents.count_entry(&entry, reader.entry_bytes),
                Ok(None) => break None,
                Err(error) => {
                    tracing::error!(%error, "cannot read all records of the metadata log");
                    break Some(Gap { reason: error.to_string(), until_returned: Vec::new() });
                }
            }
        };
        let unread = match self.take_over_shipped(decision).await {
            Ok(()) => unread,
            Err(error) => unread.or(Some(Gap { reason: error.to_string(), until_returned: Vec::new() })),
        };
        let decision = &match &self.shipped {
            Some(log) => decision.clone().with_store(log.seen(), self.has_strangers),
            None => decision.clone(),
        };
        self.epoch.gap = self.epoch.gap.take().or_else(|| decision.gap.clone());
        if let Some(gap) = &decision.gap {
            tracing::error!(
                reason = gap.reason,
                "acknowledged metadata may be incomplete; results of all recovered and unknown shuffles are \
                 refused"
            );
        }
        let proven: HashSet<u64> = self.proven_by_store();
        self.epoch.gap = self.epoch.gap.take().or_else(|| unread.clone());
        let mut shuffles = self.contents.shuffles();
        let earlier = std::mem::take(&mut self.contents.incomplete);
        for (key, found) in &mut shuffles {
            let earlier = earlier.get(&found.incarnation).map(|(_, gap)| gap);
            // A proof by the store covers only the time since the shuffle was moved, not an earlier
            // gap.
            let is_proven = proven.contains(&found.incarnation) && earlier.is_none();
            let gap = if is_proven { None } else { decision.carried(earlier) };
            let gap = gap.or_else(|| unread.clone());
            found.incomplete = gap.as_ref().map(|gap| gap.reason.clone());
            if let Some(gap) = gap {
                let shuffle = Incarnation { key: key.clone(), number: found.incarnation };
                self.contents.incomplete.insert(found.incarnation, (shuffle, gap));
            }
        }
        let kept: Treemap = shuffles.values().map(|found| found.incarnation).collect();
        self.contents.keep(&kept);
        // A resumed generation would record the former incomplete shuffles instead of the current
        // ones.
        let has_incomplete = !earlier.is_empty() || !self.contents.incomplete.is_empty();
        self.resumable = self.resumable.take().filter(|_| !has_incomplete && unread.is_none());
        if shuffles.is_empty() {
            // Absent directories have no data of living shuffles.
            let here: Vec<Uuid> = self.directories.iter().map(|it| it.uuid).collect();
            self.epoch.members.retain(|member| member.votes || here.contains(&member.uuid()));
        }
        let absent = self.epoch.members.iter().filter(|member| self.is_away(member));
        FoundLog {
            absent: absent.map(|member| (member.uuid(), member.path.clone())).collect(),
            gap: self.epoch.gap.as_ref().map(|gap| gap.reason.clone()),
            has_new_gap: decision.gap.is_some() || unread.is_some(),
            blind_starts: self.epoch.blind_starts,
            next_incarnation: self.contents.next_incarnation,
            shuffles,
        }
    }

    /// Adds the entries of the object store to those of the directories, if they are needed.
    async fn take_over_shipped(&mut self, decision: &RecoveryDecision) -> Result<(), LogError> {
        let Some(log) = self.shipped.clone() else { return Ok(()) };
        let here: HashSet<u64> = self.contents.living().iter().map(|shuffle| shuffle.number).collect();
        let is_whole = log.gap().is_none();
        let mut reader = log.source.read_stored();
        while let Some(entry) = reader.next().await? {
            self.contents.count_entry(&entry, reader.entry_bytes);
        }
        let moved = |shuffle: &Incarnation| log.contents.moved.contains_key(&shuffle.number);
        let mut all = self.contents.living();
        if decision.is_fresh && !is_whole {
            // Data of any of these shuffles may have been moved.
            self.contents.moved.extend(all.iter().map(|shuffle| (shuffle.number, shuffle.clone())));
        } else if decision.is_fresh {
            // Only lost disks have the data of a shuffle that was not moved.
            for lost in all.extract_if(.., |shuffle| !moved(shuffle)) {
                self.contents.purge(lost.number);
                self.contents.incomplete.remove(&lost.number);
            }
        }
        let is_strange = |shuffle: &Incarnation| !here.contains(&shuffle.number);
        self.has_strangers = all.iter().any(is_strange);
        let counts = |shuffle: &&Incarnation| is_strange(shuffle) || (is_whole && moved(shuffle));
        let from_it: Treemap = all.iter().filter(counts).map(|shuffle| shuffle.number).collect();
        self.source.parts.extend(log.source.parts.clone());
        self.source.shipped = Some(from_it);
        Ok(())
    }

    /// Returns the shuffles whose acknowledged records are all in the object store.
    fn proven_by_store(&self) -> HashSet<u64> {
        let whole = self.shipped.as_ref().filter(|log| log.gap().is_none());
        whole.map(|log| log.contents.moved.keys().copied().collect()).unwrap_or_default()
    }

    pub(crate) fn is_away(&self, member: &Member) -> bool {
        self.directories.iter().all(|directory| directory.uuid != member.uuid())
    }

    /// Sends the records of living shuffles, in the order in which they were written. If a copy
    /// cannot be read to its end, the other one is used from there.
    pub(crate) async fn send_records(&self, to: &mpsc::Sender<RecoveredRecord>) {
        let (mut sent, mut failed) = (0, None);
        for source in std::iter::once(&self.source).chain(&self.others) {
            let (sent_now, result) = self.send_from(source, sent, to).await;
            sent = sent.max(sent_now);
            failed = result.err().map(|error| LogError::new(METADATA, &error));
            if failed.is_none() {
                break;
            }
        }
        // The receiver may have been dropped.
        let _ = to.send(failed.map_or(Ok(None), Err)).await;
    }

    /// Sends the entries of a source after its first `sent` ones. Returns the number of entries
    /// sent so far.
    async fn send_from(
        &self,
        source: &LogCopies,
        sent: u64,
        to: &mpsc::Sender<RecoveredRecord>,
    ) -> (u64, io::Result<()>) {
        let mut reader = source.read(&self.directories, self.deadlines.name);
        let mut at = 0;
        loop {
            match reader.next().await {
                Ok(None) => return (at, Ok(())),
                Err(error) => return (at, Err(error)),
                // This entry was sent from another source.
                Ok(Some(_)) if at < sent => {}
                Ok(Some(entry)) => {
                    if !self.send_entry(entry, to).await {
                        return (at, Ok(()));
                    }
                }
            }
            at += 1;
        }
    }

    /// Sends one entry. Returns false if the receiver was dropped.
    async fn send_entry(&self, entry: FrameContent, to: &mpsc::Sender<RecoveredRecord>) -> bool {
        match entry {
            FrameContent::Record(shuffle, content) if !self.contents.is_purged(shuffle.number) => {
                to.send(Ok(Some((shuffle.key, content)))).await.is_ok()
            }
            FrameContent::Record(..)
            | FrameContent::Purged(_)
            | FrameContent::Incomplete(..)
            | FrameContent::Moved(_)
            | FrameContent::Epoch(_)
            | FrameContent::Begun => true,
        }
    }
}
