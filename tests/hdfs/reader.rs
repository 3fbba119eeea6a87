//! Reads a partition's directory like the published client (docs/protocol.md §6.4), with all of its
//! checks.

use std::collections::BTreeMap;

use bytes::Bytes;
use uniffle_wire::index::{RECORD_BYTES, records};
use uniffle_worker::remote::hdfs::RemoteFs;
use uniffle_worker::store::{StoreError, StoreErrorKind};

/// Returns the blocks by id. Panics where the client would fail, such as at an index without a data
/// file, and if the directory cannot be listed.
pub(crate) async fn read_directory(fs: &dyn RemoteFs, path: &str, server_id: &str) -> BTreeMap<i64, Bytes> {
    try_read_directory(fs, path, server_id).await.unwrap()
}

/// Like [`read_directory`], but returns an error if the directory cannot be listed.
pub(crate) async fn try_read_directory(
    fs: &dyn RemoteFs,
    path: &str,
    server_id: &str,
) -> Result<BTreeMap<i64, Bytes>, StoreError> {
    let entries = match fs.list(path).await {
        Err(error) if error.kind == StoreErrorKind::NotFound => return Ok(BTreeMap::new()),
        entries => entries?,
    };
    let mut blocks = BTreeMap::new();
    let indexes = entries.iter().filter(|e| e.name.starts_with(server_id) && e.name.ends_with(".index"));
    for entry in indexes {
        let data_name = entry.name.replace(".index", ".data");
        assert!(
            entries.iter().any(|entry| entry.name == data_name),
            "an index has no data file, which fails the client"
        );
        // The client treats an unreadable index as empty.
        let Ok(index) = fs.read(&format!("{path}/{}", entry.name)).await else { continue };
        let Ok(data) = fs.read(&format!("{path}/{data_name}")).await else { continue };
        let mut next = 0;
        // A truncated trailing record is ignored.
        let whole = index.slice(..index.len() - index.len() % RECORD_BYTES);
        for record in records(&whole) {
            assert_eq!(record.offset, next, "{}: blocks must be contiguous", entry.name);
            next += i64::from(record.length);
            if next > i64::try_from(data.len()).unwrap() {
                break; // the client assumes that it is still being written
            }
            let (start, end) = (usize::try_from(record.offset).unwrap(), usize::try_from(next).unwrap());
            let bytes = data.slice(start..end);
            assert_eq!(
                i64::from(crc32fast::hash(&bytes)),
                record.crc,
                "block {} has a wrong checksum",
                record.block_id
            );
            blocks.insert(record.block_id, bytes);
        }
    }
    Ok(blocks)
}
