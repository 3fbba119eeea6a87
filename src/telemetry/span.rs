//! A span: the time that a call, a flush or a part of one takes.
//!
//! Not here: which calls have one (`traces`), and where spans go (`otlp`). Invariants: a span of none costs one branch in each
//! poll of what is in it; and the span in which a future runs is its thread's current one only while the future is polled,
//! so parts are told to the span that waits for them, whichever thread polls it. In a build without the feature `otlp` every
//! span is of none.

use std::pin::Pin;
use std::task::{Context, Poll};

use pin_project_lite::pin_project;

#[cfg(feature = "otlp")]
use super::recorded::Recorded;
use super::traceparent::Traceparent;

/// The time from where this was made to where it is dropped; of nothing where it is not traced.
#[derive(Debug)]
#[must_use = "a span ends when it is dropped"]
pub struct Span(Option<Recorded>);

impl Span {
    /// Of nothing.
    pub const fn noop() -> Self {
        Self(None)
    }

    /// Of a call or flush, whose parent is at most a client's span.
    pub(super) fn begin(name: &'static str, parent: Option<Traceparent>) -> Self {
        Self(Recorded::begin(name, parent))
    }

    /// Of a part of the span in which the caller runs.
    pub fn child(name: &'static str) -> Self {
        Self(Recorded::child(name))
    }

    /// Tells more of the span in which the caller runs. Not asked for where there is none.
    pub fn add_properties<const N: usize>(properties: impl FnOnce() -> [(&'static str, String); N]) {
        Recorded::add_properties(properties);
    }

    /// Whether it is of something.
    #[cfg(test)]
    pub(super) fn is_recorded(&self) -> bool {
        self.0.is_some()
    }
}

/// A future that takes the time of a span.
pub trait InSpanExt: Future + Sized {
    /// The span ends with the future.
    fn in_span(self, span: Span) -> InSpan<Self> {
        InSpan { future: self, span }
    }
}

impl<F: Future> InSpanExt for F {}

pin_project! {
    /// See [`InSpanExt::in_span`].
    #[derive(Debug)]
    #[must_use = "futures do nothing unless polled"]
    pub struct InSpan<F> {
        #[pin]
        future: F,
        // After the future, whose parts end before it.
        span: Span,
    }
}

impl<F: Future> Future for InSpan<F> {
    type Output = F::Output;

    fn poll(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<F::Output> {
        let this = self.project();
        let polled = {
            let _current = this.span.0.as_ref().map(Recorded::enter);
            this.future.poll(context)
        };
        if polled.is_ready() {
            *this.span = Span::noop();
        }
        polled
    }
}

/// Nothing is recorded in a build that cannot send it.
#[cfg(not(feature = "otlp"))]
#[derive(Debug)]
enum Recorded {}

#[cfg(not(feature = "otlp"))]
impl Recorded {
    fn begin(_name: &'static str, _parent: Option<Traceparent>) -> Option<Self> {
        None
    }

    fn child(_name: &'static str) -> Option<Self> {
        None
    }

    fn add_properties<const N: usize>(_properties: impl FnOnce() -> [(&'static str, String); N]) {}

    fn enter(&self) {
        match *self {}
    }
}

#[cfg(all(test, feature = "otlp"))]
mod tests {
    use futures::future::join;
    use opentelemetry::trace::{SpanId, SpanKind};
    use opentelemetry_sdk::trace::SpanData;

    use super::super::recorded::tests::{ended_in, keep_spans};
    use super::*;

    /// Every test's own.
    fn client(trace_id: u128) -> Traceparent {
        Traceparent { trace_id, span_id: 7, is_sampled: true }
    }

    fn named<'a>(spans: &'a [SpanData], name: &str) -> &'a SpanData {
        spans.iter().find(|span| span.name == name).expect(name)
    }

    #[test]
    fn a_span_is_told_when_it_ends() {
        let trace = 0x51;
        keep_spans();
        let span = Span::begin("call", Some(client(trace)));
        assert!(span.is_recorded() && ended_in(trace).is_empty());
        drop(span);
        let ended = ended_in(trace);
        let [call] = ended.as_slice() else { panic!("{ended:?}") };
        assert_eq!((call.name.as_ref(), call.parent_span_id), ("call", SpanId::from(7)));
        assert_eq!((&call.span_kind, call.parent_span_is_remote), (&SpanKind::Server, true));
        assert!(call.end_time >= call.start_time && call.attributes.is_empty());
    }

    #[tokio::test]
    async fn parts_belong_to_the_span_that_waits_for_them() {
        let trace = 0x52;
        keep_spans();
        let call = |name: &'static str, part: &'static str| {
            let work = async move {
                tokio::task::yield_now().await;
                Span::add_properties(|| [("of", name.to_owned())]);
                tokio::task::yield_now().in_span(Span::child(part)).await;
                ended_in(trace).iter().any(|span| span.name == part)
            };
            work.in_span(Span::begin(name, Some(client(trace))))
        };
        // By turns, on one thread.
        let are_told = join(call("a", "part of a"), call("b", "part of b")).await;
        assert_eq!(are_told, (true, true), "a part ends with its future");
        let ended = ended_in(trace);
        assert_eq!(ended.len(), 4, "{ended:?}");
        for (name, part) in [("a", "part of a"), ("b", "part of b")] {
            let (call, part) = (named(&ended, name), named(&ended, part));
            assert_eq!(part.parent_span_id, call.span_context.span_id());
            assert_eq!((&part.span_kind, part.parent_span_is_remote), (&SpanKind::Internal, false));
            assert_eq!(call.attributes.len(), 1, "{call:?}");
            assert_eq!(call.attributes[0].value.as_str(), name);
        }
    }

    #[tokio::test]
    async fn a_future_takes_its_span_along_to_another_thread() {
        let trace = 0x53;
        keep_spans();
        let mut work = Box::pin(
            async {
                tokio::task::yield_now().await;
                drop(Span::child("part"));
            }
            .in_span(Span::begin("call", Some(client(trace)))),
        );
        assert!(futures::poll!(work.as_mut()).is_pending());
        assert!(!Span::child("outside").is_recorded(), "it is current only in a poll");
        let other = tokio::runtime::Builder::new_current_thread().build().unwrap();
        std::thread::spawn(move || other.block_on(work)).join().unwrap();
        let ended = ended_in(trace);
        assert_eq!(named(&ended, "part").parent_span_id, named(&ended, "call").span_context.span_id());
    }

    #[tokio::test]
    async fn a_span_of_none_is_asked_nothing_and_has_no_parts() {
        let work = async {
            Span::add_properties(|| -> [(&'static str, String); 1] { panic!("nobody wants to know") });
            Span::child("part").is_recorded()
        };
        assert!(!work.in_span(Span::noop()).await);
    }

    #[test]
    fn a_future_that_is_dropped_ends_its_span() {
        let trace = 0x54;
        keep_spans();
        let work = std::future::pending::<()>().in_span(Span::begin("call", Some(client(trace))));
        assert!(ended_in(trace).is_empty());
        drop(work);
        assert_eq!(ended_in(trace).len(), 1);
    }
}
