//! Helpers of these tests: external tools, raw HTTP, load.

use std::io::{Read as _, Write as _};
use std::net::TcpStream;
use std::path::Path;
use std::process::{Child, Command, Output, Stdio};
use std::time::Duration;

use uniffle_testkit::worker::WorkerProcess;

/// Longer than any profile of these tests.
const ANSWER_DEADLINE: Duration = Duration::from_secs(120);

/// Sends `method path`. Returns status and body of the response.
pub(crate) fn ask(port: u16, method: &str, path: &str) -> (u16, Vec<u8>) {
    let mut stream = TcpStream::connect(("127.0.0.1", port)).unwrap();
    stream.set_read_timeout(Some(ANSWER_DEADLINE)).unwrap();
    let request = format!("{method} {path} HTTP/1.0\r\nHost: localhost\r\nContent-Length: 0\r\n\r\n");
    // An oversized head is refused and the connection closed before all of it was sent.
    let _ = stream.write_all(request.as_bytes());
    let mut answer = Vec::new();
    // A refusal may reset the connection while request bytes are still unread.
    let _ = stream.read_to_end(&mut answer);
    let end = answer.windows(4).position(|four| four == b"\r\n\r\n").expect("the response has no head");
    let head = String::from_utf8_lossy(&answer[..end]).into_owned();
    let status = head.split(' ').nth(1).and_then(|status| status.parse().ok()).unwrap();
    (status, answer[end + 4..].to_vec())
}

/// Like [`ask`]. The body of the response must be text.
pub(crate) fn ask_text(port: u16, method: &str, path: &str) -> (u16, String) {
    let (status, body) = ask(port, method, path);
    (status, String::from_utf8(body).unwrap())
}

/// `uniffle-bench` as load on a worker. It verifies every byte that it reads. Killed on drop.
pub(crate) struct Load(Child);

impl Load {
    pub(crate) fn start(worker: &WorkerProcess, bytes: &str, rounds: u32) -> Self {
        let ready = worker.ready();
        let child = Command::new(uniffle_testkit::tools::binary("uniffle-bench"))
            // Concurrent profiles and scrapes keep the worker busy, so no phase waits until it is
            // idle.
            .args(["read", "--bytes", bytes, "--rounds", &rounds.to_string(), "--settle", "0s"])
            .args(["--partitions", "20"])
            .args(["--port", &ready.grpc_port.to_string(), "--http-port", &ready.http_port.to_string()])
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .unwrap();
        Self(child)
    }

    /// Waits for its end, and asserts success.
    pub(crate) fn finish(mut self) {
        let mut text = String::new();
        self.0.stderr.take().unwrap().read_to_string(&mut text).unwrap();
        let status = self.0.wait().unwrap();
        assert!(status.success(), "uniffle-bench failed: {status}\n{text}");
    }
}

impl Drop for Load {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// An external process, killed on drop.
pub(crate) struct Running(Child);

impl Running {
    /// Starts `command` with its output in `log`.
    pub(crate) fn start(command: &mut Command, log: &Path) -> Self {
        let log = std::fs::File::create(log).unwrap();
        let child = command.stdin(Stdio::null()).stdout(log.try_clone().unwrap()).stderr(log).spawn();
        Self(child.expect("the tool is not installed"))
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// Runs `command` and asserts success. Returns its output.
pub(crate) fn run(command: &mut Command) -> String {
    let output: Output = command.stdin(Stdio::null()).output().expect("the tool is not installed");
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    let complaints = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{command:?} failed: {}\n{text}\n{complaints}", output.status);
    text + &complaints
}
