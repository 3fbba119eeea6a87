//! What encrypts each listener and what other workers are asked with, and the same again when the files have changed.

use std::sync::Arc;

use anyhow::Context as _;
use parking_lot::RwLock;
use uniffle_ctl::Trust;

use crate::config::Config;
use crate::listeners::tls::{TlsAcceptor, TlsListener};
use crate::schema::files;

/// `None` where nothing does. Clones share the acceptors, and what others are asked with.
#[derive(Debug, Clone)]
pub(super) struct Tls {
    pub(super) grpc: Option<TlsAcceptor>,
    pub(super) http: Option<TlsAcceptor>,
    pub(super) admin: Option<TlsAcceptor>,
    pub(super) others: Others,
}

/// What other workers are asked with over TLS; without an authority they are asked in the clear. Clones share it.
#[derive(Debug, Clone, Default)]
pub(super) struct Others(Arc<RwLock<Option<Trust>>>);

impl Others {
    fn load(config: &Config) -> anyhow::Result<Self> {
        let tls = &config.tls;
        if let Some(path) = &tls.ca_file {
            files::read(path, files::PEM_BYTES_MAX)
                .with_context(|| format!("tls.ca_file = {}", path.display()))?;
        }
        let own = tls.cert_file.as_deref().zip(tls.key_file.as_deref());
        let trust = tls.ca_file.as_deref().map(|ca| Trust::load(ca, own)).transpose();
        Ok(Self(Arc::new(RwLock::new(trust.map_err(anyhow::Error::msg)?))))
    }

    /// As the files were read last.
    pub(super) fn trust(&self) -> Option<Trust> {
        self.0.read().clone()
    }

    fn is_like(&self, other: &Self) -> bool {
        match (self.trust(), other.trust()) {
            (None, None) => true,
            (Some(mine), Some(new)) => mine.is_like(&new),
            (None, Some(_)) | (Some(_), None) => false,
        }
    }
}

impl Tls {
    /// Reads certificates and keys.
    pub(super) fn load(config: &Config) -> anyhow::Result<Self> {
        let of = |listener, protocol: &str| {
            config.tls.of(listener).map(|files| TlsAcceptor::load(&files, protocol)).transpose()
        };
        Ok(Self {
            grpc: of(TlsListener::Grpc, "h2")?,
            http: of(TlsListener::Http, "http/1.1")?,
            admin: of(TlsListener::Admin, "http/1.1")?,
            others: Others::load(config)?,
        })
    }

    /// New connections are made with what `other` has, of the same listeners and to others.
    pub(super) fn renew(&self, other: &Self) {
        self.pairs(other).for_each(|(mine, new)| mine.renew(new));
        *self.others.0.write() = other.others.trust();
    }

    /// Whether `other` has the same certificates, at the same listeners.
    pub(super) fn is_like(&self, other: &Self) -> bool {
        self.others.is_like(&other.others) && self.pairs(other).all(|(mine, new)| mine.is_like(new))
    }

    fn pairs<'a>(&'a self, other: &'a Self) -> impl Iterator<Item = (&'a TlsAcceptor, &'a TlsAcceptor)> {
        let listeners = [(&self.grpc, &other.grpc), (&self.http, &other.http), (&self.admin, &other.admin)];
        listeners.into_iter().filter_map(|(mine, new)| mine.as_ref().zip(new.as_ref()))
    }
}
