//! Suppresses repeated log lines: few WARN and ERROR lines per message and minute pass.
//!
//! A full disk or an unavailable store would otherwise cause a line per batch, partition or
//! attempt. Fields do not distinguish messages. After the minute a line reports how many were
//! suppressed. Audit lines always pass, and all lines pass while the filter enables DEBUG anywhere.
//! `object_store` logs every retry at INFO, with the pause in its message. These lines are limited
//! together. [`Refusals`] logs refused requests with a separate limit per kind of error.

use std::collections::{BTreeMap, HashMap};
use std::fmt::{self, Display};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use parking_lot::Mutex;
use tracing::callsite::Identifier;
use tracing::field::{Field, Visit};
use tracing::level_filters::LevelFilter;
use tracing::{Event, Level, Subscriber};
use tracing_subscriber::EnvFilter;
use tracing_subscriber::fmt::format::Writer;
use tracing_subscriber::fmt::{FmtContext, FormatEvent, FormatFields};
use tracing_subscriber::registry::LookupSpan;
use uniffle_base::LogLimiter;

use super::settings::AUDIT;

/// Lines of one kind that pass per [`INTERVAL`].
const LINES_MAX: u32 = 5;
const INTERVAL: Duration = Duration::from_secs(60);

/// Library whose INFO lines are limited too, whatever their message.
const CHATTY_LIBRARY: &str = "object_store";

/// Length of the part of a message that identifies it.
const MESSAGE_BYTES_MAX: usize = 200;

/// Maximum number of kinds. Further messages share one kind per log statement.
const KINDS_MAX: usize = 1000;

/// Refusals of one kind of error that are logged per [`INTERVAL`].
const REFUSALS_MAX: u32 = 3;
/// Maximum length of an error text, which may contain data of the client.
const TEXT_CHARS_MAX: usize = 300;

/// Limits the lines of each kind: one message of one log statement.
#[derive(Debug, Default)]
pub(super) struct Repeats {
    are_details_wanted: AtomicBool,
    kinds: Mutex<HashMap<(Identifier, String), RepeatedMessage>>,
}

#[derive(Debug)]
struct RepeatedMessage {
    limiter: LogLimiter,
    /// Lines suppressed in earlier minutes and not reported yet.
    unreported: u64,
}

impl Repeats {
    /// Passes all lines if `filter` enables DEBUG for any target.
    pub(super) fn follow(&self, filter: &EnvFilter) {
        let are_wanted = filter.max_level_hint().is_none_or(|level| level >= LevelFilter::DEBUG);
        self.are_details_wanted.store(are_wanted, Ordering::Relaxed);
    }

    fn lets_pass(&self, event: &Event<'_>) -> bool {
        let metadata = event.metadata();
        let is_exempt = [AUDIT, module_path!()].contains(&metadata.target());
        let is_chatty = *metadata.level() == Level::INFO && metadata.target().starts_with(CHATTY_LIBRARY);
        if *metadata.level() > Level::WARN && !is_chatty
            || is_exempt
            || self.are_details_wanted.load(Ordering::Relaxed)
        {
            return true;
        }
        let message = if is_chatty { metadata.target().to_owned() } else { message_of(event) };
        let mut key = (metadata.callsite(), message);
        let mut kinds = self.kinds.lock();
        if kinds.len() >= KINDS_MAX && !kinds.contains_key(&key) {
            key.1 = "(many messages)".to_owned();
        }
        let new = || RepeatedMessage { limiter: LogLimiter::new(LINES_MAX, INTERVAL), unreported: 0 };
        let kind = kinds.entry(key).or_insert_with(new);
        let events = kind.limiter.pass();
        kind.unreported += events.map_or(0, |events| events - 1);
        events.is_some()
    }

    /// Logs the number of suppressed lines of each kind whose minute is over. At the `end` of the
    /// log, includes the current minute.
    pub(super) fn log_held_back(&self, end: bool) {
        let take = |(key, kind): (&(Identifier, String), &mut RepeatedMessage)| {
            let lines = std::mem::take(&mut kind.unreported) + kind.limiter.settle(end);
            (lines > 0).then(|| (lines, key.1.clone()))
        };
        // Logging takes the lock again, so it must be released first.
        let held_back: Vec<_> = self.kinds.lock().iter_mut().filter_map(take).collect();
        for (lines, like) in held_back {
            tracing::warn!(
                lines,
                like,
                "repeated log lines were suppressed; set log.filter = \"debug\" to see each"
            );
        }
    }
}

fn message_of(event: &Event<'_>) -> String {
    #[derive(Default)]
    struct Message(String);
    impl Visit for Message {
        fn record_debug(&mut self, field: &Field, value: &dyn fmt::Debug) {
            if field.name() == "message" {
                self.0 = format!("{value:?}");
            }
        }
    }
    let mut message = Message::default();
    event.record(&mut message);
    message.0.truncate(message.0.floor_char_boundary(MESSAGE_BYTES_MAX));
    message.0
}

/// Logs requests refused for an error of the client, with a limit per kind of error. A suppressed
/// line is not formatted.
#[derive(Debug, Default)]
pub struct Refusals {
    kinds: Mutex<BTreeMap<&'static str, LogLimiter>>,
}

impl Refusals {
    /// Logs the refusal of a request on `listener` due to an error of this `kind`.
    pub fn note(&self, listener: &'static str, kind: &'static str, error: &dyn Display) {
        if let Some(held_back) = self.due(kind) {
            let error: String =
                error.to_string().chars().take(TEXT_CHARS_MAX).flat_map(char::escape_debug).collect();
            tracing::warn!(listener, kind, %error, held_back, "request refused");
        }
    }

    /// Returns the number of lines suppressed since the last one, or `None` to suppress this one.
    fn due(&self, kind: &'static str) -> Option<u64> {
        let mut kinds = self.kinds.lock();
        let limiter = kinds.entry(kind).or_insert_with(|| LogLimiter::new(REFUSALS_MAX, INTERVAL));
        limiter.pass().map(|events| events - 1)
    }
}

/// Formats the events that pass [`Repeats`], and skips the others.
#[derive(Debug)]
pub(super) struct RepeatLimiter<F> {
    pub(super) format: F,
    pub(super) repeats: Option<Arc<Repeats>>,
}

impl<S, N, F> FormatEvent<S, N> for RepeatLimiter<F>
where
    S: Subscriber + for<'lookup> LookupSpan<'lookup>,
    N: for<'writer> FormatFields<'writer> + 'static,
    F: FormatEvent<S, N>,
{
    fn format_event(
        &self,
        context: &FmtContext<'_, S, N>,
        writer: Writer<'_>,
        event: &Event<'_>,
    ) -> fmt::Result {
        match &self.repeats {
            Some(repeats) if !repeats.lets_pass(event) => Ok(()),
            _ => self.format.format_event(context, writer, event),
        }
    }
}

#[cfg(test)]
mod tests {
    use tracing::subscriber::with_default;
    use tracing_subscriber::layer::SubscriberExt as _;

    use super::super::writer::tests::CapturedText;
    use super::*;
    use uniffle_testkit::captured_log::CapturedLog;

    /// Runs `log` with a limited log at INFO. Returns the lines.
    fn logged(repeats: &Arc<Repeats>, log: impl FnOnce()) -> Vec<String> {
        let (written, repeats) = (CapturedText::default(), Some(Arc::clone(repeats)));
        let writer = written.clone();
        let layer = tracing_subscriber::fmt::layer().with_ansi(false).with_writer(move || writer.clone());
        let layer = layer.map_event_format(|format| RepeatLimiter { format, repeats });
        with_default(tracing_subscriber::registry().with(layer).with(LevelFilter::INFO), log);
        written.text().lines().map(str::to_owned).collect()
    }

    fn fail(times: usize) {
        (0..times).for_each(|disk| tracing::error!(disk, "write failed"));
    }

    #[tokio::test(start_paused = true)]
    async fn repeated_errors_make_few_lines_and_a_count() {
        let repeats = Arc::<Repeats>::default();
        let lines = logged(&repeats, || {
            fail(1000);
            tracing::warn!("another place");
            (0..10).for_each(|_| tracing::info!("no problem"));
            (0..10).for_each(|_| tracing::error!(target: AUDIT, "lost"));
            repeats.log_held_back(false);
        });
        let count = |text: &str| lines.iter().filter(|line| line.contains(text)).count();
        assert_eq!(count("write failed"), LINES_MAX as usize, "{lines:?}");
        assert_eq!((count("another place"), count("no problem"), count("lost")), (1, 10, 10), "{lines:?}");
        tokio::time::advance(INTERVAL).await;
        let lines = logged(&repeats, || {
            repeats.log_held_back(false);
            fail(1);
        });
        assert_eq!(lines.len(), 2, "{lines:?}");
        assert!(lines[0].contains("lines=995 like=\"write failed\""), "{lines:?}");
        assert!(lines[1].contains("write failed disk=0"), "{lines:?}");
    }

    #[test]
    fn other_messages_of_one_place_are_other_kinds_up_to_a_limit() {
        let lines = logged(&Arc::default(), || {
            (0..2 * KINDS_MAX).for_each(|key| tracing::warn!("key {key} is unknown"));
        });
        assert_eq!(lines.len(), KINDS_MAX + LINES_MAX as usize);
    }

    #[test]
    fn retries_of_the_object_store_are_limited_together() {
        let lines = logged(&Arc::default(), || {
            (0..100)
                .for_each(|ms| tracing::info!(target: "object_store::client::retry", "backing off {ms} ms"));
        });
        assert_eq!(lines.len(), LINES_MAX as usize);
    }

    #[test]
    fn all_lines_pass_while_details_are_wanted() {
        let repeats = Arc::<Repeats>::default();
        repeats.follow(&EnvFilter::new("info,uniffle_worker::flush=debug"));
        assert_eq!(logged(&repeats, || fail(100)).len(), 100);
        repeats.follow(&EnvFilter::new("info"));
        assert_eq!(logged(&repeats, || fail(100)).len(), LINES_MAX as usize);
    }

    #[tokio::test(start_paused = true)]
    async fn lines_held_back_at_the_end_are_counted() {
        let repeats = Arc::<Repeats>::default();
        let lines = logged(&repeats, || {
            fail(7);
            repeats.log_held_back(true);
            repeats.log_held_back(true);
        });
        assert_eq!(lines.len(), LINES_MAX as usize + 1, "{lines:?}");
        assert!(lines[5].contains("lines=2"), "{lines:?}");
    }

    #[test]
    fn refusals_are_limited_per_kind_of_error() {
        let refusals = Refusals::default();
        for _ in 0..REFUSALS_MAX {
            assert_eq!(refusals.due("a"), Some(0));
        }
        assert_eq!((refusals.due("a"), refusals.due("b")), (None, Some(0)));
    }

    #[test]
    fn refusal_stays_on_one_line() {
        let text = format!("bad\nWARN everything burns {}", "x".repeat(10_000));
        let log = CapturedLog::of_this_thread();
        Refusals::default().note("grpc", "a", &text);
        let lines = log.text();
        assert_eq!(lines.lines().count(), 1, "{lines}");
        assert!(
            lines.contains("WARN") && lines.contains("listener=\"grpc\"") && lines.len() < 600,
            "{lines}"
        );
    }
}
