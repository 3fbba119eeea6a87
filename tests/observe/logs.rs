//! Log files of a worker process.

use std::path::Path;

use super::tools::Load;
use crate::support::worker::{Setup, Worker};

/// The text of the file in `directory` whose name begins with `name`.
fn file(directory: &Path, name: &str) -> String {
    let mut entries = std::fs::read_dir(directory).unwrap().map(|entry| entry.unwrap().path());
    let path = entries.find(|path| path.file_name().unwrap().to_str().unwrap().starts_with(name));
    std::fs::read_to_string(path.unwrap_or_else(|| panic!("no {name}*"))).unwrap()
}

#[test]
fn the_audit_log_names_who_came_and_went() {
    let directory = tempfile::tempdir().unwrap();
    let more = format!("[log]\npath = {:?}\nformat = \"json\"\nrotation = \"Never\"", directory.path());
    // The filter is the other log's.
    let worker = Worker::start(&Setup {
        made_tables: more,
        env: vec![("RUST_LOG", "warn".to_owned())],
        ..Setup::default()
    });
    Load::start(&worker, "5MB", 1).finish();
    worker.assert_clean();
    worker.stop();
    let audit = file(directory.path(), "uniffle-audit");
    let lines: Vec<serde_json::Value> =
        audit.lines().map(|line| serde_json::from_str(line).expect(line)).collect();
    let has = |message: &str| {
        lines.iter().any(|line| {
            line["message"] == message
                && line["app"].as_str().is_some_and(|app| app.starts_with("uniffle-bench"))
        })
    };
    assert!(has("registered") && has("unregistered"), "{audit}");
    assert!(lines.iter().all(|line| line["target"] == "audit"), "{audit}");
    assert_eq!(file(directory.path(), "uniffle-worker"), "", "nothing was worth a warning");
}
