//! `/debug/…`: profiles of the process and stacks of its tasks.
//!
//! These are expensive. [`admin_routes`] are for the administration listener only. [`routes`]
//! change nothing, and are also on the open listener if configured. Invariant: one profile or dump
//! is made at a time. After its client has disconnected, a profile blocks others until its thread
//! has ended, and a dump that still takes stacks blocks only further dumps. Errors name unknown,
//! repeated or out-of-bounds parameters.

use axum::Router;
use axum::extract::{Extension, RawQuery, State};
use axum::http::{StatusCode, header};
use axum::response::{IntoResponse, Response};
use axum::routing::{get, post};
use tokio::time::Duration;

use super::admin::JAVA_STACKS;
use super::serve::Deadline;
use crate::runtime::Tasks;
use uniffle_profile::{Format, PermitSource, ProfileError, cpu, heap, tasks};

/// Default duration of a CPU profile, as in `go tool pprof`.
const SECONDS_DEFAULT: u64 = 30;

/// Returns the routes that change nothing. Both listeners use clones of one router, which share the
/// limits. The heap profile is also at riffle's path, and the task dump at Java's.
pub fn routes(running: Tasks) -> Router {
    let profiles = Profiles { running, permits: PermitSource::new(), stacks: PermitSource::new() };
    Router::new()
        .route("/debug/pprof/profile", get(cpu_profile))
        .route("/debug/pprof/heap", get(heap_profile))
        .route("/debug/heap/profile", get(heap_profile))
        .route("/debug/tasks", get(task_dump))
        .route(JAVA_STACKS, get(task_dump))
        .with_state(profiles)
}

/// Source of task dumps, and the limits.
#[derive(Debug, Clone)]
struct Profiles {
    running: Tasks,
    /// Permit for all kinds of profiles and dumps.
    permits: PermitSource,
    /// Permit for dumps. A dump whose client has disconnected keeps it until it ends. Profiles can
    /// be taken meanwhile, to find out why it hangs.
    stacks: PermitSource,
}

/// Adds the paths that change the process, for the administration listener.
pub fn admin_routes(routes: Router) -> Router {
    routes
        .route("/admin/heap-profile/activate", post(|| async { done("active", heap::activate()) }))
        .route("/admin/heap-profile/deactivate", post(|| async { done("inactive", heap::deactivate()) }))
}

fn done(state: &'static str, result: Result<(), ProfileError>) -> Response {
    match result {
        Ok(()) => axum::Json(serde_json::json!({ "heap_profiling": state })).into_response(),
        Err(error) => refused(&error),
    }
}

async fn cpu_profile(
    State(profiles): State<Profiles>,
    Extension(deadline): Extension<Deadline>,
    RawQuery(query): RawQuery,
) -> Response {
    let request = match CpuRequest::parse(query.as_deref().unwrap_or_default()) {
        Ok(request) => request,
        Err(why) => return bad_request(why),
    };
    let permit = match profiles.permits.try_take() {
        Ok(permit) => permit,
        Err(error) => return refused(&error),
    };
    deadline.extend(request.duration);
    let (frequency, format) = (request.frequency, request.format);
    let profile = cpu::profile(&permit, request.duration, frequency, format, &profiles.running).await;
    answer("cpu", format, profile)
}

async fn heap_profile(State(profiles): State<Profiles>, RawQuery(query): RawQuery) -> Response {
    let format = parameters(query.as_deref().unwrap_or_default(), &["format"])
        .and_then(|[text]| text.map_or(Ok(Format::Protobuf), format));
    let format = match format {
        Ok(format) => format,
        Err(why) => return bad_request(why),
    };
    match profiles.permits.try_take() {
        Ok(permit) => answer("heap", format, heap::profile(&permit, format).await),
        Err(error) => refused(&error),
    }
}

async fn task_dump(State(profiles): State<Profiles>) -> Response {
    match dumped(&profiles).await {
        Ok(text) => text.into_response(),
        Err(error) => refused(&error),
    }
}

async fn dumped(profiles: &Profiles) -> Result<String, ProfileError> {
    let permit = profiles.permits.try_take()?;
    let asking = profiles.stacks.try_take()?;
    tasks::dump(&profiles.running, &permit, asking).await
}

/// Validated parameters of a CPU profile.
#[derive(Debug, PartialEq, Eq)]
struct CpuRequest {
    duration: Duration,
    frequency: u32,
    format: Format,
}

impl CpuRequest {
    fn parse(query: &str) -> Result<Self, String> {
        let [seconds, frequency, text] = parameters(query, &["seconds", "frequency", "format"])?;
        let seconds = seconds.map_or(Ok(SECONDS_DEFAULT), |text| bounded("seconds", text, cpu::SECONDS))?;
        let frequencies = u64::from(*cpu::FREQUENCY.start())..=u64::from(*cpu::FREQUENCY.end());
        let frequency = frequency
            .map_or(Ok(cpu::FREQUENCY_DEFAULT.into()), |text| bounded("frequency", text, frequencies))?;
        Ok(Self {
            duration: Duration::from_secs(seconds),
            frequency: u32::try_from(frequency).unwrap_or(cpu::FREQUENCY_DEFAULT),
            format: text.map_or(Ok(Format::Protobuf), format)?,
        })
    }
}

/// Returns the values of the parameters in `known`, in that order.
fn parameters<'q, const N: usize>(
    query: &'q str,
    known: &[&'static str; N],
) -> Result<[Option<&'q str>; N], String> {
    let mut values = [None; N];
    for pair in query.split('&').filter(|pair| !pair.is_empty()) {
        let (name, value) = pair.split_once('=').unwrap_or((pair, ""));
        let Some(at) = known.iter().position(|known| *known == name) else {
            return Err(format!(
                "unknown parameter {:?}; must be one of: {}",
                shortened(name),
                known.join(", ")
            ));
        };
        if values[at].replace(value).is_some() {
            return Err(format!("{name} is given twice"));
        }
    }
    Ok(values)
}

fn bounded(name: &str, text: &str, bounds: std::ops::RangeInclusive<u64>) -> Result<u64, String> {
    text.parse().ok().filter(|value| bounds.contains(value)).ok_or_else(|| {
        let shown = shortened(text);
        format!("{name}={shown}: must be an integer from {} to {}", bounds.start(), bounds.end())
    })
}

fn format(text: &str) -> Result<Format, String> {
    match text {
        "pprof" | "protobuf" | "pb" => Ok(Format::Protobuf),
        "svg" | "flamegraph" => Ok(Format::Svg),
        _ => Err(format!("format={}: must be pprof or svg", shortened(text))),
    }
}

/// Shortens a client's text for an error message.
fn shortened(text: &str) -> String {
    text.chars().take(40).collect()
}

fn answer(name: &str, format: Format, profile: Result<Vec<u8>, ProfileError>) -> Response {
    match (profile, format) {
        (Err(error), _) => refused(&error),
        (Ok(svg), Format::Svg) => ([(header::CONTENT_TYPE, "image/svg+xml")], svg).into_response(),
        (Ok(profile), Format::Protobuf) => {
            let disposition = format!("attachment; filename=\"{name}.pb\"");
            let headers = [
                (header::CONTENT_TYPE, "application/octet-stream"),
                (header::CONTENT_DISPOSITION, &disposition),
            ];
            (headers, profile).into_response()
        }
    }
}

fn bad_request(why: String) -> Response {
    (StatusCode::BAD_REQUEST, why + "\n").into_response()
}

fn refused(error: &ProfileError) -> Response {
    let status = match error {
        ProfileError::Busy | ProfileError::Inactive => StatusCode::CONFLICT,
        ProfileError::Unavailable(_) => StatusCode::NOT_IMPLEMENTED,
        ProfileError::Failed(why) => {
            tracing::error!(%why, "profile failed");
            StatusCode::INTERNAL_SERVER_ERROR
        }
    };
    (status, format!("{error}\n")).into_response()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn absurd_parameters_are_refused_with_their_name() {
        let long = format!("seconds={}", "9".repeat(8000));
        let cases = [
            ("seconds=0", "seconds=0: must be an integer from 1 to 300"),
            ("seconds=301", "seconds=301:"),
            ("seconds=-1", "seconds=-1:"),
            ("seconds=1e9", "seconds=1e9:"),
            ("seconds", "seconds=:"),
            (long.as_str(), "seconds=9999"),
            ("frequency=1001", "frequency=1001: must be an integer from 1 to 1000"),
            ("frequency=0", "frequency=0:"),
            ("format=exe", "format=exe: must be pprof or svg"),
            ("seconds=1&seconds=2", "seconds is given twice"),
            ("sekunden=1", "unknown parameter \"sekunden\"; must be one of: seconds, frequency, format"),
        ];
        for (query, expected) in cases {
            let why = CpuRequest::parse(query).unwrap_err();
            assert!(why.starts_with(expected) && why.len() < 200, "{query}: {why}");
        }
    }

    #[tokio::test]
    async fn one_profile_or_dump_runs_at_a_time() {
        let profiles =
            Profiles { running: Tasks::new(), permits: PermitSource::new(), stacks: PermitSource::new() };
        let dump = async || task_dump(State(profiles.clone())).await.status();
        for permits in [&profiles.permits, &profiles.stacks] {
            let first = permits.try_take().unwrap();
            assert_eq!(dump().await, StatusCode::CONFLICT);
            drop(first);
        }
        let first = profiles.permits.try_take().unwrap();
        let heap = heap_profile(State(profiles.clone()), RawQuery(None)).await;
        assert_eq!(heap.status(), StatusCode::CONFLICT);
        drop(first);
        assert_eq!(dump().await, StatusCode::OK);
    }

    #[test]
    fn parameters_have_defaults() {
        let request = CpuRequest::parse("").unwrap();
        assert_eq!(
            (request.duration.as_secs(), request.frequency, request.format),
            (30, 99, Format::Protobuf)
        );
        let request = CpuRequest::parse("format=svg&seconds=300&frequency=1000").unwrap();
        assert_eq!((request.duration.as_secs(), request.frequency, request.format), (300, 1000, Format::Svg));
    }
}
