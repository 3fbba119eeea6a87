//! What an earlier process of this worker left in the store, read when a worker starts.
//!
//! A shuffle is there if a page says that it was registered; without one it was being deleted, or its registration was
//! never acknowledged. Its segments are those of the chain from the newest backwards; others are uploads whose outcome was
//! never known. What of a stream cannot be had, and what stands behind it, is not there, and so its blocks are lost by name.

use std::collections::{BTreeMap, HashMap, VecDeque};
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use futures::future::try_join_all;
use futures::stream::{self, StreamExt as _, TryStreamExt as _};
use object_store::{ObjectStore as _, ObjectStoreExt as _};
use tokio::sync::mpsc;

use super::claim::claim_key;
use super::core::Core;
use super::fetch;
use super::intake::Bound;
use super::lane::Lane;
use super::layout::{
    Entry, FOOTER_BYTES, Footer, Name, Registered, object_key, parse_key, path_of, shuffle_prefix,
};
use super::notes;
use super::page::{self, Noted, PageError, Reading};
use super::shuffle::Shuffle;
use super::streams::{Extent, Streams};
use crate::clock::sleep;
use crate::durability::{IdSet, LogError, Record, Said};
use crate::tiers::{RecoveredShuffle, StoreError, StoreErrorKind};
use uniffle_wire::index::{RECORD_BYTES, records};
use uniffle_wire::types::{PartitionId, ShuffleKey};

/// Shuffles that are read at a time.
const AT_ONCE: usize = 8;

/// Numbers that are left out: a request of the earlier process may still arrive.
const NUMBERS_LEFT_OUT: u32 = 1000;

/// Bytes of records that are read at a time.
const WINDOW_BYTES: u64 = 1 << 20;

/// Records on their way to whom they are told.
const TOLD_MAX: usize = 16;

/// So long is waited until a page is written again that the store has not taken; doubles up to the second.
const MEND_PAUSE_MIN: Duration = Duration::from_secs(1);
const MEND_PAUSE_MAX: Duration = Duration::from_secs(60);

/// The objects of a registration.
#[derive(Debug, Default)]
struct Objects {
    /// Bytes by number.
    segments: BTreeMap<u32, u64>,
    pages: Pages,
}

/// Numbers of pages, with which of a page and its copy is there.
type Pages = BTreeMap<u32, Vec<Name>>;

/// A shuffle that was found.
#[derive(Debug)]
pub(super) struct Found {
    pub(super) shuffle: Arc<Shuffle>,
    pub(super) told: RecoveredShuffle,
    pub(super) bound: Bound,
    /// Keys of objects that are in no chain.
    pub(super) strays: Vec<String>,
    pub(super) bytes: u64,
    pub(super) blocks: u64,
    pages: Pages,
    /// Those of which the store has not taken the copy.
    single: Pages,
}

/// All that was found.
#[derive(Debug, Default)]
pub(super) struct Survey {
    pub(super) found: Vec<Found>,
    /// Registrations that are no shuffle's any more, and whether one has pages.
    pub(super) abandoned: Vec<(Registered, bool)>,
    pub(super) next_incarnation: u64,
}

/// Reads everything below the worker's prefix.
///
/// # Errors
/// The store does not answer or refuses: then nothing is known, and nothing may be concluded.
pub(super) async fn survey(core: &Arc<Core>) -> Result<Survey, StoreError> {
    let mut survey = Survey::default();
    let mut newest: BTreeMap<ShuffleKey, (Registered, Objects)> = BTreeMap::new();
    for (name, objects) in list(core).await? {
        survey.next_incarnation = survey.next_incarnation.max(name.incarnation.saturating_add(1));
        if objects.pages.is_empty() {
            survey.abandoned.push((name, false));
        } else if let Some((before, _)) = newest.insert(name.key.clone(), (name, objects)) {
            // In the order of incarnations.
            survey.abandoned.push((before, true));
        }
    }
    let reads = newest.into_values().map(|(name, objects)| read(core, name, objects));
    survey.found = stream::iter(reads).buffered(AT_ONCE).try_collect().await?;
    Ok(survey)
}

async fn list(core: &Core) -> Result<BTreeMap<Registered, Objects>, StoreError> {
    let root = &core.settings.root;
    let mut all: BTreeMap<Registered, Objects> = BTreeMap::new();
    let mut listed = core.store.list(Some(&path_of(root)));
    while let Some(object) = core.noted(root, listed.try_next().await)? {
        let key = object.location.as_ref();
        match parse_key(root, key) {
            Some((name, Name::Segment(number))) => {
                all.entry(name).or_default().segments.insert(number, object.size);
            }
            Some((name, page @ (Name::Page(number) | Name::Copy(number)))) => {
                all.entry(name).or_default().pages.entry(number).or_default().push(page);
            }
            None if key == claim_key(root) => {}
            None => {
                tracing::warn!(key, "an object below this worker's prefix is not its own, it is left alone")
            }
        }
    }
    Ok(all)
}

async fn read(core: &Arc<Core>, name: Registered, objects: Objects) -> Result<Found, StoreError> {
    let prefix = shuffle_prefix(&core.settings.root, &name);
    let (notes, unequal) = read_pages(core, &prefix, &name, &objects.pages).await?;
    let mut single = Pages::new();
    for (number, page) in unequal {
        if !write_again(core, &prefix, number, &page).await {
            single.extend(objects.pages.get(&number).map(|objects| (number, objects.clone())));
        }
    }
    let incomplete = page::incomplete(&notes.records);
    let mut bound = bound(&name, &notes);
    bound.is_called_incomplete = !bound.has_gap && incomplete.is_some();
    let unfinished = || "what it had said on local disks was not brought up to its end".to_owned();
    let unfinished = (!bound.is_whole).then(unfinished);
    let mut data = Data::new(core, &prefix);
    let chain = chain(core, (&prefix, name.incarnation), &objects.segments, &mut data.reason).await?;
    for (number, (footer, entries)) in &chain {
        data.take(core, (*number, footer), entries).await?;
    }
    let last = |number: Option<u32>| number.unwrap_or(0).saturating_add(NUMBERS_LEFT_OUT);
    let lane = Lane {
        last_number: last(objects.segments.keys().copied().max()),
        published: objects
            .segments
            .keys()
            .copied()
            .filter(|number| chain.contains_key(number))
            .max()
            .unwrap_or(0),
    };
    let next_page = last(objects.pages.keys().next_back().copied());
    let told = RecoveredShuffle {
        key: name.key.clone(),
        incomplete: notes.gap.clone().or(incomplete).or(unfinished),
        present: data.present,
        lost: Vec::new(),
        reason: data.reason,
    };
    let shuffle = Shuffle::restored(core, name, (data.streams, lane), (next_page, notes.next()));
    if bound.is_whole {
        shuffle.begin_to_be_believed()?;
    }
    let is_stray = |number: &&u32| !chain.contains_key(number) && told.reason.is_empty();
    let strays =
        objects.segments.keys().filter(is_stray).map(|number| shuffle.segment_key(*number)).collect();
    for (number, (footer, _)) in &chain {
        shuffle.count(core, footer.payload_bytes, objects.segments.get(number).copied().unwrap_or(0));
    }
    let (bytes, blocks) = (data.bytes, data.blocks);
    Ok(Found { shuffle: Arc::new(shuffle), told, bound, strays, bytes, blocks, pages: objects.pages, single })
}

/// What ties a registration to one on local disks.
fn bound(name: &Registered, Reading { records, gap, .. }: &Reading) -> Bound {
    let numbers = records.iter().filter_map(|noted| match noted {
        Noted::Local(number) => Some(*number),
        Noted::Said(_) | Noted::Incomplete(_) => None,
    });
    let registration = |noted: &Noted| match noted {
        Noted::Said(record) if Record::is_registration(record) => Some(record.clone()),
        Noted::Said(_) | Noted::Incomplete(_) | Noted::Local(_) => None,
    };
    let local = numbers.clone().filter(|number| *number > 0).last();
    Bound {
        key: name.key.clone(),
        local,
        // Of one without its beginning nothing says that no disks knew it.
        is_whole: local.is_some() || (gap.is_none() && numbers.count() == 0),
        has_gap: gap.is_some(),
        is_called_incomplete: false,
        registrations: records.iter().filter_map(registration).collect(),
        incarnation: name.incarnation,
    }
}

/// What pages say, by the rule of reading; and those of which the two objects are not the same, as they should be. Of two the
/// longer one counts: what an earlier version of it has not was written later.
async fn read_pages(
    core: &Core,
    prefix: &str,
    name: &Registered,
    pages: &Pages,
) -> Result<(Reading, Vec<(u32, Bytes)>), StoreError> {
    let (mut reading, mut unequal) = (Reading::default(), Vec::new());
    for (number, objects) in pages {
        let reads = objects.iter().map(|object| read_page(core, object_key(prefix, *object)));
        let objects = try_join_all(reads).await?;
        let decode = |bytes: &Bytes| page::decode(bytes, name.incarnation);
        let intact = objects.iter().flatten().filter(|bytes| decode(bytes).is_ok());
        let best = intact.max_by_key(|bytes| bytes.len()).or_else(|| objects.iter().flatten().next());
        let page = best.map_or(Err(PageError::Damaged), decode);
        if let (Some(bytes), Ok(_)) = (best, &page)
            && objects != [Some(bytes.clone()), Some(bytes.clone())]
        {
            unequal.push((*number, bytes.clone()));
        }
        reading.take(*number, page);
    }
    Ok((reading, unequal))
}

/// None if it is not there any more.
async fn read_page(core: &Core, key: String) -> Result<Option<Bytes>, StoreError> {
    let answer = async { core.store.get(&path_of(&key)).await?.bytes().await };
    match core.noted(&key, answer.await) {
        Ok(page) => Ok(Some(page)),
        Err(error) if error.kind == StoreErrorKind::NotFound => Ok(None),
        Err(error) => Err(error),
    }
}

/// Makes a page and its copy the same again, if the store takes it: if not, [`mend`] does.
async fn write_again(core: &Core, prefix: &str, number: u32, page: &Bytes) -> bool {
    match notes::put_both(core, prefix, number, page).await {
        Ok(_) => {
            tracing::warn!(prefix, number, "a page of metadata and its copy differed, the whole one counts");
            true
        }
        Err(error) => {
            tracing::error!(prefix, number, %error, "a page of metadata has no copy, it is written later");
            false
        }
    }
}

/// Goes on until every page has a copy again: without it, what is lost next may be all that says what is lost.
pub(super) fn mend(core: &Arc<Core>, found: &[Found]) {
    let single = found.iter().filter(|it| !it.single.is_empty());
    let left: VecDeque<_> = single.map(|it| (Arc::clone(&it.shuffle), it.single.clone())).collect();
    if left.is_empty() {
        return;
    }
    let core = Arc::clone(core);
    core.tasks.clone().spawn("object metadata", async move {
        tokio::select! {
            biased;
            () = core.tasks.cancelled() => {}
            () = mend_all(&core, left) => {}
        }
    });
}

async fn mend_all(core: &Core, mut left: VecDeque<(Arc<Shuffle>, Pages)>) {
    let mut pause = MEND_PAUSE_MIN;
    while let Some((shuffle, pages)) = left.front() {
        sleep(pause).await;
        match mend_one(core, shuffle, pages).await {
            // It is the other process's.
            Err(error) if error.kind == StoreErrorKind::InUse => return,
            Err(error) if error.kind != StoreErrorKind::Purged => {
                tracing::warn!(shuffle = %shuffle.name.key, %error, "a page of metadata has no copy yet");
                left.rotate_left(1);
                pause = (pause * 2).clamp(MEND_PAUSE_MIN, MEND_PAUSE_MAX);
            }
            Ok(()) | Err(_) => {
                drop(left.pop_front());
                pause = Duration::ZERO;
            }
        }
    }
}

async fn mend_one(core: &Core, shuffle: &Shuffle, pages: &Pages) -> Result<(), StoreError> {
    let (_, unequal) = read_pages(core, &shuffle.prefix, &shuffle.name, pages).await?;
    for (number, page) in unequal {
        shuffle.notes.write_again(core, number, &page).await?;
    }
    Ok(())
}

type Segments = BTreeMap<u32, (Footer, Vec<Entry>)>;

/// The segments that were published, from the newest backwards. One that cannot be read hides which was before it: then the
/// next older one is taken.
async fn chain(
    core: &Core,
    (prefix, incarnation): (&str, u64),
    segments: &BTreeMap<u32, u64>,
    reason: &mut String,
) -> Result<Segments, StoreError> {
    let mut chain = Segments::new();
    let mut next = segments.keys().next_back().copied();
    while let Some(number) = next {
        let key = object_key(prefix, Name::Segment(number));
        let read = match segments.get(&number) {
            // What was damaged on its way is whole the second time.
            Some(bytes) => match read_index(core, &key, *bytes).await? {
                Ok(read) => Ok(read),
                Err(_) => read_index(core, &key, *bytes).await?,
            },
            None => Err("it is missing".to_owned()),
        };
        let read = read.and_then(|read| match (read.0.number, read.0.incarnation) == (number, incarnation) {
            true => Ok(read),
            false => Err("it is another one".to_owned()),
        });
        next = match read {
            Ok(read) => {
                let previous = read.0.previous;
                chain.insert(number, read);
                (previous != 0).then_some(previous)
            }
            Err(what) => {
                tracing::error!(key, what, "a segment cannot be read, its blocks are lost");
                if reason.is_empty() {
                    *reason = format!("object {key}: {what}");
                }
                segments.range(..number).next_back().map(|(number, _)| *number)
            }
        };
    }
    Ok(chain)
}

/// Footer and table of a segment, or what is wrong with it.
async fn read_index(
    core: &Core,
    key: &str,
    bytes: u64,
) -> Result<Result<(Footer, Vec<Entry>), String>, StoreError> {
    let Some(at) = bytes.checked_sub(FOOTER_BYTES as u64) else {
        return Ok(Err("it is too short".to_owned()));
    };
    let footer = fetch::read(core, key, at..bytes).await?;
    let footer = footer.first_chunk().ok_or_else(|| StoreError::new(StoreErrorKind::Corrupt, key))?;
    let footer = match Footer::decode(footer, bytes) {
        Ok(footer) => footer,
        Err(error) => return Ok(Err(error.to_string())),
    };
    let table = footer.payload_bytes..footer.payload_bytes + footer.table_bytes();
    let table = fetch::read(core, key, table).await?;
    Ok(footer.table(&table).map(|entries| (footer, entries)).map_err(|error| error.to_string()))
}

/// What of a shuffle's data is there.
struct Data {
    prefix: String,
    streams: Streams,
    present: HashMap<PartitionId, IdSet>,
    reason: String,
    bytes: u64,
    blocks: u64,
}

impl Data {
    fn new(core: &Core, prefix: &str) -> Self {
        let (present, reason) = (HashMap::new(), String::new());
        let streams = Streams::new(&core.extents);
        Self { prefix: prefix.to_owned(), streams, present, reason, bytes: 0, blocks: 0 }
    }

    /// Takes what a segment has.
    async fn take(
        &mut self,
        core: &Core,
        (number, footer): (u32, &Footer),
        entries: &[Entry],
    ) -> Result<(), StoreError> {
        let key = object_key(&self.prefix, Name::Segment(number));
        let mut records = RecordStream::new(core, &key, footer);
        for entry in entries {
            let (mut ids, mut is_sound) = records.ids_of(entry).await?;
            if !is_sound {
                records.go_back_to(entry);
                (ids, is_sound) = records.ids_of(entry).await?;
            }
            if is_sound && self.streams.push(entry.partition, Extent::of(number, entry)) {
                self.present.entry(entry.partition).or_default().extend(ids);
                self.bytes += entry.length;
                self.blocks += u64::from(entry.blocks);
            } else if self.reason.is_empty() {
                let what = if is_sound { "what was before it is missing" } else { "its index is damaged" };
                self.reason = format!("object {key}: {what}");
            }
        }
        Ok(())
    }
}

/// The records of a segment, read in order.
struct RecordStream<'a> {
    core: &'a Core,
    key: &'a str,
    window: Bytes,
    /// Where in the object the window ends, and the records do.
    at: u64,
    end: u64,
}

impl<'a> RecordStream<'a> {
    fn new(core: &'a Core, key: &'a str, footer: &Footer) -> Self {
        let at = footer.payload_bytes + footer.table_bytes();
        Self { core, key, window: Bytes::new(), at, end: footer.payload_bytes + footer.index_bytes }
    }

    /// The next extent is `entry`, of which the bytes are asked for again.
    fn go_back_to(&mut self, entry: &Entry) {
        (self.window, self.at) = (Bytes::new(), entry.records);
    }

    /// Block ids of the next extent, and whether its records are what was written.
    async fn ids_of(&mut self, entry: &Entry) -> Result<(Vec<u64>, bool), StoreError> {
        let mut left = entry.blocks as usize * RECORD_BYTES;
        let (mut ids, mut length) = (Vec::with_capacity(entry.blocks as usize), 0);
        let mut crc = crc32fast::Hasher::new();
        while left > 0 {
            if self.window.is_empty() {
                let window = WINDOW_BYTES / RECORD_BYTES as u64 * RECORD_BYTES as u64;
                let until = self.end.min(self.at + window);
                self.window = fetch::read(self.core, self.key, self.at..until).await?;
                self.at = until;
            }
            let some = self.window.split_to(left.min(self.window.len()));
            if some.is_empty() {
                return Err(StoreError::new(StoreErrorKind::Corrupt, self.key));
            }
            left -= some.len();
            crc.update(&some);
            for record in records(&some) {
                ids.push(record.block_id.unsigned_abs());
                length += u64::from(record.length.unsigned_abs());
            }
        }
        Ok((ids, crc.finalize() == entry.records_crc && length == entry.length))
    }
}

/// What the found shuffles said. It is read when it is asked for, a page at a time.
pub(super) fn said(core: &Arc<Core>, found: &[Found]) -> Said {
    let (told, said) = mpsc::channel(TOLD_MAX);
    let all: VecDeque<_> = found.iter().map(|it| (Arc::clone(&it.shuffle), it.pages.clone())).collect();
    let reader = Arc::clone(core);
    core.tasks.spawn("object metadata", async move {
        tokio::select! {
            biased;
            () = reader.tasks.cancelled() => {}
            () = tell_all(&reader, all, &told) => {}
        }
    });
    Said::of(said)
}

type Told = Result<Option<(ShuffleKey, Bytes)>, LogError>;

async fn tell_all(core: &Core, all: VecDeque<(Arc<Shuffle>, Pages)>, told: &mpsc::Sender<Told>) {
    for (shuffle, pages) in all {
        let records = match read_pages(core, &shuffle.prefix, &shuffle.name, &pages).await {
            Ok((reading, _)) => reading.records,
            Err(error) => {
                // Who listens may be gone.
                let _ = told.send(Err(LogError::told(&error.to_string()))).await;
                return;
            }
        };
        for record in records {
            let Noted::Said(record) = record else { continue };
            if told.send(Ok(Some((shuffle.name.key.clone(), record)))).await.is_err() {
                return;
            }
        }
    }
    let _ = told.send(Ok(None)).await;
}
