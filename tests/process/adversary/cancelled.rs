//! Attacks by callers that disconnect before the response, and by thousands of shuffles that end
//! together.

use std::io;
use std::time::Duration;

use futures::future::{BoxFuture, FutureExt as _, join_all};
use tokio::io::AsyncWriteExt as _;
use tokio::net::TcpStream;
use tokio::time::sleep;
use uniffle_testkit::clients::{key, local};
use uniffle_worker::proto;

use super::attacks::{APP, Target, client, repeat};
use super::h2::Connection;

/// Time for the worker to start on a request.
const BEGUN: Duration = Duration::from_millis(5);

/// Requests assignments of 100,000 ranges, 30 MB each, and disconnects.
pub(super) fn abandoned_assignments(target: Target) -> BoxFuture<'static, io::Error> {
    async move {
        repeat(|| async {
            let mut connection = Connection::open(target.grpc, 1 << 20).await?;
            let request = proto::GetShuffleServerRequest {
                application_id: APP.to_owned(),
                partition_num: 100_000,
                partition_num_per_range: 1,
                data_replica: 1,
                assignment_shuffle_server_number: -1,
                ..Default::default()
            };
            for _ in 0..30 {
                connection.ask("CoordinatorServer/getShuffleAssignments", &request).await?;
            }
            sleep(BEGUN).await;
            Ok(())
        })
        .await
    }
    .boxed()
}

/// Requests metrics and disconnects.
pub(super) fn abandoned_scrapes(target: Target) -> BoxFuture<'static, io::Error> {
    async move {
        repeat(|| async {
            for _ in 0..100 {
                let mut stream = TcpStream::connect(local(target.http)).await?;
                stream.write_all(b"GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n").await?;
            }
            Ok(())
        })
        .await
    }
    .boxed()
}

/// Registers two thousand small shuffles that end at once.
pub(super) fn small_shuffles(target: Target) -> BoxFuture<'static, io::Error> {
    async move {
        repeat(|| async {
            let client = &client(target).await?;
            let shuffles: Vec<_> = (10_001..=12_000).map(|at| key(APP, at)).collect();
            // Some are refused under attack.
            let _registered = join_all(shuffles.iter().map(|it| client.register(it, &[(0, 0)]))).await;
            let _ended = join_all(shuffles.iter().map(|it| client.unregister(it))).await;
            Ok(())
        })
        .await
    }
    .boxed()
}
