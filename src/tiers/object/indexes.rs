//! Indexes of the segments of a shuffle, read when a worker starts: which segments make up its streams, and which blocks they hold.
//!
//! All footers are read first, many at a time, and say which segments were published. Then their indexes are read ahead in the order of
//! the segments. All shuffles together hold at most [`INDEX_BYTES`] of indexes, or the largest one; that is charged.

use std::collections::{BTreeMap, HashMap};

use bytes::Bytes;
use futures::stream::{self, StreamExt as _, TryStreamExt as _};
use tokio::sync::{Semaphore, SemaphorePermit};

use super::core::Core;
use super::fetch;
use super::layout::{Entry, FOOTER_BYTES, Footer, segment_key};
use crate::budget::Charge;
use crate::durability::PresentIds;
use crate::tiers::extent::Extent;
use crate::tiers::extents::InStream as _;
use crate::tiers::records::RecordCheck;
use crate::tiers::stored::overlapping;
use crate::tiers::streams::Streams;
use crate::tiers::{StoreError, StoreErrorKind};
use uniffle_wire::index::{RECORD_BYTES, records};
use uniffle_wire::types::PartitionId;

/// Footers of a shuffle that are read at a time.
const FOOTERS_AT_ONCE: usize = 64;
/// Indexes of a shuffle that are read ahead.
const INDEXES_AT_ONCE: usize = 64;
/// Bytes of indexes that are held at a time, of all shuffles.
const INDEX_BYTES: u32 = 64 << 20;
/// Heap of a moved extent that was found, with its place in a tree.
const MOVED_EXTENT_BYTES: u64 = 3 * size_of::<Extent>() as u64;
/// Bytes of an index that are read at a time.
const WINDOW_BYTES: u64 = 1 << 20;

/// Permits for bytes of indexes.
#[derive(Debug)]
pub(super) struct IndexMemory(Semaphore);

impl Default for IndexMemory {
    fn default() -> Self {
        Self(Semaphore::new(INDEX_BYTES as usize))
    }
}

impl IndexMemory {
    /// Waits for the room of an index; those that ask first get it first.
    async fn room(&self, bytes: u64) -> Option<SemaphorePermit<'_>> {
        let bytes = u32::try_from(bytes).unwrap_or(INDEX_BYTES).min(INDEX_BYTES);
        self.0.acquire_many(bytes).await.ok()
    }
}

/// The segments of a registration of a shuffle.
#[derive(Clone, Copy)]
pub(super) struct Indexes<'a> {
    pub(super) core: &'a Core,
    /// Of its objects' keys.
    pub(super) prefix: &'a str,
    pub(super) memory: &'a IndexMemory,
}

/// Published segments, oldest first.
type Chain = BTreeMap<u32, Footer>;

/// What of a shuffle's data is there.
pub(super) struct Data {
    prefix: String,
    pub(super) streams: Streams,
    /// Extents below local disks, by base. There may be holes between them.
    pub(super) moved: HashMap<PartitionId, BTreeMap<u64, Extent>>,
    /// Memory of these extents.
    pub(super) charge: Charge,
    is_below_disks: bool,
    pub(super) present: PresentIds,
    /// Why some of it is not; empty if all is.
    pub(super) reason: String,
    pub(super) bytes: u64,
    pub(super) blocks: u64,
}

/// The index of one segment.
struct Index<'a> {
    extents: Vec<IndexedExtent>,
    /// Why it has none.
    damage: Option<String>,
    _room: Option<SemaphorePermit<'a>>,
    _charge: Charge,
}

/// An extent, and the ids of its blocks unless its records are damaged.
struct IndexedExtent {
    entry: Entry,
    ids: Option<Vec<u64>>,
}

impl<'a> Indexes<'a> {
    /// Reads the segments of an incarnation, by number and bytes.
    ///
    /// # Errors
    /// The store does not answer or refuses.
    pub(super) async fn read(
        self,
        (incarnation, segments): (u64, &BTreeMap<u32, u64>),
    ) -> Result<(Chain, Data), StoreError> {
        let mut data = Data::new(self.core, self.prefix);
        let footers = segments.clone().into_iter().map(|(number, bytes)| async move {
            let footer = self.footer(number, bytes).await?;
            let is_its_own = |it: &Footer| (it.number, it.incarnation) == (number, incarnation);
            let another = || "its footer belongs to another segment".to_owned();
            Ok::<_, StoreError>((
                number,
                footer.and_then(|it| is_its_own(&it).then_some(it).ok_or_else(another)),
            ))
        });
        let footers = stream::iter(footers).buffer_unordered(FOOTERS_AT_ONCE).try_collect().await?;
        let chain = data.chain(&footers);
        let reads = chain.clone().into_iter().map(|(number, footer)| async move {
            let index = self.index(number, &footer).await?;
            Ok::<_, StoreError>((number, index))
        });
        let mut reads = stream::iter(reads).buffered(INDEXES_AT_ONCE);
        while let Some((number, index)) = reads.try_next().await? {
            data.take(number, index);
        }
        drop(reads);
        Ok((chain, data))
    }

    fn key(self, number: u32) -> String {
        segment_key(self.prefix, number)
    }

    /// The footer of a segment, or what is wrong with it. What was damaged on its way is whole the second time.
    async fn footer(self, number: u32, bytes: u64) -> Result<Result<Footer, String>, StoreError> {
        match self.footer_once(number, bytes).await? {
            Ok(footer) => Ok(Ok(footer)),
            Err(_) => self.footer_once(number, bytes).await,
        }
    }

    async fn footer_once(self, number: u32, bytes: u64) -> Result<Result<Footer, String>, StoreError> {
        let key = self.key(number);
        let Some(at) = bytes.checked_sub(FOOTER_BYTES as u64) else {
            return Ok(Err("too short for a footer".to_owned()));
        };
        let footer = fetch::read(self.core, &key, at..bytes).await?;
        let footer = footer.first_chunk().ok_or_else(|| StoreError::new(StoreErrorKind::Corrupt, key))?;
        Ok(Footer::decode(footer, bytes).map_err(|error| error.to_string()))
    }

    async fn index(self, number: u32, footer: &Footer) -> Result<Index<'a>, StoreError> {
        let _room = self.memory.room(footer.index_bytes).await;
        let _charge = self.core.extents.force_charge(footer.index_bytes);
        let mut index = Index { extents: Vec::new(), damage: None, _room, _charge };
        let key = self.key(number);
        let mut window = self.window(&key, footer).await?;
        let mut table = table_of(footer, &window);
        if table.is_err() {
            window = self.window(&key, footer).await?;
            table = table_of(footer, &window);
        }
        let entries = match table {
            Ok(entries) => entries,
            Err(damage) => {
                index.damage = Some(damage);
                return Ok(index);
            }
        };
        let mut records = RecordStream::new(self.core, &key, footer, window);
        for entry in entries {
            let (mut ids, mut is_sound) = records.ids_of(&entry).await?;
            if !is_sound {
                records.go_back_to(&entry);
                (ids, is_sound) = records.ids_of(&entry).await?;
            }
            index.extents.push(IndexedExtent { entry, ids: is_sound.then_some(ids) });
        }
        Ok(index)
    }

    /// The beginning of an index: at least its table.
    async fn window(self, key: &str, footer: &Footer) -> Result<Bytes, StoreError> {
        let bytes = footer.index_bytes.min(WINDOW_BYTES.max(footer.table_bytes()));
        fetch::read(self.core, key, footer.payload_bytes..footer.payload_bytes + bytes).await
    }
}

fn table_of(footer: &Footer, window: &Bytes) -> Result<Vec<Entry>, String> {
    let bytes = usize::try_from(footer.table_bytes()).ok().and_then(|bytes| window.get(..bytes));
    footer.table(bytes.unwrap_or_default()).map_err(|error| error.to_string())
}

impl Data {
    fn new(core: &Core, prefix: &str) -> Self {
        let (present, reason) = (PresentIds::default(), String::new());
        let (streams, charge) = (Streams::new(&core.extents), core.extents.nothing());
        Self {
            prefix: prefix.to_owned(),
            streams,
            moved: HashMap::new(),
            charge,
            is_below_disks: core.settings.is_below_disks,
            present,
            reason,
            bytes: 0,
            blocks: 0,
        }
    }

    /// The segments that were published, found from the newest backwards. One that cannot be read hides which was before it: then the
    /// next older one is taken.
    fn chain(&mut self, footers: &BTreeMap<u32, Result<Footer, String>>) -> Chain {
        let mut chain = Chain::new();
        let mut next = footers.keys().next_back().copied();
        while let Some(number) = next {
            let missing = Err("missing".to_owned());
            next = match footers.get(&number).unwrap_or(&missing) {
                Ok(footer) => {
                    chain.insert(number, *footer);
                    (footer.previous != 0).then_some(footer.previous)
                }
                Err(what) => {
                    self.miss(number, what);
                    footers.range(..number).next_back().map(|(number, _)| *number)
                }
            };
        }
        chain
    }

    fn miss(&mut self, number: u32, what: &str) {
        let key = segment_key(&self.prefix, number);
        tracing::error!(key, what, "cannot read a segment; its blocks are lost");
        if self.reason.is_empty() {
            self.reason = format!("object {key}: {what}");
        }
    }

    /// Adds an extent. Returns false if the extents before it do not leave its place free.
    fn push(&mut self, partition: PartitionId, extent: Extent) -> bool {
        if !self.is_below_disks {
            let is_next = self.streams.get(partition).map_or(0, |it| it.bytes) == extent.base;
            if is_next {
                self.streams.push(partition, extent, 0);
            }
            return is_next;
        }
        let extents = self.moved.entry(partition).or_default();
        if let Some(other) = overlapping(extents, extent.base..extent.end()) {
            // A process that ended before it knew of an upload has repeated it.
            return other.is_copy_of(&extent);
        }
        extents.insert(extent.base, extent);
        self.charge.merge(self.charge.budget().force_charge(MOVED_EXTENT_BYTES));
        true
    }

    /// Takes what a segment has.
    fn take(&mut self, number: u32, index: Index<'_>) {
        if let Some(damage) = &index.damage {
            return self.miss(number, damage);
        }
        for IndexedExtent { entry, ids } in index.extents {
            let is_sound = ids.is_some();
            match ids {
                Some(ids) if self.push(entry.partition, entry.extent(number)) => {
                    self.present.add(entry.partition, &ids);
                    self.bytes += entry.length;
                    self.blocks += u64::from(entry.blocks);
                }
                _ if self.reason.is_empty() => {
                    let key = segment_key(&self.prefix, number);
                    let what =
                        if is_sound { "its range overlaps another segment" } else { "its index is corrupt" };
                    self.reason = format!("object {key}: {what}");
                }
                _ => {}
            }
        }
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
    /// `window` is the beginning of the index, with its table.
    fn new(core: &'a Core, key: &'a str, footer: &Footer, window: Bytes) -> Self {
        let at = footer.payload_bytes + window.len() as u64;
        let table = usize::try_from(footer.table_bytes()).unwrap_or(usize::MAX).min(window.len());
        let mut stream = Self {
            core,
            key,
            window: window.slice(table..),
            at,
            end: footer.payload_bytes + footer.index_bytes,
        };
        // A window ends with a whole record.
        let odd = stream.window.len() % RECORD_BYTES;
        stream.window.truncate(stream.window.len() - odd);
        stream.at -= odd as u64;
        stream
    }

    /// The next extent is `entry`, of which the bytes are asked for again.
    fn go_back_to(&mut self, entry: &Entry) {
        (self.window, self.at) = (Bytes::new(), entry.records);
    }

    /// Block ids of the next extent, and whether its records are what was written.
    async fn ids_of(&mut self, entry: &Entry) -> Result<(Vec<u64>, bool), StoreError> {
        let mut left = entry.blocks as usize * RECORD_BYTES;
        let (mut ids, mut check) = (Vec::with_capacity(entry.blocks as usize), RecordCheck::default());
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
            check.accept(&some);
            ids.extend(records(&some).map(|record| record.block_id.unsigned_abs()));
        }
        Ok((ids, check.matches(entry.length, entry.records_crc)))
    }
}
