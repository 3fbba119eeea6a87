//! What encrypts each door, and the same again when the files have changed.

use crate::config::{Config, TlsDoor};
use crate::tls::{TlsAcceptor, TlsError};

/// `None` where nothing does. Clones share the acceptors.
#[derive(Debug, Clone)]
pub(super) struct Tls {
    pub(super) grpc: Option<TlsAcceptor>,
    pub(super) http: Option<TlsAcceptor>,
    pub(super) admin: Option<TlsAcceptor>,
}

impl Tls {
    /// Reads certificate and key.
    pub(super) fn load(config: &Config) -> Result<Self, TlsError> {
        let of = |door, protocol: &str| {
            config.tls.of(door).map(|files| TlsAcceptor::load(files, protocol)).transpose()
        };
        Ok(Self {
            grpc: of(TlsDoor::Grpc, "h2")?,
            http: of(TlsDoor::Http, "http/1.1")?,
            admin: of(TlsDoor::Admin, "http/1.1")?,
        })
    }

    /// New connections are made with what `other` has, of the same doors.
    pub(super) fn renew(&self, other: &Self) {
        self.pairs(other).for_each(|(mine, new)| mine.renew(new));
    }

    /// Whether `other` has the same certificates at the same doors.
    pub(super) fn is_like(&self, other: &Self) -> bool {
        self.pairs(other).all(|(mine, new)| mine.is_like(new))
    }

    fn pairs<'a>(&'a self, other: &'a Self) -> impl Iterator<Item = (&'a TlsAcceptor, &'a TlsAcceptor)> {
        let doors = [(&self.grpc, &other.grpc), (&self.http, &other.http), (&self.admin, &other.admin)];
        doors.into_iter().filter_map(|(mine, new)| mine.as_ref().zip(new.as_ref()))
    }
}
