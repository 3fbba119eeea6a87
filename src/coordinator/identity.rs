//! Under which address, id and tags the worker is known (docs/protocol.md §8.1, §8.3).
//!
//! Invariant: the id is `<ip>-<grpc>` or `<ip>-<grpc>-<netty>` with an IP literal, because clients split it on `-`. A name
//! is therefore asked for once, at start, and told as the address that it stands for; that of a Service of Kubernetes
//! stays through rescheduling.

use std::fmt;
use std::net::{IpAddr, Ipv4Addr, SocketAddr, UdpSocket};
use std::str::FromStr;
use std::time::Duration;

use nix::ifaddrs::{InterfaceAddress, getifaddrs};
use nix::net::if_::InterfaceFlags;

/// The variable with which Java's server is told its address.
const JAVA_VARIABLE: &str = "RSS_IP";
/// How long a name server may take.
const RESOLVED_WITHIN: Duration = Duration::from_secs(20);
/// As in RFC 1123.
const NAME_CHARS_MAX: usize = 253;
const LABEL_CHARS_MAX: usize = 63;

/// Why the worker has no address to tell.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum AddressError {
    /// The variable of Java's server holds something else.
    #[error("{JAVA_VARIABLE} must be an IP address, not {0:?}")]
    NotAnIp(String),
    /// The name is not known, or nobody answered.
    #[error("WORKER_IP: the name {name} was not resolved: {reason}")]
    Unresolved {
        /// As configured.
        name: String,
        /// What the resolver said.
        reason: String,
    },
    /// Which one the id is made of would be left to chance.
    #[error("WORKER_IP: the name {name} stands for several addresses, {found:?}; name one that has one")]
    Ambiguous {
        /// As configured.
        name: String,
        /// In ascending order.
        found: Vec<IpAddr>,
    },
}

/// What coordinators and clients are told to connect to, as configured.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Advertised {
    /// This address.
    Ip(IpAddr),
    /// The address that this host name stands for when the worker starts.
    Name(String),
}

impl FromStr for Advertised {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let text = text.trim();
        let refused =
            || "an IP address that clients can reach, or a host name that stands for one".to_owned();
        match text.parse::<IpAddr>() {
            Ok(ip) if is_reachable(&ip) => Ok(Self::Ip(ip)),
            Err(_) if is_host_name(text) => Ok(Self::Name(text.to_owned())),
            _ => Err(refused()),
        }
    }
}

impl fmt::Display for Advertised {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Ip(ip) => ip.fmt(f),
            Self::Name(name) => f.write_str(name),
        }
    }
}

/// As in RFC 1123, and not something that was meant to be an IPv4 address.
fn is_host_name(text: &str) -> bool {
    let is_label = |label: &str| {
        let has_plain_chars = label.bytes().all(|byte| byte.is_ascii_alphanumeric() || byte == b'-');
        let dashed = label.starts_with('-') || label.ends_with('-');
        (1..=LABEL_CHARS_MAX).contains(&label.len()) && has_plain_chars && !dashed
    };
    let name = text.strip_suffix('.').unwrap_or(text);
    let last = name.rsplit('.').next().unwrap_or_default();
    name.len() <= NAME_CHARS_MAX
        && name.split('.').all(is_label)
        && !last.bytes().all(|byte| byte.is_ascii_digit())
}

fn is_reachable(ip: &IpAddr) -> bool {
    !ip.is_unspecified() && !ip.is_multicast()
}

/// The address that this worker reports to the cluster: the one that is configured, else that of [`worker_ip`].
///
/// # Errors
/// See [`AddressError`].
pub async fn resolve(advertised: Option<&Advertised>) -> Result<IpAddr, AddressError> {
    let name = match advertised {
        None => return worker_ip(),
        Some(Advertised::Ip(ip)) => return Ok(*ip),
        Some(Advertised::Name(name)) => name,
    };
    let unresolved = |reason: String| AddressError::Unresolved { name: name.clone(), reason };
    let lookup = tokio::net::lookup_host((name.as_str(), 0));
    let found = crate::clock::timeout(RESOLVED_WITHIN, lookup).await;
    let found = found.map_err(|_| unresolved(format!("no answer within {} s", RESOLVED_WITHIN.as_secs())))?;
    let found = found.map_err(|error| unresolved(error.to_string()))?;
    one_of(name, found.map(|address| address.ip()).collect())
}

/// The only IPv4 address; where there is none, the only other one.
fn one_of(name: &str, mut found: Vec<IpAddr>) -> Result<IpAddr, AddressError> {
    found.retain(is_reachable);
    if found.iter().any(IpAddr::is_ipv4) {
        found.retain(IpAddr::is_ipv4);
    }
    found.sort_unstable();
    found.dedup();
    let name = name.to_owned();
    match *found.as_slice() {
        [ip] => Ok(ip),
        [] => {
            Err(AddressError::Unresolved { name, reason: "it has no address that clients can reach".into() })
        }
        _ => Err(AddressError::Ambiguous { name, found }),
    }
}

/// The address of [`JAVA_VARIABLE`], else the best interface's, else the source address of the default route, else
/// 127.0.0.1.
fn worker_ip() -> Result<IpAddr, AddressError> {
    if let Some(ip) = ip_for_java(std::env::var(JAVA_VARIABLE).ok())? {
        return Ok(ip);
    }
    let interfaces = getifaddrs().into_iter().flatten();
    let candidates: Vec<Ipv4Addr> = interfaces.filter_map(|it| candidate(&it)).collect();
    let found = best(&candidates).or_else(route_source);
    if found.is_none() {
        tracing::warn!("no usable network interface found, reporting 127.0.0.1 to the cluster");
    }
    Ok(found.unwrap_or(Ipv4Addr::LOCALHOST).into())
}

fn ip_for_java(value: Option<String>) -> Result<Option<IpAddr>, AddressError> {
    match value.as_deref().map(str::trim) {
        None | Some("") => Ok(None),
        Some(text) => text.parse().map(Some).map_err(|_| AddressError::NotAnIp(text.to_owned())),
    }
}

/// An interface's IPv4 address, as the Java server chooses among them: the interface is up, not loopback, not
/// point-to-point and not virtual (`eth0:1`), and the address has a broadcast address.
fn candidate(interface: &InterfaceAddress) -> Option<Ipv4Addr> {
    let relevant = InterfaceFlags::IFF_UP | InterfaceFlags::IFF_LOOPBACK | InterfaceFlags::IFF_POINTOPOINT;
    let is_real = interface.flags.intersection(relevant) == InterfaceFlags::IFF_UP;
    let is_alias = interface.interface_name.contains(':');
    if !is_real || is_alias || interface.broadcast.is_none() {
        return None;
    }
    Some(interface.address?.as_sockaddr_in()?.ip())
}

/// The first public address, else the first one.
fn best(addresses: &[Ipv4Addr]) -> Option<Ipv4Addr> {
    let mut usable = addresses.iter().copied().filter(is_usable);
    let first = usable.next()?;
    if !first.is_private() {
        return Some(first);
    }
    Some(usable.find(|ip| !ip.is_private()).unwrap_or(first))
}

fn is_usable(ip: &Ipv4Addr) -> bool {
    !(ip.is_loopback() || ip.is_unspecified() || ip.is_link_local() || ip.is_multicast() || ip.is_broadcast())
}

/// The source address that the kernel would choose. Connecting a UDP socket sends nothing; the destination is from
/// the documentation range (RFC 5737), which no host has.
fn route_source() -> Option<Ipv4Addr> {
    let socket = UdpSocket::bind((Ipv4Addr::UNSPECIFIED, 0)).ok()?;
    socket.connect((Ipv4Addr::new(192, 0, 2, 1), 9)).ok()?;
    match socket.local_addr().ok()? {
        SocketAddr::V4(address) if is_usable(address.ip()) => Some(*address.ip()),
        _ => None,
    }
}

/// `<ip>-<grpc>` or `<ip>-<grpc>-<netty>`; ports as bound.
pub fn server_id(ip: IpAddr, grpc_port: u16, netty_port: Option<u16>) -> String {
    match netty_port {
        None => format!("{ip}-{grpc_port}"),
        Some(netty_port) => format!("{ip}-{grpc_port}-{netty_port}"),
    }
}

/// Both protocol versions, both listeners (the second if it is open), then the user's tags; each once.
pub fn tags(netty: bool, user_tags: &[String]) -> Vec<String> {
    let mut tags: Vec<String> = vec!["ss_v4".into(), "ss_v5".into(), "GRPC".into()];
    if netty {
        tags.push("GRPC_NETTY".into());
    }
    for tag in user_tags {
        if !tags.contains(tag) {
            tags.push(tag.clone());
        }
    }
    tags
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn javas_variable_holds_an_ip_literal() {
        let ip = |text: &str| ip_for_java(Some(text.to_owned()));
        assert_eq!(ip(" ::1 "), Ok(Some("::1".parse().unwrap())));
        assert_eq!((ip(""), ip_for_java(None)), (Ok(None), Ok(None)));
        assert!(ip("worker-1.example").unwrap_err().to_string().contains("RSS_IP"));
    }

    #[test]
    fn an_address_or_a_host_name_is_advertised() {
        for name in ["worker-1", "uniffle-worker-0.shuffle.svc", "a.b.", "1st.example"] {
            let advertised: Advertised = format!(" {name} ").parse().unwrap();
            assert_eq!((&advertised, advertised.to_string()), (&Advertised::Name(name.into()), name.into()));
        }
        assert_eq!("::1".parse(), Ok(Advertised::Ip("::1".parse().unwrap())));
        let long_label = "a".repeat(64);
        let long_name = "a.".repeat(128);
        for refused in [
            "",
            "0.0.0.0",
            "224.0.0.1",
            "10.0.0",
            "a_b",
            "-a",
            "a-.b",
            "a..b",
            "a b",
            "a:1",
            &long_label,
            &long_name,
        ] {
            assert!(refused.parse::<Advertised>().is_err(), "{refused:?}");
        }
    }

    #[test]
    fn a_name_stands_for_one_address() {
        let ips = |texts: &[&str]| texts.iter().map(|text| text.parse().unwrap()).collect::<Vec<IpAddr>>();
        let one = |texts: &[&str]| one_of("a-name", ips(texts));
        assert_eq!(one(&["fd00::1", "10.0.0.1", "10.0.0.1"]), Ok([10, 0, 0, 1].into()));
        assert_eq!(one(&["fd00::1", "::"]), Ok("fd00::1".parse().unwrap()));
        let several = one(&["10.0.0.2", "10.0.0.1"]).unwrap_err();
        assert_eq!(
            several,
            AddressError::Ambiguous { name: "a-name".into(), found: ips(&["10.0.0.1", "10.0.0.2"]) }
        );
        assert!(one(&["0.0.0.0"]).unwrap_err().to_string().contains("a-name"));
    }

    #[tokio::test]
    async fn a_name_is_told_as_the_address_that_it_stands_for() {
        let name = |text: &str| Some(Advertised::Name(text.into()));
        assert_eq!(resolve(name("localhost").as_ref()).await, Ok(Ipv4Addr::LOCALHOST.into()));
        // Never registered (RFC 6761).
        let error = resolve(name("worker-0.invalid").as_ref()).await.unwrap_err();
        assert!(error.to_string().contains("worker-0.invalid"), "{error}");
    }

    #[test]
    fn only_real_interfaces_that_are_up_count() {
        let address = |last, name: &str, flags, has_broadcast: bool| InterfaceAddress {
            interface_name: name.to_owned(),
            flags,
            address: Some(std::net::SocketAddrV4::new([10, 0, 0, last].into(), 0).into()),
            netmask: None,
            broadcast: has_broadcast.then(|| std::net::SocketAddrV4::new([10, 0, 0, 255].into(), 0).into()),
            destination: None,
        };
        let up = InterfaceFlags::IFF_UP | InterfaceFlags::IFF_BROADCAST | InterfaceFlags::IFF_MULTICAST;
        let interfaces = [
            address(1, "lo", InterfaceFlags::IFF_UP | InterfaceFlags::IFF_LOOPBACK, true),
            address(2, "eth0:1", up, true),
            address(3, "eth0", up, true),
            address(4, "eth0", up, false),
            address(5, "eth1", InterfaceFlags::IFF_BROADCAST, true),
            address(6, "ppp0", InterfaceFlags::IFF_UP | InterfaceFlags::IFF_POINTOPOINT, true),
            InterfaceAddress { address: None, ..address(7, "eth0", up, true) },
        ];
        let found: Vec<Ipv4Addr> = interfaces.iter().filter_map(candidate).collect();
        assert_eq!(found, [Ipv4Addr::new(10, 0, 0, 3)]);
    }

    #[test]
    fn public_addresses_are_preferred() {
        let ips = |texts: &[&str]| texts.iter().map(|t| t.parse().unwrap()).collect::<Vec<Ipv4Addr>>();
        assert_eq!(best(&ips(&["10.0.0.1", "8.8.4.4", "9.9.9.9"])), Some([8, 8, 4, 4].into()));
        assert_eq!(best(&ips(&["127.0.0.1", "169.254.1.1", "192.168.0.5"])), Some([192, 168, 0, 5].into()));
        assert_eq!(best(&ips(&["127.0.0.1"])), None);
    }

    #[test]
    fn server_ids_split_on_dashes_into_two_or_three_parts() {
        assert_eq!(server_id([10, 0, 0, 1].into(), 21100, None), "10.0.0.1-21100");
        assert_eq!(server_id([10, 0, 0, 1].into(), 21100, Some(21200)), "10.0.0.1-21100-21200");
    }

    #[test]
    fn tags_name_both_versions_and_only_open_listeners() {
        let user = ["ssd".to_owned(), "GRPC".to_owned()];
        assert_eq!(tags(false, &user), ["ss_v4", "ss_v5", "GRPC", "ssd"]);
        assert_eq!(tags(true, &[]), ["ss_v4", "ss_v5", "GRPC", "GRPC_NETTY"]);
    }

    #[test]
    fn this_machine_has_an_address() {
        if std::env::var_os(JAVA_VARIABLE).is_some() {
            return;
        }
        assert!(!worker_ip().unwrap().is_unspecified());
    }
}
