//! Selection of the workers that a command asks: one worker, or those that any coordinator knows.

use std::collections::BTreeMap;
use std::path::Path;

use futures::future::join_all;
use uniffle_client::{ClientOptions, Coordinators, TlsOptions};

use crate::arguments::{Arguments, CtlCommand};
use crate::http::{CommandFailure, ListenerAddress};

/// Default HTTP listener of a worker.
const WORKER_DEFAULT: &str = "http://127.0.0.1:19998";

/// Default port of `--worker`.
const HTTP_PORT: u16 = 19_998;

/// Largest token file that is read.
const TOKEN_FILE_BYTES_MAX: u64 = 4 << 10;

/// A worker to ask.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct WorkerTarget {
    /// Id from a coordinator, or the URL otherwise.
    pub(crate) name: String,
    /// HTTP listener.
    pub(crate) http: ListenerAddress,
    /// Administration listener.
    pub(crate) admin: ListenerAddress,
    /// True if coordinators get no heartbeats from it: it is not called.
    pub(crate) is_lost: bool,
}

/// Returns the one worker that `arguments` name, or all that the coordinators list.
///
/// # Errors
/// Fails if options contradict each other, or no coordinator answers.
pub(crate) async fn targets(arguments: &Arguments) -> Result<Vec<WorkerTarget>, CommandFailure> {
    check(arguments)?;
    if !arguments.coordinator.is_empty() {
        return known(arguments).await;
    }
    let worker = arguments.worker.as_deref().unwrap_or(WORKER_DEFAULT);
    let http = ListenerAddress::parse(worker, HTTP_PORT)?;
    let admin = match &arguments.admin {
        Some(admin) => ListenerAddress::parse(admin, arguments.admin_port)?,
        None => ListenerAddress { port: arguments.admin_port, ..http.clone() },
    };
    Ok(vec![WorkerTarget { name: http.to_string(), http, admin, is_lost: false }])
}

/// Returns those of `targets` that `--only` selects.
///
/// # Errors
/// Fails if one that it names is not among them.
pub(crate) fn selected(
    arguments: &Arguments,
    mut targets: Vec<WorkerTarget>,
) -> Result<Vec<WorkerTarget>, CommandFailure> {
    let missing = arguments.only.iter().find(|id| targets.iter().all(|target| target.name != **id));
    if let Some(id) = missing {
        let known: Vec<_> = targets.iter().map(|target| target.name.as_str()).collect();
        let text = format!("no coordinator knows the worker {id:?}; known workers: {}", known.join(", "));
        return Err(CommandFailure::Refused { status: 404, text });
    }
    targets.retain(|target| arguments.only.is_empty() || arguments.only.contains(&target.name));
    Ok(targets)
}

/// Checks option combinations. Not done by clap, because global options may be given before and
/// after the command.
fn check(arguments: &Arguments) -> Result<(), CommandFailure> {
    let usage = |text: &str| Err(CommandFailure::Usage(text.to_owned()));
    let is_cluster = !arguments.coordinator.is_empty();
    if is_cluster && (arguments.worker.is_some() || arguments.admin.is_some()) {
        return usage("--coordinator cannot be combined with --worker or --admin");
    }
    if is_cluster && matches!(arguments.call, CtlCommand::App { cluster: true, .. }) {
        return usage(
            "--cluster asks one worker about its own cluster; with --coordinator all workers are asked anyway",
        );
    }
    if matches!(arguments.call, CtlCommand::Orphans { .. }) && !arguments.only.is_empty() {
        return usage("orphans needs all workers of a --coordinator: --only is not allowed");
    }
    if !is_cluster && (arguments.all || !arguments.only.is_empty()) {
        return usage("--only and --all need a --coordinator");
    }
    if is_cluster && arguments.call.is_drastic() && !arguments.all && arguments.only.is_empty() {
        return usage(
            "this affects every worker of the coordinator: select workers with --only, or pass --all",
        );
    }
    Ok(())
}

/// Returns the workers that any coordinator lists, sorted by id. A coordinator that has just
/// started knows only some. Coordinators that do not answer are ignored if one does.
pub(crate) async fn known(arguments: &Arguments) -> Result<Vec<WorkerTarget>, CommandFailure> {
    let tls = match arguments.coordinator.iter().any(|address| address.starts_with("https://")) {
        true => Some(tls(arguments)?),
        false => None,
    };
    let has_tls = tls.is_some();
    let options = ClientOptions::default().with(|options| {
        options.tls = tls;
        options.rpc_timeout = arguments.timeout;
        options.failures.attempts = 1;
    });
    // Without a scheme, the client would use TLS for all addresses or none.
    let addresses = arguments.coordinator.iter().map(|address| match address.contains("://") {
        true => address.clone(),
        false => format!("http://{address}"),
    });
    let coordinators: Vec<_> = addresses
        .map(|address| Coordinators::new([address], options.clone()))
        .collect::<Result<_, _>>()
        .map_err(|error| CommandFailure::Usage(format!("--coordinator: {error}")))?;
    let (mut servers, mut answered, mut failure) = (BTreeMap::new(), false, None);
    for listed in join_all(coordinators.iter().map(Coordinators::servers)).await {
        match listed {
            Ok(listed) => {
                answered = true;
                servers.extend(listed.into_iter().map(|server| (server.id.clone(), server)));
            }
            Err(error) => failure = Some(error),
        }
    }
    if let Some(error) = failure.filter(|_| !answered) {
        let hint = match arguments.ca_file.is_some() && !has_tls {
            true => "; a coordinator with TLS needs https:// before its address",
            false => "",
        };
        return Err(CommandFailure::Unreachable(with_causes(&error) + hint));
    }
    let target = |server: uniffle_client::ServerAddress| {
        let host = if server.host.contains(':') { format!("[{}]", server.host) } else { server.host };
        // A worker without an HTTP port gets port 0, so that the failed call is reported for it.
        let port = server.http_port.unwrap_or(0);
        // With --ca-file, all workers are called over TLS.
        let http = ListenerAddress { is_tls: arguments.ca_file.is_some(), host, port };
        let admin = ListenerAddress { port: arguments.admin_port, ..http.clone() };
        WorkerTarget { name: server.id, http, admin, is_lost: false }
    };
    Ok(servers.into_values().map(target).collect())
}

/// Returns the TLS options of the command line for coordinators.
fn tls(arguments: &Arguments) -> Result<TlsOptions, CommandFailure> {
    let read = |option: &str, file: &Path| {
        std::fs::read(file)
            .map_err(|error| CommandFailure::Usage(format!("{option} {}: {error}", file.display())))
    };
    let Some(ca) = &arguments.ca_file else {
        return Err(CommandFailure::Usage("--coordinator: https needs --ca-file".to_owned()));
    };
    let options = TlsOptions::new(read("--ca-file", ca)?);
    let options = match (&arguments.cert_file, &arguments.key_file) {
        (Some(cert), Some(key)) => {
            let (cert, key) = (read("--cert-file", cert)?, read("--key-file", key)?);
            options.and_then(|options| options.with_identity(cert, key))
        }
        _ => options,
    };
    options.map_err(|error| CommandFailure::Usage(error.to_string()))
}

/// Returns the error with all its causes: tonic's own text is only "transport error".
fn with_causes(error: &dyn std::error::Error) -> String {
    let mut text = error.to_string();
    let mut cause = error.source();
    while let Some(error) = cause {
        let more = error.to_string();
        if !text.contains(&more) {
            text.push_str(&format!(": {more}"));
        }
        cause = error.source();
    }
    text
}

/// Returns the administration token, if there is one.
pub(crate) fn token(file: Option<&Path>) -> Result<Option<String>, CommandFailure> {
    let Some(path) = file else {
        return Ok(std::env::var("WORKER_ADMIN_TOKEN").ok().map(|token| token.trim().to_owned()));
    };
    let token = std::fs::metadata(path).and_then(|metadata| match metadata.len() {
        0..=TOKEN_FILE_BYTES_MAX => std::fs::read_to_string(path),
        _ => Err(std::io::Error::other("the file is too large for a token")),
    });
    let token = token.map(|text| text.trim().to_owned());
    token
        .map(Some)
        .map_err(|error| CommandFailure::Usage(format!("--token-file {}: {error}", path.display())))
}
