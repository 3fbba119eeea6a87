//! Work of a start, divided among threads.

use std::num::NonZero;
use std::panic::resume_unwind;
use std::thread;

/// Items that are worth a thread more.
const ITEMS_PER_THREAD: usize = if cfg!(test) { 64 } else { 1 << 14 };
/// Threads at most: what they share is not worth more.
const THREADS_MAX: usize = 8;

/// How many threads share so many rows of a table, or pages.
pub(super) fn threads_for(items: usize) -> usize {
    let cores = thread::available_parallelism().map_or(1, NonZero::get);
    (items / ITEMS_PER_THREAD).clamp(1, cores.min(THREADS_MAX))
}

/// What `work` makes on each of so many threads, this one among them. Its panic is that of the caller.
pub(super) fn on_threads<R: Send>(threads: usize, work: impl Fn() -> R + Sync) -> Vec<R> {
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

/// What `work` makes of each of `threads` parts of `all`, in their order. Its panic is that of the caller.
pub(super) fn in_parts<T: Sync, R: Send>(
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
