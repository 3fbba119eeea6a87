//! Division of start-up work among threads.

use std::num::NonZero;
use std::panic::resume_unwind;
use std::thread;

/// Number of items that justify a further thread.
const ITEMS_PER_THREAD: usize = if cfg!(test) { 64 } else { 1 << 14 };
/// Maximum number of threads. Contention makes more of them useless.
const THREADS_MAX: usize = 8;

/// Returns the number of threads for `items` table rows or pages.
pub(crate) fn threads_for(items: usize) -> usize {
    let cores = thread::available_parallelism().map_or(1, NonZero::get);
    (items / ITEMS_PER_THREAD).clamp(1, cores.min(THREADS_MAX))
}

/// Runs `work` on `threads` threads, including this one, and returns all results. A panic is
/// propagated to the caller.
pub(crate) fn on_threads<R: Send>(threads: usize, work: impl Fn() -> R + Sync) -> Vec<R> {
    let work = &work;
    thread::scope(|scope| {
        let others: Vec<_> = (1..threads).map(|_| scope.spawn(work)).collect();
        let mut made = vec![work()];
        made.extend(
            others.into_iter().map(|other| other.join().unwrap_or_else(|panic| resume_unwind(panic))),
        );
        made
    })
}

/// Runs `work` on each of up to `threads` parts of `all` and returns the results in order. A panic
/// is propagated to the caller.
pub(crate) fn in_parts<T: Sync, R: Send>(
    all: &[T],
    threads: usize,
    work: impl Fn(&[T]) -> R + Sync,
) -> Vec<R> {
    let mut parts = all.chunks(all.len().div_ceil(threads).max(1));
    let Some(first) = parts.next() else { return Vec::new() };
    let work = &work;
    thread::scope(|scope| {
        let others: Vec<_> = parts.map(|part| scope.spawn(move || work(part))).collect();
        let mut made = vec![work(first)];
        made.extend(
            others.into_iter().map(|other| other.join().unwrap_or_else(|panic| resume_unwind(panic))),
        );
        made
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn items_are_partitioned_in_order() {
        let all: Vec<usize> = (0..10).collect();
        for threads in [1, 2, 3, 10, 64] {
            let made = in_parts(&all, threads, <[usize]>::to_vec);
            assert!(made.len() <= threads && made.concat() == all, "{threads}: {made:?}");
        }
        assert!(in_parts(&all[..0], 2, <[usize]>::to_vec).is_empty());
        assert_eq!(threads_for(0), 1);
    }
}
