//! Small extents are copied together: readers see the same as before, and whenever the process, the power or a disk goes, every
//! block is still where clients were told.

use std::time::Duration;

use futures::FutureExt as _;
use tokio::time::advance;

use super::super::disk::InFlight;
use super::super::rewrite::{Looks, PASS_BYTES, WINDOW_BYTES};
use super::*;
use crate::durability::OnDamage;
use uniffle_testkit::fault::{EIO, ENOSPC, Fault, Operation, Rule};

const PARTITIONS: i32 = 3;
const BATCHES: i64 = 6;
/// What those batches have.
const ALL_EXTENTS: u64 = PARTITIONS.unsigned_abs() as u64 * BATCHES as u64;

/// The bytes and the index of each partition.
type Streams = Vec<(Vec<u8>, Vec<IndexRecord>)>;

async fn streams_of(store: &LocalStore, key: &ShuffleKey) -> Streams {
    let mut all = Vec::new();
    for partition in 0..PARTITIONS {
        let (records, length) = index_of(store, key, partition).await.unwrap();
        assert!(records.iter().all(|record| record.block_id != FILLER_BLOCK_ID), "{partition} has a hole");
        let bytes = range_of(store, key, partition, (0, length as u32)).await.unwrap();
        for record in &records {
            let block = &bytes[record.offset as usize..][..record.length as usize];
            assert!(block == payload(record.block_id, block.len()), "block {}", record.block_id);
        }
        all.push((bytes, records));
    }
    all
}

async fn write_batches(store: &LocalStore, key: &ShuffleKey, batches: std::ops::Range<i64>) {
    for batch in batches {
        let of = |partition: i32| {
            let id = batch * 100 + i64::from(partition);
            let blocks = [(id, 3000 + id as usize), (id + 50, 700)];
            extent(partition, &blocks, (batch + i64::from(partition)) % 2 == 0)
        };
        store.write(key, (0..PARTITIONS).map(of).collect()).await.unwrap();
    }
}

/// A store on these disks with a shuffle that has something of each batch in each partition.
async fn written(disks: &[TestDisk]) -> (Arc<LocalStore>, ShuffleKey, ShuffleHandle) {
    let store = store_on(disks).await;
    let key = key("app", 1);
    let handle = store.register(&key);
    store.append_metadata(&handle, b"registered").await.unwrap();
    write_batches(&store, &key, 0..BATCHES).await;
    (store, key, handle)
}

fn data_logs(disks: &[TestDisk]) -> usize {
    let all = disks.iter().flat_map(|disk| disk.memory.files());
    all.filter(|path| path.extension().is_some_and(|it| it == "data")).count()
}

/// A later process finds everything, and nothing else.
async fn assert_all_found(disks: &[TestDisk], expected: &Streams, what: &str) -> Arc<LocalStore> {
    let store = store_on(disks).await;
    let heard = hear(&store).await;
    let shuffle = &heard.shuffles[0];
    assert!(shuffle.lost.is_empty() && shuffle.reason.is_empty(), "{what}: {shuffle:?}");
    let key = key("app", 1);
    assert!(streams_of(&store, &key).await == *expected, "{what}");
    let ids = (0..).map_while(|partition| shuffle.present.held(PartitionId(partition)));
    let present: u64 = ids.map(crate::durability::IdSet::len).sum();
    let blocks: usize = expected.iter().map(|(_, records)| records.len()).sum();
    assert_eq!(present, blocks as u64, "{what}");
    store
}

#[tokio::test(start_paused = true)]
async fn copies_replace_originals_and_their_logs() {
    let disks = [TestDisk::new("/a"), TestDisk::new("/b")];
    let (store, key, handle) = written(&disks).await;
    let before = streams_of(&store, &key).await;
    let used = store.used_bytes();
    let rewritten = store.rewrite(&handle).await.unwrap();
    assert_eq!(rewritten.extents, ALL_EXTENTS);
    assert_eq!(streams_of(&store, &key).await, before);
    assert_eq!(data_logs(&disks), 4, "nothing is removed at once");
    store.maintain_once().await;
    assert_eq!(data_logs(&disks), 2);
    assert!(store.used_bytes() < used + used / 4, "only index groups are more");
    assert_eq!(streams_of(&store, &key).await, before);
    assert_eq!(store.rewrite(&handle).await.unwrap(), Rewritten::default(), "it is in order");

    // What comes later is put in order by itself.
    write_batches(&store, &key, BATCHES..BATCHES + 4).await;
    let longer = streams_of(&store, &key).await;
    assert_eq!(store.rewrite(&handle).await.unwrap().extents, u64::from(PARTITIONS.unsigned_abs()) * 4);
    store.maintain_once().await;
    assert_eq!(streams_of(&store, &key).await, longer);
    drop((store, handle));

    let store = assert_all_found(&disks, &longer, "restart").await;
    write_batches(&store, &key, BATCHES + 4..BATCHES + 5).await;
    let longest = streams_of(&store, &key).await;
    let handle = store.handle(&key).unwrap();
    assert!(store.rewrite(&handle).await.unwrap().extents > 0);
    store.maintain_once().await;
    drop((store, handle));
    let store = assert_all_found(&disks, &longest, "another restart").await;
    store.purge_app(&key.app).await;
    assert_nothing_left(&store, &disks).await;
}

#[tokio::test(start_paused = true)]
async fn ordered_partition_is_read_at_once() {
    let disks = [TestDisk::new("/a")];
    let store = store_on(&disks).await;
    let key = key("app", 1);
    let handle = store.register(&key);
    for id in 0..20 {
        let of = |partition: i32| extent(partition, &[(id * 10 + i64::from(partition), 5000)], true);
        store.write(&key, (0..4).map(of).collect()).await.unwrap();
    }
    store.rewrite(&handle).await.unwrap();
    let shuffle = store.find(&key).unwrap();
    let extents = shuffle.extents(PartitionId(2));
    let places: Vec<_> = extents.iter().map(|it| (it.data_log, it.data_page)).collect();
    let first = places[0];
    let expected: Vec<_> = (0..20).map(|at| (first.0, first.1 + 2 * at)).collect();
    assert_eq!(places, expected);
}

/// Every kind of call, at every place: the process dies in it.
#[tokio::test(start_paused = true)]
async fn rewrite_survives_a_crash_at_any_step() {
    died_at_every_step(false).await;
}

/// `localfile_store.sync = "off"`: what was on the devices before is there afterwards.
#[tokio::test(start_paused = true)]
async fn rewrite_survives_power_loss_at_any_step() {
    died_at_every_step(true).await;
}

async fn died_at_every_step(power: bool) {
    let kinds = [
        Operation::Read,
        Operation::OpenRead,
        Operation::CreateDir,
        Operation::OpenWrite,
        Operation::Write,
        Operation::Sync,
        Operation::SyncDir,
        Operation::Rename,
        Operation::Remove,
    ];
    let mut deaths = 0;
    for (kind, at) in kinds.into_iter().flat_map(|kind| [(kind, 0), (kind, 1)]) {
        for after in 0..100 {
            let disks = [TestDisk::new("/a"), TestDisk::new("/b")];
            let (store, key, handle) = written(&disks).await;
            let before = streams_of(&store, &key).await;
            store.sync_disks(Duration::from_secs(10)).await;
            let dies = Rule::once(kind, Fault::Torn { bytes: 5000 }).after(after);
            disks[at].faults.add(dies);
            let rewriting = async {
                let _failed = store.rewrite(&handle).await;
                store.maintain_once().await;
            };
            let has_died = tokio::time::timeout(Duration::from_secs(1), rewriting).await.is_err();
            drop((store, handle));
            disks.iter().for_each(|disk| disk.faults.clear());
            if power {
                disks
                    .iter()
                    .zip(0..)
                    .for_each(|(disk, seed)| disk.memory.lose_power(seed + u64::from(after)));
            }
            let what = format!("{kind:?} after {after} on disk {at}, power {power}");
            let store = assert_all_found(&disks, &before, &what).await;
            store.maintain_once().await;
            assert!(streams_of(&store, &key).await == before, "{what}: after cleaning");
            drop(store);
            if power {
                disks.iter().for_each(|disk| disk.memory.lose_power(u64::from(after)));
            }
            let store = assert_all_found(&disks, &before, &what).await;
            let handle = store.handle(&key).unwrap();
            store.rewrite(&handle).await.unwrap();
            store.maintain_once().await;
            assert!(streams_of(&store, &key).await == before, "{what}: rewritten again");
            drop(handle);
            store.purge_app(&key.app).await;
            assert_nothing_left(&store, &disks).await;
            if !has_died {
                break;
            }
            deaths += 1;
        }
    }
    assert!(deaths >= 24, "{deaths}");
}

#[tokio::test(start_paused = true)]
async fn rewrite_survives_disk_failure_at_any_step() {
    for fault in
        [Fault::Errno(EIO), Fault::Errno(ENOSPC), Fault::Short { bytes: 5000, errno: EIO }, Fault::Hang]
    {
        for kind in
            [Operation::OpenWrite, Operation::Write, Operation::Sync, Operation::SyncDir, Operation::Read]
        {
            for after in 0..4 {
                let disks = [TestDisk::new("/a"), TestDisk::new("/b")];
                let (store, key, handle) = written(&disks).await;
                let before = streams_of(&store, &key).await;
                disks[0].faults.add(Rule::once(kind, fault).after(after));
                let _failed = store.rewrite(&handle).await;
                let what = format!("{fault:?} in {kind:?} after {after}");
                disks.iter().for_each(|disk| disk.faults.clear());
                disks[0].faults.release().await;
                store.probe().await;
                store.maintain_once().await;
                assert!(streams_of(&store, &key).await == before, "{what}");
                // Also when its group waits to be appended.
                write_batches(&store, &key, BATCHES..BATCHES + 1).await;
                let longer = streams_of(&store, &key).await;
                store.rewrite(&handle).await.unwrap();
                store.maintain_once().await;
                assert!(streams_of(&store, &key).await == longer, "{what}: rewritten again");
                drop((store, handle));
                assert_all_found(&disks, &longer, &what).await;
            }
        }
    }
}

#[tokio::test(start_paused = true)]
async fn reader_pins_the_logs_it_has_seen() {
    let disks = [TestDisk::new("/a")];
    let (store, key, handle) = written(&disks).await;
    let before = streams_of(&store, &key).await;
    let length = before[1].0.len() as u32;
    let mut read = store.data(&key, PartitionId(1), 0, length).unwrap();
    let late = store.data(&key, PartitionId(1), 0, length).unwrap();
    store.rewrite(&handle).await.unwrap();
    // A second time, of what has come since: who reads the first logs may read these, too.
    write_batches(&store, &key, BATCHES..BATCHES + 1).await;
    store.rewrite(&handle).await.unwrap();
    store.maintain_once().await;
    assert_eq!(data_logs(&disks), 4);
    let mut bytes = Vec::new();
    while let Some(chunk) = read.next_chunk(&HeapBuffers).await.unwrap() {
        bytes.extend_from_slice(&chunk);
    }
    assert!(bytes == before[1].0);
    drop(read);
    store.maintain_once().await;
    assert_eq!(data_logs(&disks), 4, "another one has not read yet");
    drop(late);
    store.maintain_once().await;
    assert_eq!(data_logs(&disks), 2);
    drop(handle);
    store.purge_app(&key.app).await;
    assert_nothing_left(&store, &disks).await;
}

#[tokio::test(start_paused = true)]
async fn rewrite_survives_a_purge_at_any_step() {
    for kind in [Operation::Read, Operation::OpenWrite, Operation::Write, Operation::Sync, Operation::SyncDir]
    {
        for after in 0..3 {
            let disks = [TestDisk::new("/a")];
            let (store, key, handle) = written(&disks).await;
            disks[0].faults.add(Rule::once(kind, Fault::Hang).after(after));
            let mut rewriting = Box::pin(store.rewrite(&handle));
            if (&mut rewriting).now_or_never().is_some() {
                continue;
            }
            let purge = store.purge_app(&key.app);
            let released = async {
                tokio::time::sleep(Duration::from_secs(1)).await;
                disks[0].faults.release().await;
            };
            let (rewritten, (), ()) = futures::join!(rewriting, purge, released);
            // All may have been done before.
            let kind_of = rewritten.map_err(|error| error.kind);
            assert!(kind_of.is_ok() || kind_of == Err(StoreErrorKind::Purged), "{kind:?} after {after}");
            drop(handle);
            store.purge_app(&key.app).await;
            store.sweep().await;
            assert_nothing_left(&store, &disks).await;
        }
    }
}

#[tokio::test(start_paused = true)]
async fn damaged_block_is_reported_and_never_copied() {
    let disks = [TestDisk::new("/a")];
    let (store, key, handle) = written(&disks).await;
    let heard: Arc<parking_lot::Mutex<Vec<i32>>> = Arc::default();
    let hears = Arc::clone(&heard);
    let on_damage: OnDamage = Arc::new(move |_: &ShuffleKey, partition: PartitionId, _: &str| {
        hears.lock().push(partition.0);
    });
    Tier::on_damage(&*store, on_damage);
    let extent = *store.find(&key).unwrap().extents(PartitionId(1)).get(2).unwrap();
    let log = disks[0].app_files().into_iter().find(|path| path.extension().is_some_and(|it| it == "data"));
    disks[0].memory.corrupt(&log.unwrap(), extent.data_offset() as usize + 17, 1);
    let error = store.rewrite(&handle).await.unwrap_err();
    assert_eq!(error.kind, StoreErrorKind::Corrupt, "{error}");
    assert_eq!(store.core.metrics.blocks_damaged.get(), 1);
    assert_eq!(*heard.lock(), [1, 1], "before and after");
    let records = index_of(&store, &key, 1).await.unwrap().0;
    assert_eq!(records.iter().filter(|it| it.block_id == FILLER_BLOCK_ID).count(), 1);
    // Everything else can be copied; the damaged extent stays, and so does its log.
    store.probe().await;
    store.rewrite(&handle).await.unwrap();
    store.maintain_once().await;
    assert_eq!(data_logs(&disks), 2);
    assert_eq!(index_of(&store, &key, 1).await.unwrap().0, records);
    for record in records.iter().filter(|it| it.block_id != FILLER_BLOCK_ID) {
        let range = (record.offset as u64, record.length as u32);
        let bytes = range_of(&store, &key, 1, range).await.unwrap();
        assert!(bytes == payload(record.block_id, bytes.len()));
    }
}

#[tokio::test(start_paused = true)]
async fn transiently_damaged_block_is_not_copied_or_lost() {
    let disks = [TestDisk::new("/a")];
    let (store, key, handle) = written(&disks).await;
    let before = streams_of(&store, &key).await;
    disks[0].faults.add(Rule::once(Operation::Read, Fault::Flip).on(".data"));
    assert_eq!(store.rewrite(&handle).await.unwrap_err().kind, StoreErrorKind::Io);
    assert_eq!(store.core.metrics.blocks_damaged.get(), 0);
    let extent = *store.find(&key).unwrap().extents(PartitionId(2)).get(3).unwrap();
    let index =
        disks[0].app_files().into_iter().find(|path| path.extension().is_some_and(|it| it == "index"));
    let flip = || disks[0].memory.corrupt(index.as_ref().unwrap(), extent.index_offset as usize + 9, 4);
    flip();
    assert_eq!(store.rewrite(&handle).await.unwrap_err().kind, StoreErrorKind::Corrupt);
    flip();
    assert_eq!(streams_of(&store, &key).await, before);
    store.rewrite(&handle).await.unwrap();
    assert_eq!(streams_of(&store, &key).await, before);
}

/// A hole may be readable again for a later process: its log stays.
#[tokio::test(start_paused = true)]
async fn log_of_a_hole_is_kept() {
    let disks = [TestDisk::new("/a")];
    let (store, key, handle) = written(&disks).await;
    let before = streams_of(&store, &key).await;
    disks[0].faults.add(Rule::always(Operation::Read, Fault::Errno(EIO)).on(".data"));
    for _ in 0..3 {
        range_of(&store, &key, 1, (0, before[1].0.len() as u32)).await.unwrap_err();
    }
    store.mark_damaged_lost(&key, PartitionId(1)).await.unwrap();
    disks[0].faults.clear();
    store.probe().await;
    assert!(store.rewrite(&handle).await.unwrap().extents > 0);
    store.maintain_once().await;
    assert_eq!(data_logs(&disks), 2);
    drop((store, handle));
    assert_all_found(&disks, &before, "restart").await;
}

#[tokio::test(start_paused = true)]
async fn partly_unknown_shuffle_keeps_its_files() {
    let disks = [TestDisk::new("/a"), TestDisk::new("/b")];
    let (store, key, handle) = written(&disks).await;
    drop((store, handle));
    let store = store_on(&disks[..1]).await;
    let handle = store.handle(&key).unwrap();
    let logs = data_logs(&disks[..1]);
    store.rewrite(&handle).await.unwrap();
    store.maintain_once().await;
    assert!(data_logs(&disks[..1]) > logs, "copies and originals");
}

/// Extents are looked at and exchanged some hundred at a time, and go in several windows.
#[tokio::test(start_paused = true)]
async fn many_extents_are_rewritten_as_few() {
    const MANY: i64 = 300;
    let disks = [TestDisk::new("/a")];
    let (store, key, handle) = written(&disks).await;
    write_batches(&store, &key, BATCHES..MANY).await;
    let before = streams_of(&store, &key).await;
    let rewritten = store.rewrite(&handle).await.unwrap();
    assert_eq!(rewritten.extents, u64::from(PARTITIONS.unsigned_abs()) * MANY as u64);
    assert!(rewritten.bytes > WINDOW_BYTES, "{rewritten:?}");
    store.maintain_once().await;
    assert_eq!(data_logs(&disks), 1);
    assert!(streams_of(&store, &key).await == before);
    drop((store, handle));
    assert_all_found(&disks, &before, "restart").await;
}

/// Between the extents that it exchanges, too.
#[tokio::test(start_paused = true)]
async fn rewrite_may_be_cancelled_at_any_step() {
    let mut steps = 0;
    loop {
        assert!(steps < 10_000, "a rewrite is not over after {steps} steps");
        let disks = [TestDisk::new("/a")];
        let (store, key, handle) = written(&disks).await;
        write_batches(&store, &key, BATCHES..100).await;
        let before = streams_of(&store, &key).await;
        let mut rewriting = Box::pin(store.rewrite(&handle));
        let is_done = (0..=steps).any(|_| (&mut rewriting).now_or_never().is_some());
        drop(rewriting);
        let what = format!("dropped after {steps} steps");
        assert!(streams_of(&store, &key).await == before, "{what}");
        write_batches(&store, &key, 100..101).await;
        let longer = streams_of(&store, &key).await;
        store.rewrite(&handle).await.unwrap();
        store.maintain_once().await;
        assert!(streams_of(&store, &key).await == longer, "{what}: rewritten again");
        drop((store, handle));
        assert_all_found(&disks, &longer, &what).await;
        if is_done {
            break;
        }
        steps += 1;
    }
    assert!(steps >= 3, "{steps}");
}

/// A store that rewrites by itself.
async fn that_rewrites(disks: &[TestDisk]) -> Arc<LocalStore> {
    that_rewrites_within(disks, &Budget::new(u64::MAX)).await
}

/// One with a shuffle that has all batches.
async fn with_batches(disks: &[TestDisk]) -> (Arc<LocalStore>, ShuffleKey) {
    let (store, key) = (that_rewrites(disks).await, key("app", 1));
    store.register(&key);
    write_batches(&store, &key, 0..BATCHES).await;
    (store, key)
}

async fn that_rewrites_within(disks: &[TestDisk], memory: &Budget) -> Arc<LocalStore> {
    let config =
        LocalConfig { rewrite_below_bytes: 64 << 10, index_cache_bytes: 0, ..LocalConfig::default() };
    let disks = disks.iter().map(TestDisk::disk).collect();
    LocalStore::open(config, disks, memory, &Registry::new()).await.unwrap()
}

#[tokio::test(start_paused = true)]
async fn rewrite_charges_its_memory_or_is_skipped() {
    let memory = Budget::new(PASS_BYTES + (1 << 20));
    let disks = [TestDisk::new("/a")];
    let store = that_rewrites_within(&disks, &memory).await;
    let key = key("app", 1);
    store.register(&key);
    write_batches(&store, &key, 0..BATCHES).await;
    let lists = memory.used();
    let others = memory.force_charge(1 + (1 << 20));
    let mut looks = Looks::default();
    let charged = std::sync::atomic::AtomicU64::new(0);
    let goes_on = || {
        charged.fetch_max(memory.used(), std::sync::atomic::Ordering::Relaxed);
        true
    };
    store.rewrite_idle(&mut looks, &goes_on).await;
    for _ in 0..2 {
        advance(Duration::from_secs(31)).await;
        store.rewrite_idle(&mut looks, &goes_on).await;
    }
    assert_eq!(store.core.metrics.rewritten_extents.get(), 0);
    drop(others);
    store.rewrite_idle(&mut looks, &goes_on).await;
    assert_eq!(store.core.metrics.rewritten_extents.get(), ALL_EXTENTS);
    assert_eq!((charged.into_inner(), memory.used()), (lists + PASS_BYTES, lists));
}

#[tokio::test(start_paused = true)]
async fn old_extents_are_rewritten_on_an_idle_disk() {
    let disks = [TestDisk::new("/a")];
    let (store, key) = with_batches(&disks).await;
    let before = streams_of(&store, &key).await;
    let mut looks = Looks::default();
    let rewritten = || store.core.metrics.rewritten_extents.get();
    let look = async |looks: &mut Looks| store.rewrite_idle(looks, &|| true).await;
    look(&mut looks).await;
    advance(Duration::from_secs(29)).await;
    look(&mut looks).await;
    assert_eq!(rewritten(), 0, "it is not old");
    advance(Duration::from_secs(2)).await;
    let writing = InFlight::begin(&store.core.disks[0], 1);
    look(&mut looks).await;
    assert_eq!(rewritten(), 0, "its disk is needed");
    drop(writing);
    store.rewrite_idle(&mut looks, &|| false).await;
    assert_eq!(rewritten(), 0, "the process ends");
    look(&mut looks).await;
    assert_eq!(rewritten(), ALL_EXTENTS);
    store.maintain_once().await;
    assert_eq!((data_logs(&disks), streams_of(&store, &key).await), (1, before));
    // Too few to be worth it.
    write_batches(&store, &key, BATCHES..BATCHES + 3).await;
    let so_far = rewritten();
    for _ in 0..300 {
        look(&mut looks).await;
        advance(Duration::from_secs(5)).await;
    }
    assert_eq!(rewritten(), so_far);
    write_batches(&store, &key, BATCHES + 3..BATCHES + 4).await;
    for _ in 0..10 {
        look(&mut looks).await;
        advance(Duration::from_secs(5)).await;
    }
    assert_eq!(rewritten(), so_far + u64::from(PARTITIONS.unsigned_abs()) * 4);
}

#[tokio::test(start_paused = true)]
async fn maintenance_rewrites_until_cancelled() {
    let disks = [TestDisk::new("/a")];
    let (store, key) = with_batches(&disks).await;
    let before = streams_of(&store, &key).await;
    let stop = tokio::time::sleep(Duration::from_secs(120));
    Arc::clone(&store).maintain(stop).await;
    assert_eq!(store.core.metrics.rewritten_extents.get(), ALL_EXTENTS);
    assert_eq!((data_logs(&disks), streams_of(&store, &key).await), (1, before));
}
