//! Networks in CIDR notation (`address/prefix`), for lists of machines whose workers may join.
//!
//! Invariant: comparisons are between canonical addresses. A network of IPv4-mapped IPv6 addresses
//! becomes an IPv4 network, and the caller of [`Network::contains`] must pass a canonical address.

use std::fmt;
use std::net::IpAddr;

use super::kind::{Kind, parsed};

/// Leading bits of an IPv4-mapped IPv6 address, `::ffff:10.0.0.1`.
const MAPPED_BITS: u32 = 96;

/// All addresses with the same prefix.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Network {
    address: IpAddr,
    prefix: u32,
}

impl Network {
    /// Parses `10.0.0.0/8`, `fd00::/8`, or a single address.
    ///
    /// # Errors
    /// A description of the allowed values.
    pub fn parse(text: &str) -> Result<Self, String> {
        let allowed = || "networks such as \"10.0.0.0/8\" or \"fd00::/8\", or addresses".to_owned();
        let (address, prefix) = match text.split_once('/') {
            Some((address, prefix)) => (address, Some(prefix)),
            None => (text, None),
        };
        let address: IpAddr = address.parse().map_err(|_| allowed())?;
        let prefix =
            prefix.map_or(Ok(address_bits(address)), |prefix| prefix.parse().map_err(|_| allowed()))?;
        let host_bits = address_bits(address).checked_sub(prefix).ok_or_else(allowed)?;
        // 10.1.2.3/8 is more likely a mistake than a way to write 10.0.0.0/8.
        if to_u128(address).trailing_zeros() < host_bits {
            return Err(format!("{}; all bits after the prefix must be 0", allowed()));
        }
        // `contains` compares canonical addresses, so a mapped network must become an IPv4 network.
        Ok(match (address.to_canonical(), prefix.checked_sub(MAPPED_BITS)) {
            (mapped @ IpAddr::V4(_), Some(prefix)) if address.is_ipv6() => Self { address: mapped, prefix },
            _ => Self { address, prefix },
        })
    }

    /// Returns whether the network contains `address`, which must be canonical (not IPv4-mapped).
    pub fn contains(&self, address: IpAddr) -> bool {
        let difference = to_u128(address) ^ to_u128(self.address);
        let host_bits = address_bits(self.address) - self.prefix;
        address.is_ipv4() == self.address.is_ipv4() && difference.checked_shr(host_bits).unwrap_or(0) == 0
    }
}

fn to_u128(address: IpAddr) -> u128 {
    match address {
        IpAddr::V4(address) => u128::from(address.to_bits()),
        IpAddr::V6(address) => address.to_bits(),
    }
}

fn address_bits(address: IpAddr) -> u32 {
    if address.is_ipv4() { 32 } else { 128 }
}

impl fmt::Display for Network {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}", self.address, self.prefix)
    }
}

pub fn network() -> Kind<Network> {
    parsed("a network such as 10.0.0.0/8", Network::parse)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn invalid_network_is_refused() {
        for text in
            ["", "10.0.0.0/33", "10.0.0.0/-1", "10.0.0/8", "host/8", "10.1.0.0/8", "fd00::/129", "::1/0"]
        {
            assert!(Network::parse(text).is_err(), "{text}");
        }
        assert!(Network::parse("0.0.0.0/0").unwrap().contains("10.1.2.3".parse().unwrap()));
        assert!(!Network::parse("0.0.0.0/0").unwrap().contains("::1".parse().unwrap()));
        let mapped = ["::ffff:10.0.0.0/104", "::ffff:10.0.0.1"].map(|text| Network::parse(text).unwrap());
        assert_eq!(mapped.map(|network| network.to_string()), ["10.0.0.0/8", "10.0.0.1/32"]);
        assert_eq!(Network::parse("10.0.0.1").unwrap().to_string(), "10.0.0.1/32");
        let private = Network::parse("fd00::/8").unwrap();
        assert!(
            private.contains("fdff::1".parse().unwrap()) && !private.contains("fe80::1".parse().unwrap())
        );
    }

    proptest! {
        #[test]
        fn address_matches_networks_by_prefix(address: u32, other: u32, prefix in 0u32..=32) {
            let mask = u32::MAX.checked_shl(32 - prefix).unwrap_or(0);
            let text = format!("{}/{prefix}", IpAddr::V4((address & mask).into()));
            let network = Network::parse(&text).unwrap();
            prop_assert_eq!(network.to_string(), text);
            prop_assert!(network.contains(IpAddr::V4(address.into())));
            prop_assert_eq!(network.contains(IpAddr::V4(other.into())), (address ^ other) & mask == 0);
        }
    }
}
