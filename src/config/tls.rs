//! `[tls]`: its types, and reading and printing of its keys in one place.

use std::path::PathBuf;

use toml::{Table, Value};

use super::print::put;
use super::reader::{Reader, absolute_path};
use crate::tls::TlsFiles;

/// `[tls]`
#[derive(Debug, Clone, PartialEq)]
pub struct Tls {
    /// Certificate, key, and the authority of clients. Default: none, no TLS.
    pub files: Option<TlsFiles>,
    /// Doors that speak it. Default: all that can.
    pub doors: Vec<TlsDoor>,
}

/// `tls.doors`
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum TlsDoor {
    /// gRPC, with the embedded coordinator.
    Grpc,
    /// Metrics, health, status.
    Http,
    /// Administration.
    Admin,
}

impl TlsDoor {
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
        let found = Self::ALL.into_iter().find(|door| door.as_str() == text);
        found.ok_or_else(|| "a list of \"grpc\", \"http\" and \"admin\"".to_owned())
    }
}

impl Tls {
    /// The files of `door`, if it is to be encrypted.
    #[must_use]
    pub fn of(&self, door: TlsDoor) -> Option<&TlsFiles> {
        self.files.as_ref().filter(|_| self.doors.contains(&door))
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
    let doors = reader.texts("tls.doors", TlsDoor::ALL.len(), TlsDoor::parse);
    if !has_cert && (has_key || has_client_ca) {
        reader.refuse("tls.cert_file", "(absent)", "needed with the other files of [tls]");
    }
    if has_cert && !has_key {
        reader.refuse("tls.key_file", "(absent)", "needed with tls.cert_file");
    }
    let files = cert.zip(key).map(|(cert, key)| TlsFiles { cert, key, client_ca });
    Tls { files, doors: doors.unwrap_or_else(|| TlsDoor::ALL.to_vec()) }
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
    let doors: Vec<Value> = tls.doors.iter().map(|door| Value::from(door.as_str())).collect();
    put(&mut table, "doors", doors);
    table
}
