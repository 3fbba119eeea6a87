//! What is to be removed from one disk. Every disk has a list of its own: one that deletes slowly holds up no other.

use std::collections::VecDeque;
use std::sync::Arc;

use parking_lot::Mutex;

use super::shuffle::Shuffle;

/// The list of one disk: shuffles whose directories there are to go.
#[derive(Debug, Default)]
pub(super) struct Deletes(Mutex<VecDeque<Arc<Shuffle>>>);

impl Deletes {
    pub(super) fn add(&self, shuffle: Arc<Shuffle>) {
        self.0.lock().push_back(shuffle);
    }

    /// Everything on the list that `is_ready`; it is not there meanwhile.
    pub(super) fn take(&self, is_ready: impl Fn(&Shuffle) -> bool) -> Deleting<'_> {
        let mut left = VecDeque::new();
        self.0.lock().retain(|shuffle| {
            let takes = is_ready(shuffle);
            if takes {
                left.push_back(Arc::clone(shuffle));
            }
            !takes
        });
        Deleting { list: self, left }
    }
}

/// Taken from the list. What is left of it goes back when this is dropped, so that a cancelled purge forgets nothing.
#[derive(Debug)]
pub(super) struct Deleting<'a> {
    list: &'a Deletes,
    pub(super) left: VecDeque<Arc<Shuffle>>,
}

impl Drop for Deleting<'_> {
    fn drop(&mut self) {
        self.list.0.lock().append(&mut self.left);
    }
}
