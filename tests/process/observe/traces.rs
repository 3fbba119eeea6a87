//! An OTLP receiver gets the spans of a real run: gRPC calls, flushes, and a client's own trace. A
//! receiver that is down is logged once.

use std::time::Duration;

use tonic::Request;
use uniffle_worker::proto::AppHeartBeatRequest;
use uniffle_worker::proto::shuffle_server_client::ShuffleServerClient;

use super::tools::Load;
use uniffle_testkit::otlp::{Receiver, Span, hex};
use uniffle_testkit::wait_until;
use uniffle_testkit::worker::{Setup, WorkerProcess};

const WAIT_MAX: Duration = Duration::from_secs(30);
const TRACEPARENT: &str = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01";

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn otlp_receiver_gets_spans_of_calls_and_flushes() {
    let (receiver, port) = Receiver::start().await;
    // Uses the old name of the key, and less memory than data.
    let more =
        format!("[tracing]\njaeger_reporter_endpoint = \"http://127.0.0.1:{port}\"\nsampling_ratio = 1.0");
    let worker = tokio::task::block_in_place(|| {
        let worker =
            WorkerProcess::start(&Setup { capacity: "32MiB", made_tables: more, ..Setup::default() });
        Load::start(&worker, "100MB", 1).finish();
        worker
    });
    let channel = format!("http://127.0.0.1:{}", worker.ready().grpc_port);
    let mut client = ShuffleServerClient::connect(channel).await.unwrap();
    let mut heartbeat = Request::new(AppHeartBeatRequest { app_id: "nobody".to_owned() });
    heartbeat.metadata_mut().insert("traceparent", TRACEPARENT.parse().unwrap());
    client.app_heartbeat(heartbeat).await.unwrap();

    let heartbeat = tokio::task::block_in_place(|| {
        wait_until("the client's trace arrives", WAIT_MAX, || {
            let found = receiver.named("/rss.common.ShuffleServer/appHeartbeat");
            let is_ours = |span: &Span| hex(&span.trace_id) == TRACEPARENT[3..35];
            found.into_iter().find(is_ours).ok_or_else(|| "no such span".to_owned())
        })
    });
    assert_eq!(hex(&heartbeat.parent_span_id), TRACEPARENT[36..52]);
    for name in ["registerShuffle", "requireBuffer", "sendShuffleData", "getMemoryShuffleData"] {
        let name = format!("/rss.common.ShuffleServer/{name}");
        assert!(!receiver.named(&name).is_empty(), "{name}");
    }
    let flushes = receiver.named("flush");
    let write = receiver.named("write and publish");
    assert!(!flushes.is_empty() && !write.is_empty());
    assert!(flushes.iter().any(|flush| flush.span_id == write[0].parent_span_id));
    // A span per call and flush, not per block: 100 MB are 7,000 blocks.
    let spans = receiver.count();
    assert!(spans < 3000, "{spans} spans were exported");
    let services = receiver.services();
    assert!(!services.is_empty() && services.iter().all(|resource| resource.contains("uniffle-worker")));
    tokio::task::block_in_place(|| {
        worker.assert_clean();
        worker.assert_no_error_logged();
        worker.stop();
    });
}

#[test]
fn unreachable_collector_is_logged_once() {
    let more = "[tracing]\notlp_endpoint = \"http://127.0.0.1:1\"\nsampling_ratio = 1.0".to_owned();
    let worker = WorkerProcess::start(&Setup { made_tables: more, ..Setup::default() });
    Load::start(&worker, "20MB", 1).finish();
    wait_until("a warning is logged", WAIT_MAX, || {
        let warnings = worker.log().matches("the collector does not accept traces").count();
        if warnings == 1 { Ok(()) } else { Err(format!("{warnings} warnings")) }
    });
    assert!(worker.metrics().total("trace_spans_lost_total").is_some_and(|lost| lost > 0.0));
    worker.assert_clean();
    worker.assert_no_error_logged();
    worker.stop();
}
