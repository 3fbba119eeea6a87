//! Whether the system lets this process have the threads that it needs.
//!
//! tokio panics or hangs when a thread of a runtime cannot be started, so this is found out before there is one.

use std::io;
use std::sync::Arc;
use std::thread::Builder;

use parking_lot::RwLock;

/// They only wait.
const STACK_BYTES: usize = 64 << 10;

/// Not all threads could be started.
#[derive(Debug)]
pub struct TooFewThreads {
    /// Threads that were.
    pub started: usize,
    /// Why there are no more.
    pub error: io::Error,
}

/// Starts `count` threads at once, and ends them.
///
/// # Errors
/// How many could be started, if not all.
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
    // They do not panic.
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
