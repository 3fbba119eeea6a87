//! CPU and heap profiles of a worker under load, read by `go tool pprof`, and the task dump.

use std::io::Write as _;
use std::net::TcpStream;
use std::process::Command;
use std::thread;
use std::time::Duration;

use rustix::process::{Pid, Signal, kill_process};
use tokio::time::Instant;

use super::tools::{Load, ask, ask_text, run};
use uniffle_testkit::tools::available;
use uniffle_testkit::worker::{Setup, WorkerProcess};
use uniffle_testkit::{say, wait_until};

/// Bound on the memory growth by a profile or a dump.
const GROWTH_MIB_MAX: u64 = 48;
/// Bound for a CPU profile with fine heap sampling: usually about 50 MiB. While pprof parsed debug
/// information in the worker, growth was 115 MiB and more.
const CPU_GROWTH_MIB_MAX: u64 = 72;

/// Returns the functions of a profile, sorted by cumulative samples.
fn functions(profile: &[u8]) -> String {
    let file = tempfile::NamedTempFile::new().unwrap();
    std::fs::write(file.path(), profile).unwrap();
    let mut pprof = Command::new("go");
    // Symbols come from the profile alone.
    pprof.args(["tool", "pprof", "-symbolize=none", "-top", "-cum", "-nodecount=2000"]).arg(file.path());
    run(&mut pprof)
}

/// A worker with an admin listener, which serves profiles.
fn setup() -> Setup {
    Setup { made_tables: "[admin]\nport = 0".to_owned(), ..Setup::default() }
}

fn port(worker: &WorkerProcess) -> u16 {
    worker.ready().admin_port.unwrap()
}

#[test]
fn profiles_need_the_admin_listener_unless_opened() {
    let paths =
        ["/debug/pprof/profile?seconds=1", "/debug/pprof/heap", "/debug/heap/profile", "/debug/tasks"];
    let open = |tables: &str| {
        let tables = format!("[admin]\nport = 0\n{tables}");
        let worker = WorkerProcess::start(&Setup { made_tables: tables, ..Setup::default() });
        let status = |port, path| ask(port, "GET", path).0;
        let found = paths.map(|path| {
            assert_ne!(status(port(&worker), path), 404, "{path}");
            assert_eq!(ask(port(&worker), "POST", path).0, 405, "{path}");
            status(worker.ready().http_port, path) != 404
        });
        worker.stop();
        found
    };
    assert_eq!(open(""), [false; 4]);
    assert_eq!(open("[http]\nprofiles = true"), [true; 4]);
}

#[test]
fn cpu_profiles_are_valid_and_one_runs_at_a_time() {
    let worker = WorkerProcess::start(&setup());
    let port = port(&worker);
    // Longer than needed; the load ends with the profiles.
    let load = Load::start(&worker, "300MB", 10_000);
    let first = thread::spawn(move || {
        wait_until("the profile", Duration::from_secs(60), || {
            let (status, profile) = ask(port, "GET", "/debug/pprof/profile?seconds=5&frequency=250");
            if status == 200 { Ok(profile) } else { Err(format!("{status}")) }
        })
    });
    // The second request is refused. Which of the two is second varies, so retry.
    let busy = wait_until("a second profile is refused", Duration::from_secs(60), || {
        let (status, text) = ask(port, "GET", "/debug/pprof/profile?seconds=1&frequency=1");
        let text = String::from_utf8_lossy(&text).into_owned();
        if status == 409 { Ok(text) } else { Err(format!("{status}")) }
    });
    assert_eq!(busy, "another profile or dump is being taken; there can be one at a time\n");
    let profile = first.join().unwrap();
    let (status, svg) = ask_text(port, "GET", "/debug/pprof/profile?seconds=1&frequency=500&format=svg");
    assert_eq!(status, 200);
    assert!(svg.starts_with("<?xml") && svg.contains("<svg"), "{}", &svg[..200.min(svg.len())]);
    assert!(!svg.contains("No samples"), "{svg}");
    assert_serves_under_a_profile(&worker, port);
    drop(load);
    if available("go tool pprof", &["go"]) {
        let functions = functions(&profile);
        assert!(functions.contains("Type: cpu"), "{functions}");
        assert!(
            functions.contains("uniffle_worker::"),
            "the profile has no function of the worker: {functions}"
        );
    }
    // The load was killed while running, so its application still exists.
    worker.assert_no_error_logged();
    worker.stop();
}

/// Asserts that data and calls are served while a profile is taken, on slow machines too.
fn assert_serves_under_a_profile(worker: &WorkerProcess, port: u16) {
    let http = worker.ready().http_port;
    let moved = || {
        let metrics = worker.metrics();
        metrics.expect("total_received_data") + metrics.expect("total_read_data")
    };
    wait_until("data flows while a profile is taken", Duration::from_secs(120), || {
        let (before, mut meanwhile) = (moved(), None);
        let profile = thread::spawn(move || ask(port, "GET", "/debug/pprof/profile?seconds=3").0);
        while !profile.is_finished() {
            let answer = (ask(http, "GET", "/health/live").0, moved());
            // A response after the end of the profile proves nothing.
            meanwhile = if profile.is_finished() { meanwhile } else { Some(answer) };
        }
        assert_eq!(profile.join().unwrap(), 200);
        match meanwhile {
            Some((200, bytes)) if bytes > before => Ok(()),
            other => Err(format!("{before} bytes before, then {other:?}")),
        }
    });
}

/// Uses the variable that riffle and Uniffle's experimental Rust server document.
#[test]
fn heap_profiles_start_with_documented_variable() {
    let setup = Setup {
        env: vec![("_RJEM_MALLOC_CONF", "prof:true,prof_prefix:jeprof.out,lg_prof_sample:12".to_owned())],
        ..setup()
    };
    let worker = WorkerProcess::start(&setup);
    let port = port(&worker);
    Load::start(&worker, "50MB", 1).finish();
    for path in ["/debug/pprof/heap", "/debug/heap/profile"] {
        let (status, profile) = ask(port, "GET", path);
        assert_eq!(status, 200, "{}", String::from_utf8_lossy(&profile));
        if available("go tool pprof", &["go"]) {
            let functions = functions(&profile);
            assert!(functions.contains("Type: inuse_space"), "{functions}");
            assert!(
                functions.contains("uniffle_worker::"),
                "the profile has no function of the worker: {functions}"
            );
        }
    }
    let (status, svg) = ask_text(port, "GET", "/debug/pprof/heap?format=svg");
    assert!(status == 200 && svg.contains("<svg"));
    worker.assert_clean();
    worker.stop();
}

/// Symbols are resolved in a child process, because parsing a release build's debug information
/// takes about 180 MiB. The first CPU profile creates unwind tables. Without Landlock in the kernel
/// each profile takes more (`uniffle_profile`).
#[test]
fn profiles_and_dumps_take_little_worker_memory() {
    const CPU: &str = "/debug/pprof/profile?seconds=1&frequency=500";
    let setup =
        Setup { env: vec![("_RJEM_MALLOC_CONF", "prof:true,lg_prof_sample:12".to_owned())], ..setup() };
    let worker = WorkerProcess::start(&setup);
    let (admin, http) = (port(&worker), worker.ready().http_port);
    assert_eq!(ask(admin, "GET", CPU).0, 200);
    for path in [CPU, "/debug/pprof/heap", "/debug/pprof/heap?format=svg", "/debug/tasks"] {
        let before = worker.proc_status("VmRSS") >> 10;
        // Resets the peak to the current size.
        std::fs::write(format!("/proc/{}/clear_refs", worker.pid()), "5").unwrap();
        let profile = thread::spawn(move || ask(admin, "GET", path));
        while !profile.is_finished() {
            assert_eq!(ask(http, "GET", "/metrics").0, 200);
        }
        let (status, profile) = profile.join().unwrap();
        assert_eq!(status, 200, "{}", String::from_utf8_lossy(&profile));
        let peak = worker.peak_resident_bytes() >> 20;
        say(&format!("{path}: {before} MiB resident before, {peak} MiB at most, {} bytes", profile.len()));
        let growth_max = if path == CPU { CPU_GROWTH_MIB_MAX } else { GROWTH_MIB_MAX };
        assert!(peak < before + growth_max, "{path}: {before} MiB were resident before, {peak} MiB at most");
        if let Ok(text) = String::from_utf8(profile) {
            assert!(text.contains("uniffle_worker::"), "the profile has no function of the worker: {text}");
        }
    }
    assert!(!worker.log().contains("symbolization failed"), "{}", worker.log());
    worker.stop();
}

/// Returns the symbol-resolving child of `worker`, if any.
fn symbolizer(worker: &WorkerProcess) -> Option<Pid> {
    let tasks = std::fs::read_dir(format!("/proc/{}/task", worker.pid())).unwrap().flatten();
    let children = tasks.filter_map(|task| std::fs::read_to_string(task.path().join("children")).ok());
    let children: Vec<String> = children.collect();
    let names = |child: &&str| {
        std::fs::read(format!("/proc/{child}/cmdline")).is_ok_and(|line| line.ends_with(b"\0__symbols\0"))
    };
    let child = children.iter().flat_map(|children| children.split_whitespace()).find(names)?;
    Pid::from_raw(child.parse().ok()?)
}

#[test]
fn upgrade_during_profile_leaves_no_zombie() {
    let mut worker = WorkerProcess::start(&setup());
    let admin = port(&worker);
    let (child, _asking) = wait_until("a process names functions", Duration::from_secs(60), || {
        let mut asking = TcpStream::connect(("127.0.0.1", admin)).unwrap();
        asking.write_all(b"GET /debug/tasks HTTP/1.0\r\nHost: localhost\r\n\r\n").unwrap();
        let asked = Instant::now();
        while asked.elapsed() < Duration::from_secs(1) {
            if let Some(child) = symbolizer(&worker) {
                // The child is still running at the upgrade.
                kill_process(child, Signal::STOP).unwrap();
                return Ok((child, asking));
            }
        }
        Err("no profile is running".to_owned())
    });
    worker.begin_upgrade();
    worker.finish_upgrade();
    // The child was killed with its parent thread, unless it was stopped before it requested that.
    let _ = kill_process(child, Signal::CONT);
    wait_until("the process is gone", Duration::from_secs(30), || {
        match std::fs::read_to_string(format!("/proc/{}/stat", child.as_raw_nonzero())) {
            Ok(stat) => Err(stat),
            Err(_) => Ok(()),
        }
    });
    worker.stop();
}

/// The child of a worker inherits none of its sockets and files.
#[test]
fn children_inherit_no_descriptor() {
    let worker = WorkerProcess::start(&setup());
    let directory = format!("/proc/{}/fdinfo", worker.pid());
    let is_closed_on_exec = |info: &str| {
        let flags = info.lines().find_map(|line| line.strip_prefix("flags:")).unwrap().trim();
        u32::from_str_radix(flags, 8).unwrap() & 0o2_000_000 != 0
    };
    let mut closed = 0;
    for entry in std::fs::read_dir(directory).unwrap() {
        let path = entry.unwrap().path();
        let number: u32 = path.file_name().unwrap().to_str().unwrap().parse().unwrap();
        // The descriptor may be closed meanwhile.
        let Ok(info) = std::fs::read_to_string(&path) else { continue };
        // Descriptors that this test process inherited and passes on are not counted.
        let own = std::fs::read_to_string(format!("/proc/self/fdinfo/{number}"));
        let is_handed_on = own.is_ok_and(|own| !is_closed_on_exec(&own));
        assert!(number <= 2 || is_closed_on_exec(&info) || is_handed_on, "{number}: {info}");
        closed += u32::from(is_closed_on_exec(&info));
    }
    assert!(closed > 5, "{closed}");
    worker.stop();
}

#[test]
fn heap_profiles_are_off_by_default_with_a_reason() {
    let worker = WorkerProcess::start(&setup());
    let (status, text) = ask_text(port(&worker), "GET", "/debug/pprof/heap");
    assert_eq!(status, 409, "{text}");
    assert!(text.starts_with("heap profiling is not active"), "{text}");
    worker.stop();
}

/// Only the admin listener can do this at run time. Fine sampling makes a small load visible.
#[test]
fn heap_profiles_are_switched_by_a_call() {
    let setup = Setup { env: vec![("MALLOC_CONF", "lg_prof_sample:12".to_owned())], ..setup() };
    let worker = WorkerProcess::start(&setup);
    let (http, admin) = (worker.ready().http_port, worker.ready().admin_port.unwrap());
    let profile = || ask(admin, "GET", "/debug/pprof/heap");
    let switch = |to: &str| ask_text(admin, "POST", &format!("/admin/heap-profile/{to}"));
    assert_eq!(
        ask(http, "POST", "/admin/heap-profile/activate").0,
        404,
        "the open listener must not offer the call"
    );
    assert_eq!(ask(admin, "GET", "/admin/heap-profile/activate").0, 405);
    assert_eq!(profile().0, 409);
    for _ in 0..2 {
        assert_eq!(switch("activate"), (200, "{\"heap_profiling\":\"active\"}".to_owned()));
    }
    let load = Load::start(&worker, "100MB", 1);
    let held = wait_until("allocations of ours are in the profile", Duration::from_secs(60), || {
        let (status, profile) = profile();
        assert_eq!(status, 200, "{}", String::from_utf8_lossy(&profile));
        if available("go tool pprof", &["go"]) && !functions(&profile).contains("uniffle_worker::") {
            return Err("none yet".to_owned());
        }
        Ok(profile)
    });
    assert!(!held.is_empty());
    load.finish();
    for _ in 0..2 {
        assert_eq!(switch("deactivate"), (200, "{\"heap_profiling\":\"inactive\"}".to_owned()));
    }
    let (status, text) = ask_text(admin, "GET", "/debug/pprof/heap");
    assert!(status == 409 && text.starts_with("heap profiling is not active"), "{status} {text}");
    let calls = worker.log().matches("call=/admin/heap-profile/").count();
    assert_eq!(calls, 5, "the GET that was refused and four POSTs: {}", worker.log());
    worker.assert_clean();
    worker.assert_no_error_logged();
    worker.stop();
}

#[test]
fn task_dump_shows_where_each_task_waits() {
    let worker = WorkerProcess::start(&setup());
    let (status, text) = ask_text(port(&worker), "GET", "/debug/tasks");
    assert_eq!(status, 200, "{text}");
    for name in ["grpc accept", "flush scheduler", "flush worker", "tier maintenance"] {
        assert!(text.contains(&format!("{name} (oldest ")), "{name}: {text}");
        assert!(text.contains(&format!("× {name}\n")), "{name} has no stack: {text}");
    }
    assert!(text.contains("uniffle_worker::flush::"), "{text}");
    worker.stop();
}
