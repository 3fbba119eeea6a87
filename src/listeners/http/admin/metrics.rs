//! Metrics of the administration listener.

use prometheus::{IntCounter, IntCounterVec, IntGauge};

use crate::metrics;

metrics::table! {
    #[derive(Clone)]
    pub(crate) struct AdminMetrics {
        connections: IntGauge = "admin_connection_number", "connections of the administration now open";
        closed: IntCounter = "admin_connection_refused_total",
            "connections of the administration closed because new ones wanted their places";
        calls: IntCounterVec["result"] = "admin_calls_total", "administration calls, by result";
    }
}
