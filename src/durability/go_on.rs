//! A successor goes on with the copies that the process before left whole, in the same generation and epoch, as if that process had not
//! ended: nothing is written anew, and the first entry is appended at once.
//!
//! Which those are is said in [`left`](super::left). Where anything differs, a generation is begun (`generation`).

use std::collections::BTreeSet;

use futures::future::join_all;

use super::read::within;
use super::writer::{Copy, Writer};
use uniffle_io::{Lane, WriteOpen};

impl Writer {
    /// Goes on with what was left whole; false if a generation has to begin.
    pub(super) async fn go_on(&mut self) -> bool {
        let Some(left) = self.left.take() else { return false };
        let directories: Vec<usize> = left.copies.iter().map(|(directory, _)| *directory).collect();
        let all: BTreeSet<usize> = (0..self.directories.len()).collect();
        // A disk that takes nothing any more has no part in the next generation.
        let is_the_same = self.places(&BTreeSet::new()) == directories && self.usable_now() == all;
        if self.is_blind || !is_the_same {
            return false;
        }
        let opened = left.copies.iter().map(|(directory, path)| {
            let how = WriteOpen { lane: Lane::Metadata, is_named: true, ..WriteOpen::default() };
            within(self.deadlines.name, self.directories[*directory].io.open_write(path, how))
        });
        let mut copies = Vec::new();
        for ((directory, path), file) in left.copies.iter().zip(join_all(opened.collect::<Vec<_>>()).await) {
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
        (self.encoder, self.end) = (left.encoder, left.bytes);
        self.opened(copies, all);
        tracing::debug!(generation = self.generation, "continuing the metadata log");
        true
    }
}
