//! The contents of `registerShuffle`, their heap use, and the reasons to refuse a registration.
//!
//! The sizes cover all modules that keep a part of a registration, because its heap is charged
//! once, in the registry. A registration is accepted as a whole or not at all.

use std::collections::HashMap;
use std::net::IpAddr;
use std::time::Duration;

use super::quota::QuotaExceeded;
use super::ranges::PartitionRanges;
use super::usage::OverQuota;
use uniffle_base::budget::heap::HeapFull;
use uniffle_wire::types::{Distribution, ShuffleKey};

/// Maximum number of ranges of one shuffle that cannot be merged. A coordinator creates them by
/// assigning partitions one by one.
pub(super) const RANGES_MAX: usize = 1 << 18;

/// Heap of an application in all modules together, without its registration data.
const APP_BYTES: u64 = 4096;
/// Heap of a shuffle in all modules together.
pub(super) const SHUFFLE_BYTES: u64 = 2048;
/// Heap of a range in all modules together. Tiers keep ranges too, and so does the record of logged
/// registrations.
pub(super) const RANGE_BYTES: u64 = 32;
/// Heap of a string in addition to its bytes.
const STRING_BYTES: u64 = 48;

/// Reason to refuse a registration as a whole.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum RegisterError {
    /// The limit on applications is reached.
    #[error("applications: {0}")]
    Apps(QuotaExceeded),
    /// The limit on shuffles of the application is reached.
    #[error("shuffles of the application: {0}")]
    Shuffles(QuotaExceeded),
    /// The shuffle would have too many ranges.
    #[error(
        "partitionRanges has {ranges} disjoint ranges, earlier registrations included; the limit is \
         {RANGES_MAX}"
    )]
    Ranges {
        /// Number of ranges the shuffle would have.
        ranges: usize,
    },
    /// The heap has no room for the registration.
    #[error(transparent)]
    NoHeap(#[from] HeapFull),
    /// A quota allows no further partitions.
    #[error(transparent)]
    Quota(#[from] OverQuota),
}

/// Contents of a `registerShuffle` request.
#[derive(Debug, Clone)]
pub struct Registration {
    /// The shuffle.
    pub key: ShuffleKey,
    /// The shuffle's partitions on this worker, added to the known ones.
    pub ranges: PartitionRanges,
    /// Order of blocks in extents.
    pub distribution: Distribution,
    /// Spark user.
    pub user: String,
    /// Client configuration, `.rss.` keys only.
    pub properties: HashMap<String, String>,
    /// True if the client sent any properties, with `.rss.` or without.
    pub sent_properties: bool,
    /// Heartbeat timeout that the app requests instead of the configured one, within bounds.
    pub heartbeat_timeout: Option<Duration>,
    /// Bytes that other modules keep of this registration.
    pub other_modules_bytes: u64,
    /// Client address; `None` for a registration that an earlier process accepted.
    pub from: Option<IpAddr>,
}

impl Registration {
    /// Returns the bytes that an application keeps of the registration, without its shuffle.
    pub(super) fn app_bytes(&self) -> u64 {
        let strings = self.properties.iter().flat_map(|(key, value)| [key, value]);
        let properties: u64 = strings.map(|text| text.len() as u64 + STRING_BYTES).sum();
        APP_BYTES + self.user.len() as u64 + properties + self.other_modules_bytes
    }
}
