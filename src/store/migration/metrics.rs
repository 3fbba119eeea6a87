//! Counters of moves from local disks to the object store.

use prometheus::{IntCounter, IntGauge};

use crate::metrics;

metrics::table! {
    /// Counters and gauges of moves.
    pub(crate) struct Metrics {
        moved_bytes: IntCounter = "offload_bytes",
            "Payload bytes moved from local disks to the object store";
        freed_bytes: IntCounter =
            "offload_freed_bytes",
            "Bytes of local files deleted after their data was moved to the object store";
        passes: IntCounter = "offload_passes", "Moves of shuffle data to the object store";
        failures: IntCounter = "offload_failures",
            "Failed moves of shuffle data to the object store; the data stays on the disks";
        disks_relieved: IntGauge =
            "offload_disks_relieved",
            "Disks from which data is moved: above offload_high_watermark, and not yet below offload_low_watermark";
        left_bytes: IntGauge = "offload_drain_left_bytes",
            "During a drain, bytes on local disks that are not in the object store yet";
    }
}
