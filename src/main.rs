//! Command line, allocator and runtime of the binary. Everything else is in the library.
//!
//! Exit codes: 0 after a graceful stop, 1 if the worker could not start or run, or if a second
//! signal ended its stop, 2 if the command line or the configuration is wrong, and 3 if a stop lost
//! acknowledged data. `uniffle_ctl` documents the codes of `uniffle-worker ctl`. SIGTERM and SIGINT
//! stop the worker, SIGUSR2 upgrades it in place (`server::run`), and SIGHUP reloads the
//! configuration.
//!
//! jemalloc is tuned at build time in `.cargo/config.toml`, because exporting a `malloc_conf`
//! symbol would be `unsafe`. `MALLOC_CONF` in the environment overrides it.

use std::collections::HashMap;
use std::ffi::{OsStr, OsString};
use std::io::Write as _;
use std::os::unix::process::CommandExt as _;
use std::path::{Path, PathBuf};
use std::process::{self, ExitCode};
use std::sync::LazyLock;

use anyhow::Context as _;
use clap::{CommandFactory as _, Parser, Subcommand};
use nix::sys::signal::Signal;
use tokio::sync::mpsc;
use uniffle_profile::heap;
use uniffle_worker::build::{Build, last_commit};
use uniffle_worker::config::{self, Config, LimitsTooLow, Machine, SystemLimits};
use uniffle_worker::runtime::probe_threads;
use uniffle_worker::server::{
    Command, ConfigOrigin, Environment, Inherited, RunOutcome, Signals, Successor, hold_signals,
    release_signals, release_signals_for_old_successor, send_stop_to_successor,
};
#[cfg(feature = "otlp")]
use uniffle_worker::telemetry::otlp::{self, Export};
use uniffle_worker::{server, telemetry};

#[cfg(feature = "jemalloc")]
#[global_allocator]
static ALLOCATOR: tikv_jemallocator::Jemalloc = tikv_jemallocator::Jemalloc;

/// A shuffle server for Apache Spark that speaks Apache Uniffle's protocols.
///
/// Without a configuration it uses defaults: memory, one local data directory and the embedded
/// coordinator. It then prints the settings for Spark.
#[derive(Debug, Parser)]
#[command(name = "uniffle-worker", version = VERSION.as_str())]
struct CommandLine {
    /// Configuration file (TOML) [default: the value of WORKER_CONFIG_PATH]
    #[arg(short, long, value_name = "FILE")]
    config: Option<PathBuf>,

    /// Validate the configuration and exit
    #[arg(long)]
    check: bool,

    /// With --check, also examine this machine: ports, directories, address, memory
    #[arg(long, requires = "check")]
    here: bool,

    /// Print the effective configuration as TOML, without secrets, and exit
    #[arg(long)]
    print_config: bool,

    #[command(subcommand)]
    other: Option<OtherCommand>,
}

impl CommandLine {
    fn runs_worker(&self) -> bool {
        self.other.is_none() && !self.check && !self.print_config
    }
}

/// Subcommands besides running a worker.
#[derive(Debug, Subcommand)]
#[command(disable_help_subcommand = true)]
enum OtherCommand {
    /// Query and administer a worker, or all workers of a cluster
    Ctl(Box<uniffle_ctl::Arguments>),
    /// Convert the configuration of a Java server (server.conf) or of riffle (TOML)
    ///
    /// Keys without a counterpart and rejected values become comments with the reason. Exits with 2
    /// if a value was rejected, or if keys must be added by hand before `--check` succeeds; stderr
    /// lists them.
    Import {
        /// Configuration file to convert
        file: PathBuf,
    },
    /// Print completions for a shell
    Completions {
        /// Name of the shell
        shell: uniffle_ctl::Shell,
    },
    /// Print the manual page
    Man {
        /// Write the pages of all subcommands to this directory instead
        #[arg(long, value_name = "DIRECTORY")]
        directory: Option<PathBuf>,
    },
}

/// Exit code of a stop that lost acknowledged data.
const LOST: u8 = 3;
/// Version and commit of this program.
const BUILD: Build = Build::of(&last_commit(include_bytes!(env!("WORKER_REFLOG"))));
static VERSION: LazyLock<String> = LazyLock::new(|| BUILD.to_string());

fn main() -> ExitCode {
    // Not a clap subcommand, which completions would show. A worker starts it for a profile, and
    // an operator to name the addresses of a panic (docs/operations.md).
    if std::env::args_os().nth(1).is_some_and(|first| first == uniffle_profile::SUBCOMMAND) {
        return name_functions();
    }
    hold_signals();
    let command_line = CommandLine::parse();
    if !command_line.runs_worker() {
        release_signals();
    }
    if let Some(other) = &command_line.other {
        return run_other(other);
    }
    if let Err(error) = take_jemalloc_options() {
        return fail(1, &format!("cannot restart with _RJEM_MALLOC_CONF as MALLOC_CONF: {error}"));
    }
    let env = environment();
    let machine = Machine::detect(&env);
    let mut config = match Config::load(command_line.config.as_deref(), &env, &machine) {
        Ok(config) => config,
        Err(error) => return fail(2, &error.to_string()),
    };
    if command_line.print_config {
        return print(config.to_redacted_toml().as_bytes());
    }
    let fitted = fit(&mut config, &env);
    if command_line.check {
        return check(&config, &env, fitted, command_line.here);
    }
    if let Err(error) = fitted {
        return fail(1, &error.to_string());
    }
    // Called while this is the only thread, since it removes environment variables.
    let inherited = Inherited::from_env(&env);
    match run(&config, ConfigOrigin { env, machine }, inherited) {
        Ok(code) => code,
        Err(error) => fail(1, &format!("{error:#}")),
    }
}

/// Names functions for the profile of a worker. With addresses from a panic's log as arguments,
/// prints the names.
fn name_functions() -> ExitCode {
    let addresses: Vec<OsString> = std::env::args_os().skip(2).collect();
    if !addresses.is_empty() {
        return match uniffle_profile::name_addresses(&addresses.join(OsStr::new(" ")).to_string_lossy()) {
            Ok(lines) => print(lines.as_bytes()),
            Err(error) => fail(2, &error),
        };
    }
    match uniffle_profile::answer_on_stdin() {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => fail(2, &format!("{error:#}")),
    }
}

fn run_other(other: &OtherCommand) -> ExitCode {
    match other {
        OtherCommand::Ctl(arguments) => uniffle_ctl::run(arguments),
        OtherCommand::Import { file } => import(file),
        OtherCommand::Completions { shell } => print(&uniffle_ctl::complete(CommandLine::command(), *shell)),
        OtherCommand::Man { directory } => {
            match uniffle_ctl::manual(CommandLine::command(), directory.as_deref()) {
                Ok(text) => print(&text),
                Err(error) => fail(2, &format!("--directory: {error}")),
            }
        }
    }
}

fn import(file: &Path) -> ExitCode {
    let (name, env) = (file.display().to_string(), environment());
    let text = match std::fs::read_to_string(file) {
        Ok(text) => text,
        Err(error) => return fail(2, &format!("{name}: {error}")),
    };
    match config::import(&name, &text, &Machine::detect(&env)) {
        Ok(imported) => {
            print(imported.text.as_bytes());
            if !imported.secrets.is_empty() {
                print_error(&format!(
                    "{name}: secrets are in the output, under {}",
                    imported.secrets.join(", ")
                ));
            }
            let parts = [
                ("rejected, written as comments", &imported.refused),
                ("missing, to be added by hand", &imported.missing),
            ];
            let sections = parts.iter().filter(|(_, problems)| !problems.is_empty());
            let sections: Vec<_> =
                sections.map(|(what, problems)| format!("{what}:\n  {}", problems.join("\n  "))).collect();
            match sections.is_empty() {
                true => ExitCode::SUCCESS,
                false => fail(2, &format!("{name}: {}", sections.join("\n"))),
            }
        }
        Err(error) => fail(2, &format!("{name}: {error}")),
    }
}

/// Returns the environment variables that are valid UTF-8.
fn environment() -> HashMap<String, String> {
    let text =
        |(name, value): (OsString, OsString)| Some((name.into_string().ok()?, value.into_string().ok()?));
    std::env::vars_os().filter_map(text).collect()
}

/// Restarts the process once to apply `_RJEM_MALLOC_CONF`. Of the two variables jemalloc reads only
/// `MALLOC_CONF`, before `main`. The prefixed name is documented for riffle and Uniffle's
/// experimental Rust server, whose jemalloc has a prefix.
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

/// Raises the soft limits of this process and fits the configuration to the system's limits.
fn fit(config: &mut Config, env: &HashMap<String, String>) -> Result<(), LimitsTooLow> {
    config::raise_soft_limits();
    let system = SystemLimits::read();
    let fitted = config.fit(&system);
    // A rehearsal runs beside the threads of the running worker.
    if env.contains_key(server::UPGRADE_FROM) || fitted.as_ref().is_err_and(LimitsTooLow::has_threads) {
        return fitted;
    }
    let Err(few) = probe_threads(config.threads_min()) else { return fitted };
    let few = LimitsTooLow::threads(config, &system, few.started, &few.error);
    Err(match fitted {
        Ok(()) => few,
        Err(others) => others.and(few),
    })
}

/// Reports whether the configuration is valid and fits the system (`fitted`), or lists all
/// problems. For a running worker that asks, also whether this program can take over from it in
/// place; with `here`, whether it could start on this machine.
fn check(
    config: &Config,
    env: &HashMap<String, String>,
    fitted: Result<(), LimitsTooLow>,
    here: bool,
) -> ExitCode {
    let has_threads = !fitted.as_ref().is_err_and(LimitsTooLow::has_threads);
    let mut problems: Vec<String> = fitted.err().iter().map(ToString::to_string).collect();
    let examined = match env.get(server::UPGRADE_FROM) {
        Some(facts) if has_threads => rehearse(config, facts),
        None if here && has_threads => examine(config),
        Some(_) | None => {
            let skipped =
                here.then_some("ports, directories and memory were not examined for lack of threads");
            refusal(server::check_files(config).into_iter().chain(skipped.map(str::to_owned)).collect())
        }
    };
    match examined {
        Ok(facts) if problems.is_empty() => {
            let source = config.source.as_ref().map(|path| format!(" {}", path.display()));
            let source = source.unwrap_or_default();
            print(format!("the configuration{source} is valid\n{}{facts}", notes(config)).as_bytes())
        }
        examined => {
            problems.extend(examined.err());
            fail(2, &problems.join("\n"))
        }
    }
}

/// Returns the lines that the running worker expects, or the obstacles to an upgrade.
fn rehearse(config: &Config, facts: &str) -> Result<String, String> {
    let rehearsed = block_on(server::rehearse(BUILD, config, facts))?;
    rehearsed.map_err(|problems| format!("upgrade is not possible:\n  {}", problems.join("\n  ")))
}

/// Returns the findings about this machine, or the reasons why the worker cannot start on it.
fn examine(config: &Config) -> Result<String, String> {
    block_on(server::examine_machine(config))?.or_else(refusal)
}

/// Describes the reasons why the worker cannot start. Without reasons, returns no findings.
fn refusal(problems: Vec<String>) -> Result<String, String> {
    match problems.is_empty() {
        true => Ok(String::new()),
        false => Err(format!("the worker cannot start here:\n  {}", problems.join("\n  "))),
    }
}

/// Runs a check to its end. Does not wait for threads of hung disks.
fn block_on<T>(check: impl Future<Output = T>) -> Result<T, String> {
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build();
    let runtime = runtime.map_err(|error| format!("cannot start the runtime: {error}"))?;
    let result = runtime.block_on(check);
    runtime.shutdown_background();
    Ok(result)
}

/// Runs the worker, and after an upgrade the next one. The next one is another program in this
/// process or, if that cannot be executed, a new worker of this program.
fn run(config: &Config, origin: ConfigOrigin, mut inherited: Inherited) -> anyhow::Result<ExitCode> {
    let telemetry = telemetry::init(&config.log)?;
    if heap::is_requested(&std::env::var("MALLOC_CONF").unwrap_or_default()) {
        heap::activate().context("cannot activate the heap profile of MALLOC_CONF")?;
    }
    for warning in &config.warnings {
        tracing::warn!("configuration: {warning}");
    }
    let log = Some(telemetry.filter().clone());
    let environment = Environment { build: BUILD, log, origin: Some(origin), ..Environment::default() };
    loop {
        let runtime = tokio::runtime::Builder::new_multi_thread()
            .worker_threads(config.worker.threads)
            .max_blocking_threads(config.worker.blocking_threads)
            .thread_name("uniffle")
            .enable_all()
            .build()
            .context("cannot start the runtime")?;
        #[cfg(feature = "otlp")]
        let mut export = {
            let collector = config.tracing.otlp_endpoint.as_deref();
            collector.map(|endpoint| otlp::export(endpoint, runtime.handle())).transpose()?
        };
        let ended = runtime.block_on(Box::pin(serve(config, environment.clone(), inherited)));
        #[cfg(feature = "otlp")]
        {
            export
                .iter_mut()
                .filter(|_| matches!(ended, Ok(RunOutcome::Upgrade { .. })))
                .for_each(Export::expedite);
            drop(export);
        }
        // After a graceful stop only hung disk calls can be left, and the process does not wait for
        // them.
        runtime.shutdown_background();
        let (successor, sockets, takes_signals) = match ended? {
            RunOutcome::Upgrade { successor, sockets, takes_signals } => (successor, sockets, takes_signals),
            RunOutcome::Stop { has_lost: true } => return Ok(ExitCode::from(LOST)),
            RunOutcome::Stop { has_lost: false } => return Ok(ExitCode::SUCCESS),
        };
        telemetry.flush();
        if !takes_signals {
            release_signals_for_old_successor();
        }
        let (error, sockets) = successor.exec(*sockets);
        hold_signals();
        tracing::error!(%error, "cannot execute the successor; continuing with this program");
        inherited = sockets;
    }
}

/// Runs the server until it fails, stops or hands over to a successor. Forwards signals to it. A
/// second stop signal abandons the graceful stop.
async fn serve(
    config: &Config,
    environment: Environment,
    inherited: Inherited,
) -> anyhow::Result<RunOutcome> {
    // Read from the beginning, so that a signal during start-up also stops gracefully.
    let signals = Signals::listen().context("cannot listen for signals")?;
    let successor = Successor::of_this_process().context("cannot determine the path of this program")?;
    let forced_stop = environment.forced_stop.clone();
    let (mut commands, received) = CommandQueue::new();
    let mut server = Box::pin(server::run(config, environment, inherited, received));
    loop {
        let signal = tokio::select! {
            ended = &mut server => return match ended {
                Ok(RunOutcome::Upgrade { takes_signals, .. }) if commands.is_stopping() => {
                    // Memory intended for the successor would be lost with this process.
                    if takes_signals && send_stop_to_successor().is_ok() {
                        return ended;
                    }
                    Ok(RunOutcome::Stop { has_lost: forced_stop.end() })
                }
                ended => ended,
            },
            signal = signals.next() => signal.context("cannot read signals")?,
        };
        match signal {
            Signal::SIGUSR2 | Signal::SIGHUP if commands.is_stopping() => {}
            Signal::SIGHUP => commands.push(Command::Reload),
            Signal::SIGUSR2 => commands.push(Command::Upgrade(successor.clone())),
            _ if commands.is_stopping() => match forced_stop.end() {
                true => return Ok(RunOutcome::Stop { has_lost: true }),
                false => anyhow::bail!("{signal} during shutdown; exiting without waiting any longer"),
            },
            _ => {
                tracing::info!(signal = signal.as_str(), "stopping");
                commands.stop();
            }
        }
    }
}

/// Queue of commands for the server. One place is reserved for the stop, because the server does
/// not read the queue during its start or a reload.
struct CommandQueue {
    commands: mpsc::Sender<Command>,
    /// Reserved place. `None` once the stop is queued.
    stop: Option<mpsc::OwnedPermit<Command>>,
}

impl CommandQueue {
    fn new() -> (Self, mpsc::Receiver<Command>) {
        let (commands, received) = mpsc::channel(4);
        let stop = commands.clone().try_reserve_owned().ok();
        (Self { commands, stop }, received)
    }

    /// Queues a command. Drops it if the server has ended, or while several commands are queued.
    fn push(&self, command: Command) {
        let _ = self.commands.try_send(command);
    }

    /// Queues the stop, once.
    fn stop(&mut self) {
        if let Some(place) = self.stop.take() {
            place.send(Command::Stop);
        }
    }

    fn is_stopping(&self) -> bool {
        self.stop.is_none()
    }
}

fn notes(config: &Config) -> String {
    config.warnings.iter().map(|warning| format!("note: {warning}\n")).collect()
}

/// Writes to stdout. A closed reader is no failure (`println!` would panic).
fn print(text: &[u8]) -> ExitCode {
    let mut stdout = std::io::stdout().lock();
    let _ = stdout.write_all(text).and_then(|()| stdout.flush());
    ExitCode::SUCCESS
}

fn fail(code: u8, text: &str) -> ExitCode {
    print_error(text);
    ExitCode::from(code)
}

/// Writes a line to stderr.
fn print_error(text: &str) {
    telemetry::print(std::io::stderr(), &format!("uniffle-worker: {text}\n"));
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn command_line_is_valid() {
        CommandLine::command().debug_assert();
        let parsed = CommandLine::try_parse_from(["uniffle-worker", "-c", "x.toml", "--check"]).unwrap();
        assert_eq!(parsed.config, Some(PathBuf::from("x.toml")));
        assert!(parsed.check && !parsed.print_config);
    }

    #[test]
    fn stop_is_queued_behind_dropped_commands() {
        let (mut commands, mut received) = CommandQueue::new();
        for _ in 0..10 {
            commands.push(Command::Reload);
        }
        assert!(!commands.is_stopping());
        commands.stop();
        assert!(commands.is_stopping());
        let queued: Vec<_> = std::iter::from_fn(|| received.try_recv().ok()).collect();
        assert!(matches!(queued[..], [Command::Reload, .., Command::Stop]), "{} commands", queued.len());
    }

    #[test]
    fn version_contains_the_commit() {
        let version = CommandLine::command().render_version();
        assert!(version.contains(&format!("{} ({})", env!("CARGO_PKG_VERSION"), BUILD.commit)), "{version}");
    }
}
