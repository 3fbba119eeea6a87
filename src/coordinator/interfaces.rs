//! The machine's IPv4 addresses, in the order of its interfaces. `None` = the kernel does not tell.

use std::net::Ipv4Addr;

pub(super) fn usable_ipv4() -> Option<Vec<Ipv4Addr>> {
    None
}
