//! HTTP/2 timers (keep-alive) on the clock of the process, so that a pause of this process does not
//! close a peer.

#![expect(clippy::disallowed_types, reason = "hyper's interface names the standard library's type")]

use std::pin::Pin;
use std::time::{Duration, Instant};

use hyper::rt::{Sleep, Timer};

use crate::clock;

/// Provides hyper with timers of [`clock`].
#[derive(Debug, Clone, Copy)]
pub(super) struct ConnectionTimer;

impl Sleep for clock::Sleep {}

impl Timer for ConnectionTimer {
    fn sleep(&self, duration: Duration) -> Pin<Box<dyn Sleep>> {
        Box::pin(clock::sleep(duration))
    }

    fn sleep_until(&self, deadline: Instant) -> Pin<Box<dyn Sleep>> {
        Box::pin(clock::sleep_until(deadline.into()))
    }

    fn now(&self) -> Instant {
        clock::Instant::now().into()
    }
}
