//! Counters of offloads from local disks to the object store.

use prometheus::{IntCounter, IntGauge};

use crate::metrics;

metrics::table! {
    /// Counters and gauges of offloads.
    pub(crate) struct Metrics {
        moved_bytes: IntCounter = "offload_bytes",
            "Payload bytes offloaded from local disks to the object store";
        freed_bytes: IntCounter =
            "offload_freed_bytes",
            "Bytes of local files deleted after their data was offloaded";
        passes: IntCounter = "offload_passes", "Offload passes, each over data of one shuffle";
        failures: IntCounter = "offload_failures",
            "Failed offload passes; the data stays on the disks";
        disks_relieved: IntGauge =
            "offload_disks_relieved",
            "Disks whose data is offloaded: above offload_high_watermark, and not yet below offload_low_watermark";
        left_bytes: IntGauge = "offload_drain_left_bytes",
            "During a drain, bytes on local disks that are not in the object store yet";
    }
}
