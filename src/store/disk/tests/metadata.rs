//! The metadata log on the disks of a store: which records are proven after damage, absence and
//! power loss.

use std::time::Duration;

use futures::FutureExt as _;
use futures::future::join_all;

use super::*;
use crate::log::{HandOff, LogError};
use uniffle_testkit::fault::{EACCES, EIO, EMFILE, Fault, Operation, Rule};

/// Appends a record of a shuffle.
pub(super) async fn append_record(store: &LocalStore, key: &ShuffleKey, record: &[u8]) {
    let handle = store.register(key);
    store.append_metadata(&handle, record).await.unwrap();
}

/// Returns the records of a shuffle, and the reason why it is incomplete.
pub(super) fn records_of(recovered: &RecoveredRecords, key: &ShuffleKey) -> (Vec<Bytes>, Option<String>) {
    let shuffle = recovered.shuffles.iter().find(|shuffle| shuffle.key == *key);
    let records = recovered.records.get(key).cloned().unwrap_or_default();
    (records, shuffle.and_then(|shuffle| shuffle.incomplete.clone()))
}

pub(super) fn disks<const N: usize>() -> [TestDisk; N] {
    let names = ["/a", "/b", "/c", "/d", "/e"];
    std::array::from_fn(|at| TestDisk::new(names[at]))
}

#[tokio::test(start_paused = true)]
async fn new_shuffle_survives_power_loss_without_synced_data() {
    for count in 1..=2 {
        let disks = &disks::<2>()[..count];
        let (old, young) = (key("app", 1), key("app", 2));
        let store = store_on(disks).await;
        append_record(&store, &old, b"old").await;
        append_record(&store, &young, b"registered").await;
        append_record(&store, &young, b"reported").await;
        drop(store);
        disks.iter().zip(7..).for_each(|(disk, seed)| disk.memory.lose_power(seed));
        let store = store_on(disks).await;
        let recovered = recover(&store).await;
        assert_eq!(records_of(&recovered, &old), (vec![Bytes::from_static(b"old")], None));
        assert_eq!(records_of(&recovered, &young).0, [&b"registered"[..], b"reported"]);
        assert_eq!((records_of(&recovered, &young).1, store.metadata_gap()), (None, None));
    }
}

/// Starts on `disks` with the hand-off record of the previous process.
pub(super) async fn successor(disks: &[TestDisk], hand_off: Option<&HandOff>) -> Arc<LocalStore> {
    let config = LocalConfig { index_cache_bytes: 0, hand_off: hand_off.cloned(), ..LocalConfig::default() };
    open_with(config, disks.iter().map(TestDisk::disk).collect()).await.unwrap()
}

/// A successor with a hand-off record does not write the log again. Its records are appended, and
/// every later start finds them.
#[tokio::test(start_paused = true)]
async fn successor_continues_the_log() {
    for count in 1..=3 {
        let disks = &disks::<3>()[..count];
        let (first, second, third) = (key("app", 1), key("app", 2), key("app", 3));
        let store = store_on(disks).await;
        append_record(&store, &first, b"first").await;
        let hand_off = store.release_log().await;
        store
            .append_metadata(&store.register(&second), b"late")
            .await
            .expect_err("the log accepted a record after its release");
        drop(store);
        let copies = log_copies(disks);
        let store = successor(disks, hand_off.as_ref()).await;
        assert!(!store.metadata.is_begun(), "the log began before recovery");
        let recovered = recover(&store).await;
        assert_eq!(records_of(&recovered, &first), (vec![Bytes::from_static(b"first")], None));
        assert!(store.metadata.is_begun());
        assert_eq!(recovered.shuffles.len(), 1);
        append_record(&store, &second, b"second").await;
        let hand_off = store.release_log().await;
        drop(store);
        let store = successor(disks, hand_off.as_ref()).await;
        store.metadata.settle().await;
        append_record(&store, &third, b"third").await;
        assert_eq!(log_copies(disks), copies, "the log was written anew");
        drop(store);
        disks.iter().zip(7..).for_each(|(disk, seed)| disk.memory.lose_power(seed));
        let store = store_on(disks).await;
        let recovered = recover(&store).await;
        for (shuffle, record) in [(&first, b"first".as_slice()), (&second, b"second"), (&third, b"third")] {
            assert_eq!(records_of(&recovered, shuffle), (vec![Bytes::copy_from_slice(record)], None));
        }
        assert_eq!(store.metadata_gap(), None);
        assert!(
            log_copies(disks).iter().all(|copy| !copies.contains(copy)),
            "without a hand-off the log must be written anew"
        );
    }
}

/// A log that differs from the hand-off record, or of which a directory lacks the epoch, is written
/// again as after a crash. No record is missing.
#[tokio::test(start_paused = true)]
async fn changed_log_is_rewritten() {
    type Change = fn(&[TestDisk], &mut Option<HandOff>);
    let changes: [(&str, Change); 4] = [
        ("an older worker wrote no hand-off record", |_, hand_off| *hand_off = None),
        ("a copy is cut short", |disks, _| {
            let copies = log_copies(disks);
            let (at, path) = &copies[0];
            let bytes = disks[*at].memory.content(path).unwrap();
            disks[*at].memory.put(path, Some(bytes[..bytes.len() - 1].to_vec()));
        }),
        ("a copy is gone", |disks, _| {
            let copies = log_copies(disks);
            let (at, path) = &copies[0];
            disks[*at].memory.put(path, None);
        }),
        ("a directory lacks the epoch", |disks, _| {
            let list = disks[2].memory.files().into_iter().find(|path| path.ends_with("members")).unwrap();
            disks[2].memory.put(&list, None);
        }),
    ];
    let (first, second) = (key("app", 1), key("app", 2));
    for (what, change) in changes {
        let disks = &disks::<3>();
        let store = store_on(disks).await;
        append_record(&store, &first, b"first").await;
        let mut hand_off = store.release_log().await;
        drop(store);
        change(disks, &mut hand_off);
        let copies = log_copies(disks);
        let store = successor(disks, hand_off.as_ref()).await;
        assert_eq!(
            records_of(&recover(&store).await, &first),
            (vec![Bytes::from_static(b"first")], None),
            "{what}"
        );
        assert!(log_copies(disks).iter().all(|copy| !copies.contains(copy)), "{what}");
        append_record(&store, &second, b"second").await;
    }
    // A record after the hand-off is not part of it: its writer may have ended before it was on the
    // device.
    let disks = &disks::<2>();
    let store = store_on(disks).await;
    append_record(&store, &first, b"first").await;
    let hand_off = store.release_log().await;
    drop(store);
    let store = successor(disks, hand_off.as_ref()).await;
    append_record(&store, &second, b"second").await;
    drop(store);
    let copies = log_copies(disks);
    let store = successor(disks, hand_off.as_ref()).await;
    assert_eq!(records_of(&recover(&store).await, &second).0, [&b"second"[..]]);
    assert!(log_copies(disks).iter().all(|copy| !copies.contains(copy)));
}

/// Recovery does not wait for the device. Records are read from the old copies, and the log is
/// written again afterwards, or before the first new record.
#[tokio::test(start_paused = true)]
async fn recovered_records_are_read_before_the_rewrite() {
    let disks = &disks::<2>();
    let (first, second) = (key("app", 1), key("app", 2));
    let store = store_on(disks).await;
    assert!(store.metadata.is_begun());
    append_record(&store, &first, b"first").await;
    drop(store);
    let before = log_copies(disks);
    let store = store_on(disks).await;
    assert!(!store.metadata.is_begun());
    assert_eq!(log_copies(disks), before);
    // The process ends here with a power loss.
    drop(store);
    disks.iter().zip(7..).for_each(|(disk, seed)| disk.memory.lose_power(seed));
    let store = store_on(disks).await;
    assert_eq!(records_of(&recover(&store).await, &first), (vec![Bytes::from_static(b"first")], None));
    assert!(store.metadata.is_begun());
    assert!(log_copies(disks).iter().all(|copy| !before.contains(copy)));
    drop(store);
    let store = store_on(disks).await;
    append_record(&store, &second, b"second").await;
    assert!(store.metadata.is_begun());
    let recovered = recover(&store).await;
    assert_eq!(records_of(&recovered, &first).0, [&b"first"[..]]);
    drop(store);
    let store = store_on(disks).await;
    let recovered = recover(&store).await;
    for (shuffle, record) in [(&first, b"first".as_slice()), (&second, b"second".as_slice())] {
        assert_eq!(records_of(&recovered, shuffle), (vec![Bytes::from_static(record)], None));
    }
}

#[tokio::test(start_paused = true)]
async fn flipped_byte_is_repaired_unless_in_both_copies() {
    for count in 1..=2 {
        for both in [false, true] {
            let disks = &disks::<2>()[..count];
            let shuffles = [key("app", 1), key("app", 2)];
            let store = store_on(disks).await;
            for shuffle in &shuffles {
                append_record(&store, shuffle, b"registered").await;
                append_record(&store, shuffle, b"reported").await;
            }
            drop(store);
            let copies = log_copies(disks);
            assert_eq!(copies.len(), 2);
            let length = disks[0].memory.content(&copies[0].1).unwrap().len();
            for (at, path) in copies.iter().take(if both { 2 } else { 1 }) {
                disks[*at].memory.corrupt(path, length - 100, 1);
            }
            let store = store_on(disks).await;
            let recovered = recover(&store).await;
            for shuffle in &shuffles {
                let (records, incomplete) = records_of(&recovered, shuffle);
                assert_eq!(incomplete.is_some(), both, "{incomplete:?}");
                assert!(both || records == [&b"registered"[..], b"reported"]);
            }
            assert_eq!(store.metadata_gap().is_some(), both);
            if both {
                let reason = records_of(&recovered, &shuffles[0]).1.unwrap();
                assert!(
                    reason.contains("/log is corrupt at record") && reason.contains("unregister"),
                    "{reason}"
                );
                // Regression test: with a damaged log, missing blocks were explained by unreadable
                // files although all files were readable.
                assert_eq!(recovered.shuffles[0].reason, reason);
                // The shuffle stays incomplete in all later starts. A new registration is not
                // affected.
                let fresh = key("app", 3);
                append_record(&store, &fresh, b"new").await;
                drop(store);
                let store = store_on(disks).await;
                let recovered = recover(&store).await;
                assert!(records_of(&recovered, &shuffles[1]).1.is_some() && store.metadata_gap().is_some());
                assert_eq!(records_of(&recovered, &fresh), (vec![Bytes::from_static(b"new")], None));
            }
        }
    }
}

#[tokio::test(start_paused = true)]
async fn equally_damaged_copies_are_refused_by_their_marks() {
    for case in 0..8 {
        let (count, cuts, is_upgraded) = (1 + case % 2, case & 2 == 0, case & 4 == 0);
        let disks = &disks::<2>()[..count];
        let shuffle = key("app", 1);
        let mut store = store_on(disks).await;
        append_record(&store, &shuffle, b"registered").await;
        if is_upgraded {
            // The predecessor leaves its mark, which the successor has to replace.
            tokio::time::sleep(Duration::from_millis(20)).await;
            let hand_off = store.release_log().await;
            drop(store);
            store = successor(disks, hand_off.as_ref()).await;
            recover(&store).await;
        }
        let (at, path) = log_copies(disks)[0].clone();
        let fits = disks[at].memory.content(&path).unwrap().len();
        append_record(&store, &shuffle, b"reported").await;
        // The mark is written after a pause of 10 ms.
        tokio::time::sleep(Duration::from_millis(20)).await;
        drop(store);
        for (at, path) in log_copies(disks) {
            let content = disks[at].memory.content(&path).unwrap();
            match cuts {
                true => disks[at].memory.put(&path, Some(content[..fits].to_vec())),
                false => disks[at].memory.corrupt(&path, content.len() - 1, 1),
            }
        }
        let store = store_on(disks).await;
        let (records, incomplete) = records_of(&recover(&store).await, &shuffle);
        assert_eq!(records, [&b"registered"[..]]);
        let reason = incomplete.expect("a shuffle with a missing record must be incomplete");
        assert!(
            reason.contains(if cuts { "ends before record" } else { "is corrupt at record" }),
            "{reason}"
        );
    }
}

#[tokio::test(start_paused = true)]
async fn alternating_directories_give_no_short_results() {
    let disks = disks::<2>();
    let shuffle = key("app", 1);
    let store = store_on(&disks).await;
    append_record(&store, &shuffle, b"first").await;
    drop(store);
    let store = store_on(&disks[..1]).await;
    assert!(records_of(&recover(&store).await, &shuffle).1.unwrap().contains("/b is missing"));
    append_record(&store, &shuffle, b"second").await;
    drop(store);
    let store = store_on(&disks[1..]).await;
    let recovered = recover(&store).await;
    assert_eq!(records_of(&recovered, &shuffle).0, [&b"first"[..]]);
    assert!(
        records_of(&recovered, &shuffle).1.unwrap().contains("/a is missing")
            && store.metadata_gap().is_some()
    );
    drop(store);
    let store = store_on(&disks).await;
    let reason = records_of(&recover(&store).await, &shuffle).1.unwrap();
    assert!(reason.contains("was used separately from the others"), "{reason}");
}

/// A directory is absent for one start, which creates an empty one at its path. The empty one is
/// absent when the first returns.
#[tokio::test(start_paused = true)]
async fn returned_directory_names_its_replacement() {
    let disks = disks::<2>();
    let between = TestDisk::new("/b");
    let (old, new) = (key("app", 1), key("app", 2));
    append_record(&*store_on(&disks).await, &old, b"old").await;
    let store = open(vec![disks[0].disk(), between.disk()]).await.unwrap();
    let in_between = store.disks()[1].uuid;
    assert!(records_of(&recover(&store).await, &old).1.unwrap().contains("/b is missing"));
    append_record(&store, &new, b"new").await;
    drop(store);
    for _ in 0..2 {
        let store = store_on(&disks).await;
        let recovered = recover(&store).await;
        for (shuffle, record) in [(&old, &b"old"[..]), (&new, b"new")] {
            let (records, reason) = records_of(&recovered, shuffle);
            assert_eq!(records, [record]);
            let (reason, named) = (reason.unwrap(), format!("its replacement (id {in_between})"));
            assert!(reason.contains("/b is an earlier one") && reason.contains(&named), "{reason}");
        }
    }
    // At a path of its own, the directory shows that it has nothing newer.
    let third = TestDisk::new("/c");
    for directory in between.memory.directories() {
        third.memory.create_dir_all(&directory).await.unwrap();
    }
    between.memory.snapshot().into_iter().for_each(|(path, content)| third.memory.put(&path, Some(content)));
    let store = open(vec![disks[0].disk(), disks[1].disk(), third.disk()]).await.unwrap();
    let recovered = recover(&store).await;
    assert_eq!(
        (records_of(&recovered, &old).1, records_of(&recovered, &new).1, store.metadata_gap()),
        (None, None, None)
    );
}

#[tokio::test(start_paused = true)]
async fn two_of_three_directories_are_proof() {
    let disks = disks::<3>();
    let shuffle = key("app", 1);
    append_record(&*store_on(&disks).await, &shuffle, b"first").await;
    let two = |away: usize| {
        let here = disks.iter().enumerate().filter(move |(at, _)| *at != away);
        let here: Vec<_> = here.map(|(_, disk)| disk.disk()).collect();
        open(here)
    };
    for (away, record) in [(2, &b"second"[..]), (0, b"third")] {
        let store = two(away).await.unwrap();
        assert_eq!(records_of(&recover(&store).await, &shuffle).1, None);
        append_record(&store, &shuffle, record).await;
    }
    let store = store_on(&disks[..1]).await;
    assert!(records_of(&recover(&store).await, &shuffle).1.unwrap().contains("is missing"));
    let handle = store.handle(&shuffle).unwrap();
    let error = store.append_metadata(&handle, b"no").await.unwrap_err().to_string();
    assert!(error.contains("only 1 of 3 data directories are writable"), "{error}");
    drop((handle, store));
    let store = store_on(&disks).await;
    let (records, incomplete) = records_of(&recover(&store).await, &shuffle);
    assert_eq!((records.len(), incomplete), (3, None));
}

/// Regression test: copies that moved stayed in the same epoch. A full disk kept an old copy, and
/// it proved everything after the directories with the new ones were lost.
#[tokio::test(start_paused = true)]
async fn old_copy_of_a_moved_log_is_no_proof() {
    let disks = disks::<5>();
    let shuffle = key("app", 1);
    let store = store_on(&disks).await;
    append_record(&store, &shuffle, b"first").await;
    disks[0].memory.set_capacity(Some(1 << 20));
    disks[0].memory.put(Path::new("other"), Some(vec![0; 1_000_000]));
    disks[0].faults.add(Rule::always(Operation::Remove, Fault::Errno(EIO)));
    store.maintain_once().await;
    let copies: Vec<usize> = log_copies(&disks).into_iter().map(|(at, _)| at).collect();
    assert_eq!(copies, [0, 1, 2]);
    append_record(&store, &shuffle, b"second").await;
    drop(store);
    let store = open([0, 3, 4].map(|at: usize| disks[at].disk()).into()).await.unwrap();
    let (records, incomplete) = records_of(&recover(&store).await, &shuffle);
    assert!(incomplete.is_some(), "a record is missing, but the shuffle counts as complete: {records:?}");
}

#[tokio::test(start_paused = true)]
#[expect(clippy::excessive_nesting, reason = "a loop over cases around what each does")]
async fn damaged_log_file_hides_nothing() {
    for count in 1..=2 {
        let shuffle = key("app", 1);
        let files = async |disks: &[TestDisk]| {
            append_record(&*store_on(disks).await, &shuffle, b"record").await;
            let all = disks.iter().enumerate().flat_map(|(at, disk)| {
                let ours = disk.memory.files().into_iter().filter(|path| path.starts_with(METADATA));
                ours.map(move |path| (at, path)).collect::<Vec<_>>()
            });
            all.collect::<Vec<_>>()
        };
        let file_count = files(&disks::<2>()[..count]).await.len();
        let kinds = ["empty", "away", "unreadable"];
        for (damaged, how) in (0..file_count).flat_map(|file| kinds.map(|how| (file, how))) {
            let disks = &disks::<2>()[..count];
            let (at, path) = files(disks).await[damaged].clone();
            let disk = &disks[at];
            match how {
                "empty" => disk.memory.write_small(&path, Vec::new()).await.unwrap(),
                "away" => disk.memory.rename(&path, Path::new("trash/away")).await.unwrap(),
                _ => {
                    let name = if path.ends_with("log") { "/log" } else { "/members" };
                    disk.faults.add(Rule::always(Operation::OpenRead, Fault::Errno(EIO)).on(name));
                    disk.faults.add(Rule::always(Operation::Other, Fault::Errno(EIO)).on(name));
                }
            }
            let store = store_on(disks).await;
            let (records, incomplete) = records_of(&recover(&store).await, &shuffle);
            let is_refused = store.metadata_gap().is_some();
            assert!(records.len() == 1 || is_refused, "{path:?} {how}");
            assert!(
                !is_refused || how == "unreadable",
                "one damaged file must be repaired: {path:?} {how} {incomplete:?}"
            );
        }
    }
}

#[tokio::test(start_paused = true)]
async fn one_sync_acknowledges_all_waiters() {
    let disks = disks::<1>();
    let store = store_on(&disks).await;
    let handle = store.register(&key("app", 1));
    disks[0].faults.add(Rule::once(Operation::Sync, Fault::Slow(Duration::from_secs(5))).on("/log"));
    let started = tokio::time::Instant::now();
    let mut first = Box::pin(store.append_metadata(&handle, b"first"));
    let early = tokio::time::timeout(Duration::from_secs(4), &mut first).await;
    assert!(early.is_err());
    // The others are one group. Its only sync, of 2 s, begins after the first one, of 5 s.
    disks[0].faults.add(Rule::always(Operation::Sync, Fault::Slow(Duration::from_secs(2))).on("/log"));
    let mut others = Box::pin(join_all((0..20).map(|_| store.append_metadata(&handle, b"another"))));
    assert!((&mut others).now_or_never().is_none());
    first.await.unwrap();
    assert!(others.await.into_iter().all(|appended| appended.is_ok()));
    assert_eq!(started.elapsed().as_secs(), 7);
}

#[tokio::test(start_paused = true)]
async fn hung_copy_is_dropped_and_recreated_later() {
    let disks = disks::<2>();
    let shuffle = key("app", 1);
    let store = store_on(&disks).await;
    append_record(&store, &shuffle, b"first").await;
    disks[1].faults.add(Rule::always(Operation::Write, Fault::Hang).on("/log"));
    append_record(&store, &shuffle, b"second").await;
    assert!(!store.disks()[1].is_healthy(), "a disk that does not answer counts as healthy");
    let copies: Vec<usize> =
        log_copies(&disks).into_iter().filter(|(at, _)| *at == 0).map(|it| it.0).collect();
    assert_eq!(copies, [0, 0], "both copies must be on the disk that answers");
    disks[1].faults.clear();
    disks[1].faults.release().await;
    store.probe().await;
    // A directory whose copy failed is avoided for 60 s.
    tokio::time::sleep(Duration::from_secs(61)).await;
    store.maintain_once().await;
    assert_eq!(log_copies(&disks).into_iter().map(|(at, _)| at).collect::<Vec<_>>(), [0, 1]);
    drop(store);
    let (records, incomplete) = records_of(&recover(&*store_on(&disks).await).await, &shuffle);
    assert_eq!((records.len(), incomplete), (2, None));
}

#[tokio::test(start_paused = true)]
async fn records_are_read_from_the_other_copy_on_errors() {
    let disks = disks::<2>();
    let shuffle = key("app", 1);
    let store = store_on(&disks).await;
    let records: Vec<Bytes> = (0..200u8).map(|n| Bytes::from(vec![n; 20_000])).collect();
    for record in &records {
        append_record(&store, &shuffle, record).await;
    }
    for failing in [0, 1] {
        // Only one copy fails, and only after its first two reads.
        disks[failing].faults.add(Rule::always(Operation::Read, Fault::Errno(EIO)).on("/log").after(2));
        assert_eq!(read_log(&store).await.unwrap(), records);
        disks.iter().for_each(|disk| disk.faults.clear());
    }
    disks
        .iter()
        .for_each(|disk| disk.faults.add(Rule::always(Operation::Read, Fault::Errno(EIO)).on("/log")));
    let error = read_log(&store).await.unwrap_err();
    assert!(error.to_string().contains("Input/output error"), "{error}");
}

async fn read_log(store: &LocalStore) -> Result<Vec<Bytes>, LogError> {
    let (mut reader, mut records) = (store.metadata.records(), Vec::new());
    while let Some((_, record)) = reader.next().await? {
        records.push(record);
    }
    Ok(records)
}

#[tokio::test(start_paused = true)]
async fn single_unlistable_directory_continues_when_listable() {
    let list = Rule::always(Operation::Other, Fault::Errno(EIO)).on("uniffle-worker.metadata");
    log_continues_when_readable(list, "cannot list").await;
}

/// The files belong to another user, for example after a restore, or the process has no free file
/// descriptor.
#[tokio::test(start_paused = true)]
async fn log_that_cannot_be_opened_is_not_overwritten() {
    for (errno, text) in [(EACCES, "Permission denied"), (EMFILE, "Too many open files")] {
        let open = Rule::always(Operation::OpenRead, Fault::Errno(errno)).on("/log");
        log_continues_when_readable(open, text).await;
    }
}

async fn log_continues_when_readable(fault: Rule, text: &str) {
    let disks = disks::<1>();
    let (old, new) = (key("app", 1), key("app", 2));
    let store = store_on(&disks).await;
    append_record(&store, &old, b"old").await;
    drop(store);
    disks[0].faults.add(fault);
    let store = store_on(&disks).await;
    assert!(recover(&store).await.records.is_empty() && store.metadata_gap().is_some());
    let handle = store.register(&new);
    let error = store.append_metadata(&handle, b"too early").await.unwrap_err().to_string();
    assert!(error.contains(text) && error.contains("until it is readable"), "{error}");
    store.maintain_once().await;
    assert!(store.append_metadata(&handle, b"too early").await.is_err());
    disks[0].faults.clear();
    store.maintain_once().await;
    store.append_metadata(&handle, b"new").await.unwrap();
    assert!(store.metadata_gap().is_some(), "unknown shuffles must be refused until the next start");
    drop((handle, store));
    let store = store_on(&disks).await;
    let recovered = recover(&store).await;
    assert_eq!(records_of(&recovered, &old), (vec![Bytes::from_static(b"old")], None));
    assert_eq!(records_of(&recovered, &new), (vec![Bytes::from_static(b"new")], None));
    assert_eq!(store.metadata_gap(), None);
}

/// A process that could not list the log at its start numbers registrations from a random number,
/// which may be below that of the earlier registration.
#[tokio::test(start_paused = true)]
async fn registration_replaces_the_one_found_after_the_start() {
    let disks = disks::<1>();
    let (again, other) = (key("app", 1), key("app", 2));
    let store = store_on(&disks).await;
    store.count_from(1 << 40);
    append_record(&store, &again, b"old").await;
    append_record(&store, &other, b"other").await;
    drop(store);
    disks[0].faults.add(Rule::always(Operation::Other, Fault::Errno(EIO)).on("uniffle-worker.metadata"));
    let store = store_on(&disks).await;
    assert!(recover(&store).await.records.is_empty());
    let handle = store.register(&again);
    assert!(store.append_metadata(&handle, b"too early").await.is_err());
    disks[0].faults.clear();
    store.maintain_once().await;
    append_record(&store, &again, b"new").await;
    append_record(&store, &again, b"report").await;
    drop((handle, store));
    let store = store_on(&disks).await;
    let recovered = recover(&store).await;
    let new = vec![Bytes::from_static(b"new"), Bytes::from_static(b"report")];
    assert_eq!(records_of(&recovered, &again), (new, None));
    assert_eq!(records_of(&recovered, &other), (vec![Bytes::from_static(b"other")], None));
}

#[tokio::test(start_paused = true)]
async fn data_without_a_metadata_log_is_incomplete() {
    for count in 1..=2 {
        let disks = &disks::<2>()[..count];
        let shuffle = key("app", 1);
        let store = store_on(disks).await;
        append_record(&store, &shuffle, b"registered").await;
        store.write(&shuffle, vec![extent(1, &[(1, 900)], true)]).await.unwrap();
        drop(store);
        for disk in disks {
            disk.memory.rename(Path::new(METADATA), Path::new("trash/away")).await.unwrap();
        }
        let store = store_on(disks).await;
        let recovered = store.take_recovered();
        assert!(!recovered.shuffles[0].reason.is_empty());
        let gap = store.metadata_gap().unwrap();
        assert!(gap.contains("without a metadata log") && gap.contains("unregister"), "{gap}");
        append_record(&store, &key("app", 2), b"registered").await;
        drop((recovered, store));
        assert!(store_on(disks).await.metadata_gap().is_some());
    }
}
