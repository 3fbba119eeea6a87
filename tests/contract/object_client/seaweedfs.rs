//! Behaviour that needs a real server: a kill and a restart, lists of unfinished uploads, and
//! errors about keys. The store in this process cannot list uploads, which one test shows.

use std::time::{Duration, SystemTime};

use object_store::path::Path;
use object_store::{MultipartUpload as _, ObjectStoreExt as _};
use tokio::task::block_in_place;
use uniffle_testkit::s3::S3Server;
use uniffle_testkit::s3::weed::Weed;
use uniffle_worker::store::ObjectConfig;
use uniffle_worker::store::object::Secret;
use uniffle_worker::store::object::client::{Failure, StoreRefusal};

use super::fixture::{Opened, content, open, soon};

const PART_BYTES: usize = 5 << 20;

fn in_an_hour() -> SystemTime {
    SystemTime::now() + Duration::from_secs(3600)
}

async fn begin(opened: &Opened, path: &str) {
    let mut upload = opened.store.put_multipart(&Path::from(path)).await.unwrap();
    upload.put_part(content(PART_BYTES).into()).await.unwrap();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn uploads_of_a_dead_worker_are_aborted() {
    let Some(weed) = block_in_place(|| Weed::start("unfinished uploads")) else { return };
    let opened = open(&weed.config("pre/fix"));
    for path in ["w1/a", "w1/b", "w1/deep/c", "w10/d"] {
        soon(begin(&opened, path)).await;
    }
    let mine = Path::from("w1");
    let found = soon(opened.client.uploads(&mine, in_an_hour())).await.unwrap();
    let mut paths: Vec<_> = found.iter().map(|upload| upload.path.to_string()).collect();
    paths.sort();
    assert_eq!(paths, ["pre/fix/w1/a", "pre/fix/w1/b", "pre/fix/w1/deep/c"]);
    assert!(found.iter().all(|upload| upload.initiated.is_some()), "{found:?}");
    let long_ago = SystemTime::now() - Duration::from_secs(3600);
    assert_eq!(
        soon(opened.client.abort_uploads(&mine, long_ago)).await.unwrap(),
        0,
        "recent uploads were aborted"
    );
    assert_eq!(soon(opened.client.abort_uploads(&mine, in_an_hour())).await.unwrap(), 3);
    assert_eq!(soon(opened.client.abort_uploads(&mine, in_an_hour())).await.unwrap(), 0);
    let others = soon(opened.client.uploads(&Path::from("w10"), in_an_hour())).await.unwrap();
    assert_eq!(others.len(), 1);
    opened.end().await;
}

#[tokio::test]
async fn store_without_upload_listing_returns_an_error() {
    let server = S3Server::start().await;
    let opened = open(&server.config("x"));
    let error = soon(opened.client.uploads(&Path::from("w1"), in_an_hour())).await.unwrap_err();
    assert_eq!(Failure::classify(&error), Failure::Refused(StoreRefusal::Unsupported), "{error}");
    opened.end().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn killed_seaweedfs_keeps_acknowledged_objects() {
    let Some(mut weed) = block_in_place(|| Weed::start("SeaweedFS killed and started again")) else { return };
    let config = ObjectConfig { retry_timeout: Duration::ZERO, ..weed.config("x") };
    let opened = open(&config);
    let (path, bytes) = (Path::from("kept"), content(300_000));
    soon(opened.store.put(&path, bytes.clone().into())).await.unwrap();
    block_in_place(|| weed.kill());
    let error = soon(opened.store.get_range(&path, 0..10)).await.unwrap_err();
    assert_eq!(Failure::classify(&error), Failure::Retryable, "{error}");
    block_in_place(|| weed.start_again());
    let got = soon(opened.store.get(&path)).await.unwrap().bytes().await.unwrap();
    assert!(got == bytes);
    opened.end().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn seaweedfs_error_names_wrong_keys() {
    let Some(weed) = block_in_place(|| Weed::start("wrong keys on SeaweedFS")) else { return };
    for (config, refusal) in [
        (
            ObjectConfig { secret_key: Some(Secret::new("wrong")), ..weed.config("x") },
            StoreRefusal::WrongSecret,
        ),
        (
            ObjectConfig { access_key: Some(Secret::new("nobody")), ..weed.config("x") },
            StoreRefusal::UnknownKey,
        ),
    ] {
        let opened = open(&config);
        let error = soon(opened.client.probe("w1")).await.unwrap_err();
        assert!(error.to_string().contains(refusal.as_str()), "{error}");
        opened.end().await;
    }
    let opened = open(&weed.config("x"));
    soon(opened.client.probe("w1")).await.unwrap();
    opened.end().await;
}
