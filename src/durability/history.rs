//! What one registration of a shuffle has said so far, read while the log goes on: for a copy of it elsewhere.
//!
//! It has at least what was acknowledged when it was asked for.

use std::fmt;
use std::io;

use bytes::Bytes;
use tokio::task::coop::consume_budget;

use super::frame::{Entry, Incarnation};
use super::read::{METADATA, Places, SourceReader};
use super::writer::LogError;

/// What is in the log of a shuffle.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Heard {
    /// A registration or a report, see `record`.
    Said(Bytes),
    /// Why others may be missing.
    Incomplete(String),
}

/// The registration, and where its records stand. Each copy of the log is a source to read them from.
#[derive(Debug)]
pub struct History {
    shuffle: Incarnation,
    places: Places,
}

impl History {
    pub(super) fn new(shuffle: Incarnation, places: Places) -> Self {
        Self { shuffle, places }
    }

    /// Reads it from its beginning by the source of a number; none if there is no such.
    #[must_use]
    pub fn read(&self, source: usize) -> Option<HistoryReader<'_>> {
        let Places { sources, directories, deadline } = &self.places;
        let reader = sources.get(source)?.read(directories, *deadline);
        Some(HistoryReader { number: self.shuffle.number, reader })
    }
}

/// See [`History::read`].
pub struct HistoryReader<'a> {
    number: u64,
    reader: SourceReader<'a>,
}

impl fmt::Debug for HistoryReader<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("HistoryReader").field("number", &self.number).finish_non_exhaustive()
    }
}

impl HistoryReader<'_> {
    /// The next of it; none at the end.
    ///
    /// # Errors
    /// This source cannot be read to its end.
    pub async fn next(&mut self) -> Result<Option<Heard>, LogError> {
        loop {
            // Most entries are of others, thousands in a window of the log: between two waits for a disk.
            consume_budget().await;
            let entry =
                self.reader.next().await.map_err(|error: io::Error| LogError::new(METADATA, &error))?;
            match entry {
                None => return Ok(None),
                Some(Entry::Said(shuffle, said)) if shuffle.number == self.number => {
                    return Ok(Some(Heard::Said(said)));
                }
                Some(Entry::Incomplete(shuffle, gap)) if shuffle.number == self.number => {
                    return Ok(Some(Heard::Incomplete(gap.reason)));
                }
                Some(Entry::Said(..) | Entry::Incomplete(..) | Entry::Purged(_) | Entry::Epoch(_)) => {}
            }
        }
    }
}
