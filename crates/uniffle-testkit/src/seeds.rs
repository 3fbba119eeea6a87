//! Runs a model with many independent seeds, which the environment can choose, on all processors.

use std::ops::Range;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicU64, Ordering};

use parking_lot::Mutex;

/// Runs `history` for each seed in any order. Returns the results in order of the seeds, with the
/// text of a panic as the error.
pub fn run_all<T: Send>(
    seeds: Range<u64>,
    history: impl Fn(u64) -> T + Sync,
) -> Vec<(u64, Result<T, String>)> {
    let (next, done) = (AtomicU64::new(seeds.start), Mutex::new(Vec::new()));
    let work = || {
        let mut seed = next.fetch_add(1, Ordering::Relaxed);
        while seed < seeds.end {
            let ran = run(|| history(seed));
            done.lock().push((seed, ran));
            seed = next.fetch_add(1, Ordering::Relaxed);
        }
    };
    let processors = std::thread::available_parallelism().map_or(1, usize::from);
    std::thread::scope(|scope| {
        for _ in 0..processors {
            scope.spawn(work);
        }
    });
    let mut done = done.into_inner();
    done.sort_by_key(|(seed, _)| *seed);
    done
}

/// Runs `history`.
///
/// # Errors
/// Returns the text of a panic.
pub fn run<T>(history: impl FnOnce() -> T) -> Result<T, String> {
    catch_unwind(AssertUnwindSafe(history)).map_err(|cause| {
        let text = cause.downcast_ref::<String>().cloned();
        text.or_else(|| cause.downcast_ref::<&str>().map(ToString::to_string)).unwrap_or_default()
    })
}

/// Returns the seeds from `NAME_SEED` (one) or `NAME_SEEDS` (a number of seeds from 0), or
/// `default` seeds. Also returns true for a single seed.
pub fn from_env(name: &str, default: u64) -> (Range<u64>, bool) {
    let number =
        |name: String| std::env::var(&name).ok().map(|text| text.parse().expect("the seed is not a number"));
    match number(format!("{name}_SEED")) {
        Some(seed) => (seed..seed + 1, true),
        None => (0..number(format!("{name}_SEEDS")).unwrap_or(default), false),
    }
}
