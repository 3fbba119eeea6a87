//! Fields of text lines: `name=value`, with values of several words in quotes.

use std::fmt;

use tracing::field::{Field, Visit};
use tracing_subscriber::field::{RecordFields, VisitOutput as _};
use tracing_subscriber::fmt::FormatFields;
use tracing_subscriber::fmt::format::{DefaultVisitor, Writer};

/// Formats fields so that each value ends at an unquoted space. Without it, only texts are quoted,
/// and errors and durations are not.
#[derive(Debug)]
pub(super) struct QuotedFields;

impl<'writer> FormatFields<'writer> for QuotedFields {
    fn format_fields<R: RecordFields>(&self, writer: Writer<'writer>, fields: R) -> fmt::Result {
        let mut visitor = QuotedVisitor(DefaultVisitor::new(writer, true));
        fields.record(&mut visitor);
        visitor.0.finish()
    }
}

struct QuotedVisitor<'writer>(DefaultVisitor<'writer>);

impl Visit for QuotedVisitor<'_> {
    fn record_str(&mut self, field: &Field, value: &str) {
        self.0.record_str(field, value);
    }

    fn record_debug(&mut self, field: &Field, value: &dyn fmt::Debug) {
        if field.name() == "message" {
            return self.0.record_debug(field, value);
        }
        let text = format!("{value:?}");
        match text.is_empty() || text.contains(|c: char| c.is_whitespace() || c.is_control()) {
            true => self.0.record_str(field, &text),
            false => self.0.record_debug(field, &format_args!("{text}")),
        }
    }
}

#[cfg(test)]
mod tests {
    use tracing::subscriber::with_default;
    use tracing_subscriber::layer::SubscriberExt as _;

    use super::super::writer::tests::CapturedText;
    use super::*;

    #[test]
    fn values_of_several_words_are_quoted() {
        let written = CapturedText::default();
        let writer = written.clone();
        let layer = tracing_subscriber::fmt::layer().with_ansi(false).with_writer(move || writer.clone());
        with_default(tracing_subscriber::registry().with(layer.fmt_fields(QuotedFields)), || {
            let error = std::io::Error::other("disk \"a\" is\nfull");
            let (text, none) = ("two words", "");
            tracing::warn!(%error, path = %"/data1", empty = %none, text, blocks = 3, paths = ?["/a"], "flush failed");
        });
        let line = written.text();
        let fields = r#"flush failed error="disk \"a\" is\nfull" path=/data1 empty="" text="two words" blocks=3 paths=["/a"]"#;
        assert!(line.trim_end().ends_with(fields), "{line}");
    }
}
