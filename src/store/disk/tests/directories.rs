//! Data directories that are not what their paths suggest: copies, unmounted disks, disappearing
//! roots, damaged claims.

use super::*;
use crate::store::disk::directories::marker::marker_of;

/// Returns the content of a directory.
fn content(disk: &TestDisk) -> BTreeMap<PathBuf, Vec<u8>> {
    disk.memory.snapshot()
}

#[tokio::test]
async fn copied_directory_is_refused_with_its_name() {
    let disks = [TestDisk::new("/a"), TestDisk::new("/b")];
    let store = store_on(&disks).await;
    let key = key("app", 1);
    let handle = store.register(&key);
    store.append_metadata(&handle, b"registered").await.unwrap();
    store.write(&key, vec![extent(1, &[(1, 9000)], true)]).await.unwrap();
    drop((handle, store));
    let copy = TestDisk::new("/copy");
    for (path, content) in content(&disks[0]) {
        copy.memory.put(&path, Some(content));
    }
    let before = [content(&disks[0]), content(&disks[1]), content(&copy)];
    let error = open(vec![disks[0].disk(), disks[1].disk(), copy.disk()]).await.unwrap_err();
    assert_eq!(error.kind, StoreErrorKind::Copied);
    let text = error.to_string();
    assert!(text.starts_with("/copy: ") && text.contains("same directory as /a, or a copy of it"), "{text}");
    assert_eq!([content(&disks[0]), content(&disks[1]), content(&copy)], before);
    // Without one of them the store starts.
    let store = store_on(&disks).await;
    assert_eq!(read_all(&store, &key, 1).await.unwrap(), [1]);
}

#[tokio::test]
async fn directory_with_two_paths_is_refused_with_its_name() {
    let dir = tempfile::tempdir().unwrap();
    let (root, link) = (dir.path().join("data"), dir.path().join("link"));
    std::fs::create_dir(&root).unwrap();
    std::os::unix::fs::symlink(&root, &link).unwrap();
    let real = |paths: &[&Path]| {
        LocalConfig { paths: paths.iter().map(|path| path.to_path_buf()).collect(), ..LocalConfig::default() }
            .real_disks()
    };
    drop(open_real(real(&[&root])).await.unwrap());
    let error = open_real(real(&[&root, &link])).await.unwrap_err();
    assert_eq!((error.kind, error.path.as_path()), (StoreErrorKind::Copied, link.as_path()));
}

#[tokio::test]
async fn empty_directory_on_root_is_refused_if_mounts_are_required() {
    let disk = TestDisk::new("/data");
    disk.memory.set_mount_point("/");
    let config = LocalConfig { require_mounted: Some(true), ..LocalConfig::default() };
    let open = |config: &LocalConfig, disk: &TestDisk| {
        let (config, disks) = (config.clone(), vec![disk.disk()]);
        async move { open_with(config, disks).await }
    };
    let error = open(&config, &disk).await.unwrap_err();
    assert_eq!(error.kind, StoreErrorKind::NotMounted);
    let text = error.to_string();
    assert!(text.contains("/data") && text.contains("localfile_store.require_mounted = true"), "{text}");
    assert!(disk.memory.files().is_empty(), "files were written below the missing mount point");
    disk.memory.set_mount_point("/data");
    drop(open(&config, &disk).await.unwrap());
    // A claimed directory is accepted regardless of its mount point.
    disk.memory.set_mount_point("/");
    drop(open(&config, &disk).await.unwrap());
    let other = TestDisk::new("/other");
    other.memory.set_mount_point("/");
    drop(open(&LocalConfig::default(), &other).await.unwrap());
}

/// Creates two data directories on separate disks, with a shuffle that has a block on the second.
async fn on_two_mounts() -> [TestDisk; 2] {
    let disks = [TestDisk::new("/a/data"), TestDisk::new("/b/data")];
    disks[0].memory.set_mount_point("/a");
    disks[1].memory.set_mount_point("/b");
    let (store, key) = (store_on(&disks).await, key("app", 1));
    let handle = store.register(&key);
    store.append_metadata(&handle, b"registered").await.unwrap();
    let mut id = 0;
    while store.write(&key, vec![extent(1, &[(id, 9000)], true)]).await.unwrap().disk != 1 {
        id += 1;
    }
    disks
}

/// Opens a store. Returns the paths in use, the ids of the only shuffle's blocks, and why its
/// results are refused.
async fn opened(
    require_mounted: Option<bool>,
    disks: [&TestDisk; 2],
) -> (Vec<PathBuf>, Vec<u64>, Option<String>) {
    let config = LocalConfig { require_mounted, ..LocalConfig::default() };
    let store = open_with(config, disks.iter().map(|disk| disk.disk()).collect()).await.unwrap();
    let recovered = recover(&store).await;
    let ids = super::present(&store, &key("app", 1), PartitionId(1)).await;
    store.probe().await;
    store.sweep().await;
    store.maintain_once().await;
    let paths = store.disks().iter().map(|disk| disk.path.clone()).collect();
    (paths, ids, recovered.shuffles[0].incomplete.clone())
}

#[tokio::test]
async fn empty_directory_of_an_unmounted_disk_is_left_out() {
    let disks = on_two_mounts().await;
    let all = opened(None, [&disks[0], &disks[1]]).await;
    let unmounted = TestDisk::new("/b/data");
    unmounted.memory.set_mount_point("/");
    for _ in 0..2 {
        let (paths, _, incomplete) = opened(None, [&unmounted, &disks[0]]).await;
        assert_eq!(paths, [Path::new("/a/data")]);
        assert!(incomplete.is_some_and(|reason| reason.contains("/b/data is missing")));
        assert!(unmounted.memory.files().is_empty());
    }
    // Mounted again, the directory has all of its data.
    assert_eq!(opened(None, [&disks[0], &disks[1]]).await, all);
    // The operator says that the disk is gone permanently.
    let (paths, ..) = opened(Some(false), [&disks[0], &unmounted]).await;
    assert_eq!(paths, [Path::new("/a/data"), Path::new("/b/data")]);
}

#[tokio::test]
async fn new_disk_at_the_mount_point_of_another_is_taken() {
    let disks = on_two_mounts().await;
    let all = opened(None, [&disks[0], &disks[1]]).await;
    let new = TestDisk::new("/b/data");
    new.memory.set_mount_point("/b");
    let (paths, ids, incomplete) = opened(None, [&disks[0], &new]).await;
    assert_eq!(paths, all.0);
    assert!(ids.len() < all.1.len(), "no block is on the absent disk, so the test checks nothing");
    assert!(incomplete.is_some_and(|reason| reason.contains("/b/data is missing")));
    // The old directory returns, and its blocks are served again.
    let (_, ids, _) = opened(None, [&disks[0], &disks[1]]).await;
    assert_eq!(ids, all.1);
    // A directory on the root file system gets a disk of its own.
    new.memory.set_mount_point("/");
    opened(None, [&disks[0], &new]).await;
    let own = TestDisk::new("/b/data");
    own.memory.set_mount_point("/b");
    assert_eq!(opened(None, [&disks[0], &own]).await.0.len(), 2);
}

#[tokio::test]
async fn empty_directories_are_refused_if_their_data_is_known() {
    let open = async |disks: &[TestDisk], had_data: Option<&str>, require_mounted, recovery| {
        let had_data = had_data.map(str::to_owned);
        let config = LocalConfig { had_data, require_mounted, recovery, ..LocalConfig::default() };
        open_with(config, disks.iter().map(TestDisk::disk).collect()).await.map(drop)
    };
    let empty = || [TestDisk::new("/a"), TestDisk::new("/b")];
    let (disks, known) = (empty(), Some("memory_store.backing has 3 shuffles of this worker"));
    for require_mounted in [None, Some(true)] {
        let error = open(&disks, known, require_mounted, true).await.unwrap_err();
        assert_eq!((error.kind, error.path.as_path()), (StoreErrorKind::NotMounted, Path::new("/a")));
        let text = error.to_string();
        assert!(text.contains("has 3 shuffles") && text.contains("require_mounted = false"), "{text}");
    }
    assert!(
        disks.iter().all(|disk| content(disk).is_empty()),
        "a refused start left claims, which make the directories look used"
    );
    // The operator says that they are new, no data is to be recovered, or none is known.
    for (had_data, require_mounted, recovery) in
        [(known, Some(false), true), (known, None, false), (None, None, true), (None, Some(true), true)]
    {
        open(&empty(), had_data, require_mounted, recovery).await.unwrap();
    }
    // A used directory knows the others.
    let [used, new] = empty();
    open(std::slice::from_ref(&used), None, None, true).await.unwrap();
    open(&[used, new], known, None, true).await.unwrap();
}

#[tokio::test]
async fn missing_directory_receives_nothing_until_it_returns() {
    let (disks, store, key, handle) = two_disks_with_blocks(8).await;
    let marker = disks[0].memory.content(Path::new(MARKER));
    disks[0].memory.put(Path::new(MARKER), None);
    store.maintain_once().await;
    let info = &store.disks()[0];
    assert_eq!(info.condition, DiskCondition::Detached);
    assert!(info.fault.as_deref().is_some_and(|fault| fault.contains("unmounted, moved or replaced")));
    assert_eq!(store.core.metrics.disk_is_detached.with_label_values(&["/a"]).get(), 1);
    let before = content(&disks[0]);
    for id in 8..12 {
        assert_eq!(store.write(&key, vec![extent(1, &[(id, 9000)], true)]).await.unwrap().disk, 1);
    }
    store.append_metadata(&handle, b"more").await.unwrap();
    store.probe().await;
    assert_eq!(content(&disks[0]), before, "the store wrote to the detached directory");
    let error = read_all(&store, &key, 1).await.unwrap_err();
    assert_eq!(error.kind, StoreErrorKind::Unhealthy);
    // Another directory in its place is not accepted.
    let other = Some(marker_of(uuid::Uuid::from_u128(7)).into_bytes());
    disks[0].memory.put(Path::new(MARKER), other);
    store.probe().await;
    assert_eq!(store.disks()[0].condition, DiskCondition::Detached);
    disks[0].memory.put(Path::new(MARKER), marker);
    store.probe().await;
    store.maintain_once().await;
    assert_eq!(store.disks()[0].condition, DiskCondition::Healthy);
    assert_eq!(read_all(&store, &key, 1).await.unwrap(), (0..12).collect::<Vec<_>>());
}

/// Real data directories with a shuffle. A test damages the claim of the last one.
struct Claimed {
    root: tempfile::TempDir,
    count: usize,
    key: ShuffleKey,
}

impl Claimed {
    async fn new(count: usize) -> Self {
        let claimed = Self { root: tempfile::tempdir().unwrap(), count, key: key("app", 1) };
        let store = claimed.open().await.unwrap();
        let handle = store.register(&claimed.key);
        store.append_metadata(&handle, b"registered").await.unwrap();
        for id in 0..6 {
            store.write(&claimed.key, vec![extent(1, &[(id, 900)], true)]).await.unwrap();
        }
        close(store).await;
        claimed
    }

    /// The name has a quote, which the shell command must escape.
    fn path(&self, number: usize) -> PathBuf {
        self.root.path().join(format!("it's d{number}"))
    }

    fn claim(&self) -> PathBuf {
        self.path(self.count - 1).join(MARKER)
    }

    async fn open(&self) -> Result<Arc<LocalStore>, StoreError> {
        let paths = (0..self.count).map(|number| self.path(number)).collect();
        open_real(LocalConfig { paths, ..LocalConfig::default() }.real_disks()).await
    }

    /// Returns the names of all files and directories, with the sizes of files.
    fn listing(&self) -> Vec<(PathBuf, u64)> {
        let (mut all, mut remaining) = (Vec::new(), vec![self.root.path().to_path_buf()]);
        while let Some(directory) = remaining.pop() {
            for entry in std::fs::read_dir(directory).unwrap().map(Result::unwrap) {
                let metadata = entry.metadata().unwrap();
                all.push((entry.path(), if metadata.is_file() { metadata.len() } else { 0 }));
                remaining.extend(metadata.is_dir().then(|| entry.path()));
            }
        }
        all.sort();
        all
    }

    /// Runs the command at the end of an error.
    fn repair(&self, error: &StoreError) {
        let text = error.to_string();
        let (_, line) = text
            .split_once("to restore the claim: ")
            .expect("the error does not tell how to restore the claim");
        let line = line.strip_suffix(')').expect("the error does not end with the command");
        let done = std::process::Command::new("sh").arg("-c").arg(line).status().unwrap();
        assert!(done.success(), "{line}");
    }
}

/// Closes the metadata log and drops the store. If the log is open, a thread may still write a mark
/// beside its copies after the drop.
async fn close(store: Arc<LocalStore>) {
    store.metadata.release().await.unwrap();
}

#[tokio::test]
async fn damaged_claim_is_restored_with_the_reported_line() {
    for count in 1..=3 {
        let claimed = Claimed::new(count).await;
        let intact = std::fs::read(claimed.claim()).unwrap();
        let flipped: Vec<u8> =
            intact.iter().enumerate().map(|(at, byte)| byte ^ u8::from(at == 40)).collect();
        let flaws: [(Option<&[u8]>, &str); 4] = [
            (None, "missing"),
            (Some(b""), "empty"),
            (Some(&intact[..50]), "damaged"),
            (Some(&flipped), "damaged"),
        ];
        for (content, flaw) in flaws {
            match content {
                Some(content) => std::fs::write(claimed.claim(), content).unwrap(),
                None => std::fs::remove_file(claimed.claim()).unwrap(),
            }
            let before = claimed.listing();
            let error = claimed.open().await.unwrap_err();
            assert_eq!(error.kind, StoreErrorKind::Unclaimed);
            let text = error.to_string();
            let named = format!("{} is {flaw}; its identity is ", claimed.claim().display());
            assert!(text.contains(&named), "{text}");
            assert_eq!(claimed.listing(), before);
            claimed.repair(&error);
            assert_eq!(std::fs::read(claimed.claim()).unwrap(), intact);
            let store = claimed.open().await.unwrap();
            assert_eq!(store.metadata_gap(), None);
            let recovered = recover(&store).await;
            assert_eq!(recovered.shuffles[0].incomplete, None);
            assert_eq!(recovered.records[&claimed.key], [&b"registered"[..]]);
            assert_eq!(read_all(&store, &claimed.key, 1).await.unwrap(), (0..6).collect::<Vec<_>>());
            close(store).await;
        }
    }
}

/// The list is damaged too. The copy of the log beside it begins with the same epoch.
#[tokio::test]
async fn directory_without_claim_is_identified_by_list_or_log() {
    let claimed = Claimed::new(2).await;
    let intact = std::fs::read(claimed.claim()).unwrap();
    std::fs::remove_file(claimed.claim()).unwrap();
    let metadata = claimed.path(1).join(METADATA);
    std::fs::write(metadata.join("members"), "damaged").unwrap();
    let error = claimed.open().await.unwrap_err();
    claimed.repair(&error);
    assert_eq!(std::fs::read(claimed.claim()).unwrap(), intact);
    std::fs::remove_file(claimed.claim()).unwrap();
    std::fs::remove_dir_all(&metadata).unwrap();
    let before = claimed.listing();
    let error = claimed.open().await.unwrap_err();
    assert_eq!(error.kind, StoreErrorKind::Unclaimed);
    let text = error.to_string();
    assert!(text.contains("the identity of the directory is unknown; restore the claim"), "{text}");
    assert_eq!(claimed.listing(), before);
}
