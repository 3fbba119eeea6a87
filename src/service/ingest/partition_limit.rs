//! Limits on the size of one partition: pure functions of sizes, no lock, no clock.
//!
//! A partition whose received bytes (in memory, flushed, and now requested) exceed a threshold is
//! *huge*. It may only fill a share of the memory, so that its writers wait for the disks instead
//! of starving others. Bytes in flight count, or slow disks would defeat the limit
//! (docs/protocol.md §2.4, §4.7). Two further limits are off by default. Above the first the client
//! is told to split the partition; above the second the partition is refused permanently.

use crate::schema::kind::{MIB, TIB, flag, optional, ratio, size};
use crate::schema::section;

section! {
    /// Bounds of one partition, as configured.
    pub struct PartitionConfig {
        /// Make writers of a huge partition wait for the disks when its memory share is full.
        #[key("app_config.partition_limit_enable", flag(), NextUse)]
        pub limit: bool = true,
        /// A partition that has received more than this is huge.
        #[key("app_config.partition_limit_threshold", size(MIB..=1024 * TIB), NextUse)]
        pub huge_bytes: u64 = 20_000_000_000,
        /// Share of memory that a huge partition may fill; above 0.0.
        #[key("app_config.partition_limit_memory_backpressure_ratio", ratio(), NextUse)]
        pub memory_ratio: f64 = 0.2,
        /// Tell clients to write elsewhere above partition_split_threshold, or while fewer than
        /// `healthy_check_min_disks`, or no disks, are writable.
        #[key("app_config.partition_split_enable", flag(), NextUse)]
        pub split: bool = false,
        /// Partition size above which clients write elsewhere.
        #[key("app_config.partition_split_threshold", size(MIB..=1024 * TIB), NextUse)]
        pub split_bytes: u64 = 40_000_000_000,
        /// Writes to a partition that would exceed this size are refused permanently, and the job
        /// fails. Default: none.
        #[key("app_config.partition_hard_limit", optional(size(MIB..=1024 * TIB)), NextUse, example "\"1TB\"")]
        pub bytes_max: Option<u64> = None,
    }
}

impl PartitionConfig {
    /// Returns how many of `capacity_bytes` one huge partition may fill.
    #[expect(
        clippy::cast_possible_truncation,
        clippy::cast_sign_loss,
        clippy::cast_precision_loss,
        reason = "a ratio of 0..=1 of a byte count; a few bytes of rounding do not matter"
    )]
    pub fn huge_share_bytes(&self, capacity_bytes: u64) -> u64 {
        (capacity_bytes as f64 * self.memory_ratio) as u64
    }

    /// Returns the limits for a memory of `capacity_bytes` bytes.
    pub fn limits(&self, capacity_bytes: u64) -> PartitionLimits {
        PartitionLimits {
            huge_bytes: Some(self.huge_bytes),
            huge_in_memory_bytes_max: self.limit.then(|| self.huge_share_bytes(capacity_bytes)),
            split_bytes: self.split.then_some(self.split_bytes),
            bytes_max: self.bytes_max,
        }
    }
}

/// Limits of one partition, in payload bytes. The default has none.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct PartitionLimits {
    /// Received bytes above which partitions are marked huge. Default: none are.
    pub huge_bytes: Option<u64>,
    /// Bytes in memory above which a huge partition gets no further tickets for a while. Default:
    /// no limit.
    pub huge_in_memory_bytes_max: Option<u64>,
    /// Size above which clients are told to write the partition elsewhere. Default: never.
    pub split_bytes: Option<u64>,
    /// Size above which a partition is refused permanently. Default: never.
    pub bytes_max: Option<u64>,
}

/// Sizes of one partition at one moment.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct PartitionSizes {
    /// Payload received so far.
    pub received: u64,
    /// Payload in memory now, including bytes in flight.
    pub in_memory: u64,
    /// Requested payload; 0 if the client does not send it.
    pub requested: u64,
}

/// Decision on a request for room in a partition.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum LimitDecision {
    /// Accept the request.
    Fits,
    /// Accept the request, but the client must write elsewhere next time.
    Split,
    /// Wait: a huge partition has filled its share of the memory.
    Wait,
    /// Refuse permanently.
    TooLarge,
}

impl PartitionLimits {
    /// Returns whether any request can get a decision other than [`LimitDecision::Fits`].
    pub fn decide_anything(&self) -> bool {
        let waits = self.huge_bytes.is_some() && self.huge_in_memory_bytes_max.is_some();
        waits || self.split_bytes.is_some() || self.bytes_max.is_some()
    }

    /// Returns whether a partition of `received` bytes is huge.
    pub fn is_huge(&self, received: u64) -> bool {
        over(received, self.huge_bytes)
    }

    /// Returns whether a partition of `received` bytes exceeds the permanent limit.
    pub fn is_too_large(&self, received: u64) -> bool {
        over(received, self.bytes_max)
    }

    /// Decides on a request, with the checks in the Java server's order (docs/protocol.md §2.4,
    /// step 4).
    pub fn decide(&self, sizes: PartitionSizes) -> LimitDecision {
        let total = sizes.received.saturating_add(sizes.requested);
        let share_is_full = over(sizes.in_memory, self.huge_in_memory_bytes_max);
        if self.is_huge(total) && share_is_full {
            return LimitDecision::Wait;
        }
        if self.is_too_large(total) {
            return LimitDecision::TooLarge;
        }
        if over(total, self.split_bytes) { LimitDecision::Split } else { LimitDecision::Fits }
    }
}

fn over(bytes: u64, limit: Option<u64>) -> bool {
    limit.is_some_and(|limit| bytes > limit)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const LIMITS: PartitionLimits = PartitionLimits {
        huge_bytes: Some(1_000),
        huge_in_memory_bytes_max: Some(100),
        split_bytes: Some(2_000),
        bytes_max: Some(3_000),
    };

    fn sizes(received: u64, in_memory: u64, requested: u64) -> PartitionSizes {
        PartitionSizes { received, in_memory, requested }
    }

    #[test]
    fn limits_are_passed_not_reached() {
        assert_eq!(LIMITS.decide(sizes(900, 900, 100)), LimitDecision::Fits);
        assert_eq!(LIMITS.decide(sizes(900, 101, 101)), LimitDecision::Wait);
        assert_eq!(
            LIMITS.decide(sizes(1_001, 100, 0)),
            LimitDecision::Fits,
            "a huge partition within its share must be accepted"
        );
        assert_eq!(LIMITS.decide(sizes(1_001, 101, 0)), LimitDecision::Wait);
        assert_eq!(LIMITS.decide(sizes(1_999, 0, 1)), LimitDecision::Fits);
        assert_eq!(LIMITS.decide(sizes(1_999, 0, 2)), LimitDecision::Split);
        assert_eq!(LIMITS.decide(sizes(2_999, 0, 1)), LimitDecision::Split);
        assert_eq!(LIMITS.decide(sizes(2_999, 0, 2)), LimitDecision::TooLarge);
        assert_eq!(
            LIMITS.decide(sizes(2_999, 101, 2)),
            LimitDecision::Wait,
            "the check of the share comes before the limits"
        );
        assert_eq!(LIMITS.decide(sizes(u64::MAX, 0, u64::MAX)), LimitDecision::TooLarge);
    }

    #[test]
    fn without_limits_everything_fits() {
        let none = PartitionLimits::default();
        assert!(!none.decide_anything());
        assert_eq!(none.decide(sizes(u64::MAX, u64::MAX, u64::MAX)), LimitDecision::Fits);
        // A threshold alone only marks partitions.
        assert!(!PartitionLimits { huge_bytes: Some(1), ..none }.decide_anything());
        assert!(LIMITS.decide_anything());
    }

    fn limit() -> impl Strategy<Value = Option<u64>> {
        proptest::option::of(0u64..50)
    }

    proptest! {
        /// More bytes never get a milder decision, except that waiting takes precedence.
        #[test]
        fn asking_for_more_is_never_easier(
            huge_bytes in limit(), huge_in_memory_bytes_max in limit(), split_bytes in limit(), bytes_max in limit(),
            received in 0u64..60, in_memory in 0u64..60, requested in 0u64..60, more in 0u64..60,
        ) {
            let limits = PartitionLimits { huge_bytes, huge_in_memory_bytes_max, split_bytes, bytes_max };
            let rank = |verdict| match verdict {
                LimitDecision::Fits => 0,
                LimitDecision::Split => 1,
                LimitDecision::TooLarge => 2,
                LimitDecision::Wait => 3,
            };
            let (less, greater) = (
                limits.decide(sizes(received, in_memory, requested)),
                limits.decide(sizes(received, in_memory, requested + more)),
            );
            prop_assert!(rank(less) <= rank(greater), "a larger request got a milder decision: {less:?}, then {greater:?}");
            prop_assert!(limits.decide_anything() || less == LimitDecision::Fits);
            // Flushing ends a wait.
            prop_assert_ne!(limits.decide(sizes(received, 0, requested)), LimitDecision::Wait);
        }
    }
}
