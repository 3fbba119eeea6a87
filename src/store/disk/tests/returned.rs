//! Directories that return after processes ran without them, while the metadata of others could not
//! be listed. Everything is readable again, or its results are refused with a reason.

use super::metadata::{append_record, disks, records_of};
use super::*;
use uniffle_testkit::fault::{EIO, Fault, Operation, Rule};

const P1: PartitionId = PartitionId(1);

fn unlistable() -> Rule {
    Rule::always(Operation::Other, Fault::Errno(EIO)).on(METADATA)
}

/// Writes blocks in batches of their own, so that every disk has some.
async fn write(store: &LocalStore, key: &ShuffleKey, ids: std::ops::Range<i64>) {
    for id in ids {
        store.write(key, vec![extent(1, &[(id, 900)], true)]).await.unwrap();
    }
}

/// Reads every block and checks its bytes. Returns the ids.
async fn read_around_gaps(store: &LocalStore, key: &ShuffleKey) -> Vec<i64> {
    let (records, _) = index_of(store, key, 1).await.unwrap();
    let blocks: Vec<_> = records.iter().filter(|record| record.block_id != FILLER_BLOCK_ID).collect();
    for block in &blocks {
        let (offset, length) = (block.offset as u64, block.length as u32);
        let bytes = range_of(store, key, 1, (offset, length)).await.unwrap();
        assert_eq!(bytes, payload(block.block_id, bytes.len()), "block {} has other bytes", block.block_id);
    }
    blocks.iter().map(|block| block.block_id).collect()
}

/// Runs everything that deletes files.
async fn maintain(store: &LocalStore) {
    store.maintain_once().await;
    store.sweep().await;
    store.maintain_once().await;
}

/// A disk is replaced for good. The end of its gap is on the disks, and says nothing of shuffles
/// that are in the log.
#[tokio::test(start_paused = true)]
async fn gap_of_a_replaced_disk_ends_for_later_starts() {
    let ([a, _], old, new) = (disks::<2>(), key("app", 1), key("app", 2));
    let b = TestDisk::new("/b");
    let both = || async { open(vec![a.disk(), b.disk()]).await.unwrap() };
    let store = open(vec![a.disk(), TestDisk::new("/b").disk()]).await.unwrap();
    append_record(&store, &old, b"registered").await;
    drop(store);
    let store = both().await;
    assert!(records_of(&recover(&store).await, &old).1.is_some());
    for disk in [&a, &b] {
        disk.faults.add(Rule::always(Operation::Write, Fault::Errno(EIO)));
    }
    store.end_metadata_gap().await.unwrap_err();
    assert!(store.metadata_gap().is_some(), "the end of the log is missing, but no gap is reported");
    a.faults.clear();
    b.faults.clear();
    drop(store);

    let store = both().await;
    recover(&store).await;
    assert!(store.metadata_gap().is_some(), "the gap must remain");
    assert!(store.end_metadata_gap().await.unwrap());
    assert_eq!(store.metadata_gap(), None);
    append_record(&store, &new, b"registered").await;
    drop(store);
    let store = both().await;
    let recovered = recover(&store).await;
    assert!(
        records_of(&recovered, &old).1.is_some(),
        "records may be missing, but the shuffle counts as complete"
    );
    assert_eq!((records_of(&recovered, &new).1, store.metadata_gap()), (None, None));
}

/// A directory that may have newer metadata can still return.
#[tokio::test(start_paused = true)]
async fn gap_of_an_absent_or_unreadable_disk_does_not_end() {
    let disks = disks::<2>();
    drop(store_on(&disks).await);
    let store = store_on(&disks[..1]).await;
    recover(&store).await;
    assert!(store.metadata_gap().unwrap().contains("/b is missing"));
    assert!(!store.end_metadata_gap().await.unwrap());
    drop(store);
    disks[1].faults.add(unlistable());
    let store = store_on(&disks).await;
    recover(&store).await;
    assert!(store.metadata_gap().unwrap().contains("cannot list"));
    assert!(!store.end_metadata_gap().await.unwrap());
    disks[1].faults.clear();
    drop(store);
    let store = store_on(&disks).await;
    recover(&store).await;
    assert_eq!(store.metadata_gap(), None);
}

/// The metadata of the first disk cannot be listed while a shuffle is registered again, so only the
/// second knows the last registration. Then the second is missing.
#[tokio::test(start_paused = true)]
async fn registration_unknown_to_the_present_disk_keeps_its_blocks() {
    for is_written_alone in [false, true] {
        let disks = disks::<2>();
        let shuffle = key("app", 1);
        let store = store_on(&disks).await;
        append_record(&store, &shuffle, b"first").await;
        write(&store, &shuffle, 1..5).await;
        drop(store);

        disks[0].faults.add(unlistable());
        let store = store_on(&disks).await;
        recover(&store).await;
        store.purge(&shuffle).await;
        append_record(&store, &shuffle, b"second").await;
        write(&store, &shuffle, 11..20).await;
        drop(store);
        disks[0].faults.clear();
        assert!(disks.iter().all(|disk| !disk.app_files().is_empty()));
        let before = disks[0].app_files();

        let store = store_on(&disks[..1]).await;
        let recovered = recover(&store).await;
        let reason = records_of(&recovered, &shuffle).1.expect("results of the shuffle must be refused");
        assert!(reason.contains("/b is missing"), "{reason}");
        assert!(store.metadata_gap().is_some(), "results of unknown shuffles must be refused too");
        if is_written_alone {
            append_record(&store, &shuffle, b"third").await;
            write(&store, &shuffle, 21..23).await;
        }
        maintain(&store).await;
        drop((recovered, store));
        let after = disks[0].app_files();
        assert!(before.iter().all(|path| after.contains(path)), "{before:?} {after:?}");

        let store = store_on(&disks).await;
        let recovered = recover(&store).await;
        let (records, incomplete) = records_of(&recovered, &shuffle);
        assert_eq!(records.last().unwrap(), &b"second"[..]);
        let reason =
            incomplete.expect("the first disk was used without the other, so the shuffle must be incomplete");
        assert!(reason.contains("/a was used separately"), "{reason}");
        maintain(&store).await;
        assert_eq!(read_around_gaps(&store, &shuffle).await, (11..20).collect::<Vec<_>>());
    }
}

/// A shuffle is registered again while the first disk is missing. Then both are back, and the
/// metadata of the second disk, with the last registration, cannot be listed.
#[tokio::test(start_paused = true)]
async fn registration_in_hidden_metadata_keeps_its_blocks() {
    let disks = disks::<2>();
    let shuffle = key("app", 1);
    let store = store_on(&disks).await;
    append_record(&store, &shuffle, b"first").await;
    write(&store, &shuffle, 1..5).await;
    drop(store);
    let store = store_on(&disks[1..]).await;
    recover(&store).await;
    store.purge(&shuffle).await;
    append_record(&store, &shuffle, b"second").await;
    write(&store, &shuffle, 11..20).await;
    drop(store);
    let before = disks[1].app_files();

    disks[1].faults.add(unlistable());
    let store = store_on(&disks).await;
    let recovered = recover(&store).await;
    let (records, incomplete) = records_of(&recovered, &shuffle);
    assert_eq!(records, [&b"first"[..]]);
    assert!(incomplete.expect("results of the shuffle must be refused").contains("cannot list"));
    maintain(&store).await;
    drop((recovered, store));
    let after = disks[1].app_files();
    assert!(before.iter().all(|path| after.contains(path)), "{before:?} {after:?}");
    disks[1].faults.clear();

    let store = store_on(&disks).await;
    let recovered = recover(&store).await;
    let (records, incomplete) = records_of(&recovered, &shuffle);
    assert_eq!(records.last().unwrap(), &b"second"[..]);
    assert!(
        incomplete
            .expect("the disks were used separately, so the shuffle must be incomplete")
            .contains("was used separately")
    );
    maintain(&store).await;
    assert_eq!(read_around_gaps(&store, &shuffle).await, (11..20).collect::<Vec<_>>());
}

/// A shuffle is registered again while the first disk is missing. The next start reads only the log
/// of the first disk, which is read-only, and serves the first registration. Then it finds the last
/// one in the log of the second disk.
#[tokio::test(start_paused = true)]
async fn records_of_a_registration_found_replaced_are_refused() {
    for is_rewritten in [false, true] {
        let disks = disks::<2>();
        let shuffle = key("app", 1);
        let store = store_on(&disks).await;
        append_record(&store, &shuffle, b"first").await;
        drop(store);
        let store = store_on(&disks[1..]).await;
        recover(&store).await;
        store.purge(&shuffle).await;
        append_record(&store, &shuffle, b"second").await;
        drop(store);
        if is_rewritten {
            // The log has no entry of the first registration any more.
            recover(&*store_on(&disks[1..]).await).await;
        }

        disks[0].faults.set_read_only(true);
        disks[1].faults.add(unlistable());
        let store = store_on(&disks).await;
        let recovered = recover(&store).await;
        let (records, incomplete) = records_of(&recovered, &shuffle);
        assert_eq!(records, [&b"first"[..]]);
        assert!(incomplete.expect("results of the shuffle must be refused").contains("cannot list"));
        let handle = store.handle(&shuffle).unwrap();
        store.append_metadata(&handle, b"report").await.unwrap_err();
        disks[1].faults.clear();
        store.maintain_once().await;
        append_record(&store, &key("app", 2), b"other").await;
        let error = store.append_metadata(&handle, b"report").await.unwrap_err().to_string();
        assert!(error.contains("app/1 was registered again"), "{error}");
        drop((recovered, handle, store));
        disks[0].faults.set_read_only(false);

        let store = store_on(&disks).await;
        let recovered = recover(&store).await;
        assert_eq!(records_of(&recovered, &shuffle), (vec![Bytes::from_static(b"second")], None));
        assert_eq!(records_of(&recovered, &key("app", 2)), (vec![Bytes::from_static(b"other")], None));
    }
}

/// Each of two disks took a block at the same place without the other. Then both are back, and the
/// metadata of one cannot be listed.
#[tokio::test(start_paused = true)]
async fn hidden_divergence_refuses_results_and_keeps_files() {
    for hidden in [0, 1] {
        let disks = disks::<2>();
        let shuffle = key("app", 1);
        let store = store_on(&disks).await;
        append_record(&store, &shuffle, b"first").await;
        write(&store, &shuffle, 1..5).await;
        drop(store);
        for (at, ids) in [(0, 11..13), (1, 21..23)] {
            let store = store_on(std::slice::from_ref(&disks[at])).await;
            recover(&store).await;
            write(&store, &shuffle, ids).await;
        }
        let before: Vec<_> = disks.iter().map(TestDisk::app_files).collect();

        disks[hidden].faults.add(unlistable());
        for is_hidden in [true, false] {
            let store = store_on(&disks).await;
            let recovered = recover(&store).await;
            let reason = records_of(&recovered, &shuffle).1.expect("results of the shuffle must be refused");
            let text = if is_hidden { "cannot list" } else { "was used separately" };
            assert!(reason.contains(text), "{reason}");
            maintain(&store).await;
            let served = present(&store, &shuffle, P1).await;
            assert!((1..5).all(|id| served.contains(&id)), "{served:?}");
            drop((recovered, store));
            for (disk, before) in disks.iter().zip(&before) {
                let after = disk.app_files();
                assert!(before.iter().all(|path| after.contains(path)), "{before:?} {after:?}");
            }
            disks[hidden].faults.clear();
        }
    }
}
