//! The claim of a data directory, as a start that is refused for want of one tells it.

use std::path::{Path, PathBuf};

/// The file's name.
pub const CLAIM: &str = "uniffle-worker.claim";

/// Whether a file is a directory's claim.
#[must_use]
pub fn is_claim(path: &Path) -> bool {
    path.ends_with(CLAIM)
}

/// What the line for a shell in a refusal writes, and to which file; none where it does not know. As a shell would for paths
/// without a quote in them.
#[must_use]
pub fn told(refusal: &str) -> Option<(PathBuf, Vec<u8>)> {
    let (_, line) = refusal.split_once(r"printf '%s\n' ")?;
    let (lines, file) = line.split_once(" > ")?;
    let quoted = |text: &str| text.split('\'').skip(1).step_by(2).map(str::to_owned).collect::<Vec<_>>();
    let content = quoted(lines).iter().map(|line| format!("{line}\n")).collect::<String>();
    Some((quoted(file).first()?.into(), content.into_bytes()))
}

/// A claim by which a directory is another one than it was: what a worker leaves that takes one without a claim for a new one.
#[must_use]
pub fn another() -> Vec<u8> {
    b"uniffle-worker local store 1\n0badc1a1-0000-4000-8000-000000000001\n".to_vec()
}
