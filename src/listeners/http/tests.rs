//! Tests of the HTTP listener over real sockets on port 0.

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::{self, ThreadId};
use std::time::Duration;

use prometheus::IntGauge;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::{TcpListener, TcpStream};
use uniffle_testkit::eventually_in_no_time;

use super::push::{PushConfig, Pusher, PushgatewayUrl};
use super::*;
use crate::compat;
use crate::compat::http::{JavaHooks, NodeInfo};
use crate::runtime::Tasks;

const CONFIG: HttpConfig = HttpConfig {
    max_connections: 2,
    opening_timeout: Duration::from_secs(10),
    profiles: false,
    request_timeout: Duration::from_secs(30),
    connections_max: None,
};

struct TestServer {
    address: SocketAddr,
    tasks: Tasks,
    is_ready: Arc<AtomicBool>,
    registry: Registry,
}

#[derive(Debug)]
struct TestNode {
    gauge: IntGauge,
    is_ready: Arc<AtomicBool>,
    /// Thread of the test, on which no expensive answer may be collected.
    runtime_thread: ThreadId,
}

impl TestNode {
    fn require_blocking_thread(&self) {
        assert_ne!(thread::current().id(), self.runtime_thread);
    }
}

impl NodeInfo for TestNode {
    fn refresh_metrics(&self) {
        self.require_blocking_thread();
        self.gauge.inc();
    }

    fn configuration(&self) -> BTreeMap<&'static str, String> {
        BTreeMap::from([("grpc_port", "19999".to_owned())])
    }
}

impl NodeView for TestNode {
    fn is_stopping_for_good(&self) -> bool {
        false
    }

    fn risks(&self) -> Vec<String> {
        Vec::new()
    }

    fn not_ready(&self) -> Option<String> {
        (!self.is_ready.load(Ordering::Relaxed)).then(|| "no disk".to_owned())
    }

    fn incomplete(&self) -> Incompleteness {
        Incompleteness::default()
    }

    fn losses(&self) -> serde_json::Value {
        self.require_blocking_thread();
        serde_json::json!({ "losses": [] })
    }

    fn status(&self) -> api::Status {
        unreachable!("no test requests this method")
    }

    fn apps(&self) -> Vec<AppStatistics> {
        Vec::new()
    }

    fn cluster(&self) -> Option<axum::body::Bytes> {
        None
    }

    fn explain_everywhere(&self, _: &str) -> Option<super::Everywhere> {
        None
    }
}

fn node() -> (Registry, Arc<TestNode>) {
    let registry = Registry::new();
    let gauge = IntGauge::new("refreshed", "how often gauges were refreshed").unwrap();
    registry.register(Box::new(gauge.clone())).unwrap();
    let is_ready = Arc::new(AtomicBool::new(true));
    (registry, Arc::new(TestNode { gauge, is_ready, runtime_thread: thread::current().id() }))
}

async fn listener() -> TestServer {
    let (registry, node) = node();
    let is_ready = Arc::clone(&node.is_ready);
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    let tasks = Tasks::new();
    let metrics = HttpMetrics::new(&registry).unwrap();
    let hooks = JavaHooks { registry: registry.clone(), node: node.clone(), pool: gathering_pool() };
    let mounted = compat::http::router(hooks).route("/never", get(std::future::pending::<()>));
    let pages = Pages {
        registry: registry.clone(),
        metrics,
        node,
        mounted,
        pool: gathering_pool(),
        ready: BlockingPool::new(1),
    };
    HttpServer::start(CONFIG, listener, pages, &tasks).unwrap();
    TestServer { address, tasks, is_ready, registry }
}

impl TestServer {
    async fn ask(&self, path: &str) -> (String, String) {
        self.send(&format!("GET {path} HTTP/1.1\r\nHost: x\r\n\r\n")).await
    }

    /// Returns head and body of the answer to `request`.
    async fn send(&self, request: &str) -> (String, String) {
        let mut stream = TcpStream::connect(self.address).await.unwrap();
        stream.write_all(request.as_bytes()).await.unwrap();
        let mut answer = Vec::new();
        // The answer may be followed by a reset while request bytes are unread.
        let _ = stream.read_to_end(&mut answer).await;
        let text = String::from_utf8(answer).unwrap();
        let (head, body) = text.split_once("\r\n\r\n").unwrap_or((&text, ""));
        (head.to_owned(), body.to_owned())
    }

    async fn close(self) {
        self.tasks.cancel();
        self.tasks.drained().await;
        assert_eq!(self.tasks.running(), 0);
        let families = self.registry.gather();
        let connections = families.iter().find(|family| family.name() == "http_connection_number").unwrap();
        assert_eq!(connections.get_metric()[0].get_gauge().get_value(), 0.0);
    }
}

#[tokio::test]
async fn metrics_are_refreshed_and_gathered() {
    let listener = listener().await;
    for (count, path) in (1..).zip(["/metrics", "/prometheus/metrics", "/prometheus/metrics/server"]) {
        let (head, body) = listener.ask(path).await;
        assert!(head.starts_with("HTTP/1.1 200") && head.contains("text/plain; version=0.0.4"), "{head}");
        assert!(body.contains(&format!("\nrefreshed {count}\n")), "{body}");
        assert!(body.contains("\nhttp_connection_number ") && body.contains("\npanic_signal "), "{body}");
    }
    listener.close().await;
}

#[tokio::test]
async fn java_paths_are_served_in_java_shapes() {
    let listener = listener().await;
    for (path, names) in [
        ("/metrics/server", &["refreshed", "http_connection_number"][..]),
        ("/metrics/grpc", &[]),
        ("/metrics/netty", &[]),
        ("/metrics/jvm", &[]),
        ("/metrics/all", &["refreshed"]),
        ("/api/shuffleServer/metrics", &["refreshed"]),
        (
            "/api/shuffleServer/metrics/server?name[]=refreshed&name%5B%5D=panic_signal",
            &["refreshed", "panic_signal"],
        ),
    ] {
        let (head, body) = listener.ask(path).await;
        assert!(head.starts_with("HTTP/1.1 200") && head.contains("application/json"), "{path}: {head}");
        let answer_json: serde_json::Value = serde_json::from_str(&body).unwrap();
        assert!(answer_json["timeStamp"].is_u64(), "{body}");
        let has = |name: &str| {
            answer_json["metrics"].as_array().unwrap().iter().any(|sample| sample["name"] == name)
        };
        assert!(names.iter().all(|name| has(name)), "{path}: {body}");
        assert_eq!(has("http_connection_number"), !path.contains('[') && !names.is_empty(), "{path}");
    }
    assert!(listener.ask("/metrics/other").await.0.starts_with("HTTP/1.1 404"));
    let (head, body) = listener.ask("/api/shuffleServer/prometheus/metrics/server").await;
    assert!(head.contains("text/plain; version=0.0.4") && body.contains("\nrefreshed "), "{head}");
    let conf = listener.ask("/api/shuffleServer/conf").await.1;
    let conf: serde_json::Value = serde_json::from_str(&conf).unwrap();
    let entry = serde_json::json!({ "argumentKey": "grpc_port", "argumentValue": "19999" });
    assert_eq!(conf, serde_json::json!({ "code": 0, "data": [entry], "errMsg": "success" }));
    listener.close().await;
}

#[tokio::test]
async fn ordinary_client_is_served() {
    let listener = listener().await;
    let answer = reqwest::get(format!("http://{}/", listener.address)).await.unwrap();
    assert_eq!(answer.status(), 200);
    let text = answer.text().await.unwrap();
    assert!(text.starts_with("<!doctype html>") && text.contains("health/ready"), "{text}");
    listener.close().await;
}

#[tokio::test]
async fn readiness_gives_a_reason_and_liveness_ignores_it() {
    let listener = listener().await;
    assert!(listener.ask("/health/ready").await.0.starts_with("HTTP/1.1 200"));
    listener.is_ready.store(false, Ordering::Relaxed);
    let (head, body) = listener.ask("/health/ready").await;
    assert!(head.starts_with("HTTP/1.1 503"), "{head}");
    assert_eq!(body, "no disk\n");
    assert!(listener.ask("/health/live").await.0.starts_with("HTTP/1.1 200"));
    listener.close().await;
}

#[tokio::test]
async fn other_paths_and_methods_are_refused() {
    let listener = listener().await;
    assert!(listener.ask("/admin?kill").await.0.starts_with("HTTP/1.1 404"));
    let post = "POST /metrics HTTP/1.1\r\nHost: x\r\nContent-Length: 0\r\n\r\n";
    assert!(listener.send(post).await.0.starts_with("HTTP/1.1 405"));
    assert!(listener.send("\0\0\0\0garbage\r\n\r\n").await.0.starts_with("HTTP/1.1 400"));
    listener.close().await;
}

#[tokio::test]
async fn long_urls_and_many_headers_are_refused() {
    let listener = listener().await;
    let url = format!("GET /{} HTTP/1.1\r\nHost: x\r\n\r\n", "x".repeat(9000));
    let headers = format!("GET / HTTP/1.1\r\nHost: x\r\n{}\r\n", "a: b\r\n".repeat(100));
    for request in [url, headers] {
        let (head, _) = listener.send(&request).await;
        assert!(head.starts_with("HTTP/1.1 4"), "{head}");
    }
    assert!(listener.ask("/health/live").await.0.starts_with("HTTP/1.1 200"));
    listener.close().await;
}

#[tokio::test(start_paused = true)]
async fn slow_clients_do_not_block_health_checks() {
    let listener = listener().await;
    let before = tokio::time::Instant::now();
    let mut slow = Vec::new();
    // Fills all places with requests, and the other connections with heads that do not end.
    for request in ["GET /never HTTP/1.1\r\nHost: x\r\n\r\n"; 4].iter().chain(&["GET / HTT"; 400]) {
        let mut stream = TcpStream::connect(listener.address).await.unwrap();
        stream.write_all(request.as_bytes()).await.unwrap();
        slow.push(stream);
    }
    for path in ["/health/live", "/health/ready"] {
        assert!(listener.ask(path).await.0.starts_with("HTTP/1.1 200"));
    }
    assert!(before.elapsed() < CONFIG.opening_timeout, "the responses came only after connections timed out");
    // Another path waits until the earlier requests are closed.
    assert!(listener.ask("/").await.0.starts_with("HTTP/1.1 200"));
    assert!(before.elapsed() >= CONFIG.request_timeout);
    for mut stream in slow {
        let mut answer = Vec::new();
        let _ = stream.read_to_end(&mut answer).await;
        assert!(!answer.starts_with(b"HTTP/1.1 200"));
    }
    listener.close().await;
}

#[tokio::test(start_paused = true)]
async fn cancelling_does_not_wait_for_slow_clients() {
    let listener = listener().await;
    let before = tokio::time::Instant::now();
    let mut slow = TcpStream::connect(listener.address).await.unwrap();
    slow.write_all(b"GET / HTT").await.unwrap();
    let taken = || match listener.tasks.running() {
        2.. => Ok(()),
        tasks => Err(format!("{tasks} tasks")),
    };
    eventually_in_no_time("the connection is accepted", Duration::from_secs(20), taken).await;
    listener.close().await;
    assert!(before.elapsed() < CONFIG.request_timeout);
}

#[test]
fn readiness_text_names_risks_and_refused_results() {
    assert_eq!(describe_ready(&Incompleteness::default(), &[]), "ready\n");
    let risks = ["data is at risk".to_owned()];
    assert_eq!(describe_ready(&Incompleteness::default(), &risks), "ready\ndata is at risk\n");
    let reasons = vec!["/a is missing".to_owned()];
    let incomplete =
        Incompleteness { shuffles: 2, reasons, unknown_shuffles: Some("/a is missing".to_owned()) };
    let expected = "ready\nresults of 2 shuffles are refused: /a is missing\nresults of unknown shuffles are \
                    refused: /a is missing\n";
    assert_eq!(describe_ready(&incomplete, &[]), expected);
}

#[tokio::test]
async fn pushed_metrics_are_gathered_off_the_runtime_threads() {
    let ((registry, node), tasks) = (node(), Tasks::new());
    let gateway = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let endpoint = PushgatewayUrl::parse(&format!("http://{}", gateway.local_addr().unwrap())).unwrap();
    let config = PushConfig { endpoint: None, interval: Duration::from_secs(3600), labels: BTreeMap::new() };
    Pusher::start(&config, &endpoint, "worker", registry, node, &tasks).unwrap();
    let pushed = tokio::time::timeout(Duration::from_secs(20), gateway.accept()).await;
    drop(pushed.expect("no metrics were pushed").unwrap());
    drop(gateway);
    tasks.cancel();
    tasks.drained().await;
}

#[tokio::test]
async fn losses_are_gathered_off_the_runtime_threads() {
    let listener = listener().await;
    assert!(listener.ask("/losses").await.0.starts_with("HTTP/1.1 200"));
    listener.close().await;
}
