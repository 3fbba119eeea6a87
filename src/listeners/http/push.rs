//! Metrics to a Prometheus pushgateway, for workers that no Prometheus can reach.
//!
//! Each push replaces the group `job="uniffle-worker"`, `instance=<server id>` and the configured labels. A gateway that
//! is away costs nothing but a warning now and then; the last push is made when the worker stops.

use std::sync::Arc;

use bytes::Bytes;
use http::header::{CONTENT_TYPE, HOST};
use http::{Method, Request, StatusCode, Uri};
use http_body_util::{BodyExt as _, Full, Limited};
use hyper::client::conn::http1;
use hyper_util::rt::TokioIo;
use prometheus::{Encoder as _, IntCounter, Registry, TEXT_FORMAT, TextEncoder};
use tokio::net::TcpStream;
use tokio::time::{Duration, MissedTickBehavior, interval, timeout};

use super::Refresh;
use crate::metrics;
use crate::runtime::Tasks;
use crate::telemetry::LogLimiter;

/// The job that all workers push as.
const JOB: &str = "uniffle-worker";

/// For one push, connecting included.
const PUSH_DEADLINE: Duration = Duration::from_secs(10);

/// For the last one: a gateway that is away must not hold up the worker's end.
const LAST_PUSH_DEADLINE: Duration = Duration::from_secs(2);

/// Between two warnings while pushes fail.
const WARN_INTERVAL: Duration = Duration::from_secs(600);

/// Of an error's text.
const ANSWER_BYTES_MAX: usize = 4 << 10;

/// Where to push, validated.
#[derive(Debug, Clone, PartialEq)]
pub struct PushConfig {
    /// The gateway: `http://host[:port][/prefix]`.
    pub endpoint: Endpoint,
    /// Time between two pushes.
    pub interval: Duration,
    /// More labels of the group; neither name nor value needs escaping in a URL.
    pub labels: Vec<(String, String)>,
}

/// A parsed endpoint.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Endpoint {
    authority: String,
    prefix: String,
}

impl Endpoint {
    /// Parses `http://host[:port][/prefix]`.
    ///
    /// # Errors
    /// What is allowed.
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

impl std::fmt::Display for Endpoint {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "http://{}{}", self.authority, self.prefix)
    }
}

metrics::table! {
    pub(crate) struct PushMetrics {
        pushed: IntCounter = "pushgateway_push_total", "pushes that were taken";
        failed: IntCounter = "pushgateway_push_failed_total", "pushes that failed";
    }
}

/// Pushes until its tasks are cancelled.
pub struct Pusher {
    config: PushConfig,
    path: String,
    registry: Registry,
    refresh: Refresh,
    metrics: PushMetrics,
}

impl std::fmt::Debug for Pusher {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Pusher").field("config", &self.config).finish_non_exhaustive()
    }
}

impl Pusher {
    /// Starts pushing what `registry` gathers after `refresh`, as `instance`.
    ///
    /// # Errors
    /// A metric name that is taken in `registry`.
    pub fn start(
        config: PushConfig,
        instance: &str,
        registry: Registry,
        refresh: Refresh,
        tasks: &Tasks,
    ) -> prometheus::Result<()> {
        let path = group_path(&config, instance);
        let metrics = PushMetrics::new(&registry)?;
        let pusher = Self { config, path, registry, refresh, metrics };
        tasks.spawn("metrics push", Arc::new(pusher).run(tasks.clone()));
        Ok(())
    }

    async fn run(self: Arc<Self>, tasks: Tasks) {
        let cancelled = tasks.cancelled();
        tokio::pin!(cancelled);
        let mut ticks = interval(self.config.interval);
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
                result = self.push(PUSH_DEADLINE) => self.tell(result, &warnings),
            }
        }
        let last = self.push(LAST_PUSH_DEADLINE).await;
        self.tell(last, &warnings);
    }

    fn tell(&self, result: Result<(), String>, warnings: &LogLimiter) {
        let gateway = &self.config.endpoint;
        match result {
            Ok(()) => {
                self.metrics.pushed.inc();
                if warnings.reset() {
                    tracing::info!(%gateway, "the pushgateway takes metrics again");
                }
            }
            Err(reason) => {
                self.metrics.failed.inc();
                if warnings.pass().is_some() {
                    tracing::warn!(%gateway, reason, "the pushgateway does not take metrics, trying forever");
                }
            }
        }
    }

    async fn push(&self, deadline: Duration) -> Result<(), String> {
        (self.refresh)();
        let mut text = Vec::new();
        TextEncoder::new().encode(&self.registry.gather(), &mut text).map_err(|error| error.to_string())?;
        let put = put(&self.config.endpoint.authority, &self.path, text);
        timeout(deadline, put).await.unwrap_or_else(|_| Err(format!("no answer within {deadline:?}")))
    }
}

/// The path of the worker's group. The names and values were checked to need no escaping.
fn group_path(config: &PushConfig, instance: &str) -> String {
    let mut path = format!("{}/metrics/job/{JOB}/instance/{instance}", config.endpoint.prefix);
    for (name, value) in &config.labels {
        path.extend(["/", name, "/", value]);
    }
    path
}

/// One PUT on a connection of its own: pushes are seconds apart.
async fn put(authority: &str, path: &str, body: Vec<u8>) -> Result<(), String> {
    let stream = TcpStream::connect(authority).await.map_err(|error| format!("{authority}: {error}"))?;
    let text = |error: hyper::Error| error.to_string();
    let (mut sender, connection) = http1::handshake(TokioIo::new(stream)).await.map_err(text)?;
    let request = Request::builder()
        .method(Method::PUT)
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
    // The connection does the work of the exchange, and may end first when the gateway closes it behind its answer.
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
    use super::*;

    #[test]
    fn a_path_prefix_is_kept_and_labels_follow() {
        let config = |endpoint| PushConfig {
            endpoint: Endpoint::parse(endpoint).unwrap(),
            interval: PUSH_DEADLINE,
            labels: vec![("env".to_owned(), "test".to_owned())],
        };
        let path = group_path(&config("http://proxy/pushgateway/"), "10.0.0.1-21100");
        assert_eq!(path, "/pushgateway/metrics/job/uniffle-worker/instance/10.0.0.1-21100/env/test");
        let path = group_path(&config("http://gateway:9091"), "a");
        assert_eq!(path, "/metrics/job/uniffle-worker/instance/a/env/test");
        assert_eq!(config("http://[::1]").endpoint.to_string(), "http://[::1]:80");
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
            assert!(Endpoint::parse(bad).is_err(), "{bad:?}");
        }
    }
}
