//! Decides which calls and flushes are traced.
//!
//! There is a span per call and flush, with up to two children per flush, never one per block. Code
//! asks the worker's [`Traces`] for a span; without a configured collector that costs one branch.
//! The destination of spans belongs to the process (`otlp`). Without the feature `otlp` all spans
//! are no-ops.

use fastrace::Span;
use fastrace::collector::SpanContext;

use super::spans::SPANS;
use uniffle_base::schema::kind::{optional, parsed, ratio};
use uniffle_base::schema::section;

section! {
    /// Sampling and destination of traces.
    #[table("tracing", "Traces of calls and flushes.")]
    pub struct TracingConfig {
        /// OTLP collector (gRPC), such as Jaeger. Default: none; tracing is off.
        #[key(
            "tracing.otlp_endpoint" or "tracing.jaeger_reporter_endpoint",
            optional(parsed("a URL such as http://collector:4317", otlp_endpoint)), Restart,
            example "\"http://collector:4317\""
        )]
        pub otlp_endpoint: Option<String> = None,
        /// Share of traced calls. A W3C traceparent of the caller takes precedence.
        #[key("tracing.sampling_ratio", ratio(), Restart)]
        pub sampling_ratio: f64 = 0.01,
    }
}

impl TracingConfig {
    /// Returns the sampling of calls and flushes. Without a collector nothing is traced.
    pub fn traces(&self) -> Traces {
        self.otlp_endpoint.as_ref().map_or_else(Traces::off, |_| Traces::sampled(self.sampling_ratio))
    }
}

/// Checks an endpoint for OTLP over gRPC without TLS, which has no path.
fn otlp_endpoint(text: &str) -> Result<String, String> {
    if !cfg!(feature = "otlp") {
        return Err("unset; this build has no traces (feature otlp)".to_owned());
    }
    let allowed = || "a URL such as \"http://collector:4317\" (OTLP over gRPC)".to_owned();
    let uri: http::Uri = text.parse().map_err(|_| allowed())?;
    let plain = uri.scheme_str() == Some("http") && uri.host().is_some_and(|host| !host.is_empty());
    if !plain || uri.port_u16().is_none() || !matches!(uri.path(), "" | "/") || uri.query().is_some() {
        return Err(allowed());
    }
    Ok(text.trim_end_matches('/').to_owned())
}

/// Sampling of calls and flushes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Traces {
    /// The share as an upper bound of a random `u64`, or `None` if tracing is off.
    below: Option<u64>,
}

impl Traces {
    /// Traces nothing.
    pub fn off() -> Self {
        Self::default()
    }

    /// Returns whether tracing is off.
    pub fn is_off(&self) -> bool {
        self.below.is_none()
    }

    /// Traces this share of the calls and flushes, and calls that belong to a sampled trace.
    #[expect(
        clippy::cast_possible_truncation,
        clippy::cast_sign_loss,
        clippy::cast_precision_loss,
        reason = "a share of the range of u64; the last bits do not matter, and `as` saturates"
    )]
    pub fn sampled(ratio: f64) -> Self {
        Self { below: Some((ratio * u64::MAX as f64) as u64) }
    }

    /// Begins the span of a call or flush. Returns a no-op span if it is not sampled, if nothing is
    /// exported, or if too many spans are open. `parent` is the client's W3C traceparent, whose
    /// sampling decision is final.
    pub fn begin(&self, name: &'static str, parent: Option<&str>) -> Span {
        let Some(below) = self.below else { return Span::noop() };
        match parent.and_then(SpanContext::decode_w3c_traceparent) {
            Some(parent) if parent.sampled => SPANS.begin_below(name, parent),
            Some(_) => Span::noop(),
            None if rand::random::<u64>() < below || below == u64::MAX => {
                SPANS.begin(name, SpanContext::random())
            }
            None => Span::noop(),
        }
    }
}

#[cfg(all(test, feature = "otlp"))]
mod tests {
    use super::*;

    const SAMPLED: &str = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01";
    const NOT_SAMPLED: &str = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-00";

    fn is_traced(traces: Traces, parent: Option<&str>) -> bool {
        SpanContext::from_span(&traces.begin("test", parent)).is_some()
    }

    #[test]
    #[cfg(feature = "otlp")]
    fn collectors_are_plain_urls_with_a_port() {
        assert_eq!(otlp_endpoint("http://c:4317/").as_deref(), Ok("http://c:4317"));
        for bad in ["c:4317", "https://c:4317", "http://c", "http://c:4317/v1/traces", "http://:4317", ""] {
            assert!(otlp_endpoint(bad).is_err(), "{bad:?}");
        }
    }

    #[test]
    fn client_decision_overrides_the_sampling_share() {
        SPANS.set_exported(true);
        let (never, always) = (Traces::sampled(0.0), Traces::sampled(1.0));
        assert!(is_traced(never, Some(SAMPLED)) && !is_traced(never, None));
        assert!(is_traced(always, None) && !is_traced(always, Some(NOT_SAMPLED)));
        assert!(is_traced(always, Some("nonsense")) && !is_traced(never, Some("")));
        assert!(!is_traced(Traces::off(), Some(SAMPLED)));
        let some = (0..1000).filter(|_| is_traced(Traces::sampled(0.5), None)).count();
        assert!((300..700).contains(&some), "{some} of 1000 traces were sampled");
    }
}
