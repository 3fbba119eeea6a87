//! Classifies requests, and checks that the head of a response matches its request. Does no I/O.

use http::header::{CONTENT_LENGTH, CONTENT_RANGE, RANGE};
use http::{HeaderMap, Method, StatusCode, Uri};

/// Kind of a request. Stores charge by kind.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Operation {
    /// Reads bytes of an object.
    Get,
    /// Returns the size of an object, if it exists.
    Head,
    /// Lists objects by prefix.
    List,
    /// Writes a whole object.
    Put,
    /// Sends a part of an upload.
    PutPart,
    /// Begins an upload.
    CreateUpload,
    /// Completes an upload, which creates the object.
    CompleteUpload,
    /// Ends an upload without an object.
    AbortUpload,
    /// Lists unfinished uploads by prefix.
    ListUploads,
    /// Deletes an object.
    Delete,
    /// Gets the keys of a role from STS.
    Credentials,
}

impl Operation {
    /// All operations.
    pub const ALL: [Self; 11] = [
        Self::Get,
        Self::Head,
        Self::List,
        Self::Put,
        Self::PutPart,
        Self::CreateUpload,
        Self::CompleteUpload,
        Self::AbortUpload,
        Self::ListUploads,
        Self::Delete,
        Self::Credentials,
    ];

    /// Returns the label of the operation in metrics.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Get => "get",
            Self::Head => "head",
            Self::List => "list",
            Self::Put => "put",
            Self::PutPart => "put_part",
            Self::CreateUpload => "create_upload",
            Self::CompleteUpload => "complete_upload",
            Self::AbortUpload => "abort_upload",
            Self::ListUploads => "list_uploads",
            Self::Delete => "delete",
            Self::Credentials => "credentials",
        }
    }

    /// Returns the operation of a request to S3 or STS.
    pub fn of(method: &Method, uri: &Uri) -> Self {
        let query = uri.query().unwrap_or_default();
        let has = |name: &str| query.split('&').any(|part| part.split('=').next() == Some(name));
        match *method {
            Method::HEAD => Self::Head,
            Method::PUT if has("uploadId") => Self::PutPart,
            Method::PUT => Self::Put,
            Method::DELETE if has("uploadId") => Self::AbortUpload,
            Method::DELETE => Self::Delete,
            Method::POST if has("uploads") => Self::CreateUpload,
            Method::POST if has("uploadId") => Self::CompleteUpload,
            Method::POST => Self::Credentials,
            _ if has("uploads") => Self::ListUploads,
            _ if has("list-type") => Self::List,
            _ => Self::Get,
        }
    }

    /// Returns whether the body of the request is data for the store.
    pub fn is_upload(self) -> bool {
        matches!(self, Self::Put | Self::PutPart)
    }
}

/// A response that does not match its request.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("the store returned {got} for a request of {wanted}")]
pub struct Mismatch {
    /// Requested range or size.
    pub wanted: String,
    /// Received range or size.
    pub got: String,
}

/// Returns the size that the body of a response to a GET must have, or `None` if its head does not
/// tell the size.
///
/// # Errors
/// [`Mismatch`], if the range differs from the range in `request`, or if lengths contradict each
/// other.
pub(super) fn expected_bytes(
    request: &HeaderMap,
    status: StatusCode,
    answer: &HeaderMap,
) -> Result<Option<u64>, Mismatch> {
    let text = |headers: &HeaderMap, name| -> Option<String> {
        headers.get(name).and_then(|value: &http::HeaderValue| value.to_str().ok()).map(str::to_owned)
    };
    let length: Option<u64> = text(answer, CONTENT_LENGTH).and_then(|text| text.parse().ok());
    let Some(wanted) = text(request, RANGE) else { return Ok(length) };
    let mismatch = |got: String| Mismatch { wanted: wanted.clone(), got };
    let range = text(answer, CONTENT_RANGE).filter(|_| status == StatusCode::PARTIAL_CONTENT);
    let Some(got) = range else { return Err(mismatch(format!("{status} without a range"))) };
    let (start, end) = answered(&wanted, &got).ok_or_else(|| mismatch(got.clone()))?;
    let bytes = end - start;
    match length {
        Some(length) if length != bytes => Err(mismatch(format!("{got} in {length} bytes"))),
        _ => Ok(Some(bytes)),
    }
}

/// Returns the byte range in `got` (`bytes 0-9/100`) if it is the range requested by `wanted`
/// (`bytes=0-9`).
fn answered(wanted: &str, got: &str) -> Option<(u64, u64)> {
    let (range, size) = got.trim().strip_prefix("bytes ")?.split_once('/')?;
    let (start, last) = range.split_once('-')?;
    let (start, last, size): (u64, u64, u64) = (start.parse().ok()?, last.parse().ok()?, size.parse().ok()?);
    let end = last.checked_add(1).filter(|end| *end <= size && start < *end)?;
    let (first, until) = wanted.strip_prefix("bytes=")?.split_once('-')?;
    let is_wanted = match (first.parse::<u64>(), until.parse::<u64>()) {
        (Ok(first), Ok(until)) => start == first && last == until.min(size - 1),
        (Ok(first), Err(_)) => start == first && end == size,
        (Err(_), Ok(suffix)) => end == size && end - start == suffix.min(size),
        (Err(_), Err(_)) => false,
    };
    is_wanted.then_some((start, end))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn requests_are_classified_by_method_and_query() {
        for (method, uri, operation) in [
            (Method::GET, "/b/k", Operation::Get),
            (Method::GET, "/b?list-type=2&prefix=uploads", Operation::List),
            (Method::GET, "/b?uploads&prefix=x", Operation::ListUploads),
            (Method::HEAD, "/b/k", Operation::Head),
            (Method::PUT, "/b/k", Operation::Put),
            (Method::PUT, "/b/k?partNumber=1&uploadId=x", Operation::PutPart),
            (Method::POST, "/b/k?uploads", Operation::CreateUpload),
            (Method::POST, "/b/k?uploadId=x", Operation::CompleteUpload),
            (Method::DELETE, "/b/k?uploadId=x", Operation::AbortUpload),
            (Method::DELETE, "/b/uploadId", Operation::Delete),
            (Method::POST, "/", Operation::Credentials),
        ] {
            assert_eq!(Operation::of(&method, &uri.parse().unwrap()), operation, "{method} {uri}");
        }
    }

    fn expected(
        range: Option<&str>,
        status: u16,
        answer: &[(&'static str, &str)],
    ) -> Result<Option<u64>, Mismatch> {
        let mut request = HeaderMap::new();
        if let Some(range) = range {
            request.insert(RANGE, range.parse().unwrap());
        }
        let answer =
            answer.iter().map(|(name, value)| ((*name).parse().unwrap(), value.parse().unwrap())).collect();
        expected_bytes(&request, StatusCode::from_u16(status).unwrap(), &answer)
    }

    #[test]
    fn response_must_have_the_requested_range() {
        assert_eq!(expected(None, 200, &[("content-length", "7")]), Ok(Some(7)));
        assert_eq!(expected(None, 200, &[]), Ok(None));
        for (wanted, got, bytes) in [
            ("bytes=0-9", "bytes 0-9/100", 10),
            ("bytes=90-200", "bytes 90-99/100", 10),
            ("bytes=90-", "bytes 90-99/100", 10),
            ("bytes=-10", "bytes 90-99/100", 10),
        ] {
            assert_eq!(expected(Some(wanted), 206, &[("content-range", got)]), Ok(Some(bytes)), "{wanted}");
        }
    }

    #[test]
    fn wrong_range_is_a_mismatch() {
        for got in [
            "bytes 0-8/100",
            "bytes 1-9/100",
            "bytes 0-9/5",
            "bytes 0-18446744073709551615/18446744073709551615",
            "bytes 9-0/100",
            "bytes */100",
            "0-9/100",
            "",
        ] {
            assert!(expected(Some("bytes=0-9"), 206, &[("content-range", got)]).is_err(), "{got}");
        }
        let right = ("content-range", "bytes 0-9/100");
        assert!(expected(Some("bytes=0-9"), 200, &[right]).is_err());
        assert!(expected(Some("bytes=0-9"), 206, &[]).is_err());
        assert!(expected(Some("bytes=0-9"), 206, &[right, ("content-length", "9")]).is_err());
    }
}
