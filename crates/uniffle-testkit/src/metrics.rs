//! A worker's `/metrics`, fetched over HTTP and parsed. Not a Prometheus client: it reads the text format as far as
//! the worker writes it.

use std::io::{Read as _, Write as _};
use std::net::TcpStream;
use std::time::Duration;

/// Never reached when all is well. On a busy machine the stacks of all tasks take seconds: a test binary's symbols are looked up.
const TIMEOUT: Duration = Duration::from_secs(30);

/// One answer of `/metrics`.
#[derive(Debug, Clone, Default)]
pub struct Metrics {
    samples: Vec<Sample>,
}

#[derive(Debug, Clone)]
struct Sample {
    name: String,
    labels: String,
    value: f64,
}

impl Metrics {
    /// Asks the worker that serves HTTP on `port` of this machine.
    pub fn fetch(port: u16) -> Result<Self, String> {
        Ok(Self::parse(&get(port, "/metrics")?))
    }

    /// Lines that are not samples are passed over.
    pub fn parse(text: &str) -> Self {
        let samples = text.lines().filter(|line| !line.starts_with('#')).filter_map(Sample::parse).collect();
        Self { samples }
    }

    /// The sum over all label values, or `None` when there is no such metric.
    pub fn total(&self, name: &str) -> Option<f64> {
        self.sum(|sample| sample.name == name)
    }

    /// The sum over the samples whose labels contain `label`, written as `name="value"`.
    pub fn total_of(&self, name: &str, label: &str) -> Option<f64> {
        self.sum(|sample| sample.name == name && sample.labels.contains(label))
    }

    /// The same, of a metric that the worker must have.
    pub fn expect(&self, name: &str) -> f64 {
        self.total(name)
            .unwrap_or_else(|| panic!("the worker has no metric {name}; it has {:?}", self.names()))
    }

    /// The largest sample of a metric, with its labels; none when there is no such metric.
    pub fn largest(&self, name: &str) -> Option<(f64, &str)> {
        let samples = self.samples.iter().filter(|sample| sample.name == name);
        let largest = samples.max_by(|a, b| a.value.total_cmp(&b.value));
        largest.map(|sample| (sample.value, sample.labels.as_str()))
    }

    /// Every name, once.
    pub fn names(&self) -> Vec<&str> {
        let mut names: Vec<&str> = self.samples.iter().map(|sample| sample.name.as_str()).collect();
        names.dedup();
        names
    }

    fn sum(&self, wanted: impl Fn(&Sample) -> bool) -> Option<f64> {
        let mut found = self.samples.iter().filter(|sample| wanted(sample)).peekable();
        found.peek()?;
        Some(found.map(|sample| sample.value).sum())
    }
}

impl Sample {
    fn parse(line: &str) -> Option<Self> {
        let (series, value) = line.trim().rsplit_once(' ')?;
        let (name, labels) = match series.split_once('{') {
            Some((name, labels)) => (name, labels.trim_end_matches('}')),
            None => (series, ""),
        };
        Some(Self { name: name.to_owned(), labels: labels.to_owned(), value: value.parse().ok()? })
    }
}

/// The body of `GET path`; anything but status 200 is an error.
pub fn get(port: u16, path: &str) -> Result<String, String> {
    let fetch = || -> std::io::Result<String> {
        let mut stream = TcpStream::connect_timeout(&([127, 0, 0, 1], port).into(), TIMEOUT)?;
        stream.set_read_timeout(Some(TIMEOUT))?;
        // HTTP/1.0: the answer is not chunked and ends with the connection.
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
