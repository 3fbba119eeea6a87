//! A client of a worker process; backoffs, addresses and keys for all test clients.

use std::net::SocketAddr;
use std::time::Duration;

use uniffle_client::grpc::{Backoff, ShuffleClient};
use uniffle_wire::types::{AppId, ShuffleId, ShuffleKey};

use crate::worker::WorkerProcess;

/// Backoff for a worker process: milliseconds instead of Java's seconds, about a minute in total.
pub fn long_backoff() -> Backoff {
    Backoff { attempts: 600, first: Duration::from_millis(20), longest: Duration::from_millis(100) }
}

/// Backoff for a worker in this process.
pub fn short_backoff() -> Backoff {
    Backoff { attempts: 2_000, first: Duration::from_millis(2), longest: Duration::from_millis(10) }
}

pub fn local(port: u16) -> SocketAddr {
    SocketAddr::from(([127, 0, 0, 1], port))
}

pub fn key(app: &str, shuffle: i32) -> ShuffleKey {
    ShuffleKey::new(AppId::parse(app).unwrap(), ShuffleId(shuffle))
}

pub async fn client_of(worker: &WorkerProcess) -> ShuffleClient {
    let client =
        ShuffleClient::connect(local(worker.ready().grpc_port)).await.expect("the gRPC listener is open");
    client.with_backoff(long_backoff())
}
