//! How the object tier reaches its store: its section of the configuration.

use std::fmt;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use uniffle_io::blocking::BlockingDisk;
use uniffle_io::{Disk, Engine};

use super::location::{BucketUrl, Endpoint};
use crate::schema::kind::{
    DAY, HOUR, Kind, MIB, SECOND, count, flag, list, optional, parsed, path, ratio, seconds, secret, size,
    text, word,
};
use crate::schema::{section, words};

words! {
    /// Where the keys come from that requests are signed with.
    pub enum Credentials {
        /// The process's environment.
        Environment = "environment",
        /// A file as the AWS command line has it.
        File = "file",
        /// A token that Kubernetes puts into a file, exchanged for keys of a role at STS.
        WebIdentity = "web_identity",
        /// Requests are not signed.
        Unsigned = "none",
    }
}

words! {
    /// How the store finds out that a body was changed on its way to it.
    pub enum UploadCheck {
        /// By a CRC beside the body.
        Crc64 = "crc64nvme",
        /// The request's signature covers the body's SHA-256.
        Signature = "signature",
        /// Not at all: TLS and the blocks' own checksums are left.
        Off = "off",
    }
}

/// A key that is never shown.
#[derive(Clone, PartialEq, Eq)]
pub struct Secret(String);

impl Secret {
    /// Takes `text` as a secret.
    pub fn new(text: impl Into<String>) -> Self {
        Self(text.into())
    }

    /// The text, for who signs with it.
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
/// Smallest part of it that a directory may have: what some readers need at a time.
const CACHE_BYTES_MIN: u64 = 64 * MIB;

/// Reads of a disk of the read cache at a time, and writes.
const CACHE_CALLS: usize = 16;

/// Smallest part of an upload that S3 takes.
const PART_BYTES_MIN: u64 = 5 * MIB;

section! {
    /// How the tier reaches its store.
    #[table("object_store", "Object storage that speaks S3. Access keys never stand here, only the place they come from.")]
    pub struct ObjectConfig {
        /// Bucket and prefix, below which every worker has a prefix of its own.
        #[key("object_store.url", optional(parsed("s3://bucket/prefix", BucketUrl::parse)), Restart, example "\"s3://shuffle/uniffle\"")]
        pub url: Option<BucketUrl> = None,
        /// The server. Default: Amazon's of the region.
        #[key("object_store.endpoint", optional(endpoint()), Restart, example "\"https://s3.example.com:9000\"")]
        pub endpoint: Option<Endpoint> = None,
        /// The region that requests are signed for; servers other than Amazon's mostly take any.
        #[key("object_store.region", parsed("a region such as \"eu-central-1\"", region), Restart)]
        pub region: String = "us-east-1".to_owned(),
        /// Whether the bucket stands in the path of a request and not in the name of the host. Default: with an endpoint.
        #[key("object_store.path_style", flag(), Restart, example "true")]
        pub path_style: bool = endpoint.is_some(),
        /// Where the keys come from that requests are signed with: environment = AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, file =
        /// credentials_file, web_identity = AWS_WEB_IDENTITY_TOKEN_FILE exchanged for keys of AWS_ROLE_ARN, none = requests are
        /// not signed.
        #[key("object_store.credentials", word(), Restart)]
        pub credentials: Credentials = Credentials::Environment,
        /// A file as the AWS command line has it (aws_access_key_id, aws_secret_access_key, aws_session_token, expiration). It is
        /// read again when it changes.
        #[key("object_store.credentials_file", optional(path()), Restart, example "\"/etc/uniffle-worker/s3-credentials\"")]
        pub credentials_file: Option<PathBuf> = None,
        /// The section of credentials_file.
        #[key("object_store.profile", parsed("1 to 100 printable characters", profile), Restart)]
        pub profile: String = "default".to_owned(),
        /// PEM file: who must have signed the server's certificate. Default: whom the machine trusts.
        #[key("object_store.ca_file", optional(path()), Restart, example "\"/etc/uniffle-worker/s3-ca.crt\"")]
        pub ca_file: Option<PathBuf> = None,
        /// Write, read and delete an object at start, and do not start if that fails.
        #[key("object_store.precheck_enable", flag(), Restart)]
        pub precheck: bool = false,
        /// Time to find, reach and greet the server.
        #[key("object_store.connect_timeout_sec", seconds(SECOND..=HOUR), Restart)]
        pub connect_timeout: Duration = 5 * SECOND,
        /// Time of one attempt of a request, from its first byte to the last of its answer; every MiB adds a second.
        #[key("object_store.request_timeout_sec", seconds(SECOND..=HOUR), Restart)]
        pub request_timeout: Duration = 30 * SECOND,
        /// Longest time without a byte of an answer that has begun.
        #[key("object_store.stall_timeout_sec", seconds(SECOND..=HOUR), Restart)]
        pub stall_timeout: Duration = 10 * SECOND,
        /// Since the first attempt of a request; after that no other is begun.
        #[key("object_store.retry_timeout_sec", seconds(Duration::ZERO..=DAY), Restart)]
        pub retry_timeout: Duration = 60 * SECOND,
        /// Requests under way at a time: so many uploads, and so many others.
        #[key("object_store.max_concurrency", count(1..=1024), Restart)]
        pub max_concurrency: usize = 16,
        /// How the store finds out that a body was changed on its way: crc64nvme, signature (SHA-256, which costs more) or off, for
        /// stores that know neither. Reads are checked in any case.
        #[key("object_store.upload_check", word(), Restart)]
        pub upload_check: UploadCheck = UploadCheck::Crc64,
        /// Parts that objects are uploaded in.
        #[key("object_store.part_size", size(PART_BYTES_MIN..=64 * MIB), Restart)]
        pub part_bytes: usize = 8 << 20,
        /// Objects of data: about as large as this, whatever number of partitions they hold.
        #[key("object_store.segment_size", size(64 * MIB..=256 * MIB), Restart)]
        pub segment_bytes: u64 = 128 * MIB,
        /// With local disks: a disk filled beyond this share has its largest and oldest shuffles moved to the store, ...
        #[key("object_store.offload_high_watermark", ratio(), Restart)]
        pub offload_high: f64 = 0.6,
        /// ... until it is below this one.
        #[key("object_store.offload_low_watermark", ratio(), Restart)]
        pub offload_low: f64 = 0.5,
        /// Directories for the read cache, one per disk: parts of objects that were read, so that the next reader of them asks for
        /// nothing. Nothing in it outlives the process. A disk that fails is left alone; reads go on without it.
        #[key("object_store.cache_dirs", list(64, path()), Restart, example "[\"/data1/uniffle-cache\", \"/data2/uniffle-cache\"]")]
        pub cache_dirs: Vec<PathBuf> = Vec::new(),
        /// Bytes of the read cache, on all cache_dirs together; each gets the same part.
        #[key("object_store.cache_capacity", size(0..=CACHE_BYTES_MAX), Restart, example "\"200GB\"")]
        pub cache_bytes: u64 = 0,
        /// For credentials = "environment".
        #[env("AWS_ACCESS_KEY_ID", optional(secret("an access key", secret_text)))]
        pub access_key: Option<Secret> = None,
        /// For credentials = "environment".
        #[env("AWS_SECRET_ACCESS_KEY", optional(secret("its secret", secret_text)))]
        pub secret_key: Option<Secret> = None,
        /// For credentials = "environment", with keys that were lent.
        #[env("AWS_SESSION_TOKEN", optional(secret("their token", secret_text)))]
        pub session_token: Option<Secret> = None,
        /// For credentials = "web_identity".
        #[env("AWS_ROLE_ARN", optional(parsed("a role's ARN", any_text)))]
        pub role_arn: Option<String> = None,
        /// For credentials = "web_identity".
        #[env("AWS_WEB_IDENTITY_TOKEN_FILE", optional(text("a file", |text| Ok(PathBuf::from(text)), |path| path.display().to_string())))]
        pub web_identity_token_file: Option<PathBuf> = None,
        /// For credentials = "web_identity": another STS than the region's.
        #[env("AWS_ENDPOINT_URL_STS", optional(parsed("a URL", any_text)))]
        pub sts_endpoint: Option<String> = None,
    }
}

impl ObjectConfig {
    /// The disks of the read cache.
    pub fn cache_disks(&self) -> Vec<Arc<dyn Disk>> {
        let disk = |path: &PathBuf| Engine::Blocking.disk(BlockingDisk::new(path, CACHE_CALLS, CACHE_CALLS));
        self.cache_dirs.iter().map(disk).collect()
    }

    /// What may not stand together: key, value and what is allowed.
    pub fn problems(&self) -> Vec<(&'static str, String, String)> {
        let mut problems = Vec::new();
        if self.url.is_none() {
            return problems;
        }
        if !cfg!(feature = "object") {
            let allowed =
                "no URL: this build has no object storage (it was made without the feature `object`)";
            let url = self.url.as_ref().map(ToString::to_string).unwrap_or_default();
            problems.push(("object_store.url", url, allowed.to_owned()));
        }
        if self.credentials == Credentials::File && self.credentials_file.is_none() {
            let allowed = "needed with object_store.credentials = \"file\"".to_owned();
            problems.push(("object_store.credentials_file", "(absent)".to_owned(), allowed));
        }
        let is_encrypted = self.endpoint.as_ref().is_none_or(Endpoint::is_encrypted);
        if let Some(file) = self.ca_file.as_ref().filter(|_| !is_encrypted) {
            let allowed = "no file with an object_store.endpoint that is not https".to_owned();
            problems.push(("object_store.ca_file", file.display().to_string(), allowed));
        }
        if self.offload_low >= self.offload_high {
            let allowed = format!("less than object_store.offload_high_watermark ({})", self.offload_high);
            problems.push(("object_store.offload_low_watermark", self.offload_low.to_string(), allowed));
        }
        problems.extend(self.cache_problem());
        let has_dot = self.url.as_ref().is_some_and(|url| url.bucket().contains('.'));
        if has_dot && !self.path_style && is_encrypted {
            // A certificate for *.s3.example.com is not one for a.b.s3.example.com.
            let allowed =
                "true for a bucket with a dot in its name, which no certificate covers as a host".to_owned();
            problems.push(("object_store.path_style", "false".to_owned(), allowed));
        }
        problems
    }

    /// What keeps the read cache from being one.
    fn cache_problem(&self) -> Option<(&'static str, String, String)> {
        let directories = self.cache_dirs.len() as u64;
        let least = directories * CACHE_BYTES_MIN;
        if directories > 0 && self.cache_bytes < least {
            let allowed = format!("at least {least} bytes for {directories} object_store.cache_dirs");
            return Some(("object_store.cache_capacity", self.cache_bytes.to_string(), allowed));
        }
        let is_twice = |(at, path): (usize, &PathBuf)| self.cache_dirs[..at].contains(path);
        if self.cache_dirs.iter().enumerate().any(is_twice) {
            let all: Vec<_> = self.cache_dirs.iter().map(|path| path.display().to_string()).collect();
            let allowed = "each directory once".to_owned();
            return Some(("object_store.cache_dirs", all.join(", "), allowed));
        }
        None
    }

    /// What is accepted and of no use.
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
            warnings.push("object_store.endpoint is not https: who can listen reads shuffle data".to_owned());
        }
        warnings
    }
}

fn endpoint() -> Kind<Endpoint> {
    parsed("http:// or https:// with host and port", Endpoint::parse)
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

/// Variables of other programs: what is wrong with one is said when it is used.
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
            config.endpoint = Endpoint::parse("http://x:1").ok();
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
            endpoint: Endpoint::parse("http://x:1").ok(),
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
