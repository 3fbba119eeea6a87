//! `GET /api/v1/…`: the worker's state as JSON, for the status page and for scripts.
//!
//! The API is read-only. [`model`] has the types, and docs/ctl.md documents them. The composition
//! root updates [`Status`] at most once a second; the service describes applications. Answers are
//! bounded: a list of applications is cut off, and the answer states their total number.

pub mod cluster;
pub mod model;

use std::sync::Arc;

use axum::extract::{Path, Query, State};
use axum::http::{StatusCode, header};
use axum::response::{IntoResponse, Response};
use axum::routing::get;
use axum::{Json, Router};
use serde::{Deserialize, Serialize};
use serde_json::json;

use super::serve::run_blocking;
use super::{NodeView, NotExplained};
use crate::runtime::BlockingPool;
use crate::service::{SAMPLE_INTERVAL, Service};

pub use model::Status;
use model::{AppModel, Apps, FinishedApp};

/// Default and maximum number of listed applications.
const APPS_DEFAULT: usize = 100;
const APPS_MAX: usize = 1_000;

/// Error for paths that need a coordinator.
const NO_COORDINATOR: &str = "this worker has no coordinator (embedded_coordinator.enable); node and coordinators are in /api/v1/status";

/// Parts of [`Status`] with a path of their own.
const PARTS: &[&str] = &[
    "node",
    "memory",
    "tiers",
    "disks",
    "flush",
    "tickets",
    "coordinators",
    "connections",
    "incomplete",
    "quotas",
    "process",
    "spark_options",
];

/// Sources of the API.
#[derive(Debug, Clone)]
pub struct ApiHooks {
    /// Source of registrations, explanations and history.
    pub service: Arc<Service>,
    /// Source of everything else, also of the figures of applications.
    pub node: Arc<dyn NodeView>,
    /// Threads for collecting answers.
    pub pool: BlockingPool,
}

/// Returns the routes of the API.
pub fn router(hooks: ApiHooks) -> Router {
    Router::new()
        .route("/api/v1", get(index))
        .route("/api/v1/status", get(status))
        .route("/api/v1/history", get(history))
        .route("/api/v1/apps", get(apps))
        .route("/api/v1/apps/{id}/explain", get(explain))
        .route("/api/v1/cluster", get(whole_cluster))
        .route("/api/v1/cluster/apps/{id}/explain", get(explain_everywhere))
        .route("/api/v1/{part}", get(part))
        .with_state(hooks)
}

fn fresh(value: &impl Serialize) -> Response {
    ([(header::CACHE_CONTROL, "no-store")], Json(value)).into_response()
}

fn missing(what: &str) -> Response {
    (StatusCode::NOT_FOUND, Json(json!({ "error": what }))).into_response()
}

async fn index() -> Response {
    let mut paths: Vec<String> = PARTS.iter().map(|part| format!("/api/v1/{part}")).collect();
    paths.extend(
        ["status", "history", "apps", "apps/{id}/explain", "cluster", "cluster/apps/{id}/explain"]
            .map(|path| format!("/api/v1/{path}")),
    );
    fresh(&json!({ "paths": paths }))
}

async fn status(State(hooks): State<ApiHooks>) -> Response {
    let pool = hooks.pool.clone();
    run_blocking(&pool, move || fresh(&hooks.node.status())).await
}

async fn part(State(hooks): State<ApiHooks>, Path(part): Path<String>) -> Response {
    if !PARTS.contains(&part.as_str()) {
        return missing("unknown path; see /api/v1");
    }
    let pool = hooks.pool.clone();
    let collect = move || match serde_json::to_value(hooks.node.status()) {
        Ok(status) => fresh(&status[part]),
        Err(error) => (StatusCode::INTERNAL_SERVER_ERROR, format!("{error}\n")).into_response(),
    };
    run_blocking(&pool, collect).await
}

#[derive(Deserialize)]
struct After {
    after_ms: Option<u64>,
}

async fn history(State(hooks): State<ApiHooks>, Query(after): Query<After>) -> Response {
    let samples = hooks.service.diagnostics.history(after.after_ms.unwrap_or(0));
    fresh(&json!({ "interval_seconds": SAMPLE_INTERVAL.as_secs_f64(), "samples": samples }))
}

#[derive(Deserialize)]
struct Limit {
    limit: Option<usize>,
}

async fn apps(State(hooks): State<ApiHooks>, Query(limit): Query<Limit>) -> Response {
    let pool = hooks.pool.clone();
    run_blocking(&pool, move || all_apps(&hooks, limit.limit)).await
}

fn all_apps(hooks: &ApiHooks, limit: Option<usize>) -> Response {
    let service = &hooks.service;
    let mut apps: Vec<AppModel> = hooks
        .node
        .apps()
        .into_iter()
        .filter_map(|statistics| {
            let app = service.apps().find(&statistics.app)?;
            Some(AppModel::new(
                &app,
                statistics,
                service.apps().idle(&app),
                service.diagnostics.lost_blocks(&app),
            ))
        })
        .collect();
    let count = apps.len();
    apps.sort_by(|left, right| {
        let weight = |app: &AppModel| (app.statistics.received_bytes, app.statistics.in_memory_bytes);
        weight(right).cmp(&weight(left)).then_with(|| left.app.cmp(&right.app))
    });
    apps.truncate(limit.unwrap_or(APPS_DEFAULT).min(APPS_MAX));
    let gone = service.diagnostics.finished_apps().iter().map(|gone| FinishedApp::new(gone)).collect();
    fresh(&Apps { count, apps, gone })
}

async fn whole_cluster(State(hooks): State<ApiHooks>) -> Response {
    let headers = [(header::CACHE_CONTROL, "no-store"), (header::CONTENT_TYPE, "application/json")];
    let pool = hooks.pool.clone();
    let collect = move || match hooks.node.cluster() {
        Some(text) => (headers, text).into_response(),
        None => missing(NO_COORDINATOR),
    };
    run_blocking(&pool, collect).await
}

async fn explain_everywhere(State(hooks): State<ApiHooks>, Path(app): Path<String>) -> Response {
    let Some(explaining) = hooks.node.explain_everywhere(&app) else { return missing(NO_COORDINATOR) };
    match explaining.await {
        Ok(explanation) => fresh(&explanation),
        Err(NotExplained::Unknown(why)) => missing(&why),
        Err(NotExplained::Unavailable(why)) => {
            (StatusCode::SERVICE_UNAVAILABLE, Json(json!({ "error": why }))).into_response()
        }
    }
}

async fn explain(State(hooks): State<ApiHooks>, Path(app): Path<String>) -> Response {
    let pool = hooks.pool.clone();
    let collect = move || match hooks.service.diagnostics.explain(&app) {
        Some(explanation) => fresh(&*explanation),
        None => missing("unknown application, neither registered nor among the latest finished ones"),
    };
    run_blocking(&pool, collect).await
}
