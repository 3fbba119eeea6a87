//! HTTP calls, each on its own connection, as the worker's listeners expect.
//!
//! Invariants: an answer has a deadline and a maximum size. The token is only sent to the
//! administration listener.

use std::fmt;
use std::path::Path;
use std::str::FromStr;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use http::{Method, Request, StatusCode, Uri, header};
use http_body_util::{BodyExt as _, Full, Limited};
use hyper::client::conn::http1;
use hyper_util::rt::TokioIo;
use serde_json::Value;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::TcpStream;
use tokio::task::JoinSet;
use tokio::time::timeout;
use tokio_rustls::TlsConnector;
use tokio_rustls::rustls::crypto::ring;
use tokio_rustls::rustls::pki_types::pem::PemObject as _;
use tokio_rustls::rustls::pki_types::{CertificateDer, PrivateKeyDer, ServerName};
use tokio_rustls::rustls::{ClientConfig, RootCertStore};

/// Largest accepted answer. The longest lists of a worker have some MB, a profile some tens of MB.
const ANSWER_BYTES_MAX: usize = 256 << 20;

/// Address of a listener.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct ListenerAddress {
    pub(crate) is_tls: bool,
    /// Host name or IP address; IPv6 in brackets.
    pub(crate) host: String,
    pub(crate) port: u16,
}

impl ListenerAddress {
    /// Parses `text` with or without a scheme. `port` is the default port.
    pub(crate) fn parse(text: &str, port: u16) -> Result<Self, CommandFailure> {
        let whole = if text.contains("://") { text.to_owned() } else { format!("http://{text}") };
        let wrong =
            || CommandFailure::Usage(format!("expected http://HOST:PORT or https://HOST:PORT, got {text:?}"));
        let uri = Uri::from_str(&whole).map_err(|_| wrong())?;
        let is_tls = match uri.scheme_str() {
            Some("http") => false,
            Some("https") => true,
            _ => return Err(wrong()),
        };
        let host = uri.host().filter(|host| !host.is_empty()).ok_or_else(wrong)?.to_owned();
        let is_bare = matches!(uri.path(), "" | "/") && uri.query().is_none();
        // `Uri::port` also returns `None` for an invalid port.
        let authority = uri.authority().map_or("", |authority| authority.as_str());
        let port = match authority.strip_prefix(host.as_str()) {
            Some("") => port,
            Some(rest) => rest.strip_prefix(':').and_then(|port| port.parse().ok()).ok_or_else(wrong)?,
            None => return Err(wrong()),
        };
        if is_bare { Ok(Self { is_tls, host, port }) } else { Err(wrong()) }
    }
}

impl fmt::Display for ListenerAddress {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let scheme = if self.is_tls { "https" } else { "http" };
        write!(f, "{scheme}://{}:{}", self.host, self.port)
    }
}

/// Files for TLS. All are optional.
pub(crate) struct TlsPaths<'a> {
    pub(crate) ca: Option<&'a Path>,
    pub(crate) cert: Option<&'a Path>,
    pub(crate) key: Option<&'a Path>,
}

/// Names of the three files for error texts.
struct TlsFileNames {
    ca: &'static str,
    cert: &'static str,
    key: &'static str,
}

const ARGUMENTS: TlsFileNames = TlsFileNames { ca: "--ca-file", cert: "--cert-file", key: "--key-file" };
const KEYS: TlsFileNames =
    TlsFileNames { ca: "tls.ca_file =", cert: "tls.cert_file =", key: "tls.key_file =" };

/// TLS settings for calls of workers, by the command or by another worker of the cluster.
#[derive(Clone)]
pub struct Trust {
    connector: TlsConnector,
    /// Kept, like `own`, to compare two states of the files.
    authorities: Vec<CertificateDer<'static>>,
    own: Vec<CertificateDer<'static>>,
}

impl fmt::Debug for Trust {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Trust")
    }
}

/// Files of the client's own certificate.
#[derive(Debug, Clone, Copy)]
pub struct OwnCertificate<'a> {
    /// Certificate chain.
    pub cert: &'a Path,
    /// Private key of the certificate.
    pub key: &'a Path,
}

impl Trust {
    /// Trusts servers with a certificate of an authority in `ca`. `own` is presented to servers
    /// that require one. Blocks on file access.
    ///
    /// # Errors
    /// Fails if a file cannot be read or has no usable content. The text names its configuration
    /// key.
    pub fn load(ca: &Path, own: Option<OwnCertificate<'_>>) -> Result<Self, String> {
        Self::of(&KEYS, ca, own).map_err(|failure| failure.to_string())
    }

    fn of(names: &TlsFileNames, ca: &Path, own: Option<OwnCertificate<'_>>) -> Result<Self, CommandFailure> {
        let mut roots = RootCertStore::empty();
        let authorities = certificates(names.ca, ca)?;
        for certificate in &authorities {
            roots.add(certificate.clone()).map_err(|error| wrong(names.ca, ca, &error))?;
        }
        let config = ClientConfig::builder_with_provider(Arc::new(ring::default_provider()))
            .with_safe_default_protocol_versions()
            .map_err(|error| wrong(names.ca, ca, &error))?
            .with_root_certificates(roots);
        let mut chain = Vec::new();
        let config = match own {
            None => config.with_no_client_auth(),
            Some(OwnCertificate { cert, key }) => {
                chain = certificates(names.cert, cert)?;
                let private =
                    PrivateKeyDer::from_pem_file(key).map_err(|error| wrong(names.key, key, &error))?;
                config
                    .with_client_auth_cert(chain.clone(), private)
                    .map_err(|error| wrong(names.key, key, &error))?
            }
        };
        Ok(Self { connector: Arc::new(config).into(), authorities, own: chain })
    }

    /// Returns true if `other` trusts the same authorities.
    #[must_use]
    pub fn has_authorities_of(&self, other: &Self) -> bool {
        self.authorities == other.authorities
    }

    /// Returns true if `other` presents the same certificate.
    #[must_use]
    pub fn has_certificate_of(&self, other: &Self) -> bool {
        self.own == other.own
    }
}

/// An HTTP client with TLS settings, token, timeout and maximum answer size.
pub(crate) struct HttpClient {
    tls: Option<TlsConnector>,
    token: Option<String>,
    time_limit: Duration,
    answer_bytes_max: usize,
}

impl HttpClient {
    pub(crate) fn new(
        files: &TlsPaths<'_>,
        token: Option<String>,
        time_limit: Duration,
    ) -> Result<Self, CommandFailure> {
        let own = match (files.cert, files.key) {
            (Some(cert), Some(key)) => Some(OwnCertificate { cert, key }),
            (None, None) => None,
            _ => {
                return Err(CommandFailure::Usage(
                    "--cert-file and --key-file must be given together".to_owned(),
                ));
            }
        };
        let tls = files.ca.map(|ca| Trust::of(&ARGUMENTS, ca, own)).transpose()?;
        let tls = tls.map(|trust| trust.connector);
        Ok(Self { tls, token, time_limit, answer_bytes_max: ANSWER_BYTES_MAX })
    }

    /// Creates a client without a token.
    pub(crate) fn of(trust: Option<&Trust>, time_limit: Duration) -> Self {
        let tls = trust.map(|trust| trust.connector.clone());
        Self { tls, token: None, time_limit, answer_bytes_max: ANSWER_BYTES_MAX }
    }

    /// Returns the client with another maximum answer size.
    pub(crate) fn with_answers_of(self, answer_bytes_max: usize) -> Self {
        Self { answer_bytes_max, ..self }
    }

    /// Sends `GET`. Returns the JSON answer.
    pub(crate) async fn get(&self, base: &ListenerAddress, path: &str) -> Result<Value, CommandFailure> {
        let answer = self.call(base, request(Method::GET, base, path), self.time_limit).await?;
        json(base, &answer)
    }

    /// Sends `GET`. Returns the answer as text.
    pub(crate) async fn text(&self, base: &ListenerAddress, path: &str) -> Result<String, CommandFailure> {
        let answer = self.call(base, request(Method::GET, base, path), self.time_limit).await?;
        Ok(String::from_utf8_lossy(&answer).into_owned())
    }

    /// Sends `POST` to the administration listener, with JSON in both directions.
    pub(crate) async fn post(
        &self,
        admin: &ListenerAddress,
        path: &str,
        body: Option<&Value>,
    ) -> Result<Value, CommandFailure> {
        let mut request = self.authorized(request(Method::POST, admin, path))?;
        *request.body_mut() = body.map(|body| Full::from(body.to_string())).unwrap_or_default();
        let answer = self.call(admin, request, self.time_limit).await;
        json(admin, &answer.map_err(with_hint)?)
    }

    /// Sends `GET` to the administration listener. `longer` is added to the timeout.
    pub(crate) async fn fetch(
        &self,
        admin: &ListenerAddress,
        path: &str,
        longer: Duration,
    ) -> Result<Bytes, CommandFailure> {
        let request = self.authorized(request(Method::GET, admin, path))?;
        self.call(admin, request, self.time_limit + longer).await.map_err(with_hint)
    }

    fn authorized(&self, mut request: Request<Full<Bytes>>) -> Result<Request<Full<Bytes>>, CommandFailure> {
        if let Some(token) = &self.token {
            let value = header::HeaderValue::from_str(&format!("Bearer {token}"));
            let value = value.map_err(|_| {
                CommandFailure::Usage("the token has characters that HTTP does not allow".into())
            })?;
            request.headers_mut().insert(header::AUTHORIZATION, value);
        }
        Ok(request)
    }

    async fn call(
        &self,
        base: &ListenerAddress,
        request: Request<Full<Bytes>>,
        time_limit: Duration,
    ) -> Result<Bytes, CommandFailure> {
        let unreachable = |why: String| CommandFailure::Unreachable(format!("{base}: {why}"));
        let exchange = async {
            let host = base.host.trim_start_matches('[').trim_end_matches(']');
            let stream = TcpStream::connect((host, base.port)).await.map_err(|error| error.to_string())?;
            if !base.is_tls {
                return exchange(stream, request, self.answer_bytes_max).await;
            }
            let connector = self.tls.as_ref().ok_or("https needs --ca-file")?;
            let name = ServerName::try_from(host.to_owned()).map_err(|error| error.to_string())?;
            let stream = connector.connect(name, stream).await.map_err(|error| error.to_string())?;
            exchange(stream, request, self.answer_bytes_max).await
        };
        let answered = timeout(time_limit, exchange).await;
        let answered = answered.unwrap_or_else(|_| Err(format!("no answer within {time_limit:?}")));
        let (status, body) = answered.map_err(unreachable)?;
        if status.is_success() {
            return Ok(body);
        }
        let described = serde_json::from_slice::<Value>(&body).ok();
        let described = described.as_ref().and_then(|answer| answer["error"].as_str()).map(str::to_owned);
        let reason = described.unwrap_or_else(|| String::from_utf8_lossy(&body).trim().to_owned());
        Err(CommandFailure::Refused { status: status.as_u16(), text: format!("{base}: {status}: {reason}") })
    }
}

/// Names the remedy if the administration listener cannot be reached: it is off by default.
fn with_hint(failure: CommandFailure) -> CommandFailure {
    match failure {
        CommandFailure::Unreachable(text) => CommandFailure::Unreachable(format!(
            "{text}; commands that change a worker need [admin] port in its configuration, see --admin"
        )),
        other => other,
    }
}

fn certificates(argument: &str, file: &Path) -> Result<Vec<CertificateDer<'static>>, CommandFailure> {
    let read = CertificateDer::pem_file_iter(file).and_then(Iterator::collect::<Result<Vec<_>, _>>);
    match read {
        Ok(certificates) if certificates.is_empty() => {
            Err(wrong(argument, file, &"the file has no certificate"))
        }
        Ok(certificates) => Ok(certificates),
        Err(error) => Err(wrong(argument, file, &error)),
    }
}

fn wrong(argument: &str, file: &Path, why: &dyn fmt::Display) -> CommandFailure {
    CommandFailure::Usage(format!("{argument} {}: {why}", file.display()))
}

fn request(method: Method, base: &ListenerAddress, path: &str) -> Request<Full<Bytes>> {
    let mut request = Request::new(Full::default());
    *request.method_mut() = method;
    *request.uri_mut() = Uri::from_str(path).unwrap_or_default();
    let host = header::HeaderValue::from_str(&format!("{}:{}", base.host, base.port));
    if let Ok(host) = host {
        request.headers_mut().insert(header::HOST, host);
    }
    request
}

async fn exchange<S>(
    stream: S,
    request: Request<Full<Bytes>>,
    answer_bytes_max: usize,
) -> Result<(StatusCode, Bytes), String>
where
    S: AsyncRead + AsyncWrite + Unpin + Send + 'static,
{
    let (mut sender, connection) =
        http1::handshake(TokioIo::new(stream)).await.map_err(|error| error.to_string())?;
    // Aborted on drop, which closes the connection.
    let mut driver = JoinSet::new();
    driver.spawn(connection);
    let answer = sender.send_request(request).await.map_err(|error| error.to_string())?;
    let status = answer.status();
    let body = Limited::new(answer.into_body(), answer_bytes_max).collect().await;
    Ok((status, body.map_err(|error| error.to_string())?.to_bytes()))
}

fn json(base: &ListenerAddress, answer: &[u8]) -> Result<Value, CommandFailure> {
    serde_json::from_slice(answer).map_err(|error| {
        CommandFailure::Unreachable(format!("{base}: the answer is not from a worker: {error}"))
    })
}

/// Encodes `text` as one path segment.
pub(crate) fn segment(text: &str) -> String {
    let mut segment = String::with_capacity(text.len());
    for byte in text.bytes() {
        match byte {
            b'a'..=b'z' | b'A'..=b'Z' | b'0'..=b'9' | b'-' | b'_' | b'.' | b'~' => {
                segment.push(char::from(byte));
            }
            _ => segment.push_str(&format!("%{byte:02X}")),
        }
    }
    segment
}

/// Reason why a command failed.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum CommandFailure {
    /// The worker refused the request.
    Refused {
        /// HTTP status.
        status: u16,
        /// Text with the worker's reason.
        text: String,
    },
    /// The command line is wrong, or a file that it refers to is unusable.
    Usage(String),
    /// No usable answer arrived.
    Unreachable(String),
    /// The required state was not reached.
    StateNotReached(String),
}

impl CommandFailure {
    /// Returns the exit code.
    pub(crate) fn code(&self) -> u8 {
        match self {
            Self::Refused { .. } => 1,
            Self::Usage(_) => 2,
            Self::Unreachable(_) => 3,
            Self::StateNotReached(_) => 4,
        }
    }

    /// Returns true if the worker does not know the requested item.
    pub(crate) fn is_missing(&self) -> bool {
        matches!(self, Self::Refused { status: 404, .. })
    }
}

impl fmt::Display for CommandFailure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Refused { text, .. }
            | Self::Usage(text)
            | Self::Unreachable(text)
            | Self::StateNotReached(text) => f.write_str(text),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn listener_is_given_as_url_or_host_and_port() {
        let shown = |text| ListenerAddress::parse(text, 19_998).map(|base| base.to_string());
        for (text, expected) in [
            ("http://127.0.0.1:19998", "http://127.0.0.1:19998"),
            ("worker", "http://worker:19998"),
            ("worker:80/", "http://worker:80"),
            ("https://[::1]:443", "https://[::1]:443"),
        ] {
            assert_eq!(shown(text), Ok(expected.to_owned()));
        }
        for wrong in
            ["", "ftp://x", "http://x/api", "http://x:99999", "http://x:", "http://a@x", "a b", "http://x?y"]
        {
            assert_eq!(shown(wrong).map_err(|failure| failure.code()), Err(2), "{wrong}");
        }
    }

    #[test]
    fn names_are_escaped_within_the_path() {
        assert_eq!(segment("application_1-2.x~"), "application_1-2.x~");
        assert_eq!(segment("../a b?é"), "..%2Fa%20b%3F%C3%A9");
    }
}
