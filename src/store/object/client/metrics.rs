//! Metrics of requests to the store, by operation and by failure reason. Each attempt counts as a
//! request, and one that repeats a failed attempt also as a retry.

use prometheus::{HistogramVec, IntCounter, IntCounterVec, IntGauge};

use super::operation::StoreOperation;
use crate::metrics::{self, SECONDS_BUCKETS};

metrics::table! {
    /// Request metrics of one store.
    pub struct Metrics {
        requests: IntCounterVec["operation"] = "object_store_requests",
            "Requests to the object store, retries included";
        failures: IntCounterVec["reason"] = "object_store_request_failures",
            "Failed requests to the object store, by reason";
        retries: IntCounterVec["operation"] = "object_store_request_retries",
            "Retries of requests to the object store";
        seconds: HistogramVec["operation"] = "object_store_request_duration_seconds",
            "Seconds of a request to the object store, including the whole response", in SECONDS_BUCKETS;
        sent_bytes: IntCounter = "object_store_sent_bytes", "Body bytes sent to the object store";
        received_bytes: IntCounter = "object_store_received_bytes", "Body bytes received from the object store";
        in_flight: IntGauge = "object_store_requests_in_flight", "Requests to the object store in progress";
        connections: IntGauge = "object_store_connections", "Open connections to the object store";
    }
}

/// Reason for which a request failed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Reason {
    /// The server was not reached.
    Connect,
    /// The request timed out.
    Timeout,
    /// The connection ended before the response was complete.
    Cut,
    /// Status 429 or 503.
    Throttled,
    /// Status 500 and above.
    Server,
    /// Any other status from 400 on except 404, because a missing object is no failure. Also an
    /// untrusted certificate of the server, and an invalid URL.
    Refused,
    /// The response is longer than allowed.
    Damaged,
}

impl Reason {
    const ALL: [Self; 7] = [
        Self::Connect,
        Self::Timeout,
        Self::Cut,
        Self::Throttled,
        Self::Server,
        Self::Refused,
        Self::Damaged,
    ];

    fn as_str(self) -> &'static str {
        match self {
            Self::Connect => "connect",
            Self::Timeout => "timeout",
            Self::Cut => "cut",
            Self::Throttled => "throttled",
            Self::Server => "server",
            Self::Refused => "refused",
            Self::Damaged => "damaged",
        }
    }

    /// Returns the reason for which a response with `status` failed, or `None` for a success or a
    /// missing object.
    pub(super) fn of(status: http::StatusCode) -> Option<Self> {
        match status.as_u16() {
            404 | ..400 => None,
            429 | 503 => Some(Self::Throttled),
            500.. => Some(Self::Server),
            _ => Some(Self::Refused),
        }
    }
}

impl Metrics {
    /// Creates the counters for every label, so that rates are correct from the first event on.
    pub(super) fn init_series(&self) {
        for operation in StoreOperation::ALL {
            self.requests.with_label_values(&[operation.as_str()]);
            self.retries.with_label_values(&[operation.as_str()]);
        }
        for reason in Reason::ALL {
            self.failures.with_label_values(&[reason.as_str()]);
        }
    }

    pub(super) fn failed(&self, reason: Reason) {
        self.failures.with_label_values(&[reason.as_str()]).inc();
    }
}
