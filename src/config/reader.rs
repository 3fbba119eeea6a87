//! Typed values out of sorted keys, collecting every problem instead of stopping at the first.
//!
//! Each method takes one key: absent gives the default, unusable gives the default *and* a problem, so that the
//! caller can go on and find the next one. Why not serde: a derived `Deserialize` ends at the first error, and
//! `validate()` must report all of them at once.

use std::collections::BTreeMap;
use std::fmt::Display;
use std::ops::RangeInclusive;
use std::path::{Component, Path, PathBuf};
use std::time::Duration;

use bytesize::ByteSize;
use toml::Value;

use super::Problem;

/// Unit of a bare integer where a duration is expected.
#[derive(Debug, Clone, Copy)]
pub(super) enum Unit {
    Seconds,
    Minutes,
}

/// The values not yet taken, and the problems met so far.
#[derive(Debug)]
pub(super) struct Reader {
    pub(super) values: BTreeMap<&'static str, Value>,
    pub(super) problems: Vec<Problem>,
}

impl Reader {
    /// Takes `key` and converts it; `convert` says what is allowed when it cannot.
    fn take<T>(&mut self, key: &str, convert: impl FnOnce(&Value) -> Result<T, String>) -> Option<T> {
        let value = self.values.remove(key)?;
        match convert(&value) {
            Ok(typed) => Some(typed),
            Err(allowed) => {
                self.problems.push(Problem::new(key, &value, &allowed));
                None
            }
        }
    }

    /// Notes a problem between several keys, shown at `key`.
    pub(super) fn refuse(&mut self, key: &str, value: impl Display, allowed: &str) {
        self.problems.push(Problem {
            key: key.to_owned(),
            value: Some(value.to_string()),
            allowed: allowed.to_owned(),
        });
    }

    /// An integer within `range`.
    pub(super) fn integer(&mut self, key: &str, default: u64, range: RangeInclusive<u64>) -> u64 {
        let (min, max) = (*range.start(), *range.end());
        let convert = |value: &Value| {
            let number = value.as_integer().and_then(|number| u64::try_from(number).ok());
            number
                .filter(|number| range.contains(number))
                .ok_or_else(|| format!("an integer from {min} to {max}"))
        };
        self.take(key, convert).unwrap_or(default)
    }

    /// An integer within `range`, for a count the rest of the program holds in a `usize`.
    pub(super) fn count(&mut self, key: &str, default: usize, range: RangeInclusive<usize>) -> usize {
        // usize is at most 64 bits wide on every platform Rust has, so both directions hold for values in range.
        let wide = |number: usize| u64::try_from(number).unwrap_or(u64::MAX);
        let number = self.integer(key, wide(default), wide(*range.start())..=wide(*range.end()));
        usize::try_from(number).unwrap_or(default)
    }

    /// A port; 0 lets the kernel choose.
    pub(super) fn port(&mut self, key: &str) -> Option<u16> {
        self.take(key, |value| {
            let number = value.as_integer().and_then(|number| u16::try_from(number).ok());
            number.ok_or_else(|| "a port from 1 to 65535, or 0 for any free one".to_owned())
        })
    }

    /// A number of bytes within `range`: an integer, or text such as "10G" (10^9) or "10GiB" (2^30).
    pub(super) fn size(&mut self, key: &str, default: u64, range: RangeInclusive<u64>) -> u64 {
        self.optional_size(key, range).unwrap_or(default)
    }

    /// As [`Reader::size`], for a bound that need not be set.
    pub(super) fn optional_size(&mut self, key: &str, range: RangeInclusive<u64>) -> Option<u64> {
        let convert = |value: &Value| {
            let bytes = match value {
                Value::Integer(number) => u64::try_from(*number).ok(),
                Value::String(text) => text.trim().parse::<ByteSize>().ok().map(|size| size.as_u64()),
                _ => None,
            };
            bytes.filter(|bytes| range.contains(bytes)).ok_or_else(|| {
                let (min, max) = (size_text(*range.start()), size_text(*range.end()));
                format!("a size from {min} to {max}, such as \"512M\", \"10G\" or \"10GiB\", or bytes as an integer")
            })
        };
        self.take(key, convert)
    }

    /// A duration within `range`: an integer in `unit`, or text such as "90s" or "5m".
    pub(super) fn duration(
        &mut self,
        key: &str,
        default: Duration,
        range: RangeInclusive<Duration>,
        unit: Unit,
    ) -> Duration {
        let (factor, unit_name) = match unit {
            Unit::Seconds => (1, "seconds"),
            Unit::Minutes => (60, "minutes"),
        };
        let convert = |value: &Value| {
            let duration = match value {
                Value::Integer(number) => u64::try_from(*number)
                    .ok()
                    .and_then(|number| number.checked_mul(factor))
                    .map(Duration::from_secs),
                Value::String(text) => humantime::parse_duration(text.trim()).ok(),
                _ => None,
            };
            duration.filter(|duration| range.contains(duration)).ok_or_else(|| {
                let (min, max) =
                    (humantime::format_duration(*range.start()), humantime::format_duration(*range.end()));
                format!(
                    "a duration from {min} to {max}, as an integer in {unit_name} or as text such as \"90s\""
                )
            })
        };
        self.take(key, convert).unwrap_or(default)
    }

    /// A ratio within 0..=1.
    pub(super) fn ratio(&mut self, key: &str, default: f64) -> f64 {
        let convert = |value: &Value| {
            let number = match value {
                Value::Float(number) => Some(*number),
                Value::Integer(0) => Some(0.0),
                Value::Integer(1) => Some(1.0),
                _ => None,
            };
            number
                .filter(|number| (0.0..=1.0).contains(number))
                .ok_or_else(|| "a ratio from 0.0 to 1.0".to_owned())
        };
        self.take(key, convert).unwrap_or(default)
    }

    /// `true` or `false`.
    pub(super) fn boolean(&mut self, key: &str, default: bool) -> bool {
        self.take(key, |value| value.as_bool().ok_or_else(|| "true or false".to_owned())).unwrap_or(default)
    }

    /// Text that `convert` understands.
    pub(super) fn text<T>(
        &mut self,
        key: &str,
        convert: impl FnOnce(&str) -> Result<T, String>,
    ) -> Option<T> {
        self.take(key, |value| match value {
            Value::String(text) => convert(text),
            _ => Err("text in quotes".to_owned()),
        })
    }

    /// A list of texts, each converted; at most `max`. One text without brackets is a list of its comma-separated parts.
    pub(super) fn texts<T>(
        &mut self,
        key: &str,
        max: usize,
        convert: impl Fn(&str) -> Result<T, String>,
    ) -> Option<Vec<T>> {
        self.take(key, |value| {
            let texts: Vec<&str> = match value {
                Value::String(text) => {
                    text.split(',').map(str::trim).filter(|part| !part.is_empty()).collect()
                }
                Value::Array(values) => {
                    let texts: Option<Vec<&str>> = values.iter().map(Value::as_str).collect();
                    texts.ok_or_else(|| "a list of texts in quotes".to_owned())?
                }
                _ => return Err("a list of texts in quotes".to_owned()),
            };
            if texts.len() > max {
                return Err(format!("at most {max} entries"));
            }
            texts.into_iter().map(&convert).collect()
        })
    }

    /// A list of absolute paths.
    pub(super) fn paths(&mut self, key: &str, max: usize) -> Option<Vec<PathBuf>> {
        self.texts(key, max, absolute_path)
    }

    /// A table of names to texts; numbers and booleans are taken as their text.
    pub(super) fn text_table(&mut self, key: &str, max: usize) -> BTreeMap<String, String> {
        let convert = |value: &Value| {
            let table = value.as_table().ok_or_else(|| "a table of names to texts".to_owned())?;
            if table.len() > max {
                return Err(format!("at most {max} entries"));
            }
            table.iter().map(|(name, value)| Ok((name.clone(), scalar_text(name, value)?))).collect()
        };
        self.take(key, convert).unwrap_or_default()
    }
}

/// Accepts an absolute path without NUL and without `..`, in its shortest spelling.
pub(super) fn absolute_path(text: &str) -> Result<PathBuf, String> {
    let path = PathBuf::from(text);
    if !is_plain_absolute(&path) {
        return Err("absolute paths without '..'".to_owned());
    }
    Ok(path.components().collect())
}

/// True for an absolute path without `..`, NUL or text that is not UTF-8.
pub(super) fn is_plain_absolute(path: &Path) -> bool {
    let climbs = path.components().any(|part| part == Component::ParentDir);
    let printable = path.to_str().is_some_and(|text| !text.contains('\0'));
    path.is_absolute() && !climbs && printable
}

fn scalar_text(name: &str, value: &Value) -> Result<String, String> {
    match value {
        Value::String(text) => Ok(text.clone()),
        Value::Integer(_) | Value::Float(_) | Value::Boolean(_) => Ok(value.to_string()),
        // `a.b.c = 1` without quotes is nested tables in TOML, where a client key with dots was meant.
        Value::Table(_) => Err(format!("quotes around the whole key, as in \"{name}.…\" = \"value\"")),
        Value::Datetime(_) | Value::Array(_) => Err("texts, numbers or booleans as values".to_owned()),
    }
}

/// `bytes` in the largest binary unit that shows it exactly; parses back to the same number.
pub(super) fn size_text(bytes: u64) -> String {
    const UNITS: [(u64, &str); 4] = [(1 << 40, "TiB"), (1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB")];
    let exact = UNITS.iter().find(|(unit, _)| bytes >= *unit && bytes.is_multiple_of(*unit));
    exact.map_or_else(|| format!("{bytes}B"), |(unit, name)| format!("{}{name}", bytes / unit))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn reader(text: &str) -> Reader {
        let table: toml::Table = format!("x = {text}").parse().unwrap();
        Reader { values: table.into_iter().map(|(_, value)| ("x", value)).collect(), problems: Vec::new() }
    }

    #[test]
    fn sizes_are_integers_or_text() {
        let read = |text: &str| {
            let mut reader = reader(text);
            let size = reader.size("x", 7, 1..=1 << 40);
            (size, reader.problems.len())
        };
        assert_eq!(read("\"10G\""), (10_000_000_000, 0));
        assert_eq!(read("\"10GiB\""), (10 << 30, 0));
        assert_eq!(read("\" 512 M \""), (512_000_000, 0));
        assert_eq!(read("4096"), (4096, 0));
        for bad in ["-1", "0", "\"-1G\"", "\"ten\"", "\"99999999999999999999999G\"", "true", "\"\"", "1.5"] {
            assert_eq!(read(bad), (7, 1), "{bad}");
        }
    }

    #[test]
    fn shown_sizes_parse_back() {
        for bytes in [1, 1023, 1024, 16 << 20, 1_000_000_000, (16 << 30) + 4096, u64::MAX] {
            let text = size_text(bytes);
            assert_eq!(text.parse::<ByteSize>().unwrap().as_u64(), bytes, "{text}");
        }
    }

    #[test]
    fn durations_are_integers_in_their_unit_or_text() {
        let read = |text: &str, unit| {
            let mut reader = reader(text);
            let range = Duration::from_secs(1)..=Duration::from_secs(3600);
            let duration = reader.duration("x", Duration::from_secs(7), range, unit);
            (duration.as_secs(), reader.problems.len())
        };
        assert_eq!(read("30", Unit::Seconds), (30, 0));
        assert_eq!(read("5", Unit::Minutes), (300, 0));
        assert_eq!(read("\"2m 5s\"", Unit::Minutes), (125, 0));
        for bad in ["0", "-5", "3601", "9223372036854775807", "\"soon\"", "1.5", "\"0s\""] {
            assert_eq!(read(bad, Unit::Minutes).1, 1, "{bad}");
        }
    }

    #[test]
    fn ratios_are_within_zero_and_one() {
        for (text, problems) in
            [("0.5", 0), ("1", 0), ("0", 0), ("1.01", 1), ("-0.1", 1), ("nan", 1), ("2", 1)]
        {
            let mut reader = reader(text);
            reader.ratio("x", 0.3);
            assert_eq!(reader.problems.len(), problems, "{text}");
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
        let mut reader = reader("{ rss.a = 1 }");
        assert!(reader.text_table("x", 10).is_empty());
        assert!(reader.problems[0].to_string().contains("quotes around"), "{:?}", reader.problems);
    }
}
