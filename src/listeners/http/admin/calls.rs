//! Administration calls. Arguments and answers are JSON. Calls without arguments ignore the body.

use std::fmt;
use std::sync::Arc;

use axum::Router;
use axum::body::Bytes;
use axum::extract::{Path, State};
use axum::http::StatusCode;
use axum::response::{IntoResponse as _, Response};
use axum::routing::post;
use serde::Deserialize;
use serde::de::DeserializeOwned;
use serde_json::{Value, json};

use super::guard::{Audited, refusal};
use crate::service::{Service, ServiceError};
use uniffle_coordinator::embedded::EmbeddedCoordinator;

/// Controls outside the service that the calls use.
pub trait Control: fmt::Debug + Send + Sync {
    /// Replaces the configured tags.
    ///
    /// # Errors
    /// A description of the invalid tag.
    fn set_tags(&self, tags: Vec<String>) -> Result<(), String>;

    /// Replaces the log filter.
    ///
    /// # Errors
    /// The reason why the filter is invalid.
    fn set_log_filter(&self, filter: &str) -> Result<(), String>;

    /// Reloads the configuration. Returns the changed keys that are in effect, and those that need
    /// a restart. Blocks on files.
    ///
    /// # Errors
    /// All problems of the configuration.
    fn reload(&self) -> Result<(Vec<String>, Vec<String>), String>;
}

/// Parts of the worker that the calls use.
#[derive(Debug, Clone)]
pub struct AdminHooks {
    /// Decommissioning, draining, flushing and purging.
    pub service: Arc<Service>,
    /// Tags, log filter and reload.
    pub control: Arc<dyn Control>,
    /// The coordinator in this process, whose list of lost nodes can be changed.
    pub coordinator: Option<EmbeddedCoordinator>,
}

/// Returns the routes of all calls, without access checks.
pub(super) fn router(hooks: AdminHooks) -> Router {
    Router::new()
        .route("/admin/decommission", post(decommission))
        .route("/admin/cancel-decommission", post(cancel_decommission))
        .route("/admin/drain", post(drain))
        .route("/admin/tags", post(tags))
        .route("/admin/flush", post(flush))
        .route("/admin/apps/{id}/purge", post(purge))
        .route("/admin/log-level", post(log_level))
        .route("/admin/reload", post(reload))
        .route("/admin/coordinator/forget", post(forget_lost_node))
        .with_state(hooks)
}

async fn decommission(State(hooks): State<AdminHooks>) -> Response {
    hooks.service.lifecycle.decommission();
    state_answer(&hooks).await
}

async fn cancel_decommission(State(hooks): State<AdminHooks>) -> Response {
    hooks.service.lifecycle.cancel_decommission();
    state_answer(&hooks).await
}

/// Decommissions the worker, flushes memory, and moves the data of the disks to the object store,
/// if there is one. Returns the progress, also if the disks are so full that the decommissioning
/// cannot be saved.
async fn drain(State(hooks): State<AdminHooks>) -> Response {
    let drained = match hooks.service.lifecycle.drain_on_thread().await {
        Ok(drained) => drained,
        Err(error) => return refusal(StatusCode::CONFLICT, &error.to_string()),
    };
    let not_saved = hooks.service.lifecycle.save_settings().await.err().map(|error| error.to_string());
    let tiers = drained.tiers.map(|remaining| {
        json!({
            "shuffles_left": remaining.shuffles_left,
            "bytes_left": remaining.bytes_left,
            "immovable_bytes": remaining.stuck_bytes,
        })
    });
    answer(&json!({
        "state": hooks.service.status().state().as_str(),
        "apps": hooks.service.apps().app_count(),
        "in_memory_bytes": drained.in_memory_bytes,
        "unfinished_batches": drained.batches,
        "tiers": tiers,
        "may_go": drained.is_complete(),
        "not_saved": not_saved,
    }))
}

async fn state_answer(hooks: &AdminHooks) -> Response {
    if let Some(failed) = unsaved(hooks).await {
        return failed;
    }
    let apps = hooks.service.apps().app_count();
    answer(&json!({ "state": hooks.service.status().state().as_str(), "apps": apps }))
}

/// Saves settings made by a call. Returns the error answer if no file was written.
async fn unsaved(hooks: &AdminHooks) -> Option<Response> {
    let saved = hooks.service.lifecycle.save_settings().await;
    saved.err().map(|error| refusal(StatusCode::INTERNAL_SERVER_ERROR, &error.to_string()))
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Tags {
    tags: Vec<String>,
}

async fn tags(State(hooks): State<AdminHooks>, body: Bytes) -> Response {
    let wanted = match arguments::<Tags>(&body, r#"{"tags": ["a", "b"]}"#) {
        Ok(wanted) => wanted.tags,
        Err(response) => return response,
    };
    match hooks.control.set_tags(wanted.clone()) {
        Ok(()) => unsaved(&hooks).await.unwrap_or_else(|| answer(&json!({ "tags": wanted }))),
        Err(reason) => refusal(StatusCode::BAD_REQUEST, &reason),
    }
}

/// Starts to flush all data in memory, without waiting for it.
async fn flush(State(hooks): State<AdminHooks>) -> Response {
    match hooks.service.lifecycle.flush_all_on_thread().await {
        Ok(batches) => answer(&json!({ "batches_under_way": batches })),
        Err(error) => refusal(StatusCode::CONFLICT, &error.to_string()),
    }
}

async fn purge(State(hooks): State<AdminHooks>, Path(app): Path<String>) -> Response {
    match hooks.service.lifecycle.end_app(&app).await {
        Ok(()) => answer(&json!({ "purged": app })),
        Err(ServiceError::NotRegistered) => refusal(StatusCode::NOT_FOUND, "unknown application"),
        Err(error) => refusal(StatusCode::CONFLICT, &error.to_string()),
    }
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct LogLevel {
    filter: String,
}

async fn log_level(State(hooks): State<AdminHooks>, body: Bytes) -> Response {
    let filter = match arguments::<LogLevel>(&body, r#"{"filter": "info,uniffle=debug"}"#) {
        Ok(wanted) => wanted.filter,
        Err(response) => return response,
    };
    match hooks.control.set_log_filter(&filter) {
        Ok(()) => answer(&json!({ "filter": filter })),
        Err(reason) => refusal(StatusCode::BAD_REQUEST, &reason),
    }
}

async fn reload(State(hooks): State<AdminHooks>) -> Response {
    let outcome = tokio::task::spawn_blocking(move || hooks.control.reload()).await;
    match outcome.unwrap_or_else(|error| Err(error.to_string())) {
        Ok((changed, waiting)) => answer(&json!({ "changed": changed, "waiting_for_restart": waiting })),
        Err(reasons) => refusal(StatusCode::BAD_REQUEST, &reasons),
    }
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct ForgetRequest {
    id: String,
}

/// Removes a node from the coordinator's list of lost nodes.
async fn forget_lost_node(State(hooks): State<AdminHooks>, body: Bytes) -> Response {
    let id = match arguments::<ForgetRequest>(&body, r#"{"id": "10.1.2.3-19999-21200"}"#) {
        Ok(wanted) => wanted.id,
        Err(response) => return response,
    };
    let reason = match &hooks.coordinator {
        None => "this worker has no coordinator (embedded_coordinator.enable)".to_owned(),
        Some(coordinator) if coordinator.forget_lost(&id) => return answer(&json!({ "forgotten": id })),
        Some(_) => format!("this coordinator lists no lost node {id:?}"),
    };
    refusal(StatusCode::NOT_FOUND, &reason)
}

/// Parses the arguments in `body`. The error answer contains `example`.
#[expect(clippy::result_large_err, reason = "the error is the answer, made once per bad call")]
pub(super) fn arguments<T: DeserializeOwned>(body: &[u8], example: &str) -> Result<T, Response> {
    serde_json::from_slice(body).map_err(|error| {
        refusal(StatusCode::BAD_REQUEST, &format!("body must be JSON such as {example}: {error}"))
    })
}

pub(super) fn answer(value: &Value) -> Response {
    let text = value.to_string();
    let mut response = axum::Json(value).into_response();
    response.extensions_mut().insert(Audited(text));
    response
}
