//! Version and commit of the running program.

use std::fmt;

/// Number of hexadecimal digits of a commit.
const DIGITS: usize = 12;
const UNKNOWN: &[u8; DIGITS] = b"unknown     ";

/// Identifies a build in logs, metrics and heartbeats.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Build {
    /// Version of the package.
    pub version: &'static str,
    /// Abbreviated git commit, or "unknown".
    pub commit: &'static str,
}

impl Build {
    /// Returns the build of this version from `commit`, a result of [`last_commit`].
    #[must_use]
    pub const fn of(commit: &'static [u8; DIGITS]) -> Self {
        let commit = match str::from_utf8(commit.trim_ascii()) {
            Ok(commit) => commit,
            Err(_) => "unknown",
        };
        Self { version: env!("CARGO_PKG_VERSION"), commit }
    }
}

impl Default for Build {
    fn default() -> Self {
        Self::of(UNKNOWN)
    }
}

impl fmt::Display for Build {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} ({})", self.version, self.commit)
    }
}

/// Returns the commit that the last line of a git reflog names, padded with spaces. It is the
/// second word of the line. Returns "unknown" if there is none.
///
/// Programs evaluate it at compile time on a reflog that only they include. A new commit therefore
/// compiles the program again, but not this library.
#[must_use]
pub const fn last_commit(reflog: &[u8]) -> [u8; DIGITS] {
    let mut end = reflog.len();
    while end > 0 && reflog[end - 1] == b'\n' {
        end -= 1;
    }
    let mut at = end;
    while at > 0 && reflog[at - 1] != b'\n' {
        at -= 1;
    }
    while at < end && reflog[at] != b' ' {
        at += 1;
    }
    at += 1;
    if at >= end {
        return *UNKNOWN;
    }
    let mut commit = [b' '; DIGITS];
    let mut digit = 0;
    while digit < DIGITS && at < end && reflog[at] != b' ' {
        commit[digit] = reflog[at];
        digit += 1;
        at += 1;
    }
    commit
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn commit_is_read_from_the_last_line() {
        let commit_of = |reflog: &str| String::from_utf8(last_commit(reflog.as_bytes()).to_vec()).unwrap();
        let [a, b, c] = ["a", "b", "c"].map(|digit| digit.repeat(40));
        let reflog = format!("{a} {b} Me <m@x> 1 +0000\tcommit: x\n{b} {c} Me <m@x> 2 +0000\tcommit: y\n");
        assert_eq!(commit_of(&reflog), "c".repeat(12));
        assert_eq!(commit_of(reflog.trim_end()), "c".repeat(12));
        assert_eq!(commit_of("commit 1234567\n"), "1234567     ");
        for nothing in ["", "\n", "commit", "commit ", "a b\n\ncommit\n"] {
            assert_eq!(commit_of(nothing), "unknown     ", "{nothing:?}");
        }
    }
}
