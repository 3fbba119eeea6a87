//! Checks at start, if configured, and before an upgrade that the store is usable: it writes,
//! reads, lists and deletes a small object, and begins and aborts an upload.
//!
//! The object is deleted even if it cannot be read or listed. The error names the step that failed.

use object_store::path::Path;
use object_store::{MultipartUpload as _, ObjectStore, ObjectStoreExt as _, PutPayload};

use super::failure::explain;
use super::open::Client;

/// Content of the object. Each worker has its own object.
const CONTENT: &[u8] = b"uniffle-worker was here; this object can be deleted";

/// Step that failed, with its cause, and the remedy if the store refused.
#[derive(Debug, thiserror::Error)]
#[error("cannot use {url}: failed to {step}: {explanation}")]
pub struct ProbeError {
    url: String,
    step: &'static str,
    explanation: String,
    /// Error of the store.
    source: Option<Box<object_store::Error>>,
}

impl Client {
    /// Writes, reads, lists and deletes an object below `name`, which is unique to this worker, and
    /// begins and aborts an upload.
    ///
    /// # Errors
    /// [`ProbeError`] of the first step that fails. Wrong content is reported only if none fails.
    pub async fn probe(&self, name: &str) -> Result<(), ProbeError> {
        let (store, path) = (self.store(), Path::from(format!("{name}/.probe")));
        let failed = |step| {
            move |error| ProbeError {
                url: self.url().to_string(),
                step,
                explanation: explain(&error),
                source: Some(Box::new(error)),
            }
        };
        store.put(&path, PutPayload::from_static(CONTENT)).await.map_err(failed("write an object"))?;
        let reading = async {
            let got = store.get_range(&path, 0..CONTENT.len() as u64).await.map_err(failed("read it"))?;
            let listed = store.list_with_delimiter(Some(&Path::from(name))).await;
            Ok((got, listed.map_err(failed("list it"))?))
        };
        let read = reading.await;
        let deleted = store.delete(&path).await.map_err(failed("delete it"));
        let (got, listed) = read?;
        deleted?;
        let mut upload = store.put_multipart(&path).await.map_err(failed("start an upload"))?;
        upload.abort().await.map_err(failed("abort an upload"))?;
        let is_listed = listed.objects.iter().any(|object| object.location == path);
        let wrong = match (got == CONTENT, is_listed) {
            (true, true) => return Ok(()),
            (false, _) => ("read it", "it has wrong bytes"),
            (true, false) => ("list it", "it is not in the list"),
        };
        let (step, explanation) = (wrong.0, wrong.1.to_owned());
        Err(ProbeError { url: self.url().to_string(), step, explanation, source: None })
    }
}
