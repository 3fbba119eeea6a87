//! Reads the indexes of a shuffle's segments at start, to find the published segments and the
//! blocks in them.
//!
//! First, all tails are read, and they tell which segments were published. Then the indexes are
//! read ahead in the order of the segments. The indexes of all shuffles that are in memory together
//! have at most [`INDEX_BYTES`], or the size of the largest index. They and the ids decoded from
//! them are charged.

use std::collections::{BTreeMap, HashMap};

use futures::stream::{self, StreamExt as _, TryStreamExt as _};
use tokio::sync::{Semaphore, SemaphorePermit};

use crate::log::PresentIds;
use crate::store::StoreError;
use crate::store::extents::extent::Extent;
use crate::store::extents::extent_list::InStream as _;
use crate::store::index::codec::decode_head;
use crate::store::object::core::ObjectCore;
use crate::store::object::layout::{SegmentId, SegmentTail, TAIL_BYTES, segment_key};
use crate::store::object::read::fetch;
use crate::store::recovered::overlapping;
use uniffle_base::budget::Charge;
use uniffle_wire::index::{RECORD_BYTES, records};
use uniffle_wire::types::PartitionId;

/// Tails of a shuffle that are read concurrently.
const TAILS_AT_ONCE: usize = 64;
/// Indexes of a shuffle that are read concurrently.
const INDEXES_AT_ONCE: usize = 64;
/// Limit for the indexes of all shuffles in memory.
const INDEX_BYTES: u32 = 64 << 20;
/// Heap of a recovered extent, with its tree entry.
const EXTENT_BYTES: u64 = 3 * size_of::<Extent>() as u64;

/// Permits for bytes of indexes in memory.
#[derive(Debug)]
pub(in crate::store) struct IndexMemory(Semaphore);

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
    pub(in crate::store) core: &'a ObjectCore,
    /// Prefix of the keys of its objects.
    pub(in crate::store) prefix: &'a str,
    pub(in crate::store) incarnation: u64,
    pub(in crate::store) memory: &'a IndexMemory,
}

/// Published segments, oldest first.
type PublishedSegments = BTreeMap<u32, SegmentTail>;

/// Recovered data of a shuffle.
pub(in crate::store) struct Data {
    prefix: String,
    /// Extents by base. There may be holes between them.
    pub(in crate::store) extents: HashMap<PartitionId, BTreeMap<u64, Extent>>,
    /// Charge of the extents.
    pub(in crate::store) charge: Charge,
    pub(in crate::store) present: PresentIds,
    /// Reason for missing data. Empty if no data is missing.
    pub(in crate::store) reason: String,
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
    partition: PartitionId,
    extent: Extent,
    ids: Option<Vec<u64>>,
}

impl<'a> Indexes<'a> {
    /// Reads the segments of an incarnation. `segments` has the size of each segment by number.
    ///
    /// # Errors
    /// The store does not answer or refuses.
    pub(in crate::store) async fn read(
        self,
        segments: &BTreeMap<u32, u64>,
    ) -> Result<(PublishedSegments, Data), StoreError> {
        let mut data = Data::new(self.core, self.prefix);
        let tails = segments.clone().into_iter().map(|(number, bytes)| async move {
            let tail = self.tail(number, bytes).await?;
            Ok::<_, StoreError>((number, tail.ok_or("its end is not the tail of this segment")))
        });
        let tails = stream::iter(tails).buffer_unordered(TAILS_AT_ONCE).try_collect().await?;
        let chain = data.chain(&tails);
        let reads = chain.clone().into_iter().map(|(number, tail)| async move {
            let index = self.index(number, &tail).await?;
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

    fn id(self, number: u32) -> SegmentId {
        SegmentId { incarnation: self.incarnation, number }
    }

    /// Returns the tail of a segment, or `None` if it is damaged. A damaged tail is read a second
    /// time, because it may have been damaged in transit.
    async fn tail(self, number: u32, bytes: u64) -> Result<Option<SegmentTail>, StoreError> {
        match self.tail_once(number, bytes).await? {
            Some(tail) => Ok(Some(tail)),
            None => self.tail_once(number, bytes).await,
        }
    }

    async fn tail_once(self, number: u32, bytes: u64) -> Result<Option<SegmentTail>, StoreError> {
        let Some(at) = bytes.checked_sub(TAIL_BYTES as u64) else { return Ok(None) };
        let tail = fetch::read(self.core, &self.key(number), at..bytes).await?;
        Ok(tail.first_chunk().and_then(|tail| SegmentTail::decode(tail, self.id(number), bytes)))
    }

    async fn index(self, number: u32, tail: &SegmentTail) -> Result<Index<'a>, StoreError> {
        let _room = self.memory.room(tail.index_bytes).await;
        let ids_bytes = tail.index_bytes / RECORD_BYTES as u64 * size_of::<u64>() as u64;
        let _charge = self.core.extents.charge_unchecked(tail.index_bytes + ids_bytes);
        let mut content = self.content(number, tail).await?;
        if !content.as_ref().is_ok_and(|all| all.iter().all(|it| it.ids.is_some())) {
            // Read again, because the bytes may have been damaged in transit.
            content = self.content(number, tail).await?;
        }
        let (extents, damage) = content.map_or_else(|why| (Vec::new(), Some(why)), |all| (all, None));
        Ok(Index { extents, damage, _room, _charge })
    }

    /// Reads an index. Returns its extents, or the damage of its head.
    async fn content(
        self,
        number: u32,
        tail: &SegmentTail,
    ) -> Result<Result<Vec<IndexedExtent>, String>, StoreError> {
        let (start, end) = (tail.payload_bytes, tail.payload_bytes + tail.index_bytes);
        let index = fetch::read(self.core, &self.key(number), start..end).await?;
        let head = match decode_head(&index) {
            Ok(head) => head,
            Err(error) => return Ok(Err(error.to_string())),
        };
        if (head.header, head.bytes) != (self.id(number).header(tail.previous), index.len()) {
            return Ok(Err("its index belongs to another segment".to_owned()));
        }
        let mut extents = Vec::with_capacity(head.entries.len());
        for entry in head.entries {
            tokio::task::coop::consume_budget().await;
            let is_payload = entry.data_offset + entry.length <= start;
            let all = entry.records(&index).filter(|_| is_payload);
            let ids = all.map(|all| records(all).map(|record| record.block_id.unsigned_abs()).collect());
            let extent = Extent::of_segment(&entry, number, start);
            extents.push(IndexedExtent { partition: entry.partition, extent, ids });
        }
        Ok(Ok(extents))
    }
}

impl Data {
    fn new(core: &ObjectCore, prefix: &str) -> Self {
        let (present, reason) = (PresentIds::default(), String::new());
        let (prefix, extents, charge) = (prefix.to_owned(), HashMap::new(), core.extents.empty_charge());
        Self { prefix, extents, charge, present, reason }
    }

    /// Returns the published segments. Each tail names the segment published before it, so the
    /// search begins at the newest segment, which counts as published. If a tail is unreadable, the
    /// search continues with the next older segment in the store.
    fn chain(&mut self, tails: &BTreeMap<u32, Result<SegmentTail, &str>>) -> PublishedSegments {
        let mut chain = PublishedSegments::new();
        let mut next = tails.keys().next_back().copied();
        while let Some(number) = next {
            let missing = Err("missing");
            next = match tails.get(&number).unwrap_or(&missing) {
                Ok(tail) => {
                    chain.insert(number, *tail);
                    (tail.previous != 0).then_some(tail.previous)
                }
                Err(what) => {
                    self.miss(number, what);
                    tails.range(..number).next_back().map(|(number, _)| *number)
                }
            };
        }
        chain
    }

    fn miss(&mut self, number: u32, what: &str) {
        let key = segment_key(&self.prefix, number);
        tracing::error!(key, what, "a segment is damaged; its blocks are lost unless a disk has them");
        if self.reason.is_empty() {
            self.reason = format!("object {key}: {what}");
        }
    }

    /// Adds an extent, unless its copy was added before. Returns false if it overlaps another
    /// extent.
    fn push(&mut self, partition: PartitionId, extent: Extent) -> bool {
        let extents = self.extents.entry(partition).or_default();
        if let Some(other) = overlapping(extents, extent.base..extent.end()) {
            // An upload whose outcome was unknown was repeated.
            return other.is_copy_of(&extent);
        }
        extents.insert(extent.base, extent);
        self.charge.merge(self.charge.budget().charge_unchecked(EXTENT_BYTES));
        true
    }

    /// Adds the extents and blocks of a segment.
    fn take(&mut self, number: u32, index: Index<'_>) {
        if let Some(damage) = &index.damage {
            return self.miss(number, damage);
        }
        let mut damage = None;
        for IndexedExtent { partition, extent, ids } in index.extents {
            match ids {
                Some(ids) if self.push(partition, extent) => {
                    self.present.add(partition, &ids);
                }
                Some(_) => damage = Some("the range of an extent overlaps another segment"),
                None => damage = Some("its index is corrupt"),
            }
        }
        if let Some(damage) = damage {
            self.miss(number, damage);
        }
    }
}
