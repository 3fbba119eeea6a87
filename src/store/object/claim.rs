//! The claim of a worker's prefix: an object that names the process that writes there.
//!
//! Every start replaces the claim, so the newest process owns the prefix. A process that finds
//! another claim has lost the prefix: it acknowledges, writes and deletes nothing there, but still
//! serves the blocks it knows. A process checks the claim before it acknowledges metadata, before
//! deletions, and periodically. A start claims before it lists, so it finds everything that was
//! acknowledged. If the store supports conditions (If-Match, If-None-Match), one of two
//! simultaneous starts is refused.

use std::sync::OnceLock;

use bytes::Bytes;
use object_store::path::Path;
use object_store::{Error, GetOptions, ObjectMeta, ObjectStore, ObjectStoreExt as _, PutMode, UpdateVersion};
use parking_lot::Mutex;
use uuid::Uuid;

use super::circuit_breaker::failed;
use super::client::{Failure, StoreRefusal};
use super::layout::path_of;
use super::location::CLAIM;
use crate::store::{StoreError, StoreErrorKind};

/// First line of a claim: format and version.
const CLAIM_HEAD: &str = "uniffle-worker object store 3";
/// First lines of claims of earlier development builds, whose objects this program does not read.
const EARLIER_HEADS: [&str; 2] = ["uniffle-worker object store 1\n", "uniffle-worker object store 2\n"];
/// Beginning of the line with the number of the worker's start.
const START: &str = "start ";

/// Returns the key of the claim of the prefix `root`.
#[must_use]
pub fn claim_key(root: &str) -> String {
    format!("{root}/{CLAIM}")
}

/// Last line of the claim of a worker whose local disks have no data that is missing in the store.
const DRAINED: &str = "drained\n";

/// This process's claim.
#[derive(Debug)]
pub(in crate::store) struct Claim {
    key: String,
    /// Number of this start of the worker, greater than that of the replaced claim. 1 without one.
    start: u32,
    /// Content without the line [`DRAINED`].
    text: String,
    /// True if the claim in the store has the line [`DRAINED`]. `None` after a write with an
    /// unknown result.
    is_drained: Mutex<Option<bool>>,
    /// Holder of the prefix, once a check or write has found the claim of another process. It is
    /// never cleared.
    lost: OnceLock<String>,
}

/// Result of a read of the claim.
enum FoundClaim {
    Nothing,
    Ours { version: UpdateVersion, is_drained: bool },
    Another(Other),
}

/// The claim of another process.
struct Other {
    holder: String,
    start: u32,
    version: UpdateVersion,
    is_drained: bool,
}

impl Claim {
    /// Takes over the prefix `root` from an earlier process.
    ///
    /// # Errors
    /// The store does not answer or refuses, or another process took the prefix at the same time.
    pub(in crate::store) async fn take(store: &dyn ObjectStore, root: &str) -> Result<Self, StoreError> {
        let (text, is_drained) = (text(), Mutex::new(Some(false)));
        let mut claim = Self { key: claim_key(root), start: 1, text, is_drained, lost: OnceLock::new() };
        let mode = match claim.find(store).await? {
            FoundClaim::Another(other) => {
                claim.start = other.start.saturating_add(1);
                *claim.is_drained.lock() = Some(other.is_drained);
                update(other.version)
            }
            FoundClaim::Nothing | FoundClaim::Ours { .. } => PutMode::Create,
        };
        claim.text = format!("{}{START}{}\n", claim.text, claim.start);
        claim.put(store, mode, claim.is_drained()).await?;
        if !claim.has_conditions(store).await {
            tracing::warn!(
                key = claim.key,
                "object store ignores If-None-Match, so two processes of this worker that start at once are \
                 not detected; start only one"
            );
        }
        Ok(claim)
    }

    /// Returns an error if an earlier development build has written below the prefix. Writes
    /// nothing.
    ///
    /// # Errors
    /// `NotOurs`, or the store does not answer or refuses.
    pub(super) async fn require_layout(store: &dyn ObjectStore, root: &str) -> Result<(), StoreError> {
        let (text, is_drained) = (text(), Mutex::new(None));
        let claim = Self { key: claim_key(root), start: 0, text, is_drained, lost: OnceLock::new() };
        claim.find(store).await.map(drop)
    }

    /// Returns the number of this start of the worker.
    pub(in crate::store) fn start(&self) -> u32 {
        self.start
    }

    /// Returns whether the store supports conditions: it refuses to create the existing claim
    /// again. True if it does not answer.
    async fn has_conditions(&self, store: &dyn ObjectStore) -> bool {
        let bytes = self.content(self.is_drained());
        match store.put_opts(&self.path(), bytes.into(), PutMode::Create.into()).await {
            Ok(_) => false,
            Err(error) => !knows_no_conditions(&error),
        }
    }

    /// Returns whether the store had all data of the local disks at the last write of the claim. A
    /// start takes this over from the previous process.
    pub(super) fn is_drained(&self) -> bool {
        *self.is_drained.lock() == Some(true)
    }

    /// Returns whether the claim in the store may say that the store has all data of the local
    /// disks.
    pub(super) fn may_be_drained(&self) -> bool {
        *self.is_drained.lock() != Some(false)
    }

    /// Writes whether the store has all data of the local disks. Not for concurrent callers.
    ///
    /// # Errors
    /// The store does not answer or refuses, or another process has the prefix.
    pub(super) async fn set_drained(
        &self,
        store: &dyn ObjectStore,
        is_drained: bool,
    ) -> Result<(), StoreError> {
        if *self.is_drained.lock() == Some(is_drained) {
            return Ok(());
        }
        let mode = self.check(store).await?;
        *self.is_drained.lock() = None;
        self.put(store, mode, is_drained).await?;
        *self.is_drained.lock() = Some(is_drained);
        Ok(())
    }

    /// Returns whether a list of objects has the current claim of the store. `listed` is the claim
    /// in the list. A list without the current claim was made before this process took the prefix.
    ///
    /// # Errors
    /// The store does not answer or refuses.
    pub(in crate::store) async fn is_listed(
        &self,
        store: &dyn ObjectStore,
        listed: Option<&ObjectMeta>,
    ) -> Result<bool, StoreError> {
        let stored = match store.head(&self.path()).await {
            Ok(stored) => stored,
            // A lifecycle rule of the bucket has just deleted the claim.
            Err(Error::NotFound { .. }) => return Ok(true),
            Err(error) => return Err(failed(&self.key, &error)),
        };
        let Some(listed) = listed else { return Ok(false) };
        let tag = |meta: &ObjectMeta| meta.e_tag.as_ref().map(|tag| tag.trim_matches('"').to_owned());
        // In some stores, ETags in lists differ from those in responses to HEAD, so the times are
        // compared too. Times in responses to HEAD have whole seconds.
        let is_same = matches!((tag(listed), tag(&stored)), (Some(of_list), Some(now)) if of_list == now);
        Ok(is_same || listed.last_modified.timestamp() >= stored.last_modified.timestamp())
    }

    /// Checks that this process has the prefix. If so, a later start of another process finds
    /// everything that was written before this call.
    ///
    /// # Errors
    /// The store does not answer or refuses, or another process has the prefix.
    pub(super) async fn require(&self, store: &dyn ObjectStore) -> Result<(), StoreError> {
        match self.check(store).await? {
            PutMode::Create => self.put(store, PutMode::Create, self.is_drained()).await,
            PutMode::Overwrite | PutMode::Update(_) => Ok(()),
        }
    }

    /// Checks that no other process has the prefix. Returns the mode that writes the claim:
    /// `Create` if it is missing, because a lifecycle rule of the bucket may have deleted it.
    async fn check(&self, store: &dyn ObjectStore) -> Result<PutMode, StoreError> {
        if let Some(holder) = self.lost.get() {
            return Err(self.in_use(holder));
        }
        match self.find(store).await? {
            FoundClaim::Ours { version, .. } => Ok(update(version)),
            FoundClaim::Nothing => Ok(PutMode::Create),
            FoundClaim::Another(other) => Err(self.lose(other.holder)),
        }
    }

    /// Remembers that `holder` has the prefix. Returns the error of all further calls.
    fn lose(&self, holder: String) -> StoreError {
        let error = self.in_use(&holder);
        if self.lost.set(holder).is_ok() {
            tracing::error!(%error, "another process has claimed this worker's prefix; writes stopped");
        }
        error
    }

    /// Returns whether a check or write has found that another process has the prefix.
    pub(super) fn is_lost(&self) -> bool {
        self.lost.get().is_some()
    }

    fn in_use(&self, holder: &str) -> StoreError {
        StoreError::remote(StoreErrorKind::InUse, &self.key, format!("claimed by {holder}"))
    }

    fn content(&self, is_drained: bool) -> Bytes {
        let drained = if is_drained { DRAINED } else { "" };
        Bytes::from(format!("{}{drained}", self.text))
    }

    fn path(&self) -> Path {
        path_of(&self.key)
    }

    async fn find(&self, store: &dyn ObjectStore) -> Result<FoundClaim, StoreError> {
        let got = async {
            let answer = store.get_opts(&self.path(), GetOptions::default()).await?;
            let version =
                UpdateVersion { e_tag: answer.meta.e_tag.clone(), version: answer.meta.version.clone() };
            Ok((answer.bytes().await?, version))
        };
        match got.await {
            Ok((bytes, _)) if EARLIER_HEADS.iter().any(|head| bytes.starts_with(head.as_bytes())) => {
                Err(earlier_layout(&self.key))
            }
            Ok((bytes, version)) => {
                let text = bytes.strip_suffix(DRAINED.as_bytes());
                let (text, is_drained) = (text.unwrap_or(&bytes), text.is_some());
                match text == self.text.as_bytes() {
                    true => Ok(FoundClaim::Ours { version, is_drained }),
                    false => {
                        let (holder, start) = (holder_of(&bytes), start_of(&bytes));
                        Ok(FoundClaim::Another(Other { holder, start, version, is_drained }))
                    }
                }
            }
            Err(Error::NotFound { .. }) => Ok(FoundClaim::Nothing),
            Err(error) => Err(failed(&self.key, &error)),
        }
    }

    async fn put(&self, store: &dyn ObjectStore, mode: PutMode, is_drained: bool) -> Result<(), StoreError> {
        let (bytes, path) = (self.content(is_drained), self.path());
        let error = match store.put_opts(&path, bytes.clone().into(), mode.into()).await {
            Ok(_) => return Ok(()),
            Err(error) => error,
        };
        if knows_no_conditions(&error) {
            let put = store.put(&path, bytes.into()).await;
            return put.map(drop).map_err(|error| failed(&self.key, &error));
        }
        // The response to a successful attempt may have been lost.
        match self.find(store).await? {
            FoundClaim::Ours { is_drained: written, .. } if written == is_drained => Ok(()),
            FoundClaim::Another(other) if is_condition(&error) => Err(self.lose(other.holder)),
            FoundClaim::Another(_) | FoundClaim::Ours { .. } | FoundClaim::Nothing => {
                Err(failed(&self.key, &error))
            }
        }
    }
}

/// Creates the error for a prefix of an earlier development build.
pub(in crate::store) fn earlier_layout(key: &str) -> StoreError {
    let what = "written by an earlier development build of uniffle-worker, whose objects this one does not read: \
                end its applications and delete the worker's objects, or use another object_store.url";
    StoreError::remote(StoreErrorKind::NotOurs, key, what)
}

/// Returns the number of the start in a claim.
fn start_of(claim: &[u8]) -> u32 {
    let text = String::from_utf8_lossy(claim);
    let line = text.lines().find_map(|line| line.strip_prefix(START));
    line.and_then(|number| number.parse().ok()).unwrap_or(0)
}

/// Returns the mode that replaces a version, if the store has versions.
fn update(version: UpdateVersion) -> PutMode {
    if version.e_tag.is_some() { PutMode::Update(version) } else { PutMode::Overwrite }
}

/// Returns whether the store does not support conditions.
fn knows_no_conditions(error: &Error) -> bool {
    matches!(error, Error::NotImplemented { .. } | Error::NotSupported { .. })
        || Failure::classify(error) == Failure::Refused(StoreRefusal::Unsupported)
}

fn is_condition(error: &Error) -> bool {
    matches!(error, Error::AlreadyExists { .. } | Error::Precondition { .. })
}

/// Creates the content of a claim, which is unique.
fn text() -> String {
    let uname = rustix::system::uname();
    let (token, host, pid) = (Uuid::new_v4(), uname.nodename().to_string_lossy(), std::process::id());
    format!("{CLAIM_HEAD}\n{token}\nprocess {pid} on {host}\n")
}

/// Returns the holder in a claim, shortened, because any program may have written the claim.
fn holder_of(claim: &[u8]) -> String {
    const SHOWN_CHARS_MAX: usize = 200;
    let text = String::from_utf8_lossy(claim);
    let line = text.lines().nth(2).unwrap_or("an unnamed process");
    line.chars().map(|c| if c.is_control() { ' ' } else { c }).take(SHOWN_CHARS_MAX).collect()
}
