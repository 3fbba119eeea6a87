//! A coalescing queue: jobs wait while a single task runs earlier ones, and the task may take
//! several at once.
//!
//! Invariant: a waiting job always has a task. The task ends in the same step that finds no job,
//! and a task that panics or is dropped drops the waiting jobs: their callers get an error.

use std::collections::VecDeque;

use parking_lot::Mutex;

/// Waiting jobs, and a flag that a task runs. The caller that adds the first job starts the task.
#[derive(Debug)]
pub(in crate::store::object) struct UploadQueue<T>(Mutex<State<T>>);

#[derive(Debug)]
struct State<T> {
    waiting: VecDeque<T>,
    has_task: bool,
}

impl<T> Default for UploadQueue<T> {
    fn default() -> Self {
        Self(Mutex::new(State { waiting: VecDeque::new(), has_task: false }))
    }
}

impl<T> UploadQueue<T> {
    /// Adds a job. Returns true if the caller has to start the task.
    pub(in crate::store) fn add(&self, job: T) -> bool {
        let mut state = self.0.lock();
        state.waiting.push_back(job);
        !std::mem::replace(&mut state.has_task, true)
    }

    /// Removes the next job.
    pub(in crate::store) fn take(&self) -> Option<T> {
        self.0.lock().waiting.pop_front()
    }

    /// Returns the number of waiting jobs.
    #[cfg(test)]
    pub(in crate::store) fn len(&self) -> usize {
        self.0.lock().waiting.len()
    }

    /// Creates the guard of the task.
    pub(super) fn running(&self) -> UploadTaskGuard<'_, T> {
        UploadTaskGuard { queue: self, has_ended: false }
    }
}

/// Guard held by the task. If the task panics, the guard drops all waiting jobs, and another task
/// can be started.
#[derive(Debug)]
pub(super) struct UploadTaskGuard<'a, T> {
    queue: &'a UploadQueue<T>,
    has_ended: bool,
}

impl<T> UploadTaskGuard<'_, T> {
    /// Removes the next job. Returns `None` if there is none, and then the task has to end.
    pub(super) fn take_or_end(&mut self) -> Option<T> {
        let mut state = self.queue.0.lock();
        let next = state.waiting.pop_front();
        if next.is_none() {
            (state.has_task, self.has_ended) = (false, true);
        }
        next
    }
}

impl<T> Drop for UploadTaskGuard<'_, T> {
    fn drop(&mut self) {
        if self.has_ended {
            return;
        }
        let mut state = self.queue.0.lock();
        state.has_task = false;
        let waiting = std::mem::take(&mut state.waiting);
        drop(state);
        drop(waiting); // Callers that wait for these jobs are notified outside the lock.
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn queue_runs_one_task_and_loses_no_job() {
        let queue = UploadQueue::default();
        assert!(queue.add(1) && !queue.add(2));
        let mut running = queue.running();
        assert_eq!((running.take_or_end(), queue.take()), (Some(1), Some(2)));
        assert!(!queue.add(3), "the running task must take the job");
        assert_eq!((running.take_or_end(), running.take_or_end()), (Some(3), None));
        assert!(queue.add(4), "a job after the end of the task needs a new task");
        drop(running);
        assert!(!queue.add(5), "the guard of an ended task must have no effect");
        drop(queue.running());
        assert_eq!((queue.take(), queue.add(6)), (None, true));
    }
}
