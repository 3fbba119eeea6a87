//! Endpoints of servers and coordinators, in plaintext or with TLS.
//!
//! TLS protects gRPC only: the raw TCP protocol has none, so with TLS it must be allowed explicitly
//! ([`TlsOptions::with_plain_tcp`]). Certificates are checked when the options are built, not at
//! the first connection.

use std::error::Error as _;
use std::fmt;

use tonic::transport::{Certificate, ClientTlsConfig, Endpoint, Identity};

use crate::error::Error;

/// TLS of the gRPC connections to servers and coordinators, version 1.2 or 1.3.
///
/// Certificates are used as given here. For renewed ones, create another
/// [`Cluster`](crate::Cluster).
#[derive(Clone)]
pub struct TlsOptions {
    config: ClientTlsConfig,
    has_identity: bool,
    server_name: Option<String>,
    has_plain_tcp: bool,
}

impl TlsOptions {
    /// Trusts servers whose certificate is signed by one of the authorities in `ca_pem`: one or
    /// more certificates in PEM. The system's authorities are not used.
    ///
    /// # Errors
    /// [`Error::Invalid`] if `ca_pem` has no certificate or cannot be decoded.
    pub fn new(ca_pem: impl AsRef<[u8]>) -> Result<Self, Error> {
        const LABEL: &[u8] = b"-----BEGIN CERTIFICATE-----";
        let ca_pem = ca_pem.as_ref();
        if !ca_pem.windows(LABEL.len()).any(|bytes| bytes == LABEL) {
            return Err(Error::Invalid("tls: the PEM of the authorities has no certificate".to_owned()));
        }
        let config = ClientTlsConfig::new().ca_certificate(Certificate::from_pem(ca_pem));
        check(&config, "authorities")?;
        Ok(Self { config, has_identity: false, server_name: None, has_plain_tcp: false })
    }

    /// Presents a client certificate, as servers with `tls.client_ca_file` require. `cert_pem` has
    /// the certificate and its intermediates, `key_pem` its private key.
    ///
    /// # Errors
    /// [`Error::Invalid`] if one of them cannot be decoded, or if the key is of another
    /// certificate.
    pub fn with_identity(self, cert_pem: impl AsRef<[u8]>, key_pem: impl AsRef<[u8]>) -> Result<Self, Error> {
        let config = self.config.identity(Identity::from_pem(cert_pem, key_pem));
        check(&config, "client certificate and key")?;
        Ok(Self { config, has_identity: true, ..self })
    }

    /// Expects the DNS name or IP address `name` in every server's certificate, instead of the
    /// address in the assignment.
    ///
    /// # Errors
    /// [`Error::Invalid`] if `name` is neither.
    pub fn with_server_name(self, name: &str) -> Result<Self, Error> {
        let config = self.config.domain_name(name);
        check(&config, "server name")?;
        Ok(Self { config, server_name: Some(name.to_owned()), ..self })
    }

    /// Allows [`Transport::Tcp`](crate::Transport::Tcp), which transfers block data in plaintext.
    #[must_use]
    pub fn with_plain_tcp(self) -> Self {
        Self { has_plain_tcp: true, ..self }
    }

    /// Returns true if block data may be transferred in plaintext.
    pub(crate) fn has_plain_tcp(&self) -> bool {
        self.has_plain_tcp
    }
}

/// Shows neither certificates nor the key.
impl fmt::Debug for TlsOptions {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("TlsOptions")
            .field("has_identity", &self.has_identity)
            .field("server_name", &self.server_name)
            .field("has_plain_tcp", &self.has_plain_tcp)
            .finish_non_exhaustive()
    }
}

/// Builds the configuration once, because tonic reports its faults only then.
fn check(config: &ClientTlsConfig, what: &str) -> Result<(), Error> {
    let checked = Endpoint::from_static("https://localhost").tls_config(config.clone());
    checked.map(drop).map_err(|error| Error::Invalid(format!("tls: {what}: {}", describe(&error))))
}

/// Returns the endpoint of `address`, which is `host:port` or a URL of both.
///
/// With `tls`, a bare `host:port` uses TLS. `http://` always means plaintext, and `https://` always
/// means TLS.
///
/// # Errors
/// A text, if the address is invalid or requires TLS options that are absent.
pub(crate) fn endpoint(address: &str, tls: Option<&TlsOptions>) -> Result<Endpoint, String> {
    let scheme = if tls.is_some() { "https" } else { "http" };
    let url = if address.contains("://") { address.to_owned() } else { format!("{scheme}://{address}") };
    let endpoint = Endpoint::from_shared(url).map_err(|error| describe(&error))?;
    match (endpoint.uri().scheme_str(), tls) {
        (_, _) if endpoint.uri().port().is_none() => Err("expected host:port".to_owned()),
        (Some("http"), _) => Ok(endpoint),
        (Some("https"), Some(tls)) => {
            endpoint.tls_config(tls.config.clone()).map_err(|error| describe(&error))
        }
        (Some("https"), None) => Err("https requires the option tls".to_owned()),
        _ => Err("the scheme must be http or https".to_owned()),
    }
}

/// Formats an error and its causes.
fn describe(error: &tonic::transport::Error) -> String {
    let mut text = error.to_string();
    let mut cause = error.source();
    while let Some(error) = cause {
        text.push_str(&format!(": {error}"));
        cause = error.source();
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;
    use rcgen::{CertificateParams, KeyPair};

    fn certificate() -> (String, String) {
        let key = KeyPair::generate().unwrap();
        let params = CertificateParams::new(vec!["localhost".to_owned()]).unwrap();
        (params.self_signed(&key).unwrap().pem(), key.serialize_pem())
    }

    #[test]
    fn unusable_certificates_are_refused_at_once() {
        let (cert, key) = certificate();
        let broken = cert.replacen("\nMII", "\n!!!", 1);
        for (pem, reason) in [("", "has no certificate"), (key.as_str(), "has no certificate")] {
            let error = TlsOptions::new(pem).unwrap_err().to_string();
            assert!(error.contains(reason), "{error}");
        }
        assert!(TlsOptions::new(broken).unwrap_err().to_string().contains("authorities"));
        let tls = TlsOptions::new(&cert).unwrap();
        let (_, other_key) = certificate();
        for (cert, key) in [(&cert, &other_key), (&cert, &cert), (&key, &key)] {
            let error = tls.clone().with_identity(cert, key).unwrap_err().to_string();
            assert!(error.starts_with("tls: client certificate and key: "), "{error}");
        }
        assert!(tls.clone().with_server_name("not a name").is_err());
        let tls = tls.with_identity(&cert, &key).unwrap().with_server_name("10.0.0.1").unwrap();
        let shown = format!("{tls:?}");
        assert!(shown.contains("10.0.0.1") && !shown.contains("45, 45"), "{shown}");
    }

    #[test]
    fn scheme_decides_about_tls() {
        let tls = TlsOptions::new(certificate().0).unwrap();
        let scheme = |address: &str, tls| {
            endpoint(address, tls).map(|endpoint| endpoint.uri().scheme_str().unwrap_or_default().to_owned())
        };
        assert_eq!(scheme("h:1", None).unwrap(), "http");
        assert_eq!(scheme("h:1", Some(&tls)).unwrap(), "https");
        assert_eq!(scheme("[::1]:1", Some(&tls)).unwrap(), "https");
        assert_eq!(scheme("http://h:1", Some(&tls)).unwrap(), "http");
        assert_eq!(scheme("https://h:1", Some(&tls)).unwrap(), "https");
        for (address, has_tls) in [("https://h:1", false), ("ftp://h:1", true), ("h", true), ("", false)] {
            assert!(scheme(address, has_tls.then_some(&tls)).is_err(), "{address}");
        }
    }
}
