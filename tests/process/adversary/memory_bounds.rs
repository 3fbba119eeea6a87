//! Attacks on memory bounds and fairness, usable alone or combined.

use std::convert::Infallible;
use std::io;
use std::time::Duration;

use bytes::{BufMut as _, Bytes, BytesMut};
use futures::StreamExt as _;
use futures::future::{self, BoxFuture, FutureExt as _};
use futures::stream;
use http_body::Frame;
use http_body_util::StreamBody;
use tokio::io::AsyncWriteExt as _;
use tokio::net::TcpStream;
use tokio::time::{sleep, timeout};
use tonic::body::Body;
use tonic::transport::Endpoint;
use tower::{Service as _, ServiceExt as _};
use uniffle_client::block::{Block, IdLayout};
use uniffle_client::grpc::ShuffleClient;
use uniffle_client::send::SendForm;
use uniffle_testkit::block_generator::BlockGenerator;
use uniffle_testkit::clients::{key, local};
use uniffle_wire::request::{LocalDataRequest, LocalDataVersion, Placement, ReadRequest};
use uniffle_wire::types::{BlockId, PartitionId, ShuffleKey, TaskAttemptId};
use uniffle_worker::proto;

use super::attacks::{APP, Target, client, repeat};
use super::h2::Connection;
use super::honest;

/// Pause before a connection is retried.
const PAUSE: Duration = Duration::from_millis(50);

/// Queries results with one partition named 300,000 times, of a shuffle with 100,000 ids.
pub(super) fn repeated_partitions(target: Target) -> BoxFuture<'static, io::Error> {
    async move {
        if let Ok(client) = client(target).await {
            let ids: Vec<BlockId> = (0..100_000).map(|at| BlockId(at << 21)).collect();
            let _ = client.report(&key(APP, 0), TaskAttemptId(0), &[(PartitionId(0), ids)]).await;
        }
        let request = proto::GetShuffleResultForMultiPartRequest {
            app_id: APP.to_owned(),
            shuffle_id: 0,
            partitions: vec![0; 300_000],
            ..Default::default()
        };
        repeat(|| async {
            for _ in 0..3 {
                let mut connection = Connection::open(target.grpc, 1 << 20).await?;
                connection.ask("ShuffleServer/getShuffleResultForMultiPart", &request).await?;
                connection.pong(Duration::from_secs(1)).await?;
            }
            Ok(())
        })
        .await
    }
    .boxed()
}

/// Writes shuffles of 50,000 partitions, one after the other, and ends each at once.
pub(super) fn large_ending_shuffles(target: Target) -> BoxFuture<'static, io::Error> {
    async move {
        for shuffle in 1000.. {
            match client(target).await {
                Ok(client) => write_and_end(&client, &key(APP, shuffle), target.seed).await,
                Err(_) => sleep(PAUSE).await,
            }
        }
        io::ErrorKind::QuotaExceeded.into()
    }
    .boxed()
}

/// Writes a block to each of 50,000 partitions and ends the shuffle. Ignores refusals.
async fn write_and_end(client: &ShuffleClient, key: &ShuffleKey, seed: u64) {
    /// Partitions of one send.
    const PARTITIONS: i32 = 5000;
    let generator = BlockGenerator::new(seed, IdLayout::SPARK);
    let _ = client.register(key, &[(0, 10 * PARTITIONS - 1)]).await;
    let tiny = |partition| (partition, vec![generator.block(partition, TaskAttemptId(1), 0, 1)]);
    for part in 0..10 {
        let partitions = part * PARTITIONS..(part + 1) * PARTITIONS;
        let batch: Vec<_> = partitions.map(|number| tiny(PartitionId(number))).collect();
        let _ = client.push(key, SendForm::Classic, &batch).await;
    }
    let _ = client.unregister(key).await;
}

/// Sends reports of 60 MiB without their last bytes, 24 at a time on one connection.
#[expect(clippy::excessive_nesting, reason = "a loop over cases around what each does")]
pub(super) fn unfinished_reports(target: Target) -> BoxFuture<'static, io::Error> {
    async move {
        repeat(|| async {
            let endpoint = Endpoint::from_shared(format!("http://127.0.0.1:{}", target.grpc));
            let channel = endpoint.map_err(io::Error::other)?.connect().await.map_err(io::Error::other)?;
            let calls = (0..24).map(|_| {
                let mut channel = channel.clone();
                async move {
                    let request = unfinished(60 << 20);
                    if let Ok(channel) = channel.ready().await {
                        drop(channel.call(request).await);
                    }
                }
            });
            let _ = timeout(Duration::from_secs(20), future::join_all(calls)).await;
            Ok(())
        })
        .await
    }
    .boxed()
}

/// Returns a report that declares `bytes` and lacks its last 64 KiB.
fn unfinished(bytes: u32) -> http::Request<Body> {
    let mut prefix = BytesMut::new();
    prefix.put_u8(0);
    prefix.put_u32(bytes);
    let chunk = Bytes::from(vec![0x0a; 64 << 10]);
    let chunks = (bytes as usize / chunk.len()) - 1;
    let pieces = stream::once(future::ready(prefix.freeze())).chain(stream::repeat(chunk).take(chunks));
    let frames = pieces.map(|piece| Ok::<_, Infallible>(Frame::data(piece))).chain(stream::pending());
    http::Request::post("/rss.common.ShuffleServer/reportShuffleResult")
        .header("content-type", "application/grpc")
        .header("te", "trailers")
        .body(Body::new(StreamBody::new(frames)))
        .unwrap()
}

/// Sends requests for local reads over TCP with 7 MiB of read-ahead hints each. Reads no reply.
pub(super) fn large_local_reads(target: Target) -> BoxFuture<'static, io::Error> {
    async move {
        let hints = vec![0; 7 << 20];
        let of = uniffle_wire::request::PartitionTarget {
            request_id: 1,
            app: honest::APP,
            shuffle: 0,
            partition: 0,
        };
        let request = LocalDataRequest {
            target: of,
            placement: Placement { partitions_per_range: 1, partitions: 1 },
            offset: 0,
            length: 1,
            timestamp_ms: 0,
            version: LocalDataVersion::V3 { storage_id: 0, hints: &hints, task_attempt_id: 0 },
        };
        let mut frame = BytesMut::new();
        ReadRequest::LocalData(request).encode_frame(&mut frame);
        repeat(|| async {
            let mut streams = Vec::new();
            for _ in 0..4 {
                let mut stream = TcpStream::connect(local(target.tcp)).await?;
                for _ in 0..250 {
                    let _ = timeout(Duration::from_millis(50), stream.write_all(&frame)).await;
                }
                streams.push(stream);
            }
            sleep(Duration::from_secs(5)).await;
            Ok(())
        })
        .await
    }
    .boxed()
}

/// Sends 300,000 one-byte blocks in one request.
pub(super) fn tiny_blocks_in_one_send(target: Target) -> BoxFuture<'static, io::Error> {
    async move {
        let generator = BlockGenerator::new(target.seed, IdLayout::SPARK);
        repeat(|| async {
            let client = client(target).await?;
            let blocks: Vec<Block> = (0..300_000)
                .map(|at| generator.block(PartitionId(3), TaskAttemptId(at.into()), 0, 1))
                .collect();
            let _ = client.push(&key(APP, 0), SendForm::Classic, &[(PartitionId(3), blocks)]).await;
            Ok(())
        })
        .await
    }
    .boxed()
}

/// Registers shuffles with users of 60 MiB and with ranges that cannot be merged.
pub(super) fn large_registrations(target: Target) -> BoxFuture<'static, io::Error> {
    async move {
        repeat(|| async {
            let client = client(target).await?;
            for number in 0..12 {
                let request = proto::ShuffleRegisterRequest {
                    app_id: format!("{APP}-{number}"),
                    user: "u".repeat(60 << 20),
                    partition_ranges: vec![proto::ShufflePartitionRange { start: 0, end: 0 }],
                    ..Default::default()
                };
                let _ = client.register_with(request).await;
                let range = |at: i32| proto::ShufflePartitionRange { start: 2 * at, end: 2 * at };
                let request = proto::ShuffleRegisterRequest {
                    app_id: APP.to_owned(),
                    shuffle_id: 1 + number,
                    partition_ranges: (0..1_000_000).map(range).collect(),
                    ..Default::default()
                };
                let _ = client.register_with(request).await;
            }
            Ok(())
        })
        .await
    }
    .boxed()
}

/// Keeps connections open without reading their responses, and answers pings.
async fn hold(connections: &mut [Connection]) -> io::Result<()> {
    for _ in 0..20 {
        for connection in &mut *connections {
            connection.pong(Duration::from_millis(2)).await?;
        }
    }
    Ok(())
}

/// Reads the honest application's data with a zero window, and answers pings.
pub(super) fn zero_windows(target: Target) -> BoxFuture<'static, io::Error> {
    async move {
        let memory = proto::GetMemoryShuffleDataRequest {
            app_id: honest::APP.to_owned(),
            last_block_id: -1,
            read_buffer_size: 14 << 20,
            ..Default::default()
        };
        let disk = proto::GetLocalShuffleDataRequest {
            app_id: honest::APP.to_owned(),
            partition_num: 1,
            partition_num_per_range: 1,
            length: 14 << 20,
            ..Default::default()
        };
        repeat(|| async {
            let mut connections = Vec::new();
            for _ in 0..128 {
                let mut connection = Connection::open(target.grpc, 0).await?;
                connection.ask("ShuffleServer/getMemoryShuffleData", &memory).await?;
                connection.ask("ShuffleServer/getLocalShuffleData", &disk).await?;
                connections.push(connection);
            }
            hold(&mut connections).await
        })
        .await
    }
    .boxed()
}

/// Writes partitions of one-byte blocks, requests lists of them on many streams and reads nothing.
pub(super) fn lists_of_tiny_blocks(target: Target) -> BoxFuture<'static, io::Error> {
    async move {
        let generator = BlockGenerator::new(target.seed, IdLayout::SPARK);
        let ask = |partition: i32| proto::GetMemoryShuffleDataRequest {
            app_id: APP.to_owned(),
            partition_id: partition,
            last_block_id: -1,
            read_buffer_size: 14 << 20,
            ..Default::default()
        };
        repeat(|| async {
            let client = client(target).await?;
            for partition in 10..18 {
                // Two tasks alternate, so that no contiguous run of one task is longer than a
                // block.
                let block = |at: u32| {
                    let task = TaskAttemptId((at % 2).into());
                    generator.block(PartitionId(partition), task, at, 1)
                };
                let blocks = (0..20_000).map(block).collect();
                let _ =
                    client.push(&key(APP, 0), SendForm::Classic, &[(PartitionId(partition), blocks)]).await;
            }
            let mut connections = Vec::new();
            for number in 0..64 {
                let mut connection = Connection::open(target.grpc, 0).await?;
                for at in 0..4 {
                    connection
                        .ask("ShuffleServer/getMemoryShuffleData", &ask(10 + (number + at) % 8))
                        .await?;
                }
                connections.push(connection);
            }
            hold(&mut connections).await
        })
        .await
    }
    .boxed()
}

/// Takes every ticket for one application, and asks again before they expire.
pub(super) fn every_ticket(target: Target) -> BoxFuture<'static, io::Error> {
    async move {
        repeat(|| async {
            let client = client(target).await?;
            for _ in 0..500 {
                let request = proto::RequireBufferRequest {
                    require_size: 4 << 20,
                    app_id: APP.to_owned(),
                    partition_ids: vec![0],
                    ..Default::default()
                };
                let _ = client.require_raw(request).await;
            }
            Ok(())
        })
        .await
    }
    .boxed()
}
