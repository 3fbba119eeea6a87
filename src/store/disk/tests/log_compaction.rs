//! Purges in the metadata log and its compaction: purged shuffles do not return, and all others
//! stay.

use futures::FutureExt as _;
use futures::future::join_all;

use super::metadata::{append_record, disks, records_of};
use super::*;
use uniffle_testkit::fault::{EIO, Fault, Operation, Rule};

#[tokio::test(start_paused = true)]
async fn compaction_drops_purged_shuffles_for_good() {
    let disks = disks::<2>();
    let store = store_on(&disks).await;
    let (kept, big) = (key("app", 1), key("app", 2));
    append_record(&store, &kept, b"kept").await;
    let large = vec![7; 3 << 20];
    for _ in 0..4 {
        append_record(&store, &big, &large).await;
    }
    let bytes = || -> usize {
        let sizes = log_copies(&disks).into_iter();
        sizes.map(|(at, path)| disks[at].memory.content(&path).unwrap().len()).sum()
    };
    assert!(bytes() > 24 << 20);
    store.purge(&big).await;
    store.maintain_once().await;
    assert!(bytes() < 10_000, "compaction kept dead records: {} bytes", bytes());
    drop(store);
    let store = store_on(&disks).await;
    let recovered = recover(&store).await;
    assert_eq!(recovered.shuffles.len(), 1);
    assert_eq!(records_of(&recovered, &kept), (vec![Bytes::from_static(b"kept")], None));
    assert_eq!(
        format!("{:?}", store.register(&big)),
        "ShuffleHandle(app/2.3)",
        "an incarnation was used twice"
    );
}

#[tokio::test(start_paused = true)]
async fn unlogged_purge_keeps_the_files() {
    let disks = disks::<1>();
    let store = store_on(&disks).await;
    let shuffle = key("app", 1);
    append_record(&store, &shuffle, b"record").await;
    store.write(&shuffle, vec![extent(1, &[(1, 100)], false)]).await.unwrap();
    disks[0].faults.add(Rule::always(Operation::Write, Fault::Errno(EIO)).on("/log"));
    store.purge(&shuffle).await;
    assert!(!disks[0].app_files().is_empty());
    disks[0].faults.clear();
    store.probe().await;
    store.maintain_once().await;
    store.remove_files(&shuffle.app).await;
    assert_nothing_left(&store, &disks).await;
    drop(store);
    assert!(recover(&*store_on(&disks).await).await.shuffles.is_empty());
}

/// Returns the number of entries in a copy of the log, by the magic of their frames.
fn entries(disks: &[TestDisk]) -> usize {
    let (at, path) = log_copies(disks)[0].clone();
    let content = disks[at].memory.content(&path).unwrap();
    content.windows(4).filter(|bytes| *bytes == b"UWML").count()
}

#[tokio::test(start_paused = true)]
async fn concurrent_purges_are_logged_once_each() {
    let disks = disks::<2>();
    let store = store_on(&disks).await;
    let keys: Vec<ShuffleKey> = (0..300).map(|app| key(&format!("app{app}"), 1)).collect();
    for shuffle in &keys {
        append_record(&store, shuffle, b"registered").await;
        store.write(shuffle, vec![extent(1, &[(1, 100)], false)]).await.unwrap();
    }
    let before = entries(&disks);
    join_all(keys.iter().map(|shuffle| store.purge(shuffle))).await;
    assert_eq!(entries(&disks) - before, 300);
    assert!(!store.has_purges_to_note());
    for disk in &disks {
        let remaining = disk.memory.files().into_iter();
        let remaining: Vec<_> =
            remaining.filter(|path| path.starts_with("apps") || path.starts_with("trash")).collect();
        assert_eq!(remaining, Vec::<PathBuf>::new(), "purges left files");
    }
    assert_nothing_left(&store, &disks).await;
    drop(store);
    assert!(recover(&*store_on(&disks).await).await.shuffles.is_empty());
}

#[tokio::test(start_paused = true)]
async fn dropped_purge_record_is_written_by_a_waiter() {
    let disks = disks::<1>();
    let store = store_on(&disks).await;
    let keys = [key("app", 1), key("app", 2)];
    for shuffle in &keys {
        append_record(&store, shuffle, b"registered").await;
        store.write(shuffle, vec![extent(1, &[(1, 100)], false)]).await.unwrap();
    }
    drop(store.forget_shuffle(&keys[0]));
    let mut first = Box::pin(store.note_purges());
    assert!((&mut first).now_or_never().is_none());
    drop(store.forget_shuffle(&keys[1]));
    let mut second = Box::pin(store.note_purges());
    assert!((&mut second).now_or_never().is_none());
    drop(first);
    second.await;
    assert!(!store.has_purges_to_note());
    store.remove_files(&keys[0].app).await;
    assert!(disks[0].app_files().is_empty());
    assert_nothing_left(&store, &disks).await;
}
