//! CPU sampling with SIGPROF: each `1 / frequency` seconds of CPU time, the running thread records
//! its stack.
//!
//! The signal handler unwinds stacks with framehop. It reads unwind tables that were loaded in
//! advance, allocates nothing, waits for no lock, and checks each stack address before it reads it.
//! With libgcc's unwinder, samples in libc would have to be discarded. Unwinding by frame pointers
//! would omit the running function.
//!
//! Invariant: debug information is not read, if the kernel has Landlock. pprof resolves the names
//! of the thread that starts it, which takes 100 MiB for a program of this size. That thread is
//! therefore denied access to files ([`deny_file_reads`]).

use std::ffi::c_int;
use std::io;
use std::thread::Builder;

use landlock::{
    AccessFs, PathBeneath, PathFd, Ruleset, RulesetAttr as _, RulesetCreatedAttr as _, RulesetError,
};
use pprof::{ProfilerGuard, ProfilerGuardBuilder};
use signal_hook::consts::SIGPROF;
use signal_hook::low_level::raise;

pub(super) use pprof::UnresolvedReport;

/// Reason why sampling failed.
#[derive(Debug, thiserror::Error)]
pub(super) enum SamplingError {
    /// The process is already being sampled.
    #[error("the process is already being sampled")]
    Busy,
    /// The profiler failed.
    #[error(transparent)]
    Profiler(pprof::Error),
    /// The thread or the signal failed.
    #[error(transparent)]
    Io(#[from] io::Error),
}

impl From<pprof::Error> for SamplingError {
    fn from(error: pprof::Error) -> Self {
        match error {
            pprof::Error::Running => Self::Busy,
            error => Self::Profiler(error),
        }
    }
}

/// A running sampling of the process, which stops on drop.
pub(super) struct Sampling(ProfilerGuard<'static>);

impl std::fmt::Debug for Sampling {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_tuple("Sampling").finish_non_exhaustive()
    }
}

impl Sampling {
    /// Starts sampling `frequency` times per second of CPU time.
    ///
    /// # Errors
    /// [`SamplingError::Busy`] if the process is already being sampled; other variants if the
    /// profiler fails.
    pub(super) fn start(frequency: u32) -> Result<Self, SamplingError> {
        load_unwind_tables()?;
        begin(frequency).map(Self)
    }

    /// Returns the samples so far as unresolved addresses.
    ///
    /// # Errors
    /// Fails if the profiler fails.
    pub(super) fn report(&self) -> Result<UnresolvedReport, SamplingError> {
        Ok(self.0.report().build_unresolved()?)
    }
}

fn begin(frequency: u32) -> Result<ProfilerGuard<'static>, SamplingError> {
    let frequency = c_int::try_from(frequency).unwrap_or(c_int::MAX);
    let begun = Builder::new().name("uniffle-profile".to_owned()).spawn(move || {
        // If this fails, the start needs more memory but works.
        let _ = deny_file_reads();
        ProfilerGuardBuilder::default().frequency(frequency).build()
    })?;
    let panicked = |_| Err(SamplingError::Io(io::Error::other("the profiler panicked during its start")));
    begun.join().map_or_else(panicked, |built| Ok(built?))
}

/// Denies this thread reading any files except those in the temporary directory, where pprof stores
/// samples. If the kernel does not support this, the start works but needs more memory.
fn deny_file_reads() -> Result<(), RulesetError> {
    let ruleset = Ruleset::default().handle_access(AccessFs::ReadFile)?.create()?;
    let temporary =
        PathFd::new(std::env::temp_dir()).map(|directory| PathBeneath::new(directory, AccessFs::ReadFile));
    ruleset.add_rules(temporary.into_iter().map(Ok::<_, RulesetError>))?.restrict_self()?;
    Ok(())
}

/// Takes one sample, which loads the unwind tables. Loading allocates and reads files, which is not
/// safe at an arbitrary instruction. This thread therefore raises the signal itself, before the
/// timer does.
fn load_unwind_tables() -> Result<(), SamplingError> {
    let warm_up = begin(1)?;
    let raised = raise(SIGPROF);
    drop(warm_up);
    Ok(raised?)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[expect(clippy::disallowed_methods, reason = "the test checks whether the file can be opened")]
    fn open(program: &std::path::Path) -> io::Result<std::fs::File> {
        std::fs::File::open(program)
    }

    #[test]
    fn restricted_thread_cannot_open_files() {
        let program = std::env::current_exe().unwrap();
        let (forgoing, forgone) = (program.clone(), Builder::new());
        let opened = forgone.spawn(move || {
            let is_held = Ruleset::default().handle_access(AccessFs::ReadFile).unwrap().create().is_ok();
            deny_file_reads().unwrap();
            (is_held, open(&forgoing).map_err(|error| error.kind()))
        });
        let (is_held, opened) = opened.unwrap().join().unwrap();
        // Skipped if the kernel lacks Landlock, or if the program is below the temporary directory.
        if is_held && !program.starts_with(std::env::temp_dir()) {
            assert!(matches!(opened, Err(io::ErrorKind::PermissionDenied)), "{opened:?}");
        }
        open(&program).unwrap();
    }
}
