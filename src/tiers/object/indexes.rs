//! Reads the indexes of a shuffle's segments at start, to find the published segments and the
//! blocks in them.
//!
//! First, all footers are read, and they tell which segments were published. Then the indexes are
//! read ahead in the order of the segments. The indexes of all shuffles together occupy at most
//! [`INDEX_BYTES`], or the size of the largest index, and are charged.

use std::collections::{BTreeMap, HashMap};

use futures::stream::{self, StreamExt as _, TryStreamExt as _};
use tokio::sync::{Semaphore, SemaphorePermit};

use super::core::Core;
use super::fetch;
use super::layout::{Entry, FOOTER_BYTES, Footer, segment_key};
use crate::budget::Charge;
use crate::durability::PresentIds;
use crate::tiers::extent::Extent;
use crate::tiers::extents::InStream as _;
use crate::tiers::records::are_sound;
use crate::tiers::stored::overlapping;
use crate::tiers::streams::Streams;
use crate::tiers::{StoreError, StoreErrorKind};
use uniffle_wire::index::{RECORD_BYTES, records};
use uniffle_wire::types::PartitionId;

/// Footers of a shuffle that are read concurrently.
const FOOTERS_AT_ONCE: usize = 64;
/// Indexes of a shuffle that are read concurrently.
const INDEXES_AT_ONCE: usize = 64;
/// Limit for the indexes of all shuffles in memory.
const INDEX_BYTES: u32 = 64 << 20;
/// Heap of a recovered extent that was moved from local disks, with its tree entry.
const MOVED_EXTENT_BYTES: u64 = 3 * size_of::<Extent>() as u64;

/// Permits for bytes of indexes in memory.
#[derive(Debug)]
pub(super) struct IndexMemory(Semaphore);

impl Default for IndexMemory {
    fn default() -> Self {
        Self(Semaphore::new(INDEX_BYTES as usize))
    }
}

impl IndexMemory {
    /// Waits in arrival order for the memory of an index.
    async fn room(&self, bytes: u64) -> Option<SemaphorePermit<'_>> {
        let bytes = u32::try_from(bytes).unwrap_or(INDEX_BYTES).min(INDEX_BYTES);
        self.0.acquire_many(bytes).await.ok()
    }
}

/// Reader of the segments of one incarnation.
#[derive(Clone, Copy)]
pub(super) struct Indexes<'a> {
    pub(super) core: &'a Core,
    /// Prefix of the keys of its objects.
    pub(super) prefix: &'a str,
    pub(super) memory: &'a IndexMemory,
}

/// Published segments, oldest first.
type Chain = BTreeMap<u32, Footer>;

/// Recovered data of a shuffle.
pub(super) struct Data {
    prefix: String,
    pub(super) streams: Streams,
    /// Extents moved from local disks, by base. There may be holes between them.
    pub(super) moved: HashMap<PartitionId, BTreeMap<u64, Extent>>,
    /// Charge of the moved extents.
    pub(super) charge: Charge,
    is_below_disks: bool,
    pub(super) present: PresentIds,
    /// Reason for missing data. Empty if no data is missing.
    pub(super) reason: String,
    pub(super) bytes: u64,
    pub(super) blocks: u64,
}

/// Index of one segment.
struct Index<'a> {
    extents: Vec<IndexedExtent>,
    /// Damage that makes the whole index unusable.
    damage: Option<String>,
    _room: Option<SemaphorePermit<'a>>,
    _charge: Charge,
}

/// An extent with the ids of its blocks. `ids` is `None` if its records are damaged.
struct IndexedExtent {
    entry: Entry,
    ids: Option<Vec<u64>>,
}

impl<'a> Indexes<'a> {
    /// Reads the segments of an incarnation. `segments` has the size of each segment by number.
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

    /// Returns the footer of a segment, or its damage. A damaged footer is read a second time,
    /// because it may have been damaged in transit.
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
        let ids_bytes = footer.blocks * size_of::<u64>() as u64;
        let _charge = self.core.extents.force_charge(footer.index_bytes + ids_bytes);
        let mut content = self.content(number, footer).await?;
        if !content.as_ref().is_ok_and(|all| all.iter().all(|it| it.ids.is_some())) {
            // Read again, because the bytes may have been damaged in transit.
            content = self.content(number, footer).await?;
        }
        let (extents, damage) = content.map_or_else(|why| (Vec::new(), Some(why)), |all| (all, None));
        Ok(Index { extents, damage, _room, _charge })
    }

    /// Reads an index. Returns its extents, or the damage of its table.
    async fn content(
        self,
        number: u32,
        footer: &Footer,
    ) -> Result<Result<Vec<IndexedExtent>, String>, StoreError> {
        let range = footer.payload_bytes..footer.payload_bytes + footer.index_bytes;
        let index = fetch::read(self.core, &self.key(number), range).await?;
        let part = |start: u64, bytes: u64| {
            let at = |place: u64| usize::try_from(place - footer.payload_bytes).unwrap_or(usize::MAX);
            index.get(at(start)..at(start + bytes)).unwrap_or_default()
        };
        let table = match footer.table(part(footer.payload_bytes, footer.table_bytes())) {
            Ok(table) => table,
            Err(error) => return Ok(Err(error.to_string())),
        };
        let mut extents = Vec::with_capacity(table.len());
        for entry in table {
            tokio::task::coop::consume_budget().await;
            let all = part(entry.records, u64::from(entry.blocks) * RECORD_BYTES as u64);
            let is_sound = are_sound(all, entry.length, entry.records_crc);
            let ids = is_sound.then(|| records(all).map(|record| record.block_id.unsigned_abs()).collect());
            extents.push(IndexedExtent { entry, ids });
        }
        Ok(Ok(extents))
    }
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

    /// Returns the published segments. Each footer names the segment published before it, so the
    /// search begins at the newest segment. If a footer is unreadable, the search continues with
    /// the next older segment in the store.
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

    /// Adds an extent. Without local disks, returns false if it does not continue the stream. With
    /// local disks, returns false if it overlaps an extent that is not its copy.
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
            // A process that ended before it recorded an upload has repeated the upload.
            return other.is_copy_of(&extent);
        }
        extents.insert(extent.base, extent);
        self.charge.merge(self.charge.budget().force_charge(MOVED_EXTENT_BYTES));
        true
    }

    /// Adds the extents and blocks of a segment.
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
