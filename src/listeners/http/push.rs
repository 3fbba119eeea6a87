//! Pushes metrics to a Prometheus pushgateway, for workers that Prometheus cannot reach.
//!
//! Each push replaces the group `job="uniffle-worker"`, `instance=<server id>` and the configured
//! labels. If the gateway is unavailable, pushes only log a warning from time to time. A worker
//! that stops for good deletes its group. A worker with a successor pushes once more instead, and
//! the successor continues the group.

use std::collections::BTreeMap;
use std::sync::Arc;

use bytes::Bytes;
use http::header::{CONTENT_TYPE, HOST};
use http::{Method, Request, StatusCode, Uri};
use http_body_util::{BodyExt as _, Full, Limited};
use hyper::client::conn::http1;
use hyper_util::rt::TokioIo;
use prometheus::{Encoder as _, IntCounter, Registry, TEXT_FORMAT, TextEncoder};
use tokio::net::TcpStream;
use tokio::time::{Duration, MissedTickBehavior, interval};

use super::NodeView;
use crate::clock::timeout;
use crate::metrics;
use crate::runtime::Tasks;
use crate::schema::kind::{HOUR, SECOND, optional, parsed, seconds, table};
use crate::schema::section;
use crate::telemetry::LogLimiter;

/// Value of the label `job` for all workers.
const JOB: &str = "uniffle-worker";

/// Deadline for the request of a push, including connecting.
const PUSH_DEADLINE: Duration = Duration::from_secs(10);

/// Deadline for the last request. It is short, so that the gateway cannot delay the shutdown.
const LAST_PUSH_DEADLINE: Duration = Duration::from_secs(2);

/// Minimum time between two warnings while pushes fail.
const WARN_INTERVAL: Duration = Duration::from_secs(600);

/// Maximum length of an error text from the gateway.
const ANSWER_BYTES_MAX: usize = 4 << 10;

section! {
    /// Settings of the pushgateway.
    #[table(
        "metrics",
        "Metrics pushed to a Prometheus pushgateway, as job uniffle-worker, instance = the worker's \
         id."
    )]
    pub struct PushConfig {
        /// URL of the pushgateway; a path prefix is kept. Default: none.
        #[key(
            "metrics.push_gateway_endpoint",
            optional(parsed("a URL such as http://gateway:9091", PushgatewayUrl::parse)), Restart,
            example "\"http://gateway:9091\""
        )]
        pub endpoint: Option<PushgatewayUrl> = None,
        /// Interval between two pushes.
        #[key("metrics.push_interval_sec", seconds(SECOND..=HOUR), Restart)]
        pub interval: Duration = 10 * SECOND,
        /// Further labels of pushed metrics.
        #[key("metrics.labels", table(16), Restart, example "{ env = \"production\" }")]
        pub labels: BTreeMap<String, String> = BTreeMap::new(),
    }
}

const LABEL_CHARS_MAX: usize = 128;

/// Checks that a label needs no escaping in the gateway's path, and is not set by the worker.
///
/// # Errors
/// A description of the allowed labels.
pub fn check_label(name: &str, value: &str) -> Result<(), &'static str> {
    let is_name = |c: char| c.is_ascii_alphanumeric() || c == '_';
    let starts = name.starts_with(|c: char| c.is_ascii_alphabetic() || c == '_');
    if !starts || !name.chars().all(is_name) || name.starts_with("__") || name.len() > LABEL_CHARS_MAX {
        return Err(
            "must have a name of letters, digits and underscores that does not begin with a digit or two \
             underscores",
        );
    }
    if matches!(name, "job" | "instance") {
        return Err("must have a name other than job and instance, which the worker sets");
    }
    let is_value = |c: char| c.is_ascii_alphanumeric() || matches!(c, '_' | '-' | '.' | ':' | '~');
    if value.is_empty() || value.len() > LABEL_CHARS_MAX || !value.chars().all(is_value) {
        return Err("must have a value of 1 to 128 letters, digits and any of _-.:~");
    }
    Ok(())
}

/// The URL of a pushgateway.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PushgatewayUrl {
    authority: String,
    prefix: String,
}

impl PushgatewayUrl {
    /// Parses `http://host[:port][/prefix]`.
    ///
    /// # Errors
    /// A description of the allowed URLs.
    pub fn parse(text: &str) -> Result<Self, String> {
        let allowed = || "a URL such as \"http://gateway:9091\" or \"http://proxy/pushgateway\"".to_owned();
        let uri: Uri = text.parse().map_err(|_| allowed())?;
        if uri.scheme_str() != Some("http") || uri.query().is_some() {
            return Err(allowed());
        }
        let authority =
            uri.authority().filter(|authority| !authority.as_str().contains('@')).ok_or_else(allowed)?;
        let authority = match authority.port_u16() {
            Some(_) => authority.to_string(),
            None if authority.as_str().ends_with(':') => return Err(allowed()),
            None => format!("{authority}:80"),
        };
        Ok(Self { authority, prefix: uri.path().trim_end_matches('/').to_owned() })
    }
}

impl std::fmt::Display for PushgatewayUrl {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "http://{}{}", self.authority, self.prefix)
    }
}

metrics::table! {
    pub(crate) struct PushMetrics {
        pushed: IntCounter = "pushgateway_push_total", "Pushes accepted by the pushgateway";
        failed: IntCounter = "pushgateway_push_failed_total", "Failed pushes to the pushgateway";
    }
}

/// Pushes metrics until its tasks are cancelled, then deletes the group or pushes once more.
#[derive(Debug)]
pub struct Pusher {
    gateway: PushgatewayUrl,
    interval: Duration,
    path: String,
    registry: Registry,
    node: Arc<dyn NodeView>,
    metrics: PushMetrics,
}

impl Pusher {
    /// Starts to push the metrics in `registry` to `gateway`, under the label `instance`.
    ///
    /// # Errors
    /// If `registry` already has a metric of the same name.
    pub fn start(
        config: &PushConfig,
        gateway: &PushgatewayUrl,
        instance: &str,
        registry: Registry,
        node: Arc<dyn NodeView>,
        tasks: &Tasks,
    ) -> prometheus::Result<()> {
        let path = group_path(gateway, &config.labels, instance);
        let metrics = PushMetrics::new(&registry)?;
        let (gateway, interval) = (gateway.clone(), config.interval);
        let pusher = Self { gateway, interval, path, registry, node, metrics };
        tasks.spawn("metrics push", Arc::new(pusher).run(tasks.clone()));
        Ok(())
    }

    async fn run(self: Arc<Self>, tasks: Tasks) {
        let cancelled = tasks.cancelled();
        tokio::pin!(cancelled);
        let mut ticks = interval(self.interval);
        ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
        let warnings = LogLimiter::new(1, WARN_INTERVAL);
        loop {
            tokio::select! {
                biased;
                () = &mut cancelled => break,
                _ = ticks.tick() => {}
            }
            tokio::select! {
                biased;
                () = &mut cancelled => break,
                result = self.push(PUSH_DEADLINE) => self.record(result, &warnings),
            }
        }
        let last = match self.node.is_stopping_for_good() {
            true => self.exchange(Method::DELETE, Vec::new(), LAST_PUSH_DEADLINE).await,
            false => self.push(LAST_PUSH_DEADLINE).await,
        };
        self.record(last, &warnings);
    }

    fn record(&self, result: Result<(), String>, warnings: &LogLimiter) {
        let gateway = &self.gateway;
        match result {
            Ok(()) => {
                self.metrics.pushed.inc();
                if warnings.reset() {
                    tracing::info!(%gateway, "the pushgateway accepts metrics again");
                }
            }
            Err(reason) => {
                self.metrics.failed.inc();
                if warnings.pass().is_some() {
                    tracing::warn!(
                        %gateway,
                        reason,
                        "the pushgateway does not accept metrics; retrying forever"
                    );
                }
            }
        }
    }

    async fn push(&self, deadline: Duration) -> Result<(), String> {
        let (node, registry) = (Arc::clone(&self.node), self.registry.clone());
        // On a blocking thread, because some gauges are computed from all stored data.
        let gathered = tokio::task::spawn_blocking(move || gather(&*node, &registry));
        let text = gathered.await.map_err(|error| error.to_string())??;
        self.exchange(Method::PUT, text, deadline).await
    }

    async fn exchange(&self, method: Method, body: Vec<u8>, deadline: Duration) -> Result<(), String> {
        let answer = exchange(method, &self.gateway.authority, &self.path, body);
        timeout(deadline, answer).await.unwrap_or_else(|_| Err(format!("no answer within {deadline:?}")))
    }
}

fn gather(node: &dyn NodeView, registry: &Registry) -> Result<Vec<u8>, String> {
    node.refresh_metrics();
    let mut text = Vec::new();
    TextEncoder::new().encode(&registry.gather(), &mut text).map_err(|error| error.to_string())?;
    Ok(text)
}

/// Returns the path of the worker's group. Labels were checked to need no escaping.
fn group_path(gateway: &PushgatewayUrl, labels: &BTreeMap<String, String>, instance: &str) -> String {
    let mut path = format!("{}/metrics/job/{JOB}/instance/{instance}", gateway.prefix);
    for (name, value) in labels {
        path.extend(["/", name, "/", value]);
    }
    path
}

/// Opens a connection, sends one request and closes it. Pushes are seconds apart, so the connection
/// is not kept.
async fn exchange(method: Method, authority: &str, path: &str, body: Vec<u8>) -> Result<(), String> {
    let stream = TcpStream::connect(authority).await.map_err(|error| format!("{authority}: {error}"))?;
    let text = |error: hyper::Error| error.to_string();
    let (mut sender, connection) = http1::handshake(TokioIo::new(stream)).await.map_err(text)?;
    let request = Request::builder()
        .method(method)
        .uri(path)
        .header(HOST, authority)
        .header(CONTENT_TYPE, TEXT_FORMAT)
        .body(Full::new(Bytes::from(body)))
        .map_err(|error| error.to_string())?;
    let answered = async {
        let answer = sender.send_request(request).await.map_err(text)?;
        let status = answer.status();
        if status.is_success() {
            return Ok(());
        }
        Err(refusal(status, answer.into_body()).await)
    };
    // The connection drives the exchange. It may end first if the gateway closes after its answer.
    let driven = async {
        let _ = connection.await;
        std::future::pending().await
    };
    tokio::select! {
        result = answered => result,
        never = driven => never,
    }
}

async fn refusal(status: StatusCode, body: hyper::body::Incoming) -> String {
    let body = Limited::new(body, ANSWER_BYTES_MAX).collect().await;
    let why =
        body.map(|body| String::from_utf8_lossy(&body.to_bytes()).trim().to_owned()).unwrap_or_default();
    format!("{status} {why}")
}

#[cfg(test)]
mod tests {
    use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};

    use super::*;

    #[test]
    fn path_prefix_precedes_labels() {
        let labels = BTreeMap::from([("env".to_owned(), "test".to_owned())]);
        let gateway = |text| PushgatewayUrl::parse(text).unwrap();
        let path = group_path(&gateway("http://proxy/pushgateway/"), &labels, "10.0.0.1-21100");
        assert_eq!(path, "/pushgateway/metrics/job/uniffle-worker/instance/10.0.0.1-21100/env/test");
        let path = group_path(&gateway("http://gateway:9091"), &labels, "a");
        assert_eq!(path, "/metrics/job/uniffle-worker/instance/a/env/test");
        assert_eq!(gateway("http://[::1]").to_string(), "http://[::1]:80");
    }

    #[test]
    fn labels_need_no_escaping_anywhere() {
        assert_eq!(check_label("env", "prod-7.eu:1"), Ok(()));
        for (name, value) in [
            ("", "x"),
            ("1a", "x"),
            ("__a", "x"),
            ("job", "x"),
            ("a b", "x"),
            ("a", ""),
            ("a", "x/y"),
            ("a", "ü"),
        ] {
            assert!(check_label(name, value).is_err(), "{name:?} {value:?}");
        }
    }

    #[test]
    fn endpoints_are_plain_http_urls() {
        for bad in [
            "",
            "gateway:9091",
            "https://gateway",
            "http://",
            "http://a b",
            "http://g/?x=1",
            "http://u:p@g/",
            "http://g:",
        ] {
            assert!(PushgatewayUrl::parse(bad).is_err(), "{bad:?}");
        }
    }

    /// Pushes once to a gateway that answers with `status` and a body of 100 KiB.
    async fn push_to_gateway_with_long_answer(status: &str) -> Result<(), String> {
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
        let authority = listener.local_addr().unwrap().to_string();
        let gateway = async {
            let (mut stream, _) = listener.accept().await.unwrap();
            let body = "x".repeat(100 << 10);
            let answer = format!("HTTP/1.1 {status}\r\ncontent-length: {}\r\n\r\n{body}", body.len());
            let mut received = Vec::new();
            while !received.ends_with(b"end") {
                stream.read_buf(&mut received).await.unwrap();
            }
            // The client may close the connection before it has read the whole body.
            let _ = stream.write_all(answer.as_bytes()).await;
        };
        tokio::join!(exchange(Method::PUT, &authority, "/", b"end".to_vec()), gateway).0
    }

    #[tokio::test]
    async fn push_reports_the_status_of_long_answers() {
        assert_eq!(push_to_gateway_with_long_answer("200 OK").await, Ok(()));
        let error = push_to_gateway_with_long_answer("500 Internal Server Error").await.unwrap_err();
        assert!(error.starts_with("500 Internal Server Error"), "{error}");
    }
}
