//! Which tier takes a batch: a pure function of what is known when it is queued.
//!
//! With both tiers, what is cold (larger than a threshold, or of a huge partition) goes to HDFS and the rest to local
//! disks, as long as the tier takes batches now. A batch that a tier did not take goes to the other: it is visible in
//! memory until one of them has published it, so either order is safe for readers (docs/protocol.md §4.5).

/// A tier below memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Tier {
    /// Local disks.
    Local,
    /// Remote files that clients read themselves.
    Hdfs,
}

impl Tier {
    fn other(self) -> Self {
        match self {
            Self::Local => Self::Hdfs,
            Self::Hdfs => Self::Local,
        }
    }
}

/// What a tier can do for a batch.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Offer {
    /// It is not there for this shuffle.
    Absent,
    /// It takes nothing now: no disk, a remote that does not answer, too much in flight.
    Unavailable,
    /// It takes batches.
    Ready,
}

/// What there is to choose from.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Choice {
    /// The local disks.
    pub local: Offer,
    /// HDFS.
    pub hdfs: Offer,
    /// Whether the batch is cold.
    pub is_cold: bool,
    /// The tier that failed it last.
    pub failed: Option<Tier>,
}

impl Choice {
    fn offer(&self, tier: Tier) -> Offer {
        match tier {
            Tier::Local => self.local,
            Tier::Hdfs => self.hdfs,
        }
    }
}

/// Whether a partition's chain is cold.
#[must_use]
pub fn is_cold(bytes: u64, received_bytes: u64, cold_bytes: u64, huge_partition_bytes: u64) -> bool {
    bytes > cold_bytes || received_bytes > huge_partition_bytes
}

/// The tier for a batch; none when the shuffle has no tier at all.
#[must_use]
pub fn choose(choice: Choice) -> Option<Tier> {
    let wanted = match (choice.failed, choice.is_cold) {
        (Some(failed), _) => failed.other(),
        (None, true) => Tier::Hdfs,
        (None, false) => Tier::Local,
    };
    let order = [wanted, wanted.other()];
    let with = |offer: Offer| order.into_iter().find(|tier| choice.offer(*tier) == offer);
    // When neither takes it now, it waits where it belongs.
    with(Offer::Ready).or_else(|| with(Offer::Unavailable))
}

#[cfg(test)]
mod tests {
    use super::*;

    const BOTH: Choice = Choice { local: Offer::Ready, hdfs: Offer::Ready, is_cold: false, failed: None };

    #[test]
    fn cold_batches_go_to_hdfs_and_the_rest_to_disks() {
        assert_eq!(choose(BOTH), Some(Tier::Local));
        assert_eq!(choose(Choice { is_cold: true, ..BOTH }), Some(Tier::Hdfs));
        assert!(is_cold(101, 0, 100, 1000) && is_cold(1, 1001, 100, 1000));
        assert!(!is_cold(100, 1000, 100, 1000));
    }

    #[test]
    fn a_tier_that_failed_or_takes_nothing_is_left_for_the_other() {
        assert_eq!(choose(Choice { failed: Some(Tier::Local), ..BOTH }), Some(Tier::Hdfs));
        assert_eq!(choose(Choice { failed: Some(Tier::Hdfs), is_cold: true, ..BOTH }), Some(Tier::Local));
        assert_eq!(choose(Choice { local: Offer::Unavailable, ..BOTH }), Some(Tier::Hdfs));
        assert_eq!(choose(Choice { hdfs: Offer::Unavailable, is_cold: true, ..BOTH }), Some(Tier::Local));
        let failed = Choice { failed: Some(Tier::Hdfs), local: Offer::Unavailable, ..BOTH };
        assert_eq!(
            choose(failed),
            Some(Tier::Hdfs),
            "better the one that failed than one that takes nothing"
        );
    }

    #[test]
    fn a_shuffle_without_a_tier_never_gets_it() {
        for offer in [Offer::Ready, Offer::Unavailable] {
            for failed in [None, Some(Tier::Local), Some(Tier::Hdfs)] {
                for is_cold in [false, true] {
                    let only_local = Choice { local: offer, hdfs: Offer::Absent, is_cold, failed };
                    assert_eq!(choose(only_local), Some(Tier::Local));
                    let only_hdfs = Choice { local: Offer::Absent, hdfs: offer, is_cold, failed };
                    assert_eq!(choose(only_hdfs), Some(Tier::Hdfs));
                }
            }
        }
        assert_eq!(choose(Choice { local: Offer::Absent, hdfs: Offer::Absent, ..BOTH }), None);
    }

    #[test]
    fn when_neither_takes_it_a_batch_waits_where_it_belongs() {
        let none = Choice { local: Offer::Unavailable, hdfs: Offer::Unavailable, ..BOTH };
        assert_eq!(choose(none), Some(Tier::Local));
        assert_eq!(choose(Choice { is_cold: true, ..none }), Some(Tier::Hdfs));
    }
}
