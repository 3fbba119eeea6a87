//! A generation of the log in an object store, written and read like a file of the log.
//!
//! The concatenated objects have the format of a file on a disk. An object of which no copy is
//! whole reads as zeros, so the reader finds damage at that position. Memory for fetched and stored
//! objects is charged.

use std::collections::BTreeSet;
use std::io;
use std::ops::Range;
use std::sync::Arc;

use bytes::{Bytes, BytesMut};
use futures::future::{BoxFuture, FutureExt as _, TryFutureExt as _, ready};
use futures::stream::{self, StreamExt as _, TryStreamExt as _};

use super::object::{ListedObject, LogObject, LogObjects, OBJECT_COPIES};
use crate::LogError;
use crate::format::frame::{HEADER_BYTES, PAYLOAD_BYTES_MAX};
use crate::recovery::read::LogCopy;
use crate::write::checkpoint::{CHUNK_BYTES, CheckpointSink};
use uniffle_base::budget::{Budget, Charge};
use uniffle_io::{File, ReadTarget};

/// Number of objects that are requested concurrently.
const AT_ONCE: usize = 16;
/// Largest size of an object: a chunk is written once it is full, and may end with the longest
/// frame.
const OBJECT_BYTES_MAX: u64 = (CHUNK_BYTES + PAYLOAD_BYTES_MAX + HEADER_BYTES) as u64;

/// Objects of a generation, in order.
#[derive(Debug, Clone)]
pub(super) struct ObjectFile {
    pub(crate) store: Arc<dyn LogObjects>,
    memory: Budget,
    pub(crate) generation: u64,
    process: u32,
    objects: Vec<(LogObject, Range<u64>)>,
}

/// Bytes with the memory that they take.
struct ChargedBytes {
    bytes: BytesMut,
    _charge: Charge,
}

impl AsRef<[u8]> for ChargedBytes {
    fn as_ref(&self) -> &[u8] {
        &self.bytes
    }
}

impl ObjectFile {
    /// Creates the file of a generation without objects.
    pub(crate) fn new(store: &Arc<dyn LogObjects>, memory: &Budget, generation: u64, process: u32) -> Self {
        let (store, memory) = (Arc::clone(store), memory.clone());
        Self { store, memory, generation, process, objects: Vec::new() }
    }

    /// Returns whether another process wrote this file under the same start number, which is the
    /// upper half of the generation.
    pub(super) fn is_rival_of(&self, other: &Self) -> bool {
        self.generation >> 32 == other.generation >> 32 && self.process != other.process
    }

    /// Returns an empty file of a generation, of the same process.
    pub(super) fn sibling(&self, generation: u64) -> Self {
        Self::new(&self.store, &self.memory, generation, self.process)
    }

    /// Returns the files with the `listed` objects, oldest first.
    ///
    /// # Errors
    /// The store does not answer or refuses.
    pub(crate) async fn of(
        store: &Arc<dyn LogObjects>,
        memory: &Budget,
        listed: &[ListedObject],
    ) -> Result<Vec<Self>, LogError> {
        let names: BTreeSet<(LogObject, u64)> = listed.iter().map(|it| (it.object, it.bytes)).collect();
        let (mut names, mut files) = (names.into_iter().peekable(), Vec::<Self>::new());
        while let Some((object, mut bytes)) = names.next() {
            let (generation, process) = (object.generation, object.process);
            if files.last().is_none_or(|last| (last.generation, last.process) != (generation, process)) {
                files.push(Self::new(store, memory, generation, process));
            }
            let Some(file) = files.last_mut() else { continue };
            if names.next_if(|(other, _)| *other == object).is_some() {
                // The copies differ, so one of them is damaged.
                bytes = file.fetch(object).await?.map_or(0, |(whole, _)| whole.len() as u64);
            }
            file.push(object, bytes);
        }
        Ok(files)
    }

    /// Adds a stored object. An object of impossible size is damaged: an empty one takes a byte, so
    /// that the damage is found, and a longer one takes the greatest size, so that its zeros are
    /// read in bounded time.
    fn push(&mut self, object: LogObject, bytes: u64) {
        let start = self.bytes();
        self.objects.push((object, start..start.saturating_add(bytes.clamp(1, OBJECT_BYTES_MAX))));
    }

    pub(crate) fn objects(&self) -> usize {
        self.objects.len()
    }

    pub(crate) fn bytes(&self) -> u64 {
        self.objects.last().map_or(0, |(_, range)| range.end)
    }

    /// Returns this file as a copy of the log to be read.
    pub(crate) fn part(&self) -> LogCopy {
        LogCopy {
            directory: None,
            path: format!("{:016x}.{:08x}", self.generation, self.process).into(),
            generation: self.generation,
            // Without an epoch each file counts as a generation of its own: two processes can have
            // written the same number.
            epoch: None,
            frames: u64::MAX,
            file: Some(Arc::new(self.clone())),
        }
    }

    /// Returns the first whole copy of an object, or `None` if there is none. Requests each copy up
    /// to twice, because a response may be damaged in transit.
    async fn fetch(&self, object: LogObject) -> Result<Option<(Bytes, Charge)>, LogError> {
        let mut damage = "it is missing".to_owned();
        for copy in (0..OBJECT_COPIES).chain(0..OBJECT_COPIES) {
            let Some(bytes) = self.store.get(object, copy).await? else { continue };
            let charge = self.memory.charge_unchecked(bytes.len() as u64);
            match object.check(&bytes) {
                Ok(()) => return Ok(Some((bytes, charge))),
                Err(why) => damage = why,
            }
            tracing::error!(
                object = object.name(copy),
                damage,
                "a copy of an object of the metadata log is damaged"
            );
        }
        tracing::error!(
            object = object.name(0),
            damage,
            "no copy of an object of the metadata log is whole; its records are missing"
        );
        Ok(None)
    }
}

impl CheckpointSink for ObjectFile {
    type Error = LogError;

    async fn write(&mut self, chunk: Bytes, frames: Range<u64>) -> Result<(), LogError> {
        let (generation, process, first) = (self.generation, self.process, frames.start);
        let frames = u32::try_from(frames.end - first).unwrap_or(u32::MAX);
        let object = LogObject { generation, process, first, frames };
        let bytes = chunk.len() as u64;
        // Released before any waiter is notified that the object is stored, so that its caller
        // finds this memory free.
        let _charge = self.memory.charge_unchecked(bytes);
        self.store.put(object, chunk).await?;
        self.push(object, bytes);
        Ok(())
    }
}

impl File for ObjectFile {
    fn read_range(&self, range: Range<u64>) -> BoxFuture<'static, io::Result<Bytes>> {
        let wanted = self.objects.iter().filter(|(_, it)| it.start < range.end && it.end > range.start);
        let (file, wanted) = (self.sibling(self.generation), wanted.cloned().collect::<Vec<_>>());
        let reading = async move {
            let length = usize::try_from(range.end - range.start).map_err(io::Error::other)?;
            let _charge = file.memory.charge_unchecked(length as u64);
            let mut bytes = BytesMut::with_capacity(length);
            let fetches =
                wanted.into_iter().map(|(object, it)| file.fetch(object).map_ok(|whole| (it, whole)));
            let mut fetched = stream::iter(fetches).buffered(AT_ONCE);
            while let Some((it, fetched)) = fetched.try_next().await? {
                let part = range.start.max(it.start) - it.start..range.end.min(it.end) - it.start;
                let part = usize::try_from(part.start).map_err(io::Error::other)?
                    ..usize::try_from(part.end).map_err(io::Error::other)?;
                let whole = fetched.as_ref().filter(|(whole, _)| whole.len() as u64 == it.end - it.start);
                match whole.and_then(|(whole, _)| whole.get(part.clone())) {
                    Some(part) => bytes.extend_from_slice(part),
                    None => bytes.resize(bytes.len() + part.len(), 0),
                }
            }
            Ok(Bytes::from_owner(ChargedBytes { bytes, _charge }))
        };
        reading.boxed()
    }

    fn size(&self) -> BoxFuture<'static, io::Result<u64>> {
        ready(Ok(self.bytes())).boxed()
    }

    fn read(&self, target: ReadTarget) -> BoxFuture<'static, (ReadTarget, io::Result<()>)> {
        ready((target, Err(io::ErrorKind::Unsupported.into()))).boxed()
    }

    fn write_at(&self, _: Vec<Bytes>, _: u64) -> BoxFuture<'static, io::Result<()>> {
        ready(Err(io::ErrorKind::Unsupported.into())).boxed()
    }

    fn sync(&self) -> BoxFuture<'static, io::Result<()>> {
        ready(Err(io::ErrorKind::Unsupported.into())).boxed()
    }
}
