//! The store against a model: a partition is a `Vec<u8>` and a list of block ids, regardless of
//! disk faults.

use std::collections::BTreeMap;

use proptest::prelude::*;

use super::*;
use uniffle_testkit::fault::{EIO, ENOSPC, Fault, Operation};

#[derive(Debug, Clone)]
struct Batch {
    /// Partition, block lengths, and whether the memory is aligned.
    extents: Vec<(i32, Vec<usize>, bool)>,
}

fn batches() -> impl Strategy<Value = Vec<Batch>> {
    let lengths = prop::collection::vec(prop_oneof![1usize..50, 4000usize..9000, Just(4096)], 1..6);
    let extents = prop::collection::vec((0i32..4, lengths, any::<bool>()), 1..8);
    prop::collection::vec(extents.prop_map(|extents| Batch { extents }), 1..10)
}

#[derive(Default)]
struct Model {
    bytes: Vec<u8>,
    ids: Vec<i64>,
}

async fn run(batches: Vec<Batch>, disks: usize, seed: u64, faults: bool, ranges: Vec<(u32, u32)>) {
    let disks: Vec<_> = (0..disks).map(|n| TestDisk::new(&format!("/disk{n}"))).collect();
    let store = store_on(&disks).await;
    let key = key("app", 1);
    let handle = store.register(&key);
    if faults {
        let kinds = vec![
            (Operation::Write, Fault::Errno(EIO)),
            (Operation::Write, Fault::Short { bytes: 5000, errno: ENOSPC }),
            (Operation::Write, Fault::Short { bytes: 90, errno: EIO }),
            (Operation::OpenWrite, Fault::Errno(EIO)),
            (Operation::CreateDir, Fault::Errno(ENOSPC)),
        ];
        for (n, disk) in disks.iter().enumerate() {
            disk.faults.seed(seed + n as u64, 4, kinds.clone());
        }
    }
    let mut model: BTreeMap<i32, Model> = BTreeMap::new();
    let mut next_id = 0;
    for batch in batches {
        let mut writes = Vec::new();
        let mut added: Vec<(i32, Vec<(i64, usize)>)> = Vec::new();
        for (partition, lengths, aligned) in batch.extents {
            let blocks: Vec<_> = lengths
                .into_iter()
                .map(|len| {
                    next_id += 1;
                    (next_id, len)
                })
                .collect();
            writes.push(extent(partition, &blocks, aligned));
            added.push((partition, blocks));
        }
        let mut attempts = 0;
        while let Err(error) = store.write(&key, writes.clone()).await {
            let of_the_disks = [StoreErrorKind::Io, StoreErrorKind::NoSpace, StoreErrorKind::Unhealthy];
            assert!(of_the_disks.contains(&error.kind), "{error}");
            attempts += 1;
            if attempts == 20 {
                disks.iter().for_each(|disk| disk.faults.clear());
            }
            store.probe().await;
            // A disk that repeatedly reported "no space" is avoided for a while.
            tokio::time::sleep(std::time::Duration::from_secs(600)).await;
            store.maintain_once().await;
        }
        for (partition, blocks) in added {
            let partition = model.entry(partition).or_default();
            for (id, len) in blocks {
                partition.bytes.extend_from_slice(&payload(id, len));
                partition.ids.push(id);
            }
        }
    }
    disks.iter().for_each(|disk| disk.faults.clear());
    check(&store, &key, &model, faults, &ranges).await;
    store.probe().await;
    store.maintain_once().await;
    check(&store, &key, &model, faults, &ranges).await;
    drop(handle);
    store.purge_app(&key.app).await;
    assert_nothing_left(&store, &disks).await;
}

async fn check(
    store: &LocalStore,
    key: &ShuffleKey,
    model: &BTreeMap<i32, Model>,
    faults: bool,
    ranges: &[(u32, u32)],
) {
    for (partition, expected) in model {
        let mut ids = read_all(store, key, *partition).await.unwrap();
        if faults {
            // A batch whose index append failed on all disks is published by a later one. It may
            // appear twice, but is never missing.
            ids.sort_unstable();
            ids.dedup();
            assert_eq!(ids, expected.ids);
            continue;
        }
        assert_eq!(ids, expected.ids);
        let total = expected.bytes.len() as u64;
        for (at, len) in ranges {
            let (offset, len) = (u64::from(*at) % (total + 10), *len % (total as u32 + 10));
            let wanted = expected
                .bytes
                .get(offset as usize..offset as usize + len as usize)
                .filter(|it| !it.is_empty());
            match (wanted, range_of(store, key, *partition, (offset, len)).await) {
                (Some(bytes), Ok(read)) => assert!(bytes == read, "{offset} {len}"),
                (None, Err(error)) => assert_eq!(error.kind, StoreErrorKind::InvalidRange),
                (wanted, read) => {
                    panic!("{offset} {len}: {:?} {:?}", wanted.map(<[u8]>::len), read.map(|it| it.len()))
                }
            }
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    #[test]
    fn ranges_of_extents_are_ranges_of_a_vec(
        batches in batches(), disks in 1usize..4,
        ranges in prop::collection::vec((any::<u32>(), any::<u32>()), 1..12),
    ) {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_time().start_paused(true).build().unwrap();
        runtime.block_on(run(batches, disks, 0, false, ranges));
    }

    #[test]
    fn failing_disks_do_not_lose_or_mix_blocks(batches in batches(), disks in 1usize..4, seed in 0u64..1 << 40) {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_time().start_paused(true).build().unwrap();
        runtime.block_on(run(batches, disks, seed, true, Vec::new()));
    }
}
