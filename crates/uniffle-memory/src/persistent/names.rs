//! Names: shuffles that rows belong to, in the front of a region.
//!
//! A shuffle whose name could not be assigned, or came after some of its blocks, is *unprotected*:
//! blocks without rows are lost if the process is killed. Invariant: a purged shuffle's name is
//! cleared before the shuffle can be registered again, so the next process never gives its blocks
//! to a later shuffle of the same key.

use std::sync::{Arc, OnceLock};

use parking_lot::Mutex;

use super::layout::{NAME_WORDS, NameRecord};
use super::table::BlockTable;
use uniffle_wire::types::ShuffleKey;

/// A shuffle's slot among the names, to which its rows refer. It is freed with the last of them.
#[derive(Debug)]
pub(crate) struct NameSlot {
    pub(super) table: Arc<BlockTable>,
    pub(super) at: u32,
}

/// Access of a registered shuffle to its name. The name may be assigned later, if there are too
/// many names or no pages for more.
#[derive(Debug)]
pub(crate) struct ShuffleName {
    table: Arc<BlockTable>,
    key: ShuffleKey,
    named: OnceLock<Arc<NameSlot>>,
    state: Mutex<Protection>,
}

/// Part of a shuffle's blocks that the next process finds.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Protection {
    /// The shuffle has no name, or blocks that are older than the name have no rows.
    Partial,
    Whole,
    /// The next process must not find any block.
    Purged,
}

impl ShuffleName {
    /// Creates the access of shuffle `key`. `named` is its name, if there was a slot for one.
    pub(crate) fn new(table: &Arc<BlockTable>, key: &ShuffleKey, named: Option<Arc<NameSlot>>) -> Arc<Self> {
        let state = if named.is_some() { Protection::Whole } else { Protection::Partial };
        table.count_unprotected(0, u64::from(named.is_none()));
        let (table, key) = (Arc::clone(table), key.clone());
        Arc::new(Self {
            table,
            key,
            named: named.map_or_else(OnceLock::new, OnceLock::from),
            state: Mutex::new(state),
        })
    }

    /// Returns the name, if the shuffle has one.
    pub(crate) fn get(&self) -> Option<&Arc<NameSlot>> {
        self.named.get()
    }

    /// Returns whether blocks of the shuffle are lost with this process.
    pub(crate) fn is_partial(&self) -> bool {
        *self.state.lock() == Protection::Partial
    }

    /// Takes a name unless the shuffle has one or is purged. Returns whether it has one.
    pub(crate) fn take(&self) -> bool {
        // Locked until the end, so that a shuffle that is being purged gets no name.
        let state = self.state.lock();
        if *state == Protection::Partial && self.named.get().is_none() {
            self.table.name(&self.key).into_iter().for_each(|named| drop(self.named.set(named)));
        }
        self.named.get().is_some()
    }

    /// Records that all blocks of the shuffle have rows.
    pub(crate) fn set_whole(&self) {
        self.leave_partial(Protection::Whole);
    }

    /// Purges the shuffle, so that the next process does not recover it.
    pub(crate) fn disown(&self) {
        self.leave_partial(Protection::Purged);
        self.named.get().iter().for_each(|named| named.disown());
    }

    fn leave_partial(&self, next: Protection) {
        let mut state = self.state.lock();
        if *state == Protection::Partial {
            self.table.count_unprotected(1, 0);
        }
        if *state != Protection::Purged {
            *state = next;
        }
    }
}

impl Drop for ShuffleName {
    fn drop(&mut self) {
        self.leave_partial(Protection::Purged);
    }
}

impl BlockTable {
    /// Takes a name for `key`. Returns `None` while there are too many, or no pages for more.
    pub(crate) fn name(self: &Arc<Self>, key: &ShuffleKey) -> Option<Arc<NameSlot>> {
        let at = self.take(&self.names, &mut self.names.lock()).ok()?;
        let named = Arc::new(NameSlot { table: Arc::clone(self), at });
        self.commit(self.names.word_of(at), &NameRecord(key.clone()).encode(at));
        Some(named)
    }

    /// Returns the existing name with number `at` of an earlier process.
    pub(super) fn named(self: &Arc<Self>, at: u32) -> Arc<NameSlot> {
        Arc::new(NameSlot { table: Arc::clone(self), at })
    }

    /// Returns the shuffles of an earlier process with the numbers of their names.
    pub(super) fn found_names(&self) -> Vec<(u32, ShuffleKey)> {
        let name = |at| NameRecord::decode(&self.words::<NAME_WORDS>(self.names.word_of(at)), at);
        let slots = self.names.to_be_read();
        slots.filter_map(|at| Some((at, name(at)?.0))).collect()
    }
}

impl NameSlot {
    /// Clears the name of a purged shuffle. Its rows are then invalid, even if this process dies.
    pub(crate) fn disown(&self) {
        if !self.table.is_released() {
            self.table.clear(self.table.names.word_of(self.at));
        }
    }
}

impl Drop for NameSlot {
    fn drop(&mut self) {
        if !self.table.is_released() {
            self.disown();
            self.table.put(&self.table.names, [self.at]);
        }
    }
}
