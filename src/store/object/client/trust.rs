//! Certificate authorities trusted for the store: those of `object_store.ca_file`. If it is unset,
//! those of the first bundle that can be opened: the file that `SSL_CERT_FILE` names, then the
//! bundles of the machine.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use tokio_rustls::rustls::crypto::ring;
use tokio_rustls::rustls::pki_types::CertificateDer;
use tokio_rustls::rustls::pki_types::pem::PemObject as _;
use tokio_rustls::rustls::{ClientConfig, RootCertStore};

use crate::schema::files;

/// Bundles of authorities in Debian, Fedora, SUSE and Alpine.
const BUNDLES: [&str; 4] = [
    "/etc/ssl/certs/ca-certificates.crt",
    "/etc/pki/tls/certs/ca-bundle.crt",
    "/etc/ssl/ca-bundle.pem",
    "/etc/ssl/cert.pem",
];
const KEY: &str = "object_store.ca_file";

/// Reason that the object store could not be opened, with the key of the configuration.
#[derive(Debug, thiserror::Error)]
#[error("{key}: {reason}")]
pub struct OpenError {
    key: &'static str,
    reason: String,
}

impl OpenError {
    pub(super) fn new(key: &'static str, reason: impl Into<String>) -> Self {
        Self { key, reason: reason.into() }
    }
}

/// Creates the TLS configuration. Blocks on files.
pub(super) fn client_config(ca_file: Option<&Path>) -> Result<Arc<ClientConfig>, OpenError> {
    let wrong = |what: String| OpenError::new(KEY, what);
    let mut roots = RootCertStore::empty();
    match ca_file {
        Some(path) => {
            let unusable = |why: String| wrong(format!("{}: {why}", path.display()));
            let pem = files::read(path, files::PEM_BYTES_MAX).map_err(|error| unusable(error.to_string()))?;
            for certificate in CertificateDer::pem_slice_iter(&pem) {
                let certificate = certificate.map_err(|error| unusable(error.to_string()))?;
                roots.add(certificate).map_err(|error| unusable(error.to_string()))?;
            }
            if roots.is_empty() {
                return Err(unusable("file contains no certificate".to_owned()));
            }
        }
        None => {
            let named = std::env::var_os("SSL_CERT_FILE").map(PathBuf::from);
            let places = named.into_iter().chain(BUNDLES.map(PathBuf::from));
            let found = places.into_iter().find_map(|path| CertificateDer::pem_file_iter(path).ok());
            // Bundles may contain certificates that rustls cannot parse.
            roots.add_parsable_certificates(found.into_iter().flatten().flatten());
            if roots.is_empty() {
                return Err(wrong(
                    "unset, and neither SSL_CERT_FILE nor this machine (ca-certificates) has trusted \
                     authorities"
                        .to_owned(),
                ));
            }
        }
    }
    let config = ClientConfig::builder_with_provider(Arc::new(ring::default_provider()))
        .with_safe_default_protocol_versions()
        .map_err(|error| wrong(error.to_string()))?
        .with_root_certificates(roots)
        .with_no_client_auth();
    Ok(Arc::new(config))
}
