//! Configuration of the object tier: the section `object_store`.
//!
//! Secrets must not appear in logs, errors or the API: they are values of [`Secret`], whose debug
//! output hides them.

use std::fmt;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use uniffle_io::Disk;
use uniffle_io::blocking::BlockingDisk;

use super::location::{BucketUrl, StoreEndpoint};
use crate::schema::kind::{
    DAY, HOUR, Kind, MIB, SECOND, count, flag, list, optional, parsed, path, ratio, seconds, secret, size,
    text, word,
};
use crate::schema::{section, words};

words! {
    /// Source of the keys that sign requests.
    pub enum Credentials {
        /// Environment of the process.
        Environment = "environment",
        /// File in the format of the AWS command line.
        File = "file",
        /// Token file mounted by Kubernetes. STS exchanges the token for the keys of a role.
        WebIdentity = "web_identity",
        /// Requests are not signed.
        Unsigned = "none",
    }
}

words! {
    /// Method by which the store detects that a body was changed in transit.
    pub enum UploadCheck {
        /// A CRC is sent beside the body.
        Crc64 = "crc64nvme",
        /// The signature of the request covers the SHA-256 of the body.
        Signature = "signature",
        /// No check. TLS and the checksums of the blocks remain.
        Off = "off",
    }
}

/// A key that is hidden in logs and debug output.
#[derive(Clone, PartialEq, Eq)]
pub struct Secret(String);

impl Secret {
    /// Takes `text` as a secret.
    pub fn new(text: impl Into<String>) -> Self {
        Self(text.into())
    }

    /// Returns the text. Only for signing.
    pub fn reveal(&self) -> &str {
        &self.0
    }
}

impl fmt::Debug for Secret {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Secret(hidden)")
    }
}

/// Largest read cache: 64 TiB.
const CACHE_BYTES_MAX: u64 = 64 << 40;
/// Smallest share of a directory, so that several readers can use it at once.
const CACHE_BYTES_MIN: u64 = 64 * MIB;

/// Concurrent reads of a disk of the read cache, and concurrent writes.
const CACHE_CALLS: usize = 16;

/// Smallest part of an upload that S3 accepts.
const PART_BYTES_MIN: u64 = 5 * MIB;

section! {
    /// Settings of the object store, of offloads to it and of the read cache.
    #[table(
        "object_store",
        "Object storage with the S3 protocol. Access keys are never set here, only their source."
    )]
    pub struct ObjectConfig {
        /// Bucket and prefix; each worker has its own prefix below it.
        #[key("object_store.url", optional(parsed("s3://bucket/prefix", BucketUrl::parse)), Restart, example "\"s3://shuffle/uniffle\"")]
        pub url: Option<BucketUrl> = None,
        /// URL of the server. Default: Amazon's endpoint of the region.
        #[key("object_store.endpoint", optional(endpoint()), Restart, example "\"https://s3.example.com:9000\"")]
        pub endpoint: Option<StoreEndpoint> = None,
        /// Region for request signatures; most servers other than Amazon's accept any.
        #[key("object_store.region", parsed("a region such as \"eu-central-1\"", region), Restart)]
        pub region: String = "us-east-1".to_owned(),
        /// Bucket in the request's path instead of its host name. Default: true if an endpoint is
        /// set.
        #[key("object_store.path_style", flag(), Restart, example "true")]
        pub path_style: bool = endpoint.is_some(),
        /// Source of access keys: environment (AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY), file
        /// (credentials_file), web_identity (AWS_WEB_IDENTITY_TOKEN_FILE, AWS_ROLE_ARN) or none
        /// (unsigned requests).
        #[key("object_store.credentials", word(), Restart)]
        pub credentials: Credentials = Credentials::Environment,
        /// Credentials in the format of the AWS command line; read again when the file changes.
        #[key("object_store.credentials_file", optional(path()), Restart, example "\"/etc/uniffle-worker/s3-credentials\"")]
        pub credentials_file: Option<PathBuf> = None,
        /// Section of credentials_file.
        #[key("object_store.profile", parsed("1 to 100 printable characters", profile), Restart)]
        pub profile: String = "default".to_owned(),
        /// PEM file of the authorities trusted for the server. Default: those that the machine
        /// trusts.
        #[key("object_store.ca_file", optional(path()), Restart, example "\"/etc/uniffle-worker/s3-ca.crt\"")]
        pub ca_file: Option<PathBuf> = None,
        /// Write, read and delete an object at start, and refuse to start on failure.
        #[key("object_store.precheck_enable", flag(), Restart)]
        pub precheck: bool = false,
        /// Timeout of name resolution, connect and TLS handshake.
        #[key("object_store.connect_timeout_sec", seconds(SECOND..=HOUR), Restart)]
        pub connect_timeout: Duration = 5 * SECOND,
        /// Timeout of one attempt of a request, plus one second per MiB.
        #[key("object_store.request_timeout_sec", seconds(SECOND..=HOUR), Restart)]
        pub request_timeout: Duration = 30 * SECOND,
        /// Longest pause between two bytes of a response.
        #[key("object_store.stall_timeout_sec", seconds(SECOND..=HOUR), Restart)]
        pub stall_timeout: Duration = 10 * SECOND,
        /// Time since a request's first attempt after which no further attempt starts.
        #[key("object_store.retry_timeout_sec", seconds(Duration::ZERO..=DAY), Restart)]
        pub retry_timeout: Duration = 60 * SECOND,
        /// Concurrent uploads, and as many other requests.
        #[key("object_store.max_concurrency", count(1..=1024), Restart)]
        pub max_concurrency: usize = 16,
        /// Checksum of uploads: crc64nvme, signature (SHA-256, more CPU) or off, for stores that
        /// support neither. Reads are always verified.
        #[key("object_store.upload_check", word(), Restart)]
        pub upload_check: UploadCheck = UploadCheck::Crc64,
        /// Part size of multipart uploads.
        #[key("object_store.part_size", size(PART_BYTES_MIN..=64 * MIB), Restart)]
        pub part_bytes: usize = 8 << 20,
        /// Approximate size of data objects, however many partitions they contain.
        #[key("object_store.segment_size", size(64 * MIB..=256 * MIB), Restart)]
        pub segment_bytes: u64 = 128 * MIB,
        /// With local disks: above this usage, a disk's largest and oldest shuffles are offloaded
        /// to the store.
        #[key("object_store.offload_high_watermark", ratio(), Restart)]
        pub offload_high: f64 = 0.6,
        /// Offloading stops below this usage.
        #[key("object_store.offload_low_watermark", ratio(), Restart)]
        pub offload_low: f64 = 0.5,
        /// Directories of the read cache, one per disk. They are emptied at start; reads continue
        /// without a failed one.
        #[key("object_store.cache_dirs", list(64, path()), Restart, example "[\"/data1/uniffle-cache\", \"/data2/uniffle-cache\"]")]
        pub cache_dirs: Vec<PathBuf> = Vec::new(),
        /// Size of the read cache, divided equally among cache_dirs.
        #[key("object_store.cache_capacity", size(0..=CACHE_BYTES_MAX), Restart, example "\"200GB\"")]
        pub cache_bytes: u64 = 0,
        /// Access key for credentials = "environment".
        #[env("AWS_ACCESS_KEY_ID", optional(secret("an access key", secret_text)))]
        pub access_key: Option<Secret> = None,
        /// Secret key for credentials = "environment".
        #[env("AWS_SECRET_ACCESS_KEY", optional(secret("a secret key", secret_text)))]
        pub secret_key: Option<Secret> = None,
        /// Session token for credentials = "environment" with temporary keys.
        #[env("AWS_SESSION_TOKEN", optional(secret("a session token", secret_text)))]
        pub session_token: Option<Secret> = None,
        /// Role for credentials = "web_identity".
        #[env("AWS_ROLE_ARN", optional(parsed("ARN of a role", any_text)))]
        pub role_arn: Option<String> = None,
        /// File of the token for credentials = "web_identity".
        #[env("AWS_WEB_IDENTITY_TOKEN_FILE", optional(text("a file", |text| Ok(PathBuf::from(text)), |path| path.display().to_string())))]
        pub web_identity_token_file: Option<PathBuf> = None,
        /// URL of STS for credentials = "web_identity". Default: that of the region.
        #[env("AWS_ENDPOINT_URL_STS", optional(parsed("a URL", any_text)))]
        pub sts_endpoint: Option<String> = None,
    }
}

impl ObjectConfig {
    /// Creates the disks of the read cache.
    pub fn cache_disks(&self) -> Vec<Arc<dyn Disk>> {
        let disk =
            |path: &PathBuf| -> Arc<dyn Disk> { Arc::new(BlockingDisk::new(path, CACHE_CALLS, CACHE_CALLS)) };
        self.cache_dirs.iter().map(disk).collect()
    }

    /// Returns settings that cannot be used, if a bucket is set: key, value and requirement.
    pub fn problems(&self) -> Vec<(&'static str, String, String)> {
        let mut problems = Vec::new();
        if self.url.is_none() {
            return problems;
        }
        if !cfg!(feature = "object") {
            let allowed = "must be unset; this build has no object storage (feature `object`)";
            let url = self.url.as_ref().map(ToString::to_string).unwrap_or_default();
            problems.push(("object_store.url", url, allowed.to_owned()));
        }
        if self.credentials == Credentials::File && self.credentials_file.is_none() {
            let allowed = "is required with object_store.credentials = \"file\"".to_owned();
            problems.push(("object_store.credentials_file", "(absent)".to_owned(), allowed));
        }
        let is_encrypted = self.endpoint.as_ref().is_none_or(StoreEndpoint::is_encrypted);
        if let Some(file) = self.ca_file.as_ref().filter(|_| !is_encrypted) {
            let allowed = "must be unset with an object_store.endpoint that is not https".to_owned();
            problems.push(("object_store.ca_file", file.display().to_string(), allowed));
        }
        if self.offload_low >= self.offload_high {
            let allowed =
                format!("must be less than object_store.offload_high_watermark ({})", self.offload_high);
            problems.push(("object_store.offload_low_watermark", self.offload_low.to_string(), allowed));
        }
        problems.extend(self.cache_problem());
        let has_dot = self.url.as_ref().is_some_and(|url| url.bucket().contains('.'));
        if has_dot && !self.path_style && is_encrypted {
            // A certificate for `*.s3.example.com` does not cover `a.b.s3.example.com`.
            let allowed =
                "must be true for a bucket with a dot in its name, because no certificate covers its host \
                 name"
                    .to_owned();
            problems.push(("object_store.path_style", "false".to_owned(), allowed));
        }
        problems
    }

    /// Returns the first invalid setting of the read cache.
    fn cache_problem(&self) -> Option<(&'static str, String, String)> {
        let directories = self.cache_dirs.len() as u64;
        let least = directories * CACHE_BYTES_MIN;
        if directories > 0 && self.cache_bytes < least {
            let allowed = format!("must be at least {least} bytes for {directories} object_store.cache_dirs");
            return Some(("object_store.cache_capacity", self.cache_bytes.to_string(), allowed));
        }
        let is_twice = |(at, path): (usize, &PathBuf)| self.cache_dirs[..at].contains(path);
        if self.cache_dirs.iter().enumerate().any(is_twice) {
            let all: Vec<_> = self.cache_dirs.iter().map(|path| path.display().to_string()).collect();
            let allowed = "must contain each directory once".to_owned();
            return Some(("object_store.cache_dirs", all.join(", "), allowed));
        }
        None
    }

    /// Returns warnings about valid settings that have no effect or are insecure.
    pub fn warnings(&self) -> Vec<String> {
        let mut warnings = Vec::new();
        if self.url.is_none() {
            return warnings;
        }
        if self.credentials != Credentials::File && self.credentials_file.is_some() {
            warnings.push(format!(
                "object_store.credentials_file has no effect with object_store.credentials = \"{}\"",
                self.credentials.as_str()
            ));
        }
        if self.cache_dirs.is_empty() && self.cache_bytes > 0 {
            warnings
                .push("object_store.cache_capacity has no effect without object_store.cache_dirs".to_owned());
        }
        if self.endpoint.as_ref().is_some_and(|endpoint| !endpoint.is_encrypted()) {
            warnings.push(
                "object_store.endpoint is not https; shuffle data and requests are readable on the network"
                    .to_owned(),
            );
        }
        warnings
    }
}

fn endpoint() -> Kind<StoreEndpoint> {
    parsed("http:// or https:// with host and port", StoreEndpoint::parse)
}

fn region(text: &str) -> Result<String, String> {
    let is_plain = |c: char| c.is_ascii_alphanumeric() || c == '-';
    match (1..=64).contains(&text.len()) && text.chars().all(is_plain) {
        true => Ok(text.to_owned()),
        false => Err("a region such as \"eu-central-1\"".to_owned()),
    }
}

fn profile(text: &str) -> Result<String, String> {
    match (1..=100).contains(&text.len()) && text.chars().all(|c| c.is_ascii_graphic() && c != ']') {
        true => Ok(text.to_owned()),
        false => Err("the name of a section of credentials_file".to_owned()),
    }
}

/// Accepts any text, because other programs define these variables. Errors are reported on use.
fn any_text(text: &str) -> Result<String, String> {
    Ok(text.to_owned())
}

fn secret_text(text: &str) -> Result<Secret, String> {
    Ok(Secret::new(text.trim()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn secrets_are_not_shown() {
        let config = ObjectConfig { secret_key: Some(Secret::new("hush")), ..ObjectConfig::default() };
        let shown = format!("{config:?}");
        assert!(!shown.contains("hush") && shown.contains("Secret(hidden)"), "{shown}");
    }

    fn with(change: impl FnOnce(&mut ObjectConfig)) -> Vec<&'static str> {
        let mut config =
            ObjectConfig { url: BucketUrl::parse("s3://shuffle/x").ok(), ..ObjectConfig::default() };
        change(&mut config);
        config.problems().into_iter().map(|(key, ..)| key).filter(|key| *key != "object_store.url").collect()
    }

    #[test]
    fn contradictory_settings_are_named() {
        assert!(with(|_| ()).is_empty());
        assert_eq!(with(|config| config.credentials = Credentials::File), ["object_store.credentials_file"]);
        let clear = |config: &mut ObjectConfig| {
            config.endpoint = StoreEndpoint::parse("http://x:1").ok();
            config.ca_file = Some(PathBuf::from("/ca"));
        };
        assert_eq!(with(clear), ["object_store.ca_file"]);
        let small = |config: &mut ObjectConfig| config.cache_dirs = vec![PathBuf::from("/cache")];
        assert_eq!(with(small), ["object_store.cache_capacity"]);
        let twice = |config: &mut ObjectConfig| {
            (config.cache_dirs, config.cache_bytes) = (vec![PathBuf::from("/cache"); 2], 1 << 40);
        };
        assert_eq!(with(twice), ["object_store.cache_dirs"]);
        let dotted = |config: &mut ObjectConfig| config.url = BucketUrl::parse("s3://a.b/x").ok();
        assert_eq!(with(dotted), ["object_store.path_style"]);
        assert!(
            ObjectConfig { credentials: Credentials::File, ..ObjectConfig::default() }.problems().is_empty()
        );
    }

    #[test]
    fn ineffective_settings_are_reported() {
        let config = ObjectConfig {
            url: BucketUrl::parse("s3://shuffle/x").ok(),
            endpoint: StoreEndpoint::parse("http://x:1").ok(),
            credentials_file: Some(PathBuf::from("/c")),
            ..ObjectConfig::default()
        };
        let warnings = config.warnings().join("\n");
        assert!(
            warnings.contains("credentials_file has no effect") && warnings.contains("not https"),
            "{warnings}"
        );
    }
}
