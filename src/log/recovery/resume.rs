//! Resumes the metadata log that the previous process handed off. No new generation is written: new
//! entries are appended to the existing copies.

use std::collections::BTreeSet;

use futures::future::join_all;

use crate::log::window::within;
use crate::log::write::generation::open_copy;
use crate::log::write::writer::{Copy, Writer};

impl Writer {
    /// Opens the copies that the previous process handed off, to append to them. Returns false if a
    /// new generation has to begin instead.
    pub(in crate::log) async fn resume(&mut self) -> bool {
        let Some(resumable) = self.resumable.take() else { return false };
        let directories: Vec<usize> = resumable.copies.iter().map(|(directory, _)| *directory).collect();
        let all: BTreeSet<usize> = (0..self.directories.len()).collect();
        // A disk may have stopped accepting writes, and a new generation would not use it.
        let is_the_same = self.places(&BTreeSet::new()) == directories && self.usable_now() == all;
        if self.is_blind || !is_the_same {
            return false;
        }
        let opened = resumable.copies.iter().map(|(directory, path)| {
            let io = &*self.directories[*directory].io;
            within(self.deadlines.name, open_copy(io, path, resumable.bytes))
        });
        let opened = join_all(opened.collect::<Vec<_>>()).await;
        let mut copies = Vec::new();
        for ((directory, path), file) in resumable.copies.iter().zip(opened) {
            match file {
                Ok(file) => {
                    let (directory, path) = (*directory, path.clone());
                    copies.push(Copy { directory, generation: self.generation, path, file });
                }
                Err(error) => {
                    self.blame(*directory, path, &error);
                    return false;
                }
            }
        }
        (self.encoder, self.end, self.spare) = (resumable.encoder, resumable.bytes, None);
        self.opened(copies, all);
        tracing::debug!(generation = self.generation, "metadata log resumed");
        true
    }
}
