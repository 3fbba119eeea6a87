//! Classifies errors of the store: whether it will recover, and if not, what the operator has to
//! do. A response with an unknown text or status is retryable, except for 4xx.
//!
//! `object_store` does not expose the type of errors in responses. The store's message is in the
//! text, as the `<Code>` of S3's XML or as the status. Errors of the connection (`HttpError`) and
//! of the credentials are typed. `tests/contract` checks the classification of errors of servers.
//! Does no I/O.

use std::error::Error as StdError;
use std::fmt;

use object_store::client::{HttpError, HttpErrorKind};

use super::connect::Untrusted;
use super::credentials::CredentialsError;

/// Text of `object_store` for a redirect without a location. It contains neither status nor code.
const BARE_REDIRECT: &str = "redirect without LOCATION";

/// Texts of `object_store` for a response with another range than requested.
const RANGE_MISMATCH_TEXTS: [&str; 4] =
    [": Requested ", "non-partial response", "Content-Range", "CONTENT_RANGE"];

/// Class of an error.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Failure {
    /// Transient: the store does not respond, is overloaded or broken, and will recover with its
    /// data.
    Retryable,
    /// Permanent: the store refuses until an operator intervenes.
    Refused(StoreRefusal),
    /// The object or the upload does not exist.
    NotFound,
    /// The response does not match the request: it has other bytes, or the object was replaced.
    Mismatch,
}

/// Reason for which a store refuses.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum StoreRefusal {
    /// The credentials lack a permission.
    AccessDenied,
    /// The store does not know the access key.
    UnknownKey,
    /// The secret does not match the access key.
    WrongSecret,
    /// The temporary credentials have expired.
    CredentialsExpired,
    /// No credentials are available.
    NoCredentials,
    /// The bucket does not exist.
    BucketMissing,
    /// The clocks differ by more than the store tolerates.
    ClockSkew,
    /// The bucket is in another region.
    WrongRegion,
    /// The server is not authenticated as the store.
    NotTrusted,
    /// The store is full, or a quota is exceeded.
    Full,
    /// The server rejects the request, most often because it does not support it.
    Unsupported,
}

impl StoreRefusal {
    /// Returns the reason as a part of a sentence.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::AccessDenied => "the store denies access",
            Self::UnknownKey => "the store does not know the access key",
            Self::WrongSecret => "the secret does not match the access key",
            Self::CredentialsExpired => "the credentials have expired",
            Self::NoCredentials => "no credentials found",
            Self::BucketMissing => "the bucket does not exist",
            Self::ClockSkew => "the clocks of this machine and of the store differ",
            Self::WrongRegion => "the bucket is in another region",
            Self::NotTrusted => "the server's certificate is not trusted",
            Self::Full => "the store is full or a quota is used up",
            Self::Unsupported => "the store rejects the request",
        }
    }

    /// Returns the remedy.
    pub fn remedy(self) -> &'static str {
        match self {
            Self::AccessDenied => {
                "allow s3:GetObject, s3:PutObject, s3:DeleteObject, s3:AbortMultipartUpload, s3:ListBucket and \
                 s3:ListBucketMultipartUploads below object_store.url"
            }
            Self::UnknownKey | Self::WrongSecret => {
                "compare the keys with those of the store (object_store.credentials)"
            }
            Self::CredentialsExpired => {
                "renew them; a credentials_file is read again when it changes, the environment only at \
                 start"
            }
            Self::NoCredentials => "check object_store.credentials and its file or variables",
            Self::BucketMissing => "create the bucket, or correct object_store.url, endpoint and path_style",
            Self::ClockSkew => "set the clock (NTP) of this machine or of the store",
            Self::WrongRegion => {
                "set object_store.region to the bucket's region, and correct object_store.endpoint if set"
            }
            Self::NotTrusted => {
                "set object_store.ca_file to the authority of the store, and correct the endpoint"
            }
            Self::Full => "free space or raise the quota",
            Self::Unsupported => {
                "see the store's message; stores differ in object_store.upload_check and path_style"
            }
        }
    }
}

impl fmt::Display for StoreRefusal {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}", self.as_str(), self.remedy())
    }
}

impl Failure {
    /// Classifies `error`.
    pub fn classify(error: &object_store::Error) -> Self {
        for cause in causes(error) {
            if let Some(error) = cause.downcast_ref::<CredentialsError>() {
                return Self::Refused(match error {
                    CredentialsError::Expired { .. } => StoreRefusal::CredentialsExpired,
                    CredentialsError::Unreadable { .. } | CredentialsError::Incomplete { .. } => {
                        StoreRefusal::NoCredentials
                    }
                });
            }
            if let Some(error) = cause.downcast_ref::<HttpError>() {
                let is_untrusted = error.source().is_some_and(|source| source.is::<Untrusted>());
                return match error.kind() {
                    HttpErrorKind::Decode => Self::Mismatch,
                    _ if is_untrusted => Self::Refused(StoreRefusal::NotTrusted),
                    _ => Self::Retryable,
                };
            }
        }
        let text = error.to_string();
        if let Some(failure) = s3_error_code(&text).and_then(from_code) {
            return failure;
        }
        match error {
            object_store::Error::NotFound { .. } => Self::NotFound,
            object_store::Error::PermissionDenied { .. } | object_store::Error::Unauthenticated { .. } => {
                Self::Refused(StoreRefusal::AccessDenied)
            }
            object_store::Error::Precondition { .. } => Self::Mismatch,
            // Another operation on the same object was in progress. A lost conditional put has
            // the same error, and `claim` recognizes that case itself.
            object_store::Error::AlreadyExists { .. } => Self::Retryable,
            object_store::Error::Generic { .. } if text.contains(BARE_REDIRECT) => {
                Self::Refused(StoreRefusal::WrongRegion)
            }
            object_store::Error::Generic { .. }
                if RANGE_MISMATCH_TEXTS.iter().any(|part| text.contains(part)) =>
            {
                Self::Mismatch
            }
            object_store::Error::Generic { .. } => from_status(status(&text)),
            _ => Self::Refused(StoreRefusal::Unsupported),
        }
    }
}

/// Describes the error in one line: its class, the store's message and the remedy. Contains no
/// credentials.
pub fn explain(error: &object_store::Error) -> String {
    const SHOWN_CHARS_MAX: usize = 300;
    let text = error.to_string();
    let cause = match s3_error_code(&text) {
        Some(code) => code.to_owned(),
        None => causes(error).last().map_or_else(String::new, ToString::to_string),
    };
    let cause: String =
        cause.chars().map(|c| if c.is_control() { ' ' } else { c }).take(SHOWN_CHARS_MAX).collect();
    match Failure::classify(error) {
        Failure::Retryable => format!("the store fails ({cause})"),
        Failure::Refused(refusal) => format!("{} ({cause}): {}", refusal.as_str(), refusal.remedy()),
        Failure::NotFound => format!("object not found ({cause})"),
        Failure::Mismatch => format!("the response does not match the request ({cause})"),
    }
}

fn causes<'a>(error: &'a (dyn StdError + 'static)) -> impl Iterator<Item = &'a (dyn StdError + 'static)> {
    std::iter::successors(Some(error), |error: &&'a (dyn StdError + 'static)| (*error).source())
}

/// Returns S3's error code in `text`.
fn s3_error_code(text: &str) -> Option<&str> {
    let (_, rest) = text.split_once("<Code>")?;
    let (code, _) = rest.split_once("</Code>")?;
    (code.len() <= 100 && code.bytes().all(|byte| byte.is_ascii_alphanumeric())).then_some(code)
}

fn from_code(code: &str) -> Option<Failure> {
    let refusal = match code {
        "SlowDown" | "ServiceUnavailable" | "InternalError" | "RequestTimeout" | "Throttling" | "OperationAborted"
        | "TooManyRequests" | "ThrottlingException" | "RequestLimitExceeded" | "BandwidthLimitExceeded"
        // The body was changed in transit, so it is sent again.
        | "BadDigest" | "InvalidDigest" | "IncompleteBody" | "XAmzContentSHA256Mismatch" | "XAmzContentChecksumMismatch" => {
            return Some(Failure::Retryable);
        }
        "NoSuchKey" | "NoSuchUpload" => return Some(Failure::NotFound),
        "PreconditionFailed" | "InvalidRange" => return Some(Failure::Mismatch),
        "AccessDenied" | "AllAccessDisabled" | "AccountProblem" => StoreRefusal::AccessDenied,
        "InvalidAccessKeyId" | "InvalidClientTokenId" | "NotSignedUp" => StoreRefusal::UnknownKey,
        "SignatureDoesNotMatch" => StoreRefusal::WrongSecret,
        "ExpiredToken" | "ExpiredTokenException" | "TokenRefreshRequired" | "InvalidToken" => StoreRefusal::CredentialsExpired,
        "NoSuchBucket" | "InvalidBucketName" => StoreRefusal::BucketMissing,
        "RequestTimeTooSkewed" | "RequestExpired" => StoreRefusal::ClockSkew,
        "PermanentRedirect" | "TemporaryRedirect" | "AuthorizationHeaderMalformed" | "IllegalLocationConstraintException" => {
            StoreRefusal::WrongRegion
        }
        "QuotaExceeded" | "XMinioStorageFull" | "InsufficientCapacity" => StoreRefusal::Full,
        "NotImplemented" | "MethodNotAllowed" | "InvalidArgument" | "InvalidRequest" | "MalformedXML" => {
            StoreRefusal::Unsupported
        }
        _ => return None,
    };
    Some(Failure::Refused(refusal))
}

/// Returns the HTTP status in the text of an error.
fn status(text: &str) -> Option<u16> {
    let (_, rest) = text.split_once("status code: ")?;
    rest.get(..3)?.parse().ok()
}

fn from_status(status: Option<u16>) -> Failure {
    match status {
        Some(507) => Failure::Refused(StoreRefusal::Full),
        Some(501) => Failure::Refused(StoreRefusal::Unsupported),
        Some(300..=399) => Failure::Refused(StoreRefusal::WrongRegion),
        Some(408 | 429) => Failure::Retryable,
        Some(416) => Failure::Mismatch,
        Some(400..=499) => Failure::Refused(StoreRefusal::Unsupported),
        // Any other status, or none, is retried, because servers and proxies fail temporarily.
        _ => Failure::Retryable,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn generic(text: &str) -> object_store::Error {
        object_store::Error::Generic { store: "S3", source: text.to_owned().into() }
    }

    fn answered(status: &str, code: &str) -> object_store::Error {
        generic(&format!(
            "Error performing GET http://x/b/k in 1ms - Server returned non-2xx status code: {status}: \
             <?xml version=\"1.0\"?><Error><Code>{code}</Code><Message>m</Message></Error>"
        ))
    }

    #[test]
    fn error_code_determines_the_failure() {
        for (code, failure) in [
            ("SlowDown", Failure::Retryable),
            ("InternalError", Failure::Retryable),
            ("BadDigest", Failure::Retryable),
            ("NoSuchUpload", Failure::NotFound),
            ("AccessDenied", Failure::Refused(StoreRefusal::AccessDenied)),
            ("ExpiredToken", Failure::Refused(StoreRefusal::CredentialsExpired)),
            ("RequestTimeTooSkewed", Failure::Refused(StoreRefusal::ClockSkew)),
            ("NoSuchBucket", Failure::Refused(StoreRefusal::BucketMissing)),
            ("InvalidAccessKeyId", Failure::Refused(StoreRefusal::UnknownKey)),
            ("SignatureDoesNotMatch", Failure::Refused(StoreRefusal::WrongSecret)),
            ("AuthorizationHeaderMalformed", Failure::Refused(StoreRefusal::WrongRegion)),
            ("XMinioStorageFull", Failure::Refused(StoreRefusal::Full)),
        ] {
            assert_eq!(Failure::classify(&answered("400 Bad Request", code)), failure, "{code}");
        }
    }

    #[test]
    fn missing_bucket_is_not_a_missing_object() {
        let missing = |code: &str| object_store::Error::NotFound {
            path: "k".to_owned(),
            source: format!("status code: 404: <Code>{code}</Code>").into(),
        };
        assert_eq!(
            Failure::classify(&missing("NoSuchBucket")),
            Failure::Refused(StoreRefusal::BucketMissing)
        );
        assert_eq!(Failure::classify(&missing("NoSuchKey")), Failure::NotFound);
        assert_eq!(Failure::classify(&missing("Strange")), Failure::NotFound);
    }

    #[test]
    fn status_decides_without_error_code() {
        for (status, failure) in [
            ("500 Internal Server Error", Failure::Retryable),
            ("503 Service Unavailable", Failure::Retryable),
            ("429 Too Many Requests", Failure::Retryable),
            ("400 Bad Request", Failure::Refused(StoreRefusal::Unsupported)),
            ("501 Not Implemented", Failure::Refused(StoreRefusal::Unsupported)),
            ("301 Moved Permanently", Failure::Refused(StoreRefusal::WrongRegion)),
            ("507 Insufficient Storage", Failure::Refused(StoreRefusal::Full)),
        ] {
            assert_eq!(
                Failure::classify(&generic(&format!("Server returned non-2xx status code: {status}: "))),
                failure
            );
        }
        let bare = generic(
            "Received redirect without LOCATION, this normally indicates an incorrectly configured region",
        );
        assert_eq!(Failure::classify(&bare), Failure::Refused(StoreRefusal::WrongRegion));
        assert_eq!(Failure::classify(&generic("an unknown text")), Failure::Retryable);
    }

    #[test]
    fn connection_errors_are_classified() {
        let classify = |kind| {
            let error = HttpError::new(kind, std::io::Error::other("x"));
            Failure::classify(&object_store::Error::Generic { store: "S3", source: Box::new(error) })
        };
        assert_eq!(classify(HttpErrorKind::Connect), Failure::Retryable);
        assert_eq!(classify(HttpErrorKind::Timeout), Failure::Retryable);
        assert_eq!(classify(HttpErrorKind::Interrupted), Failure::Retryable);
        assert_eq!(classify(HttpErrorKind::Decode), Failure::Mismatch);
    }

    #[test]
    fn explanation_has_cause_and_remedy_in_one_line() {
        let text = explain(&answered("403 Forbidden", "ExpiredToken"));
        assert!(text.contains("have expired (ExpiredToken)") && text.contains("renew them"), "{text}");
        let text = explain(&generic("a\nb"));
        assert!(!text.contains('\n'), "{text}");
    }
}
