//! Samples by SIGPROF: every `1 / frequency` seconds of CPU time the thread that runs is asked for its stack.
//!
//! Stacks are unwound in the signal handler by framehop: it reads unwind tables that were loaded before, allocates
//! nothing, takes no lock, and checks each address of the stack before it reads it. Tried and dropped: libgcc's unwinder,
//! which is safe only when samples in libc are thrown away, and those (system calls, memcpy) are where a shuffle
//! server's time goes; frame pointers, which lose the function that runs, and its caller too when that is in libc.
//!
//! Invariant: nothing here reads debug information. pprof would, at each start: it takes a backtrace of the thread that starts it and
//! names its functions, which nobody looks at and which takes 100 MiB for a program of this size. So that thread may not open
//! programs ([`forgo_files`]); where the kernel cannot hold it to that, a start takes the memory.

use std::ffi::c_int;
use std::io;
use std::thread::Builder;

use landlock::{
    AccessFs, PathBeneath, PathFd, Ruleset, RulesetAttr as _, RulesetCreatedAttr as _, RulesetError,
};
use pprof::{ProfilerGuard, ProfilerGuardBuilder};
use signal_hook::consts::SIGPROF;
use signal_hook::low_level::raise;

pub use pprof::UnresolvedReport;

/// Why nothing is sampled.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The process is sampled already.
    #[error("samples are being taken already")]
    Busy,
    /// The profiler failed.
    #[error(transparent)]
    Profiler(pprof::Error),
    /// No thread, or no signal.
    #[error(transparent)]
    Io(#[from] io::Error),
}

impl From<pprof::Error> for Error {
    fn from(error: pprof::Error) -> Self {
        match error {
            pprof::Error::Running => Self::Busy,
            error => Self::Profiler(error),
        }
    }
}

/// The process is sampled until this is dropped.
pub struct Sampling(ProfilerGuard<'static>);

impl std::fmt::Debug for Sampling {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_tuple("Sampling").finish_non_exhaustive()
    }
}

impl Sampling {
    /// Begins, with so many samples per second of CPU time.
    ///
    /// # Errors
    /// [`Error::Busy`] while another one is there; the profiler fails.
    pub fn start(frequency: u32) -> Result<Self, Error> {
        load_unwind_tables()?;
        begin(frequency).map(Self)
    }

    /// What was sampled, by addresses.
    ///
    /// # Errors
    /// The profiler fails.
    pub fn report(&self) -> Result<UnresolvedReport, Error> {
        Ok(self.0.report().build_unresolved()?)
    }
}

fn begin(frequency: u32) -> Result<ProfilerGuard<'static>, Error> {
    let frequency = c_int::try_from(frequency).unwrap_or(c_int::MAX);
    let begun = Builder::new().name("uniffle-profile".to_owned()).spawn(move || {
        // Without it the start takes more memory, and is the same otherwise.
        let _ = forgo_files();
        ProfilerGuardBuilder::default().frequency(frequency).build()
    })?;
    let panicked = |_| Err(Error::Io(io::Error::other("the profiler panicked at its start")));
    begun.join().map_or_else(panicked, |built| Ok(built?))
}

/// This thread can read no files from now on but those in the directory of temporary ones, where pprof keeps samples.
fn forgo_files() -> Result<(), RulesetError> {
    let ruleset = Ruleset::default().handle_access(AccessFs::ReadFile)?.create()?;
    let temporary =
        PathFd::new(std::env::temp_dir()).map(|directory| PathBeneath::new(directory, AccessFs::ReadFile));
    ruleset.add_rules(temporary.into_iter().map(Ok::<_, RulesetError>))?.restrict_self()?;
    Ok(())
}

/// The tables are loaded by the first sample, which allocates and reads files. Here that sample is taken at a place
/// where this is safe: this thread sends itself the signal, a second of CPU time before the timer sends one.
fn load_unwind_tables() -> Result<(), Error> {
    let warm_up = begin(1)?;
    let raised = raise(SIGPROF);
    drop(warm_up);
    Ok(raised?)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[expect(clippy::disallowed_methods, reason = "whether it can be opened is what is asked")]
    fn open(program: &std::path::Path) -> io::Result<std::fs::File> {
        std::fs::File::open(program)
    }

    #[test]
    fn a_thread_that_forgoes_files_opens_none_and_others_do() {
        let program = std::env::current_exe().unwrap();
        let (forgoing, forgone) = (program.clone(), Builder::new());
        let opened = forgone.spawn(move || {
            let is_held = Ruleset::default().handle_access(AccessFs::ReadFile).unwrap().create().is_ok();
            forgo_files().unwrap();
            (is_held, open(&forgoing).map_err(|error| error.kind()))
        });
        let (is_held, opened) = opened.unwrap().join().unwrap();
        // Else the kernel has no Landlock, or the program lies among temporary files.
        if is_held && !program.starts_with(std::env::temp_dir()) {
            assert!(matches!(opened, Err(io::ErrorKind::PermissionDenied)), "{opened:?}");
        }
        open(&program).unwrap();
    }

    #[test]
    fn a_process_is_sampled_once_at_a_time() {
        let sampling = Sampling::start(99).unwrap();
        assert!(matches!(Sampling::start(99), Err(Error::Busy)));
        sampling.report().unwrap();
        drop(sampling);
        Sampling::start(1).unwrap();
    }
}
