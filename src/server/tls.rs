//! TLS of the gRPC, HTTP and admin listeners and of queries to other workers, with reload of
//! changed files. The raw TCP protocol has no TLS.
//!
//! New certificates apply to later connections; open ones keep theirs. A listener named in
//! `tls.listeners` accepts TLS only. Files are parsed in `listeners::tls`.

use std::collections::BTreeSet;
use std::sync::Arc;

use anyhow::Context as _;
use parking_lot::RwLock;
use uniffle_ctl::{OwnCertificate, Trust};

use crate::config::Config;
use crate::listeners::tls::{TlsAcceptor, TlsListener};
use crate::schema::files;

/// TLS acceptors by listener; `None` means plaintext. Clones share the acceptors and the trust for
/// queries.
#[derive(Debug, Clone)]
pub(super) struct Tls {
    pub(super) grpc: Option<TlsAcceptor>,
    pub(super) http: Option<TlsAcceptor>,
    pub(super) admin: Option<TlsAcceptor>,
    pub(super) worker_trust: WorkerTrust,
}

/// Trust for TLS queries to other workers. Without a CA file the queries are in plaintext. Clones
/// share it.
#[derive(Debug, Clone, Default)]
pub(super) struct WorkerTrust(Arc<RwLock<Option<Trust>>>);

impl WorkerTrust {
    fn load(config: &Config) -> anyhow::Result<Self> {
        Self::check_authorities(config)?;
        let tls = &config.tls;
        let own = tls.cert_file.as_deref().zip(tls.key_file.as_deref());
        let own = own.map(|(cert, key)| OwnCertificate { cert, key });
        let trust = tls.ca_file.as_deref().map(|ca| Trust::load(ca, own)).transpose();
        Ok(Self(Arc::new(RwLock::new(trust.map_err(anyhow::Error::msg)?))))
    }

    fn check_authorities(config: &Config) -> anyhow::Result<()> {
        let Some(path) = &config.tls.ca_file else { return Ok(()) };
        let read = files::read(path, files::PEM_BYTES_MAX);
        read.map(drop).with_context(|| format!("tls.ca_file = {}", path.display()))
    }

    /// Returns the trust from the most recent load.
    pub(super) fn trust(&self) -> Option<Trust> {
        self.0.read().clone()
    }

    /// Returns the keys of the files whose certificates differ in `other`.
    fn different(&self, other: &Self) -> impl Iterator<Item = &'static str> + use<> {
        let (has_other_authorities, has_other_certificate) = match (self.trust(), other.trust()) {
            (None, None) => (false, false),
            (Some(mine), Some(new)) => (!mine.has_authorities_of(&new), !mine.has_certificate_of(&new)),
            (None, Some(_)) | (Some(_), None) => (true, false),
        };
        let keys = [("tls.ca_file", has_other_authorities), ("tls.cert_file", has_other_certificate)];
        keys.into_iter().filter(|(_, is_other)| *is_other).map(|(key, _)| key)
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
            worker_trust: WorkerTrust::load(config)?,
        })
    }

    /// Returns the problems with the files of `[tls]`.
    pub(super) fn problems(config: &Config) -> Vec<anyhow::Error> {
        let listeners = config.tls.files().map(|files| files.problems()).unwrap_or_default();
        let mut problems: Vec<_> = listeners.into_iter().map(anyhow::Error::from).collect();
        let authorities = WorkerTrust::check_authorities(config).err();
        // With problems, only the CA file is checked: the certificate was reported already.
        let trust = if problems.is_empty() { WorkerTrust::load(config).err() } else { authorities };
        problems.extend(trust);
        problems
    }

    /// Uses the certificates of `other` for new connections, of the same listeners and to other
    /// workers.
    pub(super) fn renew(&self, other: &Self) {
        self.pairs(other).for_each(|(mine, new)| mine.renew(new));
        *self.worker_trust.0.write() = other.worker_trust.trust();
    }

    /// Returns the keys of the files whose certificates differ in `other`, for listeners that both
    /// have.
    pub(super) fn different(&self, other: &Self) -> BTreeSet<&'static str> {
        let of_listeners = self.pairs(other).flat_map(|(mine, new)| mine.different(new));
        of_listeners.chain(self.worker_trust.different(&other.worker_trust)).collect()
    }

    fn pairs<'a>(&'a self, other: &'a Self) -> impl Iterator<Item = (&'a TlsAcceptor, &'a TlsAcceptor)> {
        let listeners = [(&self.grpc, &other.grpc), (&self.http, &other.http), (&self.admin, &other.admin)];
        listeners.into_iter().filter_map(|(mine, new)| mine.as_ref().zip(new.as_ref()))
    }
}

#[cfg(test)]
mod tests {
    use std::collections::HashMap;
    use std::path::Path;

    use rcgen::{CertificateParams, KeyPair};

    use super::*;
    use crate::config::Machine;

    fn write(path: &Path, key: &KeyPair) {
        let params = CertificateParams::new(vec!["localhost".to_owned()]).unwrap();
        std::fs::write(path, params.self_signed(key).unwrap().pem()).unwrap();
    }

    /// Regression test: a reload reported `tls.cert_file` whichever file had changed.
    #[test]
    fn changed_certificate_file_is_named() {
        let dir = tempfile::tempdir().unwrap();
        let (path, key) = (|name: &str| dir.path().join(name), KeyPair::generate().unwrap());
        std::fs::write(path("key"), key.serialize_pem()).unwrap();
        let files =
            ["cert_file", "client_ca_file", "ca_file"].map(|name| (format!("tls.{name}"), path(name)));
        let mut text = format!("[tls]\nkey_file = {:?}\nplain_tcp = true\n", path("key"));
        for (name, file) in &files {
            write(file, &key);
            text += &format!("{} = {file:?}\n", name.trim_start_matches("tls."));
        }
        let machine = Machine { memory_bytes: 1 << 30, cores: 2, state_dir: dir.path().to_owned() };
        let config = Config::parse(&text, &HashMap::new(), &machine).unwrap();
        let running = Tls::load(&config).unwrap();
        assert!(running.different(&Tls::load(&config).unwrap()).is_empty());
        for (name, file) in &files {
            write(file, &key);
            let next = Tls::load(&config).unwrap();
            assert_eq!(running.different(&next).into_iter().collect::<Vec<_>>(), [name]);
            running.renew(&next);
        }
        files.iter().for_each(|(_, file)| write(file, &key));
        assert_eq!(running.different(&Tls::load(&config).unwrap()).len(), 3);
    }
}
