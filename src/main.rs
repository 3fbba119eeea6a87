//! The command line, the allocator and the runtime; everything else is in the library.
//!
//! Exit codes: 0 after an ordered stop, 1 when the worker could not start or run, 2 when the command line or the
//! configuration is wrong. What went wrong is on stderr, in one line or one line per problem. SIGTERM and SIGINT stop the
//! worker, SIGUSR2 upgrades it in place (`server::run`), SIGHUP reads the configuration again.
//!
//! jemalloc is tuned at its build by `JEMALLOC_SYS_WITH_MALLOC_CONF` in `.cargo/config.toml`, because exporting
//! a `malloc_conf` symbol from here would be `unsafe`; `MALLOC_CONF` in the environment still overrides it.

use std::collections::HashMap;
use std::io::Write as _;
use std::os::unix::process::CommandExt as _;
use std::path::PathBuf;
use std::process::{self, ExitCode};

use anyhow::Context as _;
use clap::Parser;
use nix::sys::signal::SigSet;
use tokio::signal::unix::{Signal, SignalKind, signal};
use tokio::sync::mpsc;
use uniffle_worker::config::{Config, Machine};
use uniffle_worker::profile::heap;
use uniffle_worker::server::{Command, Ended, Environment, Inherited, Origin, Successor};
#[cfg(feature = "otlp")]
use uniffle_worker::telemetry::otlp;
use uniffle_worker::{server, telemetry};

#[cfg(feature = "jemalloc")]
#[global_allocator]
static ALLOCATOR: tikv_jemallocator::Jemalloc = tikv_jemallocator::Jemalloc;

/// A shuffle server for Apache Spark that speaks Apache Uniffle's protocols.
///
/// Without a configuration it starts on embedded defaults: memory and one local data directory, with a coordinator of
/// its own, and prints how to point Spark at it.
#[derive(Debug, Parser)]
#[command(name = "uniffle-worker", version = VERSION)]
struct CommandLine {
    /// Configuration file (TOML); WORKER_CONFIG_PATH means the same
    #[arg(short, long, value_name = "FILE")]
    config: Option<PathBuf>,

    /// Validate the configuration and exit
    #[arg(long)]
    check: bool,

    /// Print the effective configuration as TOML and exit
    #[arg(long)]
    print_config: bool,
}

const VERSION: &str = concat!(env!("CARGO_PKG_VERSION"), " (", env!("WORKER_GIT_COMMIT"), ")");

fn main() -> ExitCode {
    hold_upgrade_signal();
    let command_line = CommandLine::parse();
    if let Err(error) = take_jemalloc_options() {
        return fail(1, &format!("cannot start again with _RJEM_MALLOC_CONF as MALLOC_CONF: {error}"));
    }
    let env: HashMap<String, String> = std::env::vars_os()
        .filter_map(|(name, value)| Some((name.into_string().ok()?, value.into_string().ok()?)))
        .collect();
    let machine = Machine::detect(&env);
    let config = match Config::load(command_line.config.as_deref(), &env, &machine) {
        Ok(config) => config,
        Err(error) => return fail(2, &error.to_string()),
    };
    if command_line.print_config {
        return print(&config.to_toml());
    }
    if command_line.check {
        return check(&config, &env);
    }
    // While this is the only thread: it takes variables out of the environment.
    let inherited = Inherited::from_env(&env);
    match run(&config, Origin { env, machine }, inherited) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => fail(1, &format!("{error:#}")),
    }
}

/// Blocks SIGUSR2, whose default action would end a process that has not installed its handler yet. The mask and a
/// pending signal survive `exec`, so that a signal between two programs of an upgrade is not lost either.
fn hold_upgrade_signal() {
    // Fails for an invalid set only.
    let _ = upgrade_signal().thread_block();
}

/// The opposite, on this thread alone: the runtime's threads inherited the mask, so it is this one that takes it.
fn take_upgrade_signal() {
    let _ = upgrade_signal().thread_unblock();
}

fn upgrade_signal() -> SigSet {
    SigSet::from_iter([nix::sys::signal::Signal::SIGUSR2])
}

/// jemalloc reads its options before `main` from `MALLOC_CONF`. The name that is documented for the first Rust server
/// and for riffle, whose jemalloc has a prefix, is `_RJEM_MALLOC_CONF`: with that the process replaces itself once.
fn take_jemalloc_options() -> std::io::Result<()> {
    let Some(options) = std::env::var_os("_RJEM_MALLOC_CONF") else { return Ok(()) };
    if !cfg!(feature = "jemalloc") || std::env::var_os("MALLOC_CONF").is_some() {
        return Ok(());
    }
    let mut arguments = std::env::args_os();
    let mut again = process::Command::new(std::env::current_exe()?);
    if let Some(name) = arguments.next() {
        again.arg0(name);
    }
    Err(again.args(arguments).env("MALLOC_CONF", options).exec())
}

/// The configuration is valid; and where a running worker asks, this program can take over from it in place.
fn check(config: &Config, env: &HashMap<String, String>) -> ExitCode {
    if let Err(error) = server::check_files(config) {
        return fail(2, &format!("{error:#}"));
    }
    let verdict = match env.get(server::UPGRADE_FROM).map(|facts| rehearse(config, facts)).transpose() {
        Ok(verdict) => verdict.unwrap_or_default(),
        Err(problems) => return fail(2, &problems),
    };
    let source = config.source.as_ref().map(|path| format!(" {}", path.display())).unwrap_or_default();
    print(&format!("the configuration{source} is valid\n{}{verdict}", notes(config)))
}

/// What the running worker waits for, or what keeps this program from taking over.
fn rehearse(config: &Config, facts: &str) -> Result<String, String> {
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build();
    let runtime = runtime.map_err(|error| format!("cannot start the runtime: {error}"))?;
    let problems = runtime.block_on(server::rehearse(config, facts));
    // A disk that hangs is not waited for.
    runtime.shutdown_background();
    match problems.is_empty() {
        true => Ok(format!("{}\n", server::REHEARSED)),
        false => Err(format!("no upgrade in place:\n  {}", problems.join("\n  "))),
    }
}

/// Runs the worker, and after an upgrade the next one: as another program in this process, or, if that cannot be
/// executed, as a new worker of this program.
fn run(config: &Config, origin: Origin, mut inherited: Inherited) -> anyhow::Result<()> {
    let telemetry = telemetry::init(&config.log)?;
    if heap::asked_for(&std::env::var("MALLOC_CONF").unwrap_or_default()) {
        heap::activate().context("MALLOC_CONF asks for a heap profile")?;
    }
    for warning in &config.warnings {
        tracing::warn!("configuration: {warning}");
    }
    let environment =
        Environment { log: Some(telemetry.filter().clone()), origin: Some(origin), ..Environment::default() };
    loop {
        let runtime = tokio::runtime::Builder::new_multi_thread()
            .worker_threads(config.worker.threads)
            .max_blocking_threads(config.worker.blocking_threads)
            .thread_name("uniffle")
            .enable_all()
            .build()
            .context("cannot start the runtime")?;
        #[cfg(feature = "otlp")]
        let export = {
            let collector = config.tracing.otlp_endpoint.as_deref();
            collector.map(|endpoint| otlp::export(endpoint, runtime.handle())).transpose()?
        };
        let ended = runtime.block_on(Box::pin(serve(config, environment.clone(), inherited)));
        #[cfg(feature = "otlp")]
        drop(export);
        // After an ordered stop nothing is left but disk calls that hang; the process does not wait for those.
        runtime.shutdown_background();
        let Ended::Upgrade { successor, sockets } = ended? else { return Ok(()) };
        telemetry.flush();
        hold_upgrade_signal();
        let (error, sockets) = successor.exec(sockets);
        tracing::error!(%error, "the successor cannot be executed, continuing with this program");
        inherited = sockets;
    }
}

/// Runs the server until it fails or a signal ends it. A second signal to stop gives up on the ordered stop.
async fn serve(config: &Config, environment: Environment, inherited: Inherited) -> anyhow::Result<Ended> {
    // Listening before anything is opened, so that a signal during start-up is an ordered stop too.
    let mut signals = Signals::listen().context("cannot listen for signals")?;
    take_upgrade_signal();
    let successor = Successor::of_this_process().context("cannot find out what this program is")?;
    let (commands, received) = mpsc::channel(4);
    let mut server = Box::pin(server::run(config, environment, inherited, received));
    let mut stopping = false;
    loop {
        let signal = tokio::select! {
            ended = &mut server => return match ended {
                Ok(_) if stopping => Ok(Ended::Stopped),
                ended => ended,
            },
            signal = signals.next() => signal,
        };
        // Fails if the server has ended, which the next turn shows, or while a few commands are queued already.
        let _ = match signal {
            "SIGUSR2" | "SIGHUP" if stopping => continue,
            "SIGHUP" => commands.try_send(Command::Reload),
            "SIGUSR2" => commands.try_send(Command::Upgrade(successor.clone())),
            name if stopping => anyhow::bail!("{name} while stopping: not waiting any longer"),
            name => {
                tracing::info!(signal = name, "stopping");
                stopping = true;
                commands.try_send(Command::Stop)
            }
        };
    }
}

/// The signals that end the worker, or this program of it.
struct Signals {
    terminate: Signal,
    interrupt: Signal,
    upgrade: Signal,
    reload: Signal,
}

impl Signals {
    fn listen() -> std::io::Result<Self> {
        Ok(Self {
            terminate: signal(SignalKind::terminate())?,
            interrupt: signal(SignalKind::interrupt())?,
            upgrade: signal(SignalKind::user_defined2())?,
            reload: signal(SignalKind::hangup())?,
        })
    }

    async fn next(&mut self) -> &'static str {
        tokio::select! {
            _ = self.terminate.recv() => "SIGTERM",
            _ = self.interrupt.recv() => "SIGINT",
            _ = self.upgrade.recv() => "SIGUSR2",
            _ = self.reload.recv() => "SIGHUP",
        }
    }
}

fn notes(config: &Config) -> String {
    config.warnings.iter().map(|warning| format!("note: {warning}\n")).collect()
}

/// Writes to stdout; a reader that went away is no failure (`println!` would panic).
fn print(text: &str) -> ExitCode {
    let mut stdout = std::io::stdout().lock();
    let _ = stdout.write_all(text.as_bytes()).and_then(|()| stdout.flush());
    ExitCode::SUCCESS
}

fn fail(code: u8, text: &str) -> ExitCode {
    let _ = writeln!(std::io::stderr().lock(), "uniffle-worker: {text}");
    ExitCode::from(code)
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::CommandFactory as _;

    #[test]
    fn the_command_line_is_sound() {
        CommandLine::command().debug_assert();
        let parsed = CommandLine::try_parse_from(["uniffle-worker", "-c", "x.toml", "--check"]).unwrap();
        assert_eq!(parsed.config, Some(PathBuf::from("x.toml")));
        assert!(parsed.check && !parsed.print_config);
    }

    #[test]
    fn the_version_names_the_commit() {
        let version = CommandLine::command().render_version();
        assert!(version.contains(env!("CARGO_PKG_VERSION")) && version.contains(env!("WORKER_GIT_COMMIT")));
    }
}
