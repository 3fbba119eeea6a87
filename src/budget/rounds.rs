//! Round-robin order of waiting requests: applications alternate, and requests of one application
//! keep their order.
//!
//! A pure state machine. The owner defines the resource and how a request is answered.

use std::collections::VecDeque;

use uniffle_wire::types::AppId;

/// A round-robin queue of requests. `W` is the owner's handle for answering a request.
#[derive(Debug)]
pub struct Rounds<W> {
    /// Applications with at least one request, in the order of their turns.
    apps: VecDeque<AppQueue<W>>,
    waiting: usize,
    arrivals: u64,
}

#[derive(Debug)]
struct AppQueue<W> {
    app: AppId,
    requests: VecDeque<(u64, W)>,
}

impl<W> Default for Rounds<W> {
    fn default() -> Self {
        Self { apps: VecDeque::new(), waiting: 0, arrivals: 0 }
    }
}

impl<W> Rounds<W> {
    /// Returns the number of waiting requests.
    #[must_use]
    pub fn len(&self) -> usize {
        self.waiting
    }

    /// Returns whether no request waits.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.waiting == 0
    }

    /// Returns the number of waiting requests of `app`.
    #[must_use]
    pub fn of_app(&self, app: &AppId) -> usize {
        self.apps.iter().find(|it| it.app == *app).map_or(0, |it| it.requests.len())
    }

    /// Appends a request of `app`. Returns its number for [`Rounds::leave`].
    pub fn enter(&mut self, app: &AppId, request: W) -> u64 {
        let number = self.arrivals;
        self.arrivals += 1;
        self.waiting += 1;
        match self.apps.iter_mut().find(|it| it.app == *app) {
            Some(it) => it.requests.push_back((number, request)),
            None => {
                let requests = VecDeque::from([(number, request)]);
                self.apps.push_back(AppQueue { app: app.clone(), requests });
            }
        }
        number
    }

    /// Removes a cancelled request. Does nothing if it was answered.
    pub fn leave(&mut self, app: &AppId, number: u64) {
        let Some(at) = self.apps.iter().position(|it| it.app == *app) else { return };
        let requests = &mut self.apps[at].requests;
        let before = requests.len();
        requests.retain(|(it, _)| *it != number);
        self.waiting -= before - requests.len();
        if requests.is_empty() {
            self.apps.remove(at);
        }
    }

    /// Serves applications in turn. `ask` returns whether the first request of an application was
    /// answered. Ends after `refused_max` refusals in a row; the next round begins with the
    /// application after them.
    pub fn serve(&mut self, refused_max: usize, mut ask: impl FnMut(&AppId, &mut W) -> bool) {
        let mut refused = 0;
        while refused < self.apps.len().min(refused_max) {
            let is_answered = self.ask_next(&mut ask);
            refused = if is_answered { 0 } else { refused + 1 };
            self.apps.rotate_left(usize::from(!is_answered));
        }
    }

    /// Serves applications in turn until a request is not answered. Its application stays first.
    pub fn serve_in_order(&mut self, mut ask: impl FnMut(&AppId, &mut W) -> bool) {
        while !self.apps.is_empty() && self.ask_next(&mut ask) {}
    }

    /// Serves the next application. If its request was answered, the application becomes the last.
    fn ask_next(&mut self, ask: &mut impl FnMut(&AppId, &mut W) -> bool) -> bool {
        let Some(next) = self.apps.front_mut() else { return false };
        let is_answered = next.requests.front_mut().is_some_and(|(_, request)| ask(&next.app, request));
        if is_answered {
            next.requests.pop_front();
            self.waiting -= 1;
            if let Some(next) = self.apps.pop_front().filter(|next| !next.requests.is_empty()) {
                self.apps.push_back(next);
            }
        }
        is_answered
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn app(name: &str) -> AppId {
        AppId::parse(name).unwrap()
    }

    #[test]
    fn applications_alternate_and_requests_keep_their_order() {
        let mut rounds = Rounds::default();
        for at in 0..4 {
            rounds.enter(&app("flood"), ("flood", at));
        }
        for at in 0..2 {
            rounds.enter(&app("other"), ("other", at));
        }
        let mut served = Vec::new();
        let mut left = 3;
        rounds.serve_in_order(|_, request| {
            let is_answered = left > 0;
            if is_answered {
                left -= 1;
                served.push(*request);
            }
            is_answered
        });
        assert_eq!(served, [("flood", 0), ("other", 0), ("flood", 1)]);
        served.clear();
        rounds.serve_in_order(|_, request| {
            served.push(*request);
            false
        });
        rounds.serve(16, |app, request| {
            served.push(*request);
            app.as_str() == "flood"
        });
        let (flood, other) = (|at| ("flood", at), ("other", 1));
        assert_eq!(served, [other, other, flood(2), other, flood(3), other]);
        assert_eq!((rounds.len(), rounds.of_app(&app("other")), rounds.of_app(&app("flood"))), (1, 1, 0));
    }

    proptest! {
        #[test]
        fn requests_are_never_lost_or_reordered_per_application(
            steps in prop::collection::vec((0usize..24, 0u8..4, any::<prop::sample::Index>()), 1..200),
        ) {
            let mut rounds = Rounds::default();
            let mut waiting: Vec<(AppId, u64)> = Vec::new();
            for (of, what, at) in steps {
                match what {
                    0 | 1 => {
                        let app = app(&format!("app-{of}"));
                        let number = rounds.enter(&app, ());
                        waiting.push((app, number));
                    }
                    2 if !waiting.is_empty() => {
                        let (app, number) = waiting.swap_remove(at.index(waiting.len()));
                        rounds.leave(&app, number);
                    }
                    _ => {
                        let (mut answered, mut left) = (Vec::new(), at.index(4));
                        rounds.serve(3, |app, ()| {
                            let is_answered = left > 0 && app.as_str() != "app-0";
                            if is_answered {
                                left -= 1;
                                answered.push(app.clone());
                            }
                            is_answered
                        });
                        for app in answered {
                            let of_it = waiting.iter().enumerate().filter(|(_, (of, _))| *of == app);
                            let (first, _) = of_it.min_by_key(|(_, (_, number))| *number).unwrap();
                            waiting.remove(first);
                        }
                    }
                }
                prop_assert_eq!(rounds.len(), waiting.len());
                let there = rounds.apps.iter().flat_map(|it| it.requests.iter().map(|it| it.0));
                let mut there: Vec<u64> = there.collect();
                let mut expected: Vec<u64> = waiting.iter().map(|(_, number)| *number).collect();
                there.sort_unstable();
                expected.sort_unstable();
                prop_assert_eq!(there, expected);
                prop_assert!(rounds.apps.iter().all(|it| !it.requests.is_empty()));
            }
        }
    }
}
