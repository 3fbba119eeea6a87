//! Classifies requests by method and query, for metrics, permits and limits of their responses.
//! Does no I/O.

use http::{Method, Uri};

/// Kind of a request. Stores charge by kind.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum StoreOperation {
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

impl StoreOperation {
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn requests_are_classified_by_method_and_query() {
        for (method, uri, operation) in [
            (Method::GET, "/b/k", StoreOperation::Get),
            (Method::GET, "/b?list-type=2&prefix=uploads", StoreOperation::List),
            (Method::GET, "/b?uploads&prefix=x", StoreOperation::ListUploads),
            (Method::HEAD, "/b/k", StoreOperation::Head),
            (Method::PUT, "/b/k", StoreOperation::Put),
            (Method::PUT, "/b/k?partNumber=1&uploadId=x", StoreOperation::PutPart),
            (Method::POST, "/b/k?uploads", StoreOperation::CreateUpload),
            (Method::POST, "/b/k?uploadId=x", StoreOperation::CompleteUpload),
            (Method::DELETE, "/b/k?uploadId=x", StoreOperation::AbortUpload),
            (Method::DELETE, "/b/uploadId", StoreOperation::Delete),
            (Method::POST, "/", StoreOperation::Credentials),
        ] {
            assert_eq!(StoreOperation::of(&method, &uri.parse().unwrap()), operation, "{method} {uri}");
        }
    }
}
