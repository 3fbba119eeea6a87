//! `uniffle-worker ctl`: shows the state of a worker, or of every worker of a coordinator, and
//! administers it.
//!
//! It is a client of the workers' HTTP listeners and of the coordinators' gRPC, and knows nothing
//! of the server, so it works with other versions. Only an upgrade also sends a signal. The server
//! uses [`explain`] to ask the other workers of its cluster. The worker decides whether a request
//! is allowed.
//!
//! [`import`] converts the configurations of other servers.
//!
//! Exit codes: 0 success; 1 a worker refuses, or does not know the requested item; 2 wrong command
//! line; 3 a worker is lost or unreachable, or all coordinators are; 4 a state was not reached in
//! time. With several workers the highest code is returned.

mod answers;
mod arguments;
mod commands;
mod everywhere;
mod http;
mod import;
mod lists;
mod local_process;
mod lost;
mod manual;
mod merged;
mod orphans;
mod progress;
mod rows;
mod table;
mod text;
mod top;
mod upgrade;
mod wait;
mod workers;

use std::io::Write as _;
use std::process::ExitCode;

pub use self::arguments::Arguments;
pub use self::everywhere::{WorkerAddress, explain};
pub use self::http::{OwnCertificate, Trust};
pub use self::import::{ImportRefusal, Imported, import};
pub use self::manual::{Shell, complete, manual};
pub use self::merged::Unknown;

use self::http::CommandFailure;

/// Runs the command. Prints answers to stdout and failures to stderr.
#[must_use]
pub fn run(arguments: &Arguments) -> ExitCode {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
    let outcome = match runtime {
        Ok(runtime) => runtime.block_on(commands::run(arguments)),
        Err(error) => Err(CommandFailure::Usage(format!("cannot start the runtime: {error}"))),
    };
    match outcome {
        Ok(code) => ExitCode::from(code),
        Err(failure) => {
            complain(&failure.to_string());
            ExitCode::from(failure.code())
        }
    }
}

/// Writes to stdout. A closed pipe is not an error.
fn say(text: &str) {
    let mut stdout = std::io::stdout().lock();
    let end = if text.ends_with('\n') { "" } else { "\n" };
    let _ = write!(stdout, "{text}{end}").and_then(|()| stdout.flush());
}

fn complain(text: &str) {
    let _ = writeln!(std::io::stderr().lock(), "uniffle-worker ctl: {text}");
}
