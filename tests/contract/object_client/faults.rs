//! Faults of a store: each has its error, and none hangs, reads without end or leaves a task.

use std::time::Duration;

use futures::FutureExt as _;
use object_store::path::Path;
use object_store::{MultipartUpload as _, ObjectStore as _, ObjectStoreExt as _, PutPayload};
use uniffle_testkit::s3::S3Server;
use uniffle_testkit::s3::faults::{On, ResponseFault};
use uniffle_worker::store::ObjectConfig;
use uniffle_worker::store::object::client::{Failure, StoreRefusal, explain};

use super::fixture::{Opened, content, open, soon};

const BYTES: usize = 200_000;

/// Returns a configuration without retries and with short timeouts, so that one fault is one error.
fn impatient(server: &S3Server) -> ObjectConfig {
    ObjectConfig {
        request_timeout: Duration::from_millis(700),
        stall_timeout: Duration::from_millis(300),
        retry_timeout: Duration::ZERO,
        ..server.config("x")
    }
}

/// Returns the same configuration with retries.
fn patient(server: &S3Server) -> ObjectConfig {
    ObjectConfig { retry_timeout: Duration::from_secs(60), ..impatient(server) }
}

fn refused(refusal: StoreRefusal) -> Failure {
    Failure::Refused(refusal)
}

async fn read(opened: &Opened) -> object_store::Result<bytes::Bytes> {
    opened.store.get_range(&Path::from("object"), 10..BYTES as u64).await
}

async fn with_object(opened: &Opened) {
    opened.store.put(&Path::from("object"), content(BYTES).into()).await.unwrap();
}

#[tokio::test]
async fn read_faults_map_to_errors() {
    let server = S3Server::start().await;
    let opened = open(&impatient(&server));
    with_object(&opened).await;
    for (fault, failure) in [
        (ResponseFault::Refuse(500, "InternalError"), Failure::Retryable),
        (ResponseFault::Refuse(503, "SlowDown"), Failure::Retryable),
        (ResponseFault::Refuse(429, "TooManyRequests"), Failure::Retryable),
        (ResponseFault::RefuseEndlessly(500), Failure::Retryable),
        (ResponseFault::Hang, Failure::Retryable),
        (ResponseFault::Close, Failure::Retryable),
        (ResponseFault::Cut(1000), Failure::Retryable),
        (ResponseFault::Stall(0), Failure::Retryable),
        (ResponseFault::Stall(1000), Failure::Retryable),
        (ResponseFault::Shorter, Failure::Mismatch),
        (ResponseFault::OtherRange, Failure::Mismatch),
        (ResponseFault::Unranged, Failure::Mismatch),
        (ResponseFault::Refuse(403, "AccessDenied"), refused(StoreRefusal::AccessDenied)),
        (ResponseFault::Refuse(403, "ExpiredToken"), refused(StoreRefusal::CredentialsExpired)),
        (ResponseFault::Refuse(400, "ExpiredToken"), refused(StoreRefusal::CredentialsExpired)),
        (ResponseFault::Refuse(403, "RequestTimeTooSkewed"), refused(StoreRefusal::ClockSkew)),
        (ResponseFault::Refuse(404, "NoSuchBucket"), refused(StoreRefusal::BucketMissing)),
        (ResponseFault::Refuse(301, "PermanentRedirect"), refused(StoreRefusal::WrongRegion)),
        (ResponseFault::Refuse(404, "NoSuchKey"), Failure::NotFound),
    ] {
        server.faults.plan(On::Get, 1, &fault);
        let error = soon(read(&opened)).await.unwrap_err();
        assert_eq!(Failure::classify(&error), failure, "{fault:?}: {error}");
        if let Failure::Refused(refusal) = failure {
            let text = explain(&error);
            assert!(text.contains(refusal.remedy()), "{text}");
        }
        // The next read is not affected.
        assert!(soon(read(&opened)).await.unwrap() == content(BYTES)[10..], "wrong bytes after {fault:?}");
    }
    for reason in ["timeout", "cut", "throttled", "server", "refused"] {
        let failures = opened.metric(&format!("object_store_request_failures{{reason=\"{reason}\"}}"));
        assert!(failures >= 1.0, "{reason}");
    }
    opened.end().await;
}

/// The client has no checksum of a range. Readers verify the checksums of blocks.
#[tokio::test]
async fn wrong_bytes_of_right_length_are_returned() {
    let server = S3Server::start().await;
    let opened = open(&impatient(&server));
    with_object(&opened).await;
    server.faults.plan(On::Get, 1, &ResponseFault::WrongByte);
    let (got, sent) = (soon(read(&opened)).await.unwrap(), content(BYTES));
    assert!(got[0] != sent[10] && got[1..] == sent[11..]);
    opened.end().await;
}

#[tokio::test]
async fn transient_faults_are_retried_and_counted() {
    let server = S3Server::start().await;
    let opened = open(&patient(&server));
    with_object(&opened).await;
    for fault in [ResponseFault::Refuse(503, "SlowDown"), ResponseFault::Hang, ResponseFault::Close] {
        let before = server.faults.requests(On::Get);
        server.faults.plan(On::Get, 2, &fault);
        assert!(soon(read(&opened)).await.unwrap() == content(BYTES)[10..]);
        assert_eq!(server.faults.requests(On::Get), before + 3, "{fault:?}");
    }
    assert_eq!(opened.metric("object_store_request_retries{operation=\"get\"}"), 6.0);
    assert_eq!(opened.metric("object_store_requests{operation=\"get\"}"), 9.0);
    // A refused request is not repeated.
    let before = server.faults.requests(On::Get);
    server.faults.plan(On::Get, 1, &ResponseFault::Refuse(403, "AccessDenied"));
    soon(read(&opened)).await.unwrap_err();
    assert_eq!(server.faults.requests(On::Get), before + 1);
    opened.end().await;
}

#[tokio::test]
async fn cut_response_continues_where_it_ended() {
    let server = S3Server::start().await;
    let opened = open(&patient(&server));
    with_object(&opened).await;
    for fault in [ResponseFault::Cut(70_000), ResponseFault::Stall(70_000)] {
        server.faults.plan(On::Get, 1, &fault);
        assert!(soon(read(&opened)).await.unwrap() == content(BYTES)[10..], "{fault:?}");
    }
    opened.end().await;
}

#[tokio::test]
async fn absurd_declared_length_is_refused() {
    let server = S3Server::start().await;
    let opened = open(&impatient(&server));
    with_object(&opened).await;
    for bytes in [(1 << 30) + 1, 1 << 62, u64::MAX - 2] {
        server.faults.plan(On::Get, 1, &ResponseFault::Declare(bytes));
        let path = Path::from("object");
        let read = async { opened.store.get(&path).await?.bytes().await };
        let error = soon(read).await.unwrap_err();
        assert_eq!(Failure::classify(&error), Failure::Mismatch, "{bytes} {error}");
    }
    opened.end().await;
}

#[tokio::test]
async fn endless_response_is_not_read_completely() {
    let server = S3Server::start().await;
    let config = ObjectConfig { request_timeout: Duration::from_secs(60), ..impatient(&server) };
    let opened = open(&config);
    server.faults.plan(On::List, 1, &ResponseFault::Endless);
    let error = soon(opened.store.list_with_delimiter(None)).await.unwrap_err();
    assert_eq!(Failure::classify(&error), Failure::Mismatch, "{error}");
    assert_eq!(opened.metric("object_store_request_failures{reason=\"damaged\"}"), 1.0);
    let received = opened.metric("object_store_received_bytes");
    // TEXT_BYTES_MAX (16 MiB) and a buffer.
    assert!(received < f64::from(17 << 20), "{received}");
    server.faults.plan(On::Get, 1, &ResponseFault::RefuseEndlessly(403));
    let error = soon(read(&opened)).await.unwrap_err();
    assert_eq!(Failure::classify(&error), refused(StoreRefusal::AccessDenied), "{}", error.to_string().len());
    // ERROR_BYTES_MAX (64 KiB) and a buffer.
    assert!(opened.metric("object_store_received_bytes") - received < f64::from(1 << 20));
    opened.end().await;
}

#[tokio::test]
async fn list_without_xml_is_an_error() {
    let server = S3Server::start().await;
    let opened = open(&impatient(&server));
    server.faults.plan(On::List, 1, &ResponseFault::Text("no XML".to_owned()));
    soon(opened.store.list_with_delimiter(None)).await.unwrap_err();
    opened.end().await;
}

#[tokio::test]
async fn write_error_says_whether_the_store_may_recover() {
    let server = S3Server::start().await;
    let opened = open(&impatient(&server));
    let path = Path::from("written");
    for (fault, failure) in [
        (ResponseFault::Refuse(503, "SlowDown"), Failure::Retryable),
        (ResponseFault::Refuse(400, "BadDigest"), Failure::Retryable),
        (ResponseFault::Hang, Failure::Retryable),
        (ResponseFault::Close, Failure::Retryable),
        (ResponseFault::Refuse(403, "AccessDenied"), refused(StoreRefusal::AccessDenied)),
        (ResponseFault::Refuse(507, "QuotaExceeded"), refused(StoreRefusal::Full)),
    ] {
        server.faults.plan(On::Put, 1, &fault);
        let error = soon(opened.store.put(&path, content(BYTES).into())).await.unwrap_err();
        assert_eq!(Failure::classify(&error), failure, "{fault:?}: {error}");
        assert_eq!(Failure::classify(&opened.store.head(&path).await.unwrap_err()), Failure::NotFound);
    }
    server.faults.plan(On::Put, 1, &ResponseFault::LoseAnswer);
    let error = soon(opened.store.put(&path, content(BYTES).into())).await.unwrap_err();
    assert_eq!(Failure::classify(&error), Failure::Retryable, "{error}");
    assert_eq!(opened.store.head(&path).await.unwrap().size, BYTES as u64, "the object must be written");
    opened.end().await;
}

/// The object exists although the response was lost. After any error of a completion, the tier must
/// look for the object before it aborts the upload. A retried completion finds no upload, for which
/// stores have different errors.
#[tokio::test]
async fn completion_with_lost_response_creates_the_object() {
    let server = S3Server::start().await;
    for (config, requests) in [(impatient(&server), 1), (patient(&server), 2)] {
        let opened = open(&config);
        let (path, before) = (Path::from("completed"), server.faults.requests(On::Complete));
        let mut upload = opened.store.put_multipart(&path).await.unwrap();
        upload.put_part(content(BYTES).into()).await.unwrap();
        server.faults.plan(On::Complete, 1, &ResponseFault::LoseAnswer);
        let error = soon(upload.complete()).await.unwrap_err();
        assert_eq!(server.faults.requests(On::Complete) - before, requests, "{error}");
        assert_ne!(Failure::classify(&error), Failure::Mismatch, "{error}");
        if requests == 1 {
            assert_eq!(Failure::classify(&error), Failure::Retryable, "{error}");
        }
        assert_eq!(opened.store.head(&path).await.unwrap().size, BYTES as u64);
        opened.store.delete(&path).await.unwrap();
        drop(upload);
        opened.end().await;
    }
}

#[tokio::test]
async fn unreachable_server_is_a_transient_error() {
    let server = S3Server::start().await;
    let config = impatient(&server);
    server.stop().await;
    let opened = open(&config);
    let error = soon(read(&opened)).await.unwrap_err();
    assert_eq!(Failure::classify(&error), Failure::Retryable, "{error}");
    assert!(opened.metric("object_store_request_failures{reason=\"connect\"}") >= 1.0);
    opened.end().await;
}

#[tokio::test]
async fn reads_do_not_wait_for_hung_uploads() {
    let server = S3Server::start().await;
    let config =
        ObjectConfig { max_concurrency: 2, request_timeout: Duration::from_secs(600), ..impatient(&server) };
    let opened = open(&config);
    with_object(&opened).await;
    server.faults.plan(On::Put, 2, &ResponseFault::Hang);
    let put = |name: &'static str| {
        let store = opened.store.clone();
        async move { store.put(&Path::from(name), PutPayload::from_static(b"x")).await }.boxed()
    };
    let uploads = futures::future::select_all([put("a"), put("b"), put("c")]);
    let reads = soon(async { read(&opened).await.unwrap() });
    let first = futures::future::select(uploads, reads.boxed()).await;
    assert!(matches!(first, futures::future::Either::Right(_)), "an upload has ended too early");
    drop(first);
    // Aborted uploads free capacity.
    soon(put("d")).await.unwrap();
    opened.end().await;
}

#[tokio::test]
async fn connections_are_reused() {
    let server = S3Server::start().await;
    let opened = open(&impatient(&server));
    with_object(&opened).await;
    for _ in 0..20 {
        read(&opened).await.unwrap();
    }
    assert_eq!(opened.metric("object_store_connections"), 1.0);
    opened.end().await;
}
