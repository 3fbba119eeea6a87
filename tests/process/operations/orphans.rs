//! `uniffle-worker ctl orphans` lists and removes objects of departed workers.

use std::fs::{File, create_dir_all};
use std::path::Path;
use std::time::{Duration, SystemTime};

use serde_json::Value;
use uniffle_testkit::config::{ConfigLines, start_from};
use uniffle_testkit::s3::S3Server;

use super::ctl::run;
use super::fixture::object_store_table;

/// Creates an object of 100 bytes, `days` days old.
fn object(files: &Path, key: &str, days: u64) {
    let path = files.join("uniffle").join(key);
    create_dir_all(path.parent().unwrap()).unwrap();
    std::fs::write(&path, [7; 100]).unwrap();
    let written = SystemTime::now() - Duration::from_secs(days * 86_400 + 60);
    File::options().write(true).open(&path).unwrap().set_modified(written).unwrap();
}

fn has(files: &Path, key: &str) -> bool {
    files.join("uniffle").join(key).exists()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn only_objects_of_departed_workers_are_removed() {
    let (server, dir) = (S3Server::start().await, tempfile::tempdir().unwrap());
    let tables = format!("[admin]\nport = 0\n{}", object_store_table(&server, dir.path()));
    let lines = ConfigLines { store_type: "MEMORY_OBJECT", tables: &tables, ..ConfigLines::default() };
    let file = dir.path().join("config.toml");
    std::fs::write(&file, lines.own_text(&[dir.path().join("unused")])).unwrap();
    let worker = start_from(&file).await;
    let addresses = worker.addresses();
    let (http, admin) = (addresses.http.to_string(), addresses.admin.unwrap().to_string());

    let files = server.files();
    object(&files, "10.0.0.1-1/app/1.5/s0000000001", 3);
    let log = [0, 1].map(|copy| format!("!log/0000000100000001.0000abcd.000000000000.00000002.{copy}"));
    log.iter().for_each(|name| object(&files, &format!("10.0.0.1-1/{name}"), 3));
    object(&files, "10.0.0.1-1/!claim", 3);
    object(&files, "10.0.0.1-1/notes.txt", 3);
    object(&files, "10.0.0.2-1/app/1.5/s0000000001", 3);
    object(&files, "10.0.0.3-1/app/1.5/s0000000001", 0);
    object(&files, "other/file", 9);

    let ctl = async |arguments: &[&str]| {
        let whom = ["ctl", "--worker", &http, "--admin", &admin, "orphans", "--output", "json"];
        run(&[&whom[..], arguments].concat()).await
    };
    let listed: Value = serde_json::from_str(&ctl(&[]).await.succeeded()).unwrap();
    let of = |worker: &Value| {
        let [worker, state] = ["worker", "state"].map(|field| worker[field].as_str().unwrap().to_owned());
        (worker, state)
    };
    let all: Vec<_> = listed["workers"].as_array().unwrap().iter().map(of).collect();
    let unknown = |id: &str| (id.to_owned(), "unknown".to_owned());
    let (own, others): (Vec<_>, Vec<_>) = all.into_iter().partition(|(_, state)| state == "own");
    assert_eq!(own.len(), 1, "this worker must be listed once");
    assert_eq!(others, ["10.0.0.1-1", "10.0.0.2-1", "10.0.0.3-1"].map(unknown));
    assert_eq!((&listed["workers"][0]["objects"], &listed["workers"][0]["bytes"]), (&3.into(), &300.into()));
    assert!(
        ctl(&["--remove"]).await.failed(2).contains("--live"),
        "without knowledge of the live workers --live is required"
    );

    let removed: Value =
        serde_json::from_str(&ctl(&["--live", "10.0.0.2-1", "--remove"]).await.succeeded()).unwrap();
    assert_eq!(removed["removed"].as_array().unwrap().len(), 1, "{removed}");
    // The claim does not count.
    assert_eq!(removed["removed"][0]["objects"], 3, "{removed}");
    for key in ["app/1.5/s0000000001", &log[0], &log[1], "!claim"] {
        assert!(!has(&files, &format!("10.0.0.1-1/{key}")), "{key} was not removed");
    }
    assert!(has(&files, "10.0.0.2-1/app/1.5/s0000000001"), "an object of a live worker was removed");
    assert!(has(&files, "10.0.0.3-1/app/1.5/s0000000001"), "recent objects were removed");
    assert!(
        has(&files, "10.0.0.1-1/notes.txt") && has(&files, "other/file"),
        "files of no worker were removed"
    );

    ctl(&["--remove", "10.0.0.3-1"]).await.succeeded();
    assert!(!has(&files, "10.0.0.3-1/app/1.5/s0000000001"), "objects of the named worker were not removed");
    assert!(ctl(&["--remove", "10.0.0.9-1"]).await.failed(1).contains("10.0.0.9-1 has no objects"));
    assert_eq!(worker.stop().await, 0);
    server.stop().await;
}
