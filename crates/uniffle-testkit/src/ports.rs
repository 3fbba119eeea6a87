//! Ports for components that cannot report which port they chose.

use std::net::{TcpListener, UdpSocket};
use std::ops::Range;
use std::os::fd::{AsRawFd as _, OwnedFd};

/// Lowest port. The system's own services use lower ones.
const FIRST: u16 = 10_000;

/// Returns a port that is free for TCP and UDP and outside the ephemeral range. Other tests open
/// hundreds of ephemeral ports before the component binds its own.
pub fn free_port() -> u16 {
    let not_given = outside_of(&given_by_the_system());
    let free = |port: &u16| {
        TcpListener::bind(("127.0.0.1", *port)).is_ok() && UdpSocket::bind(("127.0.0.1", *port)).is_ok()
    };
    let mut tries = std::iter::repeat_with(|| rand::random_range(not_given.clone())).take(1000);
    tries.find(free).unwrap()
}

/// A port that accepts connections even while no worker serves them, like a socket that a service
/// manager passes from process to process.
#[derive(Debug)]
pub struct InheritedPort {
    port: u16,
    socket: OwnedFd,
}

impl InheritedPort {
    /// Opens a port that the system chooses.
    pub fn open() -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let port = listener.local_addr().unwrap().port();
        // A copy without close-on-exec, like the one that the manager's child has.
        let socket = rustix::io::dup(&listener).unwrap();
        Self { port, socket }
    }

    /// Returns the port for clients.
    pub fn port(&self) -> u16 {
        self.port
    }

    /// Returns a command that executes a worker with this socket as its gRPC listener. The shell
    /// moves the socket to the expected descriptor.
    pub fn passing_on(&self) -> Vec<String> {
        let socket = self.socket.as_raw_fd();
        let line = format!("exec 3<&{socket}; LISTEN_FDS=1 LISTEN_FDNAMES=grpc LISTEN_PID=$$ exec \"$@\"");
        ["bash", "-c", &line, "bash"].map(str::to_owned).to_vec()
    }
}

fn given_by_the_system() -> Range<u16> {
    let text =
        std::fs::read_to_string("/proc/sys/net/ipv4/ip_local_port_range").expect("Linux has this file");
    let mut ends = text.split_whitespace().map(|end| end.parse().unwrap());
    let mut end = || ends.next().unwrap();
    end()..end()
}

fn outside_of(given: &Range<u16>) -> Range<u16> {
    let (below, above) = (FIRST..given.start, given.end.saturating_add(1)..u16::MAX);
    let longer = if below.len() >= above.len() { below } else { above };
    // A system whose ephemeral range covers all ports leaves no choice.
    if longer.is_empty() { FIRST..u16::MAX } else { longer }
}
