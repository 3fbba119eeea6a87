//! Under which address, id and tags the worker is known (docs/protocol.md §8.1, §8.3).
//!
//! Pure, but for [`worker_ip`], which asks the environment and the kernel once at start-up. Invariant: the id is
//! `<ip>-<grpc>` or `<ip>-<grpc>-<netty>` with an IP literal, because clients split it on `-`.

use std::net::{IpAddr, Ipv4Addr, SocketAddr, UdpSocket};

use nix::ifaddrs::{InterfaceAddress, getifaddrs};
use nix::net::if_::InterfaceFlags;

/// Environment variables that fix the address, in order.
pub const IP_VARIABLES: [&str; 2] = ["WORKER_IP", "RSS_IP"];

/// A variable of the environment that should hold an address and does not.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{variable} must be an IP address, not {value:?}")]
pub struct InvalidIp {
    /// Name of the variable.
    pub variable: &'static str,
    /// What it holds.
    pub value: String,
}

/// The address that this worker reports to the cluster: the environment's, else the best interface's, else the source
/// address of the default route, else 127.0.0.1.
///
/// # Errors
/// When the environment names something that is not an IP literal. A host name may hold a `-`, which would break the
/// server id, so it is refused and not resolved.
pub fn worker_ip() -> Result<IpAddr, InvalidIp> {
    if let Some(ip) = ip_from_environment(|variable| std::env::var(variable).ok())? {
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

/// The first of [`IP_VARIABLES`] that is set and not empty.
///
/// # Errors
/// When it is not an IP literal.
pub fn ip_from_environment(
    lookup: impl Fn(&'static str) -> Option<String>,
) -> Result<Option<IpAddr>, InvalidIp> {
    for variable in IP_VARIABLES {
        let Some(value) = lookup(variable).filter(|value| !value.trim().is_empty()) else { continue };
        let ip = value.trim().parse().map_err(|_| InvalidIp { variable, value })?;
        return Ok(Some(ip));
    }
    Ok(None)
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

    fn env(pairs: &'static [(&'static str, &'static str)]) -> impl Fn(&'static str) -> Option<String> {
        move |name| pairs.iter().find(|(known, _)| *known == name).map(|(_, value)| (*value).to_owned())
    }

    #[test]
    fn environment_must_hold_ip_literals() {
        let both = env(&[("RSS_IP", "10.0.0.2"), ("WORKER_IP", "10.0.0.1")]);
        assert_eq!(ip_from_environment(both), Ok(Some([10, 0, 0, 1].into())));
        assert_eq!(ip_from_environment(env(&[("RSS_IP", " ::1 ")])), Ok(Some("::1".parse().unwrap())));
        assert_eq!(ip_from_environment(env(&[("WORKER_IP", "")])), Ok(None));
        let error = ip_from_environment(env(&[("WORKER_IP", "worker-1.example")])).unwrap_err();
        assert!(error.to_string().contains("WORKER_IP"), "{error}");
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
        if std::env::vars().any(|(name, _)| IP_VARIABLES.contains(&name.as_str())) {
            return;
        }
        assert!(!worker_ip().unwrap().is_unspecified());
    }
}
