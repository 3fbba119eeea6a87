//! The machine's IPv4 addresses, as the Java server chooses among them (docs/protocol.md §8.1): interface up, not
//! loopback, not point-to-point, not virtual (`eth0:1`), with a broadcast address; in the order of the interfaces.
//!
//! Asks the kernel by rtnetlink, because std has no interface list. Two dumps at start-up, nothing later; whatever
//! goes wrong is `None`, and the caller has another way. Parsing is pure and trusts no length.

use std::collections::HashMap;
use std::net::Ipv4Addr;
use std::time::Duration;

use rustix::net::sockopt::{Timeout, set_socket_timeout};
use rustix::net::{AddressFamily, RecvFlags, SendFlags, SocketFlags, SocketType, recv, send, socket_with};

// linux/rtnetlink.h, linux/netlink.h, linux/if_addr.h, linux/if.h
const RTM_NEWLINK: u16 = 16;
const RTM_GETLINK: u16 = 18;
const RTM_NEWADDR: u16 = 20;
const RTM_GETADDR: u16 = 22;
const NLMSG_ERROR: u16 = 2;
const NLMSG_DONE: u16 = 3;
const NLM_F_REQUEST_DUMP: u16 = 0x301;
const IFA_ADDRESS: u16 = 1;
const IFA_LOCAL: u16 = 2;
const IFA_LABEL: u16 = 3;
const IFA_BROADCAST: u16 = 4;
const IFF_UP: u32 = 0x1;
const IFF_LOOPBACK: u32 = 0x8;
const IFF_POINTOPOINT: u32 = 0x10;

const HEADER_BYTES: usize = 16;
const IFADDRMSG_BYTES: usize = 8;
const AF_INET: u8 = 2;
/// The kernel fills at most 32 KiB per datagram of a dump.
const DATAGRAM_BYTES: usize = 64 << 10;
/// Most datagrams of one dump; thousands of interfaces.
const DATAGRAMS_MAX: usize = 1_000;

/// Usable addresses; `None` if the kernel does not tell.
pub(super) fn usable_ipv4() -> Option<Vec<Ipv4Addr>> {
    let links = dump(RTM_GETLINK, RTM_NEWLINK)?;
    let addresses = dump(RTM_GETADDR, RTM_NEWADDR)?;
    Some(usable(&links, &addresses))
}

fn usable(links: &[Vec<u8>], addresses: &[Vec<u8>]) -> Vec<Ipv4Addr> {
    let flags: HashMap<u32, u32> = links.iter().filter_map(|link| link_flags(link)).collect();
    let on_usable_link = |address: &Address| {
        let flags = flags.get(&address.link).copied().unwrap_or(0);
        flags & (IFF_UP | IFF_LOOPBACK | IFF_POINTOPOINT) == IFF_UP
    };
    addresses
        .iter()
        .filter_map(|message| parse_address(message))
        .filter(|address| on_usable_link(address) && address.has_broadcast && !address.is_alias)
        .map(|address| address.ip)
        .collect()
}

/// One address of one interface.
#[derive(Debug, PartialEq, Eq)]
struct Address {
    link: u32,
    ip: Ipv4Addr,
    has_broadcast: bool,
    is_alias: bool,
}

/// (index, flags) of an `ifinfomsg`.
fn link_flags(message: &[u8]) -> Option<(u32, u32)> {
    Some((u32_at(message, 4)?, u32_at(message, 8)?))
}

/// An `ifaddrmsg` with its attributes.
fn parse_address(message: &[u8]) -> Option<Address> {
    if *message.first()? != AF_INET {
        return None;
    }
    let link = u32_at(message, 4)?;
    let (mut ip, mut local, mut has_broadcast, mut is_alias) = (None, None, false, false);
    let mut rest = message.get(IFADDRMSG_BYTES..)?;
    while let (Some(length), Some(kind)) = (u16_at(rest, 0), u16_at(rest, 2)) {
        let length = usize::from(length);
        let Some(value) = rest.get(4..length) else { break };
        match kind {
            IFA_ADDRESS => ip = ipv4(value),
            IFA_LOCAL => local = ipv4(value),
            IFA_BROADCAST => has_broadcast = true,
            IFA_LABEL => is_alias = value.contains(&b':'),
            _ => {}
        }
        rest = rest.get(length.next_multiple_of(4)..).unwrap_or_default();
    }
    Some(Address { link, ip: local.or(ip)?, has_broadcast, is_alias })
}

fn ipv4(value: &[u8]) -> Option<Ipv4Addr> {
    <[u8; 4]>::try_from(value).ok().map(Ipv4Addr::from)
}

/// The payloads of all messages of type `answer` that the kernel dumps for `request`.
fn dump(request: u16, answer: u16) -> Option<Vec<Vec<u8>>> {
    let socket = socket_with(AddressFamily::NETLINK, SocketType::RAW, SocketFlags::CLOEXEC, None).ok()?;
    set_socket_timeout(&socket, Timeout::Recv, Some(Duration::from_secs(1))).ok()?;
    // nlmsghdr, then a zeroed rtgenmsg that is as long as the longer of the two real ones (ifinfomsg).
    let mut message = [0u8; HEADER_BYTES + 16];
    let length = u32::try_from(message.len()).ok()?;
    message[0..4].copy_from_slice(&length.to_ne_bytes());
    message[4..6].copy_from_slice(&request.to_ne_bytes());
    message[6..8].copy_from_slice(&NLM_F_REQUEST_DUMP.to_ne_bytes());
    send(&socket, &message, SendFlags::empty()).ok()?;

    let mut payloads = Vec::new();
    let mut datagram = vec![0u8; DATAGRAM_BYTES];
    for _ in 0..DATAGRAMS_MAX {
        let (received, _) = recv(&socket, datagram.as_mut_slice(), RecvFlags::empty()).ok()?;
        if take_messages(&datagram[..received], answer, &mut payloads)? == Dump::Done {
            return Some(payloads);
        }
    }
    None
}

#[derive(Debug, PartialEq, Eq)]
enum Dump {
    Done,
    More,
}

/// Takes a datagram apart; `None` if the kernel reports an error or the datagram makes no sense.
fn take_messages(mut datagram: &[u8], answer: u16, payloads: &mut Vec<Vec<u8>>) -> Option<Dump> {
    if datagram.is_empty() {
        return None;
    }
    while !datagram.is_empty() {
        let length = usize::try_from(u32_at(datagram, 0)?).ok()?;
        let kind = u16_at(datagram, 4)?;
        let payload = datagram.get(HEADER_BYTES..length)?;
        match kind {
            NLMSG_DONE => return Some(Dump::Done),
            NLMSG_ERROR => return None,
            _ if kind == answer => payloads.push(payload.to_vec()),
            _ => {}
        }
        datagram = datagram.get(length.next_multiple_of(4)..).unwrap_or_default();
    }
    Some(Dump::More)
}

fn u16_at(bytes: &[u8], at: usize) -> Option<u16> {
    Some(u16::from_ne_bytes(bytes.get(at..at + 2)?.try_into().ok()?))
}

fn u32_at(bytes: &[u8], at: usize) -> Option<u32> {
    Some(u32::from_ne_bytes(bytes.get(at..at + 4)?.try_into().ok()?))
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn link(index: u32, flags: u32) -> Vec<u8> {
        [&[0u8; 4][..], &index.to_ne_bytes(), &flags.to_ne_bytes(), &[0; 4]].concat()
    }

    fn attribute(kind: u16, value: &[u8]) -> Vec<u8> {
        let length = u16::try_from(4 + value.len()).unwrap();
        let mut bytes = [&length.to_ne_bytes()[..], &kind.to_ne_bytes(), value].concat();
        bytes.resize(bytes.len().next_multiple_of(4), 0);
        bytes
    }

    fn address(link: u32, ip: [u8; 4], label: &str, broadcast: bool) -> Vec<u8> {
        let mut bytes = [&[AF_INET, 24, 0, 0][..], &link.to_ne_bytes()].concat();
        bytes.extend(attribute(IFA_LOCAL, &ip));
        if broadcast {
            bytes.extend(attribute(IFA_BROADCAST, &[10, 0, 0, 255]));
        }
        bytes.extend(attribute(IFA_LABEL, label.as_bytes()));
        bytes
    }

    #[test]
    fn only_real_interfaces_that_are_up_count() {
        let links = [
            link(1, IFF_UP | IFF_LOOPBACK),
            link(2, IFF_UP | 0x1000),
            link(3, 0),
            link(4, IFF_UP | IFF_POINTOPOINT),
        ];
        let addresses = [
            address(1, [127, 0, 0, 1], "lo", true),
            address(2, [10, 0, 0, 2], "eth0:1", true),
            address(2, [10, 0, 0, 3], "eth0", true),
            address(2, [10, 0, 0, 4], "eth0", false),
            address(3, [10, 0, 0, 5], "eth1", true),
            address(4, [10, 0, 0, 6], "ppp0", true),
            address(9, [10, 0, 0, 7], "gone", true),
        ];
        assert_eq!(usable(&links, &addresses), [Ipv4Addr::new(10, 0, 0, 3)]);
    }

    #[test]
    fn this_kernel_dumps_links_when_it_speaks_netlink() {
        // Sandboxes without rtnetlink exist; where it answers, the loopback interface is in the answer.
        if let Some(links) = dump(RTM_GETLINK, RTM_NEWLINK) {
            let flags: Vec<u32> = links.iter().filter_map(|link| link_flags(link)).map(|(_, f)| f).collect();
            assert!(flags.iter().any(|flags| flags & IFF_LOOPBACK != 0), "{flags:?}");
        }
    }

    proptest! {
        #[test]
        fn no_bytes_make_the_parser_panic(bytes in proptest::collection::vec(any::<u8>(), 0..200)) {
            let mut payloads = Vec::new();
            let _ = take_messages(&bytes, RTM_NEWADDR, &mut payloads);
            let _ = parse_address(&bytes);
            let mut inet = bytes.clone();
            if let Some(first) = inet.first_mut() {
                *first = AF_INET;
            }
            let _ = parse_address(&inet);
            let _ = link_flags(&bytes);
        }
    }
}
