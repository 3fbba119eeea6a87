//! S3 servers: one in this process with injectable faults ([`S3Server`]), and SeaweedFS
//! ([`weed::Weed`]).

pub mod faults;
pub mod weed;

use std::net::SocketAddr;
use std::path::PathBuf;
use std::sync::Arc;

use hyper::server::conn::http1;
use hyper::service::service_fn;
use hyper_util::rt::TokioIo;
use s3s::auth::SimpleAuth;
use s3s::service::{S3Service, S3ServiceBuilder};
use s3s_fs::FileSystem;
use tempfile::TempDir;
use tokio::net::TcpListener;
use uniffle_worker::runtime::Tasks;
use uniffle_worker::store::ObjectConfig;
use uniffle_worker::store::object::location::{BucketUrl, StoreEndpoint};
use uniffle_worker::store::object::{Credentials, Secret};

use self::faults::PlannedFaults;

/// Bucket of every server.
pub const BUCKET: &str = "shuffle";
/// Access key of every server.
pub const ACCESS_KEY: &str = "worker";
/// Secret key of every server.
pub const SECRET_KEY: &str = "secret-of-the-worker";

/// Returns the configuration of a worker that stores its objects below `prefix` at `endpoint`.
pub fn config(endpoint: &str, prefix: &str) -> ObjectConfig {
    ObjectConfig {
        url: Some(BucketUrl::parse(&format!("s3://{BUCKET}/{prefix}")).unwrap()),
        endpoint: Some(StoreEndpoint::parse(endpoint).unwrap()),
        path_style: true,
        credentials: Credentials::Environment,
        access_key: Some(Secret::new(ACCESS_KEY)),
        secret_key: Some(Secret::new(SECRET_KEY)),
        ..ObjectConfig::default()
    }
}

/// `s3s-fs` in this process, behind a layer of faults. Its tasks end on drop.
#[derive(Debug)]
pub struct S3Server {
    /// Faults of responses.
    pub faults: Arc<PlannedFaults>,
    address: SocketAddr,
    dir: TempDir,
    tasks: Tasks,
}

impl Drop for S3Server {
    fn drop(&mut self) {
        self.tasks.cancel();
    }
}

impl S3Server {
    /// Starts a server with an empty [`BUCKET`].
    pub async fn start() -> Self {
        let dir = tempfile::tempdir().unwrap();
        std::fs::create_dir(dir.path().join(BUCKET)).unwrap();
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let mut builder = S3ServiceBuilder::new(FileSystem::new(dir.path()).unwrap());
        builder.set_auth(SimpleAuth::from_single(ACCESS_KEY, SECRET_KEY));
        let (store, faults, tasks) = (builder.build(), Arc::new(PlannedFaults::default()), Tasks::new());
        let (serve, cancelled) =
            (accept(listener, store, Arc::clone(&faults), tasks.clone()), tasks.cancelled());
        tasks.spawn("s3 accept", async move {
            tokio::select! {
                () = cancelled => {}
                () = serve => {}
            }
        });
        Self { faults, address, dir, tasks }
    }

    /// `http://…`
    pub fn endpoint(&self) -> String {
        format!("http://{}", self.address)
    }

    /// Returns the server's address.
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// Returns the configuration for this server; see [`config()`].
    pub fn config(&self, prefix: &str) -> ObjectConfig {
        config(&self.endpoint(), prefix)
    }

    /// Returns the directory that holds the objects of the bucket as files.
    pub fn files(&self) -> PathBuf {
        self.dir.path().join(BUCKET)
    }

    /// Stops the server and its connections. Its port is closed afterwards.
    pub async fn stop(self) {
        self.tasks.cancel();
        self.tasks.drained().await;
    }
}

async fn accept(listener: TcpListener, store: S3Service, faults: Arc<PlannedFaults>, tasks: Tasks) {
    while let Ok((stream, _)) = listener.accept().await {
        let (store, faults) = (store.clone(), Arc::clone(&faults));
        let service = service_fn(move |request| Arc::clone(&faults).answer(store.clone(), request));
        let served = http1::Builder::new().serve_connection(TokioIo::new(stream), service);
        let cancelled = tasks.cancelled();
        tasks.spawn("s3 connection", async move {
            tokio::select! {
                () = cancelled => {}
                // Faults and clients decide how a connection ends.
                _ = served => {}
            }
        });
    }
}
