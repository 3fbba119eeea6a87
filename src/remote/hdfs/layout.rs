//! Names of directories and files (docs/protocol.md §6.1). Clients list and open them, so every
//! character is fixed. Pure.
//!
//! Several servers write into one directory. Only names that begin with this server's id and an
//! underscore are ours ([`is_own`]); an expired application's other files must not be deleted.

use std::collections::BTreeMap;

use uniffle_wire::types::{AppId, PartitionId, ShuffleKey};

/// Suffix of a file with blocks.
const DATA: &str = ".data";
/// Suffix of a file with index records.
const INDEX: &str = ".index";

/// Returns `<root>/<app>`.
pub fn app_directory(root: &str, app: &AppId) -> String {
    format!("{}/{app}", root.trim_end_matches('/'))
}

/// Returns `<root>/<app>/<shuffle>`.
pub fn shuffle_directory(root: &str, key: &ShuffleKey) -> String {
    format!("{}/{}", app_directory(root, &key.app), key.shuffle)
}

/// Registered ranges with more than one partition, by their first one. All others are `<p>-<p>`.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct WideRanges(BTreeMap<i32, i32>);

impl WideRanges {
    /// Adds registered ranges. A range that overlaps a known one is ignored, because readers look
    /// into the directory named by the first registration.
    pub fn add(&mut self, ranges: &[(i32, i32)]) {
        for &(start, end) in ranges.iter().filter(|(start, end)| start < end) {
            // Known ranges do not overlap, so the last one that begins before the end ends last.
            let before_end = self.0.range(..=end).next_back();
            if before_end.is_none_or(|(_, known_end)| *known_end < start) {
                self.0.insert(start, end);
            }
        }
    }

    /// Returns the range that names the directory of a partition.
    pub fn of(&self, partition: PartitionId) -> (i32, i32) {
        let before = self.0.range(..=partition.0).next_back().map(|(start, end)| (*start, *end));
        before.filter(|(_, end)| partition.0 <= *end).unwrap_or((partition.0, partition.0))
    }
}

/// Name prefix of one writer of one server in a directory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct WriterName<'a> {
    /// Id as announced to the coordinators.
    pub server_id: &'a str,
    /// Number of the writer, or `None` if the partition has only one.
    pub index: Option<usize>,
}

impl WriterName<'_> {
    fn prefix(&self) -> String {
        match self.index {
            None => format!("{}_", self.server_id),
            Some(index) => format!("{}_{index}_", self.server_id),
        }
    }

    /// Returns the data and index file of the writer after `failures` failures.
    pub fn files(&self, failures: u32) -> (String, String) {
        let prefix = self.prefix();
        (format!("{prefix}{failures}{DATA}"), format!("{prefix}{failures}{INDEX}"))
    }

    /// Returns the number of failures in a name, or `None` if it is not a name of this writer.
    pub fn failures_of(&self, name: &str) -> Option<u32> {
        let stem = name.strip_suffix(DATA).or_else(|| name.strip_suffix(INDEX))?;
        stem.strip_prefix(&self.prefix())?.parse().ok()
    }
}

/// Returns whether this server wrote a file. The character after the id matters: `…-1999` has not
/// written the files of `…-19999` (docs/protocol.md §11 id-prefix).
pub fn is_own(name: &str, server_id: &str) -> bool {
    name.strip_prefix(server_id).is_some_and(|rest| rest.starts_with('_'))
}

/// Returns whether a file has index records.
pub fn is_index(name: &str) -> bool {
    name.ends_with(INDEX)
}

/// Returns the data file of an index file.
pub fn data_of(index_name: &str) -> String {
    format!("{}{DATA}", index_name.trim_end_matches(INDEX))
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use uniffle_wire::types::ShuffleId;

    #[test]
    fn file_names_match_the_client_lookup() {
        let key = ShuffleKey::new(AppId::parse("app_1").unwrap(), ShuffleId(7));
        assert_eq!(shuffle_directory("/uniffle", &key), "/uniffle/app_1/7");
        assert_eq!(shuffle_directory("/", &key), "/app_1/7");
        let server_id = "10.0.0.1-21100-21200";
        let alone = WriterName { server_id, index: None };
        assert_eq!(
            alone.files(0),
            ("10.0.0.1-21100-21200_0.data".into(), "10.0.0.1-21100-21200_0.index".into())
        );
        let third = WriterName { server_id, index: Some(2) };
        assert_eq!(third.files(1).1, "10.0.0.1-21100-21200_2_1.index");
    }

    #[test]
    fn only_own_names_are_recognised() {
        let (short, long) = ("10.0.0.1-1999", "10.0.0.1-19999");
        assert!(is_own("10.0.0.1-1999_0_0.data", short));
        assert!(!is_own("10.0.0.1-19999_0_0.data", short));
        assert!(!is_own("10.0.0.1-1999_0_0.data", long));
        assert!(!is_own(short, short));
        let writer = WriterName { server_id: short, index: Some(1) };
        assert_eq!(writer.failures_of("10.0.0.1-1999_1_12.index"), Some(12));
        for other in ["10.0.0.1-1999_11_2.index", "10.0.0.1-1999_1_2.tmp", "10.0.0.1-1999_1_x.data", ""] {
            assert_eq!(writer.failures_of(other), None, "{other}");
        }
        assert!(is_index("a_0.index") && !is_index("a_0.data"));
        assert_eq!(data_of("a_0_1.index"), "a_0_1.data");
        let alone = WriterName { server_id: short, index: None };
        assert_eq!(alone.failures_of("10.0.0.1-1999_1_2.index"), None);
    }

    #[test]
    fn directory_is_named_by_the_first_registration() {
        let mut ranges = WideRanges::default();
        ranges.add(&[(4, 7), (0, 3), (9, 9)]);
        ranges.add(&[(2, 5), (6, 20), (10, 11)]);
        let named: Vec<_> = (0..13).map(|p| ranges.of(PartitionId(p))).collect();
        assert_eq!(named[..4], [(0, 3); 4]);
        assert_eq!(named[4..8], [(4, 7); 4]);
        assert_eq!(named[8..], [(8, 8), (9, 9), (10, 11), (10, 11), (12, 12)]);
    }

    proptest! {
        #[test]
        fn first_of_overlapping_ranges_names_the_directory(
            registered in proptest::collection::vec((0i32..60, 0i32..8), 0..12)
        ) {
            let mut ranges = WideRanges::default();
            let mut expected: Vec<(i32, i32)> = Vec::new();
            for (start, more) in registered {
                let range = (start, start + more);
                ranges.add(&[range]);
                if more > 0 && expected.iter().all(|known| known.1 < range.0 || range.1 < known.0) {
                    expected.push(range);
                }
            }
            expected.sort_unstable();
            prop_assert_eq!(ranges.0.clone().into_iter().collect::<Vec<_>>(), expected);
            for partition in 0..70 {
                let (start, end) = ranges.of(PartitionId(partition));
                prop_assert!(start <= partition && partition <= end);
                for other in start..=end {
                    prop_assert_eq!(ranges.of(PartitionId(other)), (start, end));
                }
            }
        }
    }
}
