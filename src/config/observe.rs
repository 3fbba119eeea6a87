//! `[metrics]` and `[tracing]`: reading and printing of their keys in one place.

use std::time::Duration;

use toml::{Table, Value};

use super::print::{duration, put};
use super::reader::{Reader, Unit};
use super::{Metrics, Tracing};
use crate::listeners::http::push::Endpoint;

const LABELS_MAX: usize = 16;
const LABEL_CHARS_MAX: usize = 128;

pub(super) fn metrics(reader: &mut Reader) -> Metrics {
    let second = Duration::from_secs(1);
    let labels = reader.text_table("metrics.labels", LABELS_MAX);
    for (name, value) in &labels {
        if let Err(allowed) = label(name, value) {
            reader.refuse("metrics.labels", format_args!("{name:?} = {value:?}"), allowed);
        }
    }
    Metrics {
        push_gateway_endpoint: reader.text("metrics.push_gateway_endpoint", Endpoint::parse),
        push_interval: reader.duration(
            "metrics.push_interval_sec",
            10 * second,
            second..=3600 * second,
            Unit::Seconds,
        ),
        labels,
    }
}

/// Labels stand in the path of the gateway, and beside those that the worker sets.
fn label(name: &str, value: &str) -> Result<(), &'static str> {
    let is_name = |c: char| c.is_ascii_alphanumeric() || c == '_';
    let starts = name.starts_with(|c: char| c.is_ascii_alphabetic() || c == '_');
    if !starts || !name.chars().all(is_name) || name.starts_with("__") || name.len() > LABEL_CHARS_MAX {
        return Err(
            "names of letters, digits and underscores, not beginning with a digit or two underscores",
        );
    }
    if matches!(name, "job" | "instance") {
        return Err("names other than job and instance, which the worker sets");
    }
    let is_value = |c: char| c.is_ascii_alphanumeric() || matches!(c, '_' | '-' | '.' | ':' | '~');
    if value.is_empty() || value.len() > LABEL_CHARS_MAX || !value.chars().all(is_value) {
        return Err("values of 1 to 128 letters, digits and any of _-.:~");
    }
    Ok(())
}

pub(super) fn tracing(reader: &mut Reader) -> Tracing {
    Tracing {
        otlp_endpoint: reader.text("tracing.otlp_endpoint", otlp_endpoint),
        sampling_ratio: reader.ratio("tracing.sampling_ratio", 0.01),
    }
}

/// OTLP over gRPC without TLS. What the URL's path would mean is not defined there.
fn otlp_endpoint(text: &str) -> Result<String, String> {
    if !cfg!(feature = "otlp") {
        return Err("this program was built without the feature otlp".to_owned());
    }
    let allowed = || "a URL such as \"http://collector:4317\" (OTLP over gRPC)".to_owned();
    let uri: http::Uri = text.parse().map_err(|_| allowed())?;
    let plain = uri.scheme_str() == Some("http") && uri.host().is_some_and(|host| !host.is_empty());
    if !plain || uri.port_u16().is_none() || !matches!(uri.path(), "" | "/") || uri.query().is_some() {
        return Err(allowed());
    }
    Ok(text.trim_end_matches('/').to_owned())
}

pub(super) fn print_metrics(metrics: &Metrics) -> Table {
    let mut table = Table::new();
    if let Some(endpoint) = &metrics.push_gateway_endpoint {
        put(&mut table, "push_gateway_endpoint", endpoint.to_string());
    }
    put(&mut table, "push_interval_sec", duration(metrics.push_interval, 1));
    let labels = metrics.labels.iter().map(|(name, value)| (name.clone(), Value::from(value.clone())));
    put(&mut table, "labels", labels.collect::<Table>());
    table
}

pub(super) fn print_tracing(tracing: &Tracing) -> Table {
    let mut table = Table::new();
    if let Some(endpoint) = &tracing.otlp_endpoint {
        put(&mut table, "otlp_endpoint", endpoint.clone());
    }
    put(&mut table, "sampling_ratio", tracing.sampling_ratio);
    table
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn labels_need_no_escaping_anywhere() {
        assert_eq!(label("env", "prod-7.eu:1"), Ok(()));
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
            assert!(label(name, value).is_err(), "{name:?} {value:?}");
        }
    }

    #[test]
    #[cfg(feature = "otlp")]
    fn collectors_are_plain_urls_with_a_port() {
        assert_eq!(otlp_endpoint("http://c:4317/").as_deref(), Ok("http://c:4317"));
        for bad in ["c:4317", "https://c:4317", "http://c", "http://c:4317/v1/traces", "http://:4317", ""] {
            assert!(otlp_endpoint(bad).is_err(), "{bad:?}");
        }
    }
}
