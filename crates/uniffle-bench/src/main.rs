//! `uniffle-bench`: a cluster of writers and readers in one command, for any server that speaks
//! Uniffle's protocols. It also measures the bare machine and a simulated disk.
//!
//! Exit codes: 0 if everything ran and every check of the read blocks passed, 2 if the command line
//! cannot be parsed, 1 otherwise, also for options that cannot be used (one line on stderr gives
//! the reason). Requests are encoded here, blocks and indexes are decoded by the `uniffle-client`
//! library.

mod baseline;
mod compare;
mod content;
mod grpc_connection;
mod hdd;
mod html;
mod latency;
mod message;
mod options;
mod plan;
mod plot;
mod presets;
mod process;
mod progress;
mod read;
mod report;
mod run;
mod seek_disk;
mod session;
mod shape;
mod stats;
mod syscalls;
mod tcp_connection;
mod write;

use std::io::Write as _;
use std::process::ExitCode;

use anyhow::Context as _;
use clap::{CommandFactory as _, Parser as _};

use crate::options::{Action, BenchArguments, BenchCommand, ReportArgs};
use crate::report::{BenchReport, RunReport};

#[global_allocator]
static ALLOCATOR: tikv_jemallocator::Jemalloc = tikv_jemallocator::Jemalloc;

fn main() -> ExitCode {
    match execute(BenchArguments::parse().action) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            // The text is one line, whatever the error contains.
            let text = format!("{error:#}").replace('\n', " ");
            let _ = writeln!(std::io::stderr().lock(), "uniffle-bench: {text}");
            ExitCode::FAILURE
        }
    }
}

fn execute(action: Action) -> anyhow::Result<()> {
    let text = match action {
        Action::Run(command) => return run(command),
        Action::Completions { shell } => uniffle_ctl::complete(BenchArguments::command(), shell),
        Action::Man { directory } => {
            uniffle_ctl::manual(BenchArguments::command(), directory.as_deref()).context("--directory")?
        }
    };
    report::print(&text);
    Ok(())
}

fn run(command: BenchCommand) -> anyhow::Result<()> {
    let (files, threads) = files_and_threads(&command);
    for path in files.json.iter().chain(&files.html) {
        options::writable(path)?;
    }
    let mut builder = tokio::runtime::Builder::new_multi_thread();
    if let Some(threads) = threads {
        builder.worker_threads(threads.max(1));
    }
    let runtime = builder.enable_all().build().context("cannot start the runtime")?;
    let mut report = runtime.block_on(Box::pin(measure(command)))?;
    report.command = std::env::args().collect::<Vec<_>>().join(" ");
    report::print(report.text().as_bytes());
    if let Some(path) = &files.json {
        report.write_json(path)?;
    }
    if let Some(path) = &files.html {
        std::fs::write(path, html::page(&report))
            .with_context(|| format!("cannot write {}", path.display()))?;
    }
    Ok(())
}

fn files_and_threads(command: &BenchCommand) -> (ReportArgs, Option<usize>) {
    let of_run = |args: &options::RunArgs| (args.report.clone(), args.load.threads);
    match command {
        BenchCommand::Write(args)
        | BenchCommand::Read(args)
        | BenchCommand::Mixed(args)
        | BenchCommand::Latency(args) => of_run(args),
        BenchCommand::Compare(args) => of_run(&args.run),
        BenchCommand::Scale(args) | BenchCommand::Terasort(args) | BenchCommand::TpcdsStress(args) => {
            of_run(&args.run)
        }
        BenchCommand::Baseline(args) => (args.report.clone(), None),
        BenchCommand::Hdd(args) => (args.report.clone(), None),
    }
}

async fn measure(command: BenchCommand) -> anyhow::Result<BenchReport> {
    let one = |run: RunReport| BenchReport { runs: vec![run], ..BenchReport::default() };
    match command {
        BenchCommand::Write(args) => Ok(one(run::write_only("write", &args).await?)),
        BenchCommand::Read(args) => Ok(one(run::write_and_read("read", &args).await?)),
        BenchCommand::Mixed(args) => Ok(one(run::mixed("mixed", &args).await?)),
        BenchCommand::Latency(args) => Ok(one(latency::by_load(&args).await?)),
        BenchCommand::Baseline(args) => {
            Ok(BenchReport { baseline: baseline::measure(&args)?, ..BenchReport::default() })
        }
        BenchCommand::Compare(args) => compare::run_turns(&args).await,
        BenchCommand::Scale(args) => presets::scale(args).await,
        BenchCommand::Terasort(args) => presets::terasort(args).await,
        BenchCommand::TpcdsStress(args) => presets::tpcds_stress(args).await,
        BenchCommand::Hdd(args) => hdd::run(&args).await,
    }
}
