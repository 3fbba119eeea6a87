//! `uniffle-worker ctl` on a pseudo-terminal: `top`, `status` and the progress of a wait.

use std::fs::File;
use std::io::Read as _;
use std::os::fd::OwnedFd;
use std::process::{ExitStatus, Stdio};

use rustix::process::{Pid, Signal, kill_process};
use rustix::pty::{OpenptFlags, grantpt, ioctl_tiocgptpeer, openpt, unlockpt};
use rustix::termios::{Winsize, tcsetwinsize};
use tokio::process::{Child, Command};
use tokio::sync::mpsc;
use tokio::time::timeout;

use super::api::WAIT_MAX;
use super::fixture::AdminFixture;

const ENTER_ALTERNATE_SCREEN: &str = "\x1b[?1049h\x1b[?25l";
const LEAVE_ALTERNATE_SCREEN: &str = "\x1b[?25h\x1b[?1049l";

/// The controlling side of a pseudo-terminal, and the program on the other side.
pub(super) struct Terminal {
    controller: OwnedFd,
    program: Child,
    chunks: mpsc::UnboundedReceiver<Vec<u8>>,
    /// All output so far.
    shown: String,
}

impl Terminal {
    /// Runs `uniffle-worker` with `arguments` on a terminal of `columns` and `rows`.
    pub(super) fn run(arguments: &[&str], (columns, rows): (u16, u16)) -> Self {
        let flags = OpenptFlags::RDWR | OpenptFlags::NOCTTY;
        let controller = openpt(flags | OpenptFlags::CLOEXEC).unwrap();
        grantpt(&controller).unwrap();
        unlockpt(&controller).unwrap();
        resize(&controller, (columns, rows));
        let peer = ioctl_tiocgptpeer(&controller, flags | OpenptFlags::CLOEXEC).unwrap();
        // The command is dropped here, so that only the program keeps its end of the terminal open.
        let program = Command::new(env!("CARGO_BIN_EXE_uniffle-worker"))
            .args(arguments)
            .stdin(Stdio::null())
            .stderr(peer.try_clone().unwrap())
            .stdout(peer)
            .env("TERM", "xterm")
            .kill_on_drop(true)
            .spawn()
            .unwrap();
        let (sender, chunks) = mpsc::unbounded_channel();
        let mut reader = File::from(controller.try_clone().unwrap());
        // Ends with the program: a read fails once no process has the other end open.
        std::thread::spawn(move || {
            let mut chunk = [0; 4096];
            while let Ok(length @ 1..) = reader.read(&mut chunk) {
                if sender.send(chunk[..length].to_vec()).is_err() {
                    break;
                }
            }
        });
        Self { controller, program, chunks, shown: String::new() }
    }

    /// Reads until `condition` accepts the frames drawn so far.
    async fn wait_for_frames(&mut self, what: &str, condition: impl Fn(&[Vec<String>]) -> bool) {
        while !condition(&self.frames()) {
            let chunk = timeout(WAIT_MAX, self.chunks.recv()).await;
            let chunk = chunk.unwrap_or_else(|_| panic!("{what} is not shown: {:?}", self.shown));
            let chunk = chunk.unwrap_or_else(|| panic!("the program ended before {what}: {:?}", self.shown));
            self.shown.push_str(&String::from_utf8_lossy(&chunk));
        }
    }

    /// Returns the lines of each completely drawn frame.
    fn frames(&self) -> Vec<Vec<String>> {
        let line = |line: &str| line.trim_end_matches('\r').trim_end_matches("\x1b[K").to_owned();
        let drawn = self.shown.split("\x1b[H").skip(1);
        drawn.filter_map(|text| Some(text.split_once("\x1b[J")?.0.lines().map(line).collect())).collect()
    }

    /// Sends a signal. Returns the exit status and the complete output.
    async fn signal_and_wait(self, signal: Signal) -> (ExitStatus, String) {
        let pid = i32::try_from(self.program.id().expect("the process id fits into i32")).unwrap();
        kill_process(Pid::from_raw(pid).unwrap(), signal).unwrap();
        self.wait().await
    }

    /// Returns the exit status and the complete output once the program has ended.
    pub(super) async fn wait(mut self) -> (ExitStatus, String) {
        let status = timeout(WAIT_MAX, self.program.wait()).await.unwrap().unwrap();
        while let Some(chunk) = timeout(WAIT_MAX, self.chunks.recv()).await.unwrap() {
            self.shown.push_str(&String::from_utf8_lossy(&chunk));
        }
        (status, self.shown)
    }
}

fn resize(controller: &OwnedFd, (columns, rows): (u16, u16)) {
    let size = Winsize { ws_col: columns, ws_row: rows, ws_xpixel: 0, ws_ypixel: 0 };
    tcsetwinsize(controller, size).unwrap();
}

/// Asserts one switch to the alternate screen, and a switch back at the end.
fn assert_screen_restored(shown: &str) {
    assert!(
        shown.starts_with(ENTER_ALTERNATE_SCREEN) && shown.ends_with(LEAVE_ALTERNATE_SCREEN),
        "{shown:?}"
    );
    assert_eq!(
        (shown.matches(ENTER_ALTERNATE_SCREEN).count(), shown.matches(LEAVE_ALTERNATE_SCREEN).count()),
        (1, 1),
        "{shown:?}"
    );
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn top_redraws_workers_and_truncates_to_window_width() {
    let first = AdminFixture::start().await;
    let others = [AdminFixture::in_cluster_of(&first).await, AdminFixture::in_cluster_of(&first).await];
    first.push("app-1", 3).await;
    let coordinator = first.worker.addresses().grpc.to_string();
    let arguments = ["ctl", "top", "--coordinator", &coordinator, "--interval", "0.1"];
    let mut terminal = Terminal::run(&arguments, (150, 40));
    let are_all_there = |frame: &Vec<String>| {
        frame[0].starts_with("3 workers, 3 answering;") && frame.iter().any(|line| line.starts_with("app-1 "))
    };
    terminal
        .wait_for_frames("two frames of all", |drawn| {
            drawn.iter().filter(|frame| are_all_there(frame)).count() >= 2
        })
        .await;
    let wide = terminal.frames().pop().unwrap();
    for fixture in others.iter().chain([&first]) {
        let port = format!("-{}", fixture.worker.addresses().grpc.port());
        assert_eq!(
            wide.iter().filter(|line| line.contains(&port)).count(),
            1,
            "expected port {port} once: {wide:?}"
        );
    }
    assert!(wide.iter().any(|line| line.chars().count() > 30) && wide.len() > 5, "{wide:?}");

    resize(&terminal.controller, (30, 6));
    let is_narrow =
        |frame: &Vec<String>| frame.len() == 5 && frame.iter().all(|line| line.chars().count() <= 30);
    terminal
        .wait_for_frames("two narrow frames", |drawn| {
            drawn.iter().filter(|frame| is_narrow(frame)).count() >= 2
        })
        .await;
    let narrow = terminal.frames().pop().unwrap();
    assert!(narrow[0].starts_with("3 workers, 3 answering;"), "{narrow:?}");
    assert!(narrow[2].starts_with("worker") && narrow[3].contains("active"), "{narrow:?}");

    let (status, shown) = terminal.signal_and_wait(Signal::INT).await;
    assert_eq!(status.code(), Some(0), "{shown:?}");
    assert_screen_restored(&shown);
    for fixture in others {
        fixture.finish().await;
    }
    first.finish().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn status_and_top_fit_80_columns() {
    let first = AdminFixture::start().await;
    let second = AdminFixture::in_cluster_of(&first).await;
    first.push("application_1700000000000_0001_1700000000000", 3).await;
    let coordinator = first.worker.addresses().grpc.to_string();
    let http = first.worker.addresses().http.to_string();
    for target in [["--coordinator", &coordinator], ["--worker", &http]] {
        for command in [&["status"][..], &["top", "--once"]] {
            let terminal = Terminal::run(&[&["ctl"], &target[..], command].concat(), (80, 24));
            let (status, shown) = terminal.wait().await;
            assert_eq!(status.code(), Some(0), "{shown}");
            assert!(shown.contains("active"), "{shown}");
            assert!(shown.lines().all(|line| line.trim_end().chars().count() <= 80), "{shown}");
        }
    }
    second.finish().await;
    // The coordinator still lists the stopped worker.
    let listed = super::ctl::run(&["ctl", "status", "--coordinator", &coordinator]).await;
    let rows = |text: &str| listed.stdout.lines().filter(|line| line.contains(text)).count();
    assert_eq!((listed.code, rows("no answer"), rows("active")), (3, 1, 1), "{}", listed.stdout);
    first.finish().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn waiting_shows_progress_on_a_terminal_only() {
    let fixture = AdminFixture::start().await;
    fixture.push("app-1", 1).await;
    let addresses = fixture.worker.addresses();
    let (http, admin) = (addresses.http.to_string(), addresses.admin.unwrap().to_string());
    let arguments = ["ctl", "--worker", &http, "--admin", &admin, "decommission", "--wait", "--within", "1"];
    let (status, shown) = Terminal::run(&arguments, (120, 24)).wait().await;
    assert_eq!(status.code(), Some(4), "{shown}");
    assert!(shown.contains("applications left: 1") && shown.contains("░"), "{shown:?}");
    let piped = super::ctl::run(&arguments).await;
    assert_eq!(
        (piped.code, piped.stdout.as_str(), piped.stderr.lines().count()),
        (4, "", 1),
        "{}",
        piped.stderr
    );
    fixture.finish().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn top_restores_terminal_on_int_term_and_hup() {
    let fixture = AdminFixture::start().await;
    let http = fixture.worker.addresses().http.to_string();
    for signal in [Signal::INT, Signal::TERM, Signal::HUP] {
        let mut terminal = Terminal::run(&["ctl", "top", "--worker", &http], (80, 24));
        terminal.wait_for_frames("a frame", |drawn| !drawn.is_empty()).await;
        let (status, shown) = terminal.signal_and_wait(signal).await;
        assert_eq!(status.code(), Some(0), "{signal:?}: {status}: {shown:?}");
        assert_screen_restored(&shown);
    }
    fixture.finish().await;
}
