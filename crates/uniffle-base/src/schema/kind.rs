//! Kinds of configuration values: how a value is parsed, printed and described.
//!
//! Invariant: [`Kind::read`] accepts the output of [`Kind::print`] and returns the same value.
//! Otherwise a printed configuration could not be used as a file. Secrets are never printed.

use std::collections::BTreeMap;
use std::fmt::{self, Display};
use std::ops::RangeInclusive;
use std::path::{Component, Path, PathBuf};
use std::time::Duration;

use bytesize::ByteSize;
use toml::{Table, Value};

use super::redact;

/// Maximum number of rejected list entries per reason in an error text, and maximum length of each.
const ENTRIES_MAX: usize = 10;
const ENTRY_CHARS_MAX: usize = 60;

/// `1 << 10`
pub const KIB: u64 = 1 << 10;
/// `1 << 20`
pub const MIB: u64 = 1 << 20;
/// `1 << 30`
pub const GIB: u64 = 1 << 30;
/// `1 << 40`
pub const TIB: u64 = 1 << 40;

pub const SECOND: Duration = Duration::from_secs(1);
pub const HOUR: Duration = Duration::from_secs(3600);
pub const DAY: Duration = Duration::from_secs(86_400);

type Read<T> = Box<dyn Fn(&Value) -> Result<T, String>>;
type Print<T> = Box<dyn Fn(&T) -> Option<Value>>;

/// Parser, printer and description of the values of one type and range.
pub struct Kind<T> {
    read: Read<T>,
    print: Print<T>,
    bounds: String,
    is_secret: bool,
}

impl<T> fmt::Debug for Kind<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Kind").field("bounds", &self.bounds).finish_non_exhaustive()
    }
}

impl<T: 'static> Kind<T> {
    fn new(
        bounds: impl Into<String>,
        read: impl Fn(&Value) -> Result<T, String> + 'static,
        print: impl Fn(&T) -> Value + 'static,
    ) -> Self {
        let print = move |value: &T| Some(print(value));
        Self { read: Box::new(read), print: Box::new(print), bounds: bounds.into(), is_secret: false }
    }

    /// Converts `value`.
    ///
    /// # Errors
    /// A description of the allowed values.
    pub fn read(&self, value: &Value) -> Result<T, String> {
        (self.read)(value)
    }

    /// Returns the value as written in a file, or `None` if it is unset or a secret.
    pub fn print(&self, value: &T) -> Option<Value> {
        (self.print)(value)
    }

    /// Returns a short description of the allowed values.
    pub fn bounds(&self) -> &str {
        &self.bounds
    }

    /// Returns whether values must never be shown, including invalid ones.
    pub fn is_secret(&self) -> bool {
        self.is_secret
    }
}

/// An integer.
pub fn count<T>(range: RangeInclusive<T>) -> Kind<T>
where
    T: Copy + PartialOrd + Display + TryFrom<i64> + TryInto<i64> + 'static,
{
    let bounds = format!("{} to {}", range.start(), range.end());
    let allowed = format!("an integer from {bounds}");
    let read = move |value: &Value| {
        let number = value.as_integer().and_then(|number| T::try_from(number).ok());
        number.filter(|number| range.contains(number)).ok_or_else(|| allowed.clone())
    };
    Kind::new(bounds, read, |number| integer(*number))
}

/// A port; 0 lets the kernel choose.
pub fn port() -> Kind<u16> {
    let read = |value: &Value| {
        let number = value.as_integer().and_then(|number| u16::try_from(number).ok());
        number.ok_or_else(|| "a port from 1 to 65535, or 0 for any free one".to_owned())
    };
    Kind::new("a port, or 0 for any free one", read, |port| integer(*port))
}

/// A number of bytes: an integer, or text such as "10G" (10 · 10^9) or "10GiB" (10 · 2^30).
pub fn size<T>(range: RangeInclusive<u64>) -> Kind<T>
where
    T: Copy + TryFrom<u64> + TryInto<u64> + 'static,
{
    let bounds = format!("{} to {}", size_text(*range.start()), size_text(*range.end()));
    let allowed =
        format!("a size from {bounds}, such as \"512M\", \"10G\" or \"10GiB\", or bytes as an integer");
    let read = move |value: &Value| {
        let bytes = match value {
            Value::Integer(number) => u64::try_from(*number).ok(),
            Value::String(text) => text.trim().parse::<ByteSize>().ok().map(|size| size.as_u64()),
            _ => None,
        };
        let bytes = bytes.filter(|bytes| range.contains(bytes));
        bytes.and_then(|bytes| T::try_from(bytes).ok()).ok_or_else(|| allowed.clone())
    };
    Kind::new(bounds, read, |bytes| Value::from(size_text((*bytes).try_into().unwrap_or(u64::MAX))))
}

/// A duration: an integer in seconds, or text such as "90s" or "5m".
pub fn seconds(range: RangeInclusive<Duration>) -> Kind<Duration> {
    duration(range, 1, "seconds")
}

/// A duration: an integer in minutes, or text such as "90s" or "5m".
pub fn minutes(range: RangeInclusive<Duration>) -> Kind<Duration> {
    duration(range, 60, "minutes")
}

fn duration(range: RangeInclusive<Duration>, unit_secs: u64, unit: &str) -> Kind<Duration> {
    let text = |duration: Duration| humantime::format_duration(duration).to_string();
    let bounds = format!("{} to {}", text(*range.start()), text(*range.end()));
    let allowed = format!("a duration from {bounds}, as an integer in {unit} or as text such as \"90s\"");
    let read = move |value: &Value| {
        let duration = match value {
            Value::Integer(number) => u64::try_from(*number)
                .ok()
                .and_then(|number| number.checked_mul(unit_secs))
                .map(Duration::from_secs),
            Value::String(text) => humantime::parse_duration(text.trim()).ok(),
            _ => None,
        };
        duration.filter(|duration| range.contains(duration)).ok_or_else(|| allowed.clone())
    };
    // Whole units as an integer, everything else as text.
    let print = move |duration: &Duration| {
        let is_whole = duration.subsec_nanos() == 0 && duration.as_secs().is_multiple_of(unit_secs);
        if is_whole { integer(duration.as_secs() / unit_secs) } else { Value::from(text(*duration)) }
    };
    Kind::new(bounds, read, print)
}

/// A ratio within 0..=1.
pub fn ratio() -> Kind<f64> {
    let read = |value: &Value| {
        let number = match value {
            Value::Float(number) => Some(*number),
            Value::Integer(0) => Some(0.0),
            Value::Integer(1) => Some(1.0),
            _ => None,
        };
        let number = number.filter(|number| (0.0..=1.0).contains(number));
        number.ok_or_else(|| "a ratio from 0.0 to 1.0".to_owned())
    };
    Kind::new("0.0 to 1.0", read, |ratio| Value::from(*ratio))
}

/// `true` or `false`.
pub fn flag() -> Kind<bool> {
    let read = |value: &Value| value.as_bool().ok_or_else(|| "true or false".to_owned());
    Kind::new("true or false", read, |flag| Value::from(*flag))
}

/// An enum whose variants are configuration words (see `words!`).
pub trait Word: Copy + 'static {
    /// Every variant.
    const ALL: &'static [Self];

    /// Returns the word of this variant.
    fn as_str(self) -> &'static str;
}

/// A word of `T`, in upper or lower case.
pub fn word<T: Word>() -> Kind<T> {
    let words: Vec<&str> = T::ALL.iter().map(|word| word.as_str()).collect();
    let bounds = match words.split_last() {
        Some((last, others)) if !others.is_empty() => format!("{} or {last}", others.join(", ")),
        _ => words.concat(),
    };
    let allowed = bounds.clone();
    let convert = move |text: &str| {
        let found = T::ALL.iter().copied().find(|word| word.as_str().eq_ignore_ascii_case(text));
        found.ok_or_else(|| allowed.clone())
    };
    text(&bounds, convert, |word| word.as_str().to_owned())
}

/// Text that `convert` parses. Its error describes the allowed values.
pub fn text<T: 'static>(
    bounds: &str,
    convert: impl Fn(&str) -> Result<T, String> + 'static,
    print: impl Fn(&T) -> String + 'static,
) -> Kind<T> {
    let read = move |value: &Value| match value {
        Value::String(text) => convert(text),
        _ => Err("quoted text".to_owned()),
    };
    Kind::new(bounds, read, move |value| Value::from(print(value)))
}

/// Text that `convert` parses, printed with [`Display`].
pub fn parsed<T: Display + 'static>(
    bounds: &str,
    convert: impl Fn(&str) -> Result<T, String> + 'static,
) -> Kind<T> {
    text(bounds, convert, T::to_string)
}

/// Text that is never printed.
pub fn secret<T: 'static>(bounds: &str, convert: impl Fn(&str) -> Result<T, String> + 'static) -> Kind<T> {
    let kind = text(bounds, convert, |_| String::new());
    Kind { print: Box::new(|_| None), is_secret: true, ..kind }
}

/// An IP address.
pub fn ip_address() -> Kind<std::net::IpAddr> {
    let allowed = "an IP address, such as 0.0.0.0, 127.0.0.1 or ::";
    parsed("an IP address", move |text| text.parse().map_err(|_| allowed.to_owned()))
}

/// An absolute path without NUL and `..`. Redundant separators and `.` are removed.
pub fn path() -> Kind<PathBuf> {
    text("an absolute path", absolute_path, |path| path.display().to_string())
}

/// A value of `inner`, or unset.
pub fn optional<T: 'static>(inner: Kind<T>) -> Kind<Option<T>> {
    let Kind { read, print, bounds, is_secret } = inner;
    Kind {
        read: Box::new(move |value| read(value).map(Some)),
        print: Box::new(move |value| value.as_ref().and_then(&print)),
        bounds,
        is_secret,
    }
}

/// A list of at most `max` texts, or one text with comma-separated entries. `inner` must not be a
/// secret.
pub fn list<T: 'static>(max: usize, inner: Kind<T>) -> Kind<Vec<T>> {
    let bounds = format!("at most {max}: {}", inner.bounds);
    debug_assert!(!inner.is_secret, "errors would show rejected entries");
    let Kind { read: read_one, print: print_one, .. } = inner;
    let read = move |value: &Value| {
        let not_texts = || "a list of quoted texts".to_owned();
        let texts: Vec<&str> = match value {
            Value::String(text) => text.split(',').map(str::trim).filter(|part| !part.is_empty()).collect(),
            Value::Array(values) => {
                values.iter().map(Value::as_str).collect::<Option<_>>().ok_or_else(not_texts)?
            }
            _ => return Err(not_texts()),
        };
        if texts.len() > max {
            return Err(format!("at most {max} entries"));
        }
        let mut refused = Refused::default();
        let read = |text: &str| match read_one(&Value::from(text)) {
            Ok(value) => Some(value),
            Err(allowed) => refused.add(allowed, text),
        };
        let values = texts.into_iter().filter_map(read).collect();
        refused.else_take(values)
    };
    Kind::new(bounds, read, move |values: &Vec<T>| {
        Value::Array(values.iter().filter_map(&print_one).collect())
    })
}

/// A table of at most `max` names and texts. Numbers and booleans are converted to text.
pub fn table(max: usize) -> Kind<BTreeMap<String, String>> {
    let read = move |value: &Value| {
        let table = value.as_table().ok_or_else(|| "a table of texts by name".to_owned())?;
        if table.len() > max {
            return Err(format!("at most {max} entries"));
        }
        table.iter().map(|(name, value)| Ok((name.clone(), scalar_text(name, value)?))).collect()
    };
    let entry = |(name, text): (&String, &String)| (name.clone(), Value::from(text.as_str()));
    let print = move |table: &BTreeMap<String, String>| Value::Table(table.iter().map(entry).collect());
    Kind::new(format!("at most {max} entries"), read, print)
}

/// Rejected entries of a list, grouped by the description of the allowed values.
#[derive(Default)]
struct Refused(Vec<(String, Vec<String>)>);

impl Refused {
    /// Adds an entry. Always returns `None`.
    fn add<T>(&mut self, allowed: String, entry: &str) -> Option<T> {
        let shown: String = redact::text(entry).chars().take(ENTRY_CHARS_MAX).collect();
        let shown = format!("{shown:?}");
        match self.0.iter_mut().find(|(known, _)| *known == allowed) {
            Some((_, entries)) => entries.push(shown),
            None => self.0.push((allowed, vec![shown])),
        }
        None
    }

    fn else_take<T>(self, values: T) -> Result<T, String> {
        if self.0.is_empty() {
            return Ok(values);
        }
        let all = |(allowed, entries): (String, Vec<String>)| {
            let more = entries.len().saturating_sub(ENTRIES_MAX);
            let named = entries.into_iter().take(ENTRIES_MAX).collect::<Vec<_>>().join(", ");
            let more = if more == 0 { String::new() } else { format!(" and {more} more") };
            format!("{allowed}, not {named}{more}")
        };
        Err(self.0.into_iter().map(all).collect::<Vec<_>>().join("; "))
    }
}

/// A list of at most `max` tables. `convert` returns all problems of a table it rejects.
pub fn tables<T: 'static>(
    max: usize,
    bounds: &str,
    convert: impl Fn(&Table) -> Result<T, Vec<String>> + 'static,
    print: impl Fn(&T) -> Table + 'static,
) -> Kind<Vec<T>> {
    let allowed = bounds.to_owned();
    let read = move |value: &Value| {
        let entries = value.as_array().ok_or_else(|| format!("a list of tables: {allowed}"))?;
        if entries.len() > max {
            return Err(format!("at most {max} entries"));
        }
        let (mut values, mut refused) = (Vec::new(), Vec::new());
        for (number, entry) in (1..).zip(entries) {
            let read = entry.as_table().ok_or_else(|| vec!["not a table".to_owned()]).and_then(&convert);
            match read {
                Ok(value) => values.push(value),
                Err(problems) => refused.push(format!("entry {number}: {}", problems.join(", "))),
            }
        }
        if refused.is_empty() { Ok(values) } else { Err(format!("{allowed}; {}", refused.join("; "))) }
    };
    let print = move |values: &Vec<T>| Value::Array(values.iter().map(&print).map(Value::Table).collect());
    Kind::new(format!("at most {max}: {bounds}"), read, print)
}

fn scalar_text(name: &str, value: &Value) -> Result<String, String> {
    match value {
        Value::String(text) => Ok(text.clone()),
        Value::Integer(_) | Value::Float(_) | Value::Boolean(_) => Ok(value.to_string()),
        // `a.b.c = 1` without quotes is nested tables in TOML; the user meant a dotted client key.
        Value::Table(_) => {
            Err(format!("a table with quotes around whole keys, as in \"{name}.…\" = \"value\""))
        }
        Value::Datetime(_) | Value::Array(_) => Err("a table of texts, numbers or booleans".to_owned()),
    }
}

/// Converts a number to a TOML integer. Bounds of the keys keep numbers below 2^63.
fn integer(number: impl TryInto<i64>) -> Value {
    Value::Integer(number.try_into().unwrap_or(i64::MAX))
}

fn absolute_path(text: &str) -> Result<PathBuf, String> {
    let path = PathBuf::from(text);
    if !is_plain_absolute(&path) {
        return Err("absolute paths without '..' and NUL".to_owned());
    }
    Ok(path.components().collect())
}

/// Returns whether `path` is absolute, valid UTF-8, and contains neither `..` nor NUL.
pub(super) fn is_plain_absolute(path: &Path) -> bool {
    let climbs = path.components().any(|part| part == Component::ParentDir);
    let is_text = path.to_str().is_some_and(|text| !text.contains('\0'));
    path.is_absolute() && !climbs && is_text
}

/// Formats `bytes` in the first exact unit of `UNITS`, so that the text parses to the same number.
pub fn size_text(bytes: u64) -> String {
    const UNITS: [(u64, &str); 8] = [
        (TIB, "TiB"),
        (GIB, "GiB"),
        (MIB, "MiB"),
        (1_000_000_000_000, "TB"),
        (1_000_000_000, "GB"),
        (1_000_000, "MB"),
        (KIB, "KiB"),
        (1, "B"),
    ];
    let exact = UNITS.iter().find(|(unit, _)| bytes >= *unit && bytes.is_multiple_of(*unit));
    exact.map_or_else(|| "0B".to_owned(), |(unit, name)| format!("{}{name}", bytes / unit))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read<T: 'static>(kind: &Kind<T>, text: &str) -> Result<T, String> {
        let table: Table = format!("x = {text}").parse().unwrap();
        kind.read(&table["x"])
    }

    #[test]
    fn sizes_are_integers_or_text() {
        let kind = size::<u64>(1..=1 << 40);
        assert_eq!(read(&kind, "\"10G\""), Ok(10_000_000_000));
        assert_eq!(read(&kind, "\"10GiB\""), Ok(10 << 30));
        assert_eq!(read(&kind, "\" 512 M \""), Ok(512_000_000));
        assert_eq!(read(&kind, "4096"), Ok(4096));
        for bad in ["-1", "0", "\"-1G\"", "\"ten\"", "\"99999999999999999999999G\"", "true", "\"\"", "1.5"] {
            assert!(read(&kind, bad).is_err(), "{bad}");
        }
        assert!(read(&size::<u32>(1..=1 << 40), "\"8GiB\"").is_err());
    }

    #[test]
    fn shown_sizes_parse_back() {
        for bytes in [0, 1, 1023, 1024, 16 << 20, 128_000_000, 1_000_000_000, (16 << 30) + 4096, u64::MAX] {
            let text = size_text(bytes);
            assert_eq!(text.parse::<ByteSize>().unwrap().as_u64(), bytes, "{text}");
        }
    }

    #[test]
    fn durations_are_integers_in_their_unit_or_text() {
        let (in_seconds, in_minutes) = (seconds(SECOND..=HOUR), minutes(SECOND..=HOUR));
        assert_eq!(read(&in_seconds, "30"), Ok(30 * SECOND));
        assert_eq!(read(&in_minutes, "5"), Ok(300 * SECOND));
        assert_eq!(read(&in_minutes, "\"2m 5s\""), Ok(125 * SECOND));
        for bad in ["0", "-5", "3601", "9223372036854775807", "\"soon\"", "1.5", "\"0s\""] {
            assert!(read(&in_minutes, bad).is_err(), "{bad}");
        }
        assert_eq!(in_minutes.print(&(90 * SECOND)), Some(Value::from("1m 30s")));
    }

    #[test]
    fn ratios_are_within_zero_and_one() {
        for (text, is_ok) in
            [("0.5", true), ("1", true), ("0", true), ("1.01", false), ("-0.1", false), ("nan", false)]
        {
            assert_eq!(read(&ratio(), text).is_ok(), is_ok, "{text}");
        }
    }

    #[test]
    fn paths_are_absolute_and_do_not_climb() {
        assert_eq!(absolute_path("/data//a/./b/").unwrap(), PathBuf::from("/data/a/b"));
        for bad in ["data", "", "./x", "/a/../b", "/a\0b"] {
            assert!(absolute_path(bad).is_err(), "{bad:?}");
        }
    }

    #[test]
    fn unquoted_dotted_client_keys_are_explained() {
        assert!(read(&table(10), "{ rss.a = 1 }").unwrap_err().contains("quotes around"));
    }

    #[test]
    fn list_may_be_a_comma_separated_string() {
        let kind = list(2, path());
        assert_eq!(read(&kind, "\"/a, /b\"").unwrap().len(), 2);
        assert_eq!(read(&kind, "[\"/a\", \"/b\", \"/c\"]").unwrap_err(), "at most 2 entries");
        assert_eq!(read(&kind, "[1]").unwrap_err(), "a list of quoted texts");
    }

    #[test]
    fn all_bad_entries_of_a_list_are_named() {
        let kind = list(64, path());
        let refused = read(&kind, "[\"/a\", \"b\", \"../c\"]").unwrap_err();
        assert_eq!(refused, "absolute paths without '..' and NUL, not \"b\", \"../c\"");
        let both = list(3, text("x", |text| Err::<(), _>(format!("no {text}")), |()| String::new()));
        assert_eq!(read(&both, "\"a,b\"").unwrap_err(), "no a, not \"a\"; no b, not \"b\"");
        let secret = read(&kind, "[\"s3://user:pass@host\"]").unwrap_err();
        assert!(secret.contains("host") && !secret.contains("pass"), "{secret}");
        let many: Vec<String> = (0..12).map(|n| format!("\"{}\"", n.to_string().repeat(1000))).collect();
        let refused = read(&kind, &format!("[{}]", many.join(","))).unwrap_err();
        assert!(refused.ends_with(" and 2 more") && refused.len() < 800, "{refused}");
    }

    #[test]
    fn all_problems_of_bad_tables_are_named() {
        let convert = |table: &Table| match table.len() {
            1 => Ok(()),
            _ => Err(vec!["one thing".to_owned(), "another".to_owned()]),
        };
        let kind = tables(9, "tables of one", convert, |()| Table::new());
        assert_eq!(read(&kind, "[{ a = 1 }, { b = 1 }]").unwrap().len(), 2);
        let refused = read(&kind, "[{ a = 1 }, {}, 7]").unwrap_err();
        assert_eq!(refused, "tables of one; entry 2: one thing, another; entry 3: not a table");
    }

    #[test]
    fn secrets_are_not_printed() {
        let kind = optional(secret("text", |text| Ok(text.to_owned())));
        assert!(kind.is_secret() && kind.print(&Some("x".to_owned())).is_none());
    }
}
