//! Remote paths named by clients, and the list of allowed ones. Pure.
//!
//! Invariant: a parsed path has no empty part, `.` or `..`, so a path that begins with an allowed
//! directory is inside of it.

use std::fmt;

/// Maximum length of a path in bytes.
const LOCATION_BYTES_MAX: usize = 2048;
/// Port of a NameNode whose address has no port (`dfs.namenode.rpc-address`).
pub const NAMENODE_PORT: u16 = 8020;

/// A directory of a remote file system, such as `hdfs://namenode:8020/uniffle`.
#[derive(Debug, Clone, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct RemoteLocation {
    scheme: String,
    host: String,
    port: Option<u16>,
    path: String,
}

impl RemoteLocation {
    /// Parses a location.
    ///
    /// # Errors
    /// The reason why it is invalid, as the end of a sentence. The text itself is not repeated.
    pub fn parse(text: &str) -> Result<Self, String> {
        if text.len() > LOCATION_BYTES_MAX {
            return Err(format!("has {} bytes, the limit is {LOCATION_BYTES_MAX}", text.len()));
        }
        let form = || "is not of the form hdfs://<namenode or nameservice>[:<port>]/<path>".to_owned();
        let (scheme, rest) = text.split_once("://").ok_or_else(form)?;
        let scheme = scheme.to_ascii_lowercase();
        if !matches!(scheme.as_str(), "hdfs" | "viewfs") {
            return Err("has a scheme other than hdfs or viewfs".to_owned());
        }
        let (authority, path) = rest.split_at(rest.find('/').unwrap_or(rest.len()));
        let (host, port) = match authority.split_once(':') {
            None => (authority, None),
            Some((host, port)) => (host, Some(port.parse().ok().filter(|port| *port != 0).ok_or_else(form)?)),
        };
        let is_host = |c: char| c.is_ascii_alphanumeric() || matches!(c, '.' | '-' | '_');
        if host.is_empty() || !host.chars().all(is_host) {
            return Err(form());
        }
        let mut parts = path.split('/').skip(1).collect::<Vec<_>>();
        if parts.last().is_some_and(|last| last.is_empty()) {
            parts.pop();
        }
        let is_sound = |part: &&str| {
            !matches!(*part, "" | "." | "..")
                && !part.contains(|c: char| c.is_control() || "?#%:\\".contains(c))
        };
        if !parts.iter().all(is_sound) {
            return Err("has a path with an empty part, `.`, `..` or one of ?#%:\\".to_owned());
        }
        let path = format!("/{}", parts.join("/"));
        Ok(Self { scheme, host: host.to_ascii_lowercase(), port, path })
    }

    /// Returns `hdfs` or `viewfs`.
    pub fn scheme(&self) -> &str {
        &self.scheme
    }

    /// Returns the NameNode, nameservice or mount table.
    pub fn host(&self) -> &str {
        &self.host
    }

    /// Returns the port, if the location has one.
    pub fn port(&self) -> Option<u16> {
        self.port
    }

    /// Returns the directory in its file system.
    pub fn path(&self) -> &str {
        &self.path
    }

    /// Returns the host in lower case, with the port if the location has one. File systems with the
    /// same authority share permits and metrics.
    pub fn authority(&self) -> String {
        match self.port {
            Some(port) => format!("{}:{port}", self.host),
            None => self.host.clone(),
        }
    }

    /// Returns whether `other` is this directory or below it.
    fn holds(&self, other: &Self) -> bool {
        let port = |location: &Self| location.port.unwrap_or(NAMENODE_PORT);
        let same_place = self.scheme == other.scheme && self.host == other.host && port(self) == port(other);
        let below = match other.path.strip_prefix(self.path.trim_end_matches('/')) {
            Some(rest) => rest.is_empty() || rest.starts_with('/'),
            None => false,
        };
        same_place && below
    }
}

impl fmt::Display for RemoteLocation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}://{}{}", self.scheme, self.authority(), self.path)
    }
}

/// An entry of `hdfs_store.allowed_paths`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum AllowedPath {
    /// `*`: any location.
    Any,
    /// A directory and all below it.
    Below(RemoteLocation),
}

impl AllowedPath {
    /// Parses an entry.
    ///
    /// # Errors
    /// See [`RemoteLocation::parse`].
    pub fn parse(text: &str) -> Result<Self, String> {
        if text == "*" { Ok(Self::Any) } else { RemoteLocation::parse(text).map(Self::Below) }
    }
}

impl fmt::Display for AllowedPath {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Any => f.write_str("*"),
            Self::Below(location) => location.fmt(f),
        }
    }
}

/// Directories that clients may use, including all below them.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct AllowList(pub Vec<RemoteLocation>);

impl AllowList {
    /// Returns whether a client may use `location`. An empty list permits all.
    pub fn permits(&self, location: &RemoteLocation) -> bool {
        self.0.is_empty() || self.0.iter().any(|allowed| allowed.holds(location))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn location(text: &str) -> RemoteLocation {
        RemoteLocation::parse(text).unwrap()
    }

    #[test]
    fn ports_and_nameservices_are_kept() {
        let with_port = location("hdfs://NameNode:9000/uniffle/a/");
        assert_eq!(
            (with_port.host(), with_port.port(), with_port.path()),
            ("namenode", Some(9000), "/uniffle/a")
        );
        assert_eq!(with_port.to_string(), "hdfs://namenode:9000/uniffle/a");
        let nameservice = location("hdfs://ns_1");
        assert_eq!((nameservice.authority().as_str(), nameservice.path()), ("ns_1", "/"));
    }

    #[test]
    fn invalid_directory_is_refused() {
        for text in [
            "",
            "/uniffle",
            "hdfs:/uniffle",
            "hdfs:///uniffle",
            "file:///tmp",
            "s3a://bucket/x",
            "hdfs://a:0/x",
            "hdfs://a:port/x",
            "hdfs://user@a/x",
            "hdfs://a/x/../y",
            "hdfs://a/./x",
            "hdfs://a//x",
            "hdfs://a/x%2e",
            "hdfs://a/x?y",
            "hdfs://a/x#y",
            "hdfs://a/x\0",
            "hdfs://[::1]/x",
        ] {
            assert!(RemoteLocation::parse(text).is_err(), "{text:?}");
        }
        assert!(RemoteLocation::parse(&format!("hdfs://a/{}", "x".repeat(5000))).is_err());
    }

    #[test]
    fn allowed_directory_permits_only_its_descendants() {
        let list = AllowList(vec![location("hdfs://ns/uniffle"), location("hdfs://nn:8020/")]);
        for text in [
            "hdfs://ns/uniffle",
            "hdfs://ns/uniffle/x",
            "hdfs://nn/y",
            "hdfs://nn:8020/",
            "hdfs://NS:8020/uniffle",
        ] {
            assert!(list.permits(&location(text)), "{text}");
        }
        for text in [
            "hdfs://ns/uniffle2",
            "hdfs://ns/",
            "hdfs://nn:9000/y",
            "viewfs://ns/uniffle",
            "hdfs://other/uniffle",
        ] {
            assert!(!list.permits(&location(text)), "{text}");
        }
        assert!(AllowList::default().permits(&location("hdfs://any/thing")));
    }
}
