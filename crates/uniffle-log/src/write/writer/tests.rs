//! Rate and delay of reports on a simulated rotating disk. `benches/log.rs` uses real disks.

use std::sync::{Arc, Weak};
use std::time::Duration;

use bytes::Bytes;
use futures::future::join_all;
use uuid::Uuid;

use crate::{Deadlines, Directory, DirectoryHealth, Incarnation, MetadataLog, Survey};
use uniffle_base::clock::Instant;
use uniffle_base::runtime::Tasks;
use uniffle_io::Disk;
use uniffle_testkit::fault::{Fault, FaultDisk, Faults, Operation, Rule};
use uniffle_testkit::memory_disk::MemoryDisk;
use uniffle_wire::types::{AppId, ShuffleId, ShuffleKey};

/// Number of reports per measurement.
const REPORTS: usize = 4000;
/// Duration of a seek and half a turn of a disk with 7,200 turns per minute.
const SEEK: Duration = Duration::from_micros(8500 + 4200);

#[derive(Debug)]
struct Healthy;

impl DirectoryHealth for Healthy {
    fn rank(&self) -> Option<u8> {
        Some(0)
    }

    fn failed(&self, error: &std::io::Error) {
        panic!("{error}");
    }
}

async fn open(disks: Vec<Arc<dyn Disk>>, tasks: &Tasks) -> (MetadataLog, Arc<dyn DirectoryHealth>) {
    let health: Arc<dyn DirectoryHealth> = Arc::new(Healthy);
    let directory = |io: Arc<dyn Disk>| Directory {
        uuid: Uuid::new_v4(),
        label: io.root().display().to_string(),
        io,
        health: Weak::clone(&Arc::downgrade(&health)),
    };
    let directories: Vec<_> = disks.into_iter().map(directory).collect();
    let deadlines = Deadlines { write: Duration::from_secs(10), name: Duration::from_secs(30) };
    let survey = Survey::take(&directories, deadlines.name).await;
    (MetadataLog::open(directories, survey, deadlines, None, tasks).await.0, health)
}

/// Returns the reports per second of `clients` clients that each send one report after another.
async fn measure(disks: Vec<Arc<dyn Disk>>, clients: usize) -> f64 {
    let (tasks, directories) = (Tasks::new(), disks.len());
    let (log, _health) = open(disks, &tasks).await;
    let key = ShuffleKey::new(AppId::parse("application_1700000000000_0001").unwrap(), ShuffleId(1));
    let shuffle = Incarnation { key, number: 1 };
    // Size of 100 block ids of one task.
    let record = Bytes::from(vec![7; 300]);
    let began = Instant::now();
    let one = |_| async {
        let mut waits = Vec::new();
        for _ in 0..REPORTS / clients {
            let began = Instant::now();
            log.append(shuffle.clone(), record.clone()).await.unwrap();
            waits.push(began.elapsed());
        }
        waits
    };
    let waits = join_all((0..clients).map(one)).await;
    let rate = REPORTS as f64 / began.elapsed().as_secs_f64();
    let mut waits: Vec<Duration> = waits.into_iter().flatten().collect();
    waits.sort_unstable();
    let at = |share: usize| waits[(waits.len() - 1) * share / 100];
    println!("{directories} directories, {clients} clients: p50 {:?}, p99 {:?}, {rate:.0}/s", at(50), at(99));
    tasks.cancel();
    rate
}

/// Uses a simulated clock. A sync is a seek to the data and one to the journal of the file system.
/// Two copies on one disk wait for one head. `--nocapture` prints the figures of
/// benches/notes/metadata-log.md.
#[tokio::test(start_paused = true)]
async fn group_commit_handles_a_thousand_reports_per_second() {
    for directories in [1, 2] {
        let mut rates = Vec::new();
        for clients in [1, 16, 64] {
            let copies_per_disk = if directories == 1 { 2 } else { 1 };
            let disk = |at| {
                let faults = Faults::default();
                faults.add(Rule::always(Operation::Sync, Fault::Slow(2 * SEEK * copies_per_disk)));
                let disk = Arc::new(MemoryDisk::new(&format!("/rotating{at}"), None));
                Arc::new(FaultDisk::new(disk, faults)) as Arc<dyn Disk>
            };
            rates.push(measure((0..directories).map(disk).collect(), clients).await);
        }
        assert!(rates[2] >= 1000.0, "{rates:?}");
    }
}
