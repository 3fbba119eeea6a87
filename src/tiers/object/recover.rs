//! What an earlier process of this worker left in the store, read when a worker starts.
//!
//! A shuffle is there if a page says that it was registered; without one it was being deleted, or its registration was
//! never acknowledged. Its segments are those of the chain from the newest backwards; others are uploads whose outcome was
//! never known. What of a stream cannot be had, and what stands behind it, is not there, and so its blocks are lost by name.
//!
//! Requests go out many at a time, each kind with a bound, and what their answers hold is charged.

use std::collections::{BTreeMap, VecDeque};
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use futures::future::try_join_all;
use futures::stream::{self, StreamExt as _, TryStreamExt as _};
use object_store::{ObjectStore as _, ObjectStoreExt as _};
use tokio::sync::mpsc;

use super::claim::claim_key;
use super::core::Core;
use super::indexes::{IndexMemory, Indexes};
use super::intake::Bound;
use super::lane::Lane;
use super::layout::{Name, Registered, object_key, parse_key, path_of, shuffle_prefix};
use super::notes;
use super::page::{self, Noted, PageError, Reading};
use super::shuffle::Shuffle;
use crate::budget::Charge;
use crate::clock::sleep;
use crate::durability::{LogError, Record, Said};
use crate::tiers::{RecoveredShuffle, StoreError, StoreErrorKind};
use uniffle_wire::types::ShuffleKey;

/// Shuffles that are read at a time.
const AT_ONCE: usize = 8;

/// Pages of a shuffle that are read at a time, each with its copy.
const PAGES_AT_ONCE: usize = 8;

/// Shuffles whose pages are read ahead while what one said is told.
const TOLD_AHEAD: usize = 4;

/// Numbers that are left out: a request of the earlier process may still arrive.
const NUMBERS_LEFT_OUT: u32 = 1000;

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
    let memory = IndexMemory::default();
    let reads = newest.into_values().map(|found| read(core, found, &memory));
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

async fn read(
    core: &Arc<Core>,
    (name, objects): (Registered, Objects),
    memory: &IndexMemory,
) -> Result<Found, StoreError> {
    let prefix = shuffle_prefix(&core.settings.root, &name);
    let ReadPages { reading: notes, unequal, _charge } =
        read_pages(core, &prefix, &name, &objects.pages).await?;
    let mut single = Pages::new();
    for (number, page) in unequal {
        if !write_again(core, &prefix, number, &page).await {
            single.extend(objects.pages.get(&number).map(|objects| (number, objects.clone())));
        }
    }
    let incomplete = page::incomplete(&notes.records);
    let mut bound = bound(&name, &notes, !objects.segments.is_empty());
    bound.is_called_incomplete = !bound.has_gap && incomplete.is_some();
    let unfinished = || "what it had said on local disks was not brought up to its end".to_owned();
    let unfinished = (!bound.is_whole).then(unfinished);
    let indexes = Indexes { core, prefix: &prefix, memory };
    let (chain, mut data) = indexes.read((name.incarnation, &objects.segments)).await?;
    if bound.has_lost_registration && data.reason.is_empty() {
        data.reason = "the page of its metadata with its registration is lost".to_owned();
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
    for (number, footer) in &chain {
        shuffle.count(core, footer.payload_bytes, objects.segments.get(number).copied().unwrap_or(0));
    }
    let (bytes, blocks) = (data.bytes, data.blocks);
    Ok(Found { shuffle: Arc::new(shuffle), told, bound, strays, bytes, blocks, pages: objects.pages, single })
}

/// What ties a registration to one on local disks.
fn bound(name: &Registered, Reading { records, gap, .. }: &Reading, has_segments: bool) -> Bound {
    let numbers = records.iter().filter_map(|noted| match noted {
        Noted::Local(number) => Some(*number),
        Noted::Said(_) | Noted::Incomplete(_) => None,
    });
    let registration = |noted: &Noted| match noted {
        Noted::Said(record) if Record::is_registration(record) => Some(record.clone()),
        Noted::Said(_) | Noted::Incomplete(_) | Noted::Local(_) => None,
    };
    let locals: Vec<u64> = numbers.clone().filter(|number| *number > 0).collect();
    let local = locals.last().copied();
    Bound {
        key: name.key.clone(),
        local,
        locals,
        has_segments,
        // A deletion begins with the first page.
        has_lost_registration: has_segments
            && records.first() == Some(&Noted::Local(0))
            && !records.iter().any(|noted| registration(noted).is_some()),
        // Of one without its beginning nothing says that no disks knew it.
        is_whole: local.is_some() || (gap.is_none() && numbers.count() == 0),
        has_gap: gap.is_some(),
        is_called_incomplete: false,
        registrations: records.iter().filter_map(registration).collect(),
        incarnation: name.incarnation,
    }
}

/// What pages say.
struct ReadPages {
    reading: Reading,
    /// Those of which the two objects are not the same, as they should be.
    unequal: Vec<(u32, Bytes)>,
    /// For their bytes, of which records are slices.
    _charge: Charge,
}

/// Reads pages by the rule of reading. Of the two objects of a page the longer one counts: what an earlier version of it has not was
/// written later.
async fn read_pages(
    core: &Core,
    prefix: &str,
    name: &Registered,
    pages: &Pages,
) -> Result<ReadPages, StoreError> {
    let mut read =
        ReadPages { reading: Reading::default(), unequal: Vec::new(), _charge: core.extents.nothing() };
    let reads = pages.clone().into_iter().map(|(number, objects)| async move {
        let reads = objects.into_iter().map(|object| read_page(core, object_key(prefix, object)));
        Ok::<_, StoreError>((number, try_join_all(reads.collect::<Vec<_>>()).await?))
    });
    let mut reads = stream::iter(reads).buffered(PAGES_AT_ONCE);
    while let Some((number, objects)) = reads.try_next().await? {
        let decode = |bytes: &Bytes| page::decode(bytes, name.incarnation);
        let intact = objects.iter().flatten().filter(|bytes| decode(bytes).is_ok());
        let best = intact.max_by_key(|bytes| bytes.len()).or_else(|| objects.iter().flatten().next());
        let page = best.map_or(Err(PageError::Damaged), decode);
        if let (Some(bytes), Ok(_)) = (best, &page) {
            read._charge.merge(core.extents.force_charge(bytes.len() as u64));
            if objects != [Some(bytes.clone()), Some(bytes.clone())] {
                read.unequal.push((number, bytes.clone()));
            }
        }
        read.reading.take(number, page);
    }
    Ok(read)
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
    let read = read_pages(core, &shuffle.prefix, &shuffle.name, pages).await?;
    for (number, page) in read.unequal {
        shuffle.notes.write_again(core, number, &page).await?;
    }
    Ok(())
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
    let reads = all.into_iter().map(|(shuffle, pages)| async move {
        let read = read_pages(core, &shuffle.prefix, &shuffle.name, &pages).await;
        read.map(|read| (shuffle, read))
    });
    let mut reads = stream::iter(reads).buffered(TOLD_AHEAD);
    while let Some(read) = reads.next().await {
        let (shuffle, ReadPages { reading, _charge, .. }) = match read {
            Ok(read) => read,
            Err(error) => {
                // Who listens may be gone.
                let _ = told.send(Err(LogError::told(&error.to_string()))).await;
                return;
            }
        };
        for record in reading.records {
            let Noted::Said(record) = record else { continue };
            if told.send(Ok(Some((shuffle.name.key.clone(), record)))).await.is_err() {
                return;
            }
        }
    }
    let _ = told.send(Ok(None)).await;
}
