//! Registrations and reports of a shuffle, as pages that are put into the store before anything is acknowledged, each
//! twice: one that is missing, damaged or an earlier version of itself is found out and written again
//! ([`recover`](super::recover)).
//!
//! What comes while a page is on its way goes into the next write, together. A page is written again with more records
//! until it is full, so the number of objects follows the bytes of the records, not their number. After a write that
//! failed no page of that number is written again ([`page`]), nor after one of which an attempt was not answered: what that attempt
//! does, however late, must not put back an earlier version.

use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use bytes::Bytes;
use futures::future::join_all;
use object_store::ObjectStore as _;
use tokio::sync::{Mutex, oneshot};

use super::client::Unanswered;
use super::condition::again;
use super::core::Core;
use super::group::Group;
use super::layout::{Name, object_key, path_of};
use super::page::{self, Noted};
use crate::budget::Charge;
use crate::tiers::{StoreError, StoreErrorKind};

/// A page that is longer is not written again.
const PAGE_BYTES: usize = 64 << 10;

/// What waits for the next write, and the page that is filled.
#[derive(Debug)]
pub(super) struct Notes {
    /// Of the shuffle's objects.
    prefix: String,
    incarnation: u64,
    closed: AtomicBool,
    waiting: Group<Note>,
    state: Mutex<State>,
}

/// What is to be acknowledged.
#[derive(Debug)]
struct Note {
    frame: Vec<u8>,
    done: oneshot::Sender<Result<(), StoreError>>,
}

/// The page that is written to.
#[derive(Debug)]
struct State {
    number: u32,
    /// Empty until it has a record.
    content: Bytes,
    /// The number of the next record.
    next: u64,
    /// For the content.
    charge: Charge,
    /// What was sent of it so far was answered, every attempt.
    is_answered: bool,
}

impl Notes {
    /// Those of a registration whose pages begin with number `first_page` and record `next`.
    pub(super) fn new(core: &Core, (prefix, incarnation): (String, u64), first_page: u32, next: u64) -> Self {
        let charge = core.extents.nothing();
        let state = State { number: first_page, content: Bytes::new(), next, charge, is_answered: true };
        Self {
            prefix,
            incarnation,
            closed: AtomicBool::new(false),
            waiting: Group::default(),
            state: Mutex::new(state),
        }
    }

    fn error(&self, kind: StoreErrorKind) -> StoreError {
        StoreError::new(kind, &self.prefix)
    }

    /// When this returns `Ok` the record outlives this process and the machine.
    ///
    /// # Errors
    /// `Purged`, `InvalidBatch` when it is too long, or why the store has not taken it.
    pub(super) async fn append(self: &Arc<Self>, core: &Arc<Core>, noted: &Noted) -> Result<(), StoreError> {
        let frame = page::frame(noted).ok_or_else(|| self.error(StoreErrorKind::InvalidBatch))?;
        let (done, written) = oneshot::channel();
        if self.waiting.add(Note { frame, done }) {
            let (notes, core) = (Arc::clone(self), Arc::clone(core));
            let tasks = core.tasks.clone();
            tasks.spawn("object metadata", async move { notes.write_all(&core).await });
        }
        written.await.unwrap_or_else(|_| Err(self.error(StoreErrorKind::Unhealthy)))
    }

    /// Ends the first page, so that what follows goes into others. Whatever arrives of those once all pages are deleted does not look whole:
    /// of the first one nothing can arrive.
    ///
    /// # Errors
    /// `Unreachable`: something of it can, as an attempt to write it was not answered.
    pub(super) async fn end_first_page(&self) -> Result<(), StoreError> {
        let mut state = self.state.lock().await;
        if !state.is_answered {
            let what = "an attempt to write the first page of its metadata was not answered";
            return Err(StoreError::remote(StoreErrorKind::Unreachable, &self.prefix, what));
        }
        if !state.content.is_empty() {
            state.begin_next();
        }
        Ok(())
    }

    /// Nothing is written any more once this returns.
    pub(super) async fn close(&self) {
        self.closed.store(true, Ordering::Release);
        self.state.lock().await.begin_next();
    }

    /// Makes a page of an earlier process and its copy the same, unless they are about to be deleted.
    ///
    /// # Errors
    /// `Purged`, or why the store does not take it.
    pub(super) async fn write_again(&self, core: &Core, number: u32, page: &Bytes) -> Result<(), StoreError> {
        // Who closes this waits for the write, and deletes after it.
        let _state = self.state.lock().await;
        if self.closed.load(Ordering::Acquire) {
            return Err(self.error(StoreErrorKind::Purged));
        }
        core.require_claim().await?;
        put_both(core, &self.prefix, number, page).await.map(drop)
    }

    /// A write goes on when those who wait for it do not: what it does to its page must be known.
    async fn write_all(&self, core: &Core) {
        let mut state = self.state.lock().await;
        let mut running = self.waiting.running();
        while let Some(notes) = running.take_all_or_end() {
            let written = self.write(core, &mut state, &notes).await;
            for note in notes {
                // None of those who wait may be there any more.
                let _ = note.done.send(match &written {
                    Ok(()) => Ok(()),
                    Err(error) => Err(again(error)),
                });
            }
            // Between two writes there is room for who ends a page, however much comes.
            drop(state);
            state = self.state.lock().await;
        }
    }

    async fn write(&self, core: &Core, state: &mut State, notes: &VecDeque<Note>) -> Result<(), StoreError> {
        if self.closed.load(Ordering::Acquire) {
            return Err(self.error(StoreErrorKind::Purged));
        }
        let mut content = match state.content.is_empty() {
            true => page::begin(self.incarnation, state.next),
            false => state.content.to_vec(),
        };
        notes.iter().for_each(|note| content.extend_from_slice(&note.frame));
        let bytes = Bytes::from(content);
        // What is sent shares the page that is kept from then on.
        let _sent = core.extents.force_charge(bytes.len() as u64);
        let written = tokio::select! {
            biased;
            () = core.tasks.cancelled() => Err(self.error(StoreErrorKind::Unhealthy)),
            written = async {
                let attempts = put_both(core, &self.prefix, state.number, &bytes).await?;
                core.require_claim().await?;
                Ok(attempts == Attempts::NotAllAnswered)
            } => written,
        };
        match written {
            Ok(is_unanswered) => {
                state.is_answered &= !is_unanswered;
                state.charge.merge(core.extents.force_charge((bytes.len() - state.content.len()) as u64));
                state.content = bytes;
                state.next += notes.len() as u64;
                if state.content.len() > PAGE_BYTES || is_unanswered {
                    state.begin_next();
                }
                Ok(())
            }
            Err(error) => {
                tracing::warn!(%error, "registrations or reports were not written, they are not acknowledged");
                state.is_answered = false;
                state.begin_next();
                Err(error)
            }
        }
    }
}

impl State {
    fn begin_next(&mut self) {
        self.number += 1;
        self.content = Bytes::new();
        drop(self.charge.split_up_to(u64::MAX));
    }
}

/// How a write of an object that succeeded went.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Attempts {
    Answered,
    /// One that was not may still be carried out.
    NotAllAnswered,
}

/// Writes a page and its copy.
pub(super) async fn put_both(
    core: &Core,
    prefix: &str,
    number: u32,
    page: &Bytes,
) -> Result<Attempts, StoreError> {
    let puts = [Name::Page(number), Name::Copy(number)]
        .map(|name| put(core, object_key(prefix, name), page.clone()));
    // What the other does must be known as well.
    let attempts = join_all(puts).await.into_iter().collect::<Result<Vec<_>, _>>()?;
    let is_answered = attempts.iter().all(|attempts| *attempts == Attempts::Answered);
    Ok(if is_answered { Attempts::Answered } else { Attempts::NotAllAnswered })
}

async fn put(core: &Core, key: String, page: Bytes) -> Result<Attempts, StoreError> {
    let unanswered = Unanswered::default();
    let put = core.store.put_opts(&path_of(&key), page.into(), unanswered.options()).await;
    core.noted(&key, put)?;
    core.metrics.pages.inc();
    Ok(if unanswered.is_set() { Attempts::NotAllAnswered } else { Attempts::Answered })
}
