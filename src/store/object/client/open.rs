//! Builds the client from the configuration.
//!
//! `object_store` gets the bucket, the credentials, the checksums and the limits of retries. HTTP,
//! TLS and timeouts are those of the client's own `HttpTransport`. Opening sends no request, and no
//! error contains a secret.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use object_store::aws::{AmazonS3, AmazonS3Builder, AmazonS3ConfigKey, AwsCredentialProvider, Checksum};
use object_store::prefix::PrefixStore;
use object_store::{BackoffConfig, ObjectStore, RetryConfig};
use prometheus::Registry;

use super::connect::Connector;
use super::credentials::{FileCredentials, is_valid_header_value};
use super::metrics::Metrics;
use super::service::{AttemptTimeouts, HttpTransport};
use super::trust::{self, OpenError};
use crate::runtime::Tasks;
use crate::schema::files;
use crate::store::object::location::{BucketUrl, StoreEndpoint};
use crate::store::object::{Credentials, ObjectConfig, Secret, UploadCheck};

/// Maximum number of retries. `object_store.retry_timeout_sec` may end them earlier.
const RETRIES_MAX: usize = 10;

/// Largest token file of a web identity.
const TOKEN_BYTES_MAX: u64 = 64 << 10;
/// Pauses between two attempts: random and growing.
const BACKOFF: BackoffConfig = BackoffConfig {
    init_backoff: Duration::from_millis(100),
    max_backoff: Duration::from_secs(10),
    base: 2.0,
};

/// The client of a configured store.
pub struct Client {
    pub(super) s3: AmazonS3,
    pub(super) transport: HttpTransport,
    url: BucketUrl,
    /// URL of the bucket, without a slash at its end.
    pub(super) bucket_url: String,
    pub(super) region: String,
    is_signed: bool,
}

impl fmt::Debug for Client {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Client")
            .field("url", &self.url)
            .field("transport", &self.transport)
            .finish_non_exhaustive()
    }
}

impl Client {
    /// Creates a client. Sends no request, but blocks on small files. Connections become tasks of
    /// `tasks`.
    ///
    /// # Errors
    /// [`OpenError`], if a setting, file or variable is missing or unusable.
    pub fn open(config: &ObjectConfig, tasks: &Tasks, registry: &Registry) -> Result<Self, OpenError> {
        let url = config.url.clone().ok_or_else(|| OpenError::new("object_store.url", "absent"))?;
        if let Some(problem) = check_files(config).into_iter().next() {
            return Err(problem);
        }
        let metrics = Metrics::new(registry).map_err(|error| OpenError::new("metrics", error.to_string()))?;
        metrics.init_series();
        let metrics = Arc::new(metrics);
        let is_encrypted = needs_tls(config);
        let tls = is_encrypted.then(|| trust::client_config(config.ca_file.as_deref())).transpose()?;
        let connector =
            Connector::new(tls, config.connect_timeout, tasks.clone(), metrics.connections.clone());
        let timeouts = AttemptTimeouts { request: config.request_timeout, stall: config.stall_timeout };
        let transport = HttpTransport::new(connector, config.max_concurrency, timeouts, metrics);
        let bucket_url = bucket_url(config, &url);
        let builder = AmazonS3Builder::new()
            .with_bucket_name(url.bucket())
            .with_region(&config.region)
            .with_retry(retry_config(config.retry_timeout))
            // The response to a bulk deletion names objects, and `object_store` panics on one that
            // was not requested.
            .with_disable_bulk_delete(true)
            .with_unsigned_payload(config.upload_check != UploadCheck::Signature)
            .with_virtual_hosted_style_request(!config.path_style)
            .with_http_connector(transport.clone());
        let builder = match &config.endpoint {
            None => builder,
            Some(endpoint) if config.path_style => builder.with_endpoint(endpoint.to_string()),
            Some(endpoint) => builder.with_endpoint(endpoint.virtual_hosted(url.bucket()).to_string()),
        };
        let builder = match config.upload_check {
            UploadCheck::Crc64 => builder.with_checksum_algorithm(Checksum::CRC64NVME),
            UploadCheck::Signature | UploadCheck::Off => builder,
        };
        let s3 = with_credentials(builder, config).build();
        let s3 = s3.map_err(|error| OpenError::new("object_store", error.to_string()))?;
        let (region, is_signed) = (config.region.clone(), config.credentials != Credentials::Unsigned);
        Ok(Self { s3, transport, url, bucket_url, region, is_signed })
    }

    /// Returns the store, with paths below the prefix of `object_store.url`.
    pub fn store(&self) -> Arc<dyn ObjectStore> {
        let s3 = self.s3.clone();
        match self.url.prefix() {
            "" => Arc::new(s3),
            prefix => Arc::new(PrefixStore::new(s3, prefix)),
        }
    }

    /// Returns the bucket and the prefix.
    pub fn url(&self) -> &BucketUrl {
        &self.url
    }

    /// Returns the provider of the credentials, or `None` if requests are unsigned.
    pub(super) fn credentials(&self) -> Option<&AwsCredentialProvider> {
        self.is_signed.then(|| self.s3.credentials())
    }
}

/// Checks the files and environment variables that TLS and the credentials need. Returns the
/// problems, without any secret.
#[must_use]
pub fn check_files(config: &ObjectConfig) -> Vec<OpenError> {
    let mut problems = Vec::new();
    if needs_tls(config) {
        problems.extend(trust::client_config(config.ca_file.as_deref()).err());
    }
    match config.credentials {
        Credentials::Unsigned => {}
        Credentials::Environment => problems.extend(problems_of_environment(config)),
        Credentials::File => problems.extend(check_credentials_file(config).err()),
        Credentials::WebIdentity => problems.extend(problems_of_web_identity(config)),
    }
    problems
}

fn missing_variable(config: &ObjectConfig, variable: &str) -> OpenError {
    let reason = format!("\"{}\" needs {variable} in the environment", config.credentials.as_str());
    OpenError::new("object_store.credentials", reason)
}

fn problems_of_environment(config: &ObjectConfig) -> impl Iterator<Item = OpenError> {
    let variables = [
        ("AWS_ACCESS_KEY_ID", config.access_key.as_ref(), true),
        ("AWS_SECRET_ACCESS_KEY", config.secret_key.as_ref(), true),
        ("AWS_SESSION_TOKEN", config.session_token.as_ref(), false),
    ];
    variables.into_iter().filter_map(|(variable, secret, is_needed)| match secret {
        None if is_needed => Some(missing_variable(config, variable)),
        Some(secret) if !is_valid_header_value(secret.reveal()) => {
            let reason = format!("{variable} has characters that are invalid in a header");
            Some(OpenError::new("object_store.credentials", reason))
        }
        Some(_) | None => None,
    })
}

fn check_credentials_file(config: &ObjectConfig) -> Result<(), OpenError> {
    const SETTING: &str = "object_store.credentials_file";
    let path = config.credentials_file.as_ref().ok_or_else(|| OpenError::new(SETTING, "absent"))?;
    let checked = FileCredentials::new(path, &config.profile).check();
    checked.map_err(|error| OpenError::new(SETTING, error.to_string()))
}

fn problems_of_web_identity(config: &ObjectConfig) -> impl Iterator<Item = OpenError> {
    let wrong = |reason: String| OpenError::new("object_store.credentials", reason);
    let role = config.role_arn.is_none().then(|| missing_variable(config, "AWS_ROLE_ARN"));
    let token = match &config.web_identity_token_file {
        None => Some(missing_variable(config, "AWS_WEB_IDENTITY_TOKEN_FILE")),
        Some(path) => files::read_text(path, TOKEN_BYTES_MAX)
            .err()
            .map(|error| wrong(format!("AWS_WEB_IDENTITY_TOKEN_FILE = {}: {error}", path.display()))),
    };
    let endpoint = config.sts_endpoint.as_deref().and_then(|endpoint| StoreEndpoint::parse(endpoint).err());
    let endpoint = endpoint.map(|allowed| wrong(format!("AWS_ENDPOINT_URL_STS must be {allowed}")));
    [role, token, endpoint].into_iter().flatten()
}

/// Returns whether requests to the store or to STS need TLS.
fn needs_tls(config: &ObjectConfig) -> bool {
    let is_plain = |endpoint: &StoreEndpoint| !endpoint.is_encrypted();
    let store_is_plain = config.endpoint.as_ref().is_some_and(is_plain);
    let sts = config.sts_endpoint.as_deref().and_then(|text| StoreEndpoint::parse(text).ok());
    let asks_sts = config.credentials == Credentials::WebIdentity;
    !store_is_plain || (asks_sts && !sts.as_ref().is_some_and(is_plain))
}

fn bucket_url(config: &ObjectConfig, url: &BucketUrl) -> String {
    let (bucket, region) = (url.bucket(), &config.region);
    match (&config.endpoint, config.path_style) {
        (Some(endpoint), true) => format!("{endpoint}/{bucket}"),
        (Some(endpoint), false) => endpoint.virtual_hosted(bucket).to_string(),
        (None, true) => format!("https://s3.{region}.amazonaws.com/{bucket}"),
        (None, false) => format!("https://{bucket}.s3.{region}.amazonaws.com"),
    }
}

fn with_credentials(builder: AmazonS3Builder, config: &ObjectConfig) -> AmazonS3Builder {
    let revealed = |secret: &Option<Secret>| {
        secret.as_ref().map(|secret| secret.reveal().to_owned()).unwrap_or_default()
    };
    match config.credentials {
        Credentials::Unsigned => builder.with_skip_signature(true),
        Credentials::Environment => {
            let builder = builder
                .with_access_key_id(revealed(&config.access_key))
                .with_secret_access_key(revealed(&config.secret_key));
            match &config.session_token {
                Some(token) => builder.with_token(token.reveal()),
                None => builder,
            }
        }
        Credentials::File => {
            let path = config.credentials_file.clone().unwrap_or_default();
            builder.with_credentials(Arc::new(FileCredentials::new(&path, &config.profile)))
        }
        Credentials::WebIdentity => {
            let token_file = config.web_identity_token_file.clone().unwrap_or_default();
            let settings = [
                (AmazonS3ConfigKey::WebIdentityTokenFile, Some(token_file.display().to_string())),
                (AmazonS3ConfigKey::RoleArn, config.role_arn.clone()),
                (AmazonS3ConfigKey::RoleSessionName, Some("uniffle-worker".to_owned())),
                (AmazonS3ConfigKey::StsEndpoint, config.sts_endpoint.clone()),
            ];
            let given = settings.into_iter().filter_map(|(key, value)| Some((key, value?)));
            given.fold(builder, |builder, (key, value)| builder.with_config(key, value))
        }
    }
}

fn retry_config(timeout: Duration) -> RetryConfig {
    let max_retries = if timeout.is_zero() { 0 } else { RETRIES_MAX };
    RetryConfig { backoff: BACKOFF, max_retries, retry_timeout: timeout }
}
