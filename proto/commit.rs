//! Part of the build scripts of the programs: names the file from which `--version` takes the
//! commit.

use std::path::Path;
use std::process::Command;

/// Sets `WORKER_REFLOG` to a file whose last line names the commit. Programs include the file, so
/// that a new commit compiles them again.
///
/// The commit comes from the variable `WORKER_GIT_COMMIT`, or else from git. A source archive
/// without the variable has none.
pub(crate) fn record() -> Result<(), Box<dyn std::error::Error>> {
    println!("cargo:rerun-if-env-changed=WORKER_GIT_COMMIT");
    let given = std::env::var("WORKER_GIT_COMMIT").ok().filter(|commit| !commit.is_empty());
    // The reflog grows with each commit, whereas `HEAD` names a branch and stays the same.
    let reflog = git(&["rev-parse", "--path-format=absolute", "--git-path", "logs/HEAD"])
        .filter(|path| given.is_none() && Path::new(path).metadata().is_ok_and(|file| file.len() > 0));
    let path = match reflog {
        Some(path) => path,
        None => {
            let commit = given.or_else(|| git(&["rev-parse", "HEAD"])).unwrap_or_default();
            let path = format!("{}/commit", std::env::var("OUT_DIR")?);
            std::fs::write(&path, format!("commit {commit}\n"))?;
            path
        }
    };
    println!("cargo:rustc-env=WORKER_REFLOG={path}");
    Ok(())
}

/// Returns the output of git, or `None` without git or outside a checkout of this repository.
fn git(arguments: &[&str]) -> Option<String> {
    let output = Command::new("git").args(arguments).output().ok().filter(|it| it.status.success())?;
    Some(String::from_utf8(output.stdout).ok()?.trim().to_owned())
}
