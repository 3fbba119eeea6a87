//! CPU samples as text that tools read: pprof's protobuf, or a flamegraph.
//!
//! The messages are the part of `profile.proto` (github.com/google/pprof) that a CPU profile needs. Pure.

use std::time::SystemTime;

use indexmap::{IndexMap, IndexSet};
use inferno::flamegraph;
use pprof::{Frames, Report, Symbol};
use prost::Message;

/// The picture of a process that took no CPU time while it was sampled; inferno refuses to draw nothing.
const IDLE_SVG: &str = concat!(
    r#"<?xml version="1.0" standalone="no"?><svg xmlns="http://www.w3.org/2000/svg" width="640" height="60">"#,
    r#"<text x="16" y="36" font-family="sans-serif">No samples: no thread ran on a CPU meanwhile.</text></svg>"#,
);

/// A flamegraph with a root per thread name.
pub(super) fn svg(report: &Report) -> anyhow::Result<Vec<u8>> {
    if report.data.is_empty() {
        return Ok(IDLE_SVG.into());
    }
    let lines: Vec<String> = report.data.iter().map(|(stack, count)| folded(stack, *count)).collect();
    let mut svg = Vec::new();
    flamegraph::from_lines(&mut flamegraph::Options::default(), lines.iter().map(String::as_str), &mut svg)?;
    Ok(svg)
}

/// `thread;outermost;…;innermost count`
fn folded(stack: &Frames, count: isize) -> String {
    let mut line = stack.thread_name_or_id();
    for symbol in stack.frames.iter().rev().flat_map(|frame| frame.iter().rev()) {
        line.push(';');
        line.push_str(&symbol.name());
    }
    format!("{line} {count}")
}

/// An encoded `perftools.profiles.Profile`.
pub(super) fn protobuf(report: &Report) -> Vec<u8> {
    let mut tables = Tables { strings: IndexSet::from([String::new()]), ..Tables::default() };
    let period = 1_000_000_000 / i64::from(report.timing.frequency.max(1));
    let cpu = ValueType { kind: tables.string("cpu"), unit: tables.string("nanoseconds") };
    let samples = ValueType { kind: tables.string("samples"), unit: tables.string("count") };
    let sample =
        report.data.iter().map(|(stack, count)| tables.sample(stack, *count as i64, period)).collect();
    let began = report.timing.start_time.duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
    let nanos = |duration: std::time::Duration| i64::try_from(duration.as_nanos()).unwrap_or(i64::MAX);
    let (location, function) = tables.functions.into_values().unzip();
    let profile = Profile {
        sample_type: vec![samples, cpu],
        sample,
        location,
        function,
        string_table: tables.strings.into_iter().collect(),
        time_nanos: nanos(began),
        duration_nanos: nanos(report.timing.duration),
        period_type: Some(cpu),
        period,
    };
    profile.encode_to_vec()
}

/// What samples refer to by number: strings by their index, functions and their one location by theirs plus one.
#[derive(Default)]
struct Tables {
    strings: IndexSet<String>,
    functions: IndexMap<String, (Location, Function)>,
}

impl Tables {
    fn string(&mut self, text: impl Into<String>) -> i64 {
        self.strings.insert_full(text.into()).0 as i64
    }

    fn sample(&mut self, stack: &Frames, count: i64, period: i64) -> Sample {
        let location_id = stack.frames.iter().flatten().map(|symbol| self.location(symbol)).collect();
        let thread = Label { key: self.string("thread"), text: self.string(stack.thread_name_or_id()) };
        Sample { location_id, value: vec![count, count * period], label: vec![thread] }
    }

    /// Id of the symbol's location, which has that of its function.
    fn location(&mut self, symbol: &Symbol) -> u64 {
        let key = symbol.name();
        if let Some(known) = self.functions.get_index_of(&key) {
            return known as u64 + 1;
        }
        let id = self.functions.len() as u64 + 1;
        let (name, system_name) = (self.string(&key), self.string(symbol.sys_name()));
        let filename = self.string(symbol.filename());
        let line = vec![Line { function_id: id, line: symbol.lineno().into() }];
        let entry = (Location { id, line }, Function { id, name, system_name, filename });
        self.functions.insert(key, entry);
        id
    }
}

#[derive(Clone, PartialEq, Message)]
struct Profile {
    #[prost(message, repeated, tag = "1")]
    sample_type: Vec<ValueType>,
    #[prost(message, repeated, tag = "2")]
    sample: Vec<Sample>,
    #[prost(message, repeated, tag = "4")]
    location: Vec<Location>,
    #[prost(message, repeated, tag = "5")]
    function: Vec<Function>,
    #[prost(string, repeated, tag = "6")]
    string_table: Vec<String>,
    #[prost(int64, tag = "9")]
    time_nanos: i64,
    #[prost(int64, tag = "10")]
    duration_nanos: i64,
    #[prost(message, optional, tag = "11")]
    period_type: Option<ValueType>,
    #[prost(int64, tag = "12")]
    period: i64,
}

#[derive(Clone, Copy, PartialEq, Message)]
struct ValueType {
    #[prost(int64, tag = "1")]
    kind: i64,
    #[prost(int64, tag = "2")]
    unit: i64,
}

#[derive(Clone, PartialEq, Message)]
struct Sample {
    #[prost(uint64, repeated, tag = "1")]
    location_id: Vec<u64>,
    #[prost(int64, repeated, tag = "2")]
    value: Vec<i64>,
    #[prost(message, repeated, tag = "3")]
    label: Vec<Label>,
}

#[derive(Clone, PartialEq, Message)]
struct Label {
    #[prost(int64, tag = "1")]
    key: i64,
    #[prost(int64, tag = "2")]
    text: i64,
}

#[derive(Clone, PartialEq, Message)]
struct Location {
    #[prost(uint64, tag = "1")]
    id: u64,
    #[prost(message, repeated, tag = "4")]
    line: Vec<Line>,
}

#[derive(Clone, PartialEq, Message)]
struct Line {
    #[prost(uint64, tag = "1")]
    function_id: u64,
    #[prost(int64, tag = "2")]
    line: i64,
}

#[derive(Clone, PartialEq, Message)]
struct Function {
    #[prost(uint64, tag = "1")]
    id: u64,
    #[prost(int64, tag = "2")]
    name: i64,
    #[prost(int64, tag = "3")]
    system_name: i64,
    #[prost(int64, tag = "4")]
    filename: i64,
}

#[cfg(test)]
mod tests {
    use std::collections::HashMap;

    use super::*;

    fn report(stacks: &[(&str, &[&str], isize)]) -> Report {
        let symbol = |name: &&str| Symbol {
            name: Some(name.as_bytes().to_vec()),
            addr: None,
            lineno: Some(7),
            filename: Some("a.rs".into()),
        };
        let frames = |(thread, names, count): &(&str, &[&str], isize)| {
            let frames = Frames {
                frames: names.iter().map(|name| vec![symbol(name)]).collect(),
                thread_name: (*thread).to_owned(),
                thread_id: 1,
                sample_timestamp: SystemTime::UNIX_EPOCH,
            };
            (frames, *count)
        };
        let mut report = Report { data: stacks.iter().map(frames).collect(), timing: Default::default() };
        report.timing.frequency = 100;
        report
    }

    #[test]
    fn a_flamegraph_of_an_idle_process_is_a_picture_that_says_so() {
        let svg = String::from_utf8(svg(&report(&[])).unwrap()).unwrap();
        assert!(svg.starts_with("<?xml") && svg.ends_with("</svg>") && svg.contains("No samples"), "{svg}");
    }

    #[test]
    fn stacks_are_drawn_from_the_thread_inwards() {
        let report = report(&[("uniffle", &["read", "serve"], 3)]);
        assert_eq!(folded(report.data.keys().next().unwrap(), 3), "uniffle;serve;read 3");
        let svg = String::from_utf8(svg(&report).unwrap()).unwrap();
        assert!(svg.contains("serve") && svg.contains("read"), "{svg}");
    }

    #[test]
    fn a_profile_names_each_function_once_and_counts_samples_and_time() {
        let bytes = protobuf(&report(&[("a", &["read", "serve"], 3), ("b", &["write", "serve"], 1)]));
        let profile = Profile::decode(bytes.as_slice()).unwrap();
        let text = |index: i64| profile.string_table[usize::try_from(index).unwrap()].as_str();
        let name = |id: &u64| text(profile.function.iter().find(|function| function.id == *id).unwrap().name);
        let seen: HashMap<&str, _> = profile
            .sample
            .iter()
            .map(|it| {
                (
                    text(it.label[0].text),
                    (it.location_id.iter().map(name).collect::<Vec<_>>(), it.value.clone()),
                )
            })
            .collect();
        assert_eq!(seen["a"], (vec!["read", "serve"], vec![3, 30_000_000]));
        assert_eq!(seen["b"], (vec!["write", "serve"], vec![1, 10_000_000]));
        assert_eq!((profile.function.len(), profile.location.len(), text(0)), (3, 3, ""));
        assert_eq!(text(profile.period_type.unwrap().kind), "cpu");
    }
}
