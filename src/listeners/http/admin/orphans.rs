//! Objects of workers in the object store, also of departed ones: `POST /admin/orphans` lists all
//! workers, and `/admin/orphans/remove` deletes at most some hundred objects of one.
//!
//! The caller decides which workers are alive, and repeats a removal until no object is left
//! (`uniffle-worker ctl orphans`). The worker's own objects are never removed here.

use std::sync::Arc;

use axum::Router;
use axum::body::Bytes;
use axum::extract::State;
use axum::http::StatusCode;
use axum::response::Response;
use axum::routing::post;
use serde::Deserialize;
use serde_json::json;

use super::calls::{answer, arguments};
use super::guard::refusal;
use crate::store::StoreErrorKind;
use crate::store::object::Bucket;

/// Returns the routes, for a worker with an object store.
pub fn routes(tier: Arc<Bucket>) -> Router {
    Router::new()
        .route("/admin/orphans", post(list))
        .route("/admin/orphans/remove", post(remove))
        .with_state(tier)
}

async fn list(State(tier): State<Arc<Bucket>>) -> Response {
    match tier.workers().await {
        Ok(workers) => answer(&json!({ "workers": workers })),
        Err(error) => refusal(StatusCode::BAD_GATEWAY, &error.to_string()),
    }
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct RemoveRequest {
    worker: String,
}

async fn remove(State(tier): State<Arc<Bucket>>, body: Bytes) -> Response {
    let wanted = match arguments::<RemoveRequest>(&body, r#"{"worker": "10.1.2.3-19999-21200"}"#) {
        Ok(wanted) => wanted.worker,
        Err(response) => return response,
    };
    match tier.remove_worker(&wanted).await {
        Ok(removed) => answer(&json!({ "worker": wanted, "removed": removed })),
        Err(error) if error.kind == StoreErrorKind::InUse => {
            let reason = format!("{wanted} is this worker; its objects are deleted with its applications");
            refusal(StatusCode::CONFLICT, &reason)
        }
        Err(error) => refusal(StatusCode::BAD_GATEWAY, &error.to_string()),
    }
}
