//! Truncation of the memory file by another program: keeps the process alive.
//!
//! An access to a missing page raises SIGBUS. The handler restores the length of the file, and the
//! access is repeated and reads zeros. A page that cannot be restored ends the process as before,
//! after a line on stderr.
//!
//! The handler must be async-signal-safe: it allocates nothing, blocks on no lock, and calls only
//! fstat, ftruncate, fcntl, write, sched_yield, sigaction and raise.

use std::ffi::c_int;
use std::io;
use std::os::fd::AsFd as _;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Weak};

use nix::sys::signal::{SaFlags, SigAction, SigHandler, SigSet, Signal, raise, sigaction};
use parking_lot::Mutex;
use rustix::fs::{OFlags, fcntl_getfl, fcntl_setfl};

use super::file::BackingFile;

/// Accesses that may be repeated after the length was restored: other threads may have failed at
/// the same time. A page that is still missing ends the process after that many attempts.
const REPEATS_MAX: u32 = 1000;
/// Attempts at the lock. Its holders need microseconds.
const LOCK_TRIES: u32 = 100_000;

/// The memory file of the process and the line for an end by SIGBUS. A static, because signal
/// handlers belong to the process.
static MEMORY: Mutex<Option<Guarded>> = Mutex::new(None);
static REPEATS_LEFT: AtomicU32 = AtomicU32::new(0);

struct Guarded {
    file: Weak<BackingFile>,
    line: String,
}

/// Installs the handler for the memory in `file`.
///
/// # Errors
/// If the kernel refuses the handler.
pub(super) fn guard(file: Weak<BackingFile>, shown: &str) -> io::Result<()> {
    let line = format!(
        "uniffle-worker: ended by SIGBUS: a page of {shown} (memory_store.backing) cannot be accessed; the file was \
         truncated and cannot be extended, its tmpfs is full, or a memory module failed; free space in the \
         tmpfs, check the kernel's log, and start the worker again\n"
    );
    *MEMORY.lock() = Some(Guarded { file, line });
    install(SigHandler::Handler(on_sigbus)).map_err(io::Error::from)
}

fn install(handler: SigHandler) -> nix::Result<()> {
    let action = SigAction::new(handler, SaFlags::SA_ONSTACK, SigSet::empty());
    // SAFETY: the handler is the default action, or async-signal-safe (see above). The standard
    // library's handler, which this replaces, reports stack overflows, and these raise SIGSEGV.
    unsafe { sigaction(Signal::SIGBUS, &action) }.map(drop)
}

extern "C" fn on_sigbus(_: c_int) {
    if is_restored() {
        return;
    }
    with_memory(|memory| explain(memory.line.as_bytes()));
    // Takes effect when the handler returns.
    let _ = install(SigHandler::SigDfl).and_then(|()| raise(Signal::SIGBUS));
}

/// Restores the length of the file. Returns whether the access may be repeated.
fn is_restored() -> bool {
    let restored =
        with_memory(|memory| with_file(&memory.file, |file| file.restore_length().ok()).flatten()).flatten();
    match restored {
        Some(true) => {
            REPEATS_LEFT.store(REPEATS_MAX, Ordering::Relaxed);
            true
        }
        // Another thread has just restored it, or this is another fault.
        Some(false) => {
            let less = |remaining: u32| remaining.checked_sub(1);
            REPEATS_LEFT.fetch_update(Ordering::Relaxed, Ordering::Relaxed, less).is_ok()
        }
        None => false,
    }
}

/// Runs `act` on the value, unless it was dropped. If it is dropped meanwhile, it is leaked:
/// freeing it would not be async-signal-safe.
fn with_file<F, T>(file: &Weak<F>, act: impl FnOnce(&F) -> T) -> Option<T> {
    let file = file.upgrade()?;
    let acted = act(&file);
    // The allocation stays, because of the weak reference.
    std::mem::forget(Arc::into_inner(file));
    Some(acted)
}

fn with_memory<T>(read: impl FnOnce(&Guarded) -> T) -> Option<T> {
    for _ in 0..LOCK_TRIES {
        if let Some(memory) = MEMORY.try_lock() {
            return memory.as_ref().map(read);
        }
        std::thread::yield_now();
    }
    None
}

/// Writes a line to stderr, unless that would block.
fn explain(line: &[u8]) {
    let stderr = io::stderr();
    let stderr = stderr.as_fd();
    let Ok(flags) = fcntl_getfl(stderr) else { return };
    if fcntl_setfl(stderr, flags | OFlags::NONBLOCK).is_ok() {
        let _ = rustix::io::write(stderr, line);
        let _ = fcntl_setfl(stderr, flags);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Regression test: the handler could free the file.
    #[test]
    fn file_dropped_meanwhile_is_not_freed_here() {
        struct File(#[expect(dead_code, reason = "counted")] Arc<()>);
        let uses = Arc::new(());
        let mut owner = Some(Arc::new(File(Arc::clone(&uses))));
        let file = Arc::downgrade(owner.as_ref().unwrap());
        assert!(with_file(&file, |_| ()).is_some());
        assert!(with_file(&file, |_| drop(owner.take())).is_some());
        assert_eq!(Arc::strong_count(&uses), 2, "the file was freed");
        assert!(with_file(&file, |_| ()).is_none());
    }
}
