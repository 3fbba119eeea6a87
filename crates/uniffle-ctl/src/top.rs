//! Live view of the workers and their applications, on the terminal's alternate screen.
//!
//! It uses plain escape sequences and no keys. Ctrl-C, SIGTERM and SIGHUP end it and restore the
//! terminal. Rates come from the workers' own history, so a single view has them too. The view is
//! printed once if stdout is not a terminal.

use std::convert::Infallible;
use std::io::{self, IsTerminal as _, Write as _};
use std::time::Duration;

use serde_json::{Value, json};
use tokio::signal::unix::{Signal, SignalKind, signal};

use crate::answers::{WorkerAnswer, all_of, ask_all, failures, pretty, worst};
use crate::arguments::{Arguments, Output};
use crate::http::{CommandFailure, HttpClient};
use crate::lists::PayloadRates;
use crate::table::Width;
use crate::workers::{WorkerTarget, selected};
use crate::{lists, lost, rows, say};

/// Number of applications shown, per worker and in total.
const APPS: usize = 20;

/// Time over which rates are computed. Workers take a sample every two seconds.
const RATE_OVER_MS: u64 = 10_000;

const ENTER: &str = "\x1b[?1049h\x1b[?25l";
const LEAVE: &str = "\x1b[?25h\x1b[?1049l";

/// Shows the workers that `arguments` select, initially `targets`: every `pace`, or once without
/// one. Returns the exit code of the single view, or 0 once a signal ends the live view.
pub(crate) async fn run(
    client: &HttpClient,
    arguments: &Arguments,
    targets: Vec<WorkerTarget>,
    pace: Option<Duration>,
) -> Result<u8, CommandFailure> {
    let pace = pace.filter(|_| std::io::stdout().is_terminal());
    let Some(pace) = pace else {
        let looked = look(client, &targets).await;
        say(&match arguments.output {
            Output::Json => pretty(&all_of(&looked)),
            Output::Csv => rows::csv(&arguments.call, &looked),
            Output::Text => screen(&looked, Width::of_stdout()),
        });
        return Ok(worst(&looked));
    };
    // Installed before the screen is switched, so that no signal ends the program on the alternate
    // screen.
    let mut ends = EndSignals::new().map_err(|error| CommandFailure::Usage(format!("signals: {error}")))?;
    let _other = OtherScreen::enter();
    tokio::select! {
        () = ends.any() => Ok(0),
        never = redraw(client, arguments, targets, pace) => match never {},
    }
}

/// Signals that end the view.
struct EndSignals([Signal; 3]);

impl EndSignals {
    fn new() -> io::Result<Self> {
        let [interrupt, terminate, hangup] =
            [SignalKind::interrupt(), SignalKind::terminate(), SignalKind::hangup()].map(signal);
        Ok(Self([interrupt?, terminate?, hangup?]))
    }

    async fn any(&mut self) {
        let Self([interrupt, terminate, hangup]) = self;
        tokio::select! {
            _ = interrupt.recv() => {}
            _ = terminate.recv() => {}
            _ = hangup.recv() => {}
        }
    }
}

/// The terminal's alternate screen without a cursor. Restores the original screen on drop.
struct OtherScreen;

impl OtherScreen {
    fn enter() -> Self {
        draw(ENTER);
        Self
    }
}

impl Drop for OtherScreen {
    fn drop(&mut self) {
        draw(LEAVE);
    }
}

async fn redraw(
    client: &HttpClient,
    arguments: &Arguments,
    mut targets: Vec<WorkerTarget>,
    pace: Duration,
) -> Infallible {
    loop {
        let looked = look(client, &targets).await;
        let width = Width::of_stdout();
        let picture = screen(&looked, width);
        let size = rustix::termios::tcgetwinsize(std::io::stdout()).ok();
        let rows = size.map_or(50, |size| size.ws_row.max(4));
        let mut text = "\x1b[H".to_owned();
        let lines: Vec<_> = picture.lines().take(usize::from(rows) - 1).collect();
        for line in lines {
            text.extend(line.chars().take(width.columns));
            text.push_str("\x1b[K\r\n");
        }
        text.push_str("\x1b[J");
        draw(&text);
        tokio::time::sleep(pace).await;
        targets = latest(client, arguments, targets).await;
    }
}

/// Returns the workers that `arguments` select now, because workers join and leave. Returns
/// `before` if no coordinator answers, or if an explicitly named worker is no longer known.
async fn latest(client: &HttpClient, arguments: &Arguments, before: Vec<WorkerTarget>) -> Vec<WorkerTarget> {
    if arguments.coordinator.is_empty() {
        return before;
    }
    let fleet = lost::with_lost(client, arguments, before.clone()).await;
    selected(arguments, fleet.targets).unwrap_or(before)
}

fn draw(text: &str) {
    let mut stdout = std::io::stdout().lock();
    let _ = stdout.write_all(text.as_bytes()).and_then(|()| stdout.flush());
}

async fn look<'t>(client: &HttpClient, targets: &'t [WorkerTarget]) -> Vec<(&'t WorkerTarget, WorkerAnswer)> {
    ask_all(targets, |target| look_at(client, target)).await
}

async fn look_at(client: &HttpClient, target: &WorkerTarget) -> WorkerAnswer {
    lost::require_known(target)?;
    let status = client.get(&target.http, "/api/v1/status").await?;
    let apps = client.get(&target.http, &format!("/api/v1/apps?limit={APPS}")).await?;
    // From the worker's clock, which may differ from the local one.
    let started = status["node"]["started_ms"].as_u64().unwrap_or(0);
    let up =
        Duration::from_secs_f64(status["node"]["uptime_seconds"].as_f64().unwrap_or(0.0).clamp(0.0, 1e9));
    let now = started.saturating_add(u64::try_from(up.as_millis()).unwrap_or(0));
    let after = now.saturating_sub(RATE_OVER_MS);
    let history = client.get(&target.http, &format!("/api/v1/history?after_ms={after}")).await?;
    let rates = rates(&history);
    let (received, read) = (rates.map(|rates| rates.received), rates.map(|rates| rates.read));
    Ok(json!({ "status": status, "apps": apps["apps"],
        "received_bytes_per_second": received, "read_bytes_per_second": read }))
}

/// Returns the payload rates between the first and the last sample, or `None` without two samples.
#[expect(clippy::cast_precision_loss, reason = "a rate for people")]
fn rates(history: &Value) -> Option<PayloadRates> {
    let samples = history["samples"].as_array()?;
    let (first, last) = (samples.first()?, samples.last()?);
    let grown = |field: &str| Some(last[field].as_u64()?.saturating_sub(first[field].as_u64()?) as f64);
    let seconds = grown("at_ms").filter(|ms| *ms > 0.0)? / 1000.0;
    Some(PayloadRates { received: grown("received_bytes")? / seconds, read: grown("read_bytes")? / seconds })
}

/// Formats the view.
fn screen(looked: &[(&WorkerTarget, WorkerAnswer)], width: Width) -> String {
    let answered = || looked.iter().filter_map(|(_, answer)| answer.as_ref().ok());
    let sum = |field: &str| answered().filter_map(|it| it["status"]["memory"][field].as_u64()).sum::<u64>();
    let (used, capacity) = (sum("used_bytes"), sum("capacity_bytes"));
    let share = used.saturating_mul(100).checked_div(capacity).unwrap_or(0);
    let lost = looked.iter().filter(|(target, _)| target.is_lost).count();
    let lost = if lost == 0 { String::new() } else { format!(", {lost} lost") };
    let (workers, answering) = (counted(looked.len()), answered().count());
    let blocks = answered().filter_map(|it| it["status"]["apps"]["lost_blocks"].as_u64()).sum::<u64>();
    let blocks = if blocks == 0 { String::new() } else { format!("; {blocks} blocks lost") };
    let mut text =
        format!("{workers}, {answering} answering{lost}; {share} % of their memory in use{blocks}\n\n");
    let rates = |it: &Value| {
        let (received, read) = (&it["received_bytes_per_second"], &it["read_bytes_per_second"]);
        Some(PayloadRates { received: received.as_f64()?, read: read.as_f64()? })
    };
    text.push_str(&lists::workers(looked, |it| &it["status"], Some(&rates), width));
    let unanswered = failures(looked).filter(|(target, _)| !target.is_lost);
    for (target, failure) in unanswered {
        let (name, failure) = (&target.name, failure.to_string());
        // Without a coordinator the name is the URL, with which the failure begins.
        let named =
            if failure.starts_with(&format!("{name}:")) { failure } else { format!("{name}: {failure}") };
        text.push_str(&format!("{}\n", width.wrap(&named, 2)));
    }
    text.push('\n');
    text.push_str(&lists::apps(answered(), APPS, width));
    text
}

fn counted(workers: usize) -> String {
    if workers == 1 { "1 worker".to_owned() } else { format!("{workers} workers") }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::http::ListenerAddress;
    use crate::lost::tests::{answer_one, listening_worker};

    const WIDTH: Width = Width { columns: 80, is_strict: true };

    #[test]
    fn rates_cover_first_to_last_sample() {
        let sample = |at_ms: u64, received: u64| json!({ "at_ms": at_ms, "received_bytes": received, "read_bytes": 0 });
        let history = json!({ "samples": [sample(1000, 0), sample(3000, 5), sample(5000, 4096)] });
        assert_eq!(rates(&history), Some(PayloadRates { received: 1024.0, read: 0.0 }));
        assert_eq!(rates(&json!({ "samples": [sample(1, 1)] })), None);
        assert_eq!(rates(&json!({})), None);
    }

    #[tokio::test]
    async fn rate_of_one_sample_is_unknown() {
        let (listener, target) = listening_worker("w-1").await;
        let sample = json!({ "samples": [{ "at_ms": 1, "received_bytes": 5, "read_bytes": 5 }] }).to_string();
        let serving = async {
            for body in ["{}", "{}", &sample] {
                answer_one(&listener, 200, body).await;
            }
        };
        let client = HttpClient::of(None, Duration::from_secs(10));
        let (looked, ()) = tokio::join!(look_at(&client, &target), serving);
        let rate = looked.unwrap_or_else(|failure| panic!("{failure}"))["received_bytes_per_second"].clone();
        assert_eq!(rate, Value::Null);
    }

    fn target() -> WorkerTarget {
        let base = ListenerAddress { is_tls: false, host: "w".to_owned(), port: 1 };
        WorkerTarget { name: "w-1".to_owned(), http: base.clone(), admin: base, is_lost: false }
    }

    #[tokio::test]
    async fn known_workers_stay_without_coordinator() {
        #[derive(clap::Parser)]
        struct Line {
            #[command(flatten)]
            arguments: Arguments,
        }
        let line = |whom: [&str; 2]| {
            let line = ["ctl", "--timeout", "1"].into_iter().chain(whom).chain(["top"]);
            <Line as clap::Parser>::try_parse_from(line).unwrap_or_else(|error| panic!("{error}")).arguments
        };
        // The listener is dropped, so the port refuses connections.
        let closed =
            std::net::TcpListener::bind("127.0.0.1:0").and_then(|listener| listener.local_addr()).unwrap();
        let client = HttpClient::of(None, Duration::from_secs(1));
        for whom in [["--coordinator", &closed.to_string()], ["--worker", "w"]] {
            assert_eq!(latest(&client, &line(whom), vec![target()]).await, [target()]);
        }
    }

    #[test]
    fn unresponsive_worker_is_named() {
        let target = target();
        let looked = [
            (&target, Err(CommandFailure::Unreachable("http://w:1: refused".to_owned()))),
            (
                &target,
                Ok(
                    json!({ "status": { "node": { "state": "active" }, "apps": { "lost_blocks": 3 } }, "apps": [] }),
                ),
            ),
        ];
        let text = screen(&looked, WIDTH);
        assert!(
            text.starts_with("2 workers, 1 answering; 0 % of their memory in use; 3 blocks lost\n"),
            "{text}"
        );
        assert!(text.contains("w-1: http://w:1: refused") && text.contains("active"), "{text}");
    }

    #[test]
    fn worker_given_by_url_is_listed_once() {
        let base = ListenerAddress { is_tls: false, host: "w".to_owned(), port: 1 };
        let target = WorkerTarget { name: base.to_string(), http: base.clone(), admin: base, is_lost: false };
        let text =
            screen(&[(&target, Err(CommandFailure::Unreachable("http://w:1: refused".to_owned())))], WIDTH);
        assert!(text.starts_with("1 worker, 0 answering; 0 %"), "{text}");
        assert_eq!(text.matches("http://w:1").count(), 2, "expected a row and its reason: {text}");
    }
}
