//! Slow or stalled sends, and unused tickets, that hold nearly all memory. The worker is upgraded
//! during or after each attack and must still have the honest application's data.

use std::collections::VecDeque;
use std::io;
use std::time::Duration;

use futures::future::{BoxFuture, FutureExt as _};
use prost::Message as _;
use tokio::io::AsyncWriteExt as _;
use tokio::net::TcpStream;
use tokio::task::{JoinSet, block_in_place};
use tokio::time::{Instant, sleep};
use uniffle_client::block::{Block, IdLayout};
use uniffle_client::grpc::ShuffleClient;
use uniffle_testkit::block_generator::BlockGenerator;
use uniffle_testkit::clients::{client_of, key, local};
use uniffle_testkit::say;
use uniffle_wire::types::{PartitionId, TaskAttemptId};
use uniffle_worker::proto;

use super::Siege;
use super::attacks::{APP, Attack, Target, client, frame, repeat};
use super::h2::Connection;
use super::honest::Health;

/// Sizes of sends. Of each size as many are sent as get a ticket.
const SIZES: [i32; 4] = [4_000_000, 500_000, 60_000, 8_000];
/// Upper bound on granted sends of one size.
const SENDS: usize = 80;
/// Sends of one connection. The worker refuses more streams of a connection beside many others.
const CALLS: usize = 4;
/// Leading bytes of a send that are sent at once.
const FIRST_BYTES: usize = 4 << 10;
/// Bytes of a send that are sent one at a time, for longer than any attack is made.
const TRICKLED: usize = 600;
const BETWEEN_BYTES: Duration = Duration::from_millis(100);
/// Duration of a stall, also longer than any attack.
const STALLED: Duration = Duration::from_secs(60);
/// Duration of the attacks, which hold the memory after a few seconds.
const HELD: Duration = Duration::from_secs(20);
/// After this time another application asks for memory.
const LATE: Duration = Duration::from_secs(8);
/// Bytes of that application's request, more than the attack leaves free.
const LATE_BYTES: i32 = 4_000_000;
/// Applications of the attack that uses many.
const APPS: usize = 64;
/// Counter of slow sends that the worker ended for others.
const SLOW: &str = "slow_sends_ended_total";
/// An application that comes while an attack holds the memory.
const LATE_APP: &str = "late";

fn block(size: i32) -> Block {
    let length = u32::try_from(size).unwrap();
    BlockGenerator::new(3, IdLayout::SPARK).block(PartitionId(1), TaskAttemptId(1), 0, length)
}

/// Requests a ticket of `app` for `size` bytes. Returns `None` without free memory.
async fn ticket(client: &ShuffleClient, app: &str, size: i32) -> io::Result<Option<i64>> {
    let request = proto::RequireBufferRequest {
        require_size: size,
        app_id: app.to_owned(),
        shuffle_id: 0,
        partition_ids: vec![1],
        ..Default::default()
    };
    let answer = client.require_raw(request).await.map_err(io::Error::other)?;
    Ok((answer.status == i32::from(proto::StatusCode::Success)).then_some(answer.require_buffer_id))
}

/// Tickets for all free memory. Each is used at once, because unused ones are taken back.
struct Tickets {
    client: ShuffleClient,
    /// Blocks of the sizes that are left.
    blocks: VecDeque<Block>,
    /// Tickets left of the first size.
    remaining: usize,
}

impl Tickets {
    async fn of(target: Target) -> io::Result<Self> {
        let blocks = SIZES.map(block).into();
        Ok(Self { client: client(target).await?, blocks, remaining: SENDS })
    }

    /// Returns the next ticket and a block of its size.
    async fn next(&mut self) -> io::Result<Option<(i64, Block)>> {
        while let Some(block) = self.blocks.front().cloned() {
            let size = i32::try_from(block.data.len()).unwrap();
            if self.remaining > 0
                && let Some(ticket) = ticket(&self.client, APP, size).await?
            {
                self.remaining -= 1;
                return Ok(Some((ticket, block)));
            }
            self.blocks.pop_front();
            self.remaining = SENDS;
        }
        Ok(None)
    }
}

/// Sends over gRPC that have begun.
#[derive(Default)]
struct Calls(Vec<(Connection, Vec<u32>)>);

impl Calls {
    async fn begin(&mut self, port: u16, (ticket, block): (i64, Block)) -> io::Result<()> {
        if self.0.last().is_none_or(|(_, calls)| calls.len() == CALLS) {
            self.0.push((Connection::open(port, 1 << 20).await?, Vec::new()));
        }
        let (connection, calls) = self.0.last_mut().expect("a connection was just added");
        let id = connection.begin("ShuffleServer/sendShuffleData").await?;
        connection.data(id, &message(ticket, &block)[..FIRST_BYTES], false).await?;
        calls.push(id);
        Ok(())
    }

    /// Sends a ping on each connection and a byte of each call.
    async fn trickle(&mut self) -> io::Result<()> {
        for (connection, calls) in &mut self.0 {
            connection.ping().await?;
            for id in calls {
                connection.data(*id, b"x", false).await?;
            }
        }
        Ok(())
    }
}

fn message(ticket: i64, block: &Block) -> Vec<u8> {
    let block = proto::ShuffleBlock {
        block_id: block.meta.block_id.0,
        length: i32::try_from(block.data.len()).unwrap(),
        crc: i64::from(block.meta.crc),
        data: block.data.clone(),
        ..Default::default()
    };
    let request = proto::SendShuffleDataRequest {
        app_id: APP.to_owned(),
        shuffle_id: 0,
        require_buffer_id: ticket,
        shuffle_data: vec![proto::ShuffleData { partition_id: 1, block: vec![block] }],
        ..Default::default()
    };
    let bytes = request.encode_to_vec();
    let mut framed = vec![0];
    framed.extend_from_slice(&u32::try_from(bytes.len()).unwrap().to_be_bytes());
    framed.extend_from_slice(&bytes);
    framed
}

/// Sends a byte of each call now and then over a few connections, and pings in between.
fn trickle_over_grpc(target: Target) -> BoxFuture<'static, io::Error> {
    async move {
        repeat(|| async {
            let (mut tickets, mut calls) = (Tickets::of(target).await?, Calls::default());
            while let Some(send) = tickets.next().await? {
                calls.begin(target.grpc, send).await?;
            }
            for _ in 0..TRICKLED {
                calls.trickle().await?;
                sleep(BETWEEN_BYTES).await;
            }
            Ok(())
        })
        .await
    }
    .boxed()
}

/// Sends a byte now and then, on a connection per send.
fn trickle_over_tcp(target: Target) -> BoxFuture<'static, io::Error> {
    async move {
        repeat(|| async {
            let (mut tickets, mut streams) = (Tickets::of(target).await?, Vec::new());
            while let Some((ticket, block)) = tickets.next().await? {
                let mut stream = TcpStream::connect(local(target.tcp)).await?;
                stream.write_all(&frame(ticket, &block)[..FIRST_BYTES]).await?;
                streams.push(stream);
            }
            for _ in 0..TRICKLED {
                for stream in &mut streams {
                    stream.write_all(b"x").await?;
                }
                sleep(BETWEEN_BYTES).await;
            }
            Ok(())
        })
        .await
    }
    .boxed()
}

/// Starts sends over both transports and never continues them.
fn stalls(target: Target) -> BoxFuture<'static, io::Error> {
    async move {
        repeat(|| async {
            let (mut tickets, mut calls) = (Tickets::of(target).await?, Calls::default());
            let mut streams = Vec::new();
            while let Some((ticket, block)) = tickets.next().await? {
                if ticket % 2 == 0 {
                    calls.begin(target.grpc, (ticket, block)).await?;
                } else {
                    let mut stream = TcpStream::connect(local(target.tcp)).await?;
                    stream.write_all(&frame(ticket, &block)[..FIRST_BYTES]).await?;
                    streams.push(stream);
                }
            }
            sleep(STALLED).await;
            Ok(())
        })
        .await
    }
    .boxed()
}

fn app(number: usize) -> String {
    format!("{APP}-{number}")
}

/// Requests tickets of many applications, each within its share, and uses none.
fn unused_tickets_of_many_apps(target: Target) -> BoxFuture<'static, io::Error> {
    async move {
        repeat(|| async {
            let client = client(target).await?;
            for number in 0..APPS {
                // Already registered from the second round on.
                let _ = client.register(&key(&app(number), 0), &[(0, 9)]).await;
                for size in SIZES {
                    ticket(&client, &app(number), size).await?;
                }
            }
            Ok(())
        })
        .await
    }
    .boxed()
}

/// Waits for the first ticket of an application that comes while the attack holds the memory.
/// Returns when it was granted.
async fn first_ticket(target: Target) -> io::Result<Instant> {
    sleep(LATE).await;
    let client = client(target).await?;
    client.register(&key(LATE_APP, 0), &[(0, 9)]).await.map_err(io::Error::other)?;
    let asked = Instant::now();
    while ticket(&client, LATE_APP, LATE_BYTES).await?.is_none() {
        sleep(Duration::from_millis(100)).await;
    }
    say(&format!("adversary: the first ticket of another application after {:.1?}", asked.elapsed()));
    Ok(Instant::now())
}

/// Runs `attack` beside the honest application and one that comes later, then upgrades. The counter
/// `ended` shows that the attack held memory until the worker took it back.
async fn upgrade_after(name: &'static str, attack: Attack, ended: &str) {
    let mut siege = Siege::start(name).await;
    let mut late = JoinSet::new();
    late.spawn(first_ticket(siege.target()));
    let attack_ends = Instant::now() + HELD;
    let outcome = siege.run(&[attack], HELD).await;
    let granted = late.join_next().await.expect("a late call is running").unwrap().unwrap();
    assert!(granted < attack_ends, "{name}: another application got no memory before the attack ended");
    let metrics = block_in_place(|| siege.worker.metrics());
    assert!(metrics.expect(ended) > 0.0, "{name}: {ended} is 0, so the attack held no memory");
    siege.client.unregister_app(LATE_APP).await.unwrap();
    for number in 0..APPS {
        let _unknown = siege.client.unregister_app(&app(number)).await;
    }
    block_in_place(|| {
        siege.worker.begin_upgrade();
        siege.worker.finish_upgrade();
    });
    siege.client = client_of(&siege.worker).await;
    siege.honest.assert_readable(&siege.client).await;
    siege.finish(outcome).await;
}

/// Upgrades while `attack` continues; the upgrade must not wait for its connections until the
/// deadline.
async fn upgrade_during(name: &'static str, attack: Attack) {
    let mut siege = Siege::start(name).await;
    let mut attacking = JoinSet::new();
    attacking.spawn(attack(siege.target()));
    let figures = siege.honest.work(&siege.client, Instant::now() + LATE).await;
    block_in_place(|| {
        siege.worker.begin_upgrade();
        siege.worker.finish_upgrade();
    });
    attacking.shutdown().await;
    let (log, gap_ms) = (siege.worker.log(), siege.worker.ready().upgrade_gap_ms);
    say(&format!("adversary, {name}: nothing was accepted for {gap_ms:?} ms"));
    for late in ["did not drain in time", "connections did not end in time"] {
        assert!(!log.contains(late), "{log}");
    }
    siege.client = client_of(&siege.worker).await;
    siege.honest.assert_readable(&siege.client).await;
    siege.finish((figures, Health::default())).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn trickling_grpc_sends_do_not_delay_upgrade() {
    upgrade_during("upgrade beside sends over gRPC", trickle_over_grpc).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn trickling_tcp_sends_do_not_delay_upgrade() {
    upgrade_during("upgrade beside sends over TCP", trickle_over_tcp).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn stalled_sends_do_not_delay_upgrade() {
    upgrade_during("upgrade beside stalled sends", stalls).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn trickling_grpc_sends_do_not_block_honest_clients() {
    upgrade_after("trickling sends over gRPC", trickle_over_grpc, SLOW).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn trickling_tcp_sends_do_not_block_honest_clients() {
    upgrade_after("trickling sends over TCP", trickle_over_tcp, SLOW).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn stalled_sends_do_not_block_honest_clients() {
    upgrade_after("stalled sends", stalls, SLOW).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn unused_tickets_do_not_block_honest_clients() {
    upgrade_after("unused tickets", unused_tickets_of_many_apps, "tickets_taken_back_total").await;
}
