//! Configured location of a worker's objects: server, bucket and prefix. Pure.
//!
//! A parsed location is safe to use in keys and URLs: a prefix has no empty part and no character
//! that must be escaped, and leaves room for the names of segments.

use std::fmt;

/// Key of the claim below the worker's prefix. Keys of applications have no such part.
pub const CLAIM: &str = "!claim";
/// Length of a bucket name in S3.
const BUCKET_CHARS: std::ops::RangeInclusive<usize> = 3..=63;
/// Maximum length of the prefix. A key has at most 1024 bytes, and segment names need some.
const PREFIX_BYTES_MAX: usize = 512;

/// URL `s3://<bucket>/<prefix>`. The prefix may be empty.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct BucketUrl {
    bucket: String,
    prefix: String,
}

impl BucketUrl {
    /// Parses a URL.
    ///
    /// # Errors
    /// The text is not of the allowed form, which the error describes.
    pub fn parse(text: &str) -> Result<Self, String> {
        let form = || "of the form s3://<bucket>/<prefix>".to_owned();
        let (scheme, rest) = text.split_once("://").ok_or_else(form)?;
        if !scheme.eq_ignore_ascii_case("s3") {
            return Err(form());
        }
        let (bucket, prefix) = rest.split_once('/').unwrap_or((rest, ""));
        let is_of_name = |c: char| c.is_ascii_alphanumeric() || matches!(c, '.' | '-' | '_');
        if !BUCKET_CHARS.contains(&bucket.len()) || !bucket.chars().all(is_of_name) {
            return Err(format!("{}; a bucket has 3 to 63 letters, digits and any of `.-_`", form()));
        }
        let prefix = prefix.strip_suffix('/').unwrap_or(prefix);
        let is_sound = |part: &str| {
            let is_plain = |c: char| c.is_ascii_alphanumeric() || "-_.=+@".contains(c);
            !matches!(part, "" | "." | "..") && part.chars().all(is_plain)
        };
        if !prefix.is_empty() && !prefix.split('/').all(is_sound) {
            return Err(format!("{}; parts of a prefix have letters, digits and any of -_.=+@", form()));
        }
        if prefix.len() > PREFIX_BYTES_MAX {
            return Err(format!("{}; a prefix has at most {PREFIX_BYTES_MAX} bytes", form()));
        }
        Ok(Self { bucket: bucket.to_owned(), prefix: prefix.to_owned() })
    }

    /// Returns the bucket.
    pub fn bucket(&self) -> &str {
        &self.bucket
    }

    /// Returns the common prefix of all keys, without a slash at its end.
    pub fn prefix(&self) -> &str {
        &self.prefix
    }
}

impl fmt::Display for BucketUrl {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "s3://{}/{}", self.bucket, self.prefix)
    }
}

/// URL `http://<host>[:<port>]` or `https://<host>[:<port>]`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct StoreEndpoint {
    is_encrypted: bool,
    /// Host, IPv6 in brackets, with the port as written.
    authority: String,
}

impl StoreEndpoint {
    /// Parses a URL without path, user and query.
    ///
    /// # Errors
    /// The text is not of the allowed form, which the error describes.
    pub fn parse(text: &str) -> Result<Self, String> {
        let form =
            || "of the form http://<host>[:<port>] or https://<host>[:<port>], without a path".to_owned();
        let uri: http::Uri = text.trim_end_matches('/').parse().map_err(|_| form())?;
        let is_encrypted = match uri.scheme_str() {
            Some("https") => true,
            Some("http") => false,
            _ => return Err(form()),
        };
        let authority = uri.authority().ok_or_else(form)?;
        let has_more = uri.path() != "/" || uri.query().is_some() || authority.as_str().contains('@');
        let has_port =
            authority.as_str().trim_start_matches(authority.host()).is_empty() || uri.port_u16() > Some(0);
        if has_more || !has_port || authority.host().is_empty() {
            return Err(form());
        }
        Ok(Self { is_encrypted, authority: authority.as_str().to_ascii_lowercase() })
    }

    /// Returns whether requests use TLS.
    pub fn is_encrypted(&self) -> bool {
        self.is_encrypted
    }

    /// Returns the endpoint with `bucket` as the first part of its host name.
    #[must_use]
    pub fn virtual_hosted(&self, bucket: &str) -> Self {
        Self { authority: format!("{bucket}.{}", self.authority), ..self.clone() }
    }
}

impl fmt::Display for StoreEndpoint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}://{}", if self.is_encrypted { "https" } else { "http" }, self.authority)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn url_has_a_bucket_and_optional_prefix() {
        for (text, bucket, prefix) in [
            ("s3://shuffle/uniffle", "shuffle", "uniffle"),
            ("S3://my.bucket-1/a/b=c/", "my.bucket-1", "a/b=c"),
            ("s3://shuffle", "shuffle", ""),
            ("s3://shuffle/", "shuffle", ""),
        ] {
            let url = BucketUrl::parse(text).unwrap();
            assert_eq!((url.bucket(), url.prefix()), (bucket, prefix), "{text}");
            assert_eq!(BucketUrl::parse(&url.to_string()), Ok(url));
        }
    }

    #[test]
    fn invalid_bucket_url_is_refused() {
        let long = format!("s3://bucket/{}", "x".repeat(600));
        for text in [
            "",
            "bucket/x",
            "gs://bucket/x",
            "s3://",
            "s3://ab/x",
            "s3:///x",
            "s3://user:key@bucket/x",
            "s3://bucket//x",
            "s3://bucket/../x",
            "s3://bucket/./x",
            "s3://bucket/a b",
            "s3://bucket/x?y",
            "s3://bucket/%2e",
            &long,
        ] {
            assert!(BucketUrl::parse(text).is_err(), "{text}");
        }
    }

    #[test]
    fn endpoint_has_scheme_host_and_optional_port() {
        for (text, shown) in [
            ("http://127.0.0.1:8333", "http://127.0.0.1:8333"),
            ("https://S3.example.com/", "https://s3.example.com"),
            ("http://[::1]:1", "http://[::1]:1"),
        ] {
            let endpoint = StoreEndpoint::parse(text).unwrap();
            assert_eq!(endpoint.to_string(), shown);
            assert_eq!(endpoint.is_encrypted(), shown.starts_with("https"));
        }
        let endpoint = StoreEndpoint::parse("https://s3.example.com:9000").unwrap().virtual_hosted("shuffle");
        assert_eq!(endpoint.to_string(), "https://shuffle.s3.example.com:9000");
    }

    #[test]
    fn invalid_endpoint_is_refused() {
        for text in [
            "",
            "s3.example.com",
            "s3.example.com:80",
            "ftp://x",
            "http://",
            "http://u:p@x",
            "http://x/y",
            "http://x?y",
            "http://x:0",
            "http://x:port",
            "http://x:",
        ] {
            assert!(StoreEndpoint::parse(text).is_err(), "{text}");
        }
    }
}
