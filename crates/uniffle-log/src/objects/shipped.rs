//! The metadata log found in an object store at start.
//!
//! The newest generation with a whole checkpoint is used. If objects of it are missing, so are
//! records, and it proves nothing. A generation without the end of its checkpoint was interrupted
//! and is skipped. If it is damaged, its records are read too, although it proves nothing. If two
//! processes wrote generations of the same start, one proves nothing about the records of the
//! other. Each generation is read like a file (`object_file`).

use std::collections::BTreeMap;
use std::sync::Arc;

use super::object::{ListedObject, LogObjects};
use super::object_file::ObjectFile;
use crate::LogError;
use crate::contents::{Contents, FoundShuffle};
use crate::format::frame::{Epoch, FrameContent, Incarnation};
use crate::recovery::proof::StoreSeen;
use crate::recovery::read::{LogCopies, LogCopy};
use uniffle_base::budget::Budget;
use uniffle_wire::types::ShuffleKey;
use uuid::Uuid;

/// The log in the store when this process starts.
#[derive(Debug)]
pub struct ShippedLog {
    /// Generations to read.
    pub(crate) source: LogCopies,
    /// The newest epoch of the disks in the store, or the default if there were no disks.
    pub(crate) epoch: Epoch,
    /// Reason why records may be missing.
    gap: Option<String>,
    pub(crate) contents: Contents,
    /// Living shuffles in `contents`.
    shuffles: BTreeMap<ShuffleKey, FoundShuffle>,
    /// The greatest generation of any object.
    generation: u64,
}

/// Entries of generations.
#[derive(Default)]
struct Entries {
    contents: Contents,
    epoch: Epoch,
    is_begun: bool,
    /// Reason why some are missing.
    damage: Option<String>,
}

impl Entries {
    /// Adds those of a generation.
    async fn add(&mut self, part: &LogCopy) -> Result<(), LogError> {
        let mut reader = LogCopies { parts: vec![part.clone()], shipped: None }.read_stored();
        while let Some(entry) = reader.next().await? {
            self.contents.count_entry(&entry, reader.entry_bytes);
            match entry {
                FrameContent::Epoch(newest) => self.epoch = *newest,
                FrameContent::Begun => self.is_begun = true,
                FrameContent::Record(..)
                | FrameContent::Purged(_)
                | FrameContent::Incomplete(..)
                | FrameContent::Moved(_) => {}
            }
        }
        self.damage = self.damage.take().or(reader.damage);
        Ok(())
    }
}

impl ShippedLog {
    /// Reads the log of a store with the `listed` objects. `has_data` says that the store has data
    /// of shuffles, whose registrations were in the log before.
    ///
    /// # Errors
    /// The store does not answer or refuses.
    pub async fn read(
        store: Arc<dyn LogObjects>,
        listed: &[ListedObject],
        memory: &Budget,
        has_data: bool,
    ) -> Result<Arc<Self>, LogError> {
        let files = ObjectFile::of(&store, memory, listed).await?;
        let (mut all, mut gap) = (Entries::default(), None);
        let (mut parts, mut skipped) = (Vec::new(), Vec::new());
        for file in files.iter().rev() {
            let part = file.part();
            let mut found = Entries::default();
            found.add(&part).await?;
            let damage = found.damage.take();
            if found.is_begun {
                all = found;
                parts.push(part);
            } else if damage.is_some() {
                skipped.push(part);
            }
            gap = gap.or(damage);
            if all.is_begun {
                let rivals =
                    "two processes of this worker wrote the metadata log in the object store at once";
                let has_rival = files.iter().any(|other| other.is_rival_of(file));
                gap = gap.or_else(|| has_rival.then(|| rivals.to_owned()));
                break;
            }
        }
        if !all.is_begun && (!listed.is_empty() || has_data) {
            let lost = || "the last checkpoint of the metadata log in the object store is lost".to_owned();
            gap.get_or_insert_with(lost);
        }
        // Entries of a damaged later generation are read too, although it proves nothing.
        for part in skipped.into_iter().rev() {
            all.add(&part).await?;
            parts.push(part);
        }
        // A later registration of a shuffle has replaced the others.
        let (shuffles, mut contents) = (all.contents.shuffles(), all.contents);
        contents.keep(&shuffles.values().map(|found| found.incarnation).collect());
        let generation = files.last().map_or(0, |file| file.generation);
        let source = LogCopies { parts, shipped: None };
        Ok(Arc::new(Self { source, epoch: all.epoch, gap, contents, shuffles, generation }))
    }

    pub(crate) fn seen(&self) -> StoreSeen<'_> {
        StoreSeen { epoch: &self.epoch, gap: self.gap() }
    }

    /// Returns the living shuffles.
    #[must_use]
    pub fn shuffles(&self) -> &BTreeMap<ShuffleKey, FoundShuffle> {
        &self.shuffles
    }

    /// Returns whether a registration has ended, or a later one of its shuffle is in the log.
    #[must_use]
    pub fn is_over(&self, shuffle: &Incarnation) -> bool {
        let latest = self.shuffles.get(&shuffle.key).map_or(0, |found| found.incarnation);
        latest > shuffle.number || self.contents.is_purged(shuffle.number)
    }

    /// Returns whether the log has records of a living registration.
    #[must_use]
    pub fn knows(&self, shuffle: &Incarnation) -> bool {
        self.shuffles.get(&shuffle.key).is_some_and(|found| found.incarnation == shuffle.number)
    }

    /// Returns whether the log has living shuffles, or may have had some.
    pub(crate) fn has_content(&self) -> bool {
        self.gap.is_some() || !self.shuffles.is_empty()
    }

    /// Returns the reason why records may be missing.
    #[must_use]
    pub fn gap(&self) -> Option<&str> {
        self.gap.as_deref()
    }

    /// Returns whether registrations may be missing, including those that an earlier start missed.
    #[must_use]
    pub fn may_lack_registrations(&self) -> bool {
        self.gap.is_some() || self.epoch.gap.is_some()
    }

    /// Returns the reason why unknown shuffles may exist, also one of an earlier start.
    #[must_use]
    pub fn unknown_gap(&self) -> Option<&str> {
        let earlier = self.epoch.gap.as_ref().filter(|_| !self.shuffles.is_empty());
        self.gap().or(earlier.map(|gap| gap.reason.as_str()))
    }

    /// Returns a number that is greater than any incarnation in the log.
    #[must_use]
    pub fn next_incarnation(&self) -> u64 {
        self.contents.next_incarnation.max(self.epoch.next_incarnation)
    }

    /// Returns the data directories that may have data of the log's shuffles.
    pub fn directories(&self) -> impl Iterator<Item = (Uuid, &str)> {
        self.epoch.members.iter().map(|member| (member.uuid(), member.path.as_str()))
    }

    /// Returns the number of the start that wrote the newest object.
    #[must_use]
    pub fn last_start(&self) -> u32 {
        u32::try_from(self.generation >> 32).unwrap_or(u32::MAX)
    }
}
