//! One run against one server: connection, phases and figures. The commands `write`, `read` and
//! `mixed` consist of runs.
//!
//! Invariant: a run that returns `Ok` has made all requested checks. The first error ends it.

use std::net::SocketAddr;
use std::process::{Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, AtomicU64};
use std::time::Duration;

use anyhow::{Context as _, ensure};
use tokio::task::{JoinSet, spawn_blocking};
use tokio::time::{Instant, interval, sleep, timeout};
use uniffle_wire::types::{AppId, ShuffleId, ShuffleKey};

use crate::content::ContentPool;
use crate::options::{LoadArgs, ReadTier, RunArgs};
use crate::plan::WorkPlan;
use crate::process::{Probe, ProcessUsage, ServerProcess, own_cpu_seconds};
use crate::progress::PhaseProgress;
use crate::read::{self, ReadPhase};
use crate::report::{GB, PhaseReport, PhaseSample, RunReport, ServerUse};
use crate::session::ClientSession;
use crate::shape::SessionShape;
use crate::stats::{Stats, add, get};
use crate::syscalls::SyscallCounter;
use crate::write::{self, ExpectedIds, WriteOptions, WritePhase};

/// Interval between two samples.
const SAMPLE_INTERVAL: Duration = Duration::from_millis(250);
/// Number of samples between two heartbeats of the application: 10 s, as in clients.
const SAMPLES_PER_HEARTBEAT: u32 = 40;
/// Share of a core below which a server is idle.
const QUIET_SHARE: f64 = 0.05;
/// Time limit to unregister the application.
const GOODBYE_TIMEOUT: Duration = Duration::from_secs(5);

/// A connected group of clients.
pub(crate) struct ClientGroup {
    load: LoadArgs,
    plan: WorkPlan,
    app: AppId,
    sessions: Vec<Arc<ClientSession>>,
    probe: Probe,
    begin: Instant,
    report: RunReport,
    /// Tasks that read from TCP connections.
    _tasks: JoinSet<()>,
    server: Option<ServerProcess>,
}

impl ClientGroup {
    /// Starts the server if requested, and connects.
    async fn connect(name: &str, args: &RunArgs) -> anyhow::Result<Self> {
        let mut load = args.load.clone();
        let shape = load.shape.as_deref().map(SessionShape::load).transpose()?;
        if let Some(shape) = &shape {
            shape.apply_to(&mut load);
        }
        load.check(args.server.transport)?;
        let target = args.server.target(&load);
        let server = match &args.server.server_cmd {
            Some(command) => Some(ServerProcess::start(command, target.grpc).await?),
            None => None,
        };
        let pid = server.as_ref().map(ServerProcess::pid).or(args.server.pid);
        let http = args.server.http_port.map(|port| SocketAddr::new(args.server.address, port));
        let probe = Probe::find(pid, args.server.port, http);
        let pool = Arc::new(ContentPool::new(load.seed, load.blocks.clone()));
        let mut tasks = JoinSet::new();
        let mut sessions = Vec::new();
        for _ in 0..load.connections {
            sessions.push(Arc::new(ClientSession::connect(target, pool.clone(), &mut tasks).await?));
        }
        let plan = WorkPlan::new(pool, load.seed, load.partitions, load.skew);
        let plan = match &shape {
            Some(shape) => plan.with_shapes(&shape.messages).with_weights(&shape.partition_bytes),
            None => plan.with_messages(load.message_size.as_u64(), load.message_partitions),
        };
        let unique = format!("uniffle-bench_{}_{:08x}", std::process::id(), rand::random::<u32>());
        let app = AppId::parse(&unique)?;
        let report = RunReport { name: name.to_owned(), ..RunReport::default() };
        let begin = Instant::now();
        Ok(Self { load, plan, app, sessions, probe, begin, report, _tasks: tasks, server })
    }

    /// Returns the rate of the last phase.
    pub(crate) fn last_bytes_per_second(&self) -> u64 {
        let rate = self.report.phases.last().map_or(0.0, |phase| phase.gb_per_second() * GB);
        format!("{rate:.0}").parse().unwrap_or(0)
    }

    pub(crate) fn load_mut(&mut self) -> &mut LoadArgs {
        &mut self.load
    }

    /// Registers a shuffle and creates its ledger.
    pub(crate) async fn shuffle(&self, number: u32) -> anyhow::Result<BenchShuffle> {
        let key = ShuffleKey::new(self.app.clone(), ShuffleId(i32::try_from(number)?));
        let stats = Stats::default();
        self.sessions[0].register(&stats, &key, self.load.partitions, self.load.local_order).await?;
        Ok(BenchShuffle { key, ledger: Arc::new(ExpectedIds::new(self.load.partitions)) })
    }

    pub(crate) async fn unregister(&self, shuffle: &BenchShuffle) -> anyhow::Result<()> {
        if self.load.keep {
            return Ok(());
        }
        self.sessions[0].unregister(&Stats::default(), &shuffle.key).await
    }

    /// Pauses between two rounds, if requested.
    async fn rest_before(&self, round: u32) {
        if round > 0 {
            sleep(self.load.rest).await;
        }
    }

    fn until(&self) -> Option<Instant> {
        self.load.duration.map(|duration| Instant::now() + duration)
    }

    fn writers(&self, shuffle: &BenchShuffle, stats: &Arc<Stats>) -> Arc<WritePhase> {
        let options = WriteOptions {
            writers: self.load.writers,
            tasks: self.load.tasks(),
            total_bytes: self.load.bytes.as_u64(),
            until: self.until(),
            replicas: self.load.replicas,
            rate: self.load.rate.map(|rate| rate.as_u64() as f64),
        };
        Arc::new(WritePhase {
            options,
            plan: self.plan.clone(),
            key: shuffle.key.clone(),
            sessions: self.sessions.clone(),
            stats: stats.clone(),
            ledger: shuffle.ledger.clone(),
            next_task: AtomicU32::new(0),
            paced_bytes: AtomicU64::new(0),
            begin: Instant::now(),
        })
    }

    fn readers(&self, shuffle: &BenchShuffle, stats: &Arc<Stats>) -> anyhow::Result<Arc<ReadPhase>> {
        let reads = f64::from(self.load.partitions) * self.load.reads;
        Ok(Arc::new(ReadPhase {
            readers: self.load.readers(),
            reads: format!("{reads:.0}").parse()?,
            partitions: self.load.partitions,
            read_buffer_bytes: u32::try_from(self.load.read_buffer.as_u64())?,
            unchecked: self.load.unchecked,
            until: self.until(),
            pool: self.plan.pool.clone(),
            key: shuffle.key.clone(),
            sessions: self.sessions.clone(),
            stats: stats.clone(),
            ledger: shuffle.ledger.clone(),
            next: AtomicU64::new(0),
            pace: self.load.read_rate.map(|rate| (rate.as_u64() as f64, self.bytes_of_partition())),
            begin: Instant::now(),
        }))
    }

    /// Writes a whole shuffle.
    pub(crate) async fn write(&mut self, name: &str, shuffle: &BenchShuffle) -> anyhow::Result<()> {
        let stats = Arc::new(Stats::default());
        let phase = self.writers(shuffle, &stats);
        self.phase(name, self.write_bytes_expected(), &stats, write::run(phase)).await
    }

    /// Runs the command between writing and reading, such as one that migrates the shuffle, if
    /// requested.
    async fn between(&mut self) -> anyhow::Result<()> {
        let Some(command) = self.load.between.clone() else { return Ok(()) };
        let (stats, bytes) = (Arc::new(Stats::default()), self.load.bytes.as_u64());
        let moved = stats.clone();
        let work = async move {
            let mut shell = Command::new("/bin/sh");
            shell.args(["-c", &command]).stdin(Stdio::null()).stdout(Stdio::null());
            let status = spawn_blocking(move || shell.status()).await??;
            ensure!(status.success(), "{command:?} ended with {status}");
            // The command moves the shuffle, so the phase gets a rate.
            add(&moved.written_bytes, bytes);
            Ok(())
        };
        self.phase("between", bytes, &stats, work).await
    }

    /// Reads a shuffle and compares every byte, unless `--unchecked` is given.
    pub(crate) async fn read(&mut self, name: &str, shuffle: &BenchShuffle) -> anyhow::Result<()> {
        let stats = Arc::new(Stats::default());
        let phase = self.readers(shuffle, &stats)?;
        let expected = self.read_bytes_expected();
        self.phase(name, expected, &stats, read::run(phase)).await?;
        self.check_tier(&stats)
    }

    /// Writes one shuffle while another is read.
    pub(crate) async fn both(
        &mut self,
        name: &str,
        write: &BenchShuffle,
        read: &BenchShuffle,
    ) -> anyhow::Result<()> {
        let stats = Arc::new(Stats::default());
        let (writers, readers) = (self.writers(write, &stats), self.readers(read, &stats)?);
        let expected = self.write_bytes_expected() + self.read_bytes_expected();
        let work = async {
            tokio::try_join!(write::run(writers), read::run(readers))?;
            Ok(())
        };
        self.phase(name, expected, &stats, work).await?;
        self.check_tier(&stats)
    }

    fn bytes_of_partition(&self) -> f64 {
        self.load.bytes.as_u64() as f64 / f64::from(self.load.partitions.max(1))
    }

    fn write_bytes_expected(&self) -> u64 {
        self.load.bytes.as_u64() * u64::from(self.load.replicas)
    }

    fn read_bytes_expected(&self) -> u64 {
        let bytes = self.load.bytes.as_u64() as f64 * self.load.reads;
        format!("{bytes:.0}").parse().unwrap_or(0)
    }

    fn check_tier(&self, stats: &Stats) -> anyhow::Result<()> {
        let (memory, disk) = (get(&stats.blocks_from_memory), get(&stats.blocks_from_disk));
        match self.load.tier {
            ReadTier::Any => {}
            ReadTier::Memory => ensure!(disk == 0, "{disk} of {} blocks came from disk", memory + disk),
            ReadTier::Disk => ensure!(disk > memory, "{memory} of {} blocks came from memory", memory + disk),
        }
        Ok(())
    }

    /// Runs `work` as a phase, takes samples, and records its figures.
    async fn phase(
        &mut self,
        name: &str,
        expected_bytes: u64,
        stats: &Arc<Stats>,
        work: impl Future<Output = anyhow::Result<()>>,
    ) -> anyhow::Result<()> {
        let counting = match self.probe {
            Probe::Pid(pid) if self.load.system_calls => Some(SyscallCounter::attach(pid).await?),
            _ => None,
        };
        let run = &self.report.name;
        let label = if run == name { name.to_owned() } else { format!("{run} {name}") };
        let progress = PhaseProgress::start(&label, expected_bytes);
        let before = self.probe.usage();
        let client_before = own_cpu_seconds();
        let begin = Instant::now();
        let mut ticks = interval(SAMPLE_INTERVAL);
        let mut work = Box::pin(work);
        let mut tick = 0_u32;
        let result = loop {
            tokio::select! {
                biased;
                result = &mut work => break result,
                _ = ticks.tick() => {
                    progress.at(stats.bytes());
                    self.sample(stats);
                    tick += 1;
                    if tick.is_multiple_of(SAMPLES_PER_HEARTBEAT) {
                        self.sessions[0].heartbeat(self.app.as_str()).await;
                    }
                }
            }
        };
        drop(work);
        progress.end(stats.bytes());
        result.with_context(|| format!("{name} failed after {:.1} s", begin.elapsed().as_secs_f64()))?;
        self.sample(stats);
        let mut phase = figures(name, stats, begin.elapsed());
        phase.client_cpu_seconds = own_cpu_seconds() - client_before;
        if let Some(before) = before {
            let after = self.quiet_usage().await;
            phase.server = after.map(|after| ServerUse::between(&before, &after));
        }
        if let Some(counting) = counting {
            phase.system_calls = Some(counting.finish().await?);
        }
        self.report.phases.push(phase);
        Ok(())
    }

    fn sample(&mut self, stats: &Stats) {
        let sample = PhaseSample {
            seconds: self.begin.elapsed().as_secs_f64(),
            written_bytes: get(&stats.written_bytes),
            read_bytes: get(&stats.read_bytes),
            server_rss_bytes: self.probe.usage().map_or(0, |usage| usage.rss_bytes),
        };
        self.report.samples.push(sample);
    }

    /// Returns the server's usage once it is idle, or after the time limit.
    pub(crate) async fn quiet_usage(&self) -> Option<ProcessUsage> {
        let deadline = Instant::now() + self.load.settle;
        let mut last = self.probe.usage()?;
        if self.load.settle.is_zero() {
            return Some(last);
        }
        loop {
            sleep(SAMPLE_INTERVAL).await;
            let now = self.probe.usage()?;
            let quiet = now.cpu_seconds - last.cpu_seconds < QUIET_SHARE * SAMPLE_INTERVAL.as_secs_f64();
            if quiet || Instant::now() > deadline {
                return Some(now);
            }
            last = now;
        }
    }

    /// Unregisters the application, stops a started server, and returns the report.
    async fn finish(self) -> RunReport {
        if !self.load.keep {
            // Errors are ignored: a failed server has already been reported.
            let _ = timeout(GOODBYE_TIMEOUT, self.sessions[0].unregister_app(self.app.as_str())).await;
        }
        if let Some(server) = self.server {
            server.stop().await;
        }
        self.report
    }
}

/// A registered shuffle and the blocks that it must return.
pub(crate) struct BenchShuffle {
    key: ShuffleKey,
    ledger: Arc<ExpectedIds>,
}

fn figures(name: &str, stats: &Stats, took: Duration) -> PhaseReport {
    PhaseReport {
        name: name.to_owned(),
        seconds: took.as_secs_f64(),
        written_bytes: get(&stats.written_bytes),
        read_bytes: get(&stats.read_bytes),
        blocks_written: get(&stats.blocks_written),
        blocks_from_memory: get(&stats.blocks_from_memory),
        blocks_from_disk: get(&stats.blocks_from_disk),
        blocks_repeated: get(&stats.blocks_repeated),
        retries: get(&stats.retries),
        no_buffer_waits: get(&stats.no_buffer_waits),
        no_buffer_wait_seconds: get(&stats.no_buffer_wait_us) as f64 / 1e6,
        client_cpu_seconds: 0.0,
        requests: stats.requests(),
        system_calls: None,
        server: None,
        latencies: stats.latencies(),
    }
}

/// Connects and runs `work`. Then unregisters the application, also after a failure, so that a run
/// without `--keep` leaves nothing on the server.
pub(crate) async fn with_cluster(
    name: &str,
    args: &RunArgs,
    work: impl AsyncFnOnce(&mut ClientGroup) -> anyhow::Result<()>,
) -> anyhow::Result<RunReport> {
    let mut cluster = ClientGroup::connect(name, args).await?;
    let result = work(&mut cluster).await;
    let report = cluster.finish().await;
    result.map(|()| report)
}

/// Runs all rounds of `write`.
pub(crate) async fn write_only(name: &str, args: &RunArgs) -> anyhow::Result<RunReport> {
    let mut args = args.clone();
    // `LoadArgs::check` adds the memory for responses only if something is read.
    args.load.reads = 0.0;
    with_cluster(name, &args, async |cluster| {
        for round in 0..args.load.rounds {
            cluster.rest_before(round).await;
            let shuffle = cluster.shuffle(round).await?;
            cluster.write("write", &shuffle).await?;
            cluster.unregister(&shuffle).await?;
        }
        Ok(())
    })
    .await
}

/// Runs all rounds of `read`.
pub(crate) async fn write_and_read(name: &str, args: &RunArgs) -> anyhow::Result<RunReport> {
    with_cluster(name, args, async |cluster| {
        for round in 0..args.load.rounds {
            cluster.rest_before(round).await;
            let shuffle = cluster.shuffle(round).await?;
            cluster.write("write", &shuffle).await?;
            cluster.between().await?;
            cluster.read("read", &shuffle).await?;
            cluster.unregister(&shuffle).await?;
        }
        Ok(())
    })
    .await
}

/// Runs `mixed`: writes the first shuffle, then writes each next one while the previous is read,
/// and reads the last.
pub(crate) async fn mixed(name: &str, args: &RunArgs) -> anyhow::Result<RunReport> {
    with_cluster(name, args, async |cluster| {
        let mut last = cluster.shuffle(0).await?;
        cluster.write("write", &last).await?;
        for round in 1..=args.load.rounds {
            let next = cluster.shuffle(round).await?;
            cluster.both("mixed", &next, &last).await?;
            cluster.unregister(&last).await?;
            last = next;
        }
        cluster.read("read", &last).await?;
        cluster.unregister(&last).await
    })
    .await
}
