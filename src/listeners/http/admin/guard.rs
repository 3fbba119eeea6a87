//! Access checks of every administration call, and its audit event.
//!
//! Order of the checks: caller (401, 403), method (405), route (404), so that an unauthorized
//! caller learns nothing about the routes. Audit events of refused callers are limited in rate. Any
//! web page can make a local browser send a POST to a loopback port. Browsers then send `Origin`,
//! and without a token such a call is refused.

use std::fmt;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use axum::Router;
use axum::extract::{DefaultBodyLimit, Request, State};
use axum::http::{HeaderMap, Method, StatusCode, header};
use axum::middleware::{self, Next};
use axum::response::{IntoResponse, Response};
use prometheus::{IntCounter, IntCounterVec, IntGauge};
use subtle::ConstantTimeEq as _;

use crate::listeners::http::serve::Peer;
use crate::metrics;
use crate::telemetry::{AUDIT, LogLimiter};

/// Size limit of a request body: ten times the size of 64 tags of 100 characters.
const BODY_BYTES_MAX: usize = 64 << 10;

/// Path prefix of calls that do not change the worker's state.
const PROFILES: &str = "/debug/";

/// Java's path of such a call.
pub(in crate::listeners::http) const JAVA_STACKS: &str = "/api/shuffleServer/stacks";

/// Header that browsers send with every request, even without `Origin`.
const FETCH_SITE: &str = "sec-fetch-site";

/// Minimum time between two log lines about refused callers. Others are counted.
const DENIED_LOG_INTERVAL: Duration = Duration::from_secs(1);

/// Values of the label `result`.
pub(super) const RESULTS: [&str; 3] = ["ok", "failed", "denied"];

/// Detail for the audit event, which a handler puts into the extensions of its response.
#[derive(Debug, Clone)]
pub(super) struct Audited(pub(super) String);

/// State of the access checks.
struct Gate {
    token: Option<Token>,
    metrics: AdminMetrics,
    denials: LogLimiter,
}

/// Reason why a caller is refused.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Denial {
    /// A token is required, and the caller did not send it.
    Token,
    /// No token is configured, and the caller is on another machine.
    Remote,
    /// No token is configured, and the caller is a browser.
    Browser,
}

impl Denial {
    fn response(self) -> Response {
        match self {
            Self::Token => {
                let scheme = [(header::WWW_AUTHENTICATE, "Bearer")];
                (scheme, refusal(StatusCode::UNAUTHORIZED, "bearer token required")).into_response()
            }
            Self::Remote => refusal(
                StatusCode::FORBIDDEN,
                "only callers on this machine are allowed without a token; set admin.token_file",
            ),
            Self::Browser => refusal(StatusCode::FORBIDDEN, "requests of browsers are refused"),
        }
    }
}

/// Adds the access checks to all routes of `router` and to unknown paths.
pub(super) fn protect(router: Router, token: Option<Token>, metrics: AdminMetrics) -> Router {
    let gate = Arc::new(Gate { token, metrics, denials: LogLimiter::new(1, DENIED_LOG_INTERVAL) });
    router
        .fallback(|| async { refusal(StatusCode::NOT_FOUND, "unknown call") })
        .layer(DefaultBodyLimit::max(BODY_BYTES_MAX))
        .layer(middleware::from_fn_with_state(gate, pass))
}

async fn pass(State(gate): State<Arc<Gate>>, request: Request, next: Next) -> Response {
    let peer = request.extensions().get::<Peer>().map(|peer| peer.0);
    if let Err(denial) = gate.admit(request.headers(), peer) {
        let response = denial.response();
        gate.note_denied(peer, response.status());
        return response;
    }
    let path = request.uri().path().to_owned();
    let is_profile = path.starts_with(PROFILES) || path == JAVA_STACKS;
    let method = if is_profile { Method::GET } else { Method::POST };
    let response = if request.method() == method { next.run(request).await } else { wrong_method(&method) };
    let result = if response.status().is_success() { "ok" } else { "failed" };
    gate.metrics.calls.with_label_values(&[result]).inc();
    let detail = response.extensions().get::<Audited>().map_or("", |audited| audited.0.as_str());
    let status = response.status().as_u16();
    let peer = shown(peer);
    tracing::info!(target: AUDIT, action = "admin call", call = %path, %peer, result, status, detail);
    response
}

fn wrong_method(allowed: &Method) -> Response {
    let reason = "calls must use POST, profiles GET";
    ([(header::ALLOW, allowed.as_str())], refusal(StatusCode::METHOD_NOT_ALLOWED, reason)).into_response()
}

impl Gate {
    fn admit(&self, headers: &HeaderMap, peer: Option<SocketAddr>) -> Result<(), Denial> {
        let Some(token) = &self.token else {
            let is_local = peer.is_some_and(|peer| peer.ip().to_canonical().is_loopback());
            let is_browser = headers.contains_key(header::ORIGIN) || headers.contains_key(FETCH_SITE);
            return match (is_local, is_browser) {
                (true, false) => Ok(()),
                (true, true) => Err(Denial::Browser),
                (false, _) => Err(Denial::Remote),
            };
        };
        let offered = headers.get(header::AUTHORIZATION).map(|value| value.as_bytes());
        let is_known = offered.and_then(bearer).is_some_and(|offered| token.is(offered));
        if is_known { Ok(()) } else { Err(Denial::Token) }
    }

    fn note_denied(&self, peer: Option<SocketAddr>, status: StatusCode) {
        self.metrics.calls.with_label_values(&["denied"]).inc();
        let Some(calls) = self.denials.pass() else { return };
        let (peer, status) = (shown(peer), status.as_u16());
        tracing::warn!(target: AUDIT, action = "admin call", %peer, result = "denied", status, calls);
    }
}

/// Returns the token of `Bearer TOKEN`. The scheme is case-insensitive.
fn bearer(value: &[u8]) -> Option<&[u8]> {
    let (scheme, token) = value.split_at_checked(7)?;
    scheme.eq_ignore_ascii_case(b"bearer ").then(|| token.trim_ascii())
}

fn shown(peer: Option<SocketAddr>) -> String {
    peer.map_or_else(|| "unknown".to_owned(), |peer| peer.to_string())
}

/// Returns an error response with its reason.
pub(super) fn refusal(status: StatusCode, reason: &str) -> Response {
    let mut response = (status, axum::Json(serde_json::json!({ "error": reason }))).into_response();
    response.extensions_mut().insert(Audited(reason.to_owned()));
    response
}

metrics::table! {
    #[derive(Clone)]
    pub(crate) struct AdminMetrics {
        connections: IntGauge = "admin_connection_number", "Open connections of the administration listener";
        closed: IntCounter = "admin_connection_refused_total",
            "Connections of the administration listener closed at the limit to accept new ones";
        calls: IntCounterVec["result"] = "admin_calls_total", "Calls of the administration listener, by result";
    }
}

/// Minimum length of a token. 16 characters of base64 have 96 bits.
const TOKEN_CHARS_MIN: usize = 16;
/// Maximum length of a token, which fits into a header line.
const TOKEN_CHARS_MAX: usize = 1024;

/// The secret of administration callers. It is never shown, and the time of a comparison does not
/// depend on its text.
#[derive(Clone)]
pub struct Token(String);

/// The error for a text that is not a valid token.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("a token of {TOKEN_CHARS_MIN} to {TOKEN_CHARS_MAX} printable ASCII characters without blanks")]
pub struct InvalidToken;

impl Token {
    /// Parses a token. Surrounding white space is removed, such as the newline at the end of a
    /// file.
    ///
    /// # Errors
    /// [`InvalidToken`], which does not contain the text.
    pub fn parse(text: &str) -> Result<Self, InvalidToken> {
        let text = text.trim();
        let is_sound = (TOKEN_CHARS_MIN..=TOKEN_CHARS_MAX).contains(&text.len())
            && text.bytes().all(|b| b.is_ascii_graphic());
        if is_sound { Ok(Self(text.to_owned())) } else { Err(InvalidToken) }
    }

    /// Returns whether `offered` is the token. The time depends on the lengths only.
    pub fn is(&self, offered: &[u8]) -> bool {
        self.0.as_bytes().ct_eq(offered).into()
    }
}

impl PartialEq for Token {
    fn eq(&self, other: &Self) -> bool {
        self.is(other.0.as_bytes())
    }
}

impl fmt::Debug for Token {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Token(hidden)")
    }
}

#[cfg(test)]
mod tests {
    use axum::body::Body;
    use axum::routing::post;
    use tower::ServiceExt as _;

    use super::*;
    use crate::listeners::http::debug;
    use crate::runtime::Tasks;
    use uniffle_testkit::captured_log::CapturedLog;

    fn gate(token: Option<&str>) -> Gate {
        let registry = prometheus::Registry::new();
        let token = token.map(|text| Token::parse(text).unwrap());
        let metrics = AdminMetrics::new(&registry).unwrap();
        Gate { token, metrics, denials: LogLimiter::new(1, DENIED_LOG_INTERVAL) }
    }

    fn status(gate: &Gate, header: Option<(header::HeaderName, &str)>, peer: &str) -> Option<Denial> {
        let mut headers = HeaderMap::new();
        if let Some((name, value)) = header {
            headers.insert(name, value.parse().unwrap());
        }
        gate.admit(&headers, Some(peer.parse().unwrap())).err()
    }

    #[test]
    fn only_local_programs_are_allowed_without_token() {
        let gate = gate(None);
        for local in ["127.0.0.1:9", "127.8.8.8:9", "[::1]:9", "[::ffff:127.0.0.1]:9"] {
            assert_eq!(status(&gate, None, local), None, "{local}");
        }
        for far in ["10.0.0.1:9", "[2001:db8::1]:9", "0.0.0.0:9"] {
            assert_eq!(status(&gate, None, far), Some(Denial::Remote), "{far}");
        }
        for header_value in
            [(header::ORIGIN, "http://evil.example"), (FETCH_SITE.parse().unwrap(), "cross-site")]
        {
            assert_eq!(status(&gate, Some(header_value), "127.0.0.1:9"), Some(Denial::Browser));
        }
    }

    #[test]
    fn token_decides_access_if_configured() {
        let gate = gate(Some("0123456789abcdef"));
        let offer = |value| status(&gate, Some((header::AUTHORIZATION, value)), "10.0.0.1:9");
        assert_eq!(offer("Bearer 0123456789abcdef"), None);
        assert_eq!(offer("bearer  0123456789abcdef "), None);
        for wrong in
            ["Bearer 0123456789abcdeF", "Bearer ", "Bearer", "Basic 0123456789abcdef", "0123456789abcdef"]
        {
            assert_eq!(offer(wrong), Some(Denial::Token), "{wrong}");
        }
        assert_eq!(status(&gate, None, "127.0.0.1:9"), Some(Denial::Token));
    }

    #[tokio::test]
    async fn call_with_wrong_method_is_audited() {
        let log = CapturedLog::of_this_thread();
        let metrics = AdminMetrics::new(&prometheus::Registry::new()).unwrap();
        let router = Router::new().route("/admin/flush", post(async || ()));
        let router = protect(router, None, metrics.clone());
        let peer = Peer("127.0.0.1:9".parse().unwrap());
        let request = Request::get("/admin/flush").extension(peer).body(Body::empty()).unwrap();
        let response = router.oneshot(request).await.unwrap();
        assert_eq!(response.status(), StatusCode::METHOD_NOT_ALLOWED);
        assert_eq!(response.headers()[header::ALLOW], "POST");
        assert_eq!(metrics.calls.with_label_values(&["failed"]).get(), 1);
        let text = log.text();
        assert!(text.contains("call=/admin/flush peer=127.0.0.1:9 result=\"failed\" status=405"), "{text}");
    }

    #[tokio::test]
    async fn profiles_and_dumps_are_read_with_get() {
        let metrics = AdminMetrics::new(&prometheus::Registry::new()).unwrap();
        let router = protect(debug::routes(Tasks::new()), None, metrics);
        for path in ["/debug/tasks", JAVA_STACKS] {
            let peer = Peer("127.0.0.1:9".parse().unwrap());
            let request = Request::get(path).extension(peer).body(Body::empty()).unwrap();
            let response = router.clone().oneshot(request).await.unwrap();
            assert_eq!(response.status(), StatusCode::OK, "{path}");
        }
    }

    #[test]
    fn tokens_are_long_printable_and_hidden() {
        let token = Token::parse(" 0123456789abcdef\n").unwrap();
        assert!(token.is(b"0123456789abcdef"));
        for wrong in ["0123456789abcdeg", "0123456789abcde", "0123456789abcdef0", ""] {
            assert!(!token.is(wrong.as_bytes()), "{wrong}");
        }
        assert!(!format!("{token:?}").contains("0123"));
        for bad in ["", "short", "0123456789 abcdef", "0123456789abcde\u{e9}", &"x".repeat(1025)] {
            assert_eq!(Token::parse(bad), Err(InvalidToken), "{bad}");
        }
    }
}
