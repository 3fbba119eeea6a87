//! Reads, writes, uploads, lists and deletions. Every store answers them alike, except the deletion
//! of a missing object. The in-process store also gets writes and uploads with the other settings
//! of the upload check.

use std::sync::Arc;

use bytes::Bytes;
use futures::stream::FuturesUnordered;
use futures::{StreamExt as _, TryStreamExt as _};
use object_store::memory::InMemory;
use object_store::path::Path;
use object_store::{MultipartUpload as _, ObjectStore, ObjectStoreExt as _, PutPayload};
use uniffle_testkit::s3::S3Server;
use uniffle_testkit::s3::faults::On;
use uniffle_testkit::s3::weed::Weed;
use uniffle_worker::store::object::UploadCheck;
use uniffle_worker::store::object::client::Failure;

use super::fixture::{content, open, part, soon};

const PART_BYTES: usize = 5 << 20;

/// Makes the calls of the tier, except conditional writes and lists of folders or uploads.
async fn common_calls(store: &Arc<dyn ObjectStore>) {
    objects_are_written_and_read(store).await;
    uploads_have_parts_in_parallel(store).await;
    an_aborted_upload_makes_no_object(store).await;
    lists_have_pages_and_a_prefix_is_deleted(store).await;
}

async fn objects_are_written_and_read(store: &Arc<dyn ObjectStore>) {
    let (path, bytes) = (Path::from("w1/segment"), content(300_000));
    let failed = store.get(&path).await.map(drop).unwrap_err();
    assert_eq!(Failure::classify(&failed), Failure::NotFound, "{failed}");
    // Chunks as the tier has them.
    let pieces: PutPayload = bytes.chunks(70_000).map(Bytes::copy_from_slice).collect();
    store.put(&path, pieces).await.unwrap();
    assert_eq!(store.head(&path).await.unwrap().size, 300_000);
    assert_eq!(store.get(&path).await.unwrap().bytes().await.unwrap(), bytes);
    assert_eq!(store.get_range(&path, 1000..1001).await.unwrap(), bytes[1000..1001]);
    let ranges = [0..10, 10..20, 5_000..6_000, 299_990..300_000];
    let got = store.get_ranges(&path, &ranges).await.unwrap();
    for (range, got) in ranges.iter().zip(got) {
        assert_eq!(got, part(&bytes, range), "{range:?}");
    }
    // Replaces the object of that name.
    store.put(&path, PutPayload::from_static(b"other")).await.unwrap();
    assert_eq!(store.get(&path).await.unwrap().bytes().await.unwrap(), "other");
    store.put(&path, PutPayload::new()).await.unwrap();
    assert_eq!(store.head(&path).await.unwrap().size, 0);
    assert_eq!(store.get(&path).await.unwrap().bytes().await.unwrap(), "");
    store.delete(&path).await.unwrap();
    assert_eq!(Failure::classify(&store.head(&path).await.unwrap_err()), Failure::NotFound);
}

async fn uploads_have_parts_in_parallel(store: &Arc<dyn ObjectStore>) {
    let (path, bytes) = (Path::from("w1/large"), Bytes::from(content(3 * PART_BYTES + 12_345)));
    let mut upload = store.put_multipart(&path).await.unwrap();
    let mut parts = FuturesUnordered::new();
    for at in (0..bytes.len()).step_by(PART_BYTES) {
        let part = bytes.slice(at..bytes.len().min(at + PART_BYTES));
        parts.push(upload.put_part(part.into()));
    }
    while let Some(part) = parts.next().await {
        part.unwrap();
    }
    upload.complete().await.unwrap();
    let got = store.get(&path).await.unwrap().bytes().await.unwrap();
    assert!(got == bytes, "the object has {} of {} bytes", got.len(), bytes.len());
    let across = PART_BYTES as u64 - 10..PART_BYTES as u64 + 10;
    let got = store.get_range(&path, across.clone()).await.unwrap();
    assert_eq!(got, part(&bytes, &across));
    store.delete(&path).await.unwrap();
}

async fn an_aborted_upload_makes_no_object(store: &Arc<dyn ObjectStore>) {
    let path = Path::from("w1/aborted");
    let mut upload = store.put_multipart(&path).await.unwrap();
    upload.put_part(content(PART_BYTES).into()).await.unwrap();
    upload.abort().await.unwrap();
    assert_eq!(Failure::classify(&store.head(&path).await.unwrap_err()), Failure::NotFound);
}

async fn lists_have_pages_and_a_prefix_is_deleted(store: &Arc<dyn ObjectStore>) {
    const OBJECTS: usize = 1_100;
    let path = |at: usize| Path::from(format!("w2/{at:04}"));
    let put = |at: usize| async move { store.put(&path(at), PutPayload::from_static(b"x")).await };
    let written: Vec<_> =
        futures::stream::iter((0..OBJECTS).map(put)).buffered(32).try_collect().await.unwrap();
    assert_eq!(written.len(), OBJECTS);
    store.put(&Path::from("w20/0"), PutPayload::from_static(b"x")).await.unwrap();
    let list = |prefix: &str| {
        let prefix = Path::from(prefix);
        async move {
            store.list(Some(&prefix)).map_ok(|object| object.location).try_collect::<Vec<_>>().await.unwrap()
        }
    };
    let mut listed = list("w2").await;
    listed.sort();
    assert!(
        listed.iter().eq((0..OBJECTS).map(path).collect::<Vec<_>>().iter()),
        "{} objects are listed",
        listed.len()
    );
    let locations = futures::stream::iter(listed.into_iter().map(Ok)).boxed();
    let deleted: Vec<_> = store.delete_stream(locations).try_collect().await.unwrap();
    assert_eq!(deleted.len(), OBJECTS);
    assert!(list("w2").await.is_empty());
    assert_eq!(list("w20").await.len(), 1, "a prefix must match only complete names");
    // Deleting a missing object succeeds or returns not found.
    match store.delete(&path(0)).await {
        Ok(()) => {}
        Err(error) => assert_eq!(Failure::classify(&error), Failure::NotFound),
    }
}

#[tokio::test]
async fn memory_store_answers_all_calls() {
    let store: Arc<dyn ObjectStore> = Arc::new(InMemory::new());
    common_calls(&store).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn in_process_store_answers_all_calls() {
    let server = S3Server::start().await;
    let opened = open(&server.config("pre/fix"));
    soon(common_calls(&opened.store)).await;
    assert!(server.files().join("pre/fix/w20/0").exists(), "paths must begin below the prefix");
    assert!(
        server.faults.requests(On::List) >= 2,
        "a page of the list has 1,000 keys, so two requests are needed"
    );
    assert_eq!(opened.metric("object_store_request_retries{operation=\"put\"}"), 0.0);
    assert!(opened.metric("object_store_requests{operation=\"put_part\"}") >= 5.0);
    assert!(opened.metric("object_store_connections") <= 32.0);
    opened.end().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn writes_succeed_with_and_without_upload_check() {
    let server = S3Server::start().await;
    for upload_check in [UploadCheck::Signature, UploadCheck::Off] {
        let opened = open(&uniffle_worker::store::ObjectConfig { upload_check, ..server.config("") });
        soon(objects_are_written_and_read(&opened.store)).await;
        soon(uploads_have_parts_in_parallel(&opened.store)).await;
        opened.end().await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn seaweedfs_answers_all_calls() {
    let Some(weed) = tokio::task::block_in_place(|| Weed::start("the client's calls on SeaweedFS")) else {
        return;
    };
    let opened = open(&weed.config("pre/fix"));
    soon(common_calls(&opened.store)).await;
    opened.end().await;
}
