//! An in-memory object store with injected faults.

use std::collections::BTreeMap;
use std::fmt;
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use async_trait::async_trait;
use bytes::Bytes;
use futures::stream::{BoxStream, StreamExt as _};
use object_store::memory::InMemory;
use object_store::path::Path;
use object_store::{
    CopyOptions, Error, GetOptions, GetResult, GetResultPayload, ListResult, MultipartUpload, ObjectMeta,
    ObjectStore, ObjectStoreExt as _, PutMode, PutMultipartOptions, PutOptions, PutPayload, PutResult,
    Result, UploadPart,
};
use parking_lot::Mutex;
use tokio::sync::Semaphore;
use uniffle_worker::store::object::location::CLAIM;

/// Calls of the store that can have a fault. Lists with a delimiter and copies are not among them.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Call {
    /// Puts an object in one request.
    Put,
    /// Begins an upload.
    Begin,
    /// Uploads a part.
    Part,
    /// Completes an upload: the object appears.
    Complete,
    /// Aborts an upload.
    Abort,
    /// Reads a range or a whole object.
    Get,
    /// Reads the metadata of an object.
    Head,
    /// Lists objects.
    List,
    /// Deletes objects.
    Delete,
}

/// Fault of a call. Lists and reads of several ranges have only the faults `Refuse` and `Hold`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ObjectFault {
    /// No fault.
    None,
    /// Fails without effect, except that a refused part stays in its upload.
    Refuse,
    /// Takes effect, but returns an error.
    LoseAnswer,
    /// Succeeds without effect. Only for puts in one request.
    Pretend,
    /// Returns an error and takes effect with [`FaultyObjects::deliver`]. Only for puts in one
    /// request.
    Late,
    /// One attempt gets no response and takes effect with [`FaultyObjects::deliver`]; a second
    /// attempt takes effect at once. Only for puts in one request.
    Repeat,
    /// Waits for [`FaultyObjects::release_held`] and takes effect then.
    Hold,
    /// Ignores the condition of a put, as some S3 servers ignore `If-Match` and `If-None-Match`.
    Overwrite,
    /// Changes one byte of the read data.
    Flip,
    /// Truncates the read data.
    Cut,
}

type CallRule = Box<dyn FnMut(Call, &Path) -> ObjectFault + Send>;

/// The store. Clones share it.
#[derive(Clone)]
pub struct FaultyObjects(Arc<State>);

struct State {
    inner: InMemory,
    rule: Mutex<Option<CallRule>>,
    gate: Semaphore,
    held: AtomicU64,
    open_uploads: AtomicU64,
    calls: Mutex<Vec<(Call, String)>>,
    late: Mutex<Vec<(Path, PutPayload)>>,
    /// If set, list calls return this instead of the stored objects.
    listed: Mutex<Option<Vec<ObjectMeta>>>,
}

impl Default for FaultyObjects {
    fn default() -> Self {
        Self(Arc::new(State {
            inner: InMemory::new(),
            rule: Mutex::new(None),
            gate: Semaphore::new(0),
            held: AtomicU64::new(0),
            open_uploads: AtomicU64::new(0),
            calls: Mutex::default(),
            late: Mutex::default(),
            listed: Mutex::default(),
        }))
    }
}

impl fmt::Debug for FaultyObjects {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("FaultyObjects")
    }
}

impl fmt::Display for FaultyObjects {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("FaultyObjects")
    }
}

fn refused() -> Error {
    Error::Generic { store: "faulty", source: "injected by the test".into() }
}

impl FaultyObjects {
    /// Sets the rule that chooses the fault of each call.
    pub fn set(&self, rule: impl FnMut(Call, &Path) -> ObjectFault + Send + 'static) {
        *self.0.rule.lock() = Some(Box::new(rule));
    }

    /// Removes the rule and resumes held calls.
    pub fn heal(&self) {
        *self.0.rule.lock() = None;
        self.release_held();
    }

    /// Resumes held calls.
    pub fn release_held(&self) {
        let held = self.0.held.swap(0, Ordering::AcqRel);
        self.0.gate.add_permits(usize::try_from(held).unwrap_or(Semaphore::MAX_PERMITS));
    }

    /// Returns the number of held calls.
    pub fn held(&self) -> u64 {
        self.0.held.load(Ordering::Acquire)
    }

    /// Carries out the puts of [`ObjectFault::Late`] and [`ObjectFault::Repeat`], without their
    /// conditions. Returns their number.
    pub async fn deliver(&self) -> usize {
        let late = std::mem::take(&mut *self.0.late.lock());
        let count = late.len();
        for (path, payload) in late {
            self.0.inner.put(&path, payload).await.expect("a store in memory accepts every object");
        }
        count
    }

    /// Returns the calls so far that can have a fault, with their keys.
    pub fn calls(&self) -> Vec<(Call, String)> {
        self.0.calls.lock().clone()
    }

    /// Returns keys and sizes of all objects except claims, which stay when the data of
    /// applications is removed.
    pub async fn objects(&self) -> Vec<(String, u64)> {
        let mut objects = self.list_all().await;
        objects.retain(|object| object.location.filename() != Some(CLAIM));
        objects.into_iter().map(|object| (object.location.to_string(), object.size)).collect()
    }

    /// Makes list calls return `listed`, whatever their prefix, or the stored objects if it is
    /// `None`.
    pub fn set_list(&self, listed: Option<Vec<ObjectMeta>>) {
        *self.0.listed.lock() = listed;
    }

    /// Returns the metadata of all objects.
    pub async fn list_all(&self) -> Vec<ObjectMeta> {
        let listed = self.0.inner.list(None);
        listed.map(|object| object.expect("the object is in memory")).collect().await
    }

    /// Returns all objects except claims.
    pub async fn snapshot(&self) -> BTreeMap<String, Bytes> {
        let mut all = BTreeMap::new();
        for (key, _) in self.objects().await {
            let object = self.0.inner.get(&Path::from(key.as_str())).await.unwrap();
            all.insert(key, object.bytes().await.expect("the object is in memory"));
        }
        all
    }

    /// Replaces an object without the knowledge of any client.
    pub async fn replace(&self, key: &str, content: Bytes) {
        self.0
            .inner
            .put(&Path::from(key), content.into())
            .await
            .expect("a store in memory accepts every object");
    }

    /// Removes an object without the knowledge of any client.
    pub async fn remove(&self, key: &str) {
        self.0.inner.delete(&Path::from(key)).await.unwrap();
    }

    /// Returns the number of uploads that have begun but were neither completed nor aborted.
    pub fn open_uploads(&self) -> u64 {
        self.0.open_uploads.load(Ordering::Acquire)
    }

    async fn meet(&self, call: Call, path: &Path) -> Result<ObjectFault> {
        self.0.calls.lock().push((call, path.to_string()));
        let fault = self.0.rule.lock().as_mut().map_or(ObjectFault::None, |rule| rule(call, path));
        match fault {
            ObjectFault::Refuse => return Err(refused()),
            ObjectFault::Hold => {
                self.0.held.fetch_add(1, Ordering::AcqRel);
                self.0.gate.acquire().await.expect("the gate is never closed").forget();
            }
            ObjectFault::None
            | ObjectFault::LoseAnswer
            | ObjectFault::Pretend
            | ObjectFault::Late
            | ObjectFault::Repeat
            | ObjectFault::Overwrite
            | ObjectFault::Flip
            | ObjectFault::Cut => {}
        }
        Ok(fault)
    }
}

fn answered<T>(fault: ObjectFault, result: Result<T>) -> Result<T> {
    if fault == ObjectFault::LoseAnswer { Err(refused()) } else { result }
}

#[async_trait]
impl ObjectStore for FaultyObjects {
    async fn put_opts(&self, path: &Path, payload: PutPayload, mut options: PutOptions) -> Result<PutResult> {
        let fault = self.meet(Call::Put, path).await?;
        if fault == ObjectFault::Overwrite {
            options.mode = PutMode::Overwrite;
        }
        if fault == ObjectFault::Pretend {
            let (e_tag, version, extensions) = (None, None, Default::default());
            return Ok(PutResult { e_tag, version, extensions });
        }
        if matches!(fault, ObjectFault::Late | ObjectFault::Repeat) {
            self.0.late.lock().push((path.clone(), payload.clone()));
        }
        if fault == ObjectFault::Late {
            return Err(refused());
        }
        answered(fault, self.0.inner.put_opts(path, payload, options).await)
    }

    async fn put_multipart_opts(
        &self,
        path: &Path,
        options: PutMultipartOptions,
    ) -> Result<Box<dyn MultipartUpload>> {
        let fault = self.meet(Call::Begin, path).await?;
        self.0.open_uploads.fetch_add(1, Ordering::AcqRel);
        let upload = answered(fault, self.0.inner.put_multipart_opts(path, options).await)?;
        Ok(Box::new(FaultyUpload { store: self.clone(), path: path.clone(), upload, is_open: true }))
    }

    async fn get_opts(&self, path: &Path, options: GetOptions) -> Result<GetResult> {
        let fault = self.meet(if options.head { Call::Head } else { Call::Get }, path).await?;
        let mut answer = answered(fault, self.0.inner.get_opts(path, options).await)?;
        if matches!(fault, ObjectFault::Flip | ObjectFault::Cut) {
            let (meta, range, attributes) =
                (answer.meta.clone(), answer.range.clone(), answer.attributes.clone());
            let mut bytes = answer.bytes().await?.to_vec();
            match fault {
                ObjectFault::Cut => drop(bytes.pop()),
                _ => bytes.iter_mut().take(1).for_each(|byte| *byte ^= 1),
            }
            let chunks = futures::stream::iter([Ok(Bytes::from(bytes))]).boxed();
            let payload = GetResultPayload::Stream(chunks);
            answer = GetResult { payload, meta, range, attributes, extensions: Default::default() };
        }
        Ok(answer)
    }

    async fn get_ranges(&self, path: &Path, ranges: &[Range<u64>]) -> Result<Vec<Bytes>> {
        self.meet(Call::Get, path).await?;
        self.0.inner.get_ranges(path, ranges).await
    }

    fn delete_stream(&self, paths: BoxStream<'static, Result<Path>>) -> BoxStream<'static, Result<Path>> {
        let store = self.clone();
        let delete = move |path: Result<Path>| {
            let store = store.clone();
            async move {
                let path = path?;
                let fault = store.meet(Call::Delete, &path).await?;
                answered(fault, store.0.inner.delete(&path).await).map(|()| path)
            }
        };
        paths.then(delete).boxed()
    }

    fn list(&self, prefix: Option<&Path>) -> BoxStream<'static, Result<ObjectMeta>> {
        let (store, prefix) = (self.clone(), prefix.cloned());
        let listed = async move {
            match store.meet(Call::List, prefix.as_ref().unwrap_or(&Path::default())).await {
                Ok(_) => match store.0.listed.lock().clone() {
                    Some(listed) => futures::stream::iter(listed.into_iter().map(Ok)).boxed(),
                    None => store.0.inner.list(prefix.as_ref()),
                },
                Err(error) => futures::stream::iter([Err(error)]).boxed(),
            }
        };
        futures::stream::once(listed).flatten().boxed()
    }

    async fn list_with_delimiter(&self, prefix: Option<&Path>) -> Result<ListResult> {
        self.0.inner.list_with_delimiter(prefix).await
    }

    async fn copy_opts(&self, from: &Path, to: &Path, options: CopyOptions) -> Result<()> {
        self.0.inner.copy_opts(from, to, options).await
    }
}

#[derive(Debug)]
struct FaultyUpload {
    store: FaultyObjects,
    path: Path,
    upload: Box<dyn MultipartUpload>,
    is_open: bool,
}

impl FaultyUpload {
    /// Counts the upload as ended, once: a client may abort it after a lost answer.
    fn end(&mut self) {
        let ended = u64::from(std::mem::take(&mut self.is_open));
        self.store.0.open_uploads.fetch_sub(ended, Ordering::AcqRel);
    }
}

#[async_trait]
impl MultipartUpload for FaultyUpload {
    fn put_part(&mut self, data: PutPayload) -> UploadPart {
        let (store, path, part) = (self.store.clone(), self.path.clone(), self.upload.put_part(data));
        Box::pin(async move {
            let fault = store.meet(Call::Part, &path).await?;
            answered(fault, part.await)
        })
    }

    async fn complete(&mut self) -> Result<PutResult> {
        let fault = self.store.meet(Call::Complete, &self.path).await?;
        self.end();
        answered(fault, self.upload.complete().await)
    }

    async fn abort(&mut self) -> Result<()> {
        let fault = self.store.meet(Call::Abort, &self.path).await?;
        self.end();
        answered(fault, self.upload.abort().await)
    }
}
