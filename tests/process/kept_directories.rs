//! Recovery of data directories of earlier versions: everything acknowledged is served.
//!
//! `tests/process/kept/` has a directory per version, with its data directories and a note on their
//! creation. The sent data follows from [`WRITTEN`] and [`length`], which must not change.

use std::path::{Path, PathBuf};

use tokio::task::block_in_place;
use uniffle_client::grpc::ShuffleClient;
use uniffle_testkit::worker::{Setup, Worker};
use uniffle_wire::types::PartitionId;

use crate::writes::{Written, client_of, key};

const DISKS: usize = 2;
/// The list of data directories that 0.1.0 kept in each of them.
const PEERS: &str = "uniffle-worker.peers";
/// Stands there for the directory that holds the data directories.
const PLACE: &str = "@PLACE@";

/// A shuffle, and the tasks that wrote and reported in each of two processes.
struct Shuffle {
    app: &'static str,
    id: i32,
    partitions: i32,
    tasks: [std::ops::Range<i64>; 2],
}

/// What every version wrote.
const WRITTEN: [Shuffle; 4] = [
    Shuffle { app: "kept-1", id: 0, partitions: 4, tasks: [0..6, 6..10] },
    Shuffle { app: "kept-1", id: 1, partitions: 2, tasks: [0..0, 0..3] },
    Shuffle { app: "kept-2", id: 7, partitions: 1, tasks: [0..5, 5..5] },
    // Registered, and nothing was ever written.
    Shuffle { app: "kept-2", id: 8, partitions: 3, tasks: [0..0, 0..0] },
];
/// An application that came and went.
const GONE: &str = "kept-3";

fn length(task: i64) -> u32 {
    400 + 211 * u32::try_from(task).expect("small")
}

fn setup(disks: usize) -> Setup {
    Setup { name: "kept", capacity: "64M", disks, ..Setup::default() }
}

fn kept(version: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/process/kept").join(version)
}

/// Copies the files below `from`; in lists of data directories `old` becomes `new`.
fn copy(from: &Path, to: &Path, old: &str, new: &str) {
    std::fs::create_dir_all(to).expect("a directory");
    for entry in std::fs::read_dir(from).expect("a directory").flatten() {
        let (path, to) = (entry.path(), to.join(entry.file_name()));
        if path.is_dir() {
            copy(&path, &to, old, new);
        } else if path.ends_with(PEERS) {
            let text = std::fs::read_to_string(&path).expect("text");
            std::fs::write(to, text.replace(old, new)).expect("a file");
        } else {
            std::fs::copy(&path, to).expect("a file");
        }
    }
}

/// To run: `UNIFFLE_WORKER_OLD=path/of/its/binary KEPT_VERSION=name
/// cargo test --test process make_kept -- --ignored`
#[tokio::test(flavor = "multi_thread")]
#[ignore = "makes the test data of a version, once"]
async fn make_kept_directories() {
    let variable = |name| std::env::var(name).unwrap_or_else(|_| panic!("{name} is not set"));
    let (binary, version) = (variable("UNIFFLE_WORKER_OLD"), variable("KEPT_VERSION"));
    let mut worker = Worker::start(&Setup { binary: Some(binary.into()), ..setup(DISKS) });
    for life in 0..2 {
        let client = client_of(&worker).await;
        for shuffle in &WRITTEN {
            let mut written = Written::of(key(shuffle.app, shuffle.id), shuffle.partitions);
            if life == 0 || shuffle.tasks[0].is_empty() {
                written.registered(&client).await;
            }
            for task in shuffle.tasks[life].clone() {
                written.task(&client, task, length(task)).await.expect("sent");
            }
        }
        let mut gone = Written::register(&client, key(GONE, 0), 2).await;
        gone.task(&client, 0, 1000).await.expect("sent");
        client.unregister_app(GONE).await.expect("known");
        drop(client);
        block_in_place(|| {
            // In order: everything is on the disks, and the list of directories says so.
            worker.terminate();
            if life == 0 {
                worker.start_again();
            }
        });
    }
    for path in worker.data_paths() {
        let place = worker.dir().to_str().expect("text");
        copy(path, &kept(&version).join(path.file_name().expect("a name")), place, PLACE);
    }
}

async fn taken_over(version: &str) {
    let dir = tempfile::Builder::new().prefix("uniffle-worker-test-").tempdir().expect("a temp dir");
    let paths: Vec<_> = (0..DISKS).map(|disk| dir.path().join(format!("disk{disk}"))).collect();
    for path in &paths {
        let place = dir.path().to_str().expect("text");
        copy(&kept(version).join(path.file_name().expect("a name")), path, PLACE, place);
    }
    let mut worker = Worker::start_in(&setup(DISKS), dir, paths);
    // And again from what this version made of it.
    for life in 0..2 {
        let client = client_of(&worker).await;
        assert_served(&client).await;
        let known = client.results(&key(GONE, 0), &[PartitionId(0)], None).await;
        assert!(known.is_err(), "{GONE} was unregistered: {known:?}");
        let log = worker.log();
        assert!(!log.contains(" WARN ") && !log.contains(" ERROR "), "{log}");
        if life == 0 {
            block_in_place(|| {
                worker.terminate();
                worker.start_again();
            });
        }
    }
    let client = client_of(&worker).await;
    let mut goes_on = Written::of(key("kept-1", 0), 4);
    goes_on.task(&client, 100, 1000).await.expect("it takes more");
    for app in ["kept-1", "kept-2"] {
        client.unregister_app(app).await.expect("known");
    }
    worker.assert_clean();
    block_in_place(|| worker.stop());
}

async fn assert_served(client: &ShuffleClient) {
    for shuffle in &WRITTEN {
        let mut written = Written::of(key(shuffle.app, shuffle.id), shuffle.partitions);
        for task in shuffle.tasks.iter().cloned().flatten() {
            written.expect(task, length(task));
        }
        written.assert_readable(client).await;
    }
    let nothing = client.results(&key("kept-2", 8), &[PartitionId(0)], None).await;
    assert_eq!(nothing.expect("it was registered").cardinality(), 0);
}

#[tokio::test(flavor = "multi_thread")]
async fn directories_of_0_1_0_are_taken_over_whole() {
    taken_over("0.1.0").await;
}
