//! Address, id and tags of the worker (docs/protocol.md §8.1, §8.3).
//!
//! Invariant: the id is `<ip>-<grpc>` or `<ip>-<grpc>-<netty>` with an IP literal, because clients
//! split it at `-`. A configured name is therefore resolved once, at the start, and its address is
//! announced. The address of a Kubernetes Service is stable across rescheduling.

use std::fmt;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, UdpSocket};
use std::str::FromStr;
use std::time::Duration;

use nix::ifaddrs::{InterfaceAddress, getifaddrs};
use nix::net::if_::InterfaceFlags;

/// The Java server's environment variable with the announced address.
const ADDRESS_VARIABLE: &str = "RSS_IP";
/// Environment variable with the announced address.
const WORKER_VARIABLE: &str = "WORKER_IP";
/// Time limit for resolving a name.
const RESOLVED_WITHIN: Duration = Duration::from_secs(20);
/// Limits of RFC 1123.
const NAME_CHARS_MAX: usize = 253;
const LABEL_CHARS_MAX: usize = 63;

/// Reason why there is no address to announce.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum AddressError {
    /// The Java server's variable is not an IP address.
    #[error("{ADDRESS_VARIABLE} must be an IP address, not {0:?}")]
    NotAnIp(String),
    /// The name is unknown, or the resolver did not answer.
    #[error("WORKER_IP: the name {name} was not resolved: {reason}")]
    Unresolved {
        /// Name as configured.
        name: String,
        /// Reason from the resolver.
        reason: String,
    },
    /// No listener accepts connections to the address.
    #[error(
        "{variable} = {ip} is an address of this machine, but no listener accepts it: bind_address = {bind_address}; \
         set bind_address to it, or to \"::\" for all addresses"
    )]
    NotBound {
        /// Variable that sets the address.
        variable: &'static str,
        /// The address.
        ip: IpAddr,
        /// Listen address as configured.
        bind_address: IpAddr,
    },
    /// The name has several addresses, so the choice for the id would be arbitrary.
    #[error("WORKER_IP: the name {name} has several addresses, {found:?}; use a name with one address")]
    Ambiguous {
        /// Name as configured.
        name: String,
        /// Addresses in ascending order.
        found: Vec<IpAddr>,
    },
}

/// Configured address for coordinators and clients.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Advertised {
    /// An IP address.
    Ip(IpAddr),
    /// A host name, resolved when the worker starts.
    Name(String),
}

impl FromStr for Advertised {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let text = text.trim();
        let refused = || "an IP address that clients can reach, or a host name".to_owned();
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

/// Returns whether `text` is a host name (RFC 1123) and not a malformed IPv4 address.
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

/// Returns the address that this worker announces: the configured one, else the one in
/// [`RSS_IP`](ADDRESS_VARIABLE), else one on which listeners at `bind_address` accept connections.
///
/// # Errors
/// See [`AddressError`].
pub async fn resolve(advertised: Option<&Advertised>, bind_address: IpAddr) -> Result<IpAddr, AddressError> {
    let configured = match advertised {
        Some(Advertised::Name(name)) => Some((WORKER_VARIABLE, look_up(name).await?)),
        advertised => configured_ip(advertised)?,
    };
    let local = local_addresses();
    let Some((variable, ip)) = configured else { return Ok(own_address(bind_address, &local, route_source)) };
    check_bound(variable, ip, bind_address, &local)?;
    Ok(ip)
}

/// Checks a configured address as [`resolve`] does. Looks up no host name.
///
/// # Errors
/// See [`AddressError`].
pub fn check(advertised: Option<&Advertised>, bind_address: IpAddr) -> Result<(), AddressError> {
    let configured = configured_ip(advertised)?;
    configured.map_or(Ok(()), |(variable, ip)| check_bound(variable, ip, bind_address, &local_addresses()))
}

/// Returns the configured address, unless that is a host name, and the variable that names it.
fn configured_ip(advertised: Option<&Advertised>) -> Result<Option<(&'static str, IpAddr)>, AddressError> {
    match advertised {
        Some(Advertised::Ip(ip)) => Ok(Some((WORKER_VARIABLE, *ip))),
        Some(Advertised::Name(_)) => Ok(None),
        None => Ok(ip_for_java(std::env::var(ADDRESS_VARIABLE).ok())?.map(|ip| (ADDRESS_VARIABLE, ip))),
    }
}

/// Refuses an address of this machine on which nothing listens. An address of another machine may
/// be translated to this one, as for a Kubernetes Service.
fn check_bound(
    variable: &'static str,
    ip: IpAddr,
    bind_address: IpAddr,
    local: &[LocalAddress],
) -> Result<(), AddressError> {
    if local.iter().any(|address| address.ip == ip) && !accepts(bind_address, ip) {
        return Err(AddressError::NotBound { variable, ip, bind_address });
    }
    Ok(())
}

/// Returns whether a listener at `bind_address` accepts connections to the local address `ip`.
fn accepts(bind_address: IpAddr, ip: IpAddr) -> bool {
    match bind_address {
        IpAddr::V4(any) if any.is_unspecified() => ip.is_ipv4(),
        // Listeners at `::` are opened for both families.
        IpAddr::V6(any) if any.is_unspecified() => true,
        one => one == ip,
    }
}

async fn look_up(name: &str) -> Result<IpAddr, AddressError> {
    let unresolved = |reason: String| AddressError::Unresolved { name: name.to_owned(), reason };
    let lookup = tokio::net::lookup_host((name, 0));
    let found = uniffle_base::clock::timeout(RESOLVED_WITHIN, lookup).await;
    let found = found.map_err(|_| unresolved(format!("no answer within {} s", RESOLVED_WITHIN.as_secs())))?;
    let found = found.map_err(|error| unresolved(error.to_string()))?;
    one_of(name, found.map(|address| address.ip()).collect())
}

/// Returns the only IPv4 address, or the only IPv6 address if there is no IPv4 address.
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
        [] => Err(AddressError::Unresolved { name, reason: "no address that clients can reach".into() }),
        _ => Err(AddressError::Ambiguous { name, found }),
    }
}

/// Returns the address to announce if none is configured.
///
/// That is `bind_address` unless it is unspecified, else the source address of the default route,
/// else the best interface address, else loopback. IPv4 is preferred to IPv6.
fn own_address(
    bind_address: IpAddr,
    local: &[LocalAddress],
    route_source: impl Fn(AddressFamily) -> Option<IpAddr>,
) -> IpAddr {
    if !bind_address.is_unspecified() {
        return bind_address;
    }
    let families: &[AddressFamily] =
        if bind_address.is_ipv4() { &[AddressFamily::V4] } else { &[AddressFamily::V4, AddressFamily::V6] };
    let found = families.iter().find_map(|family| {
        let candidates: Vec<IpAddr> =
            local.iter().filter(|it| it.is_candidate && family.has(it.ip)).map(|it| it.ip).collect();
        route_source(*family).or_else(|| best(&candidates))
    });
    found.unwrap_or_else(|| {
        // `::1` is missing where IPv6 is disabled.
        let v6 = IpAddr::from(Ipv6Addr::LOCALHOST);
        let has_v6 = accepts(bind_address, v6) && local.iter().any(|it| it.ip == v6);
        let loopback = if has_v6 { v6 } else { Ipv4Addr::LOCALHOST.into() };
        let addresses: Vec<String> =
            local.iter().filter(|it| is_usable(&it.ip)).map(|it| it.ip.to_string()).collect();
        tracing::warn!(
            %bind_address, announced = %loopback, addresses = addresses.join(", "),
            "no address of this machine is usable by other machines and accepted by bind_address; set bind_address \
             (\"::\" for IPv6) or WORKER_IP"
        );
        loopback
    })
}

/// Address family.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum AddressFamily {
    V4,
    V6,
}

impl AddressFamily {
    fn has(self, ip: IpAddr) -> bool {
        (self == Self::V4) == ip.is_ipv4()
    }
}

/// An interface address of this machine.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct LocalAddress {
    ip: IpAddr,
    /// True if other machines may reach the address.
    is_candidate: bool,
}

fn local_addresses() -> Vec<LocalAddress> {
    getifaddrs().into_iter().flatten().filter_map(|interface| local_address(&interface)).collect()
}

fn ip_for_java(value: Option<String>) -> Result<Option<IpAddr>, AddressError> {
    match value.as_deref().map(str::trim) {
        None | Some("") => Ok(None),
        Some(text) => text.parse().map(Some).map_err(|_| AddressError::NotAnIp(text.to_owned())),
    }
}

/// Returns the address of `interface`. As in the Java server, it is a candidate if the interface is
/// up and neither loopback, point-to-point nor virtual (`eth0:1`), and has a broadcast address if
/// IPv4.
fn local_address(interface: &InterfaceAddress) -> Option<LocalAddress> {
    let address = interface.address.as_ref()?;
    let v4 = address.as_sockaddr_in().map(|it| IpAddr::from(it.ip()));
    let ip = v4.or_else(|| address.as_sockaddr_in6().map(|it| it.ip().into()))?;
    let relevant = InterfaceFlags::IFF_UP | InterfaceFlags::IFF_LOOPBACK | InterfaceFlags::IFF_POINTOPOINT;
    let is_real = interface.flags.intersection(relevant) == InterfaceFlags::IFF_UP;
    let is_alias = interface.interface_name.contains(':');
    let has_broadcast = ip.is_ipv6() || interface.broadcast.is_some();
    Some(LocalAddress { ip, is_candidate: is_real && !is_alias && has_broadcast && is_usable(&ip) })
}

/// Returns the first public address, else the first one.
fn best(addresses: &[IpAddr]) -> Option<IpAddr> {
    addresses.iter().find(|ip| !is_private(ip)).or_else(|| addresses.first()).copied()
}

fn is_private(ip: &IpAddr) -> bool {
    match ip {
        IpAddr::V4(ip) => ip.is_private(),
        IpAddr::V6(ip) => ip.is_unique_local(),
    }
}

fn is_usable(ip: &IpAddr) -> bool {
    let is_of_one_link = match ip {
        IpAddr::V4(ip) => ip.is_link_local() || ip.is_broadcast(),
        IpAddr::V6(ip) => ip.is_unicast_link_local(),
    };
    !(ip.is_loopback() || ip.is_unspecified() || ip.is_multicast() || is_of_one_link)
}

/// Returns the source address of the default route. Connecting a UDP socket sends nothing. The
/// destinations are in the documentation ranges (RFC 5737, RFC 3849), which no host uses.
fn route_source(family: AddressFamily) -> Option<IpAddr> {
    let (any, destination): (IpAddr, IpAddr) = match family {
        AddressFamily::V4 => (Ipv4Addr::UNSPECIFIED.into(), Ipv4Addr::new(192, 0, 2, 1).into()),
        AddressFamily::V6 => {
            (Ipv6Addr::UNSPECIFIED.into(), Ipv6Addr::new(0x2001, 0xdb8, 0, 0, 0, 0, 0, 1).into())
        }
    };
    let socket = UdpSocket::bind((any, 0)).ok()?;
    socket.connect((destination, 9)).ok()?;
    Some(socket.local_addr().ok()?.ip()).filter(is_usable)
}

/// Returns the id `<ip>-<grpc>` or `<ip>-<grpc>-<netty>` with the bound ports.
pub fn server_id(ip: IpAddr, grpc_port: u16, netty_port: Option<u16>) -> String {
    match netty_port {
        None => format!("{ip}-{grpc_port}"),
        Some(netty_port) => format!("{ip}-{grpc_port}-{netty_port}"),
    }
}

/// Returns the tags without duplicates: both protocol versions, open listeners, and `user_tags`.
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
    fn address_or_a_host_name_is_advertised() {
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
    fn name_resolves_to_one_address() {
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
    async fn host_name_is_resolved_once() {
        let any = Ipv4Addr::UNSPECIFIED.into();
        let name = |text: &str| Some(Advertised::Name(text.into()));
        assert_eq!(resolve(name("localhost").as_ref(), any).await, Ok(Ipv4Addr::LOCALHOST.into()));
        // Never registered (RFC 6761).
        let error = resolve(name("worker-0.invalid").as_ref(), any).await.unwrap_err();
        assert!(error.to_string().contains("worker-0.invalid"), "{error}");
    }

    #[tokio::test]
    async fn configured_address_without_listener_is_refused() {
        let loopback = Some(Advertised::Ip(Ipv4Addr::LOCALHOST.into()));
        let refused = resolve(loopback.as_ref(), "::1".parse().unwrap()).await.unwrap_err().to_string();
        assert!(
            refused.contains("WORKER_IP = 127.0.0.1") && refused.contains("bind_address = ::1"),
            "{refused}"
        );
        let checked = check(loopback.as_ref(), "::1".parse().unwrap()).unwrap_err().to_string();
        assert_eq!(checked, refused);
        for bound in ["0.0.0.0", "::", "127.0.0.1"] {
            let ip = resolve(loopback.as_ref(), bound.parse().unwrap()).await;
            assert_eq!(ip, Ok(Ipv4Addr::LOCALHOST.into()), "{bound}");
        }
        // An address of no interface, which is translated on the way.
        let elsewhere: IpAddr = "192.0.2.7".parse().unwrap();
        let ip = resolve(Some(&Advertised::Ip(elsewhere)), Ipv4Addr::LOCALHOST.into()).await;
        assert_eq!(ip, Ok(elsewhere));
    }

    #[test]
    fn only_real_interfaces_that_are_up_are_candidates() {
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
        let found: Vec<LocalAddress> = interfaces.iter().filter_map(local_address).collect();
        assert_eq!(found.len(), 6);
        let candidates: Vec<IpAddr> = found.iter().filter(|it| it.is_candidate).map(|it| it.ip).collect();
        assert_eq!(candidates, [IpAddr::from([10, 0, 0, 3])]);
    }

    /// Addresses of the machine and of its default routes, `bind_address`, and announced address.
    type Case<'a> = (&'a [&'a str], &'a [&'a str], &'a str, &'a str);

    #[test]
    fn announced_address_must_be_bound() {
        const BOTH: [&str; 2] = ["fd00:1::5", "10.9.0.5"];
        let cases: [Case<'_>; 13] = [
            (&["fd00:1::5"], &[], "0.0.0.0", "127.0.0.1"),
            (&["fd00:1::5"], &[], "::", "fd00:1::5"),
            (&BOTH, &[], "::", "10.9.0.5"),
            (&BOTH, &["fd00:1::5"], "::", "10.9.0.5"),
            (&BOTH, &[], "fd00:1::5", "fd00:1::5"),
            (&BOTH, &[], "127.0.0.1", "127.0.0.1"),
            (&["10.9.0.5", "10.8.0.5"], &[], "10.8.0.5", "10.8.0.5"),
            (&["fe80::1", "169.254.1.1", "::1"], &[], "::", "::1"),
            // IPv6 is disabled.
            (&["169.254.1.1", "127.0.0.1"], &[], "::", "127.0.0.1"),
            (&["127.0.0.1", "::1"], &[], "0.0.0.0", "127.0.0.1"),
            // A container bridge comes before the interface of the default route.
            (&["172.17.0.1", "192.168.7.5"], &["192.168.7.5"], "0.0.0.0", "192.168.7.5"),
            (&["10.0.0.1", "8.8.4.4", "9.9.9.9"], &[], "0.0.0.0", "8.8.4.4"),
            (&[], &[], "0.0.0.0", "127.0.0.1"),
        ];
        for (addresses, routes, bind_address, announced) in cases {
            let parse = |text: &&str| -> IpAddr { text.parse().unwrap() };
            let local = |ip: IpAddr| LocalAddress { ip, is_candidate: is_usable(&ip) };
            let local: Vec<LocalAddress> = addresses.iter().map(parse).map(local).collect();
            let route = |family: AddressFamily| routes.iter().map(parse).find(|ip| family.has(*ip));
            let found = own_address(parse(&bind_address), &local, route);
            assert_eq!(found, parse(&announced), "addresses {addresses:?}, bind address {bind_address}");
        }
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
        let any = Ipv4Addr::UNSPECIFIED.into();
        assert!(!own_address(any, &local_addresses(), route_source).is_unspecified());
    }
}
