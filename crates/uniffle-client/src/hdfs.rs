//! [`RemoteFiles`] in HDFS through `hdfs-native`, without a JVM or libhdfs (feature `hdfs`). Only
//! reads: files are written by servers. The number of cached connections is bounded.

use std::collections::HashMap;
use std::io;
use std::sync::Arc;

use bytes::Bytes;
use hdfs_native::file::FileReader;
use hdfs_native::{Client, ClientBuilder, HdfsError};
use parking_lot::Mutex;

use crate::remote::{BoxFuture, RemoteDirectory, RemoteFile, RemoteFiles};

/// Default port of a NameNode.
const NAMENODE_PORT: u16 = 8020;
/// Number of attempts to reach a NameNode within one call.
const FAILOVER_ATTEMPTS: (&str, &str) = ("dfs.client.failover.max.attempts", "4");
/// Most cached connections to storages. A cluster has one or a few.
const CLIENTS_MAX: usize = 16;

/// HDFS as the environment configures it (`HADOOP_CONF_DIR`, `HADOOP_USER_NAME`, a Kerberos
/// ticket). The settings that a coordinator gives for a storage take precedence.
#[derive(Debug, Default)]
pub struct Hdfs {
    clients: Mutex<HashMap<ClientKey, Client>>,
}

/// URL of a file system, and the settings of its storage.
type ClientKey = (String, Vec<(String, String)>);

impl Hdfs {
    /// Creates an instance without connections.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    async fn client(&self, storage: &RemoteDirectory) -> io::Result<Client> {
        let key: ClientKey = (file_system(storage)?, storage.conf.clone());
        if let Some(client) = self.clients.lock().get(&key) {
            return Ok(client.clone());
        }
        let mut conf: HashMap<String, String> = storage.conf.iter().cloned().collect();
        conf.entry(FAILOVER_ATTEMPTS.0.to_owned()).or_insert_with(|| FAILOVER_ATTEMPTS.1.to_owned());
        let builder = ClientBuilder::new().with_url(&key.0).with_config(conf);
        // `build` calls GSSAPI and the resolver, which block.
        let client = tokio::task::spawn_blocking(move || builder.build()).await;
        let client = client.map_err(io::Error::other)?.map_err(failed)?;
        let mut clients = self.clients.lock();
        if clients.len() >= CLIENTS_MAX {
            clients.clear();
        }
        clients.insert(key, client.clone());
        Ok(client)
    }
}

impl RemoteFiles for Hdfs {
    fn list<'a>(
        &'a self,
        storage: &'a RemoteDirectory,
        directory: &'a str,
    ) -> BoxFuture<'a, io::Result<Vec<String>>> {
        Box::pin(async move {
            let client = self.client(storage).await?;
            let entries = match client.list_status(path_of(directory), false).await {
                Err(HdfsError::FileNotFound(_)) => return Ok(Vec::new()),
                entries => entries.map_err(failed)?,
            };
            let name = |path: &str| path.rsplit('/').next().unwrap_or_default().to_owned();
            Ok(entries.iter().filter(|entry| !entry.isdir).map(|entry| name(&entry.path)).collect())
        })
    }

    fn open<'a>(
        &'a self,
        storage: &'a RemoteDirectory,
        path: &'a str,
    ) -> BoxFuture<'a, io::Result<Arc<dyn RemoteFile>>> {
        Box::pin(async move {
            let client = self.client(storage).await?;
            let reader = client.read(path_of(path)).await.map_err(failed)?;
            Ok(Arc::new(HdfsFile(reader)) as Arc<dyn RemoteFile>)
        })
    }
}

struct HdfsFile(FileReader);

impl std::fmt::Debug for HdfsFile {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("HdfsFile").field("length", &self.0.file_length()).finish()
    }
}

impl RemoteFile for HdfsFile {
    fn length(&self) -> u64 {
        self.0.file_length() as u64
    }

    fn read(&self, offset: u64, length: usize) -> BoxFuture<'_, io::Result<Bytes>> {
        Box::pin(async move {
            // The reader panics on offsets beyond the end.
            let inside = |end: &usize| *end <= self.0.file_length();
            let start = usize::try_from(offset).ok();
            let start = start.filter(|start| start.checked_add(length).as_ref().is_some_and(inside));
            let start = start.ok_or(io::ErrorKind::UnexpectedEof)?;
            self.0.read_range(start, length).await.map_err(failed)
        })
    }
}

fn failed(error: HdfsError) -> io::Error {
    match error {
        HdfsError::IOError(error) => error,
        HdfsError::FileNotFound(path) => io::Error::new(io::ErrorKind::NotFound, path),
        error => io::Error::other(error),
    }
}

/// Returns the URL of a storage's file system. Adds the default NameNode port to a name without
/// port that is not a nameservice.
fn file_system(storage: &RemoteDirectory) -> io::Result<String> {
    let no_url =
        || io::Error::new(io::ErrorKind::InvalidInput, format!("{:?} is not an HDFS URL", storage.path));
    let (scheme, rest) = storage.path.split_once("://").ok_or_else(no_url)?;
    let authority = rest.split('/').next().filter(|authority| !authority.is_empty()).ok_or_else(no_url)?;
    let nameservice = format!("dfs.ha.namenodes.{authority}");
    let is_nameservice = storage.conf.iter().any(|(key, _)| *key == nameservice);
    let has_port = authority.contains(':');
    // A nameservice that only the environment defines has no port either, and is not visible here.
    let from_environment = std::env::var_os("HADOOP_CONF_DIR").is_some();
    if scheme == "hdfs" && !has_port && !is_nameservice && !from_environment {
        return Ok(format!("hdfs://{authority}:{NAMENODE_PORT}"));
    }
    Ok(format!("{scheme}://{authority}"))
}

/// Returns the path of a URL.
fn path_of(url: &str) -> &str {
    let rest = url.split_once("://").map_or(url, |(_, rest)| rest);
    rest.find('/').map_or("/", |at| &rest[at..])
}

#[cfg(test)]
mod tests {
    use super::*;

    fn storage(path: &str, conf: &[(&str, &str)]) -> RemoteDirectory {
        let conf = conf.iter().map(|(key, value)| ((*key).to_owned(), (*value).to_owned())).collect();
        RemoteDirectory { path: path.to_owned(), conf }
    }

    #[tokio::test]
    async fn storages_with_equal_settings_share_a_client() {
        let hdfs = Hdfs::new();
        let retries = |count| [("dfs.client.failover.max.attempts", count)];
        for (count, clients) in [("1", 1), ("2", 2), ("1", 2)] {
            for path in ["hdfs://127.0.0.1:9000/a", "hdfs://127.0.0.1:9000/b"] {
                hdfs.client(&storage(path, &retries(count))).await.unwrap();
            }
            assert_eq!(hdfs.clients.lock().len(), clients);
        }
    }

    #[test]
    fn hdfs_urls_are_parsed() {
        let system = |storage: RemoteDirectory| file_system(&storage).unwrap();
        assert_eq!(system(storage("hdfs://nn:9000/rss", &[])), "hdfs://nn:9000");
        assert_eq!(system(storage("hdfs://ns/rss", &[("dfs.ha.namenodes.ns", "a,b")])), "hdfs://ns");
        assert!(
            file_system(&storage("/rss", &[])).is_err() && file_system(&storage("hdfs:///x", &[])).is_err()
        );
        assert_eq!(path_of("hdfs://nn:9000/rss/app/0"), "/rss/app/0");
        assert_eq!(path_of("hdfs://nn"), "/");
    }
}
