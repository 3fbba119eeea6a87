//! `uniffle-worker ctl`: what a worker, or every worker of a coordinator, does; and what it shall do.
//!
//! A client of the worker's HTTP listeners and nothing more: it knows nothing of the server's code, so that it works with another
//! version of it. The server asks the others of its cluster by it ([`explain`]). `arguments` is the command line, `http` the calls, `workers` whom they go to, `wait` the calls that
//! end with a state, `everywhere` and `merged` one application at many workers, `orphans` what workers that are gone have left, `text` and `top` what people see. Not here: decisions; the worker refuses what cannot be.
//!
//! Exit codes: 0 done; 1 a worker refuses, or does not know what was named; 2 wrong command line; 3 a worker or all
//! coordinators cannot be reached; 4 a state was not reached in time. Of several workers the highest code counts.

mod answers;
mod arguments;
mod commands;
mod everywhere;
mod failure;
mod http;
mod lost;
mod manual;
mod merged;
mod orphans;
mod text;
mod top;
mod wait;
mod workers;

use std::io::Write as _;
use std::process::ExitCode;

pub use self::arguments::Arguments;
pub use self::everywhere::{Worker, explain};
pub use self::http::Trust;
pub use self::manual::{Shell, complete, manual};
pub use self::merged::Unknown;

use self::failure::Failure;

/// Does what `arguments` say: answers on stdout, failures on stderr.
#[must_use]
pub fn run(arguments: &Arguments) -> ExitCode {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
    let outcome = match runtime {
        Ok(runtime) => runtime.block_on(commands::run(arguments)),
        Err(error) => Err(Failure::Usage(format!("cannot start the runtime: {error}"))),
    };
    match outcome {
        Ok(code) => ExitCode::from(code),
        Err(failure) => {
            complain(&failure.to_string());
            ExitCode::from(failure.code())
        }
    }
}

/// Writes to stdout; a reader that went away is no failure.
fn say(text: &str) {
    let mut stdout = std::io::stdout().lock();
    let end = if text.ends_with('\n') { "" } else { "\n" };
    let _ = write!(stdout, "{text}{end}").and_then(|()| stdout.flush());
}

fn complain(text: &str) {
    let _ = writeln!(std::io::stderr().lock(), "uniffle-worker ctl: {text}");
}
