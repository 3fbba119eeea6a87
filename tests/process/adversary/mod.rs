//! An adversary against a worker whose memory is bounded by the kernel: it may be slowed down, not brought down.
//!
//! Each attack ([`attacks`]) is made alone and with others while an honest application writes and reads: it finishes, every
//! byte is right, the process stays within its memory, no poll of a task keeps a thread of its runtime for long, and it answers
//! `/health/live`. `ADVERSARY_SECONDS` and
//! `ADVERSARY_SEED` choose how long the combination goes on and how it is mixed; an hour by hand is
//! `ADVERSARY_SECONDS=3600 cargo test --test process adversary::all -- --nocapture`, which also holds the 99th percentile of
//! honest sends.
//!
//! The process is to stay below capacity × 1.05 + 200 MiB. The net below that is `memory.max` of a cgroup (version 2, or
//! `memory.limit_in_bytes` of version 1) of the capacity and 256 MiB, where one can be made; the test says so.

mod attacks;
mod cancelled;
mod cgroup;
mod costs;
mod full_tmpfs;
mod h2;
mod honest;
mod owed;
mod slow_sends;

use std::time::Duration;

use tokio::task::{JoinSet, block_in_place};
use tokio::time::Instant;
use uniffle_client::grpc::ShuffleClient;
use uniffle_testkit::say;
use uniffle_testkit::worker::{Setup, Worker};
use uniffle_worker::budget::allowance::promised;
use uniffle_worker::proto::ShuffleServerId;
use uniffle_worker::proto::coordinator_server_client::CoordinatorServerClient;

use self::attacks::{APP, Attack, Target};
use self::cgroup::Group;
use self::honest::{Figures, Health, Honest};
use crate::writes::{client_of, key};

const CAPACITY_BYTES: u64 = 256_000_000;
const ALLOWANCE_BYTES: u64 = 256 << 20;
/// How long an attack goes on alone.
const ALONE: Duration = Duration::from_secs(5);
/// How long all go on together when nothing else is said.
const TOGETHER: Duration = Duration::from_secs(60);
/// From here on a run is long enough for its percentiles to mean something.
const LONG: Duration = Duration::from_secs(1800);
/// What an honest send of 16 KiB may take at the 99th percentile; on a machine that does nothing else.
const SEND_MAX: Duration = Duration::from_secs(1);
/// `/health/live` is to be there within a second; on a busy machine, in a debug build, within this.
const HEALTH_MAX: Duration = Duration::from_secs(20);
/// CPU seconds that a poll of any task may take (`tasks_longest_poll_seconds`). CPU time, so that it is the same on a
/// machine that has more to do than cores; in an optimised build it is some milliseconds, here nothing is optimised,
/// and what this is against (N1) took more than twenty seconds.
const POLL_SECONDS_MAX: f64 = 1.0;

/// A worker under attack, and the honest application on it.
struct Siege {
    name: &'static str,
    worker: Worker,
    group: Option<Group>,
    client: ShuffleClient,
    honest: Honest,
    seed: u64,
}

impl Siege {
    async fn start(name: &'static str) -> Self {
        Self::start_with(name, "").await
    }

    /// As [`Siege::start`], with further tables in the configuration.
    async fn start_with(name: &'static str, tables: &str) -> Self {
        let group = Group::with_limit(CAPACITY_BYTES + ALLOWANCE_BYTES);
        let seed = number("ADVERSARY_SEED").unwrap_or(1);
        say(&format!("adversary, {name}: seed {seed}"));
        let setup = Setup {
            name: "adversary",
            capacity: "256M",
            // What the adversary reserved and never sends is back before the honest application loses patience.
            memory: "buffer_ticket_timeout_sec = 10\nbuffer_ticket_check_interval_sec = 1",
            // Fewer than the attacks open: those that do nothing make room. More than they keep a call on (some 260 over gRPC, and
            // on a busy machine those of the round before): when all have one, the honest one, which pauses, is the one to go.
            tables: "[grpc]\nmax_connections = 600\n[tcp]\nmax_connections = 256",
            made_tables: tables.to_owned(),
            disks: 2,
            wrapper: group.as_ref().map(Group::wrapper).unwrap_or_default(),
            ..Setup::default()
        };
        let worker = block_in_place(|| Worker::start(&setup));
        let client = client_of(&worker).await;
        client.register(&key(APP, 0), &[(0, 99)]).await.expect("registered");
        let honest = Honest::start(&client).await;
        Self { name, worker, group, client, honest, seed }
    }

    fn target(&self) -> Target {
        let ready = self.worker.ready();
        let tcp = ready.urpc_port.expect("embedded mode opens the TCP listener");
        Target { grpc: ready.grpc_port, tcp, http: ready.http_port, seed: self.seed }
    }

    /// Makes `attacks` for `time` while the honest application works.
    async fn run(&mut self, attacks: &[Attack], time: Duration) -> (Figures, Health) {
        let mut siege = JoinSet::new();
        for (attack, seed) in attacks.iter().zip(self.seed..) {
            siege.spawn(attack(Target { seed, ..self.target() }));
        }
        let until = Instant::now() + time;
        let watch = honest::watch(self.worker.ready().http_port, until);
        let (figures, health) = tokio::join!(self.honest.work(&self.client, until), watch);
        let ended = siege.try_join_next();
        assert!(ended.is_none(), "{}: an attack did not get through: {ended:?}", self.name);
        siege.abort_all();
        while siege.join_next().await.is_some() {}
        (figures, health)
    }

    /// It lives, has lost nothing, still takes data, and nothing is left of the attack.
    async fn finish(mut self, outcome: (Figures, Health)) {
        self.assert_bounds(&outcome);
        self.honest.work(&self.client, Instant::now() + Duration::from_millis(1)).await;
        self.honest.assert_readable(&self.client).await;
        block_in_place(|| self.worker.assert_no_error_logged());
        self.end().await;
    }

    /// The honest application was served, within the bounds of the process.
    fn assert_bounds(&self, (figures, health): &(Figures, Health)) {
        let name = self.name;
        assert!(figures.sends > 0, "{name}: the honest application sent nothing");
        let peak = self.worker.peak_resident_bytes();
        let metrics = block_in_place(|| self.worker.metrics());
        let (poll_seconds, of) = metrics.largest("tasks_longest_poll_seconds").unwrap_or_default();
        let poll = format!("the longest poll took {:.1} ms ({of})", poll_seconds * 1000.0);
        say(&format!("adversary, {name}: at most {} MiB resident; {figures}; {health}; {poll}", peak >> 20));
        assert!(poll_seconds <= POLL_SECONDS_MAX, "{name}: {poll}");
        self.assert_within_memory();
        assert!(health.longest <= HEALTH_MAX, "{name}: /health/live took {:?}", health.longest);
    }

    /// The process has stayed within its memory since it began.
    fn assert_within_memory(&self) {
        let (peak, promised) = (self.worker.peak_resident_bytes(), promised(CAPACITY_BYTES));
        let name = self.name;
        assert!(peak <= promised, "{name}: {} MiB resident, {} MiB are promised", peak >> 20, promised >> 20);
    }

    /// Nothing is left of the applications.
    async fn end(self) {
        for app in [honest::APP, APP] {
            self.client.unregister_app(app).await.expect("known");
        }
        block_in_place(|| {
            self.worker.assert_clean();
            assert_eq!(self.group.as_ref().map_or(0, Group::kills), 0, "killed by the kernel");
            self.worker.stop();
        });
    }
}

fn number(variable: &str) -> Option<u64> {
    let text = std::env::var(variable).ok()?;
    Some(text.parse().unwrap_or_else(|_| panic!("{variable} = {text}: a number")))
}

/// The workers that the embedded coordinator knows.
async fn servers(siege: &Siege) -> Vec<ShuffleServerId> {
    let address = format!("http://127.0.0.1:{}", siege.target().grpc);
    let mut coordinator = CoordinatorServerClient::connect(address).await.expect("a connection");
    coordinator.get_shuffle_server_list(()).await.expect("an answer").into_inner().servers
}

async fn alone(name: &'static str, attack: Attack) {
    let mut siege = Siege::start(name).await;
    let outcome = siege.run(&[attack], ALONE).await;
    siege.finish(outcome).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn n3_half_sent_prefaces_keep_nobody_out() {
    alone("N3", attacks::n3_half_sent_prefaces).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn n12_slow_sockets_do_not_keep_health_checks_out() {
    alone("N12", attacks::n12_slow_sockets_and_dumps).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn n13_f11_forged_heartbeats_do_not_replace_the_own_worker_and_made_up_ones_do_not_join() {
    let mut siege = Siege::start("N13").await;
    let before = servers(&siege).await;
    let outcome = siege.run(&[attacks::n13_forged_heartbeats], ALONE).await;
    assert_eq!(before.len(), 1, "itself");
    assert_eq!(servers(&siege).await, before);
    siege.finish(outcome).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn n1_repeated_partitions_stop_nobody() {
    alone("N1", owed::n1_repeated_partitions).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn n1_large_shuffles_that_end_stop_nobody() {
    alone("N1, ends", owed::n1_large_shuffles_that_end).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn n2_unfinished_reports_stay_within_the_bound() {
    alone("N2", owed::n2_unfinished_reports).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn n4_large_local_reads_stay_within_the_bound() {
    alone("N4", owed::n4_large_local_reads).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn n6_tiny_blocks_stay_within_the_bound() {
    alone("N6", owed::n6_tiny_blocks).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn n7_large_registrations_stay_within_the_bound() {
    alone("N7", owed::n7_large_registrations).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn n8_zero_windows_keep_no_honest_reader_out() {
    alone("N8", owed::n8_zero_windows).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn n8_lists_of_tiny_blocks_stay_within_the_bound() {
    alone("N8, lists", owed::n8_lists_of_tiny_blocks).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn n9_who_takes_every_ticket_keeps_nobody_out() {
    alone("N9", owed::n9_every_ticket).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn assignments_whose_callers_go_stay_within_the_bound() {
    alone("cancelled assignments", cancelled::assignments).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn looks_at_metrics_whose_callers_go_take_no_thread_from_the_disks() {
    alone("cancelled looks at metrics", cancelled::looks_at_metrics).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn small_shuffles_that_end_together_stay_within_the_bound() {
    alone("small shuffles that end together", cancelled::small_shuffles).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn all_together_do_not_get_the_process_killed_and_leave_nothing() {
    let all: &[Attack] = &[
        attacks::n3_half_sent_prefaces,
        attacks::n12_slow_sockets_and_dumps,
        attacks::n13_forged_heartbeats,
        attacks::tiny_blocks,
        attacks::forged_tickets,
        attacks::half_frames,
        attacks::slow_readers,
        attacks::paused_calls,
        owed::n1_repeated_partitions,
        owed::n1_large_shuffles_that_end,
        owed::n2_unfinished_reports,
        owed::n4_large_local_reads,
        owed::n6_tiny_blocks,
        owed::n7_large_registrations,
        owed::n8_zero_windows,
        owed::n8_lists_of_tiny_blocks,
        owed::n9_every_ticket,
        cancelled::assignments,
        cancelled::looks_at_metrics,
        cancelled::small_shuffles,
    ];
    let time = number("ADVERSARY_SECONDS").map_or(TOGETHER, Duration::from_secs);
    let mut siege = Siege::start("all").await;
    let outcome = siege.run(all, time).await;
    if time >= LONG {
        let p99 = outcome.0.percentile(99);
        assert!(p99 <= SEND_MAX, "99 % of honest sends took at most {p99:?}");
    }
    siege.finish(outcome).await;
}
