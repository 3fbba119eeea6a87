//! Maven projects below `tests/`, and a check for Java and Maven.

use std::path::Path;
use std::process::{Command, Stdio};

use tokio::time::Instant;

use crate::say;
use crate::tools::available;

/// Returns true if Java and Maven are installed. Otherwise prints that the Java client is not
/// tested, which is a failure in CI.
pub fn is_available() -> bool {
    available("the Java client", &["java", "mvn"])
}

/// Packages `project` into `output`, unless the output is up to date. The first build downloads the
/// dependencies.
pub fn build(project: &Path, output: &Path, properties: &[String]) {
    let stamp_file = output.join("built-from");
    let stamp = sources_stamp(project);
    if std::fs::read_to_string(&stamp_file).is_ok_and(|built| built == stamp) {
        return;
    }
    let start = Instant::now();
    let name = project.display();
    say(&format!("building {name} with Maven {properties:?}; the first time it downloads up to 280 MB"));
    let build = || {
        Command::new("mvn")
            .args(["-B", "-ntp", "-q", "-f"])
            .arg(project)
            .arg("package")
            .args(properties)
            .stdin(Stdio::null())
            .output()
            .expect("cannot run mvn")
    };
    let mut result = build();
    if !result.status.success() {
        say("mvn failed; retrying once, because the network may be the cause");
        result = build();
    }
    assert!(
        result.status.success(),
        "mvn failed: {}\n{}\n{}",
        result.status,
        String::from_utf8_lossy(&result.stdout),
        String::from_utf8_lossy(&result.stderr)
    );
    std::fs::write(&stamp_file, stamp).expect("cannot write to the output directory");
    say(&format!("{name} was built in {:.0} s", start.elapsed().as_secs_f32()));
}

/// Returns path and checksum of every source file, one per line.
fn sources_stamp(project: &Path) -> String {
    let mut lines = Vec::new();
    let mut open = vec![project.join("pom.xml"), project.join("src")];
    while let Some(path) = open.pop() {
        if path.is_dir() {
            open.extend(std::fs::read_dir(&path).unwrap().flatten().map(|entry| entry.path()));
        } else {
            let bytes = std::fs::read(&path).unwrap();
            lines.push(format!("{} {:08x}", path.display(), crc32fast::hash(&bytes)));
        }
    }
    lines.sort();
    lines.join("\n")
}
