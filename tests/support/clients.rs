//! Clients of worker processes.

use std::net::SocketAddr;
use std::time::Duration;

use uniffle_client::grpc::{Backoff, ShuffleClient};
use uniffle_wire::types::{AppId, ShuffleId, ShuffleKey};

use super::worker::Worker;

/// Patience in milliseconds instead of Java's seconds, for about a minute.
pub(crate) fn patient() -> Backoff {
    Backoff { attempts: 600, first: Duration::from_millis(20), longest: Duration::from_millis(100) }
}

pub(crate) fn local(port: u16) -> SocketAddr {
    SocketAddr::from(([127, 0, 0, 1], port))
}

pub(crate) fn key(app: &str, shuffle: i32) -> ShuffleKey {
    ShuffleKey::new(AppId::parse(app).expect("an id"), ShuffleId(shuffle))
}

pub(crate) async fn client_of(worker: &Worker) -> ShuffleClient {
    let client = ShuffleClient::connect(local(worker.ready().grpc_port)).await.expect("the listener is open");
    client.with_backoff(patient())
}
