//! Fetches chunks from the store into their slots.
//!
//! Each fetch is a task of its own, so it continues when its readers are dropped. After a failure
//! the chunk is removed from the table before the readers get the outcome, so that the next reader
//! fetches it again. A slot with a write of unknown outcome must not be reused.

use std::io;
use std::sync::Arc;

use bytes::Bytes;
use futures::TryStreamExt as _;
use object_store::{GetOptions, GetRange, ObjectStore as _};

use super::read_cache::Pinned;
use super::slots::{CHUNK_BYTES, CachedChunk, ChunkKey, FetchOutcome, FetchSender};
use crate::store::StoreError;
use crate::store::object::circuit_breaker::{copy_of, failed, wrong_answer};
use crate::store::object::core::ObjectCore;
use crate::store::object::layout::path_of;
use crate::store::object::shuffle::ObjectShuffle;
use uniffle_base::sched::Holder;

/// Number of bytes gathered before a write to the disk.
const WRITE_BYTES: usize = 1 << 20;

/// Reason for which a chunk is not in its slot.
enum MissReason {
    Store(StoreError),
    Disk(io::Error),
}

/// Finds a chunk of which a reader needs `bytes` bytes, and starts to fetch it if it is missing.
/// Returns `None` if the chunk gets no slot.
pub(in crate::store::object) fn begin_fetch(
    core: &Arc<ObjectCore>,
    shuffle: &Arc<ObjectShuffle>,
    key: ChunkKey,
    bytes: u64,
) -> Option<Pinned> {
    let cache = core.cache.as_ref()?;
    let (pinned, missing) = cache.find_or_reserve(&core.metrics, key, bytes)?;
    if let Some(sender) = missing {
        let fetch = run(Arc::clone(core), Arc::clone(shuffle), key, pinned.chunk.clone(), sender);
        core.tasks.spawn("object cache", fetch);
    }
    Some(pinned)
}

/// Fetches a chunk and reports the outcome to all waiting readers.
async fn run(
    core: Arc<ObjectCore>,
    shuffle: Arc<ObjectShuffle>,
    key: ChunkKey,
    held: CachedChunk,
    sender: FetchSender,
) {
    let object = shuffle.segment_key(key.segment);
    let fetched = tokio::select! {
        biased;
        () = core.tasks.cancelled() => return,
        fetched = fetch(&core, &shuffle, &object, key, &held) => fetched,
    };
    let Some(cache) = &core.cache else { return };
    let outcome = match fetched {
        Ok(bytes) => FetchOutcome::Whole(bytes),
        Err(missed) => {
            // The next reader does not find the chunk and fetches it again.
            cache.slots.lock().remove_if_current(&key, &held);
            match missed {
                MissReason::Store(error) => FetchOutcome::StoreFailed(error),
                MissReason::Disk(error) => {
                    if error.kind() == io::ErrorKind::TimedOut {
                        held.slot.abandon();
                    }
                    cache.fail_directory(&core.metrics, held.slot.directory, &error);
                    FetchOutcome::DiskFailed
                }
            }
        }
    };
    cache.update_gauge(&core.metrics);
    sender.send_replace(Some(outcome));
}

async fn fetch(
    core: &ObjectCore,
    shuffle: &ObjectShuffle,
    object: &str,
    key: ChunkKey,
    held: &CachedChunk,
) -> Result<u64, MissReason> {
    let Some(cache) = &core.cache else { return Ok(0) };
    let holder = Holder { app: Some(shuffle.name.key.app.clone()), weight: 1 };
    let _permit = cache.fetches.acquire(&holder, 1).await;
    // Memory of the gathered pieces, and of the piece that makes them exceed `WRITE_BYTES`.
    let _gathered = core.extents.charge_unchecked(2 * WRITE_BYTES as u64);
    core.metrics.ranges.inc();
    let fetched = pour(core, object, key, held).await;
    let answer = match &fetched {
        Err(MissReason::Store(error)) => Err(copy_of(error)),
        _ => Ok(()),
    };
    core.circuit_breaker.note(&answer);
    fetched
}

async fn pour(core: &ObjectCore, object: &str, key: ChunkKey, held: &CachedChunk) -> Result<u64, MissReason> {
    let Some(cache) = &core.cache else { return Ok(0) };
    let directory = &cache.directories[held.slot.directory];
    let wanted = key.start()..key.start() + CHUNK_BYTES;
    let options = GetOptions { range: Some(GetRange::Bounded(wanted.clone())), ..GetOptions::default() };
    let not_given = |error| MissReason::Store(failed(object, &error));
    let answer = core.store.get_opts(&path_of(object), options).await.map_err(not_given)?;
    if answer.range.start != wanted.start || answer.range.end != wanted.end.min(answer.meta.size) {
        return Err(MissReason::Store(wrong_answer(object, "response has a different range than requested")));
    }
    let bytes = answer.range.end - answer.range.start;
    let (mut chunks, mut done) = (answer.into_stream(), 0);
    let (mut gathered, mut size): (Vec<Bytes>, usize) = (Vec::new(), 0);
    loop {
        let chunk = chunks.try_next().await.map_err(not_given)?;
        let is_last = chunk.is_none();
        size += chunk.as_ref().map_or(0, Bytes::len);
        gathered.extend(chunk);
        if done + size as u64 > bytes {
            return Err(MissReason::Store(wrong_answer(object, "response has more bytes than requested")));
        }
        if size >= WRITE_BYTES || (is_last && size > 0) {
            let offset = held.slot.start() + done;
            directory.write(std::mem::take(&mut gathered), offset).await.map_err(MissReason::Disk)?;
            core.metrics.cache_write_bytes.inc_by(size as u64);
            (done, size) = (done + size as u64, 0);
        }
        if is_last {
            break;
        }
    }
    match done == bytes {
        true => Ok(bytes),
        false => Err(MissReason::Store(wrong_answer(object, "response ended early"))),
    }
}
