//! Remote files, which clients read directly, without a server (docs/protocol.md §6).
//!
//! [`RemoteFiles`] is the interface of a file system. The feature `hdfs` provides an
//! implementation. This module finds a partition's files and decodes their indexes.

use std::fmt::Debug;
use std::io;
use std::pin::Pin;
use std::sync::Arc;

use bytes::Bytes;

use crate::proto;
use crate::read::{self, RecordPosition};
use uniffle_wire::index::RECORD_BYTES;
use uniffle_wire::types::{PartitionId, ShuffleKey};

/// Largest index that is read: six million blocks in one file.
const INDEX_BYTES_MAX: u64 = 256 << 20;

/// A directory of remote files and its Hadoop settings.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct RemoteDirectory {
    /// URL, such as `hdfs://nameservice/uniffle`.
    pub path: String,
    /// Hadoop settings as (key, value).
    pub conf: Vec<(String, String)>,
}

impl RemoteDirectory {
    pub(crate) fn from_message(message: proto::RemoteStorage) -> Self {
        let conf = message.remote_storage_conf.into_iter().map(|item| (item.key, item.value)).collect();
        Self { path: message.path, conf }
    }

    pub(crate) fn to_message(&self) -> proto::RemoteStorage {
        let item = |(key, value): &(String, String)| proto::RemoteStorageConfItem {
            key: key.clone(),
            value: value.clone(),
        };
        proto::RemoteStorage {
            path: self.path.clone(),
            remote_storage_conf: self.conf.iter().map(item).collect(),
        }
    }
}

/// A boxed future, for methods of trait objects.
pub type BoxFuture<'a, T> = Pin<Box<dyn Future<Output = T> + Send + 'a>>;

/// A file system with shuffle data. Each call receives the storage that the coordinator chose,
/// because a client may use several.
pub trait RemoteFiles: Debug + Send + Sync {
    /// Returns the names of the files in a directory, without their path. Empty if the directory
    /// does not exist.
    fn list<'a>(
        &'a self,
        storage: &'a RemoteDirectory,
        directory: &'a str,
    ) -> BoxFuture<'a, io::Result<Vec<String>>>;

    /// Opens a file.
    fn open<'a>(
        &'a self,
        storage: &'a RemoteDirectory,
        path: &'a str,
    ) -> BoxFuture<'a, io::Result<Arc<dyn RemoteFile>>>;
}

/// An open file.
pub trait RemoteFile: Debug + Send + Sync {
    /// Returns the length of the file.
    fn length(&self) -> u64;

    /// Reads exactly `length` bytes, which must be inside the file.
    fn read(&self, offset: u64, length: usize) -> BoxFuture<'_, io::Result<Bytes>>;
}

/// Returns the directory of a partition's files. Paths are URLs that begin with the storage's.
#[must_use]
pub(crate) fn directory(storage: &RemoteDirectory, key: &ShuffleKey, partition: PartitionId) -> String {
    let root = storage.path.trim_end_matches('/');
    format!("{root}/{}/{}/{partition}-{partition}", key.app, key.shuffle)
}

/// Selects from `names` the indexes that server `id` wrote, without their suffix. The id must be
/// followed by `_` or `.`, because `10.0.0.1-1999` is a prefix of `10.0.0.1-19999`.
pub(crate) fn files_of(id: &str, names: &[String]) -> Vec<String> {
    let own = |name: &&String| name.strip_prefix(id).is_some_and(|rest| rest.starts_with(['_', '.']));
    names.iter().filter(own).filter_map(|name| name.strip_suffix(".index")).map(str::to_owned).collect()
}

/// An index and its data file.
#[derive(Debug)]
pub(crate) struct FilePair {
    pub(crate) data: Arc<dyn RemoteFile>,
    pub(crate) records: Vec<RecordPosition>,
}

impl FilePair {
    /// Opens both files and reads the index. Ignores a partial record at the end, which is still
    /// being written.
    pub(crate) async fn open(
        files: &dyn RemoteFiles,
        storage: &RemoteDirectory,
        stem: &str,
    ) -> io::Result<Self> {
        let invalid = |error: String| io::Error::new(io::ErrorKind::InvalidData, error);
        let index = files.open(storage, &format!("{stem}.index")).await?;
        let data = files.open(storage, &format!("{stem}.data")).await?;
        let whole = index.length() - index.length() % RECORD_BYTES as u64;
        if whole > INDEX_BYTES_MAX {
            return Err(invalid(format!("index has {whole} bytes, the limit is {INDEX_BYTES_MAX}")));
        }
        let length = usize::try_from(whole).map_err(|error| invalid(error.to_string()))?;
        let bytes = if length == 0 { Bytes::new() } else { index.read(0, length).await? };
        if bytes.len() != length {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        let records = read::decode_index(&bytes).map_err(|error| invalid(error.to_string()))?;
        Ok(Self { data, records })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use uniffle_wire::types::{AppId, ShuffleId};

    #[test]
    fn partition_directory_matches_java() {
        let key = ShuffleKey::new(AppId::parse("app_1").unwrap(), ShuffleId(4));
        for path in ["hdfs://nn:8020/rss", "hdfs://nn:8020/rss/"] {
            let storage = RemoteDirectory { path: path.to_owned(), conf: Vec::new() };
            assert_eq!(directory(&storage, &key, PartitionId(7)), "hdfs://nn:8020/rss/app_1/4/7-7");
        }
    }

    #[test]
    fn server_ids_with_common_prefix_are_distinguished() {
        let names = ["h-1999_0.index", "h-1999_0.data", "h-19999_0.index", "h-1999_3_1.index", "x_0.index"];
        let names: Vec<String> = names.map(str::to_owned).to_vec();
        assert_eq!(files_of("h-1999", &names), ["h-1999_0", "h-1999_3_1"]);
        assert_eq!(files_of("h-19999", &names), ["h-19999_0"]);
    }
}
