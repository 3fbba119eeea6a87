//! Counters of moves from local disks to the object store.

use prometheus::{IntCounter, IntGauge};

use crate::metrics;

metrics::table! {
    /// Those of all shuffles.
    pub(crate) struct Metrics {
        moved_bytes: IntCounter = "offload_bytes", "payload bytes that were moved from local disks to the object store";
        freed_bytes: IntCounter =
            "offload_freed_bytes", "bytes of files on local disks that were removed because the object store has their content";
        passes: IntCounter = "offload_passes", "times that data of a shuffle was moved to the object store";
        failures: IntCounter = "offload_failures", "such times that ended with an error; what was not moved stays on the disks";
        disks_relieved: IntGauge =
            "offload_disks_relieved", "disks that were above the high watermark of offload and are not below the low one yet";
        left_bytes: IntGauge = "offload_drain_left_bytes",
            "while the worker is drained, bytes on local disks and in no object yet";
    }
}
