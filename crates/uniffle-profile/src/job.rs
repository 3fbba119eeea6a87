//! Results of the profilers, with places as numbers, and the names of the places.
//!
//! Jobs are serializable because the child process renders them (`child`, `render`, `tree`).

use serde::{Deserialize, Serialize};

use super::Format;
use super::maps::{AddressTable, Position};

/// A rendering task and the places it refers to.
#[derive(Debug, Serialize, Deserialize)]
pub(super) struct RenderJob {
    pub(super) places: AddressTable,
    pub(super) what: ProfileJob,
}

#[derive(Debug, Serialize, Deserialize)]
pub(super) enum ProfileJob {
    Profile(Samples, Format),
    Waits(Waits),
}

/// Stacks with their sampled values.
#[derive(Debug, Serialize, Deserialize)]
pub(super) struct Samples {
    pub(super) kind: SampleUnit,
    /// Start time in nanoseconds since the epoch.
    pub(super) began_nanos: i64,
    pub(super) duration_nanos: i64,
    pub(super) stacks: Vec<CountedStack>,
}

/// Unit of [`CountedStack::found`].
#[derive(Debug, Clone, Copy, Serialize, Deserialize)]
pub(super) enum SampleUnit {
    /// Samples; each represents `period_nanos` of CPU time.
    Cpu { period_nanos: i64 },
    /// Allocated bytes.
    Heap,
}

#[derive(Debug, Serialize, Deserialize)]
pub(super) struct CountedStack {
    /// Name of the thread, if known.
    pub(super) thread: Option<String>,
    /// Numbers of places, innermost first.
    pub(super) frames: Vec<u32>,
    pub(super) found: i64,
}

/// Addresses where tasks wait.
#[derive(Debug, Serialize, Deserialize)]
pub(super) struct Waits {
    /// Text at the beginning of the output.
    pub(super) summary: String,
    pub(super) groups: Vec<WaitingTasks>,
    /// Number of tasks that belong to none of the groups.
    pub(super) left_out: u64,
}

/// Tasks with the same name that wait at the same place.
#[derive(Debug, Serialize, Deserialize)]
pub(super) struct WaitingTasks {
    pub(super) name: String,
    pub(super) tasks: u64,
    /// One stack per await of a `select!`, in the form of [`CountedStack::frames`].
    pub(super) stacks: Vec<Vec<u32>>,
}

/// A function and a line in it. With inlined calls, a place has several, innermost first.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Symbol {
    pub(super) name: String,
    /// Mangled name, as the linker uses it.
    pub(super) system_name: String,
    /// Source file, or the program's file if the function is unknown. Empty if neither is known.
    pub(super) file: String,
    /// 0 if unknown.
    pub(super) line: u32,
    /// 0 if unknown.
    pub(super) column: u32,
}

/// Names of all places.
#[derive(Debug)]
pub(super) struct PlaceNames(Vec<Vec<Symbol>>);

impl PlaceNames {
    /// Resolves all places. Where `resolve` finds nothing, the name is the address and the file.
    pub(super) fn new(places: &AddressTable, mut resolve: impl FnMut(Position) -> Vec<Symbol>) -> Self {
        let mut in_order: Vec<(usize, Position)> = places.positions.iter().copied().enumerate().collect();
        // File by file, so that debug information of few files is loaded at a time.
        in_order.sort_unstable_by_key(|(_, position)| *position);
        let mut names = vec![Vec::new(); in_order.len()];
        for (number, position) in in_order {
            let found = resolve(position);
            names[number] = if found.is_empty() { vec![Symbol::nameless(places, position)] } else { found };
        }
        Self(names)
    }

    /// Uses address and file as names for all places.
    pub(super) fn none(places: &AddressTable) -> Self {
        Self::new(places, |_| Vec::new())
    }

    /// Returns the symbols at a place, innermost first.
    pub(super) fn at(&self, number: u32) -> &[Symbol] {
        usize::try_from(number).ok().and_then(|number| self.0.get(number)).map_or(&[], Vec::as_slice)
    }
}

impl Symbol {
    fn nameless(places: &AddressTable, position: Position) -> Self {
        let name = match position.file_name(places) {
            Some(file) => format!("{:#x} {file}", position.offset),
            None => format!("{:#x}", position.offset),
        };
        let file = position.path(places).unwrap_or_default().to_owned();
        Self { system_name: name.clone(), name, file, line: 0, column: 0 }
    }
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;

    /// Returns places with one name each. A place with an empty name is unknown.
    pub(in super::super) fn named(names: &[&str]) -> (AddressTable, PlaceNames) {
        let positions =
            (0x1000..).take(names.len()).map(|offset| Position { file: Some(0), offset }).collect();
        let places = AddressTable { files: vec!["/bin/worker".to_owned()], positions };
        let found = PlaceNames::new(&places, |position| {
            let name = names[usize::try_from(position.offset - 0x1000).unwrap()];
            let symbol = Symbol {
                name: name.to_owned(),
                system_name: format!("_{name}"),
                file: "src/a.rs".to_owned(),
                line: 7,
                column: 3,
            };
            if name.is_empty() { Vec::new() } else { vec![symbol] }
        });
        (places, found)
    }

    #[test]
    fn unnamed_code_is_shown_by_address_and_file() {
        let (mut places, names) = named(&["read", ""]);
        assert_eq!((names.at(0)[0].name.as_str(), names.at(0)[0].line), ("read", 7));
        assert_eq!(names.at(1)[0].name, "0x1001 worker");
        assert_eq!(names.at(2), []);
        places.positions.push(Position { file: None, offset: 0xab });
        let names = PlaceNames::none(&places);
        assert_eq!(
            [0, 1, 2].map(|number| names.at(number)[0].name.as_str()),
            ["0x1000 worker", "0x1001 worker", "0xab"]
        );
    }

    #[test]
    fn names_are_looked_up_by_file_and_returned_in_order() {
        let position = |file, offset| Position { file: Some(file), offset };
        let positions = vec![position(1, 5), position(0, 9), position(1, 1)];
        let places = AddressTable { files: vec!["/a".to_owned(), "/b".to_owned()], positions };
        let mut asked = Vec::new();
        let names = PlaceNames::new(&places, |position| {
            asked.push((position.file.unwrap(), position.offset));
            Vec::new()
        });
        assert_eq!(asked, [(0, 9), (1, 1), (1, 5)]);
        assert_eq!([0, 1, 2].map(|number| names.at(number)[0].name.as_str()), ["0x5 b", "0x9 a", "0x1 b"]);
    }
}
