//! Renders profiles as pprof's protobuf, compressed with gzip, or as a flamegraph, and dumps of
//! waiting tasks as text.
//!
//! The messages are the necessary part of `profile.proto` (github.com/google/pprof).

use std::io::{self, Write as _};

use flate2::Compression;
use flate2::write::GzEncoder;
use indexmap::{IndexMap, IndexSet};
use inferno::flamegraph;
use prost::Message;

use super::Format;
use super::job::{CountedStack, PlaceNames, ProfileJob, RenderJob, SampleUnit, Samples, Symbol};
use super::maps::AddressTable;
use super::tree;

/// Picture for an empty profile. inferno fails without samples.
const EMPTY_SVG: &str = concat!(
    r#"<?xml version="1.0" standalone="no"?><svg xmlns="http://www.w3.org/2000/svg" width="640" height="60">"#,
    r#"<text x="16" y="36" font-family="sans-serif">No samples: nothing ran or was allocated during the profile.</text></svg>"#,
);

/// Renders a job.
///
/// # Errors
/// If the flamegraph or the compression fails.
pub(super) fn made(job: &RenderJob, names: &PlaceNames) -> anyhow::Result<Vec<u8>> {
    match &job.what {
        ProfileJob::Profile(samples, Format::Protobuf) => Ok(packed(&protobuf(samples, &job.places, names))?),
        ProfileJob::Profile(samples, Format::Svg) => svg(samples, names),
        ProfileJob::Waits(waits) => Ok(tree::text(waits, names).into_bytes()),
    }
}

fn packed(profile: &Profile) -> io::Result<Vec<u8>> {
    let mut packer = GzEncoder::new(Vec::new(), Compression::default());
    packer.write_all(&profile.encode_to_vec())?;
    packer.finish()
}

/// Renders a flamegraph, with a root per thread name if threads are known.
fn svg(samples: &Samples, names: &PlaceNames) -> anyhow::Result<Vec<u8>> {
    if samples.stacks.is_empty() {
        return Ok(EMPTY_SVG.into());
    }
    let mut options = flamegraph::Options::default();
    if let SampleUnit::Heap = samples.kind {
        options.title = "inuse_space".to_owned();
        options.count_name = "bytes".to_owned();
    }
    let lines: Vec<String> = samples.stacks.iter().map(|stack| folded(stack, names)).collect();
    let mut svg = Vec::new();
    flamegraph::from_lines(&mut options, lines.iter().map(String::as_str), &mut svg)?;
    Ok(svg)
}

/// Formats a stack as `thread;outermost;…;innermost found`.
fn folded(stack: &CountedStack, names: &PlaceNames) -> String {
    let frames = stack.frames.iter().rev().flat_map(|number| names.at(*number).iter().rev());
    let parts = stack.thread.as_deref().into_iter().chain(frames.map(|symbol| symbol.name.as_str()));
    let line = parts.collect::<Vec<_>>().join(";");
    format!("{line} {}", stack.found)
}

fn protobuf(samples: &Samples, places: &AddressTable, names: &PlaceNames) -> Profile {
    let mut tables = Tables { strings: IndexSet::from([String::new()]), ..Tables::default() };
    let (sample_type, period_type, period) = match samples.kind {
        SampleUnit::Cpu { period_nanos } => {
            let cpu = tables.value_type("cpu", "nanoseconds");
            (vec![tables.value_type("samples", "count"), cpu], cpu, period_nanos)
        }
        SampleUnit::Heap => {
            (vec![tables.value_type("inuse_space", "bytes")], tables.value_type("space", "bytes"), 0)
        }
    };
    let sample = samples.stacks.iter().map(|stack| tables.sample(stack, samples.kind)).collect();
    let mapping = (1..).zip(&places.files).map(|(id, path)| tables.mapping(id, path)).collect();
    let location = (0..).zip(&places.positions);
    let location = location
        .map(|(number, position)| PprofLocation {
            id: u64::from(number) + 1,
            mapping_id: position.file.map_or(0, |file| u64::from(file) + 1),
            address: position.offset,
            line: names.at(number).iter().map(|symbol| tables.line(symbol)).collect(),
        })
        .collect();
    Profile {
        sample_type,
        sample,
        mapping,
        location,
        function: tables.functions.into_values().collect(),
        string_table: tables.strings.into_iter().collect(),
        time_nanos: samples.began_nanos,
        duration_nanos: samples.duration_nanos,
        period_type: Some(period_type),
        period,
    }
}

/// Tables of a profile. Strings are referred to by index, functions by index plus one.
#[derive(Default)]
struct Tables {
    strings: IndexSet<String>,
    /// Functions by name and file.
    functions: IndexMap<(i64, i64), Function>,
}

impl Tables {
    fn string(&mut self, text: &str) -> i64 {
        match self.strings.get_index_of(text) {
            Some(known) => known as i64,
            None => self.strings.insert_full(text.to_owned()).0 as i64,
        }
    }

    fn value_type(&mut self, kind: &str, unit: &str) -> ValueType {
        ValueType { kind: self.string(kind), unit: self.string(unit) }
    }

    fn sample(&mut self, stack: &CountedStack, kind: SampleUnit) -> PprofSample {
        let label =
            stack.thread.iter().map(|name| Label { key: self.string("thread"), text: self.string(name) });
        PprofSample {
            label: label.collect(),
            location_id: stack.frames.iter().map(|number| u64::from(*number) + 1).collect(),
            value: match kind {
                SampleUnit::Cpu { period_nanos } => {
                    vec![stack.found, stack.found.saturating_mul(period_nanos)]
                }
                SampleUnit::Heap => vec![stack.found],
            },
        }
    }

    /// Returns a mapping of the file at address 0, because addresses are offsets in the file.
    fn mapping(&mut self, id: u64, path: &str) -> PprofMapping {
        let filename = self.string(path);
        PprofMapping { id, memory_limit: u64::MAX, filename, has_functions: true }
    }

    fn line(&mut self, symbol: &Symbol) -> PprofLine {
        let (name, filename) = (self.string(&symbol.name), self.string(&symbol.file));
        let system_name = self.string(&symbol.system_name);
        let id = self.functions.len() as u64 + 1;
        let function =
            self.functions.entry((name, filename)).or_insert(Function { id, name, system_name, filename });
        PprofLine { function_id: function.id, line: symbol.line.into() }
    }
}

#[derive(Clone, PartialEq, Message)]
struct Profile {
    #[prost(message, repeated, tag = "1")]
    sample_type: Vec<ValueType>,
    #[prost(message, repeated, tag = "2")]
    sample: Vec<PprofSample>,
    #[prost(message, repeated, tag = "3")]
    mapping: Vec<PprofMapping>,
    #[prost(message, repeated, tag = "4")]
    location: Vec<PprofLocation>,
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
struct PprofSample {
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
struct PprofMapping {
    #[prost(uint64, tag = "1")]
    id: u64,
    #[prost(uint64, tag = "3")]
    memory_limit: u64,
    #[prost(int64, tag = "5")]
    filename: i64,
    #[prost(bool, tag = "7")]
    has_functions: bool,
}

#[derive(Clone, PartialEq, Message)]
struct PprofLocation {
    #[prost(uint64, tag = "1")]
    id: u64,
    #[prost(uint64, tag = "2")]
    mapping_id: u64,
    #[prost(uint64, tag = "3")]
    address: u64,
    #[prost(message, repeated, tag = "4")]
    line: Vec<PprofLine>,
}

#[derive(Clone, PartialEq, Message)]
struct PprofLine {
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
    use std::io::Read as _;

    use super::super::job::tests::named;
    use super::*;

    const CPU: SampleUnit = SampleUnit::Cpu { period_nanos: 10_000_000 };

    fn samples(kind: SampleUnit, stacks: &[(Option<&str>, &[u32], i64)]) -> Samples {
        let stack = |(thread, frames, found): &(Option<&str>, &[u32], i64)| CountedStack {
            thread: thread.map(str::to_owned),
            frames: frames.to_vec(),
            found: *found,
        };
        Samples { kind, began_nanos: 5, duration_nanos: 6, stacks: stacks.iter().map(stack).collect() }
    }

    fn text(profile: &Profile, index: i64) -> &str {
        &profile.string_table[usize::try_from(index).unwrap()]
    }

    fn functions<'a>(profile: &'a Profile, location: &PprofLocation) -> Vec<&'a str> {
        let function =
            |line: &PprofLine| profile.function.iter().find(|function| function.id == line.function_id);
        location.line.iter().map(|line| text(profile, function(line).unwrap().name)).collect()
    }

    #[test]
    fn empty_flamegraph_says_that_it_is_empty() {
        let svg = String::from_utf8(svg(&samples(CPU, &[]), &named(&[]).1).unwrap()).unwrap();
        assert!(svg.starts_with("<?xml") && svg.ends_with("</svg>") && svg.contains("No samples"), "{svg}");
    }

    #[test]
    fn stacks_are_drawn_from_the_thread_inwards() {
        let (_, names) = named(&["read", "serve"]);
        let stacks = samples(CPU, &[(Some("uniffle"), &[0, 1], 3), (None, &[1], 2)]);
        assert_eq!(folded(&stacks.stacks[0], &names), "uniffle;serve;read 3");
        assert_eq!(folded(&stacks.stacks[1], &names), "serve 2");
        let svg = String::from_utf8(svg(&stacks, &names).unwrap()).unwrap();
        assert!(svg.contains("serve") && svg.contains("read"), "{svg}");
    }

    #[test]
    fn profile_has_each_function_once_and_sample_values() {
        let (places, names) = named(&["read", "serve", "write"]);
        let stacks = samples(CPU, &[(Some("a"), &[0, 1], 3), (Some("b"), &[2, 1], 1)]);
        let profile = protobuf(&stacks, &places, &names);
        let name = |id: &u64| {
            functions(&profile, profile.location.iter().find(|location| location.id == *id).unwrap())[0]
        };
        let seen: HashMap<&str, _> = profile
            .sample
            .iter()
            .map(|it| {
                let names = it.location_id.iter().map(name).collect::<Vec<_>>();
                (text(&profile, it.label[0].text), (names, it.value.clone()))
            })
            .collect();
        assert_eq!(seen["a"], (vec!["read", "serve"], vec![3, 30_000_000]));
        assert_eq!(seen["b"], (vec!["write", "serve"], vec![1, 10_000_000]));
        assert_eq!((profile.function.len(), profile.location.len(), text(&profile, 0)), (3, 3, ""));
        assert_eq!(text(&profile, profile.period_type.unwrap().kind), "cpu");
        assert_eq!((profile.time_nanos, profile.duration_nanos, profile.period), (5, 6, 10_000_000));
    }

    #[test]
    fn inlined_calls_are_lines_of_one_location() {
        let (places, _) = named(&["x"]);
        let symbol = |name: &str, line| Symbol {
            name: name.to_owned(),
            system_name: String::new(),
            file: "src/a.rs".to_owned(),
            line,
            column: 1,
        };
        let names = PlaceNames::new(&places, |_| vec![symbol("inlined", 4), symbol("whole", 9)]);
        let profile = protobuf(&samples(SampleUnit::Heap, &[(None, &[0], 512)]), &places, &names);
        let [location] = &profile.location[..] else { panic!("{:?}", profile.location) };
        assert_eq!(functions(&profile, location), ["inlined", "whole"]);
        assert_eq!(location.line.iter().map(|line| line.line).collect::<Vec<_>>(), [4, 9]);
        assert_eq!((location.mapping_id, location.address), (1, 0x1000));
        assert_eq!(text(&profile, profile.mapping[0].filename), "/bin/worker");
        assert_eq!((profile.sample[0].value.as_slice(), profile.sample[0].label.len()), (&[512][..], 0));
        assert_eq!(text(&profile, profile.sample_type[0].kind), "inuse_space");
        assert_eq!(
            folded(&samples(SampleUnit::Heap, &[(None, &[0], 1)]).stacks[0], &names),
            "whole;inlined 1"
        );
    }

    #[test]
    fn profile_is_packed() {
        let (places, names) = named(&["read"]);
        let stacks = samples(CPU, &[(Some("a"), &[0], 3)]);
        let profile = protobuf(&stacks, &places, &names);
        let job = RenderJob { places, what: ProfileJob::Profile(stacks, Format::Protobuf) };
        let mut plain = Vec::new();
        let made = made(&job, &names).unwrap();
        flate2::read::GzDecoder::new(made.as_slice()).read_to_end(&mut plain).unwrap();
        assert_eq!(Profile::decode(plain.as_slice()).unwrap(), profile);
    }
}
