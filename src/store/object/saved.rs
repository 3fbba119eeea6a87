//! Settings made at run time, below the worker's prefix.
//!
//! Each process writes an object of its own, whose key has the number of its start. So a late
//! request of an earlier process replaces nothing. A start reads the object with the greatest
//! number and deletes the others.

use bytes::Bytes;
use futures::FutureExt as _;
use futures::future::BoxFuture;
use futures::stream::TryStreamExt as _;
use object_store::{ObjectStore as _, ObjectStoreExt as _};

use super::core::Core;
use super::layout::{Name, parse_key, path_of, settings_key, settings_prefix};
use crate::store::{SavedSettings, StoreError};

impl SavedSettings for Core {
    fn read(&self) -> BoxFuture<'_, Result<Option<Bytes>, StoreError>> {
        let read = async {
            let (root, mut starts) = (&self.settings.root, Vec::new());
            let prefix = settings_prefix(root);
            let mut listed = self.store.list(Some(&path_of(&prefix)));
            while let Some(object) = self.noted(&prefix, listed.try_next().await)? {
                if let Some(Name::Settings(start)) = parse_key(root, object.location.as_ref()) {
                    starts.push(start);
                }
            }
            starts.sort_unstable();
            let Some(latest) = starts.pop() else { return Ok(None) };
            let key = settings_key(root, latest);
            let answer = async { self.store.get(&path_of(&key)).await?.bytes().await };
            let text = self.noted(&key, answer.await)?;
            for start in starts {
                // The next start deletes the rest.
                let _: Result<(), _> = self.store.delete(&path_of(&settings_key(root, start))).await;
            }
            Ok(Some(text))
        };
        read.boxed()
    }

    fn save(&self, text: Bytes) -> BoxFuture<'_, Result<(), StoreError>> {
        let save = async move {
            self.require_claim().await?;
            let key = settings_key(&self.settings.root, self.claim.start());
            let put = self.store.put(&path_of(&key), text.into()).await;
            self.noted(&key, put).map(drop)
        };
        save.boxed()
    }
}
