//! Compiles the services of `uniffle.proto`; their messages are those of `uniffle-wire`.
//! Also records the git commit for `--version` (best effort: a tarball has none). A build for development has none either:
//! it would be compiled again after each commit.

use std::path::Path;
use std::process::Command;

fn main() -> Result<(), Box<dyn std::error::Error>> {
    println!("cargo:rerun-if-changed=proto/uniffle.proto");
    let commit = if std::env::var("PROFILE")? == "release" { commit() } else { "development".to_owned() };
    println!("cargo:rustc-env=WORKER_GIT_COMMIT={commit}");

    let descriptors = protox::compile(["proto/uniffle.proto"], ["proto"])?;
    tonic_prost_build::configure()
        .extern_path(".rss.common", "::uniffle_wire::proto")
        .compile_fds(descriptors)?;
    Ok(())
}

fn commit() -> String {
    // `.git/HEAD` names a branch and stays the same from commit to commit; its log grows with each of them.
    if let Some(log) = git(&["rev-parse", "--git-path", "logs/HEAD"]).filter(|path| Path::new(path).exists())
    {
        println!("cargo:rerun-if-changed={log}");
    }
    git(&["rev-parse", "--short=12", "HEAD"]).unwrap_or_else(|| "unknown".to_owned())
}

/// What git says; `None` without git or outside a checkout.
fn git(arguments: &[&str]) -> Option<String> {
    let output =
        Command::new("git").args(arguments).output().ok().filter(|output| output.status.success())?;
    Some(String::from_utf8(output.stdout).ok()?.trim().to_owned())
}
