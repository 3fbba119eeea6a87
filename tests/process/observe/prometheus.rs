//! A real Prometheus scrapes the worker, evaluates the alert rules and answers every dashboard
//! query. promtool checks the rules and the exposition. A real Pushgateway receives pushed metrics.

use std::io::Write as _;
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::Duration;

use serde_json::Value;

use super::tools::{Load, Running, ask_text, run};
use uniffle_testkit::metrics::Metrics;
use uniffle_testkit::ports::free_port;
use uniffle_testkit::tools::available;
use uniffle_testkit::wait_until;
use uniffle_testkit::worker::{Setup, WorkerProcess};

const WAIT_MAX: Duration = Duration::from_secs(60);
const DASHBOARD: &str = include_str!("../../../deploy/grafana/uniffle-worker.json");
const RULE_TESTS: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/deploy/prometheus/uniffle-worker.tests.yml");
pub(super) const RULES: &str =
    concat!(env!("CARGO_MANIFEST_DIR"), "/deploy/prometheus/uniffle-worker.rules.yml");

/// Returns every expression of the dashboard.
fn dashboard_queries() -> Vec<String> {
    fn walk(value: &Value, found: &mut Vec<String>) {
        match value {
            Value::Object(fields) => {
                for (name, value) in fields {
                    match value {
                        Value::String(text) if name == "expr" => found.push(text.clone()),
                        _ => walk(value, found),
                    }
                }
            }
            Value::Array(values) => values.iter().for_each(|value| walk(value, found)),
            _ => {}
        }
    }
    let mut found = Vec::new();
    walk(&serde_json::from_str(DASHBOARD).unwrap(), &mut found);
    assert!(found.len() > 20, "only {} queries: the search is broken", found.len());
    found
}

#[test]
fn promtool_reports_no_error() {
    if !available("the rules", &["promtool"]) {
        return;
    }
    let report = run(Command::new("promtool").args(["check", "rules", RULES]));
    assert!(report.contains("SUCCESS: 33 rules found"), "{report}");
    run(Command::new("promtool").args(["test", "rules", RULE_TESTS]));
    let worker = WorkerProcess::start(&Setup::default());
    Load::start(&worker, "5MB", 1).finish();
    let text = worker.page("/metrics").unwrap();
    let mut check = Command::new("promtool")
        .args(["check", "metrics"])
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    check.stdin.take().unwrap().write_all(text.as_bytes()).unwrap();
    let output = check.wait_with_output().unwrap();
    let report = String::from_utf8_lossy(&output.stdout) + String::from_utf8_lossy(&output.stderr);
    // Names and style follow the Java server and riffle, so only parse errors count.
    let errors: Vec<_> = report.lines().filter(|line| line.contains("error")).collect();
    assert!(errors.is_empty() && matches!(output.status.code(), Some(0 | 3)), "{report}");
    worker.stop();
}

/// Queries the API of a Prometheus.
pub(super) fn query(port: u16, query: &str) -> Result<Value, String> {
    let encoded: String =
        query
            .bytes()
            .map(|byte| {
                if byte.is_ascii_alphanumeric() {
                    char::from(byte).to_string()
                } else {
                    format!("%{byte:02X}")
                }
            })
            .collect();
    let (status, text) = ask_text(port, "GET", &format!("/api/v1/query?query={encoded}"));
    let answer: Value = serde_json::from_str(&text).map_err(|error| format!("{status}: {error}: {text}"))?;
    if answer["status"] == "success" { Ok(answer["data"]["result"].clone()) } else { Err(text) }
}

fn is_listening(port: u16) -> Result<(), String> {
    std::net::TcpStream::connect(("127.0.0.1", port)).map(drop).map_err(|error| error.to_string())
}

/// Starts a Prometheus that scrapes `targets` and evaluates the rule file every second. Returns its
/// port too.
pub(super) fn prometheus(directory: &Path, rules: &Path, targets: &[u16]) -> (Running, u16) {
    let targets: Vec<String> = targets.iter().map(|port| format!("127.0.0.1:{port}")).collect();
    let config = format!(
        "global:\n  scrape_interval: 1s\n  evaluation_interval: 1s\n  external_labels: {{uniffle_docs: \"https://docs/\"}}\n\
         rule_files: [{rules:?}]\nscrape_configs:\n- job_name: uniffle-worker\n  static_configs:\n  - targets: {targets:?}\n"
    );
    let file = directory.join("prometheus.yml");
    std::fs::write(&file, config).unwrap();
    run(Command::new("promtool").args(["check", "config"]).arg(&file));
    let port = free_port();
    let mut command = Command::new("prometheus");
    command
        .arg(format!("--config.file={}", file.display()))
        .arg(format!("--storage.tsdb.path={}", directory.join("data").display()))
        .arg(format!("--web.listen-address=127.0.0.1:{port}"));
    let running = Running::start(&mut command, &directory.join("prometheus.log"));
    wait_until("prometheus listens", WAIT_MAX, || is_listening(port));
    (running, port)
}

#[test]
fn prometheus_scrapes_and_answers_dashboard_queries() {
    if !available("scrapes", &["prometheus"]) {
        return;
    }
    let directory = tempfile::tempdir().unwrap();
    let worker = WorkerProcess::start(&Setup::default());
    let (_prometheus, port) = prometheus(directory.path(), Path::new(RULES), &[worker.ready().http_port]);
    let load = Load::start(&worker, "100MB", 2);
    wait_until("prometheus has seen data", WAIT_MAX, || {
        let result = query(port, "total_received_data > 0 and on (instance) up == 1")?;
        if result.as_array().is_some_and(|rows| !rows.is_empty()) { Ok(()) } else { Err(result.to_string()) }
    });
    load.finish();
    for expression in dashboard_queries() {
        let plain =
            expression.replace("$instance", ".*").replace("$job", ".*").replace("$__rate_interval", "1m");
        query(port, &plain).unwrap_or_else(|error| panic!("{expression}: {error}"));
    }
    let (_, text) = ask_text(port, "GET", "/api/v1/rules");
    let rules: Value = serde_json::from_str(&text).unwrap();
    let alerts: Vec<&Value> = rules["data"]["groups"]
        .as_array()
        .unwrap()
        .iter()
        .flat_map(|g| g["rules"].as_array().unwrap())
        .collect();
    assert_eq!(alerts.len(), 33, "{text}");
    for alert in alerts {
        assert_ne!(alert["health"], "err", "{alert}");
        assert_ne!(alert["state"], "firing", "{alert}");
    }
    worker.assert_clean();
    worker.stop();
}

#[test]
fn pushgateway_is_retried_and_group_deleted_at_stop() {
    if !available("pushed metrics", &["prometheus-pushgateway"]) {
        return;
    }
    let directory = tempfile::tempdir().unwrap();
    let port = free_port();
    let more = format!(
        "[metrics]\npush_gateway_endpoint = \"http://127.0.0.1:{port}/behind/proxy/\"\npush_interval_sec = 1\n\
         labels = {{ env = \"test\" }}"
    );
    let worker = WorkerProcess::start(&Setup { made_tables: more, ..Setup::default() });
    wait_until("the first push fails", WAIT_MAX, || {
        let failed = worker.metrics().expect("pushgateway_push_failed_total");
        if failed > 0.0 { Ok(()) } else { Err("no push failed".to_owned()) }
    });
    assert!(worker.log().contains("the pushgateway does not accept metrics"), "{}", worker.log());
    worker.assert_no_error_logged();
    let mut gateway = Command::new("prometheus-pushgateway");
    gateway.arg(format!("--web.listen-address=127.0.0.1:{port}")).arg("--web.route-prefix=/behind/proxy");
    let _gateway = Running::start(&mut gateway, &directory.path().join("gateway.log"));
    wait_until("the gateway listens", WAIT_MAX, || is_listening(port));
    Load::start(&worker, "5MB", 1).finish();
    worker.assert_clean();
    let instance = format!(
        "127.0.0.1-{}-{}",
        worker.ready().grpc_port,
        worker.ready().urpc_port.expect("the TCP listener is open")
    );
    let group = format!("instance=\"{instance}\"");
    let gathered = || {
        let (status, text) = ask_text(port, "GET", "/behind/proxy/metrics");
        assert_eq!(status, 200);
        text
    };
    wait_until("all is pushed", WAIT_MAX, || {
        let received = Metrics::parse(&gathered()).total_of("total_received_data", &group);
        if received.is_some_and(|bytes| bytes > 4e6) { Ok(()) } else { Err(format!("{received:?}")) }
    });
    let text = gathered();
    let line = text.lines().find(|line| line.starts_with("total_received_data{")).unwrap();
    assert!(line.contains("env=\"test\"") && line.contains("job=\"uniffle-worker\""), "{line}");
    worker.stop();
    let text = gathered();
    assert!(!text.contains(&group), "{text}");
}
