//! Who hears of it when memory or a tier finds out that blocks are gone that it had.
//!
//! What finds that out need not be a reader of a client: what is moved elsewhere is read, too, and what is in the page cache is
//! written back. Whether a block is lost is not decided here (`service`).

use std::collections::HashMap;
use std::fmt;
use std::sync::Arc;

use parking_lot::Mutex;
use uniffle_wire::types::{PartitionId, ShuffleKey};

/// Told of a partition of which blocks are gone, or may be, and why.
pub type OnDamage = Arc<dyn Fn(&ShuffleKey, PartitionId, &str) + Send + Sync>;

/// Who is told. What is found out before somebody wants to be is kept for it: memory and tiers may work before the service knows what
/// there is.
#[derive(Default)]
pub struct Hearer(Mutex<State>);

enum State {
    /// Nobody yet; one reason of each partition.
    Kept(HashMap<(ShuffleKey, PartitionId), String>),
    Told(OnDamage),
}

impl Default for State {
    fn default() -> Self {
        Self::Kept(HashMap::new())
    }
}

impl fmt::Debug for Hearer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Hearer")
    }
}

impl Hearer {
    /// `on_damage` is told from now on, and of what was kept; the first one only.
    pub fn set(&self, on_damage: OnDamage) {
        let before = {
            let mut state = self.0.lock();
            // A second one would be told of nothing; there is one service.
            let State::Kept(_) = &*state else { return };
            std::mem::replace(&mut *state, State::Told(Arc::clone(&on_damage)))
        };
        let State::Kept(kept) = before else { return };
        for ((key, partition), reason) in kept {
            on_damage(&key, partition, &reason);
        }
    }

    /// Blocks of a partition are gone, or may be.
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

    /// Takes blocks away from readers (`mark`). It is told before, so that no reader is served of what is missing, and once more after:
    /// who looked in between what is there may have found them.
    pub fn tell_around(
        &self,
        (key, partition): (&ShuffleKey, PartitionId),
        reason: &str,
        mark: impl FnOnce(),
    ) {
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
        let (hearer, heard) = (Hearer::default(), Arc::new(Mutex::new(Vec::new())));
        hearer.tell(&key, PartitionId(1), "early");
        hearer.tell_around((&key, PartitionId(1)), "early", || {});
        let hears = Arc::clone(&heard);
        hearer.set(Arc::new(move |_: &ShuffleKey, partition: PartitionId, reason: &str| {
            hears.lock().push((partition.0, reason.to_owned()));
        }));
        hearer.set(Arc::new(|_: &ShuffleKey, _: PartitionId, _: &str| unreachable!("it is the second one")));
        let marked = Arc::clone(&heard);
        hearer.tell_around((&key, PartitionId(2)), "late", || marked.lock().push((0, "gone".to_owned())));
        let told: Vec<_> = heard.lock().iter().map(|(at, why)| format!("{at} {why}")).collect();
        assert_eq!(told, ["1 early", "2 late", "0 gone", "2 late"]);
    }
}
