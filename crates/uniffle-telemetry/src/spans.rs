//! Admission of root spans, and the count of lost spans.
//!
//! fastrace queues spans per thread and keeps the spans of a trace until its root ends, both
//! without a limit. The number of roots that have not left fastrace bounds their memory: every call
//! and flush is one root with at most two children. Nothing here waits.

use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};

use fastrace::Span;
use fastrace::collector::SpanContext;
#[cfg(any(test, feature = "otlp"))]
use fastrace::collector::{SpanId, SpanRecord};

/// Maximum number of roots that are open or have not left fastrace yet. A flush uses five entries
/// of a thread's queue (start, three spans, end). The queue has 10,240 entries; beyond that
/// fastrace would allocate.
const ROOTS_MAX: usize = 2048;

/// Property from which the OpenTelemetry reporter takes the kind of a span.
const KIND: &str = "span.kind";
/// Property that marks the parent as remote for the OpenTelemetry reporter.
const PARENT_IS_REMOTE: &str = "span.parent_span_is_remote";

/// The spans of this process. fastrace has one collector per process.
pub(super) static SPANS: Spans = Spans::new();

/// Admits roots while spans are exported, and counts lost spans.
#[derive(Debug)]
pub(super) struct Spans {
    are_exported: AtomicBool,
    roots: AtomicUsize,
    lost: AtomicU64,
}

impl Spans {
    const fn new() -> Self {
        Self { are_exported: AtomicBool::new(false), roots: AtomicUsize::new(0), lost: AtomicU64::new(0) }
    }

    /// Starts or stops admitting roots.
    #[cfg(any(feature = "otlp", test))]
    pub(super) fn set_exported(&self, are_exported: bool) {
        self.are_exported.store(are_exported, Ordering::Relaxed);
    }

    /// Begins a root whose parent is a client's span.
    pub(super) fn begin_below(&self, name: &'static str, parent: SpanContext) -> Span {
        let span = self.begin(name, parent);
        span.with_properties(|| [(KIND, "server"), (PARENT_IS_REMOTE, "true")])
    }

    /// Begins a root. Returns a no-op span if nothing is exported, or if too many roots are open.
    /// The latter counts as lost.
    pub(super) fn begin(&self, name: &'static str, parent: SpanContext) -> Span {
        if !self.are_exported.load(Ordering::Relaxed) {
            return Span::noop();
        }
        let admit = |roots| (roots < ROOTS_MAX).then_some(roots + 1);
        match self.roots.fetch_update(Ordering::Relaxed, Ordering::Relaxed, admit) {
            Ok(_) => Span::root(name, parent),
            Err(_) => {
                self.lose(1);
                Span::noop()
            }
        }
    }

    /// Stops counting the roots among `records`, which have left fastrace, as open.
    #[cfg(any(feature = "otlp", test))]
    pub(super) fn release(&self, records: &[SpanRecord]) {
        let roots = records.iter().filter(|record| is_root(record)).count();
        let release = |open: usize| Some(open.saturating_sub(roots));
        let _ = self.roots.fetch_update(Ordering::Relaxed, Ordering::Relaxed, release);
    }

    /// Counts lost spans.
    pub(super) fn lose(&self, spans: u64) {
        self.lost.fetch_add(spans, Ordering::Relaxed);
    }

    /// Returns the number of spans lost since the process started.
    pub(super) fn lost(&self) -> u64 {
        self.lost.load(Ordering::Relaxed)
    }
}

#[cfg(any(feature = "otlp", test))]
fn is_root(record: &SpanRecord) -> bool {
    record.parent_id == SpanId::default() || record.properties.iter().any(|(key, _)| key == PARENT_IS_REMOTE)
}

#[cfg(all(test, feature = "otlp"))]
pub(super) mod tests {
    use super::*;

    /// Returns a separate instance that other tests do not change.
    pub(crate) fn leaked() -> &'static Spans {
        let spans = Box::leak(Box::new(Spans::new()));
        spans.set_exported(true);
        spans
    }

    pub(crate) fn record(name: &'static str, parent_id: SpanId) -> SpanRecord {
        SpanRecord { name: name.into(), parent_id, ..SpanRecord::default() }
    }

    fn is_recorded(span: &Span) -> bool {
        SpanContext::from_span(span).is_some()
    }

    #[test]
    fn roots_beyond_the_limit_are_noops_and_counted_as_lost() {
        let spans = leaked();
        let open: Vec<Span> = (0..ROOTS_MAX).map(|_| spans.begin("call", SpanContext::random())).collect();
        assert!(open.iter().all(is_recorded));
        assert!(!is_recorded(&spans.begin("call", SpanContext::random())));
        assert_eq!(spans.lost(), 1);
        let child = record("part", SpanId(7));
        spans.release(std::slice::from_ref(&child));
        assert!(
            !is_recorded(&spans.begin("call", SpanContext::random())),
            "a released child must not make room"
        );
        spans.release(&[record("call", SpanId::default()), child]);
        assert!(is_recorded(&spans.begin("call", SpanContext::random())));
        assert_eq!(spans.lost(), 2);
    }

    #[test]
    fn root_below_a_client_span_releases_its_slot() {
        let client = SpanId(7);
        let properties = vec![(PARENT_IS_REMOTE.into(), "true".into())];
        assert!(is_root(&SpanRecord { properties, ..record("call", client) }));
        assert!(!is_root(&record("call", client)));
    }

    #[test]
    fn nothing_is_begun_before_spans_are_exported() {
        let spans = Spans::new();
        assert!(!is_recorded(&spans.begin("call", SpanContext::random())));
        assert_eq!((spans.lost(), spans.roots.into_inner()), (0, 0));
    }
}
