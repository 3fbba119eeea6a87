//! The metadata log found in an object store at start.
//!
//! The newest generation with a whole checkpoint is used. If objects of it are missing, so are
//! records, and it proves nothing. A generation whose checkpoint ends before its last record was
//! interrupted and is skipped. Objects are read in order, a bounded number ahead, and their bytes
//! are charged.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::sync::Arc;

use bytes::Bytes;
use croaring::Treemap;
use futures::stream::{self, BoxStream, StreamExt as _};

use super::contents::{Contents, FoundShuffle};
use super::error::LogError;
use super::frame::{Entry, Epoch, Frame, Incarnation};
use super::objects::{LogObject, LogObjects, OBJECT_COPIES};
use super::proof::StoreSeen;
use crate::budget::{Budget, Charge};
use uniffle_wire::types::ShuffleKey;

/// Number of objects that are requested concurrently.
const AT_ONCE: usize = 16;

/// The log in the store when this process starts.
pub struct ShippedLog {
    objects: Arc<dyn LogObjects>,
    memory: Budget,
    /// Objects to read, in order.
    parts: Vec<LogObject>,
    /// The newest epoch of the disks in the store, or the default if there were no disks.
    pub(super) epoch: Epoch,
    /// Reason why records may be missing.
    gap: Option<String>,
    pub(super) contents: Contents,
    /// Living shuffles in `contents`.
    shuffles: BTreeMap<ShuffleKey, FoundShuffle>,
    /// The greatest generation of any object.
    generation: u64,
}

impl fmt::Debug for ShippedLog {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ShippedLog")
            .field("parts", &self.parts.len())
            .field("gap", &self.gap)
            .finish_non_exhaustive()
    }
}

/// A generation as listed.
struct Generation {
    parts: Vec<LogObject>,
    /// Reason why objects in its middle are missing.
    hole: Option<String>,
}

impl ShippedLog {
    /// Reads the log of a store with the `listed` objects. `has_data` says that the store has data
    /// of shuffles, whose registrations were in the log before.
    ///
    /// # Errors
    /// The store does not answer or refuses.
    pub async fn read(
        objects: Arc<dyn LogObjects>,
        listed: &[(LogObject, usize)],
        memory: &Budget,
        has_data: bool,
    ) -> Result<Arc<Self>, LogError> {
        let names: BTreeSet<LogObject> = listed.iter().map(|(object, _)| *object).collect();
        let generation = names.last().map_or(0, |object| object.generation);
        let mut log = Self {
            objects,
            memory: memory.clone(),
            parts: Vec::new(),
            epoch: Epoch::default(),
            gap: None,
            contents: Contents::default(),
            shuffles: BTreeMap::new(),
            generation,
        };
        let mut skipped = Vec::new();
        for Generation { parts, hole } in generations(&names).into_iter().rev() {
            let (mut contents, mut epoch, mut is_begun) = (Contents::default(), Epoch::default(), false);
            let mut reader = log.reader_of(parts.clone());
            while let Some((entry, bytes)) = reader.next().await? {
                contents.took(&entry, bytes);
                match entry {
                    Entry::Epoch(newest) => epoch = *newest,
                    Entry::Begun => is_begun = true,
                    Entry::Said(..) | Entry::Purged(_) | Entry::Incomplete(..) | Entry::Moved(_) => {}
                }
            }
            let damage = hole.or(reader.damage);
            log.gap = log.gap.take().or(damage.clone());
            if is_begun {
                (log.parts, log.epoch, log.contents) = (parts, epoch, contents);
                // Entries of a damaged later generation are read too, although it proves nothing.
                log.add_skipped(skipped).await?;
                log.keep_latest();
                return Ok(Arc::new(log));
            }
            if damage.is_some() {
                skipped.push(parts);
            }
        }
        if !names.is_empty() || has_data {
            let lost = || "the last checkpoint of the metadata log in the object store is lost".to_owned();
            log.gap.get_or_insert_with(lost);
            log.add_skipped(skipped).await?;
            log.keep_latest();
        }
        Ok(Arc::new(log))
    }

    /// Removes registrations that a later one of their shuffle has replaced.
    fn keep_latest(&mut self) {
        self.shuffles = self.contents.shuffles();
        self.contents.keep(&self.shuffles.values().map(|found| found.incarnation).collect());
    }

    async fn add_skipped(&mut self, skipped: Vec<Vec<LogObject>>) -> Result<(), LogError> {
        for parts in skipped.into_iter().rev() {
            let mut reader = self.reader_of(parts.clone());
            while let Some((entry, bytes)) = reader.next().await? {
                self.contents.took(&entry, bytes);
                if let Entry::Epoch(newest) = entry {
                    self.epoch = *newest;
                }
            }
            self.parts.extend(parts);
        }
        Ok(())
    }

    pub(super) fn seen(&self) -> StoreSeen<'_> {
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
    pub(super) fn says_anything(&self) -> bool {
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

    /// Returns whether local disks have had records of the log.
    #[must_use]
    pub fn had_disks(&self) -> bool {
        !self.epoch.members.is_empty()
    }

    /// Returns the number of the start that wrote the newest object.
    #[must_use]
    pub fn last_start(&self) -> u32 {
        u32::try_from(self.generation >> 32).unwrap_or(u32::MAX)
    }

    /// Returns a reader of the records of registrations.
    #[must_use]
    pub fn records<'a>(&self, of: &'a Treemap) -> ShippedRecords<'a> {
        ShippedRecords { reader: self.reader(), of }
    }

    /// Returns a reader of all entries.
    pub(super) fn reader(&self) -> ShippedReader {
        self.reader_of(self.parts.clone())
    }

    fn reader_of(&self, parts: Vec<LogObject>) -> ShippedReader {
        ShippedReader::new(Arc::clone(&self.objects), &self.memory, parts)
    }
}

/// Returns the generations of a list of objects, oldest first.
fn generations(names: &BTreeSet<LogObject>) -> Vec<Generation> {
    let mut all: Vec<Generation> = Vec::new();
    for object in names {
        let current = all.last().and_then(|generation| generation.parts.last());
        let is_new = current.is_none_or(|last| !last.is_beside(object));
        let expected = current.filter(|_| !is_new).map_or(0, |last| last.first + u64::from(last.frames));
        if is_new {
            all.push(Generation { parts: Vec::new(), hole: None });
        }
        let Some(generation) = all.last_mut() else { continue };
        if object.first != expected {
            let hole = || {
                format!(
                    "records {expected} to {} of the metadata log in the object store are missing",
                    object.first.saturating_sub(1)
                )
            };
            generation.hole.get_or_insert_with(hole);
        }
        generation.parts.push(*object);
    }
    all
}

/// Reader of the records of some registrations, in order.
pub struct ShippedRecords<'a> {
    reader: ShippedReader,
    of: &'a Treemap,
}

impl fmt::Debug for ShippedRecords<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ShippedRecords").finish_non_exhaustive()
    }
}

impl ShippedRecords<'_> {
    /// Returns the next record with its shuffle, or `None` at the end.
    ///
    /// # Errors
    /// The store does not answer or refuses.
    pub async fn next(&mut self) -> Result<Option<(ShuffleKey, Bytes)>, LogError> {
        while let Some((entry, _)) = self.reader.next().await? {
            if let Entry::Said(shuffle, record) = entry
                && self.of.contains(shuffle.number)
            {
                return Ok(Some((shuffle.key, record)));
            }
        }
        Ok(None)
    }
}

type Fetched = (LogObject, Result<Vec<(Frame, u64)>, String>, Charge);

/// Reader of the entries of the log, in order.
pub(super) struct ShippedReader {
    fetched: BoxStream<'static, Result<Fetched, LogError>>,
    current: std::vec::IntoIter<(Frame, u64)>,
    _charge: Option<Charge>,
    /// The last object, and the checksum of its last frame.
    last: Option<(LogObject, u32)>,
    /// Reason why an object cannot be read.
    pub(super) damage: Option<String>,
}

impl ShippedReader {
    pub(super) fn new(objects: Arc<dyn LogObjects>, memory: &Budget, parts: Vec<LogObject>) -> Self {
        let memory = memory.clone();
        let fetches =
            parts.into_iter().map(move |object| fetch(Arc::clone(&objects), memory.clone(), object));
        Self {
            fetched: stream::iter(fetches).buffered(AT_ONCE).boxed(),
            current: Vec::new().into_iter(),
            _charge: None,
            last: None,
            damage: None,
        }
    }

    /// Returns the next entry with the size of its frame, or `None` at the end.
    ///
    /// # Errors
    /// The store does not answer or refuses.
    pub(super) async fn next(&mut self) -> Result<Option<(Entry, u64)>, LogError> {
        loop {
            if let Some((frame, bytes)) = self.current.next() {
                return Ok(Some((frame.entry, bytes)));
            }
            // Thousands of records are in memory between two requests.
            tokio::task::coop::consume_budget().await;
            let Some(fetched) = self.fetched.next().await else { return Ok(None) };
            let (object, frames, charge) = fetched?;
            match frames {
                Ok(frames) => self.enter(object, frames, charge),
                Err(damage) => drop(self.damage.get_or_insert(damage)),
            }
        }
    }

    fn enter(&mut self, object: LogObject, frames: Vec<(Frame, u64)>, charge: Charge) {
        let (first, last) = (frames.first(), frames.last());
        let previous = first.map_or(0, |(frame, _)| frame.previous);
        let follows = match self.last.filter(|(before, _)| before.is_beside(&object)) {
            Some((before, crc)) => object.first != before.first + u64::from(before.frames) || previous == crc,
            None => true,
        };
        if !follows {
            let damage =
                || format!("object {} of the metadata log does not follow the one before", object.name(0));
            self.damage.get_or_insert_with(damage);
        }
        self.last = last.map(|(frame, _)| (object, frame.crc));
        (self.current, self._charge) = (frames.into_iter(), Some(charge));
    }
}

/// Reads one object from its first copy that is whole.
async fn fetch(objects: Arc<dyn LogObjects>, memory: Budget, object: LogObject) -> Result<Fetched, LogError> {
    let mut damage = format!("object {} of the metadata log is missing", object.name(0));
    for copy in 0..OBJECT_COPIES {
        let Some(bytes) = objects.get(object, copy).await? else { continue };
        let charge = memory.force_charge(bytes.len() as u64);
        match object.decode(&bytes) {
            Ok(frames) => return Ok((object, Ok(frames), charge)),
            Err(why) => {
                damage = format!("object {} of the metadata log is damaged: {why}", object.name(copy));
                tracing::error!("{damage}");
            }
        }
    }
    Ok((object, Err(damage), memory.nothing()))
}
