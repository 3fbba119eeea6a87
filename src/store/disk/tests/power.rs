//! Effects of a power loss. Acknowledged data survives if writes are synced. Otherwise no read
//! returns wrong bytes.

use std::collections::BTreeMap;
use std::time::Duration;

use futures::FutureExt;
use futures::future::join_all;
use rand::rngs::StdRng;
use rand::{RngExt, SeedableRng};

use super::*;
use uniffle_testkit::fault::{EIO, Fault, Operation, Rule};

async fn open_with(disks: &[TestDisk], sync: SyncWrites) -> Arc<LocalStore> {
    let config = LocalConfig { index_cache_bytes: 0, sync, ..LocalConfig::default() };
    let disks = disks.iter().map(TestDisk::disk).collect();
    super::open_with(config, disks).await.unwrap()
}

#[tokio::test(start_paused = true)]
async fn nothing_is_visible_before_it_is_synced() {
    for kind in [".data", ".index"] {
        let disks = [TestDisk::new("/a")];
        let store = open_with(&disks, SyncWrites::Group).await;
        let key = key("app", 1);
        store.register(&key);
        disks[0].faults.add(Rule::once(Operation::Sync, Fault::Slow(Duration::from_secs(5))).on(kind));
        let started = tokio::time::Instant::now();
        let batch = vec![extent(1, &[(1, 9000)], true)];
        let mut write = Box::pin(store.write(&key, batch));
        let early = tokio::time::timeout(Duration::from_secs(4), &mut write).await;
        assert!(early.is_err(), "{kind}");
        assert_eq!(read_all(&store, &key, 1).await.unwrap(), Vec::<i64>::new(), "{kind}");
        write.await.unwrap();
        assert!(started.elapsed() >= Duration::from_secs(5));
        assert_eq!(read_all(&store, &key, 1).await.unwrap(), [1]);
    }
}

#[tokio::test(start_paused = true)]
async fn log_without_successful_sync_is_never_appended() {
    for kind in [".data", ".index"] {
        for fault in [Some(Fault::Errno(EIO)), Some(Fault::Hang), None] {
            let disks = [TestDisk::new("/a"), TestDisk::new("/b")];
            let store = open_with(&disks, SyncWrites::Group).await;
            let key = key("app", 1);
            store.register(&key);
            let hangs = fault.is_none();
            disks[0].faults.add(Rule::once(Operation::Sync, fault.unwrap_or(Fault::Hang)).on(kind));
            let mut write = Box::pin(store.write(&key, vec![extent(1, &[(1, 9000)], true)]));
            if hangs {
                assert!((&mut write).now_or_never().is_none());
                drop(write);
                store.write(&key, vec![extent(1, &[(1, 9000)], true)]).await.unwrap();
            } else {
                write.await.unwrap();
            }
            let closed = |disk: &TestDisk| {
                disk.app_files().iter().filter(|path| path.to_string_lossy().ends_with(kind)).count()
            };
            store.probe().await;
            for id in 2..12 {
                store.write(&key, vec![extent(1, &[(id, 9000)], true)]).await.unwrap();
            }
            assert_eq!(closed(&disks[0]), 2, "{kind} {fault:?}: expected a new file beside the failed one");
            disks[0].faults.release().await;
            let mut ids = read_all(&store, &key, 1).await.unwrap();
            ids.dedup();
            assert_eq!(ids, (1..12).collect::<Vec<_>>());
            store.purge_app(&key.app).await;
            assert_nothing_left(&store, &disks).await;
        }
    }
}

#[tokio::test(start_paused = true)]
async fn unsyncable_directory_fails_like_an_uncreatable_one() {
    let disks = [TestDisk::new("/a"), TestDisk::new("/b")];
    let store = open_with(&disks, SyncWrites::Group).await;
    let key = key("app", 1);
    store.register(&key);
    disks[0].faults.add(Rule::once(Operation::SyncDir, Fault::Errno(EIO)));
    assert_eq!(store.write(&key, vec![extent(1, &[(1, 9000)], true)]).await.unwrap().disk, 1);
    assert!(!store.disks()[0].is_healthy());
    disks[1].faults.add(Rule::once(Operation::SyncDir, Fault::Errno(EIO)));
    drop(store);
    let store = open_with(&disks, SyncWrites::Group).await;
    assert_eq!(store.disks().len(), 1, "a disk that cannot be synced must not be used");
}

#[tokio::test(start_paused = true)]
async fn without_syncing_no_data_is_synced() {
    let disks = [TestDisk::new("/a")];
    let store = open_with(&disks, SyncWrites::Off).await;
    disks[0].faults.add(Rule::always(Operation::SyncDir, Fault::Errno(EIO)));
    disks[0].faults.add(Rule::always(Operation::Sync, Fault::Errno(EIO)));
    let key = key("app", 1);
    store.register(&key);
    store.write(&key, vec![extent(1, &[(1, 9000)], true)]).await.unwrap();
    assert_eq!(disks[0].faults.injected(), 0);
}

/// The machine is switched off after a worker with `localfile_store.sync = "off"` was stopped.
#[tokio::test(start_paused = true)]
async fn last_sync_reaches_all_responsive_devices() {
    let disks = [TestDisk::new("/a"), TestDisk::new("/b")];
    let store = open_with(&disks, SyncWrites::Off).await;
    let key = key("app", 1);
    let handle = store.register(&key);
    store.append_metadata(&handle, b"registered").await.unwrap();
    for id in 0..20 {
        store.write(&key, vec![extent(1, &[(id, 9000)], true)]).await.unwrap();
    }
    let time = Duration::from_secs(10);
    disks[0].faults.add(Rule::once(Operation::SyncDir, Fault::Hang));
    let began = tokio::time::Instant::now();
    store.sync_disks(time).await;
    assert_eq!(began.elapsed(), time, "a hung disk must not extend the sync");
    disks[0].faults.release().await;
    drop((store, handle));
    disks.iter().zip(3..).for_each(|(disk, seed)| disk.memory.lose_power(seed));
    let store = open_with(&disks, SyncWrites::Off).await;
    assert_eq!(read_all(&store, &key, 1).await.unwrap(), (0..20).collect::<Vec<_>>());
}

/// Acknowledged data of all process lifetimes so far.
#[derive(Default)]
struct Promised {
    metadata: Vec<Vec<u8>>,
    /// Blocks by id with their place in the stream, as listed by an index.
    records: BTreeMap<i64, IndexRecord>,
}

/// Writes at random to failing disks, until the power fails during a write.
async fn live(disks: &[TestDisk], random: &mut StdRng, sync: SyncWrites, promised: &mut Promised) {
    let store = open_with(disks, sync).await;
    let key = key("app", 1);
    let handle = store.register(&key);
    let mut next =
        promised.records.keys().max().map_or(0, |id| id + 1) + 1000 * i64::from(random.random_range(1..9));
    for _ in 0..random.random_range(1..12) {
        match random.random_range(0..10) {
            0 => disks[random.random_range(0..disks.len())].memory.fail_syncs(1),
            1 => {
                let kind = *[".data", ".index", "/log"].get(random.random_range(0..3)).unwrap();
                let fault = if random.random() { Fault::Errno(EIO) } else { Fault::Hang };
                let operation = if random.random() { Operation::Sync } else { Operation::Write };
                let rule = Rule::once(operation, fault).on(kind);
                disks[random.random_range(0..disks.len())].faults.add(rule);
            }
            2 => {
                let note = next.to_be_bytes().to_vec();
                if store.append_metadata(&handle, &note).await.is_ok() {
                    promised.metadata.push(note);
                }
            }
            3 => store.maintain_once().await,
            _ => {
                let batches = (0..random.random_range(1..4)).map(|_| {
                    next += 1;
                    let blocks = [(next, random.random_range(1..9000)), (next + 100_000, 5)];
                    store.write(&key, vec![extent(1, &blocks, random.random())])
                });
                join_all(batches.collect::<Vec<_>>()).await;
            }
        }
        store.probe().await;
    }
    // Readable blocks are promised at their place.
    for record in index_of(&store, &key, 1).await.unwrap().0 {
        if record.block_id != FILLER_BLOCK_ID {
            promised.records.insert(record.block_id, record);
        }
    }
    // The last writes are in progress when the power fails.
    let kind = *[".data", ".index"].get(random.random_range(0..2)).unwrap();
    disks.iter().for_each(|disk| disk.faults.add(Rule::once(Operation::Sync, Fault::Hang).on(kind)));
    let last = vec![extent(1, &[(next + 1, 70_000)], true)];
    drop(store.write(&key, last).now_or_never());
    drop(store);
    disks.iter().for_each(|disk| disk.faults.clear());
    disks.iter().for_each(|disk| disk.memory.lose_power(random.random()));
}

fn history(seed: u64, sync: SyncWrites, check: impl AsyncFn(Arc<LocalStore>, &Promised)) {
    let runtime =
        tokio::runtime::Builder::new_current_thread().enable_time().start_paused(true).build().unwrap();
    runtime.block_on(async {
        let mut random = StdRng::seed_from_u64(seed);
        let names = ["/a", "/b", "/c"];
        let disks: Vec<_> =
            names[..random.random_range(1..=3)].iter().map(|name| TestDisk::new(name)).collect();
        let mut promised = Promised::default();
        for _ in 0..3 {
            live(&disks, &mut random, sync, &mut promised).await;
        }
        check(open_with(&disks, sync).await, &promised).await;
    });
}

/// `POWER_SEEDS=10000 cargo test --lib power` runs more seeds.
#[test]
fn synced_data_survives_power_loss_in_place() {
    let seeds = std::env::var("POWER_SEEDS").map_or(150, |text| text.parse().unwrap());
    let blocks = std::cell::Cell::new(0);
    for seed in 0..seeds {
        history(seed, SyncWrites::Group, async |store, promised| {
            let mut recovered = recover(&store).await;
            if promised.records.is_empty() && promised.metadata.is_empty() {
                return;
            }
            let shuffle = recovered.recovered.shuffles.remove(0);
            assert!(shuffle.lost.is_empty(), "seed {seed}: extents are lost: {:?}", shuffle.lost);
            assert_eq!(shuffle.reason, "", "seed {seed}: the shuffle has a reason for losses");
            for note in &promised.metadata {
                assert!(
                    recovered.records[&shuffle.key].iter().any(|it| it == note),
                    "seed {seed}: an acknowledged record is missing"
                );
            }
            let key = key("app", 1);
            let records = index_of(&store, &key, 1).await.unwrap().0;
            for (id, record) in &promised.records {
                assert!(records.contains(record), "seed {seed}: block {id} has moved");
                let place = (record.offset as u64, record.length as u32);
                let read = range_of(&store, &key, 1, place).await.unwrap();
                assert!(read == payload(*id, read.len()), "seed {seed}: block {id} has other bytes");
                blocks.set(blocks.get() + 1);
            }
        });
    }
    assert!(blocks.get() > 10 * seeds, "{}", blocks.get());
}

/// Without syncs a power loss takes blocks, but no read returns wrong bytes.
#[test]
fn unsynced_data_is_lost_and_never_wrong() {
    let (damaged, gone) = (std::cell::Cell::new(0), std::cell::Cell::new(0));
    for seed in 0..100 {
        history(seed, SyncWrites::Off, async |store, promised| {
            let key = key("app", 1);
            let Ok((records, _)) = index_of(&store, &key, 1).await else { return };
            for (id, record) in &promised.records {
                if !records.contains(record) {
                    gone.set(gone.get() + 1);
                    continue;
                }
                let place = (record.offset as u64, record.length as u32);
                // The block was already found damaged. It is a hole since then, and reads of it are
                // refused or marked.
                if store.data(&key, PartitionId(1), place.0, place.1).is_ok_and(|read| read.has_hole) {
                    damaged.set(damaged.get() + 1);
                    continue;
                }
                match range_of(&store, &key, 1, place).await {
                    Ok(read) => {
                        assert!(read == payload(*id, read.len()), "seed {seed}: block {id} has other bytes")
                    }
                    Err(error) => {
                        assert!(
                            [StoreErrorKind::Corrupt, StoreErrorKind::InvalidRange].contains(&error.kind),
                            "{error}"
                        );
                        damaged.set(damaged.get() + 1);
                    }
                }
            }
        });
    }
    assert!(damaged.get() > 0 && gone.get() > 0, "{} {}", damaged.get(), gone.get());
}
