//! The worker's share of an application's time: printed, not asserted.

use serde_json::Value;
use uniffle_testkit::metrics::Metrics;
use uniffle_testkit::say;

/// The RPCs of a job that are printed, by the last part of the path.
const RPCS: [&str; 9] = [
    "registerShuffle",
    "requireBuffer",
    "sendShuffleData",
    "reportShuffleResult",
    "getShuffleResultForMultiPart",
    "getShuffleResult",
    "getMemoryShuffleData",
    "getLocalShuffleIndex",
    "getLocalShuffleData",
];

/// Prints the stage times, the calls and latencies of each RPC, and the CPU time of the worker. A
/// latency covers headers (over TCP the last byte) to response.
pub(crate) fn say_share(metrics: &Metrics, answer: &Value) {
    let wall = answer["seconds"].as_f64().unwrap_or(f64::NAN);
    let cpu = metrics.expect("process_cpu_seconds_total");
    let mut calls_seconds = 0.0;
    for rpc in RPCS {
        for (listener, histogram) in
            [("gRPC", "grpc_duration_seconds"), ("TCP", "urpc_request_processing_latency")]
        {
            let of = |part: &str| metrics.total_of(&format!("{histogram}_{part}"), &format!("{rpc}\""));
            if let (Some(count), Some(seconds)) = (of("count"), of("sum"))
                && count > 0.0
            {
                calls_seconds += seconds;
                say(&format!("{rpc} over {listener}: {count} calls, {seconds:.3} s"));
            }
        }
    }
    let scenario = answer["scenario"].as_str().unwrap_or("?");
    say(&format!(
        "{scenario}: {wall} s; the worker's calls take {calls_seconds:.3} s, its CPU time is {cpu:.2} s"
    ));
}
