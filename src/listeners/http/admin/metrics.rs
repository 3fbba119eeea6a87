//! Counters of the administration.

use prometheus::{IntCounterVec, IntGauge};

use crate::metrics;

metrics::table! {
    #[derive(Clone)]
    pub(crate) struct AdminMetrics {
        connections: IntGauge = "admin_connection_number", "connections of the administration now open";
        calls: IntCounterVec["result"] = "admin_calls_total", "administration calls, by result";
    }
}
