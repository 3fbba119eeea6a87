//! Removal, replacement, truncation and moves of files and directories by other programs during
//! use. Starts that are refused leave no claim in a new directory.

use std::time::Duration;

use parking_lot::Mutex;
use tokio::task::yield_now;

use super::*;
use uniffle_testkit::fault::{EIO, Fault, Operation, Rule};

/// End of the path of the unnamed copy of the metadata log.
const SPARE: &str = ".2.new";
/// The error "File too large".
const EFBIG: i32 = rustix::io::Errno::FBIG.raw_os_error();

/// Partitions reported as damaged.
pub(super) type ReportedPartitions = Arc<Mutex<Vec<i32>>>;

/// Creates a store on one disk, with a shuffle that has two blocks there.
pub(super) async fn with_two_blocks() -> (TestDisk, Arc<LocalStore>, ShuffleKey, ReportedPartitions) {
    let disk = TestDisk::new("/a");
    let store = open(vec![disk.disk()]).await.unwrap();
    let (key, damaged) = (key("app", 1), ReportedPartitions::default());
    let handle = store.register(&key);
    store.append_metadata(&handle, b"registered").await.unwrap();
    let listener = Arc::clone(&damaged);
    store.on_damage(Arc::new(move |_: &ShuffleKey, partition: PartitionId, _: &str| {
        listener.lock().push(partition.0)
    }));
    for id in 1..=2 {
        store.write(&key, vec![extent(1, &[(id, 9000)], true)]).await.unwrap();
    }
    (disk, store, key, damaged)
}

fn file(disk: &TestDisk, extension: &str) -> PathBuf {
    let mut files = disk.app_files().into_iter();
    files.find(|path| path.extension().is_some_and(|it| it == extension)).unwrap()
}

async fn present(store: &LocalStore, key: &ShuffleKey) -> Vec<u64> {
    let mut ids = Vec::new();
    store.visit_present(key, PartitionId(1), &mut |id| ids.push(id)).await.unwrap();
    ids.sort_unstable();
    ids
}

/// Waits for the background tasks.
pub(super) async fn settled(store: &LocalStore) {
    while store.writer.tasks.running() > 0 {
        yield_now().await;
    }
}

#[tokio::test(start_paused = true)]
async fn append_to_a_changed_file_uses_a_new_one_and_reports_loss() {
    let changes: [fn(&TestDisk); 6] = [
        |disk| disk.memory.remove(Path::new("apps")),
        |disk| disk.memory.remove(Path::new("apps/app")),
        |disk| disk.memory.remove(&file(disk, "data")),
        |disk| disk.memory.remove(&file(disk, "index")),
        |disk| disk.memory.put(&file(disk, "data"), Some(vec![0; 100_000])),
        |disk| disk.memory.cut(&file(disk, "data"), 5000),
    ];
    for (number, change) in changes.into_iter().enumerate() {
        let (disk, store, key, damaged) = with_two_blocks().await;
        change(&disk);
        store.write(&key, vec![extent(1, &[(3, 9000)], true)]).await.unwrap();
        settled(&store).await;
        assert_eq!(present(&store, &key).await, [3], "{number}");
        assert!(damaged.lock().contains(&1), "{number}");
        let metrics = &store.core.metrics;
        assert!((1..=2).contains(&metrics.files_vanished.get()), "{number}");
        assert_eq!(metrics.extents_lost.get(), 2, "{number}");
        assert_eq!(store.disks()[0].condition, DiskCondition::Healthy, "{number}");
        assert_eq!(range_of(&store, &key, 1, (18_000, 9000)).await.unwrap(), payload(3, 9000));
        drop(store);
        let store = open(vec![disk.disk()]).await.unwrap();
        let recovered = recover(&store).await;
        assert_eq!(recovered.records[&key], [&b"registered"[..]], "{number}");
        // Readers detect the wrong content of a file with the same name.
        let there = present(&store, &key).await;
        assert!(
            there == [3] || number == 4 && there == [1, 2, 3],
            "log {number}: blocks after a restart: {there:?}"
        );
    }
}

#[tokio::test(start_paused = true)]
async fn read_of_a_truncated_file_is_not_a_fault_of_the_disk() {
    let (disk, store, key, damaged) = with_two_blocks().await;
    disk.memory.cut(&file(&disk, "data"), 9000);
    for _ in 0..3 {
        range_of(&store, &key, 1, (9000, 9000)).await.unwrap_err();
    }
    store.mark_damaged_lost(&key, PartitionId(1)).await;
    assert_eq!(store.disks()[0].condition, DiskCondition::Healthy);
    assert!(damaged.lock().contains(&1));
}

#[tokio::test(start_paused = true)]
async fn removed_file_is_noticed_without_an_append() {
    for extension in ["data", "index"] {
        let (disk, store, key, damaged) = with_two_blocks().await;
        store.sweep().await;
        settled(&store).await;
        assert!(damaged.lock().is_empty());
        disk.memory.remove(&file(&disk, extension));
        store.sweep().await;
        settled(&store).await;
        assert!(present(&store, &key).await.is_empty());
        assert!(damaged.lock().contains(&1));
        assert_eq!(store.core.metrics.files_vanished.get(), 1);
        store.sweep().await;
        settled(&store).await;
        assert_eq!(store.core.metrics.files_vanished.get(), 1);
        store.purge_app(&key.app).await;
        store.sweep().await;
        assert_eq!(disk.app_files(), Vec::<PathBuf>::new());
    }
}

#[tokio::test(start_paused = true)]
async fn file_that_is_too_large_is_continued_in_a_new_one() {
    let (disk, store, key, damaged) = with_two_blocks().await;
    for extension in [".data", ".index"] {
        disk.faults.add(Rule::once(Operation::Write, Fault::Errno(EFBIG)).on(extension));
        let files = disk.app_files().len();
        let id = 3 + i64::try_from(files).unwrap();
        store.write(&key, vec![extent(1, &[(id, 9000)], true)]).await.unwrap();
        assert_eq!(disk.app_files().len(), files + 1, "{extension}");
    }
    assert_eq!(store.disks()[0].condition, DiskCondition::Healthy);
    assert_eq!(read_all(&store, &key, 1).await.unwrap(), [1, 2, 5, 6]);
    assert!(damaged.lock().is_empty());
}

#[tokio::test(start_paused = true)]
async fn files_rotate_before_the_largest_size() {
    let disk = TestDisk::new("/a");
    let config = LocalConfig { file_bytes_max: 20_000, ..LocalConfig::default() };
    let store = open_with(config, vec![disk.disk()]).await.unwrap();
    let key = key("app", 1);
    store.register(&key);
    for id in 0..4 {
        store.write(&key, vec![extent(1, &[(id, 9000)], true)]).await.unwrap();
    }
    let sizes = disk.app_files().into_iter().map(|path| disk.memory.content(&path).unwrap().len());
    assert!(sizes.max().is_some_and(|largest| largest <= 20_000));
    assert_eq!(read_all(&store, &key, 1).await.unwrap(), [0, 1, 2, 3]);
}

#[tokio::test(start_paused = true)]
async fn removed_metadata_log_is_rewritten() {
    for count in 1..=3 {
        for is_maintained in [false, true] {
            let disks = &metadata::disks::<3>()[..count];
            let store = store_on(disks).await;
            metadata::append_record(&store, &key("app", 1), b"before").await;
            disks.iter().for_each(|disk| disk.memory.remove(Path::new(METADATA)));
            if is_maintained {
                // A kill right after this loses nothing.
                store.maintain_once().await;
            } else {
                metadata::append_record(&store, &key("app", 1), b"after").await;
            }
            assert!(store.disks().iter().all(|disk| disk.condition == DiskCondition::Healthy));
            drop(store);
            let store = store_on(disks).await;
            let recovered = recover(&store).await;
            let (records, incomplete) = metadata::records_of(&recovered, &key("app", 1));
            let expected: &[&[u8]] = if is_maintained { &[b"before"] } else { &[b"before", b"after"] };
            assert_eq!(records, expected, "{count} disks, maintained {is_maintained}");
            assert_eq!(
                (incomplete, store.metadata_gap()),
                (None, None),
                "{count} disks, maintained {is_maintained}"
            );
        }
    }
}

/// Damage of a file by another program.
type Change = fn(&TestDisk, &Path);

const CHANGES: [(&str, Change); 6] = [
    ("cut", |disk, path| disk.memory.cut(path, 0)),
    ("cut in a record", |disk, path| disk.memory.change(path, |bytes| bytes.truncate(bytes.len() - 1))),
    ("extended", |disk, path| disk.memory.change(path, |bytes| bytes.extend([7; 777]))),
    ("overwritten", |disk, path| {
        disk.memory.change(path, |bytes| {
            let middle = bytes.len() / 2;
            bytes[middle..middle + 9].fill(0);
        });
    }),
    ("removed", |disk, path| disk.memory.put(path, None)),
    ("created again", |disk, path| disk.memory.put(path, Some(Vec::new()))),
];

/// Checks that a start on `disks` proves the `expected` records of the shuffle.
async fn all_is_proven(disks: &[TestDisk], expected: &[&[u8]], what: &str) {
    let store = store_on(disks).await;
    let recovered = recover(&store).await;
    let (records, incomplete) = metadata::records_of(&recovered, &key("app", 1));
    assert_eq!(records, expected, "{what}");
    assert_eq!((incomplete, store.metadata_gap()), (None, None), "{what}");
}

#[tokio::test(start_paused = true)]
async fn damaged_metadata_log_is_rewritten_without_loss() {
    for (what, change) in CHANGES {
        for (damaged, is_maintained) in [(1, false), (1, true), (2, false), (2, true)] {
            let what = format!("{damaged} {what}, maintained {is_maintained}");
            let disks = metadata::disks::<2>();
            let store = store_on(&disks).await;
            metadata::append_record(&store, &key("app", 1), b"first").await;
            metadata::append_record(&store, &key("app", 1), b"second").await;
            for (at, path) in &log_copies(&disks)[..damaged] {
                change(&disks[*at], path);
            }
            let mut expected: Vec<&[u8]> = vec![b"first", b"second"];
            if is_maintained {
                // A kill right after this loses nothing.
                store.maintain_once().await;
            } else {
                metadata::append_record(&store, &key("app", 1), b"after").await;
                expected.push(b"after");
            }
            assert_eq!(store.successor_doubts(), None, "{what}");
            assert!(store.disks().iter().all(|disk| disk.condition == DiskCondition::Healthy), "{what}");
            drop(store);
            all_is_proven(&disks, &expected, &what).await;
        }
    }
}

#[tokio::test(start_paused = true)]
async fn stop_or_upgrade_rewrites_a_damaged_metadata_log() {
    for is_upgrade in [false, true] {
        let disks = metadata::disks::<2>();
        let store = store_on(&disks).await;
        metadata::append_record(&store, &key("app", 1), b"first").await;
        for (at, path) in log_copies(&disks) {
            disks[at].memory.cut(&path, 0);
        }
        match is_upgrade {
            true => assert!(store.release_log().await.is_some()),
            false => store.sync_disks(Duration::from_secs(10)).await,
        }
        drop(store);
        all_is_proven(&disks, &[b"first"], &is_upgrade.to_string()).await;
    }
}

#[tokio::test(start_paused = true)]
async fn successor_restores_a_damaged_metadata_log() {
    let disks = metadata::disks::<2>();
    let store = store_on(&disks).await;
    metadata::append_record(&store, &key("app", 1), b"first").await;
    let hand_off = store.release_log().await;
    drop(store);
    let copies = log_copies(&disks);
    let store = metadata::successor(&disks, hand_off.as_ref()).await;
    recover(&store).await;
    store.maintain_once().await;
    assert_eq!(log_copies(&disks), copies, "the log was written anew");
    for (at, path) in copies {
        disks[at].memory.cut(&path, 0);
    }
    metadata::append_record(&store, &key("app", 1), b"second").await;
    drop(store);
    all_is_proven(&disks, &[b"first", b"second"], "after an upgrade").await;
}

#[tokio::test(start_paused = true)]
async fn cut_index_loses_only_its_own_extents() {
    let (disk, store, key, damaged) = with_two_blocks().await;
    let cut = file(&disk, "index");
    store.write(&key, vec![extent(2, &[(3, 9000)], true)]).await.unwrap();
    let groups = disk.memory.content(&cut).unwrap().len();
    disk.memory.cut(&cut, groups - 30);
    let error = read_all(&store, &key, 2).await.unwrap_err().to_string();
    assert!(error.contains(&*cut.to_string_lossy()) && error.contains("shorter than expected"), "{error}");
    assert_eq!(store.disks()[0].condition, DiskCondition::Healthy);
    assert_eq!(read_all(&store, &key, 1).await.unwrap(), [1, 2]);
    assert!(!damaged.lock().contains(&1));
}

/// Creates a store on two disks that cannot create the spare copy of the log, with two records of a
/// shuffle.
async fn two_records_without_spare() -> ([TestDisk; 2], Arc<LocalStore>) {
    let disks = metadata::disks::<2>();
    for disk in &disks {
        disk.faults.add(Rule::always(Operation::CreateDir, Fault::Errno(EIO)).on(SPARE));
    }
    let store = store_on(&disks).await;
    metadata::append_record(&store, &key("app", 1), b"first").await;
    metadata::append_record(&store, &key("app", 1), b"second").await;
    (disks, store)
}

#[tokio::test(start_paused = true)]
async fn truncated_metadata_log_is_continued_and_reported() {
    for (keeps_some, is_maintained) in [(false, false), (false, true), (true, false), (true, true)] {
        let (disks, store) = two_records_without_spare().await;
        for (at, path) in log_copies(&disks) {
            let length = disks[at].memory.content(&path).unwrap().len();
            disks[at].memory.cut(&path, if keeps_some { length - 1 } else { 0 });
        }
        if is_maintained {
            store.maintain_once().await;
        }
        metadata::append_record(&store, &key("app", 1), b"after").await;
        metadata::append_record(&store, &key("app", 2), b"new").await;
        assert!(store.disks().iter().all(|disk| disk.condition == DiskCondition::Healthy));
        assert!(
            store.successor_doubts().unwrap().contains("was damaged"),
            "keeps some {keeps_some}, maintained {is_maintained}"
        );
        drop(store);
        let store = store_on(&disks).await;
        let recovered = recover(&store).await;
        let (records, incomplete) = metadata::records_of(&recovered, &key("app", 1));
        assert_eq!(
            records.last().unwrap(),
            &b"after"[..],
            "keeps some {keeps_some}, maintained {is_maintained}"
        );
        assert_eq!(
            records.len() > 1,
            keeps_some,
            "keeps some {keeps_some}, maintained {is_maintained}: {records:?}"
        );
        assert!(
            incomplete.unwrap().contains("was damaged while it was in use"),
            "keeps some {keeps_some}, maintained {is_maintained}: {records:?}"
        );
        assert_eq!(
            metadata::records_of(&recovered, &key("app", 2)),
            (vec![Bytes::from_static(b"new")], None)
        );
        assert!(
            store.metadata_gap().unwrap().contains("was damaged"),
            "keeps some {keeps_some}, maintained {is_maintained}"
        );
    }
}

/// A generation could not be written because no copy was readable. Damage of all copies after that
/// still makes the shuffle incomplete.
#[tokio::test(start_paused = true)]
async fn failed_generation_then_damage_is_reported() {
    let (disks, store) = two_records_without_spare().await;
    let copies = log_copies(&disks);
    disks[copies[0].0].memory.remove(&copies[0].1);
    for disk in &disks {
        disk.faults.add(Rule::always(Operation::Read, Fault::Errno(EIO)).on("/log"));
    }
    store.append_metadata(&store.register(&key("app", 2)), b"refused").await.unwrap_err();
    let (at, path) = &copies[1];
    disks[*at].memory.change(path, |bytes| bytes.truncate(bytes.len() - 1));
    disks.iter().for_each(|disk| disk.faults.clear());
    store.probe().await;
    metadata::append_record(&store, &key("app", 2), b"new").await;
    drop(store);
    let store = store_on(&disks).await;
    let recovered = recover(&store).await;
    let (records, incomplete) = metadata::records_of(&recovered, &key("app", 1));
    let incomplete = incomplete.unwrap_or_default();
    assert!(incomplete.contains("was damaged while it was in use"), "{records:?} {incomplete}");
}

#[tokio::test(start_paused = true)]
async fn removed_metadata_log_file_is_restored() {
    let disks = metadata::disks::<2>();
    let store = store_on(&disks).await;
    metadata::append_record(&store, &key("app", 1), b"before").await;
    let (at, path) = log_copies(&disks).remove(0);
    disks[at].memory.remove(&path);
    metadata::append_record(&store, &key("app", 1), b"after").await;
    let copies: Vec<_> = log_copies(&disks).into_iter().map(|(at, _)| at).collect();
    assert_eq!(copies, [0, 1]);
    for disk in &disks {
        disk.memory.remove(&Path::new(METADATA).join("members"));
    }
    store.maintain_once().await;
    for disk in &disks {
        assert!(disk.memory.content(&Path::new(METADATA).join("members")).is_some());
    }
}

/// A store on real directories below a temporary one.
struct Real {
    parent: tempfile::TempDir,
    store: Arc<LocalStore>,
    key: ShuffleKey,
}

impl Real {
    async fn new(count: usize) -> Self {
        let parent = tempfile::tempdir().unwrap();
        let store = Self::start(&parent, count).await;
        let key = key("app", 1);
        let handle = store.register(&key);
        store.append_metadata(&handle, b"registered").await.unwrap();
        Self { parent, store, key }
    }

    async fn start(parent: &tempfile::TempDir, count: usize) -> Arc<LocalStore> {
        let paths = (0..count).map(|at| parent.path().join(format!("d{at}"))).collect();
        open_real(LocalConfig { paths, ..LocalConfig::default() }.real_disks()).await.unwrap()
    }

    fn root(&self) -> PathBuf {
        self.parent.path().join("d0")
    }

    async fn write(&self, id: i64) -> Result<BatchSummary, StoreError> {
        self.store.write(&self.key, vec![extent(1, &[(id, 9000)], true)]).await
    }
}

#[tokio::test]
async fn moved_directory_is_detached_and_not_recreated() {
    let real = Real::new(2).await;
    for id in 0..4 {
        real.write(id).await.unwrap();
    }
    let away = real.parent.path().join("away");
    std::fs::rename(real.root(), &away).unwrap();
    for id in 4..8 {
        assert_eq!(real.write(id).await.unwrap().disk, 1);
    }
    real.store.sweep().await;
    real.store.maintain_once().await;
    assert!(!real.root().exists(), "the moved directory was created again");
    assert_eq!(real.store.disks()[0].condition, DiskCondition::Detached);
    assert_eq!(
        real.store.core.metrics.files_vanished.get(),
        0,
        "files of a directory that may return count as vanished"
    );
    std::fs::create_dir(real.root()).unwrap();
    real.store.probe().await;
    assert_eq!(
        real.store.disks()[0].condition,
        DiskCondition::Detached,
        "another directory in its place must not be used"
    );
    assert_eq!(real.store.detached().await, [real.root().display().to_string()]);
    assert_eq!(std::fs::read_dir(real.root()).unwrap().count(), 0);
    std::fs::remove_dir(real.root()).unwrap();
    std::fs::rename(&away, real.root()).unwrap();
    assert_eq!(real.store.detached().await, [""; 0]);
    real.store.probe().await;
    assert_eq!(real.store.disks()[0].condition, DiskCondition::Healthy);
    assert_eq!(read_all(&real.store, &real.key, 1).await.unwrap(), (0..8).collect::<Vec<_>>());
}

#[tokio::test]
async fn emptied_directory_is_claimed_again() {
    let mut real = Real::new(1).await;
    real.write(1).await.unwrap();
    for entry in std::fs::read_dir(real.root()).unwrap().map(Result::unwrap) {
        match entry.file_type().unwrap().is_dir() {
            true => std::fs::remove_dir_all(entry.path()).unwrap(),
            false => std::fs::remove_file(entry.path()).unwrap(),
        }
    }
    real.write(2).await.unwrap();
    real.store.maintain_once().await;
    settled(&real.store).await;
    assert_eq!(real.store.disks()[0].condition, DiskCondition::Healthy);
    assert_eq!(present(&real.store, &real.key).await, [2]);
    drop(real.store);
    real.store = Real::start(&real.parent, 1).await;
    let recovered = recover(&real.store).await;
    assert_eq!(recovered.records[&real.key], [&b"registered"[..]]);
    assert_eq!(present(&real.store, &real.key).await, [2]);
}

#[tokio::test]
async fn new_directory_by_two_paths_is_refused_and_not_claimed() {
    let dir = tempfile::tempdir().unwrap();
    let (root, link) = (dir.path().join("data"), dir.path().join("link"));
    std::os::unix::fs::symlink(dir.path(), &link).unwrap();
    let real = |paths: &[&Path]| {
        LocalConfig { paths: paths.iter().map(|path| path.to_path_buf()).collect(), ..LocalConfig::default() }
            .real_disks()
    };
    for made in [false, true] {
        if made {
            std::fs::create_dir(&root).unwrap();
        }
        let same = link.join("data");
        let error = open_real(real(&[&root, &same])).await.unwrap_err();
        assert_eq!((error.kind, error.path.as_path()), (StoreErrorKind::Copied, same.as_path()));
        let text = error.to_string();
        assert!(text.contains("by another path") && text.contains(&*root.to_string_lossy()), "{text}");
        assert_eq!(root.exists(), made);
    }
    assert_eq!(std::fs::read_dir(&root).unwrap().count(), 0);
}

#[tokio::test]
async fn refused_start_leaves_no_claim_in_a_new_directory() {
    let disks = [TestDisk::new("/a"), TestDisk::new("/b")];
    let _other = disks[1].memory.lock(Path::new(MARKER)).await.unwrap();
    let error = open(disks.iter().map(TestDisk::disk).collect()).await.unwrap_err();
    assert_eq!(error.kind, StoreErrorKind::InUse);
    assert_eq!(disks[0].memory.files(), Vec::<PathBuf>::new());
}
