//! Assigns places to shuffles for which the file of `memory_store.backing` had none when they were
//! registered.
//!
//! Until a shuffle has a place and rows (`persistent`), its blocks in memory are lost if the
//! process is killed.

use std::time::Duration;

use tokio::time::interval;

use crate::telemetry::LogLimiter;

/// Interval between attempts.
const EVERY: Duration = Duration::from_secs(1);
/// Interval between log lines about shuffles without a place.
const LOG_INTERVAL: Duration = Duration::from_secs(60);

/// Tries once a second until it is dropped. `unprotected` returns the number of shuffles without a
/// place, and `protect` the number left after an attempt. `None` from either ends the loop.
pub(super) async fn run(
    unprotected: impl Fn() -> Option<u64>,
    protect: impl Fn() -> Option<u64> + Clone + Send + 'static,
) {
    let (mut every, limiter) = (interval(EVERY), LogLimiter::new(1, LOG_INTERVAL));
    let mut is_logged = false;
    loop {
        every.tick().await;
        let Some(waiting) = unprotected() else { return };
        if waiting > 0 {
            let protecting = tokio::task::spawn_blocking(protect.clone());
            let Ok(Some(shuffles @ 1..)) = protecting.await else { continue };
            if limiter.pass().is_some() {
                let text = "memory_store.backing is full; a kill would lose blocks in memory of some \
                     shuffles; free space there";
                tracing::warn!(shuffles, "{text}");
                is_logged = true;
            }
        } else if std::mem::take(&mut is_logged) {
            tracing::info!("memory_store.backing has space for all shuffles again");
        }
    }
}
