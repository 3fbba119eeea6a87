//! Commands that wait for a state: they poll until it is reached or the time is up.
//!
//! A decommissioning worker may shut down by itself (`decommission_shutdown`). If it disappears
//! after it accepted the decommission, `decommission --wait` succeeds with the state *gone*, and
//! `drain` fails.

use std::time::Duration;

use bytesize::ByteSize;
use serde_json::{Value, json};
use tokio::time::{Instant, sleep};

use crate::answers::WorkerAnswer;
use crate::http::{CommandFailure, HttpClient};
use crate::progress::CommandBar;
use crate::workers::WorkerTarget;

/// Polling interval.
const LOOK_INTERVAL: Duration = Duration::from_millis(250);

/// Decommissions `target` and waits until it has no application.
pub(crate) async fn decommission(
    client: &HttpClient,
    target: &WorkerTarget,
    within: Duration,
    bar: &CommandBar,
) -> WorkerAnswer {
    let start = Instant::now();
    client.post(&target.admin, "/admin/decommission", None).await?;
    loop {
        let remaining = match client.get(&target.http, "/api/v1/status").await {
            Ok(status) if status["node"]["state"] == "decommissioned" => {
                return Ok(json!({ "state": "decommissioned", "seconds": start.elapsed().as_secs_f64() }));
            }
            Ok(status) if status["node"]["state"] != "decommissioning" => {
                let text = format!("{}: the state is {} again", target.http, status["node"]["state"]);
                return Err(CommandFailure::Refused { status: 409, text });
            }
            Ok(status) => status["apps"]["count"].as_u64().unwrap_or(0),
            Err(CommandFailure::Unreachable(_)) => {
                return Ok(json!({ "state": "gone", "seconds": start.elapsed().as_secs_f64() }));
            }
            Err(failure) => return Err(failure),
        };
        bar.show(remaining, format!("applications left: {remaining}"));
        let waiting_for = || {
            let http = &target.http;
            format!(
                "{http}: applications left: {remaining} (it looks every `decommission_check_interval_sec`)"
            )
        };
        pause(start, within, waiting_for).await?;
    }
}

/// Decommissions `target` and flushes it until its memory is empty and no ticket is outstanding.
/// With an object store, until that has all data.
pub(crate) async fn drain(
    client: &HttpClient,
    target: &WorkerTarget,
    within: Duration,
    bar: &CommandBar,
) -> WorkerAnswer {
    let start = Instant::now();
    loop {
        let drained = client.post(&target.admin, "/admin/drain", None).await?;
        let number = |value: &Value| value.as_u64().unwrap_or(u64::MAX);
        let in_memory = number(&drained["in_memory_bytes"]);
        let batches = number(&drained["unfinished_batches"]);
        let tiers = &drained["tiers"];
        let shuffles = if tiers.is_null() { 0 } else { number(&tiers["shuffles_left"]) };
        if (in_memory, batches, shuffles) == (0, 0, 0) {
            let seconds = start.elapsed().as_secs_f64();
            let (state, apps) = (&drained["state"], &drained["apps"]);
            let mut outcome =
                json!({ "state": state, "in_memory_bytes": 0, "apps": apps, "seconds": seconds });
            if !tiers.is_null() {
                outcome["immovable_bytes"] = tiers["immovable_bytes"].clone();
                outcome["may_go"] = drained["may_go"].clone();
            }
            return Ok(outcome);
        }
        let left_bytes = if tiers.is_null() { 0 } else { number(&tiers["bytes_left"]) };
        let memory = ByteSize(in_memory).display().iec();
        bar.show(
            in_memory.saturating_add(left_bytes),
            format!("{memory} in memory, {batches} unfinished batches, {shuffles} shuffles to move"),
        );
        let remaining = || {
            let elsewhere = match tiers.is_null() {
                true => String::new(),
                false => format!(
                    ", {shuffles} shuffles with {} bytes not yet in the object store",
                    tiers["bytes_left"]
                ),
            };
            format!("{}: {in_memory} bytes in memory, {batches} unfinished batches{elsewhere}", target.http)
        };
        pause(start, within, remaining).await?;
    }
}

async fn pause(
    start: Instant,
    within: Duration,
    remaining: impl FnOnce() -> String,
) -> Result<(), CommandFailure> {
    if start.elapsed() + LOOK_INTERVAL > within {
        return Err(CommandFailure::StateNotReached(format!("timed out after {within:?}: {}", remaining())));
    }
    sleep(LOOK_INTERVAL).await;
    Ok(())
}
