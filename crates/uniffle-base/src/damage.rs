//! Notifies the service when memory or a tier finds that stored blocks are or may be lost.
//!
//! Losses are not only found by reads of clients: flushes and offloads read stored data too. The
//! service decides whether a block is lost. Invariant: every damaged partition is reported. Before
//! a listener is registered, one reason per partition is kept for it.

use std::collections::HashMap;
use std::fmt;
use std::sync::Arc;

use parking_lot::Mutex;
use uniffle_wire::types::{PartitionId, ShuffleKey};

/// Listener for a partition with blocks that are or may be lost, with the reason.
pub type DamageListener = Arc<dyn Fn(&ShuffleKey, PartitionId, &str) + Send + Sync>;

/// Notifier of lost blocks. Losses found before a listener is registered are kept for it, because
/// memory and tiers may work before the service has recovered.
#[derive(Default)]
pub struct DamageNotifier(Mutex<State>);

enum State {
    /// No listener yet. Keeps one reason per partition.
    Pending(HashMap<(ShuffleKey, PartitionId), String>),
    Registered(DamageListener),
}

impl Default for State {
    fn default() -> Self {
        Self::Pending(HashMap::new())
    }
}

impl fmt::Debug for DamageNotifier {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("DamageNotifier")
    }
}

impl DamageNotifier {
    /// Registers the listener, and notifies it of all losses found earlier. Only the first listener
    /// is used.
    pub fn set(&self, on_damage: DamageListener) {
        let before = {
            let mut state = self.0.lock();
            // A second listener would never be notified. There is one service.
            let State::Pending(_) = &*state else { return };
            std::mem::replace(&mut *state, State::Registered(Arc::clone(&on_damage)))
        };
        let State::Pending(pending) = before else { return };
        for ((key, partition), reason) in pending {
            on_damage(&key, partition, &reason);
        }
    }

    /// Reports that blocks of a partition are or may be lost.
    pub fn notify(&self, key: &ShuffleKey, partition: PartitionId, reason: &str) {
        let on_damage = match &mut *self.0.lock() {
            State::Registered(on_damage) => Arc::clone(on_damage),
            State::Pending(pending) => {
                pending.insert((key.clone(), partition), reason.to_owned());
                return;
            }
        };
        on_damage(key, partition, reason);
    }

    /// Runs `mark`, which hides blocks from readers, and reports the loss before and after. The
    /// first report prevents reads of missing blocks. The second one starts another check for
    /// losses, because the first check may have seen the blocks before `mark`.
    pub fn notify_around(&self, key: &ShuffleKey, partition: PartitionId, reason: &str, mark: impl FnOnce()) {
        self.notify(key, partition, reason);
        mark();
        self.notify(key, partition, reason);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use uniffle_wire::types::{AppId, ShuffleId};

    #[test]
    fn early_findings_are_delivered_to_the_first_listener() {
        let key = ShuffleKey::new(AppId::parse("app").unwrap(), ShuffleId(1));
        let (notifier, notifications) = (DamageNotifier::default(), Arc::new(Mutex::new(Vec::new())));
        notifier.notify(&key, PartitionId(1), "early");
        notifier.notify_around(&key, PartitionId(1), "early", || {});
        let listener = Arc::clone(&notifications);
        notifier.set(Arc::new(move |_: &ShuffleKey, partition: PartitionId, reason: &str| {
            listener.lock().push((partition.0, reason.to_owned()));
        }));
        notifier.set(Arc::new(|_: &ShuffleKey, _: PartitionId, _: &str| {
            unreachable!("the second listener was called")
        }));
        let marked = Arc::clone(&notifications);
        notifier.notify_around(&key, PartitionId(2), "late", || marked.lock().push((0, "gone".to_owned())));
        let notified: Vec<_> = notifications.lock().iter().map(|(at, why)| format!("{at} {why}")).collect();
        assert_eq!(notified, ["1 early", "2 late", "0 gone", "2 late"]);
    }
}
