//! How long a report waits for the device. `LOG_DIR=/dev/shm cargo test --release --lib how_long_a_report_waits -- --ignored
//! --nocapture` is the same without a device behind it.

use std::path::Path;
use std::sync::{Arc, Weak};
use std::time::Duration;

use bytes::Bytes;
use futures::future::join_all;
use tokio::time::Instant;
use uuid::Uuid;

use super::{Deadlines, Directory, Health, Incarnation, MetadataLog, Survey};
use crate::runtime::Tasks;
use uniffle_io::blocking::BlockingDisk;
use uniffle_wire::types::{AppId, ShuffleId, ShuffleKey};

#[derive(Debug)]
struct Sound;

impl Health for Sound {
    fn rank(&self) -> Option<u8> {
        Some(0)
    }

    fn failed(&self, error: &std::io::Error) {
        panic!("{error}");
    }
}

async fn open(roots: &[&Path], tasks: &Tasks) -> (MetadataLog, Arc<dyn Health>) {
    let health: Arc<dyn Health> = Arc::new(Sound);
    let directory = |root: &&Path| Directory {
        uuid: Uuid::new_v4(),
        label: root.display().to_string(),
        io: Arc::new(BlockingDisk::new(root, 4, 16)),
        health: Weak::clone(&Arc::downgrade(&health)),
    };
    let directories: Vec<_> = roots.iter().map(directory).collect();
    let deadlines = Deadlines { write: Duration::from_secs(10), name: Duration::from_secs(30) };
    let survey = Survey::take(&directories, deadlines.name).await;
    (MetadataLog::open(directories, survey, None, deadlines, tasks).await.0, health)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[ignore = "a measurement"]
#[expect(clippy::excessive_nesting, reason = "a loop over cases around what each does")]
async fn how_long_a_report_waits() {
    const REPORTS: usize = 4000;
    let base = std::env::var("LOG_DIR").unwrap_or_else(|_| std::env::temp_dir().display().to_string());
    for directories in [1, 2] {
        for clients in [1, 16, 64] {
            let roots: Vec<_> = (0..directories).map(|_| tempfile::tempdir_in(&base).unwrap()).collect();
            let paths: Vec<&Path> = roots.iter().map(tempfile::TempDir::path).collect();
            let tasks = Tasks::new();
            let (log, _health) = open(&paths, &tasks).await;
            let key = ShuffleKey::new(AppId::parse("application_1700000000000_0001").unwrap(), ShuffleId(1));
            let shuffle = Incarnation { key, number: 1 };
            // 100 block ids of one task.
            let said = Bytes::from(vec![7; 300]);
            let began = Instant::now();
            let one = |_| async {
                let mut waits = Vec::new();
                for _ in 0..REPORTS / clients {
                    let began = Instant::now();
                    log.append(shuffle.clone(), said.clone()).await.unwrap();
                    waits.push(began.elapsed());
                }
                waits
            };
            let waits = join_all((0..clients).map(one)).await;
            let rate = REPORTS as f64 / began.elapsed().as_secs_f64();
            let mut waits: Vec<Duration> = waits.into_iter().flatten().collect();
            waits.sort_unstable();
            let at = |share: usize| waits[(waits.len() - 1) * share / 100];
            println!(
                "{directories} directories, {clients} clients: p50 {:?}, p99 {:?}, {rate:.0}/s",
                at(50),
                at(99)
            );
            tasks.cancel();
        }
    }
}
