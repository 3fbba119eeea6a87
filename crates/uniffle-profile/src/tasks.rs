//! Dumps of waiting tasks: the stacks of their last awaits, grouped.
//!
//! Nothing is recorded between dumps. A dump stops the runtime's threads while every task is polled
//! in tracing mode, about 20 µs per task. If a thread does not reach tokio's barrier within 250 ms,
//! the threads continue, and tokio tries again. After 2 s the output has no stacks. Names are
//! resolved afterwards by a child process.

use std::collections::HashMap;
use std::fmt::Write as _;

use tokio::task::Id;
use tokio::time::Duration;

use self::stacks::Stacks;
use super::job::{ProfileJob, RenderJob, WaitingTasks, Waits};
use super::maps::{AddressSet, Maps};
use super::{ExclusivePermit, ProfileError, child, in_background};
use uniffle_base::clock::Instant;
use uniffle_base::runtime::{RunningTask, Tasks};

/// Time limit of the stacks. It is exceeded if a thread of the runtime is busy or blocked.
const DEADLINE: Duration = Duration::from_secs(2);

/// Maximum number of places with stacks in the output. Tasks at further places are only counted.
const PLACES_MAX: usize = 500;

/// Key of tasks that wait at the same addresses: their name, and a stack for each await. `tree`
/// later combines places with the same source lines.
type WaitSite = (&'static str, Vec<Vec<u32>>);

/// Returns the names of `tasks` and the stacks of all tasks of the current runtime as text, or only
/// the names if stacks cannot be taken in time.
///
/// An abandoned dump of the stacks continues and holds `asking` until it ends, so that there is
/// only one. Other profiles can be taken meanwhile.
///
/// # Errors
/// [`ProfileError::Failed`] if no thread can be started, or the dump cannot be rendered.
pub async fn dump(
    tasks: &Tasks,
    permit: &ExclusivePermit,
    asking: ExclusivePermit,
) -> Result<String, ProfileError> {
    let started = Instant::now();
    let stacks = stacks::take(tasks, asking).await;
    let took = started.elapsed();
    let running = tasks.list();
    in_background(permit, move || {
        let summary = summary(&running, took);
        match stacks {
            Ok(stacks) => named(&job(summary, &running, stacks)),
            Err(why) => Ok(format!("{summary}\n{why}\n")),
        }
    })
    .await
}

/// Renders the job with function names.
fn named(job: &RenderJob) -> Result<String, ProfileError> {
    String::from_utf8(child::made(job)?).map_err(|error| ProfileError::Failed(error.to_string()))
}

/// The stacks of one task as return addresses, innermost first.
type TaskStack = (Id, Vec<Vec<u64>>);

#[cfg(all(tokio_unstable, target_os = "linux", any(target_arch = "x86_64", target_arch = "aarch64")))]
mod stacks {
    use tokio::runtime::{Handle, dump::Dump};
    use tokio::sync::oneshot;
    use uniffle_base::clock::timeout;

    use super::{DEADLINE, ExclusivePermit, TaskStack, Tasks, addresses};

    /// Stacks of all tasks as addresses.
    pub(super) struct Stacks(Dump);

    /// Takes the stacks of the current runtime.
    pub(super) async fn take(tasks: &Tasks, asking: ExclusivePermit) -> Result<Stacks, &'static str> {
        let (sender, receiver) = oneshot::channel();
        let (runtime, cancelled) = (Handle::current(), tasks.cancelled());
        // The dump is a task of its own, which continues after a timeout or if the client has gone.
        tasks.spawn("task dump", async move {
            tokio::select! {
                dump = runtime.dump() => {
                    drop(asking);
                    let _ = sender.send(dump);
                }
                () = cancelled => {}
            }
        });
        match timeout(DEADLINE, receiver).await {
            Ok(Ok(dump)) => Ok(Stacks(dump)),
            Ok(Err(_)) => Err("no stacks: the worker is stopping"),
            Err(_) => Err("no stacks: a thread of the runtime was too busy to stop for the dump"),
        }
    }

    impl Stacks {
        /// Returns the stacks of each task. They are parsed from tokio's `Debug` output, because
        /// its other interface resolves names and reads debug information in this process.
        pub(super) fn each(&self) -> impl Iterator<Item = TaskStack> {
            let tasks = self.0.tasks().iter();
            tasks.map(|task| (task.id(), addresses(&format!("{:?}", task.trace()))))
        }
    }
}

#[cfg(not(all(tokio_unstable, target_os = "linux", any(target_arch = "x86_64", target_arch = "aarch64"))))]
mod stacks {
    use super::{ExclusivePermit, TaskStack, Tasks};

    /// Uninhabited: this build has no stacks.
    pub(super) enum Stacks {}

    #[expect(clippy::unused_async, reason = "as the one of the other build")]
    pub(super) async fn take(_: &Tasks, _: ExclusivePermit) -> Result<Stacks, &'static str> {
        Err("no stacks: this worker was built without --cfg tokio_unstable, or for another platform")
    }

    impl Stacks {
        pub(super) fn each(&self) -> impl Iterator<Item = TaskStack> {
            match *self {}
            #[expect(unreachable_code, reason = "the type of what never is")]
            std::iter::empty()
        }
    }
}

/// Parses the addresses after each `ip` in `[[BacktraceFrame { ip: 0x55d0, … }, …], …]`, per list.
#[cfg_attr(not(tokio_unstable), expect(dead_code, reason = "of dumps"))]
fn addresses(trace: &str) -> Vec<Vec<u64>> {
    let frames = |list: &str| {
        let address = |text: &str| {
            let digits = text.find(|c: char| !c.is_ascii_hexdigit()).unwrap_or(text.len());
            u64::from_str_radix(&text[..digits], 16).ok()
        };
        list.split(" ip: 0x").skip(1).filter_map(address).collect::<Vec<_>>()
    };
    trace.split('[').map(frames).filter(|frames| !frames.is_empty()).collect()
}

/// Returns the part of the output that needs no stacks.
fn summary(running: &[RunningTask], took: Duration) -> String {
    let mut text = format!("{} tasks, threads stopped and asked within {took:.1?}\n", running.len());
    names(running, &mut text);
    text
}

/// Adds a line per name with the number of tasks and the age of the oldest.
fn names(running: &[RunningTask], text: &mut String) {
    let mut names: HashMap<&str, (usize, Duration)> = HashMap::new();
    for task in running {
        let (count, oldest) = names.entry(task.name).or_default();
        *count += 1;
        *oldest = task.age.max(*oldest);
    }
    let mut names: Vec<_> = names.into_iter().collect();
    names.sort_unstable_by_key(|(name, (count, _))| (std::cmp::Reverse(*count), *name));
    for (name, (count, oldest)) in names {
        let _ = writeln!(text, "{count:>6} {name} (oldest {oldest:.1?})");
    }
}

/// Builds the job, with the places of most tasks first.
fn job(summary: String, running: &[RunningTask], stacks: Stacks) -> RenderJob {
    let names: HashMap<_, _> = running.iter().map(|task| (task.id, task.name)).collect();
    let mut addresses = AddressSet::default();
    let mut places: HashMap<WaitSite, u64> = HashMap::new();
    for (id, stacks) in stacks.each() {
        let name = names.get(&id).copied().unwrap_or("(unnamed task)");
        let mut stacks: Vec<Vec<u32>> = stacks
            .into_iter()
            .map(|stack| stack.into_iter().map(|returns_to| addresses.call_before(returns_to)).collect())
            .collect();
        stacks.sort_unstable();
        *places.entry((name, stacks)).or_default() += 1;
    }
    let mut places: Vec<_> = places.into_iter().collect();
    places.sort_unstable_by(|(a, x), (b, y)| y.cmp(x).then_with(|| a.cmp(b)));
    let left_out = places.iter().skip(PLACES_MAX).map(|(_, tasks)| tasks).sum();
    let group =
        |((name, stacks), tasks): (WaitSite, u64)| WaitingTasks { name: name.to_owned(), tasks, stacks };
    let groups = places.into_iter().take(PLACES_MAX).map(group).collect();
    let what = ProfileJob::Waits(Waits { summary, groups, left_out });
    RenderJob { places: addresses.into_table(&Maps::of_this_process()), what }
}

#[cfg(test)]
mod tests {
    use super::super::PermitSource;
    use super::*;

    #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
    async fn tasks_waiting_at_one_place_are_merged() {
        let tasks = Tasks::new();
        for _ in 0..3 {
            let stop = tasks.cancelled();
            tasks.spawn("sleeper", async move {
                tokio::select! {
                    () = stop => {}
                    () = tokio::time::sleep(Duration::from_secs(1000)) => {}
                }
            });
        }
        let all_wait = || match tasks.list().len() {
            3.. => Ok(()),
            listed => Err(format!("{listed} are listed")),
        };
        uniffle_testkit::eventually("all three wait", all_wait).await;
        let (permit, asking) =
            (PermitSource::new().try_take().unwrap(), PermitSource::new().try_take().unwrap());
        let text = dump(&tasks, &permit, asking).await.unwrap();
        assert!(text.contains("     3 sleeper (oldest "), "{text}");
        // A test program does not support the child's argument, so the output has addresses. A
        // `select!` has several. `tree` tests names.
        let sleepers = text.lines().filter_map(|line| line.strip_suffix(" × sleeper")?.parse::<u64>().ok());
        assert_eq!(sleepers.sum::<u64>(), 3, "{text}");
        let program = std::env::current_exe().unwrap();
        let program = program.file_name().unwrap().to_str().unwrap();
        let calls = text.lines().filter(|line| line.contains("╼ "));
        assert!(calls.clone().count() >= 4 && calls.clone().all(|line| line.ends_with(program)), "{text}");
        tasks.cancel();
        tasks.drained().await;
    }

    /// Format of tokio 1.54 with backtrace 0.3.
    #[test]
    fn addresses_are_parsed_from_tokio_traces() {
        let frame = |ip| format!("BacktraceFrame {{ ip: {ip}, symbol_address: 0x55d01000 }}");
        let (a, b, c) = (frame("0x55d01234"), frame("0x7fff0"), frame("0x1"));
        let trace = format!("Trace {{ inner: Trace {{ backtraces: [[{a}, {b}], [{c}]] }} }}");
        assert_eq!(addresses(&trace), [vec![0x55d0_1234, 0x7_fff0], vec![1]]);
        for none in [
            "",
            "Trace { inner: Trace { backtraces: [[]] } }",
            "ip: 0x",
            " ip: 0xfffffffffffffffff",
            "[ ip: 0x",
        ] {
            assert_eq!(addresses(none), Vec::<Vec<u64>>::new(), "{none}");
        }
    }
}
