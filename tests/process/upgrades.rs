//! SIGUSR2 when the successor cannot take over, and the effect of an upgrade on callers.

use std::collections::BTreeSet;
use std::net::TcpListener;
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::Duration;

use parking_lot::Mutex;
use tokio::task::{JoinSet, block_in_place};
use tokio::time::Instant;
use uniffle_client::block::{Block, IdLayout};
use uniffle_client::grpc::{ClientError, ShuffleClient};
use uniffle_client::send::SendForm;
use uniffle_testkit::block_generator::BlockGenerator;
use uniffle_testkit::on_disk::CLAIM;
use uniffle_testkit::tools::{available, find, may_mount, weaker};
use uniffle_testkit::worker::{Setup, WorkerProcess};
use uniffle_testkit::{eventually, say, wait_until};
use uniffle_wire::types::{PartitionId, ShuffleKey, TaskAttemptId};
use uniffle_worker::proto::StatusCode;

use crate::writes::{Written, client_of, key, local, long_backoff};

const COUNT_DEADLINE: Duration = Duration::from_secs(10);
/// A call that is refused for this long counts as failed.
const CALL_DEADLINE: Duration = Duration::from_secs(60);

/// A worker that refuses successive upgrades while a job runs.
struct RefusedUpgrades {
    worker: WorkerProcess,
    config: String,
    client: ShuffleClient,
    written: Written,
    refused: i32,
}

impl RefusedUpgrades {
    async fn start(setup: Setup) -> Self {
        let worker = WorkerProcess::start(&setup);
        let (client, config) = (client_of(&worker).await, worker.config());
        let written = Written::register(&client, key("app", 0), 5).await;
        Self { worker, config, client, written, refused: 0 }
    }

    /// Requests an upgrade to `config`. The rehearsal must refuse it with `complaint`, while calls
    /// continue on old and new connections.
    async fn refuses(&mut self, config: &str, complaint: &str) {
        let pid = self.worker.pid();
        self.worker.write_config(config);
        self.worker.signal(rustix::process::Signal::USR2);
        block_in_place(|| self.worker.wait_log(complaint));
        self.refused += 1;
        let refused = self.refused;
        block_in_place(|| {
            wait_until("the refusal is counted", COUNT_DEADLINE, || {
                let counted = self.worker.metrics().total_of("upgrades_refused_total", "by=\"rehearsal\"");
                if counted == Some(f64::from(refused)) { Ok(()) } else { Err(format!("{counted:?}")) }
            });
        });
        assert!(self.worker.is_running() && self.worker.pid() == pid);
        assert!(!self.worker.log().contains("upgraded; no connection was accepted"));
        self.written.task(&self.client, refused.into(), 1000).await.expect("the worker does not continue");
        let client = client_of(&self.worker).await;
        self.written.assert_readable(&client).await;
        self.worker.write_config(&self.config);
    }

    /// Asserts that a valid upgrade succeeds afterwards.
    async fn finish_with_an_upgrade(mut self) {
        block_in_place(|| {
            self.worker.begin_upgrade();
            self.worker.finish_upgrade();
        });
        let client = client_of(&self.worker).await;
        self.written.assert_readable(&client).await;
        block_in_place(|| self.worker.stop());
    }
}

fn setup(name: &'static str) -> Setup {
    Setup { name, capacity: "64M", disks: 2, ..Setup::default() }
}

#[tokio::test(flavor = "multi_thread")]
async fn upgrade_with_unusable_directory_is_refused() {
    let mut refusing = RefusedUpgrades::start(setup("new-directory")).await;
    let theirs = refusing.worker.dir().join("theirs");
    std::fs::create_dir(&theirs).unwrap();
    std::fs::write(theirs.join("file"), "not ours").unwrap();
    let with =
        |path: &Path| refusing.config.replacen("data_paths = [", &format!("data_paths = [{path:?}, "), 1);
    let (not_empty, not_a_directory, fresh) =
        (with(&theirs), with(&theirs.join("file")), with(&refusing.worker.dir().join("fresh")));
    refusing.refuses(&not_empty, "content of another program").await;
    refusing.refuses(&not_a_directory, "theirs/file: Not a directory").await;
    assert_eq!(std::fs::read(theirs.join("file")).unwrap(), b"not ours");
    refusing.worker.write_config(&fresh);
    refusing.finish_with_an_upgrade().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn upgrade_with_damaged_claim_file_is_refused() {
    let mut refusing = RefusedUpgrades::start(setup("damaged-claim")).await;
    let claim = refusing.worker.data_paths()[1].join(CLAIM);
    let intact = std::fs::read(&claim).unwrap();
    let config = refusing.config.clone();
    for (damaged, flaw) in [(&b""[..], "empty"), (&intact[..50], "damaged")] {
        std::fs::write(&claim, damaged).unwrap();
        let reason = format!("{} is {flaw}; its identity is ", claim.display());
        refusing.refuses(&config, &reason).await;
    }
    std::fs::write(&claim, &intact).unwrap();
    refusing.finish_with_an_upgrade().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn upgrade_is_refused_while_a_directory_is_detached() {
    let tables = "disk_healthy_check_interval_sec = 1\n";
    let mut refusing = RefusedUpgrades::start(Setup { tables, ..setup("detached") }).await;
    refusing.written.task(&refusing.client, 0, 1000).await.unwrap();
    let path = refusing.worker.data_paths()[1].clone();
    let away = refusing.worker.dir().join("away");
    let config = refusing.config.clone();
    let reason = format!("{}: not the directory of the running worker", path.display());
    // Refused before and after the worker has noticed it.
    std::fs::rename(&path, &away).unwrap();
    refusing.refuses(&config, &reason).await;
    block_in_place(|| refusing.worker.wait_log("data directory was unmounted, moved or replaced"));
    refusing.refuses(&config, &reason).await;
    std::fs::create_dir(&path).unwrap();
    refusing.refuses(&config, &reason).await;
    assert_eq!(std::fs::read_dir(&path).unwrap().count(), 0, "files were written to the refused directory");
    std::fs::remove_dir(&path).unwrap();
    std::fs::write(&path, "a file").unwrap();
    refusing.refuses(&config, &reason).await;
    std::fs::remove_file(&path).unwrap();
    std::fs::rename(&away, &path).unwrap();
    block_in_place(|| refusing.worker.wait_log("disk responds again"));
    refusing.finish_with_an_upgrade().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn upgrade_with_port_in_use_is_refused() {
    let mut refusing = RefusedUpgrades::start(setup("new-port")).await;
    let taken = TcpListener::bind("127.0.0.1:0").unwrap();
    let port = taken.local_addr().unwrap().port();
    let config = format!("{}[admin]\nport = {port}\n", refusing.config);
    refusing.refuses(&config, &format!("cannot listen on admin.port = 127.0.0.1:{port}")).await;
    drop(taken);
    refusing.worker.write_config(&config);
    refusing.finish_with_an_upgrade().await;
}

#[cfg(feature = "hdfs")]
#[tokio::test(flavor = "multi_thread")]
async fn upgrade_with_failing_hdfs_or_login_is_refused() {
    let mut refusing = RefusedUpgrades::start(setup("precheck")).await;
    let hdfs = refusing.config.replace("\"MEMORY_LOCALFILE\"", "\"MEMORY_LOCALFILE_HDFS\"");
    // Port 1 has no NameNode.
    let config = format!(
        "{hdfs}[hdfs_store]\nallowed_paths = [\"hdfs://127.0.0.1:1/uniffle\"]\nprecheck_enable = true\n"
    );
    refusing.refuses(&config, "hdfs_store.precheck_enable: cannot use hdfs://127.0.0.1:1/uniffle").await;
    let config = format!(
        "{hdfs}[hdfs_store.kerberos_security_config]\nkeytab_path = \"/nonexistent/keytab\"\nprincipal = \"a@B\"\n"
    );
    refusing.refuses(&config, "Kerberos login for HDFS").await;
    refusing.finish_with_an_upgrade().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn upgrade_with_unusable_configuration_is_refused() {
    let mut refusing = RefusedUpgrades::start(setup("bad-config")).await;
    refusing.refuses("grpc_port = [", "--check: exit status: 2").await;
    let config = refusing.config.replace("[localfile_store]\n", "[localfile_store]\nrecovery = false\n");
    refusing.refuses(&config, "localfile_store.recovery = false would delete the data of running jobs").await;
    let config = format!(
        "{}[tls]\ncert_file = \"/nonexistent/cert\"\nkey_file = \"/nonexistent/key\"\n",
        refusing.config
    );
    refusing.refuses(&config, "tls.cert_file").await;
    refusing.finish_with_an_upgrade().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn upgrade_with_unmappable_memory_is_refused() {
    // 16 GiB of address space.
    let wrapper = ["bash", "-c", "ulimit -v 16777216; exec \"$@\"", "bash"].map(str::to_owned).to_vec();
    let mut refusing = RefusedUpgrades::start(Setup { wrapper, ..setup("no-memory") }).await;
    let config = refusing.config.replace("\"64M\"", "\"20G\"");
    refusing.refuses(&config, "capacity of 18.6 GiB, RLIMIT_AS (ulimit -v, LimitAS=) is 16.0 GiB").await;
    refusing.finish_with_an_upgrade().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn upgrade_with_unusable_binary_is_refused() {
    let dir = tempfile::tempdir().unwrap();
    let binary = dir.path().join("worker");
    let install = |mode| {
        let temporary = dir.path().join("new");
        std::fs::copy(env!("CARGO_BIN_EXE_uniffle-worker"), &temporary).unwrap();
        std::fs::set_permissions(&temporary, std::fs::Permissions::from_mode(mode)).unwrap();
        std::fs::rename(temporary, &binary).unwrap();
    };
    install(0o755);
    let mut refusing = RefusedUpgrades::start(Setup { binary: Some(binary.clone()), ..setup("mode") }).await;
    let config = refusing.config.clone();
    install(0o644);
    refusing.refuses(&config, ": Permission denied").await;
    std::fs::remove_file(&binary).unwrap();
    refusing.refuses(&config, ": No such file").await;
    install(0o755);
    refusing.finish_with_an_upgrade().await;
}

/// A mounted file system in a file. While frozen, a thread that writes to it hangs in the kernel.
/// Unmounted on drop.
pub(crate) struct FreezableDisk(pub(crate) PathBuf);

impl FreezableDisk {
    pub(crate) fn mount(dir: &Path) -> Option<Self> {
        if !available("a disk that hangs in the kernel", &["mkfs.ext4", "fsfreeze", "mount"]) {
            return None;
        }
        let (image, at) = (dir.join("image"), dir.join("mounted"));
        std::fs::File::create(&image).and_then(|file| file.set_len(64 << 20)).unwrap();
        std::fs::create_dir(&at).unwrap();
        let made = run("mkfs.ext4", &["-q"], &image) && run_with("mount", &["-o", "loop"], &[&image, &at]);
        if !made {
            weaker("a disk that hangs in the kernel", "nothing can be mounted", may_mount());
        }
        made.then_some(Self(at))
    }

    pub(crate) fn freeze(&self) -> Frozen<'_> {
        assert!(run("fsfreeze", &["-f"], &self.0), "fsfreeze failed");
        Frozen(self)
    }
}

/// Thaws on drop. Drop it before waiting for the end of a process that hangs.
pub(crate) struct Frozen<'a>(&'a FreezableDisk);

impl Drop for Frozen<'_> {
    fn drop(&mut self) {
        run("fsfreeze", &["-u"], &self.0.0);
    }
}

impl Drop for FreezableDisk {
    fn drop(&mut self) {
        run("umount", &["-l"], &self.0);
    }
}

fn run(program: &str, options: &[&str], path: &Path) -> bool {
    run_with(program, options, &[path])
}

fn run_with(program: &str, options: &[&str], paths: &[&Path]) -> bool {
    let program = find(program).unwrap_or_else(|| program.into());
    let status = Command::new(program).args(options).args(paths).stderr(Stdio::null()).status();
    status.is_ok_and(|status| status.success())
}

#[tokio::test(flavor = "multi_thread")]
async fn upgrade_is_refused_until_hung_disk_answers() {
    let dir = tempfile::Builder::new().prefix("uniffle-worker-test-").tempdir().unwrap();
    let Some(disk) = FreezableDisk::mount(dir.path()) else { return };
    let paths = vec![disk.0.join("data"), dir.path().join("disk1")];
    let hung = paths[0].display().to_string();
    let tables = "disk_healthy_check_interval_sec = 1\n";
    let mut worker = WorkerProcess::start_in(&Setup { tables, ..setup("hangs") }, dir, paths);
    let (client, port, pid) = (client_of(&worker).await, worker.ready().grpc_port, worker.pid());
    let mut written = Written::register(&client, key("app", 0), 5).await;
    written.task(&client, 0, 1000).await.unwrap();
    let frozen = disk.freeze();
    // The metadata log has a copy on each disk.
    let mut more = Written::register(&client, key("app", 1), 5).await;
    block_in_place(|| worker.wait_log("disk failed; avoiding it"));
    let (calls, mut callers) = under_calls(&client, port, key("app", 2)).await;
    block_in_place(|| {
        worker.signal(rustix::process::Signal::USR2);
        worker.wait_log("upgrade refused");
    });
    let log = worker.log();
    let refusal =
        log.lines().find(|line| line.contains("upgrade refused")).expect("the refusal was not logged");
    let named = format!("data directory {hung} hangs");
    for part in [&named, "by=\"hang\"", "decommission the worker", "then restart it"] {
        assert!(refusal.contains(part), "{part}: {refusal}");
    }
    let before = calls.counts();
    eventually("calls are answered", || calls.check_progress(before)).await;
    calls.end(&mut callers, "an upgrade that a hung disk refuses").await;
    assert!(worker.is_running() && worker.pid() == pid);
    assert_eq!(worker.metrics().total_of("upgrades_refused_total", "by=\"hang\""), Some(1.0));
    more.task(&client, 0, 1000).await.expect("the worker does not continue");
    drop(frozen);
    block_in_place(|| {
        worker.wait_log("disk responds again");
        worker.begin_upgrade();
        worker.finish_upgrade();
    });
    let client = client_of(&worker).await;
    written.assert_readable(&client).await;
    more.assert_readable(&client).await;
    assert!(!worker.log().contains("acknowledged metadata may be incomplete"), "{}", worker.log());
    block_in_place(|| worker.stop());
}

/// Calls made during an upgrade.
#[derive(Debug, Default)]
struct Calls {
    stop: AtomicBool,
    /// Reports begun.
    reports: AtomicUsize,
    /// Result queries answered.
    asked: AtomicUsize,
    no_buffer: AtomicUsize,
    /// Calls on a closing connection that the server did not start.
    repeated: AtomicUsize,
    acknowledged: Mutex<BTreeSet<u64>>,
    failed: Mutex<Vec<String>>,
}

impl Calls {
    /// Makes one call on a new connection, and retries until it is answered.
    async fn call<T, F>(&self, port: u16, call: impl Fn(ShuffleClient) -> F) -> Option<T>
    where
        F: Future<Output = Result<T, ClientError>>,
    {
        let began = Instant::now();
        loop {
            if began.elapsed() > CALL_DEADLINE {
                let why = format!("only refusals within {CALL_DEADLINE:?}");
                return self.fail(&std::io::Error::other(why));
            }
            let client = ShuffleClient::connect(local(port)).await;
            let client = match client {
                Ok(client) => client.with_backoff(long_backoff()),
                Err(error) => return self.fail(&error),
            };
            match call(client).await {
                Ok(answer) => return Some(answer),
                Err(error) if error.status() == Some(StatusCode::NoBuffer) => {
                    self.no_buffer.fetch_add(1, Ordering::Relaxed);
                }
                Err(ClientError::Rpc { status, .. }) if is_unprocessed(&status) => {
                    self.repeated.fetch_add(1, Ordering::Relaxed);
                }
                Err(error) => return self.fail(&error),
            }
        }
    }

    fn fail<T>(&self, error: &dyn std::error::Error) -> Option<T> {
        let mut text = error.to_string();
        let mut cause = error.source();
        while let Some(error) = cause {
            text.push_str(&format!(": {error:?}"));
            cause = error.source();
        }
        self.failed.lock().push(text);
        None
    }

    /// Returns the numbers of reports begun and of result queries answered.
    fn counts(&self) -> (usize, usize) {
        (self.reports.load(Ordering::Relaxed), self.asked.load(Ordering::Relaxed))
    }

    /// Checks that the callers have begun 16 more reports and got 16 more results than `before`, or
    /// that a call has failed.
    fn check_progress(&self, before: (usize, usize)) -> Result<(), String> {
        let now = self.counts();
        let is_enough = now.0 >= before.0 + 16 && now.1 >= before.1 + 16;
        if is_enough || !self.failed.lock().is_empty() { Ok(()) } else { Err(format!("{now:?}")) }
    }

    /// Ends the callers and asserts that none has failed.
    async fn end(&self, callers: &mut JoinSet<()>, under: &str) {
        self.stop.store(true, Ordering::Relaxed);
        while let Some(ended) = callers.join_next().await {
            ended.expect("a reporter failed");
        }
        let (reports, asked) = self.counts();
        let of = |count: &AtomicUsize| count.load(Ordering::Relaxed);
        say(&format!(
            "{under} under {reports} reports and {asked} result queries, each on a connection of its own: none failed, {} \
             waited for NO_BUFFER, {} were not begun and repeated",
            of(&self.no_buffer),
            of(&self.repeated)
        ));
        let failed = self.failed.lock();
        assert!(failed.is_empty(), "{} calls failed: {:?}", failed.len(), failed.first());
    }

    async fn report(self: Arc<Self>, port: u16, key: ShuffleKey, blocks: Arc<Vec<Block>>) {
        while !self.stop.load(Ordering::Relaxed) {
            let at = self.reports.fetch_add(1, Ordering::Relaxed) % blocks.len();
            let id = blocks[at].meta.block_id;
            let ids = [(PartitionId(0), vec![id])];
            let task = TaskAttemptId(i64::try_from(at).unwrap());
            let (key, ids) = (&key, &ids);
            if self.call(port, |client| async move { client.report(key, task, ids).await }).await.is_some() {
                self.acknowledged.lock().insert(id.0.cast_unsigned());
            }
        }
    }

    async fn ask(self: Arc<Self>, port: u16, key: ShuffleKey) {
        while !self.stop.load(Ordering::Relaxed) {
            let before = self.acknowledged.lock().clone();
            let key = &key;
            let ask =
                |client: ShuffleClient| async move { client.results(key, &[PartitionId(0)], None).await };
            if let Some(found) = self.call(port, ask).await {
                let missing = before.iter().find(|id| !found.contains(**id));
                assert!(missing.is_none(), "the acknowledged report of {missing:?} is missing");
                self.asked.fetch_add(1, Ordering::Relaxed);
            }
        }
    }
}

/// HTTP/2 reports streams that a closing server has not processed (RFC 9113, 6.8). A call that was
/// not sent before its connection closed was not processed either. gRPC clients retry both
/// transparently.
pub(crate) fn is_unprocessed(status: &tonic::Status) -> bool {
    let text = format!("{status:?}");
    let signs = [
        "REFUSED_STREAM",
        "GoAway(b\"\", NO_ERROR, Remote)",
        "hyper::Error(Canceled, \"connection closed\")",
    ];
    signs.iter().any(|sign| text.contains(sign))
}

/// Starts four reporting and four querying callers, on a shuffle of 4,000 blocks.
async fn under_calls(client: &ShuffleClient, port: u16, key: ShuffleKey) -> (Arc<Calls>, JoinSet<()>) {
    client.register(&key, &[(0, 0)]).await.unwrap();
    let generator = BlockGenerator::new(7, IdLayout::SPARK);
    let blocks: Vec<_> =
        (0..4000).map(|task| generator.block(PartitionId(0), TaskAttemptId(task), 0, 100)).collect();
    client.push(&key, SendForm::Classic, &[(PartitionId(0), blocks.clone())]).await.unwrap();
    let (calls, blocks, mut callers) = (Arc::new(Calls::default()), Arc::new(blocks), JoinSet::new());
    for _ in 0..4 {
        callers.spawn(Arc::clone(&calls).report(port, key.clone(), Arc::clone(&blocks)));
        callers.spawn(Arc::clone(&calls).ask(port, key.clone()));
    }
    (calls, callers)
}

#[tokio::test(flavor = "multi_thread")]
async fn reports_and_queries_wait_during_upgrade_gap() {
    let mut worker = WorkerProcess::start(&setup("held"));
    let (client, key, port) = (client_of(&worker).await, key("app", 0), worker.ready().grpc_port);
    let (calls, mut callers) = under_calls(&client, port, key).await;
    for _ in 0..3 {
        let before = calls.counts();
        block_in_place(|| {
            worker.begin_upgrade();
            worker.finish_upgrade();
        });
        eventually("calls are answered", || calls.check_progress(before)).await;
    }
    calls.end(&mut callers, "three upgrades").await;
    worker.assert_no_error_logged();
    block_in_place(|| worker.stop());
}

/// Memory is flushed before the gap begins, however full it was. Run with `UPGRADE_GIGABYTES=10
/// UPGRADE_WORKER=target/release/uniffle-worker` and `--nocapture` to assert the gap with an
/// optimized build.
#[tokio::test(flavor = "multi_thread")]
async fn upgrade_gap_starts_with_empty_memory() {
    const BLOCK_BYTES: u32 = 14 << 10;
    const PARTITIONS: i32 = 500;
    const GAP_MS_MAX: u64 = 1_000;
    let gigabytes = std::env::var("UPGRADE_GIGABYTES").ok().and_then(|text| text.parse().ok()).unwrap_or(0.1);
    let mut worker = WorkerProcess::start(&Setup {
        capacity: "1G",
        binary: std::env::var_os("UPGRADE_WORKER").map(PathBuf::from),
        ..setup("gap")
    });
    let (client, key) = (client_of(&worker).await, key("app", 0));
    client.register(&key, &[(0, PARTITIONS - 1)]).await.unwrap();
    let generator = BlockGenerator::new(7, IdLayout::SPARK);
    #[expect(clippy::cast_possible_truncation, reason = "a number of tasks")]
    let tasks = (gigabytes * 1e9 / f64::from(BLOCK_BYTES) / f64::from(PARTITIONS)) as i64;
    for task in 0..tasks {
        let block = |at| generator.block(PartitionId(at), TaskAttemptId(task), 0, BLOCK_BYTES);
        let batch: Vec<_> = (0..PARTITIONS).map(|at| (PartitionId(at), vec![block(at)])).collect();
        client.push(&key, SendForm::Classic, &batch).await.unwrap();
        let ids: Vec<_> = batch.iter().map(|(at, blocks)| (*at, vec![blocks[0].meta.block_id])).collect();
        client.report(&key, TaskAttemptId(task), &ids).await.unwrap();
    }
    block_in_place(|| {
        worker.begin_upgrade();
        worker.finish_upgrade();
    });
    let gap_ms = worker.ready().upgrade_gap_ms.unwrap();
    let blocks = tasks * i64::from(PARTITIONS);
    say(&format!("{blocks} blocks of {BLOCK_BYTES} bytes: no process accepted for {gap_ms} ms"));
    if std::env::var_os("UPGRADE_WORKER").is_some() {
        assert!(gap_ms <= GAP_MS_MAX, "the gap took {gap_ms} ms");
    }
    let log = worker.log();
    assert!(log.contains("flushed_bytes=0") && !log.contains("did not finish in time"), "{log}");
    let found = client_of(&worker).await.results(&key, &[PartitionId(7)], None).await.unwrap();
    assert_eq!(found.cardinality(), u64::try_from(tasks).unwrap());
    block_in_place(|| worker.stop());
}
