//! Abandoned uploads: a crashed worker began them, and the store keeps and charges their parts.
//!
//! `object_store` cannot list uploads, so the request is signed here with its signer. Servers that
//! do not support the request refuse it (`StoreRefusal::Unsupported`). The bucket's lifecycle rule
//! then ends abandoned uploads (docs/object-storage.md).

use std::time::SystemTime;

use object_store::aws::AwsAuthorizer;
use object_store::client::{HttpRequest, HttpRequestBody, HttpService as _};
use object_store::multipart::MultipartStore as _;
use object_store::path::Path;
use roxmltree::{Document, Node};

use super::failure::Failure;
use super::open::Client;

/// Maximum number of pages of 1,000 uploads read in one call.
const PAGES_MAX: usize = 100;

/// An unfinished upload.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Abandoned {
    /// Key of the object, from the root of the bucket.
    pub path: Path,
    /// S3's id of the upload.
    pub upload_id: String,
    /// Time of its beginning, by the store's clock.
    pub initiated: Option<SystemTime>,
}

/// Position in the list, after which the next page begins.
#[derive(Debug, PartialEq, Eq)]
struct UploadMarker {
    key: String,
    upload_id: String,
}

/// A page of the list.
#[derive(Debug, Default, PartialEq, Eq)]
struct Page {
    uploads: Vec<Abandoned>,
    next: Option<UploadMarker>,
}

impl Client {
    /// Returns unfinished uploads that began before `before` or at an unknown time. `below` is a
    /// path below `object_store.url`. At most `PAGES_MAX` pages are read.
    ///
    /// # Errors
    /// The store does not answer or refuses.
    pub async fn uploads(&self, below: &Path, before: SystemTime) -> object_store::Result<Vec<Abandoned>> {
        let parts = [self.url().prefix(), below.as_ref()];
        let prefix: String =
            parts.iter().filter(|part| !part.is_empty()).map(|part| format!("{part}/")).collect();
        let (mut found, mut after) = (Vec::new(), None);
        for _ in 0..PAGES_MAX {
            let page = self.page(&prefix, after.as_ref()).await?;
            // Stores may list more uploads than requested.
            let is_old = |upload: &Abandoned| upload.initiated.is_none_or(|begun| begun < before);
            let is_below = |upload: &Abandoned| upload.path.as_ref().starts_with(&prefix);
            found.extend(page.uploads.into_iter().filter(|upload| is_below(upload) && is_old(upload)));
            if page.next.is_none() || page.next == after {
                break;
            }
            after = page.next;
        }
        Ok(found)
    }

    /// Aborts the uploads that [`Client::uploads`] returns. Returns their number. An upload that
    /// has ended meanwhile is no error.
    ///
    /// # Errors
    /// The list cannot be read, or an upload cannot be aborted. Later ones are not tried then.
    pub async fn abort_uploads(&self, below: &Path, before: SystemTime) -> object_store::Result<usize> {
        let uploads = self.uploads(below, before).await?;
        for upload in &uploads {
            match self.s3.abort_multipart(&upload.path, &upload.upload_id).await {
                Err(error) if Failure::classify(&error) != Failure::NotFound => return Err(error),
                _ => {}
            }
        }
        Ok(uploads.len())
    }

    async fn page(&self, prefix: &str, after: Option<&UploadMarker>) -> object_store::Result<Page> {
        let mut address = format!("{}?max-uploads=1000&prefix={}&uploads=", self.bucket_url, encoded(prefix));
        if let Some(UploadMarker { key, upload_id }) = after {
            let markers = format!("&key-marker={}&upload-id-marker={}", encoded(key), encoded(upload_id));
            address.push_str(&markers);
        }
        let mut request = HttpRequest::new(HttpRequestBody::empty());
        *request.uri_mut() = address.parse().map_err(failed)?;
        if let Some(credentials) = self.credentials() {
            let credential = credentials.get_credential().await?;
            AwsAuthorizer::new(&credential, "s3", &self.region).try_authorize(&mut request, None)?;
        }
        let answer = self.transport.call(request).await.map_err(failed)?;
        let status = answer.status();
        let body = answer.into_body().bytes().await.map_err(failed)?;
        let text = String::from_utf8_lossy(&body);
        if !status.is_success() {
            // Formatted like errors of `object_store`, whose text [`Failure::classify`]
            // parses.
            return Err(failed(std::io::Error::other(format!("status code: {status}: {text}"))));
        }
        parse(&text).map_err(|error| failed(std::io::Error::other(error)))
    }
}

fn failed<E: std::error::Error + Send + Sync + 'static>(error: E) -> object_store::Error {
    object_store::Error::Generic { store: "S3", source: Box::new(error) }
}

/// Percent-encodes a value of a signed query.
fn encoded(text: &str) -> String {
    let mut encoded = String::with_capacity(text.len());
    for byte in text.bytes() {
        if byte.is_ascii_alphanumeric() || b"-_.~".contains(&byte) {
            encoded.push(char::from(byte));
        } else {
            encoded.push_str(&format!("%{byte:02X}"));
        }
    }
    encoded
}

/// Parses a `ListMultipartUploadsResult`.
fn parse(text: &str) -> Result<Page, String> {
    let document = Document::parse(text).map_err(|error| format!("not a list of uploads: {error}"))?;
    let root = document.root_element();
    if root.tag_name().name() != "ListMultipartUploadsResult" {
        return Err(format!("not a list of uploads: {}", root.tag_name().name()));
    }
    let of = |node: Node<'_, '_>, name: &str| -> Option<String> {
        let child = node.children().find(|child| child.tag_name().name() == name)?;
        Some(child.text().unwrap_or_default().to_owned())
    };
    let uploads = root.children().filter(|child| child.tag_name().name() == "Upload").filter_map(|node| {
        let path = Path::parse(of(node, "Key")?).ok()?;
        let initiated = of(node, "Initiated").and_then(|text| humantime::parse_rfc3339_weak(&text).ok());
        Some(Abandoned { path, upload_id: of(node, "UploadId")?, initiated })
    });
    let is_truncated = of(root, "IsTruncated").is_some_and(|text| text == "true");
    let markers = of(root, "NextKeyMarker").zip(of(root, "NextUploadIdMarker"));
    let next = markers.filter(|_| is_truncated).map(|(key, upload_id)| UploadMarker { key, upload_id });
    Ok(Page { uploads: uploads.collect(), next })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn list_of_uploads_is_read() {
        let text = "<?xml version=\"1.0\" encoding=\"UTF-8\"?>\n\
            <ListMultipartUploadsResult xmlns=\"http://s3.amazonaws.com/doc/2006-03-01/\"><Bucket>b</Bucket>\
            <NextKeyMarker>p/w/2</NextKeyMarker><NextUploadIdMarker>u2</NextUploadIdMarker>\
            <IsTruncated>true</IsTruncated>\
            <Upload><Key>p/w/1</Key><UploadId>u1</UploadId><Initiated>2026-01-02T03:04:05.678Z</Initiated></Upload>\
            <Upload><Key>p/w/2</Key><UploadId>u2</UploadId></Upload>\
            <Upload><Key>p//bad</Key><UploadId>u3</UploadId></Upload></ListMultipartUploadsResult>";
        let page = parse(text).unwrap();
        assert_eq!(page.next, Some(UploadMarker { key: "p/w/2".to_owned(), upload_id: "u2".to_owned() }));
        let ids: Vec<_> =
            page.uploads.iter().map(|upload| (upload.path.as_ref(), upload.upload_id.as_str())).collect();
        assert_eq!(ids, [("p/w/1", "u1"), ("p/w/2", "u2")]);
        assert!(page.uploads[0].initiated.is_some() && page.uploads[1].initiated.is_none());
        assert_eq!(parse(&text.replace(">true<", ">false<")).unwrap().next, None);
    }

    #[test]
    fn invalid_upload_list_is_an_error() {
        for text in ["", "<x", "<Error><Code>AccessDenied</Code></Error>", "<!DOCTYPE a []><a/>"] {
            assert!(parse(text).is_err(), "{text}");
        }
    }

    #[test]
    fn values_of_a_query_are_encoded_as_the_signer_expects() {
        assert_eq!(encoded("a/b c=ü~"), "a%2Fb%20c%3D%C3%BC~");
    }
}
