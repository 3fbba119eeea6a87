//! Where each task of the runtime waits: the stacks of their last awaits, equal ones together.
//!
//! Nothing is recorded between dumps. A dump stops the runtime's threads while every task is polled in tracing mode,
//! some 20 µs a task; a thread that does not reach the barrier within 250 ms makes the dump fail; the worker does not
//! wait for it. Symbols are resolved afterwards, elsewhere.

use std::collections::HashMap;
use std::fmt::Write as _;

use tokio::task::Id;
use tokio::time::{Duration, Instant};

use self::stacks::Stacks;
use super::{ProfileError, Turn, in_background};
use crate::runtime::{RunningTask, Tasks};

/// A dump that takes longer has no result: a thread of the runtime is busy or blocked.
const DEADLINE: Duration = Duration::from_secs(2);

/// Tasks whose symbols are resolved. More of them are counted only.
const RESOLVED_MAX: usize = 500;

/// What tasks that wait at the same place have in common. The awaits of a `select!` come in any order, so that the
/// lines of the stack are compared without it.
#[derive(Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
struct Place {
    name: &'static str,
    lines: Vec<String>,
}

impl Place {
    fn new(name: &'static str, stack: &str) -> Self {
        let is_drawing = |c: char| !c.is_ascii() || c == ' ';
        let mut lines: Vec<_> =
            stack.lines().map(|line| line.trim_start_matches(is_drawing).to_owned()).collect();
        lines.sort_unstable();
        Self { name, lines }
    }
}

/// Name and stacks of every task of the current runtime, as text. Where the runtime cannot dump, the names only. A dump of the
/// stacks that is given up goes on: until it has ended it keeps `asking`, so that there is one, and others profile meanwhile.
///
/// # Errors
/// [`ProfileError::Failed`] when symbols cannot be resolved.
pub async fn dump(tasks: &Tasks, turn: &Turn, asking: Turn) -> Result<String, ProfileError> {
    let started = Instant::now();
    let stacks = stacks::take(tasks, asking).await;
    let took = started.elapsed();
    let running = tasks.list();
    in_background(turn, move || Ok(render(&running, stacks, took))).await
}

/// The stacks of one task.
type Stack = (Id, String);

#[cfg(all(tokio_unstable, target_os = "linux", any(target_arch = "x86_64", target_arch = "aarch64")))]
mod stacks {
    use tokio::runtime::{Handle, dump::Dump};
    use tokio::sync::oneshot;
    use tokio::time::timeout;

    use super::{DEADLINE, RESOLVED_MAX, Stack, Tasks, Turn};

    /// Stacks as addresses.
    pub(super) struct Stacks(Dump);

    /// Those of the current runtime.
    pub(super) async fn take(tasks: &Tasks, asking: Turn) -> Result<Stacks, &'static str> {
        let (sender, receiver) = oneshot::channel();
        let (runtime, cancelled) = (Handle::current(), tasks.cancelled());
        // The dump has a thread of its own, which goes on when it is given up here, or the client has gone.
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
        /// As text, and how many tasks were left out.
        pub(super) fn resolve(self) -> (Vec<Stack>, usize) {
            let tasks = self.0.tasks().iter();
            let resolved: Vec<Stack> =
                tasks.take(RESOLVED_MAX).map(|task| (task.id(), task.trace().to_string())).collect();
            let left_out = self.0.tasks().iter().count() - resolved.len();
            (resolved, left_out)
        }
    }
}

#[cfg(not(all(tokio_unstable, target_os = "linux", any(target_arch = "x86_64", target_arch = "aarch64"))))]
mod stacks {
    use super::{Stack, Tasks, Turn};

    /// There are none.
    pub(super) enum Stacks {}

    #[expect(clippy::unused_async, reason = "as the one of the other build")]
    pub(super) async fn take(_: &Tasks, _: Turn) -> Result<Stacks, &'static str> {
        Err("no stacks: this worker was built without --cfg tokio_unstable, or for another platform")
    }

    impl Stacks {
        pub(super) fn resolve(self) -> (Vec<Stack>, usize) {
            match self {}
        }
    }
}

fn render(running: &[RunningTask], stacks: Result<Stacks, &'static str>, took: Duration) -> String {
    let mut text = format!("{} tasks, threads stopped and asked within {took:.1?}\n", running.len());
    names(running, &mut text);
    match stacks {
        Ok(stacks) => places(running, stacks, &mut text),
        Err(why) => _ = writeln!(text, "\n{why}"),
    }
    text
}

/// A line per name: how many, and how old the oldest is.
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

fn places(running: &[RunningTask], stacks: Stacks, text: &mut String) {
    let names: HashMap<_, _> = running.iter().map(|task| (task.id, task.name)).collect();
    let (stacks, left_out) = stacks.resolve();
    let mut places: HashMap<Place, (usize, String)> = HashMap::new();
    for (id, stack) in stacks {
        let name = names.get(&id).copied().unwrap_or("(not ours)");
        places.entry(Place::new(name, &stack)).or_insert((0, stack)).0 += 1;
    }
    let mut places: Vec<_> = places.into_iter().collect();
    places.sort_unstable_by(|(a, (x, _)), (b, (y, _))| y.cmp(x).then_with(|| a.cmp(b)));
    for (place, (count, stack)) in places {
        let _ = writeln!(text, "\n{count} × {}\n{stack}", place.name);
    }
    if left_out > 0 {
        let _ = writeln!(text, "\n{left_out} more tasks, not shown");
    }
}

#[cfg(test)]
mod tests {
    use super::super::Turns;
    use super::*;

    #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
    async fn tasks_that_wait_at_the_same_place_are_told_once() {
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
        while tasks.list().len() < 3 {
            tokio::task::yield_now().await;
        }
        let (turn, asking) = (Turns::new().try_take().unwrap(), Turns::new().try_take().unwrap());
        let text = dump(&tasks, &turn, asking).await.unwrap();
        assert!(text.contains("     3 sleeper (oldest "), "{text}");
        assert!(text.contains("3 × sleeper") && text.contains("Sleep"), "{text}");
        tasks.cancel();
        tasks.drained().await;
    }
}
