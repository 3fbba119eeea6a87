//! Blocks that an earlier process left in memory that the configuration no longer names. They are
//! counted, so that they are not dropped silently.

use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};

use super::file::{BackingFile, MemoryFileError, Owner};
use super::table::BlockTable;
use crate::region::Region;

/// The contents of a memory file of `owner`, held by this process while this value exists.
#[derive(Debug)]
pub struct OrphanedMemory {
    file: BackingFile,
    /// Number of committed blocks of its shuffles.
    pub blocks: u64,
}

impl OrphanedMemory {
    /// Opens the file in `directory`. Returns `None` if there is none of `owner`.
    ///
    /// # Errors
    /// Another process holds it, it is truncated, or it cannot be read.
    pub fn in_directory(directory: &Path, owner: &Owner) -> Result<Option<Self>, MemoryFileError> {
        BackingFile::existing(directory)?.map_or(Ok(None), |file| Self::of(file, owner))
    }

    /// Opens an unnamed file that was handed over.
    ///
    /// # Errors
    /// It is truncated, or it cannot be read.
    pub fn inherited(file: OwnedFd, owner: &Owner) -> Result<Option<Self>, MemoryFileError> {
        Self::of(BackingFile::inherited(file)?, owner)
    }

    fn of(file: BackingFile, owner: &Owner) -> Result<Option<Self>, MemoryFileError> {
        let found = file.header()?.filter(|found| found.boot == owner.boot && found.node == owner.node);
        let Some(found) = found else { return Ok(None) };
        let bytes = file.bytes()?;
        if bytes < found.geometry.bytes() {
            return Err(MemoryFileError::Short { has: bytes, needs: found.geometry.bytes() });
        }
        let front = found.geometry.front_bytes();
        let region =
            Region::shared(&file, usize::try_from(front).map_err(std::io::Error::other)?, bytes - front)?;
        let table = BlockTable::new(region, found.geometry).map_err(MemoryFileError::NoPages)?;
        let names: hashbrown::HashSet<u32> = table.found_names().into_iter().map(|(at, _)| at).collect();
        let rows = table.found_rows(table.rows.to_be_read());
        let blocks = rows.filter(|(_, row)| names.contains(&row.name)).count() as u64;
        table.release();
        Ok(Some(Self { file, blocks }))
    }

    /// Returns the path of the file, if it has one.
    #[must_use]
    pub fn path(&self) -> Option<PathBuf> {
        self.file.path().map(Path::to_path_buf)
    }

    /// Deletes the file.
    ///
    /// # Errors
    /// The error of the file system.
    pub fn delete(self) -> std::io::Result<()> {
        self.file.remove()
    }
}
