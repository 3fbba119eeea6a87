//! Credentials in a file in the format of the AWS command line. The file is read again when it
//! changes.
//!
//! Invariant: a file that is unreadable or has no usable keys does not replace the previous keys,
//! which are used until they expire. Expired keys sign nothing. Requests fail with an error that
//! names the file until it has new keys.

use std::fmt;
use std::future::Future;
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};
use std::pin::Pin;
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use object_store::CredentialProvider;
use object_store::aws::AwsCredential;
use parking_lot::Mutex;

use crate::schema::files;

/// Largest file that is read. Real files have a few hundred bytes.
const FILE_BYTES_MAX: u64 = 64 << 10;
/// Timeout for reading the file. If the file system hangs longer, the previous keys are used.
const REFRESH_TIMEOUT: Duration = Duration::from_secs(5);

/// Reason for which no keys are available.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum CredentialsError {
    /// The file is missing or unreadable.
    #[error("{}: {reason}", path.display())]
    Unreadable {
        /// Path of the file.
        path: PathBuf,
        /// Error of the file system.
        reason: String,
    },
    /// The file has no usable keys for the profile.
    #[error("{}: profile {profile}: {reason}", path.display())]
    Incomplete {
        /// Path of the file.
        path: PathBuf,
        /// Name of the section.
        profile: String,
        /// Problem of the section, without values.
        reason: &'static str,
    },
    /// The keys have expired.
    #[error("{}: the keys have expired", path.display())]
    Expired {
        /// Path of the file.
        path: PathBuf,
    },
}

/// Keys and their expiry time.
#[derive(Clone)]
struct Keys {
    credential: Arc<AwsCredential>,
    expiration: Option<SystemTime>,
}

/// Metadata of a file that changes with its content.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Stamp {
    modified: Option<SystemTime>,
    bytes: u64,
    inode: u64,
}

#[derive(Default)]
struct State {
    stamp: Option<Stamp>,
    keys: Option<Keys>,
}

/// Credentials provider that reads a file.
pub(super) struct FileCredentials {
    path: PathBuf,
    profile: String,
    state: Mutex<State>,
}

impl fmt::Debug for FileCredentials {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("FileCredentials").field("path", &self.path).finish_non_exhaustive()
    }
}

impl FileCredentials {
    pub(super) fn new(path: &Path, profile: &str) -> Self {
        Self { path: path.to_owned(), profile: profile.to_owned(), state: Mutex::default() }
    }

    /// Checks that the file has valid keys. Blocks.
    ///
    /// # Errors
    /// [`CredentialsError`], also if the keys have expired.
    pub(super) fn check(&self) -> Result<(), CredentialsError> {
        let text = files::read_text(&self.path, FILE_BYTES_MAX).map_err(|error| self.unreadable(&error))?;
        let keys = self.parse(&text)?;
        self.unexpired(&keys).map(drop)
    }

    async fn current(&self) -> Result<Arc<AwsCredential>, CredentialsError> {
        let refreshed = crate::clock::timeout(REFRESH_TIMEOUT, self.refresh()).await;
        let refreshed = refreshed.unwrap_or_else(|_| {
            let hangs = std::io::Error::new(std::io::ErrorKind::TimedOut, "the file system hangs");
            Err(self.unreadable(&hangs))
        });
        let keys = self.state.lock().keys.clone();
        match (refreshed, keys) {
            (_, Some(keys)) => self.unexpired(&keys),
            (Err(error), None) => Err(error),
            (Ok(()), None) => Err(self.incomplete("no keys")),
        }
    }

    /// Reads the keys again if the file has changed.
    async fn refresh(&self) -> Result<(), CredentialsError> {
        let found = tokio::fs::metadata(&self.path).await.map_err(|error| self.unreadable(&error))?;
        let stamp = Stamp { modified: found.modified().ok(), bytes: found.len(), inode: found.ino() };
        if self.state.lock().stamp == Some(stamp) {
            return Ok(());
        }
        let path = self.path.clone();
        let read = tokio::task::spawn_blocking(move || files::read_text(&path, FILE_BYTES_MAX)).await;
        let text = read.unwrap_or_else(|error| Err(error.into())).map_err(|error| self.unreadable(&error))?;
        let parsed = self.parse(&text);
        let mut state = self.state.lock();
        state.stamp = Some(stamp);
        match parsed {
            Ok(keys) => state.keys = Some(keys),
            Err(error) => {
                // With previous keys, a bad file is reported once and read again only after it
                // changes. Without them, every request reads it again and fails.
                if state.keys.is_some() {
                    tracing::warn!(%error, "cannot use the changed credentials file; keeping the previous keys");
                } else {
                    state.stamp = None;
                }
                return Err(error);
            }
        }
        Ok(())
    }

    fn unexpired(&self, keys: &Keys) -> Result<Arc<AwsCredential>, CredentialsError> {
        match keys.expiration {
            Some(at) if at <= SystemTime::now() => Err(CredentialsError::Expired { path: self.path.clone() }),
            _ => Ok(Arc::clone(&keys.credential)),
        }
    }

    fn unreadable(&self, error: &std::io::Error) -> CredentialsError {
        CredentialsError::Unreadable { path: self.path.clone(), reason: error.to_string() }
    }

    fn incomplete(&self, reason: &'static str) -> CredentialsError {
        CredentialsError::Incomplete { path: self.path.clone(), profile: self.profile.clone(), reason }
    }

    fn parse(&self, text: &str) -> Result<Keys, CredentialsError> {
        let section = section(text, &self.profile).ok_or_else(|| self.incomplete("section not found"))?;
        let value =
            |names: &[&str]| section.iter().find(|(name, _)| names.contains(name)).map(|(_, value)| *value);
        let of_header = |value: &str, reason| match is_valid_header_value(value) {
            true => Ok(value.to_owned()),
            false => Err(self.incomplete(reason)),
        };
        let key_id = value(&["aws_access_key_id"]).ok_or_else(|| self.incomplete("no aws_access_key_id"))?;
        let secret =
            value(&["aws_secret_access_key"]).ok_or_else(|| self.incomplete("no aws_secret_access_key"))?;
        let token = value(&["aws_session_token"])
            .map(|token| of_header(token, "aws_session_token has characters that are invalid in a header"));
        let credential = AwsCredential {
            key_id: of_header(key_id, "aws_access_key_id has characters that are invalid in a header")?,
            secret_key: of_header(
                secret,
                "aws_secret_access_key has characters that are invalid in a header",
            )?,
            token: token.transpose()?,
        };
        let expiration = value(&["expiration", "aws_session_expiration", "x_security_token_expires"]);
        let expiration =
            expiration.map(|text| time(text).ok_or_else(|| self.incomplete("expiration is not a time")));
        Ok(Keys { credential: Arc::new(credential), expiration: expiration.transpose()? })
    }
}

impl CredentialProvider for FileCredentials {
    type Credential = AwsCredential;

    fn get_credential<'a, 'b>(
        &'a self,
    ) -> Pin<Box<dyn Future<Output = object_store::Result<Arc<AwsCredential>>> + Send + 'b>>
    where
        'a: 'b,
        Self: 'b,
    {
        Box::pin(async move {
            let failed = |error| object_store::Error::Generic { store: "S3", source: Box::new(error) };
            self.current().await.map_err(failed)
        })
    }
}

/// Returns the names and values in the section `profile`.
fn section<'a>(text: &'a str, profile: &str) -> Option<Vec<(&'a str, &'a str)>> {
    let is_head = |line: &str| line.starts_with('[');
    let mut lines = text.lines().map(str::trim).skip_while(|line| {
        let name = line.strip_prefix('[').and_then(|rest| rest.strip_suffix(']')).map(str::trim);
        name.is_none_or(|name| name != profile && name.strip_prefix("profile ") != Some(profile))
    });
    lines.next()?;
    let lines = lines.take_while(|line| !is_head(line)).filter(|line| !line.starts_with(['#', ';']));
    Some(
        lines
            .filter_map(|line| line.split_once('='))
            .map(|(name, value)| (name.trim(), value.trim()))
            .collect(),
    )
}

/// Returns whether `text` is valid in the header of a signed request.
pub(super) fn is_valid_header_value(text: &str) -> bool {
    !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_graphic())
}

/// Parses an RFC 3339 time in UTC, with `Z` or a zero offset.
fn time(text: &str) -> Option<SystemTime> {
    let text = ["+00:00", "+0000"].iter().find_map(|end| text.strip_suffix(end)).unwrap_or(text);
    humantime::parse_rfc3339_weak(text).ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(text: &str) -> Result<Keys, CredentialsError> {
        FileCredentials::new(Path::new("/keys"), "worker").parse(text)
    }

    #[test]
    fn section_of_the_profile_is_read() {
        let text = "# comment\n[default]\naws_access_key_id = a\naws_secret_access_key = b\n\n[worker]\n\
                    aws_access_key_id=AK\n ; x = y\naws_secret_access_key = s/e+c=r==\naws_session_token = t\n\
                    expiration = 2030-01-02T03:04:05+00:00\n[other]\naws_access_key_id = z\n";
        let keys = parse(text).unwrap();
        let credential = &keys.credential;
        assert_eq!((credential.key_id.as_str(), credential.secret_key.as_str()), ("AK", "s/e+c=r=="));
        assert_eq!(credential.token.as_deref(), Some("t"));
        assert_eq!(keys.expiration, humantime::parse_rfc3339("2030-01-02T03:04:05Z").ok());
        assert!(
            parse("[profile worker]\naws_access_key_id=a\naws_secret_access_key=b")
                .unwrap()
                .expiration
                .is_none()
        );
    }

    #[test]
    fn missing_credentials_are_named_without_values() {
        for (text, missing) in [
            ("", "section not found"),
            ("[default]\naws_access_key_id = hush", "section not found"),
            ("[worker]\naws_secret_access_key = hush", "no aws_access_key_id"),
            ("[worker]\naws_access_key_id = hush", "no aws_secret_access_key"),
            (
                "[worker]\naws_access_key_id = hu sh\naws_secret_access_key = hush",
                "aws_access_key_id has characters",
            ),
            (
                "[worker]\naws_access_key_id = a\naws_secret_access_key = hu\u{7f}sh",
                "aws_secret_access_key has characters",
            ),
            (
                "[worker]\naws_access_key_id = a\naws_secret_access_key = b\naws_session_token = hüsh",
                "aws_session_token",
            ),
            (
                "[worker]\naws_access_key_id = a\naws_secret_access_key = b\nexpiration = hush",
                "expiration is not a time",
            ),
        ] {
            let error = parse(text).err().unwrap().to_string();
            assert!(error.contains(missing) && error.contains("/keys") && !error.contains("hu"), "{error}");
        }
    }

    #[tokio::test]
    async fn changed_file_is_reread_and_broken_one_ignored() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("keys");
        let keys = FileCredentials::new(&path, "default");
        assert!(matches!(keys.current().await, Err(CredentialsError::Unreadable { .. })));
        std::fs::write(&path, "[default]\naws_access_key_id = first").unwrap();
        assert!(matches!(keys.current().await, Err(CredentialsError::Incomplete { .. })));
        let text = |id: &str| format!("[default]\naws_access_key_id = {id}\naws_secret_access_key = s\n");
        std::fs::write(&path, text("first")).unwrap();
        assert_eq!(keys.current().await.unwrap().key_id, "first");
        std::fs::write(&path, text("the-second")).unwrap();
        assert_eq!(keys.current().await.unwrap().key_id, "the-second");
        std::fs::write(&path, "[default]").unwrap();
        assert_eq!(keys.current().await.unwrap().key_id, "the-second");
        std::fs::remove_file(&path).unwrap();
        assert_eq!(keys.current().await.unwrap().key_id, "the-second");
        std::fs::write(&path, text("x") + "expiration = 2001-01-01T00:00:00Z").unwrap();
        assert_eq!(keys.current().await.unwrap_err(), CredentialsError::Expired { path: path.clone() });
        assert!(keys.check().is_err());
        std::fs::write(&path, text("renewed")).unwrap();
        assert_eq!(keys.current().await.unwrap().key_id, "renewed");
    }
}
