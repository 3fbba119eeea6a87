//! Names of a table that is built several times: what stands in braces is filled in.

/// What takes the place of `{…}` in names and help texts.
pub type Fill<'a> = &'a [(&'a str, &'a str)];

pub(super) fn filled(text: &str, fill: Fill<'_>) -> String {
    fill.iter().fold(text.to_owned(), |text, (placeholder, value)| text.replace(placeholder, value))
}
