//! `POST /admin/coordinator/forget`: removes a node from the coordinator's list of lost nodes.

use axum::Router;
use axum::body::Bytes;
use axum::http::StatusCode;
use axum::response::Response;
use axum::routing::post;
use serde::Deserialize;
use serde_json::json;

use super::calls::{answer, arguments};
use super::guard::refusal;

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct ForgetRequest {
    id: String,
}

/// Returns the route. `forget` removes the node with an id, or returns why it cannot.
pub fn routes<F>(forget: F) -> Router
where
    F: Fn(&str) -> Result<(), String> + Clone + Send + Sync + 'static,
{
    let call = move |body: Bytes| std::future::ready(removed(&body, &forget));
    Router::new().route("/admin/coordinator/forget", post(call))
}

fn removed(body: &[u8], forget: impl Fn(&str) -> Result<(), String>) -> Response {
    let id = match arguments::<ForgetRequest>(body, r#"{"id": "10.1.2.3-19999-21200"}"#) {
        Ok(wanted) => wanted.id,
        Err(response) => return response,
    };
    match forget(&id) {
        Ok(()) => answer(&json!({ "forgotten": id })),
        Err(reason) => refusal(StatusCode::NOT_FOUND, &reason),
    }
}
