//! Names of metrics. A table that is built several times has placeholders in braces in its names.

/// Values of the placeholders `{…}` in names and help texts.
pub type Fill<'a> = &'a [(&'a str, &'a str)];

/// Returns `text` with the placeholders replaced.
pub fn filled(text: &str, fill: Fill<'_>) -> String {
    fill.iter().fold(text.to_owned(), |text, (placeholder, value)| text.replace(placeholder, value))
}

/// Documentation of a metric.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Description {
    /// The exported name.
    pub name: String,
    /// `counter`, `gauge` or `histogram`.
    pub kind: &'static str,
    /// Names of the labels.
    pub labels: &'static [&'static str],
    /// The exported help text.
    pub help: String,
    /// Path of the module that declares it.
    pub module: &'static str,
}
