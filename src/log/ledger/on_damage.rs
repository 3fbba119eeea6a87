//! Notifies the service when memory or a tier finds that stored blocks are lost.
//!
//! Losses are not only found by reads of clients. Migrations read data too, and the page cache is
//! written back. The service decides whether a block is lost.

use std::collections::HashMap;
use std::fmt;
use std::sync::Arc;

use parking_lot::Mutex;
use uniffle_wire::types::{PartitionId, ShuffleKey};

/// Listener for a partition with blocks that are or may be lost, with the reason.
pub type OnDamage = Arc<dyn Fn(&ShuffleKey, PartitionId, &str) + Send + Sync>;

/// Notifier of lost blocks. Losses found before a listener is registered are kept for it, because
/// memory and tiers may work before the service has recovered.
#[derive(Default)]
pub struct DamageNotifier(Mutex<State>);

enum State {
    /// No listener yet. Keeps one reason per partition.
    Kept(HashMap<(ShuffleKey, PartitionId), String>),
    Told(OnDamage),
}

impl Default for State {
    fn default() -> Self {
        Self::Kept(HashMap::new())
    }
}

impl fmt::Debug for DamageNotifier {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("DamageNotifier")
    }
}

impl DamageNotifier {
    /// Registers the listener, and notifies it of all kept losses. Only the first listener is used.
    pub fn set(&self, on_damage: OnDamage) {
        let before = {
            let mut state = self.0.lock();
            // A second listener would never be notified. There is one service.
            let State::Kept(_) = &*state else { return };
            std::mem::replace(&mut *state, State::Told(Arc::clone(&on_damage)))
        };
        let State::Kept(kept) = before else { return };
        for ((key, partition), reason) in kept {
            on_damage(&key, partition, &reason);
        }
    }

    /// Reports that blocks of a partition are or may be lost.
    pub fn tell(&self, key: &ShuffleKey, partition: PartitionId, reason: &str) {
        let on_damage = match &mut *self.0.lock() {
            State::Told(on_damage) => Arc::clone(on_damage),
            State::Kept(kept) => {
                kept.insert((key.clone(), partition), reason.to_owned());
                return;
            }
        };
        on_damage(key, partition, reason);
    }

    /// Removes blocks from readers (`mark`), and reports the loss before and after. The first
    /// report prevents reads of missing blocks. The second one covers callers that looked for
    /// present blocks in between.
    pub fn tell_around(&self, key: &ShuffleKey, partition: PartitionId, reason: &str, mark: impl FnOnce()) {
        self.tell(key, partition, reason);
        mark();
        self.tell(key, partition, reason);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use uniffle_wire::types::{AppId, ShuffleId};

    #[test]
    fn early_findings_are_delivered_to_the_first_listener() {
        let key = ShuffleKey::new(AppId::parse("app").unwrap(), ShuffleId(1));
        let (hearer, heard) = (DamageNotifier::default(), Arc::new(Mutex::new(Vec::new())));
        hearer.tell(&key, PartitionId(1), "early");
        hearer.tell_around(&key, PartitionId(1), "early", || {});
        let hears = Arc::clone(&heard);
        hearer.set(Arc::new(move |_: &ShuffleKey, partition: PartitionId, reason: &str| {
            hears.lock().push((partition.0, reason.to_owned()));
        }));
        hearer.set(Arc::new(|_: &ShuffleKey, _: PartitionId, _: &str| unreachable!("it is the second one")));
        let marked = Arc::clone(&heard);
        hearer.tell_around(&key, PartitionId(2), "late", || marked.lock().push((0, "gone".to_owned())));
        let told: Vec<_> = heard.lock().iter().map(|(at, why)| format!("{at} {why}")).collect();
        assert_eq!(told, ["1 early", "2 late", "0 gone", "2 late"]);
    }
}
