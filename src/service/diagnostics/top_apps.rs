//! Bounded metrics by application (docs/protocol.md §10.2).
//!
//! Only the top applications have a series. A series of an application that is no longer among them
//! is removed, so the number of series does not grow with the number of applications.

use std::collections::HashSet;

use parking_lot::Mutex;
use prometheus::IntGaugeVec;

use super::statistics::{AppStatistics, largest, smallest_blocks};
use crate::metrics::{self, Metric, clamped};
use uniffle_wire::types::AppId;

/// Number of applications in each of the metrics.
const TOP_APPS: usize = 10;

metrics::table! {
    /// The applications with the highest figures, by several measures.
    pub(crate) struct TopApps {
        received: RankedGauge["app_id"] =
            "topN_of_total_data_size_for_app", "Payload bytes received, of the ten largest applications";
        in_memory: RankedGauge["app_id"] =
            "topN_of_in_memory_data_size_for_app", "Payload bytes in memory, of the ten largest applications";
        in_memory_blocks: RankedGauge["app_id"] = "topN_of_in_memory_block_count_for_app",
            "Blocks in memory, of the ten largest applications";
        small_blocks: RankedGauge["app_id"] = "bottomN_of_in_memory_avg_block_size_for_app",
            "Mean payload bytes per block in memory, of the ten applications with the smallest blocks";
        flushed: RankedGauge["app_id"] = "topN_of_on_localfile_data_size_for_app",
            "Payload bytes flushed to local disks, of the ten largest applications";
        on_remote: RankedGauge["app_id"] = "topN_of_on_hadoop_data_size_for_app",
            "Payload bytes flushed to remote stores, of the ten largest applications";
    }
}

impl TopApps {
    pub(in crate::service) fn set(&self, apps: &[AppStatistics]) {
        self.received.set(&largest(apps, TOP_APPS, |app| app.received_bytes));
        self.in_memory.set(&largest(apps, TOP_APPS, |app| app.in_memory_bytes));
        self.in_memory_blocks.set(&largest(apps, TOP_APPS, |app| app.in_memory_blocks));
        self.small_blocks.set(&smallest_blocks(apps, TOP_APPS));
        self.flushed.set(&largest(apps, TOP_APPS, |app| app.local_bytes));
        self.on_remote.set(&largest(apps, TOP_APPS, |app| app.remote_bytes));
    }
}

/// A gauge by application in which only the applications of the last update have a series.
#[derive(Debug)]
pub(crate) struct RankedGauge {
    gauge: IntGaugeVec,
    shown: Mutex<HashSet<AppId>>,
}

impl Metric for RankedGauge {
    type Family = IntGaugeVec;

    fn of(gauge: IntGaugeVec) -> Self {
        Self { gauge, shown: Mutex::default() }
    }
}

impl RankedGauge {
    fn set(&self, ranked: &[(&AppId, u64)]) {
        let mut shown = self.shown.lock();
        let now: HashSet<AppId> = ranked.iter().map(|(app, _)| (*app).clone()).collect();
        for (app, value) in ranked {
            self.gauge.with_label_values(&[app.as_str()]).set(clamped(*value));
        }
        for gone in shown.difference(&now) {
            // The label was set before, so removing it cannot fail.
            let _ = self.gauge.remove_label_values(&[gone.as_str()]);
        }
        *shown = now;
    }
}

#[cfg(test)]
mod tests {
    use prometheus::Registry;

    use super::*;

    #[test]
    fn application_below_the_top_has_no_series() {
        let registry = Registry::new();
        let ranked = TopApps::new(&registry).unwrap().received;
        let (a, b) = (AppId::parse("a").unwrap(), AppId::parse("b").unwrap());
        ranked.set(&[(&a, 7), (&b, 5)]);
        ranked.set(&[(&b, 6)]);
        let families = registry.gather();
        let series = families[0].get_metric();
        assert_eq!(series.len(), 1);
        assert_eq!(series[0].get_label()[0].value(), "b");
        ranked.set(&[]);
        assert!(registry.gather().is_empty());
    }
}
