//! `[tls]`: its types, and reading and printing of its keys in one place.

use std::path::PathBuf;

use toml::{Table, Value};

use super::print::put;
use super::reader::{Reader, absolute_path};
use crate::listeners::tls::TlsFiles;

/// `[tls]`
#[derive(Debug, Clone, PartialEq)]
pub struct Tls {
    /// Certificate, key, and the authority of clients. Default: none, no TLS.
    pub files: Option<TlsFiles>,
    /// Listeners that speak it. Default: all that can.
    pub listeners: Vec<TlsListener>,
}

/// `tls.doors`
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum TlsListener {
    /// gRPC, with the embedded coordinator.
    Grpc,
    /// Metrics, health, status.
    Http,
    /// Administration.
    Admin,
}

impl TlsListener {
    const ALL: [Self; 3] = [Self::Grpc, Self::Http, Self::Admin];

    /// The word for it.
    #[must_use]
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Grpc => "grpc",
            Self::Http => "http",
            Self::Admin => "admin",
        }
    }

    fn parse(text: &str) -> Result<Self, String> {
        let found = Self::ALL.into_iter().find(|listener| listener.as_str() == text);
        found.ok_or_else(|| "a list of \"grpc\", \"http\" and \"admin\"".to_owned())
    }
}

impl Tls {
    /// The files of `listener`, if it is to be encrypted.
    #[must_use]
    pub fn of(&self, listener: TlsListener) -> Option<&TlsFiles> {
        self.files.as_ref().filter(|_| self.listeners.contains(&listener))
    }
}

pub(super) fn read(reader: &mut Reader) -> Tls {
    let mut path = |key: &str| -> (bool, Option<PathBuf>) {
        let is_given = reader.values.contains_key(key);
        (is_given, reader.text(key, absolute_path))
    };
    let (has_cert, cert) = path("tls.cert_file");
    let (has_key, key) = path("tls.key_file");
    let (has_client_ca, client_ca) = path("tls.client_ca_file");
    let listeners = reader.texts("tls.doors", TlsListener::ALL.len(), TlsListener::parse);
    if !has_cert && (has_key || has_client_ca) {
        reader.refuse("tls.cert_file", "(absent)", "needed with the other files of [tls]");
    }
    if has_cert && !has_key {
        reader.refuse("tls.key_file", "(absent)", "needed with tls.cert_file");
    }
    let files = cert.zip(key).map(|(cert, key)| TlsFiles { cert, key, client_ca });
    Tls { files, listeners: listeners.unwrap_or_else(|| TlsListener::ALL.to_vec()) }
}

pub(super) fn print(tls: &Tls) -> Table {
    let mut table = Table::new();
    let files = tls.files.as_ref();
    for (key, file) in [
        ("cert_file", files.map(|files| &files.cert)),
        ("key_file", files.map(|files| &files.key)),
        ("client_ca_file", files.and_then(|files| files.client_ca.as_ref())),
    ] {
        if let Some(file) = file {
            put(&mut table, key, file.display().to_string());
        }
    }
    let listeners: Vec<Value> = tls.listeners.iter().map(|listener| Value::from(listener.as_str())).collect();
    put(&mut table, "doors", listeners);
    table
}
