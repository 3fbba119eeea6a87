//! Finds the blocks in the files of data directories, without the worker. Also makes claims, and
//! parses the repair of a claim that a worker suggests.
//!
//! A block counts if its index group is whole, its bytes match their checksum, and the claim of its
//! directory has the id in the group. After a kill this shows which blocks are on the disks. A
//! comparison of two states shows which blocks a corruption has touched.

use std::collections::BTreeMap;
use std::io;
use std::ops::Range;
use std::path::{Path, PathBuf};

use uniffle_wire::types::{AppId, BlockId, ShuffleId, ShuffleKey};
use uniffle_worker::store::index::codec;

use crate::worker::OWN_FILES;

/// File name of a claim.
pub const CLAIM: &str = "uniffle-worker.claim";

/// Contents of the files of one data directory, by relative path.
pub type DirectoryFiles = BTreeMap<PathBuf, Vec<u8>>;

/// A range of a file in a directory.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct FileRange {
    pub directory: usize,
    pub path: PathBuf,
    pub range: Range<usize>,
}

impl FileRange {
    fn bytes<'a>(&self, directories: &'a [DirectoryFiles]) -> Option<&'a [u8]> {
        directories.get(self.directory)?.get(&self.path)?.get(self.range.clone())
    }

    /// Returns true if both states have the same bytes in this range.
    #[must_use]
    pub fn is_same(&self, before: &[DirectoryFiles], after: &[DirectoryFiles]) -> bool {
        self.bytes(before) == self.bytes(after)
    }
}

/// A readable block.
#[derive(Debug, Clone)]
pub struct StoredBlock {
    pub key: ShuffleKey,
    pub partition: i32,
    pub id: BlockId,
    /// Index group that contains the block.
    pub group: FileRange,
    pub data: FileRange,
}

impl StoredBlock {
    /// Returns true if neither the block nor its index group differs between two states.
    #[must_use]
    pub fn is_untouched(&self, before: &[DirectoryFiles], after: &[DirectoryFiles]) -> bool {
        self.group.is_same(before, after) && self.data.is_same(before, after)
    }
}

/// Returns all blocks in these directories.
#[must_use]
pub fn stored_blocks(directories: &[DirectoryFiles]) -> Vec<StoredBlock> {
    let mut all = Vec::new();
    for (directory, files) in directories.iter().enumerate() {
        for (path, content) in files {
            let Some(key) = index_of(path) else { continue };
            for (range, group) in groups(content) {
                let place = FileRange { directory, path: path.clone(), range };
                take_group(directories, &key, &place, &group, &mut all);
            }
        }
    }
    all
}

/// Returns the whole groups of an index with their ranges.
fn groups(content: &[u8]) -> Vec<(Range<usize>, codec::IndexGroup)> {
    let (mut all, mut at) = (Vec::new(), 0);
    while let Some(begin) = find(content, at) {
        at = begin + 1;
        if let Ok((group, bytes)) = codec::decode(&content[begin..]) {
            at = begin + bytes;
            all.push((begin..at, group));
        }
    }
    all
}

fn find(content: &[u8], from: usize) -> Option<usize> {
    let rest = content.get(from..)?;
    rest.windows(codec::MAGIC.len()).position(|bytes| bytes == codec::MAGIC).map(|at| from + at)
}

/// Returns the shuffle of an index file, whose path is
/// `apps/<app>/<shuffle>.<incarnation>/<n>.index`.
fn index_of(path: &Path) -> Option<ShuffleKey> {
    let names: Vec<&str> = path.iter().filter_map(|name| name.to_str()).collect();
    let ["apps", app, shuffle, file] = names.as_slice() else { return None };
    file.strip_suffix(".index")?;
    let (shuffle, _) = shuffle.split_once('.')?;
    Some(ShuffleKey::new(AppId::parse(app).ok()?, ShuffleId(shuffle.parse().ok()?)))
}

fn take_group(
    directories: &[DirectoryFiles],
    key: &ShuffleKey,
    group_place: &FileRange,
    group: &codec::IndexGroup,
    all: &mut Vec<StoredBlock>,
) {
    let owner = group.header.disk.to_string();
    let is_owner = |files: &DirectoryFiles| {
        let claim = files.get(Path::new(OWN_FILES[0])).map(|claim| String::from_utf8_lossy(claim));
        claim.is_some_and(|claim| claim.contains(&owner))
    };
    let Some(directory) = directories.iter().position(is_owner) else { return };
    let path = group_place.path.with_file_name(format!("{}.data", group.header.file_number));
    for (entry, records) in &group.entries {
        for record in records {
            let number = |value: i64| usize::try_from(value).unwrap_or(usize::MAX);
            let begins = usize::try_from(entry.data_offset).unwrap_or(usize::MAX);
            let begins = begins.saturating_add(number(record.offset));
            let end = begins.saturating_add(number(i64::from(record.length)));
            let data = FileRange { directory, path: path.clone(), range: begins..end };
            let bytes = data.bytes(directories);
            if bytes.is_some_and(|bytes| i64::from(crc32fast::hash(bytes)) == record.crc) {
                let (key, id) = (key.clone(), BlockId(record.block_id));
                all.push(StoredBlock {
                    key,
                    partition: entry.partition.0,
                    id,
                    group: group_place.clone(),
                    data,
                });
            }
        }
    }
}

/// Reads the files of a real data directory.
///
/// # Errors
/// Returns the error of the file system.
pub fn read_directory(root: &Path) -> io::Result<DirectoryFiles> {
    let mut files = DirectoryFiles::new();
    let mut remaining = vec![root.to_path_buf()];
    while let Some(directory) = remaining.pop() {
        for entry in std::fs::read_dir(&directory)? {
            let path = entry?.path();
            if path.is_dir() {
                remaining.push(path);
            } else {
                let below = path.strip_prefix(root).map_err(io::Error::other)?.to_path_buf();
                files.insert(below, std::fs::read(&path)?);
            }
        }
    }
    Ok(files)
}

/// Returns true for the claim of a directory.
#[must_use]
pub fn is_claim(path: &Path) -> bool {
    path.ends_with(CLAIM)
}

/// Parses the shell command that a refusal suggests. Returns the file and its content, or `None`
/// without a command. Expects paths without quotes.
#[must_use]
pub fn suggested_claim(refusal: &str) -> Option<(PathBuf, Vec<u8>)> {
    let (_, line) = refusal.split_once(r"printf '%s\n' ")?;
    let (lines, file) = line.split_once(" > ")?;
    let quoted = |text: &str| text.split('\'').skip(1).step_by(2).map(str::to_owned).collect::<Vec<_>>();
    let content = quoted(lines).iter().map(|line| format!("{line}\n")).collect::<String>();
    Some((quoted(file).first()?.into(), content.into_bytes()))
}

/// Returns a claim with another identity, as a worker writes it when it treats a directory without
/// a claim as new.
#[must_use]
pub fn new_claim() -> Vec<u8> {
    b"uniffle-worker local store 1\n0badc1a1-0000-4000-8000-000000000001\ncrc32 15554f1a\n".to_vec()
}
