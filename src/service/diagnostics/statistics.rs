//! Statistics of each application, for coordinators, the top-N metrics, the API and the status
//! page.
//!
//! They are sums over the counters of an app's partitions and tiers, computed on request. Only the
//! payload received comes from the app's account, because removed shuffles have no counters. The
//! cost is a walk over all partitions that were ever written to.

use std::cmp::Reverse;

use serde::Serialize;
use uniffle_wire::types::AppId;

use crate::app::{App, WaitStage};
use crate::memory::Memory;
use crate::store::Tiers;

/// Statistics of one application at one moment. They are sums over counters that keep changing
/// meanwhile.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct AppStatistics {
    /// The application.
    #[serde(skip)]
    pub app: AppId,
    /// Registered partitions.
    pub partitions: u64,
    /// Number of huge partitions among them.
    pub huge_partitions: u64,
    /// Payload received, including removed shuffles. A restart forgets removed ones.
    pub received_bytes: u64,
    /// Payload received for the registered shuffles.
    #[serde(skip)]
    pub registered_bytes: u64,
    /// Payload in memory, including bytes in flight.
    pub in_memory_bytes: u64,
    /// Blocks in memory, including those in flight.
    pub in_memory_blocks: u64,
    /// Payload received by the largest partition.
    pub largest_partition_bytes: u64,
    /// Partitions that have received data.
    pub partitions_with_data: u64,
    /// Files and objects that are read through this worker.
    pub local_files: u64,
    /// Payload that is read through this worker, on local disks or in an object store.
    pub local_bytes: u64,
    /// Payload in an object store, included in `local_bytes`.
    pub object_bytes: u64,
    /// Files in remote stores that this process has created.
    pub remote_files: u64,
    /// Payload in these files.
    pub remote_bytes: u64,
}

impl AppStatistics {
    /// Returns the size of the largest partition divided by the mean of those with data; 0 without
    /// any.
    #[expect(clippy::cast_precision_loss, reason = "a ratio for people")]
    pub fn skew(&self) -> f64 {
        if self.registered_bytes == 0 {
            return 0.0;
        }
        self.largest_partition_bytes as f64 * self.partitions_with_data as f64 / self.registered_bytes as f64
    }

    /// Returns the mean payload of the blocks in memory, or `None` without any.
    pub fn average_block_bytes(&self) -> Option<u64> {
        self.in_memory_bytes.checked_div(self.in_memory_blocks)
    }
}

/// Returns the statistics of one application.
pub(super) fn statistics_of(app: &App, memory: &Memory, tiers: &Tiers) -> AppStatistics {
    let mut sum = AppStatistics {
        app: app.id().clone(),
        partitions: 0,
        huge_partitions: 0,
        received_bytes: 0,
        registered_bytes: 0,
        in_memory_bytes: 0,
        in_memory_blocks: 0,
        largest_partition_bytes: 0,
        partitions_with_data: 0,
        local_files: 0,
        local_bytes: 0,
        object_bytes: 0,
        remote_files: 0,
        remote_bytes: 0,
    };
    for shuffle in app.shuffles() {
        sum.partitions += shuffle.partitions.count();
        sum.huge_partitions += shuffle.partitions.huge_count() as u64;
        for tier in tiers.iter() {
            let usage = tier.usage(shuffle.key());
            let (files, bytes) = match tier.served() {
                Some(_) => (&mut sum.local_files, &mut sum.local_bytes),
                None => (&mut sum.remote_files, &mut sum.remote_bytes),
            };
            *files += usage.files;
            *bytes += usage.bytes;
            sum.object_bytes += usage.object_bytes;
        }
        let Some(buffers) = memory.shuffle(shuffle.key()) else { continue };
        for buffer in buffers.all() {
            let received_bytes = buffer.received_bytes();
            sum.registered_bytes += received_bytes;
            sum.largest_partition_bytes = sum.largest_partition_bytes.max(received_bytes);
            sum.partitions_with_data += u64::from(received_bytes > 0);
            sum.in_memory_bytes += buffer.in_memory_bytes();
            sum.in_memory_blocks += buffer.block_count() as u64;
        }
    }
    // After a restart the account starts at 0.
    sum.received_bytes = app.account.sum(WaitStage::Receive).bytes.max(sum.registered_bytes);
    sum
}

/// Returns the `count` applications with the largest non-zero `weight`, largest first; ties by id.
pub(super) fn largest(
    apps: &[AppStatistics],
    count: usize,
    weight: impl Fn(&AppStatistics) -> u64,
) -> Vec<(&AppId, u64)> {
    let mut weighed: Vec<(&AppId, u64)> =
        apps.iter().map(|app| (&app.app, weight(app))).filter(|(_, weight)| *weight > 0).collect();
    weighed.sort_unstable_by_key(|(app, weight)| (Reverse(*weight), *app));
    weighed.truncate(count);
    weighed
}

/// Returns the `count` applications with the smallest mean block size in memory, smallest first;
/// ties by id.
pub(super) fn smallest_blocks(apps: &[AppStatistics], count: usize) -> Vec<(&AppId, u64)> {
    let mut weighed: Vec<(&AppId, u64)> =
        apps.iter().filter_map(|app| Some((&app.app, app.average_block_bytes()?))).collect();
    weighed.sort_unstable_by_key(|(app, bytes)| (*bytes, *app));
    weighed.truncate(count);
    weighed
}

#[cfg(test)]
mod tests {
    use super::*;

    fn app(name: &str, received_bytes: u64, in_memory_bytes: u64, in_memory_blocks: u64) -> AppStatistics {
        let local_bytes = received_bytes - in_memory_bytes;
        AppStatistics {
            app: AppId::parse(name).unwrap(),
            partitions: 1,
            huge_partitions: 0,
            received_bytes,
            registered_bytes: received_bytes,
            in_memory_bytes,
            in_memory_blocks,
            largest_partition_bytes: received_bytes,
            partitions_with_data: 1,
            local_files: u64::from(local_bytes > 0),
            local_bytes,
            object_bytes: 0,
            remote_files: 0,
            remote_bytes: 0,
        }
    }

    fn names(chosen: Vec<(&AppId, u64)>) -> Vec<&str> {
        chosen.into_iter().map(|(app, _)| app.as_str()).collect()
    }

    #[test]
    fn largest_entries_are_chosen_without_empty_ones() {
        let apps = [app("a", 5, 5, 1), app("b", 90, 0, 0), app("c", 5, 1, 1), app("d", 0, 0, 0)];
        assert_eq!(names(largest(&apps, 2, |app| app.received_bytes)), ["b", "a"]);
        assert_eq!(names(largest(&apps, 9, |app| app.received_bytes)), ["b", "a", "c"]);
        assert_eq!(names(largest(&apps, 9, |app| app.local_bytes)), ["b", "c"]);
        assert_eq!(names(smallest_blocks(&apps, 9)), ["c", "a"]);
        assert_eq!(names(smallest_blocks(&apps, 1)), ["c"]);
    }
}
