//! Names: shuffles to which rows belong, in the front of a region.

use std::sync::Arc;

use super::layout::{NAME_WORDS, Name};
use super::table::Table;
use uniffle_wire::types::ShuffleKey;

/// A shuffle's place among the names; its rows refer to it. Given up when the last of them is gone.
#[derive(Debug)]
pub(in crate::memory) struct Named {
    pub(super) table: Arc<Table>,
    pub(super) at: u32,
}

impl Table {
    /// A name for `key`; none while there are too many.
    pub(in crate::memory) fn name(self: &Arc<Self>, key: &ShuffleKey) -> Option<Arc<Named>> {
        let at = self.take(&self.names, &mut self.names.lock()).ok()?;
        let named = Arc::new(Named { table: Arc::clone(self), at });
        self.commit(self.names.word_of(at), &Name(key.clone()).encode(at));
        Some(named)
    }

    /// The same name as an earlier process had.
    pub(super) fn named(self: &Arc<Self>, at: u32) -> Arc<Named> {
        Arc::new(Named { table: Arc::clone(self), at })
    }

    /// Shuffles that an earlier process had, with the numbers of their names.
    pub(super) fn found_names(&self) -> Vec<(u32, ShuffleKey)> {
        let name = |at| Name::decode(&self.words::<NAME_WORDS>(self.names.word_of(at)), at);
        let places = self.names.to_be_read();
        places.filter_map(|at| Some((at, name(at)?.0))).collect()
    }
}

impl Named {
    /// The shuffle is purged: its rows count no longer, whatever becomes of this process.
    pub(in crate::memory) fn disown(&self) {
        if !self.table.is_let_go() {
            self.table.clear(self.table.names.word_of(self.at));
        }
    }
}

impl Drop for Named {
    fn drop(&mut self) {
        if !self.table.is_let_go() {
            self.disown();
            self.table.put(&self.table.names, [self.at]);
        }
    }
}
