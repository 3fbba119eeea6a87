//! Claims of data directories, and the command with which a worker that refuses to start suggests
//! one.

use std::path::{Path, PathBuf};

/// File name of a claim.
pub const CLAIM: &str = "uniffle-worker.claim";

/// Returns true for the claim of a directory.
#[must_use]
pub fn is_claim(path: &Path) -> bool {
    path.ends_with(CLAIM)
}

/// Parses the shell command that a refusal suggests. Returns the file and its content, or `None`
/// without a command. Expects paths without quotes.
#[must_use]
pub fn suggested_claim(refusal: &str) -> Option<(PathBuf, Vec<u8>)> {
    let (_, line) = refusal.split_once(r"printf '%s\n' ")?;
    let (lines, file) = line.split_once(" > ")?;
    let quoted = |text: &str| text.split('\'').skip(1).step_by(2).map(str::to_owned).collect::<Vec<_>>();
    let content = quoted(lines).iter().map(|line| format!("{line}\n")).collect::<String>();
    Some((quoted(file).first()?.into(), content.into_bytes()))
}

/// Returns a claim with another identity, as a worker writes it when it treats a directory without
/// a claim as new.
#[must_use]
pub fn new_claim() -> Vec<u8> {
    b"uniffle-worker local store 1\n0badc1a1-0000-4000-8000-000000000001\ncrc32 15554f1a\n".to_vec()
}
