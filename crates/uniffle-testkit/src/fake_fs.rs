//! An in-memory remote file system with injected faults.
//!
//! It is as strict as a NameNode in three points: a file is created once, a file whose write failed
//! stays open and rejects appends, and a non-empty directory is only deleted recursively. It is
//! more lenient in three: `read` and `list` show the bytes of an open file, and `recover` succeeds
//! at once.

use std::collections::{BTreeMap, VecDeque};
use std::sync::Arc;

use bytes::Bytes;
use futures::FutureExt as _;
use parking_lot::Mutex;
use tokio::sync::Notify;

use uniffle_worker::remote::hdfs::{FsFuture, RemoteEntry, RemoteFs};
use uniffle_worker::store::{StoreError, StoreErrorKind};

/// Fault of a call.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum RemoteFault {
    /// Fails before anything happens.
    Fail(StoreErrorKind),
    /// Writes this number of bytes, then fails. The file stays open. Has no effect on calls other
    /// than create and append.
    Torn(usize, StoreErrorKind),
    /// Succeeds, but returns `Unreachable`, as if the response were lost.
    Lost,
    /// Waits until [`FakeFs::release`]. After that call, later rules of this kind do not wait.
    Hang,
}

/// Calls that can have a fault.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum RemoteCall {
    /// [`RemoteFs::make_dirs`]
    MakeDirs,
    /// [`RemoteFs::create`]
    Create,
    /// [`RemoteFs::append`]
    Append,
    /// [`RemoteFs::recover`]
    Recover,
    /// [`RemoteFs::list`]
    List,
    /// [`RemoteFs::delete`]
    Delete,
    /// [`RemoteFs::read`] and [`RemoteFs::read_range`]
    Read,
}

#[derive(Debug, Clone)]
enum FakeNode {
    Directory,
    File { bytes: Vec<u8>, open: bool },
}

#[derive(Debug)]
struct FakeRule {
    call: RemoteCall,
    ending: String,
    fault: RemoteFault,
    /// Remaining calls that the rule applies to. `None` means all.
    times: Option<u32>,
}

/// A write that ends after `kept` bytes.
#[derive(Debug, Clone, Copy)]
struct TornWrite {
    kept: usize,
    kind: StoreErrorKind,
}

#[derive(Debug, Default)]
struct State {
    nodes: BTreeMap<String, FakeNode>,
    rules: VecDeque<FakeRule>,
    calls: Vec<(RemoteCall, String)>,
    released: bool,
}

/// A file system in memory whose calls are recorded and can be made to fail. Clones share it.
#[derive(Debug, Clone, Default)]
pub struct FakeFs {
    state: Arc<Mutex<State>>,
    wake: Arc<Notify>,
}

impl FakeFs {
    /// Injects `fault` into the next `times` calls (`None` = all) on paths that end in `ending`.
    pub fn add_fault(&self, call: RemoteCall, ending: &str, fault: RemoteFault, times: Option<u32>) {
        self.state.lock().rules.push_back(FakeRule { call, ending: ending.to_owned(), fault, times });
    }

    /// Removes all faults and resumes hanging calls.
    pub fn release(&self) {
        let mut state = self.state.lock();
        state.rules.clear();
        state.released = true;
        self.wake.notify_waiters();
    }

    /// Returns all calls so far.
    pub fn calls(&self) -> Vec<(RemoteCall, String)> {
        self.state.lock().calls.clone()
    }

    /// Returns all files with their bytes.
    pub fn files(&self) -> BTreeMap<String, Vec<u8>> {
        let state = self.state.lock();
        let file = |(path, node): (&String, &FakeNode)| match node {
            FakeNode::File { bytes, .. } => Some((path.clone(), bytes.clone())),
            FakeNode::Directory => None,
        };
        state.nodes.iter().filter_map(file).collect()
    }

    /// Returns all paths, including directories.
    pub fn paths(&self) -> Vec<String> {
        self.state.lock().nodes.keys().cloned().collect()
    }

    /// Records the call. Returns its fault, if a rule matches.
    fn fault(&self, call: RemoteCall, path: &str) -> Option<RemoteFault> {
        let mut state = self.state.lock();
        state.calls.push((call, path.to_owned()));
        let at = state.rules.iter().position(|rule| rule.call == call && path.ends_with(&rule.ending))?;
        let fault = state.rules[at].fault;
        if let Some(times) = &mut state.rules[at].times {
            *times -= 1;
            if *times == 0 {
                state.rules.remove(at);
            }
        }
        Some(fault)
    }

    fn call<T: Send + 'static>(
        &self,
        call: RemoteCall,
        path: &str,
        work: impl FnOnce(&mut State, &str) -> Result<T, StoreError> + Send + 'static,
    ) -> FsFuture<T> {
        let (fake, path) = (self.clone(), path.to_owned());
        async move {
            let failed = |kind| StoreError::remote(kind, &path, "a fault on purpose");
            match fake.fault(call, &path) {
                None | Some(RemoteFault::Torn(..)) => work(&mut fake.state.lock(), &path),
                Some(RemoteFault::Fail(kind)) => Err(failed(kind)),
                Some(RemoteFault::Lost) => {
                    work(&mut fake.state.lock(), &path)?;
                    Err(failed(StoreErrorKind::Unreachable))
                }
                Some(RemoteFault::Hang) => {
                    fake.released().await;
                    work(&mut fake.state.lock(), &path)
                }
            }
        }
        .boxed()
    }

    async fn released(&self) {
        loop {
            let wake = self.wake.notified();
            tokio::pin!(wake);
            wake.as_mut().enable();
            if self.state.lock().released {
                return;
            }
            wake.await;
        }
    }

    /// Returns the torn write that the next call on `path` will have, if any.
    fn torn(&self, call: RemoteCall, path: &str) -> Option<TornWrite> {
        let state = self.state.lock();
        let rule = state.rules.iter().find(|rule| rule.call == call && path.ends_with(&rule.ending))?;
        match rule.fault {
            RemoteFault::Torn(kept, kind) => Some(TornWrite { kept, kind }),
            RemoteFault::Fail(_) | RemoteFault::Lost | RemoteFault::Hang => None,
        }
    }
}

impl State {
    fn make_dirs(&mut self, path: &str) -> Result<(), StoreError> {
        let mut at = String::new();
        for part in path.split('/').filter(|part| !part.is_empty()) {
            at = format!("{at}/{part}");
            match self.nodes.get(&at) {
                Some(FakeNode::File { .. }) => return Err(StoreError::new(StoreErrorKind::Exists, &at)),
                Some(FakeNode::Directory) => {}
                None => drop(self.nodes.insert(at.clone(), FakeNode::Directory)),
            }
        }
        Ok(())
    }

    fn write(&mut self, path: &str, data: &[Bytes], torn: Option<TornWrite>) -> Result<(), StoreError> {
        let Some(FakeNode::File { bytes, open }) = self.nodes.get_mut(path) else {
            return Err(StoreError::new(StoreErrorKind::NotFound, path));
        };
        if *open {
            // HDFS: AlreadyBeingCreatedException.
            return Err(StoreError::new(StoreErrorKind::Exists, path));
        }
        let mut all = data.concat();
        if let Some(TornWrite { kept, .. }) = torn {
            all.truncate(kept);
        }
        bytes.extend_from_slice(&all);
        match torn {
            None => Ok(()),
            Some(TornWrite { kind, .. }) => {
                *open = true;
                Err(StoreError::remote(kind, path, "a torn write on purpose"))
            }
        }
    }
}

impl RemoteFs for FakeFs {
    fn make_dirs(&self, path: &str) -> FsFuture<()> {
        self.call(RemoteCall::MakeDirs, path, State::make_dirs)
    }

    fn create(&self, path: &str, data: Vec<Bytes>) -> FsFuture<()> {
        let torn = self.torn(RemoteCall::Create, path);
        self.call(RemoteCall::Create, path, move |state, path| {
            if state.nodes.contains_key(path) {
                return Err(StoreError::new(StoreErrorKind::Exists, path));
            }
            if let Some((parent, _)) = path.rsplit_once('/') {
                state.make_dirs(parent)?;
            }
            state.nodes.insert(path.to_owned(), FakeNode::File { bytes: Vec::new(), open: false });
            state.write(path, &data, torn)
        })
    }

    fn append(&self, path: &str, data: Vec<Bytes>) -> FsFuture<()> {
        let torn = self.torn(RemoteCall::Append, path);
        self.call(RemoteCall::Append, path, move |state, path| state.write(path, &data, torn))
    }

    fn recover(&self, path: &str) -> FsFuture<bool> {
        self.call(RemoteCall::Recover, path, |state, path| match state.nodes.get_mut(path) {
            Some(FakeNode::File { open, .. }) => {
                *open = false;
                Ok(true)
            }
            Some(FakeNode::Directory) | None => Err(StoreError::new(StoreErrorKind::NotFound, path)),
        })
    }

    fn list(&self, path: &str) -> FsFuture<Vec<RemoteEntry>> {
        self.call(RemoteCall::List, path, |state, path| {
            if !state.nodes.contains_key(path) {
                return Err(StoreError::new(StoreErrorKind::NotFound, path));
            }
            let prefix = format!("{}/", path.trim_end_matches('/'));
            let entry = |(path, node): (&String, &FakeNode)| {
                let name = path.strip_prefix(&prefix).filter(|name| !name.contains('/'))?;
                let (is_dir, length) = match node {
                    FakeNode::Directory => (true, 0),
                    FakeNode::File { bytes, .. } => (false, bytes.len() as u64),
                };
                Some(RemoteEntry { name: name.to_owned(), is_dir, length })
            };
            Ok(state.nodes.iter().filter_map(entry).collect())
        })
    }

    fn delete(&self, path: &str, recursive: bool) -> FsFuture<bool> {
        self.call(RemoteCall::Delete, path, move |state, path| {
            let prefix = format!("{path}/");
            if !recursive && state.nodes.keys().any(|known| known.starts_with(&prefix)) {
                return Err(StoreError::remote(StoreErrorKind::Io, path, "the directory is not empty"));
            }
            state.nodes.retain(|known, _| !known.starts_with(&prefix));
            Ok(state.nodes.remove(path).is_some())
        })
    }

    /// Reads all bytes, also of a file that was not closed, unlike [`FakeFs::read_range`].
    fn read(&self, path: &str) -> FsFuture<Bytes> {
        self.call(RemoteCall::Read, path, |state, path| match state.nodes.get(path) {
            Some(FakeNode::File { bytes, .. }) => Ok(Bytes::from(bytes.clone())),
            Some(FakeNode::Directory) | None => Err(StoreError::new(StoreErrorKind::NotFound, path)),
        })
    }

    /// Reads nothing from a file that was not closed, like HDFS with an incomplete last block.
    fn read_range(&self, path: &str, offset: u64, length: usize) -> FsFuture<Bytes> {
        self.call(RemoteCall::Read, path, move |state, path| match state.nodes.get(path) {
            Some(FakeNode::File { open: true, .. }) => Ok(Bytes::new()),
            Some(FakeNode::File { bytes, open: false }) => {
                let start = usize::try_from(offset).unwrap_or(usize::MAX).min(bytes.len());
                let end = start.saturating_add(length).min(bytes.len());
                Ok(Bytes::copy_from_slice(&bytes[start..end]))
            }
            Some(FakeNode::Directory) | None => Err(StoreError::new(StoreErrorKind::NotFound, path)),
        })
    }
}
