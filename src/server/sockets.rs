//! The listening sockets of a worker, bound or inherited from an earlier process.
//!
//! They are inherited by systemd's convention (`LISTEN_FDS`, `LISTEN_FDNAMES`) from a socket unit,
//! from the service manager's descriptor store after a crash, or from the worker's predecessor in
//! this process (`successor`). New connections wait in the backlog meanwhile, and none is refused.
//! A predecessor also leaves its idle connections.
//!
//! A listener is identified by its name (`grpc`, `urpc`, `http`, `admin`), otherwise by its port. A
//! listener on a port that is not configured is closed with a warning.

use std::collections::HashMap;
use std::io;
use std::net::{IpAddr, SocketAddr, TcpListener, TcpStream};
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::time::{SystemTime, UNIX_EPOCH};

use anyhow::Context as _;
use listenfd::ListenFd;
use socket2::{Domain, Socket, Type};

use crate::config::Config;
use crate::log::HandOff;
use crate::memory::{Memory, take_inherited};

/// Maximum number of connects waiting in the backlog. The kernel has its own limit
/// (`net.core.somaxconn`, 4096).
const BACKLOG: i32 = 4096;

/// Bound addresses of the listeners.
#[derive(Debug, Clone, Copy)]
pub struct Addresses {
    /// gRPC, and the embedded coordinator where there is one.
    pub grpc: SocketAddr,
    /// HTTP.
    pub http: SocketAddr,
    /// Raw TCP.
    pub tcp: Option<SocketAddr>,
    /// Administration.
    pub admin: Option<SocketAddr>,
}

/// Names of listeners, as in a socket unit's `FileDescriptorName=`.
const GRPC: &str = "grpc";
const TCP: &str = "urpc";
const HTTP: &str = "http";
pub(super) const ADMIN: &str = "admin";
/// Name of [`Inherited::memory`].
pub(super) const MEMORY: &str = "memory";
/// Name of [`Inherited::tickets`].
const TICKETS: &str = "tickets";
/// Name of [`Inherited::state`].
const STATE: &str = "state";
/// Names of connections. Short: there may be thousands, and the environment has limits.
const GRPC_CONNECTION: &str = "g";
const TCP_CONNECTION: &str = "u";

/// Descriptors and facts inherited from an earlier process.
#[derive(Debug, Default)]
pub struct Inherited {
    pub(super) listeners: Vec<(String, TcpListener)>,
    /// gRPC connections that have sent nothing yet.
    pub(super) grpc_connections: Vec<TcpStream>,
    /// Raw TCP connections between two requests.
    pub(super) tcp_connections: Vec<TcpStream>,
    /// When the predecessor stopped accepting, in ms since 1970.
    pub(super) gap_began_ms: Option<u64>,
    /// Version and commit of the predecessor, if another program was executed.
    pub(super) predecessor: Option<String>,
    /// True if the same program starts again, because its successor could not be executed.
    pub(super) is_returned: bool,
    /// State of the metadata log at the end of the previous process.
    pub(super) hand_off: Option<HandOff>,
    /// The unnamed file that backs the memory.
    pub(super) memory: Option<OwnedFd>,
    /// Tickets granted by the previous process (`tickets`).
    pub(super) tickets: Option<OwnedFd>,
    /// Settings made at run time (`runtime_state`).
    pub(super) state: Option<OwnedFd>,
    /// Released memory, in a process about to `exec`: the kernel unmaps it at once.
    pub(super) until_exec: Option<Arc<Memory>>,
}

/// Carries [`Inherited::gap_began_ms`].
pub(super) const GAP_BEGAN: &str = "WORKER_UPGRADE_BEGAN_MS";
/// Carries [`Inherited::predecessor`].
pub(super) const PREDECESSOR: &str = "WORKER_UPGRADED_FROM";
/// Carries [`Inherited::hand_off`], as JSON.
pub(super) const HAND_OFF: &str = "WORKER_HAND_OFF";

/// Returns the current time for [`Inherited::gap_began_ms`].
pub(super) fn now_ms() -> u64 {
    let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    u64::try_from(since.as_millis()).unwrap_or(u64::MAX)
}

impl Inherited {
    /// Takes the descriptors that `LISTEN_FDS` of `env` passes to this process. Must be called once
    /// and before any thread exists, since it removes the variables from the environment.
    #[must_use]
    pub fn from_env(env: &HashMap<String, String>) -> Self {
        let names: Vec<&str> =
            env.get("LISTEN_FDNAMES").map(|names| names.split(':').collect()).unwrap_or_default();
        let mut received = ListenFd::from_env();
        // Without a listener to take over, the variable comes from an earlier start.
        let gap_began_ms = env.get(GAP_BEGAN).and_then(|text| text.parse().ok());
        let gap_began_ms = gap_began_ms.filter(|began| *began > 0 && received.len() > 0);
        let hand_off = env.get(HAND_OFF).filter(|_| gap_began_ms.is_some());
        let hand_off = hand_off.and_then(|text| serde_json::from_str(text).ok());
        let predecessor =
            gap_began_ms.map(|_| env.get(PREDECESSOR).cloned().unwrap_or_else(|| "unknown".to_owned()));
        let mut inherited = Self { gap_began_ms, hand_off, predecessor, ..Self::default() };
        for index in 0..received.len() {
            let name = names.get(index).copied().unwrap_or_default();
            let file = match name {
                MEMORY => Some(&mut inherited.memory),
                TICKETS => Some(&mut inherited.tickets),
                STATE => Some(&mut inherited.state),
                _ => None,
            };
            if let Some(file) = file {
                *file = take_inherited(&mut received, index);
                continue;
            }
            // A descriptor that is not a TCP socket is not ours to close.
            let Ok(Some(socket)) = received.take_tcp_listener(index) else { continue };
            inherited.put(name, socket);
        }
        inherited
    }

    fn put(&mut self, name: &str, socket: TcpListener) {
        match name {
            GRPC_CONNECTION => self.grpc_connections.push(OwnedFd::from(socket).into()),
            TCP_CONNECTION => self.tcp_connections.push(OwnedFd::from(socket).into()),
            name => self.listeners.push((name.to_owned(), socket)),
        }
    }

    /// Returns all descriptors, with the names that [`Inherited::from_env`] understands.
    pub(super) fn into_named(self) -> Vec<(String, OwnedFd)> {
        let listeners = self.listeners.into_iter().map(|(name, listener)| (name, listener.into()));
        let named = |name: &'static str| move |stream: TcpStream| (name.to_owned(), stream.into());
        let files = [(MEMORY, self.memory), (TICKETS, self.tickets), (STATE, self.state)];
        let files = files.into_iter().filter_map(|(name, file)| Some((name.to_owned(), file?)));
        listeners
            .chain(files)
            .chain(self.grpc_connections.into_iter().map(named(GRPC_CONNECTION)))
            .chain(self.tcp_connections.into_iter().map(named(TCP_CONNECTION)))
            .collect()
    }

    /// Builds the value from the result of [`Inherited::into_named`].
    pub(super) fn from_named(named: Vec<(String, OwnedFd)>) -> Self {
        let mut inherited = Self::default();
        for (name, descriptor) in named {
            match name.as_str() {
                MEMORY => inherited.memory = Some(descriptor),
                TICKETS => inherited.tickets = Some(descriptor),
                STATE => inherited.state = Some(descriptor),
                name => inherited.put(name, descriptor.into()),
            }
        }
        inherited
    }

    /// Returns the listener named `name` on `port` (0 is any port), otherwise one without a known
    /// name on `port`.
    fn take(&mut self, name: &str, port: u16) -> Option<TcpListener> {
        let of_port =
            |listener: &TcpListener| listener.local_addr().is_ok_and(|address| address.port() == port);
        let is_known = |name: &str| [GRPC, TCP, HTTP, ADMIN].contains(&name);
        let found = self
            .listeners
            .iter()
            .position(|(called, listener)| called == name && (port == 0 || of_port(listener)))
            .or_else(|| {
                self.listeners.iter().position(|(called, listener)| !is_known(called) && of_port(listener))
            })?;
        Some(self.listeners.swap_remove(found).1)
    }
}

/// The socket of each listener, and the connections that came with it.
#[derive(Debug)]
pub(super) struct Sockets {
    pub(super) grpc: TcpListener,
    pub(super) http: TcpListener,
    pub(super) tcp: Option<TcpListener>,
    pub(super) admin: Option<TcpListener>,
    pub(super) grpc_connections: Vec<TcpStream>,
    pub(super) tcp_connections: Vec<TcpStream>,
}

impl Sockets {
    /// Takes the listeners that `config` asks for from `inherited`, and binds the rest.
    pub(super) fn open(config: &Config, mut inherited: Inherited) -> anyhow::Result<Self> {
        let mut open = |(name, address): (&str, SocketAddr)| {
            inherited.take(name, address.port()).map_or_else(|| bind(name, address), Ok)
        };
        let ListenerAddresses { grpc, http, tcp, admin } = ListenerAddresses::by(config);
        let (grpc, http) = (open(grpc)?, open(http)?);
        let tcp = tcp.map(&mut open).transpose()?;
        let admin = admin.map(&mut open).transpose()?;
        for (name, listener) in &inherited.listeners {
            let address = listener.local_addr().map(|address| address.to_string()).unwrap_or_default();
            tracing::warn!(name, address, "inherited listener is not configured; closed");
        }
        let Inherited { grpc_connections, tcp_connections, .. } = inherited;
        Ok(Self { grpc, http, tcp, admin, grpc_connections, tcp_connections })
    }

    /// Returns the bound addresses.
    pub(super) fn addresses(&self) -> anyhow::Result<Addresses> {
        let of = |listener: &TcpListener| listener.local_addr().context("a listener has no address");
        Ok(Addresses {
            grpc: of(&self.grpc)?,
            http: of(&self.http)?,
            tcp: self.tcp.as_ref().map(of).transpose()?,
            admin: self.admin.as_ref().map(of).transpose()?,
        })
    }

    /// Duplicates the listeners. A port listens until both are dropped.
    pub(super) fn duplicate(&self) -> io::Result<Inherited> {
        let mut listeners = Vec::new();
        let named = [
            (GRPC, Some(&self.grpc)),
            (HTTP, Some(&self.http)),
            (TCP, self.tcp.as_ref()),
            (ADMIN, self.admin.as_ref()),
        ];
        for (name, listener) in named {
            if let Some(listener) = listener {
                listeners.push((name.to_owned(), listener.try_clone()?));
            }
        }
        Ok(Inherited { listeners, ..Inherited::default() })
    }
}

/// Names and addresses of the listeners in a configuration.
struct ListenerAddresses {
    grpc: (&'static str, SocketAddr),
    http: (&'static str, SocketAddr),
    tcp: Option<(&'static str, SocketAddr)>,
    admin: Option<(&'static str, SocketAddr)>,
}

impl ListenerAddresses {
    fn by(config: &Config) -> Self {
        let (worker, admin) = (&config.worker, &config.admin);
        let at = |name, port| (name, SocketAddr::new(worker.bind_address, port));
        Self {
            grpc: at(GRPC, worker.grpc_port),
            http: at(HTTP, worker.http_port),
            tcp: worker.urpc_port.map(|port| at(TCP, port)),
            admin: admin.port.map(|port| (ADMIN, SocketAddr::new(admin.bind_address, port))),
        }
    }
}

/// Binds new listeners of `config` for a moment. Skips those for which `is_open` returns true.
/// Returns the errors.
pub(super) fn unavailable(config: &Config, is_open: impl Fn(&str, u16) -> bool) -> Vec<anyhow::Error> {
    let ListenerAddresses { grpc, http, tcp, admin } = ListenerAddresses::by(config);
    let wanted = [Some(grpc), Some(http), tcp, admin].into_iter().flatten();
    let new = wanted.filter(|(name, address)| !is_open(name, address.port()));
    new.filter_map(|(name, address)| bind(name, address).err()).collect()
}

/// Returns the listeners with their names, for the service manager's store.
pub(super) fn listeners(inherited: &Inherited) -> impl Iterator<Item = (&str, &TcpListener)> {
    inherited.listeners.iter().map(|(name, listener)| (name.as_str(), listener))
}

/// Converts a listener for tokio.
pub(super) fn accepting(listener: TcpListener) -> io::Result<tokio::net::TcpListener> {
    listener.set_nonblocking(true)?;
    tokio::net::TcpListener::from_std(listener)
}

fn bind(name: &str, address: SocketAddr) -> anyhow::Result<TcpListener> {
    let bound = || {
        let socket = Socket::new(Domain::for_address(address), Type::STREAM.nonblocking().cloexec(), None)?;
        // A restart must not wait until earlier connections time out.
        socket.set_reuse_address(true)?;
        if matches!(address.ip(), IpAddr::V6(any) if any.is_unspecified()) {
            // Clients of both families must be able to connect, whatever the system's default.
            socket.set_only_v6(false)?;
        }
        socket.bind(&address.into())?;
        socket.listen(BACKLOG)?;
        io::Result::Ok(socket.into())
    };
    let key = if name == ADMIN { "admin.port".to_owned() } else { format!("{name}_port") };
    bound().with_context(|| format!("cannot listen on {key} = {address}"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::Machine;

    fn config(grpc: u16, http: u16) -> Config {
        let text = format!(
            "bind_address = \"127.0.0.1\"\ngrpc_port = {grpc}\nhttp_port = {http}\nurpc_port = 0\n\
             [localfile_store]\ndata_paths = [\"/d\"]\n"
        );
        let machine = Machine { memory_bytes: 1 << 30, cores: 2, state_dir: "/nonexistent".into() };
        Config::parse(&text, &HashMap::new(), &machine).unwrap()
    }

    fn port(listener: &TcpListener) -> u16 {
        listener.local_addr().unwrap().port()
    }

    #[test]
    fn listeners_are_found_by_name_or_port_and_survive_a_handover() {
        let first = Sockets::open(&config(0, 0), Inherited::default()).unwrap();
        let (grpc, http) = (port(&first.grpc), port(&first.http));
        let tcp = port(first.tcp.as_ref().unwrap());
        let client = TcpStream::connect(("127.0.0.1", tcp)).unwrap();
        let mut inherited = first.duplicate().unwrap();
        inherited.tcp_connections.push(first.tcp.as_ref().unwrap().accept().unwrap().0);
        drop(first);
        TcpStream::connect(("127.0.0.1", grpc)).unwrap();

        let named = inherited.into_named();
        assert_eq!(named.len(), 4);
        let mut inherited = Inherited::from_named(named);
        // A socket unit without `FileDescriptorName=` passes its sockets under the unit's own name.
        inherited
            .listeners
            .iter_mut()
            .filter(|(name, _)| name == "http")
            .for_each(|(name, _)| *name = "x.socket".into());
        let second = Sockets::open(&config(0, http), inherited).unwrap();
        assert_eq!((port(&second.grpc), port(&second.http)), (grpc, http));
        assert_eq!(port(second.tcp.as_ref().unwrap()), tcp);
        assert_eq!(second.tcp_connections[0].peer_addr().unwrap(), client.local_addr().unwrap());
    }

    #[test]
    fn another_port_in_the_configuration_wins() {
        let first = Sockets::open(&config(0, 0), Inherited::default()).unwrap();
        let taken = port(&first.grpc);
        let inherited = first.duplicate().unwrap();
        drop(first);
        let free = TcpListener::bind("127.0.0.1:0").unwrap();
        let other = port(&free);
        drop(free);
        let second = Sockets::open(&config(other, 0), inherited).unwrap();
        assert_eq!(port(&second.grpc), other);
        TcpStream::connect(("127.0.0.1", taken)).unwrap_err();
    }
}
