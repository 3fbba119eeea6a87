//! The command line. Whom it concerns may stand before or after the command.

use std::path::PathBuf;
use std::time::Duration;

use clap::{Args, Subcommand, ValueEnum};

/// Ask a worker, or every worker of a cluster, and tell it what to do.
#[derive(Debug, Args)]
#[command(
    after_help = "Exit codes: 0 done; 1 a worker refuses, or does not know what was named; 2 wrong command line; \
                        3 a worker or all coordinators cannot be reached; 4 a state was not reached in time."
)]
pub struct Arguments {
    /// HTTP listener of one worker [default: http://127.0.0.1:19998]
    #[arg(long, global = true, value_name = "URL")]
    pub(crate) worker: Option<String>,

    /// Instead of one worker, all that one of these coordinators knows
    #[arg(long, global = true, value_name = "HOST:PORT", value_delimiter = ',')]
    pub(crate) coordinator: Vec<String>,

    /// Of a coordinator's workers those with these ids
    #[arg(long, global = true, value_name = "ID", value_delimiter = ',')]
    pub(crate) only: Vec<String>,

    /// Decommission, drain or tag all of a coordinator's workers
    #[arg(long, global = true)]
    pub(crate) all: bool,

    /// Administration of the one worker [default: its host with --admin-port]
    #[arg(long, global = true, value_name = "URL")]
    pub(crate) admin: Option<String>,

    /// Port of the administration, at all workers
    #[arg(long, global = true, value_name = "PORT", default_value_t = 19997)]
    pub(crate) admin_port: u16,

    /// File with the administration's token; WORKER_ADMIN_TOKEN holds it otherwise
    #[arg(long, global = true, value_name = "FILE")]
    pub(crate) token_file: Option<PathBuf>,

    /// PEM file with the authority of the workers' certificates; a coordinator's workers are then asked over TLS
    #[arg(long, global = true, value_name = "FILE")]
    pub(crate) ca_file: Option<PathBuf>,

    /// PEM file with the certificate to show, where the workers ask for one, and its chain; needs --key-file
    #[arg(long, global = true, value_name = "FILE")]
    pub(crate) cert_file: Option<PathBuf>,

    /// PEM file with its private key
    #[arg(long, global = true, value_name = "FILE")]
    pub(crate) key_file: Option<PathBuf>,

    /// For each answer
    #[arg(long, global = true, value_name = "SECONDS", default_value = "10", value_parser = seconds)]
    pub(crate) timeout: Duration,

    /// How answers are printed
    #[arg(long, global = true, value_enum, default_value_t = Output::Text)]
    pub(crate) output: Output,

    #[command(subcommand)]
    pub(crate) call: Call,
}

/// How answers are printed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum Output {
    /// For people
    Text,
    /// The worker's answer; of a coordinator's workers an array of {"worker", "url", "answer" or "error"}
    Json,
}

/// What is asked or told.
#[derive(Debug, Subcommand)]
pub(crate) enum Call {
    /// State, memory, disks and what is under way
    Status {
        /// Exit with 4 unless it takes shuffle data
        #[arg(long)]
        ready: bool,
    },
    /// Applications, the largest first
    Apps {
        /// At most so many of each worker
        #[arg(long, default_value_t = 100)]
        limit: usize,
    },
    /// Where the time and the bytes of an application went
    App {
        /// Application
        id: String,
        /// At all workers that this worker's own coordinator knows
        #[arg(long)]
        cluster: bool,
    },
    /// Data directories
    Disks,
    /// Blocks that are lost
    Losses,
    /// All nodes and applications, as the worker's own coordinator knows them
    Cluster,
    /// Assign no new shuffles; existing ones are served to their end
    Decommission {
        /// Until no application is left
        #[arg(long, conflicts_with = "cancel")]
        wait: bool,
        /// Take it back
        #[arg(long)]
        cancel: bool,
        /// How long to wait
        #[arg(long, value_name = "SECONDS", default_value = "3600", value_parser = seconds)]
        within: Duration,
    },
    /// Decommission, flush, and wait until nothing is in memory; with an object store, until everything is there
    Drain {
        /// How long to wait
        #[arg(long, value_name = "SECONDS", default_value = "600", value_parser = seconds)]
        within: Duration,
    },
    /// Show the tags, or replace those of the configuration
    Tags {
        /// The new ones
        #[arg(conflicts_with = "none")]
        tags: Vec<String>,
        /// Have none
        #[arg(long)]
        none: bool,
    },
    /// Forget an application with all its data
    Purge {
        /// Application
        id: String,
    },
    /// Remove a lost worker from the lists of the coordinators inside workers
    Forget {
        /// Worker, as `status` or `cluster` lists it
        id: String,
    },
    /// What workers have in the object store, and the removal of what those that are gone have left
    Orphans {
        /// Workers that are alive, beside those that the coordinators know
        #[arg(long, value_name = "ID", value_delimiter = ',')]
        live: Vec<String>,
        /// Remove the objects of these workers; without an id those of all workers that are gone
        #[arg(long, value_name = "ID", value_delimiter = ',', num_args = 0..)]
        remove: Option<Vec<String>>,
        /// Without an id, only of workers that have written nothing for so long
        #[arg(long, value_name = "SECONDS", default_value = "86400", value_parser = seconds)]
        older_than: Duration,
    },
    /// Read the configuration again
    Reload,
    /// Write a profile of one worker to a file
    Profile {
        /// Of what
        #[arg(value_enum)]
        kind: ProfileKind,
        /// Length of a CPU profile
        #[arg(long, default_value_t = 30)]
        seconds: u64,
        /// A flame graph (SVG) instead of pprof's format
        #[arg(long)]
        flamegraph: bool,
        /// The file; - is stdout
        #[arg(short, long, value_name = "FILE")]
        file: PathBuf,
    },
    /// Live view of the workers and their applications; printed once where stdout is no terminal
    Top {
        /// Between two looks
        #[arg(long, value_name = "SECONDS", default_value = "2", value_parser = seconds)]
        interval: Duration,
        /// Print it once
        #[arg(long)]
        once: bool,
    },
}

/// What a profile is made of.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum ProfileKind {
    /// Processor time
    Cpu,
    /// Memory that is allocated, while sampling is active
    Heap,
    /// Tasks and the stacks of their awaits
    Tasks,
}

impl Call {
    /// Whether all workers of a coordinator are only told so after a word about which.
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
            | Self::Profile { .. }
            | Self::Top { .. } => false,
        }
    }
}

fn seconds(text: &str) -> Result<Duration, String> {
    let seconds: f64 = text.parse().map_err(|_| "a number of seconds is needed".to_owned())?;
    match (0.1..=1e6).contains(&seconds) {
        true => Ok(Duration::from_secs_f64(seconds)),
        false => Err("from 0.1 to 1000000 seconds".to_owned()),
    }
}
