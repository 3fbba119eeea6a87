//! Steps of the system clock do not affect a worker: its deadlines use the monotonic clock.

use std::os::unix::fs::FileExt as _;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use tokio::task::block_in_place;
use uniffle_testkit::wait_until;
use uniffle_testkit::worker::{Setup, WorkerProcess};

use crate::writes::{Written, client_of, key};

/// The worker takes a sample every two seconds.
const LOOK_DEADLINE: Duration = Duration::from_secs(60);

/// A library preloaded before libc that adds an offset in seconds, read from a file, to
/// `CLOCK_REALTIME`. libfaketime would deadlock: it allocates within `clock_gettime`, which
/// jemalloc calls during allocations.
const SHIM: &str = r#"
#define _GNU_SOURCE
#include <fcntl.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

int clock_gettime(clockid_t clock, struct timespec *now) {
    static const volatile long *offset;
    long result = syscall(SYS_clock_gettime, clock, now);
    if (clock != CLOCK_REALTIME || result != 0) return (int)result;
    if (!offset) {
        int file = open(getenv("CLOCK_OFFSET_FILE"), O_RDONLY);
        void *mapped = mmap(NULL, sizeof(long), PROT_READ, MAP_SHARED, file, 0);
        if (mapped == MAP_FAILED) abort();
        close(file);
        offset = mapped;
    }
    now->tv_sec += *offset;
    return 0;
}
"#;

/// Compiles a library for `LD_PRELOAD` from C in `dir`. Returns its path.
pub(crate) fn build_shim(dir: &Path, text: &str) -> PathBuf {
    let (source, library) = (dir.join("shim.c"), dir.join("shim.so"));
    std::fs::write(&source, text).unwrap();
    let built = Command::new("cc").args(["-shared", "-fPIC", "-o"]).arg(&library).arg(&source).status();
    assert!(built.is_ok_and(|status| status.success()), "there is no C compiler, which the build needs too");
    library
}

/// Builds an adjustable clock in `dir`. Returns the environment for a process and the file of the
/// offset.
fn stepping_clock(dir: &Path) -> (Vec<(&'static str, String)>, PathBuf) {
    let (library, file) = (build_shim(dir, SHIM), dir.join("offset"));
    set(&file, 0);
    let text = |path: &Path| path.display().to_string();
    (vec![("LD_PRELOAD", text(&library)), ("CLOCK_OFFSET_FILE", text(&file))], file)
}

/// Writes in place, because the process has the file mapped.
fn set(file: &Path, hours: i64) {
    let mut options = std::fs::OpenOptions::new();
    let file = options.write(true).create(true).truncate(false).open(file).unwrap();
    file.write_all_at(&(hours * 3600).to_ne_bytes(), 0).expect("cannot write the clock's file");
}

/// Steps the worker's clock to `hours` from the true time, and waits until its samples show that.
fn step(worker: &WorkerProcess, file: &Path, hours: i64) {
    set(file, hours);
    let expected_ms = |now: Duration| i128::from(hours) * 3_600_000 + now.as_millis().cast_signed();
    wait_until("the worker's clock has stepped", LOOK_DEADLINE, || {
        let text = worker.page("/api/v1/history")?;
        let samples: serde_json::Value = serde_json::from_str(&text).map_err(|error| error.to_string())?;
        let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap();
        let newest =
            samples["samples"].as_array().and_then(|all| all.last()).and_then(|it| it["at_ms"].as_i64());
        let newest = newest.ok_or_else(|| text.clone())?;
        let away_ms = (i128::from(newest) - expected_ms(now)).abs();
        if away_ms < 600_000 { Ok(()) } else { Err(format!("{newest} is {away_ms} ms away")) }
    });
}

#[tokio::test(flavor = "multi_thread")]
async fn clock_steps_expire_and_lose_nothing() {
    let dir = tempfile::tempdir().unwrap();
    let (env, clock) = stepping_clock(dir.path());
    let mut worker = WorkerProcess::start(&Setup {
        name: "clock steps",
        capacity: "64M",
        disks: 2,
        env,
        ..Setup::default()
    });
    let client = client_of(&worker).await;
    let mut written = Written::register(&client, key("app", 0), 20).await;
    written.task(&client, 0, 20_000).await.unwrap();
    for (task, hours) in [(1, 10), (2, -10), (3, 0)] {
        block_in_place(|| step(&worker, &clock, hours));
        written.task(&client, task, 20_000).await.expect("a send after a step of the clock failed");
        written.assert_readable(&client).await;
    }
    // A restart after the clock moved back.
    block_in_place(|| {
        step(&worker, &clock, 10);
        worker.terminate();
        set(&clock, -10);
        worker.start_again();
    });
    let client = client_of(&worker).await;
    written.task(&client, 4, 20_000).await.expect("a send to the next process failed");
    written.assert_readable(&client).await;
    client.unregister_app("app").await.unwrap();
    worker.assert_clean();
    block_in_place(|| worker.stop());
}
