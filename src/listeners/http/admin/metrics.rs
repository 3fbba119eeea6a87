//! Metrics of the administration listener.

use prometheus::{IntCounter, IntCounterVec, IntGauge};

use crate::metrics;

metrics::table! {
    #[derive(Clone)]
    pub(crate) struct AdminMetrics {
        connections: IntGauge = "admin_connection_number", "Open connections of the administration listener";
        closed: IntCounter = "admin_connection_refused_total",
            "Connections of the administration listener closed at the limit to accept new ones";
        calls: IntCounterVec["result"] = "admin_calls_total", "Calls of the administration listener, by result";
    }
}
