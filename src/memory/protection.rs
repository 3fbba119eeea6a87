//! Shuffles for which the file of `memory_store.backing` had no place when they were registered get one as soon as there is room.
//!
//! Not here: places and rows (`persistent`). Until a shuffle has them, what it has in memory is lost if the process is killed.

use std::sync::Weak;
use std::time::Duration;

use tokio::time::interval;

use super::Memory;
use crate::telemetry::LogLimiter;

/// Between two attempts.
const EVERY: Duration = Duration::from_secs(1);
/// Shuffles without a place are logged once in this time.
const LOG_INTERVAL: Duration = Duration::from_secs(60);

/// Tries again and again, until it is dropped or `memory` is gone.
pub(super) async fn run(memory: Weak<Memory>) {
    let (mut every, limiter) = (interval(EVERY), LogLimiter::new(1, LOG_INTERVAL));
    let mut is_logged = false;
    loop {
        every.tick().await;
        let Some(memory) = memory.upgrade() else { return };
        if memory.unprotected_shuffles() > 0 {
            let protecting = tokio::task::spawn_blocking(move || {
                memory.protect_shuffles();
                memory.unprotected_shuffles()
            });
            let Ok(shuffles @ 1..) = protecting.await else { continue };
            if limiter.pass().is_some() {
                let text = "memory_store.backing has no place for some shuffles: a kill of the process loses what they have in \
                            memory; free space there";
                tracing::warn!(shuffles, "{text}");
                is_logged = true;
            }
        } else if std::mem::take(&mut is_logged) {
            tracing::info!("memory_store.backing has a place for all shuffles again");
        }
    }
}
