//! A worker's `/metrics`, fetched over HTTP and parsed; [`get`] fetches other pages. Supports only
//! the part of the text format that the worker uses.

use std::io::{Read as _, Write as _};
use std::net::TcpStream;
use std::time::Duration;

/// Time limit of a connect and of each read. On a busy machine, stacks of all tasks take seconds,
/// because symbols of a test binary are resolved.
const TIMEOUT: Duration = Duration::from_secs(30);

/// One response of `/metrics`.
#[derive(Debug, Clone, Default)]
pub struct Metrics {
    samples: Vec<MetricSample>,
}

#[derive(Debug, Clone)]
struct MetricSample {
    name: String,
    labels: String,
    value: f64,
}

impl Metrics {
    /// Fetches the metrics of the worker whose HTTP port on this machine is `port`.
    pub fn fetch(port: u16) -> Result<Self, String> {
        Ok(Self::parse(&get(port, "/metrics")?))
    }

    /// Parses metrics. Lines without a sample are skipped.
    pub fn parse(text: &str) -> Self {
        let samples =
            text.lines().filter(|line| !line.starts_with('#')).filter_map(MetricSample::parse).collect();
        Self { samples }
    }

    /// Returns the sum over all label values, or `None` if the metric does not exist.
    pub fn total(&self, name: &str) -> Option<f64> {
        self.sum(|sample| sample.name == name)
    }

    /// Returns the sum over the samples whose labels contain `label`, written as `name="value"`.
    pub fn total_of(&self, name: &str, label: &str) -> Option<f64> {
        self.sum(|sample| sample.name == name && sample.labels.contains(label))
    }

    /// Returns the total of a metric that must exist.
    pub fn expect(&self, name: &str) -> f64 {
        self.total(name)
            .unwrap_or_else(|| panic!("the worker has no metric {name}; it has {:?}", self.names()))
    }

    /// Returns the largest sample of a metric with its labels, or `None` if the metric does not
    /// exist.
    pub fn largest(&self, name: &str) -> Option<(f64, &str)> {
        let samples = self.samples.iter().filter(|sample| sample.name == name);
        let largest = samples.max_by(|a, b| a.value.total_cmp(&b.value));
        largest.map(|sample| (sample.value, sample.labels.as_str()))
    }

    /// Returns all names in order. A name appears once, except those of histograms with labels.
    pub fn names(&self) -> Vec<&str> {
        let mut names: Vec<&str> = self.samples.iter().map(|sample| sample.name.as_str()).collect();
        names.dedup();
        names
    }

    fn sum(&self, wanted: impl Fn(&MetricSample) -> bool) -> Option<f64> {
        let mut found = self.samples.iter().filter(|sample| wanted(sample)).peekable();
        found.peek()?;
        Some(found.map(|sample| sample.value).sum())
    }
}

impl MetricSample {
    fn parse(line: &str) -> Option<Self> {
        let (series, value) = line.trim().rsplit_once(' ')?;
        let (name, labels) = match series.split_once('{') {
            Some((name, labels)) => (name, labels.trim_end_matches('}')),
            None => (series, ""),
        };
        Some(Self { name: name.to_owned(), labels: labels.to_owned(), value: value.parse().ok()? })
    }
}

/// Returns the body of `GET path`. Any status but 200 is an error.
pub fn get(port: u16, path: &str) -> Result<String, String> {
    let fetch = || -> std::io::Result<String> {
        let mut stream = TcpStream::connect_timeout(&([127, 0, 0, 1], port).into(), TIMEOUT)?;
        stream.set_read_timeout(Some(TIMEOUT))?;
        // HTTP/1.0: the response is not chunked and ends with the connection.
        write!(stream, "GET {path} HTTP/1.0\r\nHost: localhost\r\n\r\n")?;
        let mut answer = String::new();
        stream.read_to_string(&mut answer)?;
        Ok(answer)
    };
    let answer = fetch().map_err(|error| format!("GET {path}: {error}"))?;
    let (head, body) = answer.split_once("\r\n\r\n").ok_or("an answer without an end of its head")?;
    let status = head.lines().next().unwrap_or_default();
    if status.split(' ').nth(1) != Some("200") {
        return Err(format!("GET {path}: {status}: {body}"));
    }
    Ok(body.to_owned())
}

#[test]
fn samples_are_summed_by_name_and_label() {
    let metrics =
        Metrics::parse("# HELP a text\n# TYPE a counter\na{root=\"/x y\"} 1\na{root=\"/z\"} 2.5\nab 7\n\n");
    assert_eq!(metrics.total("a"), Some(3.5));
    assert_eq!(metrics.total_of("a", "root=\"/z\""), Some(2.5));
    assert_eq!(metrics.total("ab"), Some(7.0));
    assert_eq!(metrics.total("b"), None);
    assert_eq!((metrics.largest("a"), metrics.largest("b")), (Some((2.5, "root=\"/z\"")), None));
    assert_eq!(metrics.names(), ["a", "ab"]);
}
