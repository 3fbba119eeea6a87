//! Counts of events in simulated runs, to notice a model that no longer reaches an event.

macro_rules! tally {
    ($($name:ident),* $(,)?) => {
        /// Counts of one run or of many.
        #[derive(Debug, Default, Clone, Copy)]
        pub(crate) struct Tally {
            $(pub(crate) $name: u64,)*
        }

        impl Tally {
            pub(crate) fn add(&mut self, other: Self) {
                $(self.$name += other.$name;)*
            }

            /// Returns the names of events that never happened, except those of `elsewhere`.
            pub(crate) fn never(&self, elsewhere: &[&[&str]]) -> Vec<&'static str> {
                let figures = [$((stringify!($name), self.$name)),*];
                let here = figures.into_iter().filter(|(name, _)| !elsewhere.iter().any(|of| of.contains(name)));
                here.filter(|(_, count)| *count == 0).map(|(name, _)| name).collect()
            }
        }
    };
}

tally!(
    lives,
    graceful_stops,
    hung_disks,
    upgrades,
    power_losses,
    unsynced_power_losses,
    missing_disks,
    read_only_disks,
    failing_lists,
    removed_files,
    stops_above_watermark,
    recovered_disks,
    full_files,
    // Ends of shuffles that could not be logged, because no disk had room.
    refused_ends,
    // Starts that were refused because two paths lead to one directory.
    doubled_paths,
    damaged_metadata,
    damaged_claims,
    claims_written,
    // Gaps of the metadata log that ended with the timeout of applications.
    ended_gaps,
    refused_results,
    forgotten_shuffles,
    compared_blocks,
    acknowledged,
    reports,
    reports_refused,
    reads_refused,
    lost_blocks,
    healed_blocks,
    extents_given_up,
    flushed_bytes,
    failed_writes,
    purged_batches,
    duplicates,
    refused_tickets,
    aborted,
    read_from_memory,
    read_from_disk,
    read_across_restarts,
    refused_starts,
    missing_objects,
    damaged_objects,
    earlier_objects,
    moved_bytes,
    failed_moves,
    divided_shuffles,
    whole_disks_moved,
    machines_left,
    late_requests,
    pauses,
    unmounted_starts,
    unmounted_refusals,
    hung_stores,
);

/// Events that need damaged objects, or a start on an object store alone.
pub(crate) const OBJECT_EVENTS: &[&str] =
    &["refused_starts", "missing_objects", "damaged_objects", "earlier_objects"];

/// Events that need offload from disks to an object store.
pub(crate) const MOVE_EVENTS: &[&str] = &[
    "moved_bytes",
    "failed_moves",
    "divided_shuffles",
    "whole_disks_moved",
    "machines_left",
    "unmounted_refusals",
    "hung_stores",
];

/// Events that need a store that delivers requests late.
pub(crate) const LATE_EVENTS: &[&str] = &["late_requests"];

/// Events that need disks.
pub(crate) const DISK_EVENTS: &[&str] = &[
    "hung_disks",
    "upgrades",
    "power_losses",
    "unsynced_power_losses",
    "missing_disks",
    "read_only_disks",
    "failing_lists",
    "removed_files",
    "stops_above_watermark",
    "recovered_disks",
    "full_files",
    "refused_ends",
    "doubled_paths",
    "damaged_metadata",
    "damaged_claims",
    "claims_written",
    "ended_gaps",
    "extents_given_up",
    "unmounted_starts",
];

/// Events that need intact objects. With damaged ones it is unclear which directories the store
/// knows.
pub(crate) const UNMOUNTED_EVENTS: &[&str] = &["unmounted_starts", "unmounted_refusals"];

/// Events that need disks without an object store.
pub(crate) const DISKS_ALONE_EVENTS: &[&str] =
    &["removed_files", "stops_above_watermark", "full_files", "refused_ends", "doubled_paths"];
