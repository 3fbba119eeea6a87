//! What histories did, so that a model that no longer reaches something is noticed.

macro_rules! tally {
    ($($name:ident),* $(,)?) => {
        /// Counts of one history, or of many.
        #[derive(Debug, Default, Clone, Copy)]
        pub(crate) struct Tally {
            $(pub(crate) $name: u64,)*
        }

        impl Tally {
            pub(crate) fn add(&mut self, other: Self) {
                $(self.$name += other.$name;)*
            }

            /// Names of what never happened.
            pub(crate) fn never(&self) -> Vec<&'static str> {
                let figures = [$((stringify!($name), self.$name)),*];
                figures.into_iter().filter(|(_, count)| *count == 0).map(|(name, _)| name).collect()
            }
        }
    };
}

tally!(
    lives,
    orderly_stops,
    upgrades_beside,
    power_losses,
    unsynced_power_losses,
    missing_disks,
    read_only_disks,
    failing_lists,
    damaged_metadata,
    damaged_claims,
    claims_written,
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
);
