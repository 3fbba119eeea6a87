//! What encrypts each listener, and the same again when the files have changed.

use crate::config::Config;
use crate::listeners::tls::{TlsAcceptor, TlsError, TlsListener};

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
        let of = |listener, protocol: &str| {
            config.tls.of(listener).map(|files| TlsAcceptor::load(&files, protocol)).transpose()
        };
        Ok(Self {
            grpc: of(TlsListener::Grpc, "h2")?,
            http: of(TlsListener::Http, "http/1.1")?,
            admin: of(TlsListener::Admin, "http/1.1")?,
        })
    }

    /// New connections are made with what `other` has, of the same listeners.
    pub(super) fn renew(&self, other: &Self) {
        self.pairs(other).for_each(|(mine, new)| mine.renew(new));
    }

    /// Whether `other` has the same certificates at the same listeners.
    pub(super) fn is_like(&self, other: &Self) -> bool {
        self.pairs(other).all(|(mine, new)| mine.is_like(new))
    }

    fn pairs<'a>(&'a self, other: &'a Self) -> impl Iterator<Item = (&'a TlsAcceptor, &'a TlsAcceptor)> {
        let listeners = [(&self.grpc, &other.grpc), (&self.http, &other.http), (&self.admin, &other.admin)];
        listeners.into_iter().filter_map(|(mine, new)| mine.as_ref().zip(new.as_ref()))
    }
}
