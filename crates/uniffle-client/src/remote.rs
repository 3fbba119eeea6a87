//! Remote files as a reader sees them (docs/protocol.md §6): clients read these themselves, without a server.
//!
//! [`RemoteFiles`] is what a file system must be able to do; `hdfs` (a feature) has a real one. Here is how a partition's
//! files are found and what stands in them.

use std::fmt::Debug;
use std::io;
use std::pin::Pin;
use std::sync::Arc;

use bytes::Bytes;

use crate::coordinators::RemoteStorage;
use crate::read::{self, IndexRecord};
use uniffle_wire::index::RECORD_BYTES;
use uniffle_wire::types::{PartitionId, ShuffleKey};

/// Largest index read: six million blocks of one file.
const INDEX_BYTES_MAX: u64 = 256 << 20;

/// A future of a trait object.
pub type BoxFuture<'a, T> = Pin<Box<dyn Future<Output = T> + Send + 'a>>;

/// A file system with shuffle data in it. Each call gets the storage as the coordinator named it, because one client may
/// see several.
pub trait RemoteFiles: Debug + Send + Sync {
    /// Names of the files in a directory, without their path; none if there is no such directory.
    fn list<'a>(
        &'a self,
        storage: &'a RemoteStorage,
        directory: &'a str,
    ) -> BoxFuture<'a, io::Result<Vec<String>>>;

    /// Opens a file.
    fn open<'a>(
        &'a self,
        storage: &'a RemoteStorage,
        path: &'a str,
    ) -> BoxFuture<'a, io::Result<Arc<dyn RemoteFile>>>;
}

/// An open file.
pub trait RemoteFile: Debug + Send + Sync {
    /// Bytes that can be read.
    fn length(&self) -> u64;

    /// Exactly `length` bytes, which lie inside of the file.
    fn read(&self, offset: u64, length: usize) -> BoxFuture<'_, io::Result<Bytes>>;
}

/// Where the files of a partition are. Paths are URLs that begin with the storage's.
#[must_use]
pub(crate) fn directory(storage: &RemoteStorage, key: &ShuffleKey, partition: PartitionId) -> String {
    let root = storage.path.trim_end_matches('/');
    format!("{root}/{}/{}/{partition}-{partition}", key.app, key.shuffle)
}

/// Which of `names` are indexes that server `id` wrote, without their ending. A prefix alone is not enough:
/// `10.0.0.1-1999` is one of `10.0.0.1-19999`.
pub(crate) fn files_of(id: &str, names: &[String]) -> Vec<String> {
    let own = |name: &&String| name.strip_prefix(id).is_some_and(|rest| rest.starts_with(['_', '.']));
    names.iter().filter(own).filter_map(|name| name.strip_suffix(".index")).map(str::to_owned).collect()
}

/// An index and its data.
#[derive(Debug)]
pub(crate) struct FilePair {
    pub(crate) data: Arc<dyn RemoteFile>,
    pub(crate) records: Vec<IndexRecord>,
}

impl FilePair {
    /// Opens both and reads the index. Half a record at its end is one that is being written.
    pub(crate) async fn open(
        files: &dyn RemoteFiles,
        storage: &RemoteStorage,
        stem: &str,
    ) -> io::Result<Self> {
        let invalid = |error: String| io::Error::new(io::ErrorKind::InvalidData, error);
        let index = files.open(storage, &format!("{stem}.index")).await?;
        let data = files.open(storage, &format!("{stem}.data")).await?;
        let whole = index.length() - index.length() % RECORD_BYTES as u64;
        if whole > INDEX_BYTES_MAX {
            return Err(invalid(format!("an index of {whole} bytes, at most {INDEX_BYTES_MAX} are read")));
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
    fn a_partitions_directory_is_javas() {
        let key = ShuffleKey::new(AppId::parse("app_1").unwrap(), ShuffleId(4));
        for path in ["hdfs://nn:8020/rss", "hdfs://nn:8020/rss/"] {
            let storage = RemoteStorage { path: path.to_owned(), conf: Vec::new() };
            assert_eq!(directory(&storage, &key, PartitionId(7)), "hdfs://nn:8020/rss/app_1/4/7-7");
        }
    }

    #[test]
    fn servers_whose_ids_begin_alike_are_told_apart() {
        let names = ["h-1999_0.index", "h-1999_0.data", "h-19999_0.index", "h-1999_3_1.index", "x_0.index"];
        let names: Vec<String> = names.map(str::to_owned).to_vec();
        assert_eq!(files_of("h-1999", &names), ["h-1999_0", "h-1999_3_1"]);
        assert_eq!(files_of("h-19999", &names), ["h-19999_0"]);
    }
}
