//! HTTP/2 below the calls: requests are collected and charged, responses are written without
//! copies, and connections and calls without progress end.

pub(super) mod coalescing;
pub(super) mod heap_estimate;
pub(super) mod message;
pub(super) mod progress;
pub(super) mod replies;
pub(super) mod request_collector;
pub(super) mod request_queues;
