//! The store on every kind of disk: one suite over memory and over the operating system, buffered
//! and direct. Also the layout of files, the order of blocks, and refused batches.

use super::*;
use uniffle_io::blocking::BlockingDisk;

async fn suite(disks: Vec<Arc<dyn Disk>>, direct_io: bool) {
    let config = LocalConfig { direct_io, descriptors_max: 3, ..roomy() };
    let store = open_with(config, disks).await.unwrap();
    let key = key("app", 1);
    store.register(&key);
    assert_eq!(read_all(&store, &key, 5).await.unwrap(), Vec::<i64>::new());

    // One batch of aligned and gathered extents, one of them larger than a staging buffer.
    let batch = vec![
        extent(5, &[(1, 100), (2, 5000)], true),
        extent(5, &[(3, 1)], false),
        extent(6, &[(4, 3 << 20), (5, 77)], false),
        extent(5, &[(6, 4096)], true),
        extent(7, &[(7, 4097), (8, 9)], false),
    ];
    let published = store.write(&key, batch.clone()).await.unwrap();
    let bytes = batch.iter().map(|extent| extent.length).sum();
    assert_eq!(published, BatchSummary { sequence: 0, disk: published.disk, extents: 5, blocks: 8, bytes });
    for sequence in 1..4 {
        let next = vec![extent(5, &[(100 + sequence, 6000), (200 + sequence, 10)], sequence % 2 == 0)];
        assert_eq!(store.write(&key, next).await.unwrap().sequence as i64, sequence);
    }
    assert_eq!(read_all(&store, &key, 5).await.unwrap(), [1, 2, 3, 6, 101, 201, 102, 202, 103, 203]);
    assert_eq!(read_all(&store, &key, 6).await.unwrap(), [4, 5]);
    assert_eq!(read_all(&store, &key, 7).await.unwrap(), [7, 8]);
    assert_eq!(store.partition_bytes(&key, PartitionId(7)), 4106);

    // Ranges across extents, and invalid ranges.
    let whole = [payload(1, 100), payload(2, 5000), payload(3, 1), payload(6, 4096)].concat();
    assert_eq!(range_of(&store, &key, 5, (90, 5020)).await.unwrap(), whole[90..5110]);
    let length = store.partition_bytes(&key, PartitionId(5));
    for (offset, len) in
        [(length, 1), (0, length as u32 + 1), (u64::MAX, 1), (u64::MAX - 1, u32::MAX), (0, 0)]
    {
        let error = store.data(&key, PartitionId(5), offset, len).unwrap_err();
        assert_eq!(error.kind, StoreErrorKind::InvalidRange, "{offset} {len}");
    }
    assert_eq!(store.data(&key, PartitionId(99), 0, 1).unwrap_err().kind, StoreErrorKind::InvalidRange);

    store.purge(&key).await;
    assert_eq!(store.index(&key, PartitionId(5)).unwrap_err().kind, StoreErrorKind::NotFound);
    assert_eq!(store.write(&key, batch).await.unwrap_err().kind, StoreErrorKind::Purged);
    assert_eq!(store.used_bytes(), 0);
    for disk in &store.core.disks {
        assert_eq!(disk.io.list(Path::new("apps")).await.unwrap(), Vec::<String>::new());
        assert_eq!(disk.io.list(Path::new("trash")).await.unwrap(), Vec::<String>::new());
    }
    store.probe().await;
    assert!(store.disks().iter().all(|disk| disk.is_healthy()));
}

#[tokio::test]
async fn store_suite_passes_on_memory_disks() {
    for count in 1..4 {
        let disks = (0..count).map(|n| TestDisk::new(&format!("/disk{n}")).disk());
        suite(disks.collect(), true).await;
    }
}

#[tokio::test]
async fn store_suite_passes_on_real_disks() {
    for direct in [false, true] {
        let (first, second) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
        let disk = |root: &tempfile::TempDir| Arc::new(BlockingDisk::new(root.path(), 2, 2)) as Arc<dyn Disk>;
        suite(vec![disk(&first), disk(&second)], direct).await;
    }
}

#[tokio::test]
async fn files_do_not_grow_with_partitions() {
    let disks = [TestDisk::new("/disk")];
    let store = store_on(&disks).await;
    let key = key("app", 1);
    store.register(&key);
    for round in 0..3 {
        let batch =
            (0..2000).map(|partition| extent(partition, &[(i64::from(partition) + round, 50)], false));
        store.write(&key, batch.collect()).await.unwrap();
    }
    assert_eq!(disks[0].app_files().len(), 2, "expected a data log and an index log");
    assert_eq!(read_all(&store, &key, 1234).await.unwrap(), [1234, 1235, 1236]);
    store.purge_app(&key.app).await;
    assert_nothing_left(&store, &disks).await;
}

#[tokio::test]
async fn one_partition_spreads_over_all_disks() {
    let disks = [TestDisk::new("/a"), TestDisk::new("/b"), TestDisk::new("/c")];
    let store = store_on(&disks).await;
    let key = key("app", 1);
    store.register(&key);
    for id in 0..9 {
        store.write(&key, vec![extent(1, &[(id, 10_000)], id % 2 == 0)]).await.unwrap();
    }
    assert!(
        disks.iter().all(|disk| disk.app_files().len() == 2),
        "every disk must have a data and an index log"
    );
    assert_eq!(read_all(&store, &key, 1).await.unwrap(), (0..9).collect::<Vec<_>>());
}

#[tokio::test]
async fn local_order_batches_keep_their_order() {
    let disks = [TestDisk::new("/disk")];
    let store = store_on(&disks).await;
    let key = key("app", 1);
    store.register(&key);
    // Sorted by task attempt (id % 7), as memory passes them on, so ids are not ascending.
    let sorted = [(7, 900), (14, 5000), (1, 3), (8, 70), (2, 4096)];
    store.write(&key, vec![extent(1, &sorted, false)]).await.unwrap();
    assert_eq!(read_all(&store, &key, 1).await.unwrap(), sorted.map(|(id, _)| id));
}

#[tokio::test]
async fn contradictory_batches_are_refused() {
    let disks = [TestDisk::new("/disk")];
    let store = store_on(&disks).await;
    let key = key("app", 1);
    store.register(&key);
    let good = || extent(1, &[(1, 100), (2, 50)], false);
    let mut length = good();
    length.length += 1;
    let mut block = good();
    block.blocks[0].length += 1;
    let mut data = good();
    data.data = ExtentData::Pieces(vec![Bytes::from_static(b"short")]);
    let mut aligned = extent(1, &[(1, 100)], true);
    aligned.data = ExtentData::Aligned(vec![Bytes::from(vec![1; 100])]);
    let mut empty_block = good();
    empty_block.blocks.push(BlockMeta { length: 0, ..empty_block.blocks[0] });
    let empty = ExtentWrite { blocks: Vec::new(), length: 0, data: ExtentData::Pieces(Vec::new()), ..good() };
    for batch in
        [vec![length], vec![good(), block], vec![data], vec![aligned], vec![empty_block], vec![empty], vec![]]
    {
        let error = store.write(&key, batch).await.unwrap_err();
        assert_eq!(error.kind, StoreErrorKind::InvalidBatch);
    }
    assert!(disks[0].app_files().is_empty());
}

#[tokio::test]
async fn only_misaligned_memory_is_copied_before_the_write() {
    let root = tempfile::tempdir().unwrap();
    let store = open_real(vec![Arc::new(BlockingDisk::new(root.path(), 2, 2))]).await.unwrap();
    let key = key("app", 1);
    store.register(&key);
    let mut write = extent(1, &[(1, 5000)], false);
    let padded = [vec![0; 1], payload(1, 5000), vec![0; 8192 - 5000]].concat();
    write.data = ExtentData::Aligned(vec![Bytes::from(padded).slice(1..)]);
    store.write(&key, vec![write, extent(2, &[(2, 5000)], true)]).await.unwrap();
    assert_eq!(read_all(&store, &key, 1).await.unwrap(), [1]);
    assert_eq!(store.core.metrics.write_data_copied.get(), 5000);
}

#[tokio::test]
async fn index_of_many_chunks_is_complete() {
    let disks = [TestDisk::new("/disk")];
    let store = store_on(&disks).await;
    let key = key("app", 1);
    store.register(&key);
    // The records exceed one chunk of 2 MiB.
    for round in 0..3 {
        let blocks: Vec<_> = (0..20_000).map(|n| (round * 20_000 + n, 1 + n as usize % 3)).collect();
        let published = store.write(&key, vec![extent(1, &blocks, round == 1)]).await.unwrap();
        assert_eq!(published.extents, 5, "an extent must have at most 4,096 blocks");
    }
    assert_eq!(read_all(&store, &key, 1).await.unwrap(), (0..60_000).collect::<Vec<_>>());
}
