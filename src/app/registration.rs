//! What `registerShuffle` says, what of it takes heap, and why it may be refused.

use std::collections::HashMap;
use std::net::IpAddr;
use std::time::Duration;

use super::quota::QuotaExceeded;
use super::ranges::PartitionRanges;
use super::usage::OverQuota;
use crate::budget::heap::HeapFull;
use uniffle_wire::types::{Distribution, ShuffleKey};

/// Ranges of one shuffle that cannot be merged: what a coordinator makes of so many partitions dealt out one by one.
pub(super) const RANGES_MAX: usize = 1 << 18;

/// Heap of an application, in all modules together, beside what it was registered with.
const APP_BYTES: u64 = 4096;
/// ... of a shuffle.
pub(super) const SHUFFLE_BYTES: u64 = 2048;
/// ... of a range, which tiers keep too, and once more as far as it is written down.
pub(super) const RANGE_BYTES: u64 = 32;
/// ... of a string, beside its bytes.
const STRING_BYTES: u64 = 48;

/// Why a registration was not taken; nothing of it was.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum RegisterError {
    /// As many applications as are allowed.
    #[error("applications: {0}")]
    Apps(QuotaExceeded),
    /// As many shuffles of the application as are allowed.
    #[error("shuffles of the application: {0}")]
    Shuffles(QuotaExceeded),
    /// More ranges than a shuffle may have.
    #[error(
        "partitionRanges has {ranges} disjoint ranges, earlier registrations included; the limit is \
         {RANGES_MAX}"
    )]
    Ranges {
        /// How many there would be.
        ranges: usize,
    },
    /// No heap for it.
    #[error(transparent)]
    NoHeap(#[from] HeapFull),
    /// More partitions than a quota allows.
    #[error(transparent)]
    Quota(#[from] OverQuota),
}

/// What `registerShuffle` says.
#[derive(Debug, Clone)]
pub struct Registration {
    /// The shuffle.
    pub key: ShuffleKey,
    /// Its partitions on this worker; added to those already known.
    pub ranges: PartitionRanges,
    /// Order of blocks in extents.
    pub distribution: Distribution,
    /// Spark user.
    pub user: String,
    /// Client configuration, `.rss.` keys only.
    pub properties: HashMap<String, String>,
    /// Whether the client sent any properties, `.rss.` or not.
    pub sent_properties: bool,
    /// What this app wants instead of the configured timeout, within bounds.
    pub heartbeat_timeout: Option<Duration>,
    /// Bytes that other modules keep of it.
    pub kept_elsewhere_bytes: u64,
    /// The address that it came from; none of one that an earlier process took.
    pub from: Option<IpAddr>,
}

impl Registration {
    /// What an application keeps of it, beside its shuffle.
    pub(super) fn app_bytes(&self) -> u64 {
        let strings = self.properties.iter().flat_map(|(key, value)| [key, value]);
        let properties: u64 = strings.map(|text| text.len() as u64 + STRING_BYTES).sum();
        APP_BYTES + self.user.len() as u64 + properties + self.kept_elsewhere_bytes
    }
}
