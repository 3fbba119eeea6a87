//! The command line. Global options may be given before or after the command.

use std::path::PathBuf;
use std::time::Duration;

use clap::{Args, Subcommand, ValueEnum};

/// Query and administer a worker, or all workers of a cluster.
#[derive(Debug, Args)]
#[command(
    after_help = "Exit codes: 0 done; 1 a worker refuses, or does not know the requested item; 2 wrong command line; \
                        3 a worker or all coordinators cannot be reached; 4 a state was not reached in time."
)]
pub struct Arguments {
    /// HTTP listener of one worker [default: http://127.0.0.1:19998]
    #[arg(long, global = true, value_name = "URL")]
    pub(crate) worker: Option<String>,

    /// Ask all workers that any of these coordinators knows, instead of one worker; https:// before
    /// the host for a coordinator with TLS, which needs --ca-file
    #[arg(long, global = true, value_name = "HOST:PORT", value_delimiter = ',')]
    pub(crate) coordinator: Vec<String>,

    /// Ask only the coordinator's workers with these ids
    #[arg(long, global = true, value_name = "ID", value_delimiter = ',')]
    pub(crate) only: Vec<String>,

    /// Allow decommission, drain and tags on all of a coordinator's workers
    #[arg(long, global = true)]
    pub(crate) all: bool,

    /// Administration listener of the worker [default: its host with --admin-port]
    #[arg(long, global = true, value_name = "URL")]
    pub(crate) admin: Option<String>,

    /// Administration port of all workers
    #[arg(long, global = true, value_name = "PORT", default_value_t = 19997)]
    pub(crate) admin_port: u16,

    /// File with the administration token [default: the value of WORKER_ADMIN_TOKEN]
    #[arg(long, global = true, value_name = "FILE")]
    pub(crate) token_file: Option<PathBuf>,

    /// PEM file with the certificate authority of the workers; a coordinator's workers are then
    /// called over TLS
    #[arg(long, global = true, value_name = "FILE")]
    pub(crate) ca_file: Option<PathBuf>,

    /// PEM file with the client certificate chain, for workers that require one; needs --key-file
    #[arg(long, global = true, value_name = "FILE")]
    pub(crate) cert_file: Option<PathBuf>,

    /// PEM file with the private key of the client certificate
    #[arg(long, global = true, value_name = "FILE")]
    pub(crate) key_file: Option<PathBuf>,

    /// Timeout of each call
    #[arg(long, global = true, value_name = "SECONDS", default_value = "10", value_parser = seconds)]
    pub(crate) timeout: Duration,

    /// Output format
    #[arg(long, global = true, value_enum, default_value_t = Output::Text)]
    pub(crate) output: Output,

    #[command(subcommand)]
    pub(crate) call: CtlCommand,
}

/// Output format.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum Output {
    /// Text for people
    Text,
    /// The worker's answer; with --coordinator an array of {"worker", "url", "answer" or "error"}
    Json,
    /// Lists as comma-separated values, with a header and the worker in the first column
    Csv,
}

/// Command.
#[derive(Debug, Subcommand)]
pub(crate) enum CtlCommand {
    /// Show state, memory, disks and work in progress
    Status {
        /// Exit with 4 unless the worker accepts shuffle data
        #[arg(long)]
        ready: bool,
    },
    /// List applications, the largest first
    Apps {
        /// Maximum number per worker
        #[arg(long, default_value_t = 100)]
        limit: usize,
    },
    /// Explain how an application spent its time and bytes
    App {
        /// Application id
        id: String,
        /// Ask all workers that this worker's own coordinator knows
        #[arg(long)]
        cluster: bool,
    },
    /// List data directories
    Disks,
    /// List lost blocks
    Losses,
    /// List all nodes and applications that the worker's own coordinator knows
    Cluster,
    /// Assign no new shuffles; existing ones are served until they end
    Decommission {
        /// Wait until no application is left
        #[arg(long, conflicts_with = "cancel")]
        wait: bool,
        /// Cancel the decommission
        #[arg(long)]
        cancel: bool,
        /// Maximum time to wait
        #[arg(long, value_name = "SECONDS", default_value = "3600", value_parser = seconds)]
        within: Duration,
    },
    /// Decommission, flush, and wait until memory is empty; with an object store, until it has all
    /// data
    Drain {
        /// Maximum time to wait
        #[arg(long, value_name = "SECONDS", default_value = "600", value_parser = seconds)]
        within: Duration,
    },
    /// Show the tags, or replace those of the configuration
    Tags {
        /// New tags
        #[arg(conflicts_with = "none")]
        tags: Vec<String>,
        /// Remove all tags
        #[arg(long)]
        none: bool,
    },
    /// Delete an application and all its data
    Purge {
        /// Application id
        id: String,
    },
    /// Remove a lost worker from the lists of the coordinators inside workers
    Forget {
        /// Worker id, as `status` or `cluster` lists it
        id: String,
    },
    /// List objects of workers in the object store, and remove those of departed workers
    Orphans {
        /// Further live workers besides those that the coordinators know
        #[arg(long, value_name = "ID", value_delimiter = ',')]
        live: Vec<String>,
        /// Remove the objects of these workers; without an id, those of all departed workers
        #[arg(long, value_name = "ID", value_delimiter = ',', num_args = 0..)]
        remove: Option<Vec<String>>,
        /// Without an id, only remove objects of workers that have written nothing for this time
        #[arg(long, value_name = "SECONDS", default_value = "86400", value_parser = seconds)]
        older_than: Duration,
    },
    /// Reload the configuration
    Reload,
    /// Upgrade the workers in place, one after the other; stop at the first that fails
    ///
    /// The next worker follows once its predecessor runs the new program, is ready, has lost no
    /// block, and is registered with the coordinator.
    Upgrade {
        /// Shell command that sends SIGUSR2 to a worker; {host}, {id} and {http_port} are replaced
        /// [default: a signal to the process on this host]
        #[arg(long, value_name = "TEMPLATE")]
        command: Option<String>,
        /// Maximum time per worker
        #[arg(long, value_name = "SECONDS", default_value = "600", value_parser = seconds)]
        within: Duration,
        /// List the workers in order with their versions, and exit; the exit code is that of the
        /// first worker at which an upgrade would stop
        #[arg(long)]
        dry_run: bool,
        /// No effect: an upgrade always waits, for up to --within per worker
        #[arg(long)]
        wait: bool,
    },
    /// Write a profile of one worker to a file
    Profile {
        /// Kind of profile
        #[arg(value_enum)]
        kind: ProfileKind,
        /// Duration of a CPU profile
        #[arg(long, default_value_t = 30)]
        seconds: u64,
        /// Write a flame graph (SVG) instead of pprof's format
        #[arg(long)]
        flamegraph: bool,
        /// Output file; - is stdout
        #[arg(short, long, value_name = "FILE")]
        file: PathBuf,
    },
    /// Show a live view of the workers and their applications; printed once if stdout is not a
    /// terminal
    Top {
        /// Time between updates
        #[arg(long, value_name = "SECONDS", default_value = "2", value_parser = seconds)]
        interval: Duration,
        /// Print once and exit
        #[arg(long)]
        once: bool,
    },
}

/// Kind of a profile.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum ProfileKind {
    /// CPU time
    Cpu,
    /// Allocated memory, while sampling is active
    Heap,
    /// Tasks and the stacks of their awaits
    Tasks,
}

impl CtlCommand {
    /// Returns true if the command needs `--all` or `--only` with a coordinator.
    pub(crate) fn is_drastic(&self) -> bool {
        match self {
            Self::Decommission { .. } | Self::Drain { .. } => true,
            Self::Tags { tags, none } => *none || !tags.is_empty(),
            Self::Status { .. }
            | Self::Apps { .. }
            | Self::App { .. }
            | Self::Disks
            | Self::Losses
            | Self::Cluster
            | Self::Purge { .. }
            | Self::Forget { .. }
            | Self::Orphans { .. }
            | Self::Reload
            | Self::Upgrade { .. }
            | Self::Profile { .. }
            | Self::Top { .. } => false,
        }
    }
}

fn seconds(text: &str) -> Result<Duration, String> {
    let seconds: f64 = text.parse().map_err(|_| "expected a number of seconds".to_owned())?;
    match (0.1..=1e6).contains(&seconds) {
        true => Ok(Duration::from_secs_f64(seconds)),
        false => Err("expected 0.1 to 1000000 seconds".to_owned()),
    }
}
