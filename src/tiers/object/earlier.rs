//! Registrations that are over, as long as pages of them may be in the store. Not here: who deletes these (`purge`).
//!
//! A start believes the pages that it finds. Those of a registration that is over would be taken for what a later one of the shuffle said,
//! wherever the later one is on local disks alone and these cannot be read. So nothing that a later one says may be acknowledged as long as an
//! earlier one stands here.

use std::collections::BTreeMap;
use std::sync::Arc;

use parking_lot::Mutex;
use tokio::sync::MutexGuard;

use super::layout::Registered;
use super::notes::Notes;
use crate::budget::{Budget, Charge};
use uniffle_wire::types::{AppId, ShuffleId, ShuffleKey};

/// About what one takes. Where nothing can be deleted they stay until the process ends.
const OVER_BYTES: u64 = 512;

/// Those of all shuffles.
#[derive(Debug, Default)]
pub(super) struct Earlier(Mutex<BTreeMap<ShuffleKey, Vec<Arc<Over>>>>);

/// One of them.
#[derive(Debug)]
pub(super) struct Over {
    pub(super) name: Registered,
    /// Of its objects' keys.
    pub(super) prefix: String,
    /// None of one that an earlier process left: nothing more comes into its pages.
    notes: Option<Arc<Notes>>,
    /// Of those who wait for the end of its pages one deletes them.
    turn: tokio::sync::Mutex<()>,
    _charge: Charge,
}

impl Over {
    pub(super) fn new(
        name: Registered,
        prefix: String,
        notes: Option<Arc<Notes>>,
        charged_to: &Budget,
    ) -> Self {
        let (turn, _charge) = (tokio::sync::Mutex::default(), charged_to.force_charge(OVER_BYTES));
        Self { name, prefix, notes, turn, _charge }
    }

    /// No page of it comes into the store any more once this returns.
    pub(super) async fn close(&self) {
        if let Some(notes) = &self.notes {
            notes.close().await;
        }
    }

    pub(super) async fn turn(&self) -> MutexGuard<'_, ()> {
        self.turn.lock().await
    }
}

impl Earlier {
    /// Gives it back as it stands here.
    pub(super) fn add(&self, over: Over) -> Arc<Over> {
        let over = Arc::new(over);
        self.0.lock().entry(over.name.key.clone()).or_default().push(Arc::clone(&over));
        over
    }

    /// Those of a shuffle.
    pub(super) fn of(&self, key: &ShuffleKey) -> Vec<Arc<Over>> {
        self.0.lock().get(key).cloned().unwrap_or_default()
    }

    /// Those of an application.
    pub(super) fn of_app(&self, app: &AppId) -> Vec<Arc<Over>> {
        let key = |shuffle| ShuffleKey::new(app.clone(), ShuffleId(shuffle));
        let all = self.0.lock();
        let shuffles = all.range(key(i32::MIN)..=key(i32::MAX));
        shuffles.flat_map(|(_, over)| over.iter().cloned()).collect()
    }

    pub(super) fn has(&self, over: &Over) -> bool {
        self.0.lock().get(&over.name.key).is_some_and(|all| all.iter().any(|one| one.name == over.name))
    }

    /// Nothing of its pages is in the store any more.
    pub(super) fn gone(&self, over: &Over) {
        let mut all = self.0.lock();
        let Some(of_shuffle) = all.get_mut(&over.name.key) else { return };
        of_shuffle.retain(|one| one.name != over.name);
        if of_shuffle.is_empty() {
            all.remove(&over.name.key);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn superseded_registrations_are_removed_individually() {
        let (earlier, budget) = (Earlier::default(), Budget::new(u64::MAX));
        let name = |app: &str, shuffle, incarnation| {
            let key = ShuffleKey::new(AppId::parse(app).unwrap(), ShuffleId(shuffle));
            Registered { key, incarnation }
        };
        let names = [name("a", -1, 1), name("a", 1, 2), name("a", 1, 5), name("a1", 1, 3)];
        for name in names.clone() {
            drop(earlier.add(Over::new(name, String::new(), None, &budget)));
        }
        let incarnations = |all: Vec<Arc<Over>>| all.iter().map(|it| it.name.incarnation).collect::<Vec<_>>();
        assert_eq!(incarnations(earlier.of_app(&names[0].key.app)), [1, 2, 5]);
        let both = earlier.of(&names[1].key);
        earlier.gone(&both[0]);
        assert_eq!((earlier.has(&both[0]), earlier.has(&both[1])), (false, true));
        assert_eq!(incarnations(earlier.of(&names[1].key)), [5]);
        drop(both);
        assert_eq!(budget.used(), 3 * OVER_BYTES);
    }
}
