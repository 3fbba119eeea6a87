//! Spans that are recorded, as OpenTelemetry's. The current one is in its thread's OpenTelemetry context.
//!
//! Whether a call is traced was decided before (`traces`): what is begun here is sent, if there is anywhere to send it.

use std::time::SystemTime;

use opentelemetry::trace::{
    SpanBuilder, SpanContext, SpanId, SpanKind, TraceContextExt as _, TraceFlags, TraceId, TraceState,
    Tracer as _,
};
use opentelemetry::{Context, ContextGuard, KeyValue};
use opentelemetry_sdk::trace::SdkTracer;
use parking_lot::RwLock;
use tokio::time::Instant;

use super::traceparent::Traceparent;

/// Begins the process's spans; none while there is nowhere to send them. Asked only for calls that are traced.
static TRACER: RwLock<Option<SdkTracer>> = RwLock::new(None);

/// Begins spans with `tracer` from here on, or none.
pub(super) fn begin_with(tracer: Option<SdkTracer>) {
    let former = std::mem::replace(&mut *TRACER.write(), tracer);
    drop(former); // without the lock
}

/// A span under way. Ends when it is dropped.
#[derive(Debug)]
pub(super) struct Recorded(Box<Begun>);

#[derive(Debug)]
struct Begun {
    /// Whose active span it is.
    context: Context,
    at: SystemTime,
    clock: Instant,
}

impl Recorded {
    /// A span without a parent in this process.
    pub(super) fn begin(name: &'static str, parent: Option<Traceparent>) -> Option<Self> {
        let builder = SpanBuilder::from_name(name);
        let Some(parent) = parent else { return Self::under(builder, &Context::new()) };
        let client = SpanContext::new(
            TraceId::from(parent.trace_id),
            SpanId::from(parent.span_id),
            TraceFlags::SAMPLED,
            true,
            TraceState::default(),
        );
        Self::under(builder.with_kind(SpanKind::Server), &Context::new().with_remote_span_context(client))
    }

    /// A part of the current span, if there is one.
    pub(super) fn child(name: &'static str) -> Option<Self> {
        let current = Context::current();
        current.has_active_span().then(|| Self::under(SpanBuilder::from_name(name), &current)).flatten()
    }

    fn under(builder: SpanBuilder, parent: &Context) -> Option<Self> {
        let (at, clock) = (SystemTime::now(), Instant::now());
        let tracer = TRACER.read();
        let span = tracer.as_ref()?.build_with_context(builder.with_start_time(at), parent);
        Some(Self(Box::new(Begun { context: Context::new().with_span(span), at, clock })))
    }

    /// Makes it the current one until the guard is dropped.
    pub(super) fn enter(&self) -> ContextGuard {
        self.0.context.clone().attach()
    }

    /// Tells more of the current span, if there is one.
    pub(super) fn add_properties<const N: usize>(properties: impl FnOnce() -> [(&'static str, String); N]) {
        let current = Context::current();
        if current.has_active_span() {
            let attributes = properties().into_iter().map(|(key, value)| KeyValue::new(key, value));
            current.span().set_attributes(attributes);
        }
    }
}

impl Drop for Recorded {
    /// Lasts as long as the monotonic clock says: the other one may have been set meanwhile.
    fn drop(&mut self) {
        let Begun { context, at, clock } = &*self.0;
        context.span().end_with_timestamp(at.checked_add(clock.elapsed()).unwrap_or(*at));
    }
}

#[cfg(test)]
pub(super) mod tests {
    use std::sync::Once;
    use std::time::Duration;

    use opentelemetry::trace::TracerProvider as _;
    use opentelemetry_sdk::error::OTelSdkResult;
    use opentelemetry_sdk::trace::{Sampler, SdkTracerProvider, Span, SpanData, SpanProcessor};
    use parking_lot::Mutex;

    use super::*;

    /// The spans of all tests of this process that have ended.
    static ENDED: Mutex<Vec<SpanData>> = Mutex::new(Vec::new());

    #[derive(Debug)]
    struct Keep;

    impl SpanProcessor for Keep {
        fn on_start(&self, _: &mut Span, _: &Context) {}

        fn on_end(&self, span: SpanData) {
            ENDED.lock().push(span);
        }

        fn force_flush(&self) -> OTelSdkResult {
            Ok(())
        }

        fn shutdown_with_timeout(&self, _: Duration) -> OTelSdkResult {
            Ok(())
        }
    }

    /// From here on spans are begun, and kept when they end.
    pub(in crate::telemetry) fn keep_spans() {
        static KEPT: Once = Once::new();
        KEPT.call_once(|| {
            let kept = SdkTracerProvider::builder().with_sampler(Sampler::AlwaysOn).with_span_processor(Keep);
            begin_with(Some(kept.build().tracer("test")));
        });
    }

    /// Those of this trace that have ended.
    pub(in crate::telemetry) fn ended_in(trace_id: u128) -> Vec<SpanData> {
        let wanted = TraceId::from(trace_id);
        ENDED.lock().iter().filter(|span| span.span_context.trace_id() == wanted).cloned().collect()
    }
}
