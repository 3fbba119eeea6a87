//! The command line, and checks that only need the command line and this machine.

use std::net::{IpAddr, SocketAddr};
use std::path::PathBuf;
use std::sync::LazyLock;
use std::time::Duration;

use anyhow::{Context as _, bail, ensure};
use bytesize::ByteSize;
use clap::{Args, Parser, Subcommand, ValueEnum};
use uniffle_ctl::Shell;
use uniffle_worker::build::{Build, last_commit};

use crate::content::Sizes;
use crate::plan::PARTITIONS_MAX;
use crate::session::{DataTransport, RetryPauses, ServerTarget};

/// Most writers: each is one task of the runtime.
const WRITERS_MAX: u32 = 100_000;
/// Most tasks that fit the layout of block ids.
const TASKS_MAX: u32 = 1 << 22;

const BUILD: Build = Build::of(&last_commit(include_bytes!(env!("WORKER_REFLOG"))));
static VERSION: LazyLock<String> = LazyLock::new(|| BUILD.to_string());

/// Runs a cluster of Spark writers and readers against any server that speaks Uniffle's protocols.
///
/// Every byte that is read is compared with the written byte. Exit code 0 means that everything was
/// correct.
#[derive(Debug, Parser)]
#[command(name = "uniffle-bench", version = VERSION.as_str())]
pub(crate) struct BenchArguments {
    #[command(subcommand)]
    pub(crate) action: Action,
}

#[derive(Debug, Subcommand)]
#[command(disable_help_subcommand = true)]
#[expect(clippy::large_enum_variant, reason = "there is one, parsed at the start")]
pub(crate) enum Action {
    #[command(flatten)]
    Run(BenchCommand),
    /// Print completions for a shell
    Completions {
        /// Name of the shell
        shell: Shell,
    },
    /// Print the manual page
    Man {
        /// Write the pages of all subcommands to this directory instead
        #[arg(long, value_name = "DIRECTORY")]
        directory: Option<PathBuf>,
    },
}

#[derive(Debug, Subcommand)]
pub(crate) enum BenchCommand {
    /// Register, write, report, unregister
    Write(RunArgs),
    /// Like write, then read everything back and compare it before it is unregistered
    Read(RunArgs),
    /// Write one shuffle while the previous one is read
    Mixed(RunArgs),
    /// Measure bare loops on this machine: socket, memory, sendfile, aligned writes, memcpy
    #[command(alias = "floor")]
    Baseline(BaselineArgs),
    /// Compare two servers in alternating turns, with medians and ratios
    Compare(CompareArgs),
    /// 11,200 writers, 20,000 partitions, 16 KiB sends: at full speed, then at half of it
    Scale(PresetArgs),
    /// A sort through one server: everything is read back, with a small and a large memory
    Terasort(PresetArgs),
    /// 20,000 partitions, 32 MiB sends, reads of 1.7 bytes per written byte at the same time
    TpcdsStress(PresetArgs),
    /// Latencies of every call by load: one writer and one reader alone, the server's maximum, then
    /// half and nine tenths of it
    Latency(RunArgs),
    /// A simulated rotating disk: extent logs compared with a file per partition
    Hdd(HddArgs),
}

/// Address of the server and how to observe it.
#[derive(Debug, Clone, Args)]
pub(crate) struct ServerArgs {
    /// Address of the server
    #[arg(long, default_value = "127.0.0.1")]
    pub(crate) address: IpAddr,
    /// gRPC port of the server
    #[arg(long, default_value_t = 21_100)]
    pub(crate) port: u16,
    /// Raw TCP ("Netty") port of the server
    #[arg(long)]
    pub(crate) tcp_port: Option<u16>,
    /// HTTP port for /metrics; only needed if the process is on another machine
    #[arg(long)]
    pub(crate) http_port: Option<u16>,
    /// Process id of the server; found through its port if it runs on this machine
    #[arg(long)]
    pub(crate) pid: Option<u32>,
    /// Start the server with this command and stop it at the end
    #[arg(long, value_name = "COMMAND")]
    pub(crate) server_cmd: Option<String>,
    /// Transport of block data
    #[arg(long, value_enum, default_value_t = DataTransport::Grpc)]
    pub(crate) transport: DataTransport,
}

impl ServerArgs {
    pub(crate) fn target(&self, load: &LoadArgs) -> ServerTarget {
        ServerTarget {
            grpc: SocketAddr::new(self.address, self.port),
            tcp: self.tcp_port.map(|port| SocketAddr::new(self.address, port)),
            transport: self.transport,
            rpc_timeout: load.rpc_timeout,
            backoff: load.backoff(),
        }
    }
}

/// Tier that blocks must come from.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum ReadTier {
    /// Any tier.
    Any,
    /// All from memory.
    Memory,
    /// Most from disk.
    Disk,
}

/// Data to write and to read.
#[derive(Debug, Clone, Args)]
pub(crate) struct LoadArgs {
    /// Write like a recorded client (tests/contract/replay/*.rec): its blocks, messages,
    /// partitions, tasks and connections
    #[arg(long, value_name = "FILE", conflicts_with_all = ["blocks", "message_size", "message_partitions",
        "partitions", "skew", "writers", "connections", "tasks"])]
    pub(crate) shape: Option<PathBuf>,
    /// Number of concurrent copies of the recorded client
    #[arg(long, default_value_t = 1, requires = "shape")]
    pub(crate) executors: u32,
    /// Connections that writers and readers share
    #[arg(long, default_value_t = 4)]
    pub(crate) connections: u32,
    /// Tasks that write concurrently
    #[arg(long, default_value_t = 4)]
    pub(crate) writers: u32,
    /// Partitions that are read concurrently; default: as many as writers
    #[arg(long)]
    pub(crate) readers: Option<u32>,
    /// Map tasks in total; default: one per writer
    #[arg(long)]
    pub(crate) tasks: Option<u32>,
    /// Partitions of the shuffle
    #[arg(long, default_value_t = 200)]
    pub(crate) partitions: u32,
    /// Block lengths: fixed:SIZE, spark-mix or tiny
    #[arg(long, default_value = "fixed:14KiB")]
    pub(crate) blocks: Sizes,
    /// Payload of one send
    #[arg(long, default_value = "14MiB")]
    pub(crate) message_size: ByteSize,
    /// Partitions in one send, 0 = all
    #[arg(long, default_value_t = 8)]
    pub(crate) message_partitions: u32,
    /// Partition n gets 1/(n+1)^SKEW of the blocks
    #[arg(long, default_value_t = 0.0)]
    pub(crate) skew: f64,
    /// Number of times that each message is sent, with the same block ids
    #[arg(long, default_value_t = 1)]
    pub(crate) replicas: u32,
    /// Total payload per round
    #[arg(long, default_value = "1GB")]
    pub(crate) bytes: ByteSize,
    /// Write and read no longer than this (--bytes is then only an upper bound)
    #[arg(long, value_parser = humantime::parse_duration)]
    pub(crate) duration: Option<Duration>,
    /// Total payload per second: sends have due times, from which latencies count
    #[arg(long)]
    pub(crate) rate: Option<ByteSize>,
    /// Total payload per second of reads, in the order of partitions
    #[arg(long)]
    pub(crate) read_rate: Option<ByteSize>,
    /// Fail unless blocks come from this tier
    #[arg(long, value_enum, default_value_t = ReadTier::Any)]
    pub(crate) tier: ReadTier,
    /// Number of times that each partition is read
    #[arg(long, default_value_t = 1.0)]
    pub(crate) reads: f64,
    /// Bytes requested by one read
    #[arg(long, default_value = "14MiB")]
    pub(crate) read_buffer: ByteSize,
    /// Check ids, lengths and checksums, but compare no bytes: for comparisons with readers that
    /// discard theirs
    #[arg(long)]
    pub(crate) unchecked: bool,
    /// Register with LOCAL_ORDER, as 0.9 clients with AQE do
    #[arg(long)]
    pub(crate) local_order: bool,
    /// Number of rounds, each with a new shuffle
    #[arg(long, default_value_t = 1)]
    pub(crate) rounds: u32,
    /// Pause between two rounds, in which the server deletes the previous shuffle
    #[arg(long, default_value = "0s", value_parser = humantime::parse_duration)]
    pub(crate) rest: Duration,
    /// Maximum time to wait after a phase until the server is idle: its work until then belongs to
    /// the phase
    #[arg(long, default_value = "30s", value_parser = humantime::parse_duration)]
    pub(crate) settle: Duration,
    /// Run this shell command between writing and reading, as a phase of the same number of bytes
    #[arg(long, value_name = "COMMAND")]
    pub(crate) between: Option<String>,
    /// Count the server's system calls with perf
    #[arg(long)]
    pub(crate) system_calls: bool,
    /// Deadline of each call (`rss.client.rpc.timeout.ms`) and of each connection attempt
    #[arg(long, default_value = "60s", value_parser = humantime::parse_duration)]
    pub(crate) rpc_timeout: Duration,
    /// Pause after the first NO_BUFFER; Java's is 2 s
    #[arg(long, default_value = "20ms", value_parser = humantime::parse_duration)]
    pub(crate) backoff: Duration,
    /// Longest pause after NO_BUFFER; Java's is 10 s
    #[arg(long, default_value = "1s", value_parser = humantime::parse_duration)]
    pub(crate) backoff_max: Duration,
    /// Consecutive refusals after which the run fails
    #[arg(long, default_value_t = 200)]
    pub(crate) backoff_attempts: u32,
    /// Seed of all random choices
    #[arg(long, default_value_t = 1)]
    pub(crate) seed: u64,
    /// Threads of this process; default: one per core
    #[arg(long)]
    pub(crate) threads: Option<usize>,
    /// Do not unregister the shuffle
    #[arg(long)]
    pub(crate) keep: bool,
}

impl LoadArgs {
    pub(crate) fn backoff(&self) -> RetryPauses {
        RetryPauses { first: self.backoff, longest: self.backoff_max, attempts: self.backoff_attempts }
    }

    pub(crate) fn readers(&self) -> u32 {
        self.readers.unwrap_or(self.writers)
    }

    pub(crate) fn tasks(&self) -> u32 {
        self.tasks.unwrap_or(self.writers).max(1)
    }

    /// Rejects invalid settings before anything is started.
    pub(crate) fn check(&self, transport: DataTransport) -> anyhow::Result<()> {
        let between = |name: &str, value: u32, max: u32| {
            ensure!((1..=max).contains(&value), "--{name} is {value}, must be 1 to {max}");
            Ok(())
        };
        between("executors", self.executors, 10_000)?;
        between("connections", self.connections, 100_000)?;
        between("writers", self.writers, WRITERS_MAX)?;
        between("readers", self.readers(), WRITERS_MAX)?;
        between("tasks", self.tasks(), TASKS_MAX)?;
        between("partitions", self.partitions, PARTITIONS_MAX)?;
        between("replicas", self.replicas, 100)?;
        between("rounds", self.rounds, 10_000)?;
        between("backoff-attempts", self.backoff_attempts, 1_000_000)?;
        ensure!((0.0..=10.0).contains(&self.skew), "--skew must be 0 to 10");
        ensure!((0.0..=1_000.0).contains(&self.reads), "--reads must be 0 to 1000");
        let message = self.message_size.as_u64();
        ensure!((1..=1 << 30).contains(&message), "--message-size must be 1 B to 1 GiB");
        let read_buffer = self.read_buffer.as_u64();
        ensure!((1..=1 << 30).contains(&read_buffer), "--read-buffer must be 1 B to 1 GiB");
        let connections = u64::from(self.connections) * if transport == DataTransport::Tcp { 2 } else { 1 };
        enough_descriptors(connections + 64)?;
        enough_memory(self)
    }
}

fn enough_descriptors(needed: u64) -> anyhow::Result<()> {
    let limit = rustix::process::getrlimit(rustix::process::Resource::Nofile).current.unwrap_or(u64::MAX);
    ensure!(needed <= limit, "this needs {needed} file descriptors, the limit is {limit} (see ulimit -n)");
    Ok(())
}

fn enough_memory(load: &LoadArgs) -> anyhow::Result<()> {
    let blocks = load.bytes.as_u64() / load.blocks.mean().max(1);
    // Ids in the ledger and in the tasks' reports; headers of messages in flight; responses in
    // flight, copied once.
    let ledger = blocks.saturating_mul(32);
    let heads = u64::from(load.writers) * (load.message_size.as_u64() / load.blocks.mean().max(1) + 1) * 256;
    let answer = load.read_buffer.as_u64().min(load.bytes.as_u64()) * 2;
    let answers = if load.reads > 0.0 { u64::from(load.readers()) * answer } else { 0 };
    let needed = ledger.saturating_add(heads).saturating_add(answers).saturating_add(128 << 20);
    let Some(free) = memory_available() else { return Ok(()) };
    let (needed, free) = (ByteSize::b(needed), ByteSize::b(free));
    ensure!(needed <= free, "this scale needs about {needed} of memory, {free} are available");
    Ok(())
}

fn memory_available() -> Option<u64> {
    let text = std::fs::read_to_string("/proc/meminfo").ok()?;
    let line = text.lines().find_map(|line| line.strip_prefix("MemAvailable:"))?;
    Some(line.trim().trim_end_matches("kB").trim().parse::<u64>().ok()? * 1024)
}

/// Output files.
#[derive(Debug, Clone, Args)]
pub(crate) struct ReportArgs {
    /// Write all figures as JSON
    #[arg(long, value_name = "FILE")]
    pub(crate) json: Option<PathBuf>,
    /// Write a self-contained page with plots
    #[arg(long, value_name = "FILE")]
    pub(crate) html: Option<PathBuf>,
}

#[derive(Debug, Clone, Args)]
pub(crate) struct RunArgs {
    #[command(flatten)]
    pub(crate) server: ServerArgs,
    #[command(flatten)]
    pub(crate) load: LoadArgs,
    #[command(flatten)]
    pub(crate) report: ReportArgs,
}

#[derive(Debug, Clone, Args)]
pub(crate) struct BaselineArgs {
    /// Bytes per measurement
    #[arg(long, default_value = "2GB")]
    pub(crate) bytes: ByteSize,
    /// Directory for the disk measurements; must be on the disk to measure
    #[arg(long, default_value = ".")]
    pub(crate) dir: PathBuf,
    /// Number of connections, and of threads that write
    #[arg(long, default_value_t = 4)]
    pub(crate) connections: u32,
    #[command(flatten)]
    pub(crate) report: ReportArgs,
}

impl BaselineArgs {
    pub(crate) fn check(&self) -> anyhow::Result<()> {
        ensure!((1..=64).contains(&self.connections), "--connections must be 1 to 64");
        ensure!(self.bytes.as_u64() >= 1 << 20, "--bytes must be at least 1 MiB");
        ensure!(self.dir.is_dir(), "--dir {} is not a directory", self.dir.display());
        Ok(())
    }
}

/// Work that `compare` measures.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum ComparedWork {
    Write,
    Read,
    Mixed,
}

#[derive(Debug, Clone, Args)]
pub(crate) struct CompareArgs {
    /// Command that starts server A, anew for each round
    #[arg(long, value_name = "COMMAND")]
    pub(crate) a_cmd: Option<String>,
    /// Command that starts server B
    #[arg(long, value_name = "COMMAND")]
    pub(crate) b_cmd: Option<String>,
    /// gRPC port of B; default: that of A
    #[arg(long)]
    pub(crate) b_port: Option<u16>,
    /// Raw TCP port of B; default: that of A
    #[arg(long)]
    pub(crate) b_tcp_port: Option<u16>,
    /// Transport of B; default: that of A
    #[arg(long, value_enum)]
    pub(crate) b_transport: Option<DataTransport>,
    /// Use the baseline of the bare machine instead of a server as B
    #[arg(long, alias = "floor")]
    pub(crate) baseline: bool,
    /// Directory for the baseline's disk measurements
    #[arg(long, alias = "floor-dir", default_value = ".")]
    pub(crate) baseline_dir: PathBuf,
    /// Number of rounds; two servers alternate in starting first
    #[arg(long, default_value_t = 3)]
    pub(crate) turns: u32,
    /// Work to measure
    #[arg(long, value_enum, default_value_t = ComparedWork::Read)]
    pub(crate) work: ComparedWork,
    #[command(flatten)]
    pub(crate) run: RunArgs,
}

impl CompareArgs {
    /// Returns the arguments of a run against A, and against B.
    pub(crate) fn sides(&self) -> anyhow::Result<(RunArgs, Option<RunArgs>)> {
        let mut a = self.run.clone();
        a.server.server_cmd = self.a_cmd.clone().or(a.server.server_cmd);
        if self.baseline {
            return Ok((a, None));
        }
        let mut b = self.run.clone();
        b.server.server_cmd.clone_from(&self.b_cmd);
        b.server.pid = None;
        b.server.port = self.b_port.unwrap_or(a.server.port);
        b.server.tcp_port = self.b_tcp_port.or(a.server.tcp_port);
        b.server.transport = self.b_transport.unwrap_or(a.server.transport);
        let same_server = b.server.server_cmd.is_none()
            && a.server.server_cmd.is_none()
            && b.server.port == a.server.port
            && b.server.transport == a.server.transport;
        if same_server {
            bail!("A and B are the same server: give --b-cmd, --b-port, --b-transport or --baseline");
        }
        Ok((a, Some(b)))
    }
}

#[derive(Debug, Clone, Args)]
pub(crate) struct PresetArgs {
    /// Share of the preset's full size, 0.0 to 1.0
    #[arg(long, default_value_t = 1.0)]
    pub(crate) size: f64,
    /// Command of a second server with more memory (terasort)
    #[arg(long, value_name = "COMMAND")]
    pub(crate) large_cmd: Option<String>,
    #[command(flatten)]
    pub(crate) run: RunArgs,
}

#[derive(Debug, Clone, Args)]
pub(crate) struct HddArgs {
    /// Bytes written for each number of partitions
    #[arg(long, default_value = "256MiB")]
    pub(crate) bytes: ByteSize,
    /// Numbers of partitions to measure
    #[arg(long, value_delimiter = ',', default_values_t = [200, 2_000, 20_000])]
    pub(crate) partitions: Vec<u32>,
    #[command(flatten)]
    pub(crate) report: ReportArgs,
}

/// Checks that `path` is writable before the run, so that a wrong directory does not waste hours of
/// work.
pub(crate) fn writable(path: &std::path::Path) -> anyhow::Result<()> {
    let file = std::fs::OpenOptions::new().append(true).create(true).open(path);
    file.map(drop).with_context(|| format!("cannot write {}", path.display()))
}

#[cfg(test)]
mod tests {
    use clap::CommandFactory as _;

    use super::*;

    fn load(text: &[&str]) -> LoadArgs {
        let line = ["uniffle-bench", "write"].iter().chain(text);
        match BenchArguments::try_parse_from(line).unwrap().action {
            Action::Run(BenchCommand::Write(args)) => args.load,
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn command_line_definition_is_valid() {
        BenchArguments::command().debug_assert();
    }

    #[test]
    fn invalid_scales_are_refused() {
        load(&[]).check(DataTransport::Grpc).unwrap();
        let wrong: [(&[&str], &str); 6] = [
            (&["--writers", "0"], "--writers"),
            (&["--partitions", "2000000"], "--partitions"),
            (&["--message-size", "2GiB"], "--message-size"),
            (&["--skew=-1"], "--skew"),
            (&["--connections", "100000", "--replicas", "1"], "descriptors"),
            (&["--bytes", "100PB", "--blocks", "tiny"], "memory"),
        ];
        for (text, expected) in wrong {
            let error = load(text).check(DataTransport::Tcp).unwrap_err().to_string();
            assert!(error.contains(expected), "{error}");
        }
    }

    #[test]
    fn compare_refuses_a_server_against_itself() {
        let parse = |text: &[&str]| {
            let line = ["uniffle-bench", "compare"].iter().chain(text);
            match BenchArguments::try_parse_from(line).unwrap().action {
                Action::Run(BenchCommand::Compare(args)) => args.sides(),
                other => panic!("{other:?}"),
            }
        };
        assert!(parse(&[]).is_err());
        assert!(parse(&["--baseline"]).unwrap().1.is_none());
        let (a, b) = parse(&["--a-cmd", "x", "--b-cmd", "y", "--b-port", "5"]).unwrap();
        let b = b.unwrap();
        assert_eq!((a.server.server_cmd.unwrap(), a.server.port), ("x".to_owned(), 21_100));
        assert_eq!((b.server.server_cmd.unwrap(), b.server.port), ("y".to_owned(), 5));
    }
}
