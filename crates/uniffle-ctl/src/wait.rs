//! Calls that end with a state: looked at again and again until it is there, or the time is over.
//!
//! A worker that has been told to retire may end by itself (`decommission_shutdown`): when it is gone after it said
//! *decommissioning*, it is taken as retired. Figures that are older than what was asked for are not believed.

use std::time::Duration;

use serde_json::{Value, json};
use tokio::time::{Instant, sleep};

use crate::commands::Answer;
use crate::failure::Failure;
use crate::http::Client;
use crate::workers::Target;

/// Between two looks. The worker's figures are up to a second old.
const LOOK_INTERVAL: Duration = Duration::from_millis(250);

/// Decommissions `target` and waits until it has no application.
pub(crate) async fn decommission(client: &Client, target: &Target, within: Duration) -> Answer {
    let start = Instant::now();
    client.post(&target.admin, "/admin/decommission", None).await?;
    loop {
        let left = match client.get(&target.http, "/api/v1/status").await {
            Ok(status) if status["node"]["state"] == "decommissioned" => {
                return Ok(json!({ "state": "decommissioned", "seconds": start.elapsed().as_secs_f64() }));
            }
            Ok(status) if status["node"]["state"] != "decommissioning" => {
                let text = format!("{}: it is {} again", target.http, status["node"]["state"]);
                return Err(Failure::Refused { status: 409, text });
            }
            Ok(status) => status["apps"]["count"].as_u64().unwrap_or(0),
            Err(Failure::Unreachable(_)) => {
                return Ok(json!({ "state": "gone", "seconds": start.elapsed().as_secs_f64() }));
            }
            Err(failure) => return Err(failure),
        };
        pause(start, within, || format!("{}: {left} applications are left", target.http)).await?;
    }
}

/// Decommissions `target`, and flushes it until nothing is in its memory and no ticket is out.
pub(crate) async fn drain(client: &Client, target: &Target, within: Duration) -> Answer {
    let start = Instant::now();
    let state = client.post(&target.admin, "/admin/decommission", None).await?["state"].clone();
    loop {
        let asked = Instant::now();
        client.post(&target.admin, "/admin/flush", None).await?;
        let status = newer_than(client, target, asked).await?;
        let in_memory = status["memory"]["used_bytes"].as_u64().unwrap_or(u64::MAX);
        let batches = status["flush"]["unfinished_batches"].as_u64().unwrap_or(u64::MAX);
        if (in_memory, batches) == (0, 0) {
            let seconds = start.elapsed().as_secs_f64();
            let apps = &status["apps"]["count"];
            return Ok(json!({ "state": state, "in_memory_bytes": 0, "apps": apps, "seconds": seconds }));
        }
        let left = || format!("{}: {in_memory} bytes in memory, {batches} batches under way", target.http);
        pause(start, within, left).await?;
    }
}

/// Figures that were taken after `asked`.
async fn newer_than(client: &Client, target: &Target, asked: Instant) -> Result<Value, Failure> {
    loop {
        let status = client.get(&target.http, "/api/v1/status").await?;
        let age = status["age_seconds"].as_f64().unwrap_or(0.0);
        if age < asked.elapsed().as_secs_f64() {
            return Ok(status);
        }
        sleep(LOOK_INTERVAL).await;
    }
}

async fn pause(start: Instant, within: Duration, left: impl FnOnce() -> String) -> Result<(), Failure> {
    if start.elapsed() + LOOK_INTERVAL > within {
        return Err(Failure::NotReached(format!("{}, after {within:?}", left())));
    }
    sleep(LOOK_INTERVAL).await;
    Ok(())
}
