//! The calls. Bodies and answers are JSON; an empty body stands for no arguments.

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

/// A call with one text that can be refused with reasons.
pub type TextCall = Arc<dyn Fn(&str) -> Result<(), String> + Send + Sync>;

/// Replaces the tags; the error names the one that is none.
pub type SetTags = Arc<dyn Fn(Vec<String>) -> Result<(), String> + Send + Sync>;

/// Reads the configuration again: keys that are in effect now, and keys that wait for a start. The error is everything
/// that is wrong with it.
pub type Reload = Arc<dyn Fn() -> Result<(Vec<String>, Vec<String>), String> + Send + Sync>;

/// What the calls ask of the rest of the worker.
#[derive(Clone)]
pub struct AdminHooks {
    /// Decommissioning, flushing, purging.
    pub service: Arc<Service>,
    /// Replaces the configured tags.
    pub set_tags: SetTags,
    /// Replaces the log filter.
    pub set_log_filter: TextCall,
    /// Reads the configuration again.
    pub reload: Reload,
}

impl fmt::Debug for AdminHooks {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("AdminHooks")
    }
}

/// All calls, without the gate.
pub(super) fn router(hooks: AdminHooks) -> Router {
    Router::new()
        .route("/admin/decommission", post(decommission))
        .route("/admin/cancel-decommission", post(cancel_decommission))
        .route("/admin/tags", post(tags))
        .route("/admin/flush", post(flush))
        .route("/admin/apps/{id}/purge", post(purge))
        .route("/admin/log-level", post(log_level))
        .route("/admin/reload", post(reload))
        .with_state(hooks)
}

async fn decommission(State(hooks): State<AdminHooks>) -> Response {
    match hooks.service.decommission() {
        Ok(()) => state_answer(&hooks),
        Err(error) => refusal(StatusCode::CONFLICT, &error.to_string()),
    }
}

async fn cancel_decommission(State(hooks): State<AdminHooks>) -> Response {
    match hooks.service.cancel_decommission() {
        Ok(()) => state_answer(&hooks),
        Err(error) => refusal(StatusCode::CONFLICT, &error.to_string()),
    }
}

fn state_answer(hooks: &AdminHooks) -> Response {
    let apps = hooks.service.apps().app_count();
    answer(&json!({ "state": hooks.service.status().state().as_str(), "apps": apps }))
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
    match (hooks.set_tags)(wanted.clone()) {
        Ok(()) => answer(&json!({ "tags": wanted })),
        Err(reason) => refusal(StatusCode::BAD_REQUEST, &reason),
    }
}

/// Puts everything that is in memory on its way to the disks; does not wait for it.
async fn flush(State(hooks): State<AdminHooks>) -> Response {
    match hooks.service.flush_all() {
        Ok(batches) => answer(&json!({ "batches_under_way": batches })),
        Err(error) => refusal(StatusCode::CONFLICT, &error.to_string()),
    }
}

async fn purge(State(hooks): State<AdminHooks>, Path(app): Path<String>) -> Response {
    match hooks.service.unregister_app(&app) {
        Ok(()) => answer(&json!({ "purged": app })),
        Err(ServiceError::NotRegistered) => refusal(StatusCode::NOT_FOUND, "no such application"),
        Err(error) => refusal(StatusCode::CONFLICT, &error.to_string()),
    }
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct LogLevel {
    filter: String,
}

async fn log_level(State(hooks): State<AdminHooks>, body: Bytes) -> Response {
    let filter = match arguments::<LogLevel>(&body, r#"{"filter": "info,uniffle_worker=debug"}"#) {
        Ok(wanted) => wanted.filter,
        Err(response) => return response,
    };
    match (hooks.set_log_filter)(&filter) {
        Ok(()) => answer(&json!({ "filter": filter })),
        Err(reason) => refusal(StatusCode::BAD_REQUEST, &reason),
    }
}

async fn reload(State(hooks): State<AdminHooks>) -> Response {
    let reload = hooks.reload;
    let outcome = tokio::task::spawn_blocking(move || reload()).await;
    match outcome.unwrap_or_else(|error| Err(error.to_string())) {
        Ok((changed, waiting)) => answer(&json!({ "changed": changed, "waiting_for_restart": waiting })),
        Err(reasons) => refusal(StatusCode::BAD_REQUEST, &reasons),
    }
}

/// The arguments in `body`, or an answer that shows how they look.
#[expect(clippy::result_large_err, reason = "the error is the answer, made once per bad call")]
fn arguments<T: DeserializeOwned>(body: &[u8], example: &str) -> Result<T, Response> {
    serde_json::from_slice(body).map_err(|error| {
        refusal(StatusCode::BAD_REQUEST, &format!("a body such as {example} is needed: {error}"))
    })
}

fn answer(value: &Value) -> Response {
    let text = value.to_string();
    let mut response = axum::Json(value).into_response();
    response.extensions_mut().insert(Audited(text));
    response
}
