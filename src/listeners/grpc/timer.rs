//! HTTP/2 timers (keep-alive) on the clock of the process, so that a pause of this process does not
//! close a peer.

#![expect(clippy::disallowed_types, reason = "hyper's interface names the standard library's type")]

use std::pin::Pin;
use std::task::{Context, Poll};
use std::time::{Duration, Instant};

use hyper::rt::{Sleep, Timer};
use pin_project_lite::pin_project;

use crate::clock;

/// Provides hyper with timers of [`clock`].
#[derive(Debug, Clone, Copy)]
pub(super) struct ConnectionTimer;

pin_project! {
    /// A sleep of [`clock`] as hyper's type.
    struct ProcessSleep {
        #[pin]
        sleep: clock::Sleep,
    }
}

impl Future for ProcessSleep {
    type Output = ();

    fn poll(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<()> {
        self.project().sleep.poll(context)
    }
}

impl Sleep for ProcessSleep {}

impl Timer for ConnectionTimer {
    fn sleep(&self, duration: Duration) -> Pin<Box<dyn Sleep>> {
        Box::pin(ProcessSleep { sleep: clock::sleep(duration) })
    }

    fn sleep_until(&self, deadline: Instant) -> Pin<Box<dyn Sleep>> {
        Box::pin(ProcessSleep { sleep: clock::sleep_until(deadline.into()) })
    }

    fn now(&self) -> Instant {
        clock::Instant::now().into()
    }
}
