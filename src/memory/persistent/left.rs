//! What an earlier process left in memory that the configuration does not name any more: counted, so that it is not given up without a
//! word.

use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};

use super::super::region::Region;
use super::file::{Held, Owner, Refusal};
use super::table::Table;

/// What is in a file of `owner`, which is its own as long as this lives.
#[derive(Debug)]
pub struct LeftMemory {
    file: Held,
    /// Committed blocks of its shuffles.
    pub blocks: u64,
}

impl LeftMemory {
    /// In `directory`; none if nothing of `owner` is there.
    ///
    /// # Errors
    /// Another process holds it, or it cannot be looked at.
    pub fn in_directory(directory: &Path, owner: &Owner) -> Result<Option<Self>, Refusal> {
        Held::existing(directory)?.map_or(Ok(None), |file| Self::of(file, owner))
    }

    /// In a file without a name that was passed on.
    ///
    /// # Errors
    /// As above.
    pub fn passed(file: OwnedFd, owner: &Owner) -> Result<Option<Self>, Refusal> {
        Self::of(Held::inherited(file)?, owner)
    }

    fn of(file: Held, owner: &Owner) -> Result<Option<Self>, Refusal> {
        let found = file.header()?.filter(|found| found.boot == owner.boot && found.node == owner.node);
        let Some(found) = found else { return Ok(None) };
        let bytes = file.bytes()?;
        if bytes < found.geometry.bytes() {
            return Err(Refusal::Short { has: bytes, needs: found.geometry.bytes() });
        }
        let front = found.geometry.front_bytes();
        let region =
            Region::shared(&file, usize::try_from(front).map_err(std::io::Error::other)?, bytes - front)?;
        let table = Table::new(region, found.geometry).map_err(Refusal::NoPages)?;
        let names: hashbrown::HashSet<u32> = table.found_names().into_iter().map(|(at, _)| at).collect();
        let rows = table.found_rows(table.rows.to_be_read());
        let blocks = rows.filter(|(_, row)| names.contains(&row.name)).count() as u64;
        table.let_go();
        Ok(Some(Self { file, blocks }))
    }

    /// Its file, if it has a name.
    #[must_use]
    pub fn path(&self) -> Option<PathBuf> {
        self.file.path().map(Path::to_path_buf)
    }

    /// Deletes it.
    ///
    /// # Errors
    /// The file system's.
    pub fn delete(self) -> std::io::Result<()> {
        self.file.remove()
    }
}
