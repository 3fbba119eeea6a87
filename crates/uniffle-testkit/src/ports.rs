//! Ports for components that cannot say which one they took.

use std::net::{TcpListener, UdpSocket};
use std::ops::Range;
use std::os::fd::{AsRawFd as _, OwnedFd};

/// Below these the system's own services are.
const FIRST: u16 = 10_000;

/// A port that is free by TCP and UDP, and that the system gives only to those who ask for it: between this
/// look and the component's own, other tests open connections and listeners by the hundred.
pub fn free_port() -> u16 {
    let not_given = outside_of(&given_by_the_system());
    let free = |port: &u16| {
        TcpListener::bind(("127.0.0.1", *port)).is_ok() && UdpSocket::bind(("127.0.0.1", *port)).is_ok()
    };
    let mut tries = std::iter::repeat_with(|| rand::random_range(not_given.clone())).take(1000);
    tries.find(free).expect("a free port")
}

/// A port at which connections are waited for also while no worker accepts them, as a service manager does with a socket that it
/// passes to one process after the other.
#[derive(Debug)]
pub struct KeptPort {
    port: u16,
    socket: OwnedFd,
}

impl KeptPort {
    /// One that the system chooses.
    pub fn open() -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
        let port = listener.local_addr().expect("bound").port();
        // A copy without close-on-exec, as the manager's child would have it.
        let socket = rustix::io::dup(&listener).expect("a copy");
        Self { port, socket }
    }

    /// Where clients connect.
    pub fn port(&self) -> u16 {
        self.port
    }

    /// A command that executes a worker with this as the port for gRPC: the shell moves it to where it is looked for.
    pub fn passing_on(&self) -> Vec<String> {
        let socket = self.socket.as_raw_fd();
        let line = format!("exec 3<&{socket}; LISTEN_FDS=1 LISTEN_FDNAMES=grpc LISTEN_PID=$$ exec \"$@\"");
        ["bash", "-c", &line, "bash"].map(str::to_owned).to_vec()
    }
}

fn given_by_the_system() -> Range<u16> {
    let text = std::fs::read_to_string("/proc/sys/net/ipv4/ip_local_port_range").expect("Linux has it");
    let mut ends = text.split_whitespace().map(|end| end.parse().expect("a port"));
    let mut end = || ends.next().expect("two ports");
    end()..end()
}

fn outside_of(given: &Range<u16>) -> Range<u16> {
    let (below, above) = (FIRST..given.start, given.end.saturating_add(1)..u16::MAX);
    let longer = if below.len() >= above.len() { below } else { above };
    // A system that gives them all leaves no choice.
    if longer.is_empty() { FIRST..u16::MAX } else { longer }
}
