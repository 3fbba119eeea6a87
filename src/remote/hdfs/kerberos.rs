//! Login of the worker on secure Hadoop clusters, and a check at start that it can succeed.
//!
//! GSSAPI gets tickets from the keytab or the ticket cache whenever a connection is made. With a
//! keytab it also renews them, so no `kinit` is needed.
//!
//! The check loads the library and parses these files, but does not log in, because the NameNodes
//! are unknown until clients register. Without it, a wrong principal would only fail at the first
//! flush, after data was acknowledged. The ticket cache also tells the worker's own user name, so
//! that the worker does not impersonate itself.

use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime};

use anyhow::{Context as _, bail, ensure};
use bytes::Buf as _;
use hdfs_native::ClientBuilder;

use crate::schema::files;

/// Library that `hdfs-native` loads.
const LIBRARY: &str = "libgssapi_krb5.so.2";
/// Maximum size of keytabs and ticket caches, which have a few KiB.
const FILE_BYTES_MAX: u64 = 1 << 20;

/// The worker's login.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Login {
    /// Keytab and principal. Without them the ticket cache of the environment (`KRB5CCNAME`) is
    /// used.
    pub keytab: Option<(PathBuf, String)>,
    /// True if data of applications is written as their own user.
    pub act_as_users: bool,
    /// The short name of the ticket cache's principal, if known.
    pub cache_user: Option<String>,
}

impl Login {
    /// Returns whether the worker's configuration requires security, regardless of clients'
    /// settings.
    pub fn is_required(&self) -> bool {
        self.keytab.is_some()
    }

    /// Returns the name by which a NameNode knows the worker, if it can be determined.
    pub fn short_name(&self) -> Option<&str> {
        match &self.keytab {
            Some((_, principal)) => Some(short_name(principal)),
            None => self.cache_user.as_deref(),
        }
    }

    /// Returns the user to impersonate for an application of `user`, or `None` to use the worker's
    /// own.
    pub fn user_to_act_as(&self, user: &str) -> Option<String> {
        let acts = self.act_as_users && !user.is_empty() && self.short_name() != Some(user);
        acts.then(|| user.to_owned())
    }

    /// Configures a client for this login.
    pub fn apply(&self, builder: ClientBuilder) -> ClientBuilder {
        match &self.keytab {
            Some((path, principal)) => {
                builder.with_kerberos_principal(principal).with_kerberos_keytab(path.to_string_lossy())
            }
            None => builder,
        }
    }

    /// Checks whether a login can succeed, without contacting a KDC. `ticket_cache` is
    /// `KRB5CCNAME`. Also loads the library as a test.
    ///
    /// `hdfs-native` has no login without a connection, and GSSAPI's own calls would be `unsafe`.
    /// `hdfs_store.precheck_enable` tries the configured paths.
    ///
    /// # Errors
    /// The library, the keytab, its principal or the ticket is missing or unreadable, or the ticket
    /// has expired. The error says which, and where. An unset or unusual `KRB5CCNAME`, which names
    /// no file, is only logged.
    pub fn check(&mut self, ticket_cache: Option<&str>) -> anyhow::Result<()> {
        load_library()?;
        if let Some((path, principal)) = &self.keytab {
            return check_keytab(path, principal);
        }
        let Some(path) = ticket_cache.and_then(file_of_cache) else {
            tracing::warn!(
                ticket_cache,
                "Kerberos without a keytab: tickets of this credential cache are used and must be renewed \
                 externally"
            );
            return Ok(());
        };
        let cache = read(&path).and_then(|bytes| TicketCache::parse(&bytes));
        let cache = cache.with_context(|| format!("the ticket cache KRB5CCNAME={}", path.display()))?;
        let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
        cache.check(now).with_context(|| {
            let remedy = "renew it, or set hdfs_store.kerberos_security_config.keytab_path";
            format!("the ticket cache KRB5CCNAME={}: {remedy}", path.display())
        })?;
        self.cache_user = Some(short_name(&cache.principal).to_owned());
        Ok(())
    }
}

fn short_name(principal: &str) -> &str {
    principal.split(['/', '@']).next().unwrap_or(principal)
}

fn load_library() -> anyhow::Result<()> {
    // SAFETY: loading runs the library's initialisers. This is MIT Kerberos, which `hdfs-native`
    // loads in the same way, from the same place and for the same use at the first connection.
    let loaded = unsafe { libloading::Library::new(LIBRARY) };
    loaded.map(drop).with_context(|| {
        format!(
            "Kerberos needs {LIBRARY} (Debian: libgssapi-krb5-2, Red Hat: krb5-libs), which cannot be loaded"
        )
    })
}

fn check_keytab(path: &Path, principal: &str) -> anyhow::Result<()> {
    let key = "hdfs_store.kerberos_security_config.keytab_path";
    let entries = read(path).and_then(|bytes| keytab_principals(&bytes));
    let entries = entries.with_context(|| format!("{key} = {}", path.display()))?;
    ensure!(
        entries.iter().any(|entry| entry == principal),
        "{key} = {} has no key of {principal}, only of {entries:?}",
        path.display()
    );
    Ok(())
}

fn read(path: &Path) -> anyhow::Result<Vec<u8>> {
    Ok(files::read(path, FILE_BYTES_MAX)?)
}

/// Returns the file of a cache name. Other kinds of caches are left to GSSAPI.
fn file_of_cache(name: &str) -> Option<PathBuf> {
    match name.split_once(':') {
        Some(("FILE", path)) => Some(path.into()),
        None if name.starts_with('/') => Some(name.into()),
        Some(_) | None => None,
    }
}

/// Returns the next `count` bytes. Fields of both formats are big-endian.
fn take<'a>(fields: &mut &'a [u8], count: usize) -> anyhow::Result<&'a [u8]> {
    fields.split_off(..count).context("file is truncated")
}

/// Returns the bytes that follow their length.
fn take_counted<'a>(fields: &mut &'a [u8]) -> anyhow::Result<&'a [u8]> {
    let length = fields.try_get_u32()?;
    take(fields, length.try_into()?)
}

/// Returns the principals of a keytab (MIT's format, version 2).
fn keytab_principals(mut fields: &[u8]) -> anyhow::Result<Vec<String>> {
    ensure!(fields.try_get_u16()? == 0x0502, "not a keytab (of version 2)");
    let mut principals = Vec::new();
    while !fields.is_empty() {
        let size = fields.try_get_i32()?;
        let mut entry = take(&mut fields, size.unsigned_abs().try_into()?)?;
        if size <= 0 {
            continue; // a deleted entry
        }
        let components = entry.try_get_u16()?;
        let mut text = || -> anyhow::Result<_> {
            let length = entry.try_get_u16()?;
            Ok(String::from_utf8_lossy(take(&mut entry, length.into())?))
        };
        let realm = text()?;
        let names = (0..components).map(|_| text()).collect::<anyhow::Result<Vec<_>>>()?;
        principals.push(format!("{}@{realm}", names.join("/")));
    }
    Ok(principals)
}

/// Relevant content of a ticket cache.
#[derive(Debug, PartialEq, Eq)]
struct TicketCache {
    principal: String,
    /// End of the latest ticket-granting ticket, in seconds since 1970.
    ends_at: Option<u32>,
}

impl TicketCache {
    /// Parses MIT's format, version 4.
    fn parse(mut fields: &[u8]) -> anyhow::Result<Self> {
        ensure!(fields.try_get_u16()? == 0x0504, "not a ticket cache (of version 4)");
        let header = fields.try_get_u16()?;
        take(&mut fields, header.into())?;
        let principal = cache_principal(&mut fields)?;
        let mut ends_at = None;
        while !fields.is_empty() {
            let (server, end) = cache_entry(&mut fields)?;
            if server.starts_with("krbtgt/") {
                ends_at = ends_at.max(Some(end));
            }
        }
        Ok(Self { principal, ends_at })
    }

    fn check(&self, now: Duration) -> anyhow::Result<()> {
        let Some(ends_at) = self.ends_at else {
            bail!("no ticket-granting ticket of {} found", self.principal);
        };
        let ended = now.checked_sub(Duration::from_secs(ends_at.into()));
        match ended {
            None => Ok(()),
            Some(ago) => bail!("the ticket of {} has expired {} s ago", self.principal, ago.as_secs()),
        }
    }
}

fn cache_principal(fields: &mut &[u8]) -> anyhow::Result<String> {
    let _name_type = fields.try_get_u32()?;
    let components = fields.try_get_u32()?;
    let realm = String::from_utf8_lossy(take_counted(fields)?);
    let mut names = Vec::new();
    for _ in 0..components {
        names.push(String::from_utf8_lossy(take_counted(fields)?));
    }
    Ok(format!("{}@{realm}", names.join("/")))
}

/// Returns the server and the end of the next ticket.
fn cache_entry(fields: &mut &[u8]) -> anyhow::Result<(String, u32)> {
    let _client = cache_principal(fields)?;
    let server = cache_principal(fields)?;
    let _key_type = fields.try_get_u16()?;
    let _key = take_counted(fields)?;
    let _authenticated_at = fields.try_get_u32()?;
    let _starts_at = fields.try_get_u32()?;
    let ends_at = fields.try_get_u32()?;
    let _renewable_until = fields.try_get_u32()?;
    let _is_session_key = fields.try_get_u8()?;
    let _flags = fields.try_get_u32()?;
    for _kind in ["addresses", "authorisations"] {
        for _ in 0..fields.try_get_u32()? {
            fields.try_get_u16()?;
            take_counted(fields)?;
        }
    }
    let (_ticket, _second) = (take_counted(fields)?, take_counted(fields)?);
    Ok((server, ends_at))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn worker_impersonates_others_but_not_itself() {
        let login = Login {
            keytab: Some(("/k".into(), "uniffle/host@REALM".to_owned())),
            act_as_users: true,
            cache_user: None,
        };
        assert_eq!(login.user_to_act_as("alice").as_deref(), Some("alice"));
        assert_eq!(login.user_to_act_as("uniffle"), None);
        assert_eq!(login.user_to_act_as(""), None);
        assert_eq!(Login { act_as_users: false, ..login }.user_to_act_as("alice"), None);
    }

    fn principal(name: &str) -> Vec<u8> {
        let mut bytes = vec![0, 0, 0, 1, 0, 0, 0, 2, 0, 0, 0, 1, b'R'];
        for part in name.split('/') {
            bytes.extend_from_slice(&u32::try_from(part.len()).unwrap().to_be_bytes());
            bytes.extend_from_slice(part.as_bytes());
        }
        bytes
    }

    fn cache(server: &str, ends_at: u32) -> Vec<u8> {
        let mut bytes = vec![5, 4, 0, 2, 9, 9];
        bytes.extend(principal("uniffle/h"));
        bytes.extend(principal("uniffle/h"));
        bytes.extend(principal(server));
        bytes.extend([0, 18, 0, 0, 0, 3, 1, 2, 3]);
        for time in [1, 1, ends_at, 0] {
            bytes.extend_from_slice(&u32::to_be_bytes(time));
        }
        bytes.extend([0, 0, 0, 0, 0]);
        bytes.extend([0, 0, 0, 1, 0, 2, 0, 0, 0, 1, 7]);
        bytes.extend([0, 0, 0, 0, 0, 0, 0, 2, 4, 4, 0, 0, 0, 0]);
        bytes
    }

    #[test]
    fn tickets_are_validated_by_their_end() {
        let cache_of = |server, ends_at| TicketCache::parse(&cache(server, ends_at)).unwrap();
        let ticket = cache_of("krbtgt/R", 1000);
        assert_eq!(ticket, TicketCache { principal: "uniffle/h@R".to_owned(), ends_at: Some(1000) });
        assert!(ticket.check(Duration::from_secs(999)).is_ok());
        let expired = ticket.check(Duration::from_secs(1060)).unwrap_err().to_string();
        assert_eq!(expired, "the ticket of uniffle/h@R has expired 60 s ago");
        let other = cache_of("hdfs/nn", 1000).check(Duration::ZERO).unwrap_err().to_string();
        assert!(other.contains("no ticket-granting ticket"), "{other}");
    }

    #[test]
    fn truncated_files_are_errors() {
        let whole = cache("krbtgt/R", 1000);
        let entry_at = 6 + principal("uniffle/h").len();
        for length in 0..whole.len() {
            assert_eq!(TicketCache::parse(&whole[..length]).is_ok(), length == entry_at, "{length}");
        }
        let mut keytab =
            vec![5, 2, 0, 0, 0, 17, 0, 2, 0, 1, b'R', 0, 3, b'a', b'b', b'c', 0, 1, b'h', 0, 0, 0, 0];
        keytab.extend([0xff, 0xff, 0xff, 0xfe, 0, 0]);
        assert_eq!(keytab_principals(&keytab).unwrap(), ["abc/h@R"]);
        for length in [0, 1, 3, 10, 22] {
            assert!(keytab_principals(&keytab[..length]).is_err(), "{length}");
        }
        assert!(keytab_principals(&[5, 2, 0x80, 0, 0, 0]).is_err());
    }

    #[test]
    fn only_files_are_looked_into() {
        assert_eq!(file_of_cache("FILE:/x"), Some("/x".into()));
        assert_eq!(file_of_cache("/x"), Some("/x".into()));
        for other in ["DIR:/x", "KEYRING:persistent:0", "KCM:", ""] {
            assert_eq!(file_of_cache(other), None, "{other}");
        }
    }
}
