//! A stream that lies in both: what the store has of it, then what the disks have.
//!
//! A border moves while it is read. The store is looked at first: what it has is not released before, so the disks have all
//! that stands behind, unless a move has ended in between; then both are looked at again. A file that goes while it is read
//! is in the store, and the read goes on there.

use std::sync::Arc;

use bytes::Bytes;
use futures::FutureExt as _;
use futures::future::BoxFuture;

use crate::tiers::object::ObjectTier;
use crate::tiers::{ChunkRead, LocalStore, ServedData, ServedIndex, ServedTier, StoreError, StoreErrorKind};
use uniffle_io::ReadBuffers;
use uniffle_wire::types::{PartitionId, ShuffleKey};

/// Looks at both, each of which a whole move would have to end in.
const LOOKS_MAX: usize = 16;

/// Both.
#[derive(Debug, Clone)]
pub(super) struct Both {
    pub(super) local: Arc<LocalStore>,
    pub(super) object: Arc<ObjectTier>,
}

impl Both {
    /// Where a partition's stream ends in the store.
    pub(super) fn border(&self, key: &ShuffleKey, partition: PartitionId) -> u64 {
        self.object.uploads(key).map_or(0, |uploads| uploads.end(partition))
    }

    fn moved_too_often(key: &ShuffleKey) -> StoreError {
        StoreError::new(StoreErrorKind::Unhealthy, key.to_string())
    }

    pub(super) fn index(&self, key: &ShuffleKey, partition: PartitionId) -> Result<ServedIndex, StoreError> {
        for _ in 0..LOOKS_MAX {
            if self.border(key, partition) == 0 {
                let local = self.local.index(key, partition)?;
                let (length, data_length) = (local.length, local.data_length);
                if let Some(local) = local.beginning_at(0) {
                    return Ok(ServedIndex { length, data_length, chunks: Box::new(local) });
                }
                continue;
            }
            let there = self.object.index(key, partition)?;
            let Some(here) = self.local.index(key, partition)?.beginning_at(there.data_length) else {
                continue;
            };
            return Ok(ServedIndex {
                length: there.length + here.length,
                data_length: there.data_length.max(here.data_length),
                chunks: Box::new(BothIndexes { there: Some(there.chunks), here: Box::new(here) }),
            });
        }
        Err(Self::moved_too_often(key))
    }

    pub(super) fn data(
        &self,
        key: &ShuffleKey,
        partition: PartitionId,
        (offset, length): (u64, u32),
    ) -> Result<ServedData, StoreError> {
        let end = offset.saturating_add(u64::from(length));
        let mut read = BothData {
            both: self.clone(),
            key: key.clone(),
            partition,
            at: offset,
            end,
            part: None,
            has_failed: false,
        };
        // What is not published is refused at once, also behind the border.
        let border = self.border(key, partition).max(offset);
        let mut has_hole = false;
        if border < end {
            let behind = u32::try_from(end - border).unwrap_or(length);
            match self.local(key, partition, (border, behind)) {
                Ok(here) => {
                    has_hole = here.has_hole;
                    if border == offset {
                        read.part = Some(Part { chunks: here.chunks, end, is_here: true });
                    }
                }
                // It has moved since.
                Err(_) if self.border(key, partition) > border => {}
                Err(error) => return Err(error),
            }
        }
        if read.part.is_none() {
            read.open()?;
        }
        Ok(ServedData { has_hole, chunks: Box::new(read) })
    }

    fn local(
        &self,
        key: &ShuffleKey,
        partition: PartitionId,
        range: (u64, u32),
    ) -> Result<ServedData, StoreError> {
        ServedTier::data(&*self.local, key, partition, range)
    }
}

/// The index of a partition: that of the store, then that of the disks.
#[derive(Debug)]
struct BothIndexes {
    there: Option<Box<dyn ChunkRead>>,
    here: Box<dyn ChunkRead>,
}

impl ChunkRead for BothIndexes {
    fn next_chunk<'a>(
        &'a mut self,
        buffers: &'a dyn ReadBuffers,
    ) -> BoxFuture<'a, Result<Option<Bytes>, StoreError>> {
        let read = async move {
            if let Some(there) = &mut self.there {
                if let Some(chunk) = there.next_chunk(buffers).await? {
                    return Ok(Some(chunk));
                }
                self.there = None;
            }
            self.here.next_chunk(buffers).await
        };
        read.boxed()
    }

    fn next_room(&self) -> usize {
        match self.there.as_ref().map_or(0, |there| there.next_room()) {
            0 => self.here.next_room(),
            room => room,
        }
    }

    fn is_suspect(&self) -> bool {
        self.here.is_suspect() || self.there.as_ref().is_some_and(|there| there.is_suspect())
    }
}

/// What is read of one of the two.
#[derive(Debug)]
struct Part {
    chunks: Box<dyn ChunkRead>,
    /// Where in the stream it ends.
    end: u64,
    is_here: bool,
}

/// A range of a partition's data.
#[derive(Debug)]
struct BothData {
    both: Both,
    key: ShuffleKey,
    partition: PartitionId,
    /// Where in the stream the next byte stands, and where the last one ends.
    at: u64,
    end: u64,
    part: Option<Part>,
    has_failed: bool,
}

impl BothData {
    /// Opens the part in which the next byte stands.
    fn open(&mut self) -> Result<(), StoreError> {
        for _ in 0..LOOKS_MAX {
            let border = self.both.border(&self.key, self.partition);
            let (end, is_here) =
                if self.at < border { (self.end.min(border), false) } else { (self.end, true) };
            let length = u32::try_from(end.saturating_sub(self.at)).unwrap_or(u32::MAX);
            let range = (self.at, length);
            let opened = match is_here {
                true => self.both.local(&self.key, self.partition, range),
                false => self.both.object.data(&self.key, self.partition, range),
            };
            match opened {
                Ok(opened) => {
                    self.part = Some(Part { chunks: opened.chunks, end, is_here });
                    return Ok(());
                }
                Err(_) if is_here && self.both.border(&self.key, self.partition) > self.at => {}
                Err(error) => return Err(error),
            }
        }
        Err(Both::moved_too_often(&self.key))
    }

    async fn read_chunk(&mut self, buffers: &dyn ReadBuffers) -> Result<Option<Bytes>, StoreError> {
        while self.at < self.end {
            if self.part.is_none() {
                self.open()?;
            }
            let Some(part) = &mut self.part else { continue };
            match part.chunks.next_chunk(buffers).await {
                Ok(Some(chunk)) => {
                    self.at += chunk.len() as u64;
                    if self.at >= part.end {
                        self.part = None;
                    }
                    return Ok(Some(chunk));
                }
                Ok(None) => self.part = None,
                // Its file went, or the disk has failed, and the store has it by now.
                Err(_) if part.is_here && self.both.border(&self.key, self.partition) > self.at => {
                    self.part = None;
                }
                Err(error) => return Err(error),
            }
        }
        Ok(None)
    }
}

impl ChunkRead for BothData {
    fn next_chunk<'a>(
        &'a mut self,
        buffers: &'a dyn ReadBuffers,
    ) -> BoxFuture<'a, Result<Option<Bytes>, StoreError>> {
        let read = async move {
            if self.has_failed {
                return Err(StoreError::new(StoreErrorKind::Corrupt, self.key.to_string()));
            }
            self.has_failed = true; // Until this chunk is whole: also when the caller gives up in between.
            let chunk = self.read_chunk(buffers).await?;
            self.has_failed = false;
            Ok(chunk)
        };
        read.boxed()
    }

    fn next_room(&self) -> usize {
        self.part.as_ref().map_or(0, |part| part.chunks.next_room())
    }

    fn is_suspect(&self) -> bool {
        self.part.as_ref().is_some_and(|part| part.chunks.is_suspect())
    }
}
