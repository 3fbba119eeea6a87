//! Paths of the Java server: `/metrics/{type}` as JSON, and `/api/shuffleServer/…` for the
//! dashboard.
//!
//! Uniffle's Kubernetes operator reads `app_num_with_node` of `/metrics/server` before it deletes a
//! pod. `/metrics` itself is Prometheus text here. Java has a registry per type. This worker has
//! one, and derives the type from the name ([`RegistryKind::of`]). docs/protocol.md §10.1 describes
//! the formats.

use std::collections::BTreeMap;
use std::fmt;
use std::sync::Arc;
use std::time::{SystemTime, UNIX_EPOCH};

use axum::extract::{Path, Query, State};
use axum::http::{StatusCode, header};
use axum::response::{IntoResponse, Response};
use axum::routing::get;
use axum::{Json, Router};
use prometheus::Registry;
use prometheus::proto::{Metric, MetricFamily, MetricType};
use serde::{Serialize, Serializer};
use serde_json::json;

use crate::metrics::clamped;
use crate::runtime::BlockingPool;

/// Query parameter with the name of a metric. It may be repeated.
const NAME: &str = "name[]";

/// Metrics and configuration that these paths show.
pub trait NodeInfo: fmt::Debug + Send + Sync {
    /// Updates gauges. Called before metrics are gathered.
    fn refresh_metrics(&self);

    /// Returns the effective configuration by key, without secrets.
    fn configuration(&self) -> BTreeMap<&'static str, String>;
}

/// Data sources of these paths.
#[derive(Debug, Clone)]
pub struct JavaHooks {
    /// Metrics.
    pub registry: Registry,
    /// Source of the configuration, and of updates before gathering.
    pub node: Arc<dyn NodeInfo>,
    /// Threads for collecting answers.
    pub pool: BlockingPool,
}

/// Returns the routes, without Prometheus text and `/api/shuffleServer/stacks` (a dump, see
/// `listeners::http`).
pub fn router(hooks: JavaHooks) -> Router {
    Router::new()
        .route("/metrics/{kind}", get(metrics_json))
        .route("/api/shuffleServer/metrics", get(all_metrics_json))
        .route("/api/shuffleServer/metrics/{kind}", get(metrics_json))
        .route("/api/shuffleServer/conf", get(configuration))
        .with_state(hooks)
}

/// Types of Java's registries.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum RegistryKind {
    Server,
    Grpc,
    Netty,
    Jvm,
}

impl RegistryKind {
    fn named(name: &str) -> Option<Self> {
        match name {
            "server" => Some(Self::Server),
            "grpc" => Some(Self::Grpc),
            "netty" => Some(Self::Netty),
            "jvm" => Some(Self::Jvm),
            _ => None,
        }
    }

    /// Returns the type of a metric by its prefix. The raw TCP metrics have Java's or riffle's
    /// prefix.
    fn of(metric: &str) -> Self {
        match metric.split('_').next() {
            Some("grpc") => Self::Grpc,
            Some("netty" | "urpc") => Self::Netty,
            Some("process" | "jvm") => Self::Jvm,
            _ => Self::Server,
        }
    }
}

type NameQuery = Query<Vec<(String, String)>>;

async fn all_metrics_json(state: State<JavaHooks>, names: NameQuery) -> Response {
    metrics_json(state, Path("all".to_owned()), names).await
}

/// Gathers metrics on a blocking thread, as for Prometheus text.
async fn metrics_json(
    State(hooks): State<JavaHooks>,
    Path(kind): Path<String>,
    Query(query): NameQuery,
) -> Response {
    let kind = match (kind.as_str(), RegistryKind::named(&kind)) {
        ("all", _) => None,
        (_, Some(kind)) => Some(kind),
        (_, None) => {
            let text = "unknown type of metrics; must be server, grpc, netty, jvm or all\n";
            return (StatusCode::NOT_FOUND, text).into_response();
        }
    };
    let names: Vec<String> = query.into_iter().filter(|(key, _)| key == NAME).map(|(_, name)| name).collect();
    let pool = hooks.pool.clone();
    let failed = |error| (StatusCode::INTERNAL_SERVER_ERROR, format!("{error}\n")).into_response();
    pool.run(move || gather(&hooks, kind, &names)).await.unwrap_or_else(failed)
}

fn gather(hooks: &JavaHooks, kind: Option<RegistryKind>, names: &[String]) -> Response {
    hooks.node.refresh_metrics();
    let mut families = hooks.registry.gather();
    families.retain(|family| kind.is_none_or(|kind| kind == RegistryKind::of(family.name())));
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    Json(JavaFamilies::new(&families, names, clamped(now.as_millis()))).into_response()
}

/// Returns the effective configuration without secrets, under this worker's keys.
async fn configuration(State(hooks): State<JavaHooks>) -> Response {
    // On a blocking thread, because it waits while the configuration is reloaded.
    let pool = hooks.pool.clone();
    let Ok(entries) = pool.run(move || hooks.node.configuration()).await else {
        return StatusCode::INTERNAL_SERVER_ERROR.into_response();
    };
    let entry = |(key, value): (&&str, &String)| json!({ "argumentKey": key, "argumentValue": value });
    let data: Vec<_> = entries.iter().map(entry).collect();
    let answer = Json(json!({ "code": 0, "data": data, "errMsg": "success" }));
    ([(header::CACHE_CONTROL, "no-store")], answer).into_response()
}

/// Java's format of metrics.
#[derive(Debug, Serialize)]
struct JavaFamilies<'f> {
    metrics: Vec<JavaSample<'f>>,
    #[serde(rename = "timeStamp")]
    time_ms: i64,
}

#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
struct JavaSample<'f> {
    name: String,
    label_names: Vec<&'f str>,
    label_values: Vec<String>,
    value: Number,
    /// Always null, because Java's metrics have no timestamps of their own.
    timestamp_ms: (),
}

/// Serializes like Jackson: values that JSON cannot represent as numbers become text.
#[derive(Debug)]
struct Number(f64);

impl Serialize for Number {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        match self.0 {
            value if value.is_finite() => serializer.serialize_f64(value),
            value if value.is_nan() => serializer.serialize_str("NaN"),
            value if value > 0.0 => serializer.serialize_str("Infinity"),
            _ => serializer.serialize_str("-Infinity"),
        }
    }
}

impl<'f> JavaFamilies<'f> {
    /// Returns the samples of `families`, filtered by `names` if there are any.
    fn new(families: &'f [MetricFamily], names: &[String], time_ms: i64) -> Self {
        let mut metrics = Vec::new();
        for family in families {
            for metric in family.get_metric() {
                add_samples(family, metric, &mut metrics);
            }
        }
        if !names.is_empty() {
            metrics.retain(|sample| names.contains(&sample.name));
        }
        Self { metrics, time_ms }
    }
}

fn add_samples<'f>(family: &'f MetricFamily, metric: &'f Metric, samples: &mut Vec<JavaSample<'f>>) {
    let mut add = |suffix: &str, bound: Option<f64>, value: f64| {
        let labels = metric.get_label().iter();
        let (mut label_names, mut label_values): (Vec<_>, Vec<_>) =
            labels.map(|label| (label.name(), label.value().to_owned())).unzip();
        if let Some(bound) = bound {
            label_names.push("le");
            label_values.push(if bound.is_finite() { bound.to_string() } else { "+Inf".to_owned() });
        }
        let name = format!("{}{suffix}", family.name());
        samples.push(JavaSample { name, label_names, label_values, value: Number(value), timestamp_ms: () });
    };
    match family.get_field_type() {
        MetricType::COUNTER => add("", None, metric.get_counter().get_value()),
        MetricType::GAUGE => add("", None, metric.get_gauge().get_value()),
        MetricType::HISTOGRAM => {
            let histogram = metric.get_histogram();
            #[expect(clippy::cast_precision_loss, reason = "metrics are floating point")]
            let float = |count: u64| count as f64;
            for bucket in histogram.get_bucket() {
                add("_bucket", Some(bucket.upper_bound()), float(bucket.cumulative_count()));
            }
            add("_bucket", Some(f64::INFINITY), float(histogram.get_sample_count()));
            add("_sum", None, histogram.get_sample_sum());
            add("_count", None, float(histogram.get_sample_count()));
        }
        // Not used by any metrics table.
        MetricType::SUMMARY | MetricType::UNTYPED => {}
    }
}

#[cfg(test)]
mod tests {
    use prometheus::{Gauge, Histogram, HistogramOpts, IntGaugeVec, Opts};
    use serde_json::Value;

    use super::*;

    #[test]
    fn samples_have_the_java_shape() {
        let registry = Registry::new();
        let used = IntGaugeVec::new(Opts::new("used", "help"), &["root"]).unwrap();
        used.with_label_values(&["/a\"b"]).set(7);
        let wait = Histogram::with_opts(HistogramOpts::new("wait", "help").buckets(vec![0.5, 1.0])).unwrap();
        wait.observe(0.75);
        let ratio = Gauge::new("ratio", "help").unwrap();
        ratio.set(f64::NAN);
        registry.register(Box::new(used)).unwrap();
        registry.register(Box::new(wait)).unwrap();
        registry.register(Box::new(ratio)).unwrap();
        let families = registry.gather();
        let converted = serde_json::to_value(JavaFamilies::new(&families, &[], 1_712_575_271_639)).unwrap();
        let sample = |name: &str, names: &[&str], values: &[&str], value: Value| json!({ "name": name, "labelNames": names, "labelValues": values, "value": value, "timestampMs": null });
        let expected = json!({
            "metrics": [
                sample("ratio", &[], &[], json!("NaN")),
                sample("used", &["root"], &["/a\"b"], json!(7.0)),
                sample("wait_bucket", &["le"], &["0.5"], json!(0.0)),
                sample("wait_bucket", &["le"], &["1"], json!(1.0)),
                sample("wait_bucket", &["le"], &["+Inf"], json!(1.0)),
                sample("wait_sum", &[], &[], json!(0.75)),
                sample("wait_count", &[], &[], json!(1.0)),
            ],
            "timeStamp": 1_712_575_271_639_i64,
        });
        assert_eq!(converted, expected);
        let some = JavaFamilies::new(&families, &["used".to_owned(), "wait_sum".to_owned()], 0);
        assert_eq!(some.metrics.len(), 2);
    }

    #[test]
    fn metric_name_determines_the_type() {
        assert_eq!(RegistryKind::of("grpc_open"), RegistryKind::Grpc);
        assert_eq!(RegistryKind::of("netty_active_connection"), RegistryKind::Netty);
        assert_eq!(RegistryKind::of("urpc_connection_number"), RegistryKind::Netty);
        assert_eq!(RegistryKind::of("process_open_fds"), RegistryKind::Jvm);
        assert_eq!(RegistryKind::of("app_num_with_node"), RegistryKind::Server);
    }
}
