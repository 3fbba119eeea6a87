//! Locations of programs that tests start: binaries of the workspace, and tools that a machine may
//! lack. Reports tests that are skipped or weakened, and runs a test in its own process.

use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use crate::say;

/// The root of the sources.
pub const WORKSPACE: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../..");

/// Returns true in the CI pipeline, where a missing component is a failure and not a reason to
/// skip.
pub fn in_ci() -> bool {
    std::env::var("CI").is_ok_and(|value| value == "true")
}

/// Returns true if all of `tools` are installed. Otherwise prints that `tried` is skipped, which is
/// a failure in CI.
pub fn available(tried: &str, tools: &[&str]) -> bool {
    let Some(missing) = tools.iter().find(|tool| find(tool).is_none()) else { return true };
    lacking(tried, &format!("`{missing}` is not installed"));
    false
}

/// Returns the path of a program. Also searches the system directories, which contain a KDC but are
/// not in users' paths.
pub fn find(tool: &str) -> Option<PathBuf> {
    let path = std::env::var_os("PATH").unwrap_or_default();
    let places = std::env::split_paths(&path).chain(["/usr/sbin", "/sbin"].map(PathBuf::from));
    places.map(|place| place.join(tool)).find(|file| file.is_file())
}

/// Prints why `tried` is skipped, which is a failure in CI.
pub fn lacking(tried: &str, why: &str) {
    let line = format!("SKIPPED: {why}; not tested: {tried}");
    assert!(!in_ci(), "{line}, but CI=true requires it");
    say(&line);
}

/// Prints why `tried` runs in a weaker form. This is a failure in CI if `is_allowed`, that is, if
/// the machine would allow the full form.
pub fn weaker(tried: &str, why: &str, is_allowed: bool) {
    match is_allowed {
        true => lacking(tried, why),
        false => say(&format!("WEAKER: {why}; only partly tested: {tried}")),
    }
}

/// Returns true if this process may mount file systems.
pub fn may_mount() -> bool {
    const SYS_ADMIN: u64 = 1 << 21;
    let status = std::fs::read_to_string("/proc/self/status").expect("Linux has this file");
    let effective = status.lines().find_map(|line| line.strip_prefix("CapEff:")).expect("CapEff is listed");
    u64::from_str_radix(effective.trim(), 16).unwrap() & SYS_ADMIN != 0
}

/// Returns the path of a binary of the workspace, which must have been built with the profile of
/// this test.
pub fn binary(name: &str) -> PathBuf {
    let path = profile_dir().join(name);
    assert!(path.exists(), "{} is missing: `cargo build --workspace --bins` makes it", path.display());
    path
}

/// Returns a directory that persists between test runs, like `CARGO_TARGET_TMPDIR`.
pub fn kept_dir() -> PathBuf {
    profile_dir().parent().unwrap().join("tmp")
}

/// Returns cargo's output directory for binaries. Tests are in `deps` below it.
fn profile_dir() -> PathBuf {
    let test = std::env::current_exe().expect("the path of the test is known");
    test.ancestors().nth(2).map(Path::to_owned).expect("the test is in the directory of a profile")
}

/// Re-runs the calling test, whose full name is `test`, in a separate process. For tests that
/// affect their whole process. Returns true in the separate process, which then runs the body of
/// the test. Returns false in the caller, whose test must end.
pub fn alone(test: &str) -> bool {
    const ALONE: &str = "UNIFFLE_TEST_ALONE";
    if std::env::var_os(ALONE).is_some() {
        return true;
    }
    let mut again = Command::new(std::env::current_exe().expect("the path of the test is known"));
    let again = again.args(["--exact", test, "--nocapture"]).env(ALONE, "1");
    let output = again.stderr(Stdio::inherit()).output().expect("cannot start the test");
    let text = String::from_utf8_lossy(&output.stdout);
    assert!(output.status.success(), "{test} failed in its own process: {}\n{text}", output.status);
    assert!(text.contains("test result: ok. 1 passed"), "{test} is not the name of a test:\n{text}");
    false
}
