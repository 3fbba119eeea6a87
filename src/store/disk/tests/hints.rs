//! Hints of readers about their next reads. A hint may prefetch only what is read through the page
//! cache, within limits, and never fails or delays a read.

#![expect(clippy::single_range_in_vec_init, reason = "a request may have one hint")]

use std::ops::Range;

use super::super::read::hints::{HINTED_BYTES_MAX, HINTED_EXTENTS_MAX};
use super::*;
use uniffle_testkit::fault::{EIO, Fault, Operation, Rule};

const P: PartitionId = PartitionId(1);

async fn opened(direct_io: bool) -> (TestDisk, Arc<LocalStore>, ShuffleKey) {
    let disk = TestDisk::new("/a");
    let config = LocalConfig { direct_io, ..LocalConfig::default() };
    let store =
        LocalStore::open(config, vec![disk.disk()], &Budget::new(u64::MAX), &Registry::new()).await.unwrap();
    let key = key("app", 1);
    store.register(&key);
    (disk, store, key)
}

/// Returns the bytes of each range prefetched from the disk after a hint, in order.
async fn prefetched(
    disk: &TestDisk,
    store: &LocalStore,
    key: &ShuffleKey,
    ranges: &[Range<u64>],
) -> Vec<Vec<u8>> {
    let before = disk.memory.advised().len();
    store.hint(key, P, ranges);
    store.reader.tasks.drained().await;
    disk.memory.advised().split_off(before).into_iter().map(|(_, bytes)| bytes).collect()
}

#[tokio::test]
async fn buffered_reads_are_prefetched() {
    for direct_io in [true, false] {
        let (disk, store, key) = opened(direct_io).await;
        for (id, size) in [(1, 5000), (2, 200_000), (3, 7000)] {
            store.write(&key, vec![extent(1, &[(id, size)], false)]).await.unwrap();
        }
        let (first, second, third) = (payload(1, 5000), payload(2, 200_000), payload(3, 7000));
        let all = prefetched(&disk, &store, &key, &[0..212_000]).await;
        let expected = if direct_io { vec![&first, &third] } else { vec![&first, &second, &third] };
        assert!(
            all.iter().eq(expected),
            "hints with direct I/O {direct_io}: {:?}",
            all.iter().map(Vec::len).collect::<Vec<_>>()
        );
        let inside = prefetched(&disk, &store, &key, &[4000..4500, 205_000..205_010]).await;
        assert_eq!(inside, [&first[4000..4500], &third[..10]]);
        // One for each log with prefetched bytes: both calls hint at the same log.
        assert_eq!(store.core.metrics.hints.get(), 2);
    }
}

#[tokio::test]
async fn hostile_hints_are_ignored_or_limited() {
    let (disk, store, key) = opened(false).await;
    for id in 0..400 {
        store.write(&key, vec![extent(1, &[(id, 100_000)], false)]).await.unwrap();
    }
    let bytes = store.partition_bytes(&key, P);
    // Ranges that end after the published bytes, and ranges of unknown partitions and shuffles.
    assert!(prefetched(&disk, &store, &key, &[0..u64::MAX, 0..bytes + 1, bytes..bytes + 1]).await.is_empty());
    store.hint(&key, PartitionId(2), &[0..1]);
    store.hint(&super::key("other", 1), P, &[0..1]);
    assert!(prefetched(&disk, &store, &key, &[]).await.is_empty());
    // All ranges overlap.
    let whole = vec![0..bytes; 1000];
    let hinted_bytes =
        prefetched(&disk, &store, &key, &whole).await.iter().map(|it| it.len() as u64).sum::<u64>();
    assert_eq!(hinted_bytes, HINTED_BYTES_MAX);
    let first_bytes: Vec<_> = (0..1000).map(|n| n % 400 * 100_000..n % 400 * 100_000 + 1).collect();
    assert_eq!(prefetched(&disk, &store, &key, &first_bytes).await.len(), HINTED_EXTENTS_MAX);
    // A hint for a purged shuffle.
    store.purge(&key).await;
    assert!(prefetched(&disk, &store, &key, &[0..1]).await.is_empty());
    assert_nothing_left(&store, &[disk]).await;
}

#[tokio::test]
async fn disk_runs_one_prefetch_at_a_time_beside_reads() {
    let (disk, store, key) = opened(true).await;
    store.write(&key, vec![extent(1, &[(1, 5000)], false)]).await.unwrap();
    disk.faults.add(Rule::once(Operation::Advise, Fault::Hang));
    store.hint(&key, P, &[0..5000]);
    uniffle_testkit::eventually("the prefetch has begun", || match disk.faults.hung() {
        0 => Err(String::new()),
        _ => Ok(()),
    })
    .await;
    for _ in 0..100 {
        store.hint(&key, P, &[0..5000]);
    }
    assert_eq!(store.reader.tasks.running(), 1);
    assert_eq!(read_all(&store, &key, 1).await.unwrap(), [1]);
    disk.faults.release().await;
    store.reader.tasks.drained().await;
    assert_eq!(disk.memory.advised().len(), 1);
    // An error does not affect the health of the disk, and the next hint works.
    disk.faults.add(Rule::once(Operation::Advise, Fault::Errno(EIO)));
    assert!(prefetched(&disk, &store, &key, &[0..5000]).await.is_empty());
    assert_eq!(store.disks()[0].condition, DiskCondition::Healthy);
    assert_eq!(prefetched(&disk, &store, &key, &[0..5000]).await.len(), 1);
    // A failing disk gets no hints.
    store.core.disks[0].note(&io::Error::from_raw_os_error(EIO));
    assert_ne!(store.disks()[0].condition, DiskCondition::Healthy);
    assert!(prefetched(&disk, &store, &key, &[0..5000]).await.is_empty());
}
