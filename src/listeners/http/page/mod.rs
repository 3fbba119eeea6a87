//! The status page: one document that loads its data from `/api/v1` and nothing from other servers.
//!
//! Three files are combined at start-up. The content security policy allows only the page's own
//! script and style, by a nonce. A script in a name would therefore not run.

use std::sync::Arc;

use axum::Router;
use axum::http::header;
use axum::response::{IntoResponse as _, Response};
use axum::routing::get;

const HTML: &str = include_str!("page.html");
const CSS: &str = include_str!("page.css");
const JS: &str = include_str!("page.js");

/// Placeholder for the nonce.
const NONCE: &str = "__NONCE__";

/// Returns the route of the page at `/`.
pub(super) fn router() -> Router {
    let page: Arc<str> = HTML.replace("__CSS__", CSS).replace("__JS__", JS).into();
    Router::new().route("/", get(move || async move { answer(&page) }))
}

fn answer(page: &str) -> Response {
    let nonce = uuid::Uuid::new_v4().simple().to_string();
    let policy = format!(
        "default-src 'none'; script-src 'nonce-{nonce}'; style-src 'nonce-{nonce}'; img-src data:; connect-src 'self'; \
         base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    );
    let headers = [
        (header::CONTENT_TYPE, "text/html; charset=utf-8".to_owned()),
        (header::CONTENT_SECURITY_POLICY, policy),
        (header::CACHE_CONTROL, "no-store".to_owned()),
        (header::X_CONTENT_TYPE_OPTIONS, "nosniff".to_owned()),
        (header::REFERRER_POLICY, "no-referrer".to_owned()),
    ];
    (headers, page.replace(NONCE, &nonce)).into_response()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn page_requests_no_other_server() {
        let page = [HTML, CSS, JS].concat();
        // The SVG namespace is only a name, and nothing is loaded from it.
        let addresses = page.matches("http://").count() + page.matches("https://").count();
        assert_eq!(addresses, page.matches("http://www.w3.org/2000/svg").count());
        for outside in
            ["src=\"//", "href=\"//", "@import", "url(", "innerHTML", "outerHTML", "insertAdjacent", "eval("]
        {
            assert!(!page.contains(outside), "{outside}");
        }
    }
}
