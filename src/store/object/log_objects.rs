//! Storage of the metadata log's objects (`uniffle_log::objects`): requests, and conversion of
//! errors.
//!
//! Invariant: a write succeeds only once all copies are stored and the claim was verified
//! afterwards. Otherwise a process that has lost its prefix would acknowledge metadata that its
//! successor never reads.

use std::io;
use std::sync::Arc;

use bytes::Bytes;
use futures::FutureExt as _;
use futures::future::{BoxFuture, join_all};
use futures::stream::{self, StreamExt as _, TryStreamExt as _};
use object_store::{Error, ObjectStore as _, ObjectStoreExt as _};

use super::circuit_breaker::failed;
use super::core::ObjectCore;
use super::layout::{Name, log_key, log_prefix, parse_key, path_of};
use crate::log::{ListedObject, LogError, LogObject, LogObjects, OBJECT_COPIES};
use crate::store::error::LOG_KINDS;
use crate::store::{StoreError, StoreErrorKind};

/// Objects of the metadata log below the worker's prefix.
#[derive(Debug)]
pub(in crate::store) struct StoredLog(pub(in crate::store) Arc<ObjectCore>);

impl StoredLog {
    async fn put_one(&self, object: LogObject, copy: usize, bytes: Bytes) -> Result<(), StoreError> {
        let core = &self.0;
        let key = log_key(&core.settings.root, object, copy);
        let put = core.store.put(&path_of(&key), bytes.into()).await;
        core.observe(&key, put)?;
        core.metrics.log_objects.inc();
        Ok(())
    }

    async fn put_all(&self, object: LogObject, bytes: Bytes) -> Result<(), StoreError> {
        let core = &self.0;
        if core.claim.is_lost() {
            // Always an error: a lost claim stays lost.
            return core.require_claim().await;
        }
        let puts = (0..OBJECT_COPIES).map(|copy| self.put_one(object, copy, bytes.clone()));
        join_all(puts.collect::<Vec<_>>()).await.into_iter().collect::<Result<Vec<()>, _>>()?;
        core.require_claim().await
    }

    async fn get_one(&self, object: LogObject, copy: usize) -> Result<Option<Bytes>, StoreError> {
        let core = &self.0;
        let key = log_key(&core.settings.root, object, copy);
        let answer = async { core.store.get(&path_of(&key)).await?.bytes().await };
        match core.observe(&key, answer.await) {
            Ok(bytes) => Ok(Some(bytes)),
            Err(error) if error.kind == StoreErrorKind::NotFound => Ok(None),
            Err(error) => Err(error),
        }
    }

    async fn list_all(&self) -> Result<Vec<ListedObject>, StoreError> {
        let (core, mut all) = (&self.0, Vec::new());
        let prefix = log_prefix(&core.settings.root);
        let mut listed = core.store.list(Some(&path_of(&prefix)));
        while let Some(it) = core.observe(&prefix, listed.try_next().await)? {
            match parse_key(&core.settings.root, it.location.as_ref()) {
                Some(Name::Log(object, copy)) => all.push(ListedObject { object, copy, bytes: it.size }),
                Some(Name::Segment(..) | Name::Settings(_)) | None => {}
            }
        }
        Ok(all)
    }

    async fn delete_all(&self, objects: Vec<ListedObject>) -> Result<(), StoreError> {
        let core = &self.0;
        core.require_claim().await?;
        let root = core.settings.root.clone();
        let paths = objects.into_iter().map(move |it| Ok(path_of(&log_key(&root, it.object, it.copy))));
        // The circuit breaker does not count deletions, here and elsewhere.
        let mut deleted = core.store.delete_stream(stream::iter(paths).boxed());
        while let Some(answer) = deleted.next().await {
            match answer {
                Ok(_) | Err(Error::NotFound { .. }) => {}
                Err(error) => return Err(failed(&core.settings.root, &error)),
            }
        }
        Ok(())
    }
}

impl LogObjects for StoredLog {
    fn put(&self, object: LogObject, bytes: Bytes) -> BoxFuture<'_, Result<(), LogError>> {
        self.put_all(object, bytes).map(|put| put.map_err(|error| to_log(&error))).boxed()
    }

    fn get(&self, object: LogObject, copy: usize) -> BoxFuture<'_, Result<Option<Bytes>, LogError>> {
        self.get_one(object, copy).map(|got| got.map_err(|error| to_log(&error))).boxed()
    }

    fn list(&self) -> BoxFuture<'_, Result<Vec<ListedObject>, LogError>> {
        self.list_all().map(|listed| listed.map_err(|error| to_log(&error))).boxed()
    }

    fn delete(&self, objects: Vec<ListedObject>) -> BoxFuture<'_, Result<(), LogError>> {
        self.delete_all(objects).map(|deleted| deleted.map_err(|error| to_log(&error))).boxed()
    }
}

fn to_log(error: &StoreError) -> LogError {
    let kind = LOG_KINDS.iter().find(|(kind, _)| *kind == error.kind);
    LogError::of(kind.map_or(io::ErrorKind::Other, |(_, kind)| *kind), &error.to_string())
}
