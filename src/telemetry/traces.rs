//! Traces: which calls and flushes get one.
//!
//! A span per call and per flush, with children for what they wait for; never per block. Code that begins one asks the
//! worker's [`Traces`]; without a collector in the configuration that is one branch. Where spans go is the process's
//! business, not a worker's: see `otlp`. In a build without that feature every span is a no-op.

use fastrace::Span;
use fastrace::collector::SpanContext;

/// Which calls are traced.
#[derive(Debug, Clone, Copy, Default)]
pub struct Traces {
    /// None = off. Else the share, as a bound of a random `u64`.
    below: Option<u64>,
}

impl Traces {
    /// Nothing is traced.
    #[must_use]
    pub fn off() -> Self {
        Self::default()
    }

    /// Whether this never traces.
    #[must_use]
    pub fn is_off(&self) -> bool {
        self.below.is_none()
    }

    /// This share of the calls is traced, and those that come with a sampled trace.
    #[must_use]
    #[expect(
        clippy::cast_possible_truncation,
        clippy::cast_sign_loss,
        clippy::cast_precision_loss,
        reason = "a share of the range of u64; the last bits do not matter, and `as` saturates"
    )]
    pub fn sampled(ratio: f64) -> Self {
        Self { below: Some((ratio * u64::MAX as f64) as u64) }
    }

    /// The span of one call or flush; of none when it is not traced. `parent` is the client's W3C traceparent, whose
    /// word on sampling holds.
    pub fn begin(&self, name: &'static str, parent: Option<&str>) -> Span {
        let Some(below) = self.below else { return Span::noop() };
        match parent.and_then(SpanContext::decode_w3c_traceparent) {
            Some(parent) if parent.sampled => Span::root(name, parent)
                .with_properties(|| [("span.kind", "server"), ("span.parent_span_is_remote", "true")]),
            Some(_) => Span::noop(),
            None if rand::random::<u64>() < below || below == u64::MAX => {
                Span::root(name, SpanContext::random())
            }
            None => Span::noop(),
        }
    }
}

#[cfg(all(test, feature = "otlp"))]
mod tests {
    use fastrace::collector::Config;

    use super::*;

    const SAMPLED: &str = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01";
    const NOT_SAMPLED: &str = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-00";

    fn is_traced(traces: Traces, parent: Option<&str>) -> bool {
        SpanContext::from_span(&traces.begin("test", parent)).is_some()
    }

    #[test]
    fn the_client_decides_and_else_the_share() {
        // Spans exist only while there is a reporter.
        struct Discard;
        impl fastrace::collector::Reporter for Discard {
            fn report(&mut self, _: Vec<fastrace::collector::SpanRecord>) {}
        }
        fastrace::set_reporter(Discard, Config::default());
        let (never, always) = (Traces::sampled(0.0), Traces::sampled(1.0));
        assert!(is_traced(never, Some(SAMPLED)) && !is_traced(never, None));
        assert!(is_traced(always, None) && !is_traced(always, Some(NOT_SAMPLED)));
        assert!(is_traced(always, Some("nonsense")) && !is_traced(never, Some("")));
        assert!(!is_traced(Traces::off(), Some(SAMPLED)));
        let some = (0..1000).filter(|_| is_traced(Traces::sampled(0.5), None)).count();
        assert!((300..700).contains(&some), "{some} of 1000");
    }
}
