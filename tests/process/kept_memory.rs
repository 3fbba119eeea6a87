//! `memory_store.backing`: blocks in memory survive the process, however it ends. A start that
//! would discard them is refused, and damaged blocks are reported lost.

use std::io::{IoSliceMut, Write as _};
use std::mem::MaybeUninit;
use std::os::fd::{AsRawFd as _, OwnedFd};
use std::os::unix::net::UnixDatagram;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use rand::RngExt as _;
use rustix::net::{RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, recvmsg};
use tokio::task::block_in_place;
use tokio::time::Instant;

use uniffle_client::block::IdLayout;
use uniffle_client::grpc::ReadOptions;
use uniffle_client::send::SendForm;
use uniffle_testkit::block_generator::BlockGenerator;
use uniffle_testkit::checker::{Checker, RoundEnd, run_of};
use uniffle_testkit::clients::client_of;
use uniffle_testkit::say;
use uniffle_testkit::tools::{available, find, may_mount, weaker};
use uniffle_testkit::worker::{Setup, WorkerProcess};
use uniffle_wire::types::{PartitionId, TaskAttemptId};

use crate::writes::{Written, key};

const ROUNDS: u64 = 20;

/// Returns a temporary tmpfs directory and the lines of `[memory_store]` that name it.
pub(crate) fn directory() -> (tempfile::TempDir, &'static str) {
    let directory = tempfile::Builder::new().prefix("uniffle-worker-test-").tempdir_in("/dev/shm");
    let directory = directory.expect("cannot create a directory on a tmpfs");
    let lines = format!("backing = {:?}\n", directory.path().display().to_string());
    (directory, Box::leak(lines.into_boxed_str()))
}

pub(crate) const MEMFD: &str = "backing = \"memfd\"\n";

/// Settings that keep every batch in memory.
pub(crate) const NEVER_FLUSHED: &str =
    "[hybrid_store]\nmemory_spill_high_watermark = 0.99\nmemory_spill_low_watermark = 0.98\n";

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn acknowledged_blocks_are_readable_after_kill() {
    let (rounds, mut random) = run_of(ROUNDS);
    let (directory, memory) = directory();
    let setup = Setup { name: "kept", capacity: "24MiB", disks: 2, memory, ..Setup::default() };
    let mut worker = block_in_place(|| WorkerProcess::start(&setup));
    let mut checker = Checker::with_persistent_memory();
    for round in 0..rounds {
        let end = [RoundEnd::Kill, RoundEnd::Kill, RoundEnd::Kill, RoundEnd::Stop, RoundEnd::Upgrade]
            [random.random_range(0..5)];
        checker.round(i32::try_from(round).unwrap(), end, &mut worker, &mut random).await;
    }
    let client = client_of(&worker).await;
    client.unregister_app("checker").await.unwrap();
    worker.assert_clean();
    block_in_place(|| worker.stop());
    assert_eq!(
        std::fs::read_dir(directory.path()).unwrap().count(),
        0,
        "an empty memory file must be deleted"
    );
}

/// Ends a worker that has all of its blocks in memory, and reads them from the next process.
async fn survives(setup: Setup, end: impl FnOnce(&mut WorkerProcess), line: &str) {
    let setup = Setup { tables: NEVER_FLUSHED, ..setup };
    let mut worker = block_in_place(|| WorkerProcess::start(&setup));
    let client = client_of(&worker).await;
    let mut written = Written::register(&client, key("app", 0), 50).await;
    for task in 0..20 {
        written.task(&client, task, 14 << 10).await.unwrap();
    }
    block_in_place(|| end(&mut worker));
    let client = client_of(&worker).await;
    written.assert_readable(&client).await;
    let log = worker.log();
    assert!(log.contains(line), "the log lacks {line}: {log}");
    let in_memory = worker.metrics().total("total_in_memory_block_count");
    assert_eq!(in_memory, Some(1000.0), "blocks were flushed");
    written.task(&client, 100, 14 << 10).await.expect("the worker does not continue");
    written.assert_readable(&client).await;
    client.unregister_app("app").await.unwrap();
    worker.assert_clean();
    block_in_place(|| worker.stop());
}

const RECOVERED: &str = "recovered blocks from memory";

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn memory_directory_survives_kill() {
    let (_directory, memory) = directory();
    let end = |worker: &mut WorkerProcess| {
        worker.kill();
        worker.start_again();
    };
    survives(Setup { name: "killed", memory, ..Setup::default() }, end, RECOVERED).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn upgrade_hands_over_memory_directory() {
    let (_directory, memory) = directory();
    let end = |worker: &mut WorkerProcess| {
        worker.begin_upgrade();
        worker.finish_upgrade();
    };
    let setup = Setup { name: "handed over", memory, ..Setup::default() };
    survives(setup, end, "rehearsal succeeded; handing over memory").await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn upgrade_hands_over_memfd() {
    let end = |worker: &mut WorkerProcess| {
        worker.begin_upgrade();
        worker.finish_upgrade();
        worker.begin_upgrade();
        worker.finish_upgrade();
    };
    survives(Setup { name: "memfd", memory: MEMFD, ..Setup::default() }, end, RECOVERED).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn memory_is_recovered_into_larger_capacity() {
    let end = |worker: &mut WorkerProcess| {
        let config = worker.config();
        worker.write_config(&config.replace("256M", "300M"));
        worker.begin_upgrade();
        worker.finish_upgrade();
    };
    let line = "rehearsal succeeded; handing over memory";
    survives(Setup { name: "grown memfd", memory: MEMFD, ..Setup::default() }, end, line).await;
    let (_directory, memory) = directory();
    survives(Setup { name: "grown", memory, ..Setup::default() }, end, line).await;
    let (_directory, memory) = directory();
    let end = |worker: &mut WorkerProcess| {
        worker.kill();
        let config = worker.config();
        worker.start_again_with(&config.replace("256M", "300M"));
    };
    survives(Setup { name: "grown start", memory, ..Setup::default() }, end, RECOVERED).await;
}

/// A service manager's descriptor store, like systemd's: it keeps the descriptors that it receives.
/// A worker with such a manager uses it by default.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn service_manager_stores_memfd_of_killed_worker() {
    let directory = tempfile::tempdir().unwrap();
    let (socket, kept) = (directory.path().join("notify"), directory.path().join("kept"));
    let manager = UnixDatagram::bind(&socket).unwrap();
    manager.set_read_timeout(Some(Duration::from_secs(30))).unwrap();
    let setup = Setup {
        name: "stored",
        wrapper: passing_on(&kept),
        env: vec![("NOTIFY_SOCKET", socket.display().to_string()), ("FDSTORE", "4096".to_owned())],
        ..Setup::default()
    };
    let mut store = None;
    let end = |worker: &mut WorkerProcess| {
        let memory = store.insert(stored_until_ready(&manager).0);
        let path = format!("/proc/{}/fd/{}", std::process::id(), memory.as_raw_fd());
        std::fs::write(&kept, path).unwrap();
        worker.kill();
        worker.start_again();
    };
    survives(setup, end, RECOVERED).await;
}

/// A start with another backing must not discard a memfd that the manager passes on.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn start_refuses_to_discard_stored_memfd() {
    let directory = tempfile::tempdir().unwrap();
    let (socket, kept) = (directory.path().join("notify"), directory.path().join("kept"));
    let manager = UnixDatagram::bind(&socket).unwrap();
    manager.set_read_timeout(Some(Duration::from_secs(30))).unwrap();
    let setup = Setup {
        name: "stored, not used",
        wrapper: passing_on(&kept),
        env: vec![("NOTIFY_SOCKET", socket.display().to_string())],
        memory: MEMFD,
        tables: NEVER_FLUSHED,
        ..Setup::default()
    };
    let mut worker = block_in_place(|| WorkerProcess::start(&setup));
    let client = client_of(&worker).await;
    let mut written = Written::register(&client, key("app", 0), 5).await;
    written.task(&client, 0, 14 << 10).await.unwrap();
    let config = worker.config();
    let stored = block_in_place(|| {
        let memory = stored_until_ready(&manager).0;
        let path = format!("/proc/{}/fd/{}", std::process::id(), memory.as_raw_fd());
        std::fs::write(&kept, path).unwrap();
        worker.kill();
        worker.launch_again_with(&config.replace(MEMFD, "backing = \"private\"\n"));
        assert_eq!(worker.wait_end().code(), Some(1));
        let line = "an earlier process left 5 blocks in a memfd in the service manager's descriptor store";
        assert!(worker.log().contains(line), "{}", worker.log());
        worker.start_again_with(&config);
        memory
    });
    written.assert_readable(&client_of(&worker).await).await;
    block_in_place(|| worker.stop());
    drop(stored);
}

/// Returns a command that starts a worker with the file named in `kept` as descriptor 3.
fn passing_on(kept: &Path) -> Vec<String> {
    let line = format!(
        "if [ -e {kept:?} ]; then exec 3<>\"$(cat {kept:?})\"; \
         export LISTEN_FDS=1 LISTEN_FDNAMES=memory LISTEN_PID=$$; fi; exec \"$@\""
    );
    ["bash", "-c", &line, "bash"].map(str::to_owned).to_vec()
}

/// Memory is stored in the manager before the first process serves. An upgrade that hands it
/// over does not remove it, so a successor may die at any moment. An upgrade to another backing
/// removes it.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn successor_keeps_memfd_in_service_manager() {
    let directory = tempfile::tempdir().unwrap();
    let socket = directory.path().join("notify");
    let manager = UnixDatagram::bind(&socket).unwrap();
    manager.set_read_timeout(Some(Duration::from_secs(30))).unwrap();
    let env = vec![("NOTIFY_SOCKET", socket.display().to_string())];
    let mut worker =
        WorkerProcess::start(&Setup { name: "stays stored", memory: MEMFD, env, ..Setup::default() });
    let inode = |memory: &OwnedFd| rustix::fs::fstat(memory).unwrap().st_ino;
    let first = inode(&stored_until_ready(&manager).0);
    let config = worker.config();
    for (backing, is_same) in [(MEMFD, true), (MEMFD, true), ("", false)] {
        worker.write_config(&config.replace(MEMFD, backing));
        worker.begin_upgrade();
        worker.finish_upgrade();
        let (memory, messages) = messages_until_ready(&manager);
        let is_removed = messages.iter().any(|text| text.contains("FDSTOREREMOVE=1\nFDNAME=memory"));
        assert_eq!(is_removed, !is_same, "{messages:?}");
        assert_eq!(memory.as_ref().map(inode), is_same.then_some(first));
    }
    worker.stop();
}

/// Waits until a worker is ready. Returns the last descriptor it stored as `memory`, and all its
/// notifications.
fn stored_until_ready(manager: &UnixDatagram) -> (OwnedFd, Vec<String>) {
    let (memory, messages) = messages_until_ready(manager);
    (memory.expect("the memory was not stored before the worker was ready"), messages)
}

fn messages_until_ready(manager: &UnixDatagram) -> (Option<OwnedFd>, Vec<String>) {
    let (mut memory, mut messages) = (None, Vec::new());
    loop {
        let mut message = [0; 1000];
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(4))];
        let mut passed = RecvAncillaryBuffer::new(&mut space);
        let into = &mut [IoSliceMut::new(&mut message)];
        let received = recvmsg(manager, into, &mut passed, RecvFlags::CMSG_CLOEXEC).unwrap();
        let text = String::from_utf8_lossy(&message[..received.bytes]).into_owned();
        for rights in passed.drain() {
            if let (RecvAncillaryMessage::ScmRights(mut descriptors), true) =
                (rights, text.contains("FDSTORE=1\nFDNAME=memory"))
            {
                memory = descriptors.next();
            }
        }
        let is_ready = text.contains("READY=1");
        messages.push(text);
        if is_ready {
            return (memory, messages);
        }
    }
}

/// An upgrade to another backing or a smaller capacity flushes first. One that cannot succeed is
/// refused before anything stops.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn upgrade_to_other_memory_flushes() {
    let (_directory, memory) = directory();
    let setup = Setup { name: "changed", memory, tables: NEVER_FLUSHED, ..Setup::default() };
    let mut worker = block_in_place(|| WorkerProcess::start(&setup));
    let client = client_of(&worker).await;
    let mut written = Written::register(&client, key("app", 0), 5).await;
    let config = worker.config();
    let other_sizes = config.replace("256M", "128M");
    let private = config.replace(memory, "");
    block_in_place(|| {
        worker.write_config(&config.replace(memory, "backing = \"/proc\"\n"));
        worker.signal(rustix::process::Signal::USR2);
        worker.wait_log("not on a tmpfs");
    });
    for (task, config) in [other_sizes, private, config].into_iter().enumerate() {
        written.task(&client, i64::try_from(task).unwrap(), 14 << 10).await.unwrap();
        block_in_place(|| {
            worker.write_config(&config);
            worker.begin_upgrade();
            worker.finish_upgrade();
        });
        let client = client_of(&worker).await;
        written.assert_readable(&client).await;
    }
    assert!(!worker.log().contains("handing over memory"));
    block_in_place(|| worker.stop());
}

/// A start with another backing is refused while a killed process's memory holds blocks. With the
/// former backing the blocks are served; without blocks any backing is accepted.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn start_with_other_memory_is_refused_after_kill() {
    let ((first, memory), (_second, other)) = (directory(), directory());
    let setup = Setup { name: "other backing", memory, tables: NEVER_FLUSHED, ..Setup::default() };
    let mut worker = block_in_place(|| WorkerProcess::start(&setup));
    let client = client_of(&worker).await;
    let mut written = Written::register(&client, key("app", 0), 5).await;
    written.task(&client, 0, 14 << 10).await.unwrap();
    let config = worker.config();
    block_in_place(|| {
        worker.kill();
        for changed in ["", MEMFD, other] {
            worker.launch_again_with(&config.replace(memory, changed));
            assert_eq!(worker.wait_end().code(), Some(1));
        }
        let line = format!("an earlier process left 5 blocks in {}", first.path().display());
        assert_eq!(worker.log().matches(&line).count(), 3, "{}", worker.log());
        worker.start_again_with(&config);
    });
    let client = client_of(&worker).await;
    written.assert_readable(&client).await;
    client.unregister_app("app").await.unwrap();
    worker.assert_clean();
    // The memory holds no block now.
    block_in_place(|| {
        worker.kill();
        worker.start_again_with(&config.replace(memory, ""));
    });
    assert_eq!(std::fs::read_dir(first.path()).unwrap().count(), 0, "an empty memory file must be deleted");
    block_in_place(|| worker.stop());
}

/// A mounted tmpfs, unmounted on drop.
pub(crate) struct SmallTmpfs(PathBuf);

impl SmallTmpfs {
    pub(crate) fn mount(at: &Path, size: &str) -> Option<Self> {
        let tried = "a tmpfs that is full";
        if !available(tried, &["mount", "umount"]) {
            return None;
        }
        let options = format!("size={size}");
        let made = run("mount", &["-t", "tmpfs", "-o", &options, "tmpfs"], at);
        if !made {
            weaker(tried, "nothing can be mounted", may_mount());
        }
        made.then(|| Self(at.to_owned()))
    }

    /// Returns the mount point.
    pub(crate) fn path(&self) -> &Path {
        &self.0
    }

    /// Fills the file system. Returns the file that takes the space.
    pub(crate) fn fill(&self) -> PathBuf {
        let path = self.0.join("others");
        let mut file = std::fs::File::create(&path).unwrap();
        while file.write_all(&[7; 64 << 10]).is_ok() {}
        while file.write_all(&[7; 1 << 10]).is_ok() {}
        path
    }
}

impl Drop for SmallTmpfs {
    fn drop(&mut self) {
        run("umount", &["-l"], &self.0);
    }
}

fn run(program: &str, options: &[&str], path: &Path) -> bool {
    let program = find(program).unwrap_or_else(|| program.into());
    Command::new(program).args(options).arg(path).status().is_ok_and(|status| status.success())
}

/// A page that the tmpfs cannot provide is refused; the worker continues.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn full_tmpfs_reduces_memory_until_freed() {
    let directory = tempfile::Builder::new().prefix("uniffle-worker-test-").tempdir().unwrap();
    let Some(tmpfs) = SmallTmpfs::mount(directory.path(), "150m") else { return };
    let memory: &'static str = Box::leak(format!("backing = {:?}\n", tmpfs.0.display().to_string()).into());
    let setup = Setup { name: "full", capacity: "96MiB", disks: 2, memory, ..Setup::default() };
    let mut worker = block_in_place(|| WorkerProcess::start(&setup));
    let client = client_of(&worker).await;
    let mut written = Written::register(&client, key("app", 0), 5).await;
    written.task(&client, 0, 1 << 20).await.unwrap();
    let others = tmpfs.fill();
    for task in 1..30 {
        written.task(&client, task, 1 << 20).await.expect("the disks did not take the other blocks");
    }
    assert!(worker.is_running());
    let log = worker.log();
    assert!(log.contains("memory_store.backing is full"), "{log}");
    assert!(worker.metrics().total("memory_withheld_bytes") > Some(0.0));
    written.assert_readable(&client).await;
    std::fs::remove_file(others).unwrap();
    block_in_place(|| worker.wait_log("memory_store.backing has space again"));
    written.task(&client, 30, 1 << 20).await.unwrap();
    written.assert_readable(&client).await;
    client.unregister_app("app").await.unwrap();
    worker.assert_clean();
    block_in_place(|| worker.stop());
}

/// The next process serves a killed worker's memory, which it verifies in the background. Run with
/// `RESTART_GIGABYTES=10 RESTART_WORKER=target/release/uniffle-worker` and `--nocapture` to assert,
/// with an optimized build, that it does not wait for the verification.
#[tokio::test(flavor = "multi_thread")]
async fn restart_serves_memory_of_killed_worker() {
    const BLOCK_BYTES: u32 = 14 << 10;
    const PARTITIONS: i32 = 500;
    const START_MS_MAX: u128 = 1_000;
    let gigabytes = std::env::var("RESTART_GIGABYTES").ok().and_then(|text| text.parse().ok()).unwrap_or(0.1);
    let (_directory, memory) = directory();
    let capacity: &'static str = Box::leak(format!("{:.0}M", 500.0 + gigabytes * 1200.0).into());
    let mut worker = block_in_place(|| {
        WorkerProcess::start(&Setup {
            name: "served at once",
            capacity,
            memory,
            tables: NEVER_FLUSHED,
            binary: std::env::var_os("RESTART_WORKER").map(PathBuf::from),
            ..Setup::default()
        })
    });
    let (client, key) = (client_of(&worker).await, key("app", 0));
    client.register(&key, &[(0, PARTITIONS - 1)]).await.unwrap();
    let generator = BlockGenerator::new(7, IdLayout::SPARK);
    #[expect(clippy::cast_possible_truncation, reason = "a number of tasks")]
    let tasks = (gigabytes * 1e9 / f64::from(BLOCK_BYTES) / f64::from(PARTITIONS)) as i64;
    let block = |at, task| generator.block(PartitionId(at), TaskAttemptId(task), 0, BLOCK_BYTES);
    for task in 0..tasks {
        let batch: Vec<_> = (0..PARTITIONS).map(|at| (PartitionId(at), vec![block(at, task)])).collect();
        client.push(&key, SendForm::Classic, &batch).await.unwrap();
        let ids: Vec<_> = batch.iter().map(|(at, blocks)| (*at, vec![blocks[0].meta.block_id])).collect();
        client.report(&key, TaskAttemptId(task), &ids).await.unwrap();
    }
    block_in_place(|| worker.kill());
    let began = Instant::now();
    block_in_place(|| worker.start_again());
    let ready = began.elapsed();
    let client = client_of(&worker).await;
    let of = PartitionId(PARTITIONS / 2);
    let read = client.read_partition(&key, of, &ReadOptions::default()).await.unwrap();
    let served = began.elapsed();
    let blocks = tasks * i64::from(PARTITIONS);
    say(&format!(
        "{blocks} blocks of {BLOCK_BYTES} bytes: ready after {ready:?}, a partition read after {served:?}"
    ));
    if std::env::var_os("RESTART_WORKER").is_some() {
        assert!(served.as_millis() <= START_MS_MAX, "{served:?}");
    }
    assert_eq!(i64::try_from(read.blocks.len()), Ok(tasks));
    let task = tasks / 2;
    assert!(read.blocks.values().any(|data| *data == block(of.0, task).data));
    assert_eq!(
        worker.metrics().total("total_in_memory_block_count"),
        i32::try_from(blocks).ok().map(f64::from),
        "blocks were flushed"
    );
    block_in_place(|| worker.wait_log("scanned the memory of an earlier process"));
    client.unregister_app("app").await.unwrap();
    worker.assert_clean();
    block_in_place(|| worker.stop());
}

/// A start refuses empty directories while memory holds blocks. Once the disks are mounted again,
/// all blocks are served.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn empty_directories_are_refused_while_memory_has_blocks() {
    let (_directory, memory) = directory();
    let setup = Setup {
        name: "unmounted",
        capacity: "24MiB",
        disks: 2,
        memory,
        tables: NEVER_FLUSHED,
        ..Setup::default()
    };
    let mut worker = block_in_place(|| WorkerProcess::start(&setup));
    let client = client_of(&worker).await;
    let mut written = Written::register(&client, key("app", 0), 2).await;
    written.task(&client, 0, 14 << 10).await.unwrap();
    block_in_place(|| worker.kill());
    let disks = worker.data_paths().to_vec();
    let away = |path: &Path| path.with_extension("away");
    for path in &disks {
        std::fs::rename(path, away(path)).expect("cannot move the directory away");
        std::fs::create_dir(path).expect("cannot create a directory in its place");
    }
    let config = worker.config();
    worker.launch_again_with(&config);
    assert_eq!(block_in_place(|| worker.wait_end()).code(), Some(1), "{}", worker.log());
    let log = worker.log();
    for expected in
        ["memory_store.backing has 1 shuffles of this worker", "localfile_store.require_mounted = false"]
    {
        assert!(log.contains(expected), "the log lacks {expected}: {log}");
    }
    for path in &disks {
        assert_eq!(
            std::fs::read_dir(path).expect("cannot list the directory").count(),
            0,
            "a claim would make the directory look used"
        );
        std::fs::remove_dir(path).unwrap();
        std::fs::rename(away(path), path).expect("cannot move the directory back");
    }
    block_in_place(|| worker.start_again());
    let client = client_of(&worker).await;
    written.assert_readable(&client).await;
    client.unregister_app("app").await.unwrap();
    worker.assert_clean();
    block_in_place(|| worker.stop());
}

/// A damaged block in a killed worker's memory is reported as lost; all others are served.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn damaged_block_in_memory_is_reported_lost() {
    let (directory, memory) = directory();
    let setup =
        Setup { name: "damaged", capacity: "24MiB", memory, tables: NEVER_FLUSHED, ..Setup::default() };
    let mut worker = block_in_place(|| WorkerProcess::start(&setup));
    let client = client_of(&worker).await;
    let mut written = Written::register(&client, key("app", 0), 2).await;
    written.task(&client, 0, 14 << 10).await.unwrap();
    block_in_place(|| worker.kill());
    let victim = written.blocks.remove(&0).expect("partition 0 has blocks");
    flip_a_bit_of(&directory.path().join("uniffle-worker.memory"), &victim[0].data);
    block_in_place(|| worker.start_again());
    let client = client_of(&worker).await;
    written.assert_readable(&client).await;
    block_in_place(|| worker.wait_log("recovered blocks in memory are corrupt and lost"));
    let options = ReadOptions::default();
    let refused = async {
        loop {
            match client.read_partition(&key("app", 0), PartitionId(0), &options).await {
                Ok(read) => {
                    panic!("read {} blocks of a partition whose only block is lost", read.blocks.len())
                }
                // All tiers are searched for it meanwhile.
                Err(error) if format!("{error:?}").contains("NoBuffer") => {}
                Err(error) => return format!("{error:?}"),
            }
        }
    };
    let refused = tokio::time::timeout(Duration::from_secs(60), refused)
        .await
        .expect("the lost block was not reported in time");
    let line = "recovered blocks in memory are corrupt";
    assert!(refused.contains(line), "{refused}");
    client.unregister_app("app").await.unwrap();
    worker.assert_clean();
    block_in_place(|| worker.stop());
}

/// Flips a bit of the first occurrence of `bytes` in the file.
fn flip_a_bit_of(path: &Path, bytes: &[u8]) {
    let content = std::fs::read(path).expect("cannot read the memory file");
    let at =
        content.windows(64).position(|window| window == &bytes[..64]).expect("the block is not in the file");
    let file = std::fs::OpenOptions::new().write(true).open(path).unwrap();
    let written = rustix::io::pwrite(&file, &[bytes[100] ^ 1], at as u64 + 100);
    assert_eq!(written, Ok(1));
}
