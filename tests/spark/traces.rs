//! Spans of an ordinary job at an OTLP collector.

use std::time::Duration;

use crate::{Application, interval, spark};
use uniffle_testkit::otlp::{Receiver, Span};
use uniffle_testkit::wait_until;
use uniffle_testkit::worker::{Setup, WorkerProcess};

#[test]
fn otlp_receiver_gets_the_spans_of_a_job() {
    let Some(mut spark) = spark() else { return };
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build();
    let runtime = runtime.unwrap();
    let (receiver, port) = runtime.block_on(Receiver::start());
    // Traces everything, and flushes a partition of more than 1 MiB at once.
    let made_tables = format!(
        "[tracing]\notlp_endpoint = \"http://127.0.0.1:{port}\"\nsampling_ratio = 1.0\n\
         [hybrid_store]\nmemory_single_buffer_max_spill_size = \"1MiB\""
    );
    let worker =
        WorkerProcess::start(&Setup { name: "traced", capacity: "300M", made_tables, ..Setup::default() });
    let answers = spark.run(&[&worker], Application::of("range_sort"));
    let names = [
        "registerShuffle",
        "requireBuffer",
        "sendShuffleData",
        "reportShuffleResult",
        "getMemoryShuffleData",
        "getLocalShuffleIndex",
        "getLocalShuffleData",
        "unregisterShuffleByAppId",
    ];
    let calls = names.map(|name| format!("/rss.common.ShuffleServer/{name}"));
    // Compared only for this call: as many spans must arrive as the metrics counted.
    let sends = worker.metrics().total_of("total_grpc_request_number", "sendShuffleData\"");
    let found = || -> Result<Vec<Vec<Span>>, String> {
        let names = calls.iter().map(String::as_str).chain(["flush", "write and publish"]);
        names
            .map(|name| match receiver.named(name) {
                spans if spans.is_empty() => Err(format!("no {name} among {} spans", receiver.count())),
                spans => Ok(spans),
            })
            .collect()
    };
    let spans = wait_until("spans of each name and all sends arrive", Duration::from_secs(30), || {
        let spans = found()?;
        let (arrived, sends) = (spans[2].len(), sends.unwrap_or(0.0));
        let are_all = f64::from(u32::try_from(arrived).unwrap()) == sends;
        if are_all { Ok(spans) } else { Err(format!("{arrived} spans of {sends} sends")) }
    });
    let (began_ms, _) = interval(&answers);
    for span in spans.iter().flatten() {
        let is_of_the_job = span.start_time_unix_nano / 1_000_000 >= began_ms;
        assert!(is_of_the_job && span.end_time_unix_nano >= span.start_time_unix_nano, "{span:?}");
    }
    let (flushes, writes) = (&spans[8], &spans[9]);
    let has_parent = |write: &Span| flushes.iter().any(|flush| flush.span_id == write.parent_span_id);
    assert!(writes.iter().any(has_parent), "no write belongs to a flush");
    worker.assert_no_error_logged();
    worker.stop();
}
