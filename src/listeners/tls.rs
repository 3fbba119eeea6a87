//! TLS of listeners: builds an acceptor from files.
//!
//! Certificates and keys are PEM files. An error names its configuration key and path. Versions and
//! ciphers are the defaults of rustls (1.2 and 1.3, *ring*). New files can replace the old ones for
//! later connects. Authorization is not decided here: a client certificate admits to the listener
//! and nothing more.

use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use parking_lot::RwLock;
use tokio::net::TcpStream;
use tokio_rustls::rustls::crypto::ring;
use tokio_rustls::rustls::pki_types::pem::PemObject as _;
use tokio_rustls::rustls::pki_types::{CertificateDer, PrivateKeyDer};
use tokio_rustls::rustls::server::WebPkiClientVerifier;
use tokio_rustls::rustls::{RootCertStore, ServerConfig};
use tokio_rustls::server::TlsStream;

use crate::schema::kind::{Word as _, flag, list, optional, path, word};
use crate::schema::{files, section, words};

/// Maximum size of the certificate chain sent to each client in the handshake. By default, JSSE
/// clients refuse a chain of more than 32 KiB, and OpenSSL's one of more than 100 KiB.
const CHAIN_BYTES_MAX: usize = 64 << 10;

/// Maximum size of all authority names sent to a client. If they are larger, no names are sent, and
/// the client presents any certificate it has. Their field holds 64 KiB (RFC 8446 §4.2.4).
const HINTS_BYTES_MAX: usize = 16 << 10;

/// Overhead of each name: its length and its type.
const HINT_BYTES: usize = 6;

/// Paths of certificate and keys.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TlsFiles {
    /// `tls.cert_file`: the certificate, then its chain.
    pub cert: PathBuf,
    /// `tls.key_file`
    pub key: PathBuf,
    /// `tls.client_ca_file`: authorities that must have signed a client's certificate. If `None`,
    /// clients need no certificate.
    pub client_ca: Option<PathBuf>,
}

impl TlsFiles {
    /// Returns a problem for each file that cannot be used. The files are compared with each other
    /// only if all can be used.
    pub fn problems(&self) -> Vec<TlsError> {
        let authorities = self.client_ca.as_deref().map(|path| certificates("tls.client_ca_file", path));
        let files =
            [chain(&self.cert).err(), private_key(&self.key).err(), authorities.and_then(Result::err)];
        let problems: Vec<_> = files.into_iter().flatten().collect();
        match problems.is_empty() {
            true => TlsAcceptor::load(self, "h2").err().into_iter().collect(),
            false => problems,
        }
    }
}

words! {
    /// A listener that can be encrypted.
    pub enum TlsListener {
        /// gRPC, with the embedded coordinator.
        Grpc = "grpc",
        /// Metrics, health, status.
        Http = "http",
        /// Administration.
        Admin = "admin",
    }
}

section! {
    /// Certificates, and the listeners that use TLS.
    #[table(
        "tls",
        "TLS, if a certificate is set.\n\
         Changed files are read again, and new connections use them. A file may have up to 1 MiB.\n\
         Callers receive the names of the authorities in client_ca_file, unless they exceed 16 \
         KiB.\n\
         With ca_file, this worker presents cert_file to other workers that request a \
         certificate. Certificates of other workers must be valid for their announced addresses."
    )]
    pub struct TlsConfig {
        /// PEM file with the certificate and its chain, 64 KiB of certificates at most.
        #[key("tls.cert_file", optional(path()), NextUse, example "\"/etc/uniffle-worker/tls.crt\"")]
        pub cert_file: Option<PathBuf> = None,
        /// PEM file with the private key.
        #[key("tls.key_file", optional(path()), NextUse, example "\"/etc/uniffle-worker/tls.key\"")]
        pub key_file: Option<PathBuf> = None,
        /// PEM file of authorities; callers must present a certificate signed by one of them.
        #[key("tls.client_ca_file", optional(path()), NextUse, example "\"/etc/uniffle-worker/clients.crt\"")]
        pub client_ca_file: Option<PathBuf> = None,
        /// PEM file of authorities for other workers' HTTP listeners, which are then queried over
        /// TLS. Default: none; they are queried without encryption.
        #[key("tls.ca_file", optional(path()), NextUse, example "\"/etc/uniffle-worker/ca.crt\"")]
        pub ca_file: Option<PathBuf> = None,
        /// Listeners that accept TLS only. The raw TCP protocol has no TLS.
        #[key("tls.listeners" or "tls.doors", list(3, word()), Restart)]
        pub listeners: Vec<TlsListener> = TlsListener::ALL.to_vec(),
        /// Allow urpc_port, which requests no certificate, although client_ca_file is set. Default:
        /// false.
        #[key("tls.plain_tcp", flag(), Restart, example "true")]
        pub plain_tcp: bool = false,
    }
}

impl TlsConfig {
    /// Returns the files, if TLS is configured.
    pub fn files(&self) -> Option<TlsFiles> {
        let (cert, key) = self.cert_file.clone().zip(self.key_file.clone())?;
        Some(TlsFiles { cert, key, client_ca: self.client_ca_file.clone() })
    }

    /// Returns whether `urpc_port` must be unset: gRPC requires client certificates, and
    /// `plain_tcp` does not allow a port without them.
    pub fn forbids_plain_tcp(&self) -> bool {
        let asks = self.client_ca_file.is_some() && self.listeners.contains(&TlsListener::Grpc);
        asks && !self.plain_tcp
    }

    /// Returns the files of `listener`, if it uses TLS.
    pub fn of(&self, listener: TlsListener) -> Option<TlsFiles> {
        self.files().filter(|_| self.listeners.contains(&listener))
    }
}

/// Reason why TLS cannot be set up.
#[derive(Debug, thiserror::Error)]
#[error("{key} = {path}: {reason}")]
pub struct TlsError {
    key: &'static str,
    path: String,
    reason: String,
}

impl TlsError {
    fn new(key: &'static str, path: &Path, reason: impl ToString) -> Self {
        Self { key, path: path.display().to_string(), reason: reason.to_string() }
    }
}

/// Accepts TLS streams. Clones share the loaded files.
#[derive(Clone)]
pub struct TlsAcceptor(Arc<RwLock<Arc<LoadedFiles>>>);

/// Content of the files.
struct LoadedFiles {
    config: Arc<ServerConfig>,
    /// The chain and the clients' authorities, kept to detect changes of the files.
    chain: Vec<CertificateDer<'static>>,
    authorities: Vec<CertificateDer<'static>>,
}

impl std::fmt::Debug for TlsAcceptor {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("TlsAcceptor")
    }
}

impl TlsAcceptor {
    /// Reads the files. `protocol` is the ALPN name of the protocol inside TLS.
    ///
    /// # Errors
    /// [`TlsError`]: a file cannot be read, has nothing of its kind, or does not match the others.
    pub fn load(files: &TlsFiles, protocol: &str) -> Result<Self, TlsError> {
        let provider = Arc::new(ring::default_provider());
        let chain = chain(&files.cert)?;
        let key = private_key(&files.key)?;
        let builder = ServerConfig::builder_with_provider(Arc::clone(&provider))
            .with_safe_default_protocol_versions()
            .map_err(|error| TlsError::new("tls.cert_file", &files.cert, error))?;
        let mut authorities = Vec::new();
        let builder = match &files.client_ca {
            None => builder.with_no_client_auth(),
            Some(path) => {
                let wrong =
                    |error: &dyn ToString| TlsError::new("tls.client_ca_file", path, error.to_string());
                let mut roots = RootCertStore::empty();
                authorities = certificates("tls.client_ca_file", path)?;
                for authority in &authorities {
                    roots.add(authority.clone()).map_err(|error| wrong(&error))?;
                }
                let hints: usize = roots.roots.iter().map(|root| HINT_BYTES + root.subject.len()).sum();
                let verifier = WebPkiClientVerifier::builder_with_provider(Arc::new(roots), provider);
                let verifier =
                    if hints > HINTS_BYTES_MAX { verifier.clear_root_hint_subjects() } else { verifier };
                builder.with_client_cert_verifier(verifier.build().map_err(|error| wrong(&error))?)
            }
        };
        let mut config = builder.with_single_cert(chain.clone(), key).map_err(|error| {
            let reason = format!("does not match tls.cert_file: {error}");
            TlsError::new("tls.key_file", &files.key, reason)
        })?;
        config.alpn_protocols = vec![protocol.as_bytes().to_vec()];
        let loaded = LoadedFiles { config: Arc::new(config), chain, authorities };
        Ok(Self(Arc::new(RwLock::new(Arc::new(loaded)))))
    }

    /// Uses the files of `other` for new connections.
    pub fn renew(&self, other: &Self) {
        let new = Arc::clone(&other.0.read());
        *self.0.write() = new;
    }

    /// Returns the configuration keys of the files whose certificates differ in `other`.
    pub fn different(&self, other: &Self) -> impl Iterator<Item = &'static str> + use<> {
        let (mine, new) = (Arc::clone(&self.0.read()), Arc::clone(&other.0.read()));
        let keys = [
            ("tls.cert_file", mine.chain != new.chain),
            ("tls.client_ca_file", mine.authorities != new.authorities),
        ];
        keys.into_iter().filter(|(_, is_other)| *is_other).map(|(key, _)| key)
    }

    /// Performs the handshake with a client. The caller limits its time.
    ///
    /// # Errors
    /// The handshake fails.
    pub async fn accept(&self, socket: TcpStream) -> io::Result<TlsStream<TcpStream>> {
        let config = Arc::clone(&self.0.read().config);
        tokio_rustls::TlsAcceptor::from(config).accept(socket).await
    }
}

fn read(key: &'static str, path: &Path) -> Result<Vec<u8>, TlsError> {
    files::read(path, files::PEM_BYTES_MAX).map_err(|error| TlsError::new(key, path, error))
}

fn private_key(path: &Path) -> Result<PrivateKeyDer<'static>, TlsError> {
    const KEY: &str = "tls.key_file";
    let key = PrivateKeyDer::from_pem_slice(&read(KEY, path)?);
    key.map_err(|error| TlsError::new(KEY, path, format!("no private key: {error}")))
}

/// Reads the certificate chain that clients receive.
fn chain(path: &Path) -> Result<Vec<CertificateDer<'static>>, TlsError> {
    const KEY: &str = "tls.cert_file";
    let chain = certificates(KEY, path)?;
    let bytes: usize = chain.iter().map(|certificate| certificate.len()).sum();
    if bytes > CHAIN_BYTES_MAX {
        let reason = format!("certificate chain has {bytes} bytes, the limit is {CHAIN_BYTES_MAX}");
        return Err(TlsError::new(KEY, path, reason));
    }
    Ok(chain)
}

fn certificates(key: &'static str, path: &Path) -> Result<Vec<CertificateDer<'static>>, TlsError> {
    let wrong = |reason: &dyn ToString| TlsError::new(key, path, reason.to_string());
    let found = CertificateDer::pem_slice_iter(&read(key, path)?).collect::<Result<Vec<_>, _>>();
    let certificates = found.map_err(|error| wrong(&error))?;
    if certificates.is_empty() {
        return Err(wrong(&"file contains no certificate"));
    }
    Ok(certificates)
}

#[cfg(test)]
mod tests {
    use rcgen::{CertificateParams, DnType, KeyPair};
    use tokio::net::TcpListener;
    use tokio_rustls::TlsConnector;
    use tokio_rustls::rustls::ClientConfig;
    use tokio_rustls::rustls::pki_types::ServerName;

    use super::*;

    struct Files {
        dir: tempfile::TempDir,
        key: KeyPair,
    }

    impl Files {
        fn new() -> Self {
            let files = Self { dir: tempfile::tempdir().unwrap(), key: KeyPair::generate().unwrap() };
            std::fs::write(files.path("key.pem"), files.key.serialize_pem()).unwrap();
            files
        }

        fn path(&self, name: &str) -> PathBuf {
            self.dir.path().join(name)
        }

        /// Writes `count` certificates, each with a name of `name_bytes` bytes.
        fn write(&self, name: &str, count: usize, name_bytes: usize) {
            let pem = (0..count).map(|number| {
                let mut params = CertificateParams::new(vec!["localhost".to_owned()]).unwrap();
                let organization = format!("{number:0name_bytes$}");
                params.distinguished_name.push(DnType::OrganizationName, organization);
                params.self_signed(&self.key).unwrap().pem()
            });
            std::fs::write(self.path(name), pem.collect::<String>()).unwrap();
        }

        fn load(&self, client_ca: Option<&str>) -> Result<TlsAcceptor, TlsError> {
            let client_ca = client_ca.map(|name| self.path(name));
            let files = TlsFiles { cert: self.path("cert.pem"), key: self.path("key.pem"), client_ca };
            TlsAcceptor::load(&files, "h2")
        }

        /// Returns the error for a client without a certificate.
        async fn refusal(&self, acceptor: &TlsAcceptor) -> io::Error {
            let mut roots = RootCertStore::empty();
            let pem = std::fs::read(self.path("cert.pem")).unwrap();
            roots.add(CertificateDer::from_pem_slice(&pem).unwrap()).unwrap();
            let config = ClientConfig::builder_with_provider(Arc::new(ring::default_provider()))
                .with_safe_default_protocol_versions()
                .unwrap()
                .with_root_certificates(roots)
                .with_no_client_auth();
            let listener = TcpListener::bind(("127.0.0.1", 0)).await.unwrap();
            let address = listener.local_addr().unwrap();
            let connect = async {
                let socket = TcpStream::connect(address).await.unwrap();
                let name = ServerName::try_from("localhost").unwrap();
                let _connected = TlsConnector::from(Arc::new(config)).connect(name, socket).await;
            };
            let accept = async { acceptor.accept(listener.accept().await.unwrap().0).await };
            tokio::join!(connect, accept).1.unwrap_err()
        }
    }

    /// Regression test: with names that filled the field of 64 KiB, any connect made rustls abort
    /// the process.
    #[tokio::test]
    async fn more_authorities_than_advertised_are_accepted() {
        let files = Files::new();
        files.write("cert.pem", 1, 8);
        for (count, name_bytes) in [(3, 8), (20, 1000), (100, 1000)] {
            files.write("authorities.pem", count, name_bytes);
            let acceptor = files.load(Some("authorities.pem")).unwrap();
            let refusal = files.refusal(&acceptor).await.to_string();
            assert!(
                refusal.contains("no certificates"),
                "{count} certificates with names of {name_bytes} bytes: {refusal}"
            );
        }
    }

    #[test]
    fn unusable_certificate_chain_is_refused() {
        let files = Files::new();
        files.write("cert.pem", 100, 1000);
        let refusal = files.load(None).unwrap_err().to_string();
        assert!(refusal.starts_with("tls.cert_file = ") && refusal.contains("limit is 65536"), "{refusal}");
        std::fs::File::create(files.path("cert.pem")).unwrap().set_len(1 << 40).unwrap();
        let refusal = files.load(None).unwrap_err().to_string();
        assert!(
            refusal.starts_with("tls.cert_file = ") && refusal.contains("the limit is 1048576"),
            "{refusal}"
        );
    }
}
