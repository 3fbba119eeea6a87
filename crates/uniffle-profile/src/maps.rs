//! Code mappings of this process. They convert an address to a file and the distance from its start
//! in memory, which are valid in every process that runs the file, and back. Only
//! [`Maps::of_this_process`] reads the system.

use std::ops::Range;

use indexmap::{IndexMap, IndexSet};
use procfs::process::{MMPermissions, MMapPath, Process};
use serde::{Deserialize, Serialize};

/// Position of an instruction, independent of the load address of its file.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub(super) struct Position {
    /// Index into [`AddressTable::files`]. `None` for code outside files, whose `offset` is the
    /// address.
    pub(super) file: Option<u32>,
    /// Distance in bytes from the start of the file in memory.
    pub(super) offset: u64,
}

/// Positions that stacks refer to by number.
#[derive(Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct AddressTable {
    pub(super) files: Vec<String>,
    pub(super) positions: Vec<Position>,
}

/// Collected addresses, without duplicates and in order of insertion.
#[derive(Debug, Default)]
pub(super) struct AddressSet(IndexSet<u64>);

/// The mapped code of a process.
#[derive(Debug, Default, PartialEq, Eq)]
pub(super) struct Maps {
    /// Files with their start addresses.
    files: IndexMap<String, u64>,
    /// Address ranges in ascending order, with the number of the file.
    code: Vec<(Range<u64>, usize)>,
}

/// A line of `/proc/self/maps`.
#[derive(Debug)]
struct MapLine {
    range: Range<u64>,
    offset: u64,
    is_code: bool,
    file: String,
}

impl Position {
    /// Returns the file's name without directories.
    pub(super) fn file_name(self, table: &AddressTable) -> Option<&str> {
        let path = self.path(table)?;
        Some(path.rsplit_once('/').map_or(path, |(_, name)| name))
    }

    /// Returns the path of the file.
    pub(super) fn path(self, table: &AddressTable) -> Option<&str> {
        table.files.get(usize::try_from(self.file?).ok()?).map(String::as_str)
    }
}

impl AddressSet {
    /// Returns the number of an address. Adds the address if it is new.
    pub(super) fn number(&mut self, address: u64) -> u32 {
        let (number, _) = self.0.insert_full(address);
        u32::try_from(number).unwrap_or(u32::MAX)
    }

    /// Returns the number of the call before a return address. The return address itself is the
    /// next instruction, which may belong to another line or function.
    pub(super) fn call_before(&mut self, returns_to: u64) -> u32 {
        self.number(returns_to.saturating_sub(1))
    }

    /// Converts the addresses to positions.
    pub(super) fn into_table(self, maps: &Maps) -> AddressTable {
        AddressTable {
            files: maps.files.keys().cloned().collect(),
            positions: self.0.into_iter().map(|address| maps.position(address)).collect(),
        }
    }
}

impl Maps {
    /// Reads the mappings of this process. Returns no mappings if the kernel does not provide them.
    pub(super) fn of_this_process() -> Self {
        let maps = Process::myself().and_then(|process| process.maps());
        Self::new(maps.into_iter().flatten().filter_map(|map| {
            let file = match map.pathname {
                MMapPath::Path(path) => path.to_string_lossy().into_owned(),
                MMapPath::Vdso => "[vdso]".to_owned(),
                _ => return None,
            };
            let is_code = map.perms.contains(MMPermissions::EXECUTE);
            Some(MapLine { range: map.address.0..map.address.1, offset: map.offset, is_code, file })
        }))
    }

    /// Builds the table from mappings in ascending order.
    ///
    /// A file starts at the last mapping of its first byte before the code. Earlier ones may belong
    /// to a reader that mapped the file as data.
    fn new(mapped: impl Iterator<Item = MapLine>) -> Self {
        let mut maps = Self::default();
        let mut first_bytes: IndexMap<String, u64> = IndexMap::new();
        for MapLine { range, offset, is_code, file } in mapped {
            if offset == 0 {
                first_bytes.insert(file.clone(), range.start);
            }
            let Some(&began) = first_bytes.get(&file).filter(|_| is_code) else { continue };
            let (number, _) = maps.files.insert_full(file, began);
            maps.code.push((range, number));
        }
        maps
    }

    fn position(&self, address: u64) -> Position {
        let after = self.code.partition_point(|(range, _)| range.start <= address);
        let found =
            after.checked_sub(1).map(|at| &self.code[at]).filter(|(range, _)| range.contains(&address));
        let file = found.and_then(|(_, number)| Some((*number, *self.files.get_index(*number)?.1)));
        match file {
            Some((number, began)) => {
                Position { file: u32::try_from(number).ok(), offset: address.saturating_sub(began) }
            }
            None => Position { file: None, offset: address },
        }
    }

    /// Returns the address of a position from another process, or `None` if this process does not
    /// have the code.
    pub(super) fn address(&self, table: &AddressTable, position: Position) -> Option<u64> {
        let address = match position.path(table) {
            Some(path) => self.files.get(path)?.checked_add(position.offset)?,
            None => return None,
        };
        let is_there = |(range, number): &(Range<u64>, usize)| {
            let file = self.files.get_index(*number).map(|(file, _)| file.as_str());
            range.contains(&address) && file == position.path(table)
        };
        self.code.iter().any(is_there).then_some(address)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn mapped(lines: &[(u64, u64, u64, bool, &str)]) -> Maps {
        Maps::new(lines.iter().map(|&(start, end, offset, is_code, file)| MapLine {
            range: start..end,
            offset,
            is_code,
            file: file.to_owned(),
        }))
    }

    /// A program, a library after it, and the program once more as data.
    fn maps(began: u64) -> Maps {
        mapped(&[
            (began, began + 0x1000, 0, false, "/bin/worker"),
            (began + 0x1000, began + 0x5000, 0x1000, true, "/bin/worker"),
            (began + 0x5000, began + 0x6000, 0x5000, false, "/bin/worker"),
            (began + 0x8000, began + 0x9000, 0, false, "/lib/libc.so"),
            (began + 0x9000, began + 0xa000, 0x1000, true, "/lib/libc.so"),
            (began + 0x10000, began + 0x16000, 0, false, "/bin/worker"),
        ])
    }

    fn table(maps: &Maps, addresses: &[u64]) -> AddressTable {
        let mut numbered = AddressSet::default();
        for address in addresses {
            numbered.number(*address);
        }
        numbered.into_table(maps)
    }

    #[test]
    fn position_is_independent_of_the_load_address() {
        let (here, there) = (maps(0x40_0000), maps(0x7f00_0000_0000));
        let offsets = [0x1000, 0x4fff, 0x9abc];
        let positions = table(&here, &offsets.map(|offset| 0x40_0000 + offset));
        assert_eq!(positions, table(&there, &offsets.map(|offset| 0x7f00_0000_0000 + offset)));
        let of = |file, offset| Position { file: Some(file), offset };
        assert_eq!(positions.positions, [of(0, 0x1000), of(0, 0x4fff), of(1, 0x1abc)]);
        assert_eq!(positions.files, ["/bin/worker", "/lib/libc.so"]);
        for (position, offset) in positions.positions.iter().zip(offsets) {
            assert_eq!(there.address(&positions, *position), Some(0x7f00_0000_0000 + offset));
        }
    }

    #[test]
    fn address_outside_mapped_code_stays_an_address() {
        let maps = maps(0x40_0000);
        // Before all mappings, data, a hole, the data at the end, after all mappings.
        let addresses = [0, 0x40_0fff, 0x40_7000, 0x41_2000, u64::MAX];
        let table = table(&maps, &addresses);
        for (position, address) in table.positions.iter().zip(addresses) {
            assert_eq!(*position, Position { file: None, offset: address });
            assert_eq!(maps.address(&table, *position), None);
        }
        let nowhere = Maps::default();
        assert_eq!(nowhere.position(7), Position { file: None, offset: 7 });
    }

    #[test]
    fn positions_missing_in_a_process_are_unknown() {
        let (here, other) = (maps(0x40_0000), mapped(&[(0x1000, 0x2000, 0, true, "/bin/worker")]));
        let table = table(&here, &[0x40_4000, 0x40_9000]);
        assert_eq!(table.positions.len(), 2);
        for position in &table.positions {
            assert_eq!(other.address(&table, *position), None);
        }
        for (file, offset) in [(Some(0), u64::MAX), (Some(7), 0x1000), (None, 0x1000)] {
            assert_eq!(here.address(&table, Position { file, offset }), None);
        }
    }

    #[test]
    fn equal_addresses_have_one_number() {
        let mut addresses = AddressSet::default();
        assert_eq!([7, 9, 7].map(|address| addresses.number(address)), [0, 1, 0]);
        assert_eq!(addresses.call_before(10), 1, "the call is located before its return address");
        assert_eq!(addresses.call_before(0), 2);
    }

    #[test]
    fn own_function_is_found() {
        let maps = Maps::of_this_process();
        let address = u64::try_from(own_function_is_found as fn() as usize).unwrap();
        let table = table(&maps, &[address]);
        let program = std::env::current_exe().unwrap();
        let name = program.file_name().unwrap().to_str().unwrap();
        assert_eq!(table.positions[0].file_name(&table), Some(name));
        assert_eq!(maps.address(&table, table.positions[0]), Some(address));
    }
}
