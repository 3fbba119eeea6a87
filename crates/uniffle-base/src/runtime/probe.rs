//! Checks that the system allows this process the threads that it needs.
//!
//! tokio panics or hangs if a thread of a runtime cannot be started. The check therefore runs
//! before any runtime exists.

use std::io;
use std::sync::Arc;
use std::thread::Builder;

use parking_lot::RwLock;

/// Small, since the threads only wait.
const STACK_BYTES: usize = 64 << 10;

/// Not all threads could be started.
#[derive(Debug)]
pub struct TooFewThreads {
    /// Number of threads started.
    pub started: usize,
    /// Error of the next thread.
    pub error: io::Error,
}

/// Starts `count` threads at the same time, and ends them.
///
/// # Errors
/// The number of threads started, if not all.
pub fn probe_threads(count: usize) -> Result<(), TooFewThreads> {
    let gate = Arc::new(RwLock::new(()));
    let closed = gate.write();
    let mut threads = Vec::with_capacity(count);
    let probed = (0..count).try_for_each(|started| {
        let gate = Arc::clone(&gate);
        let thread = Builder::new().name("uniffle-probe".to_owned()).stack_size(STACK_BYTES);
        let thread = thread.spawn(move || drop(gate.read()));
        threads.push(thread.map_err(|error| TooFewThreads { started, error })?);
        Ok(())
    });
    drop(closed);
    // These threads never panic.
    threads.into_iter().for_each(|thread| drop(thread.join()));
    probed
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn probed_threads_are_ended() {
        probe_threads(20).unwrap();
    }
}
