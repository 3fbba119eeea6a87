//! Sends heartbeats to every coordinator of the quorum.
//!
//! Each coordinator has its own task, timer and connection, so that a slow or half-open one does
//! not delay others. [`ReportSource`] provides the content; the worker starts heartbeats when all
//! listeners are bound. Invariants: a heartbeat, with its connect, must end within the interval.
//! Failures never stop the heartbeats. A change of state is logged once.

use std::fmt;
use std::net::Ipv6Addr;
use std::str::FromStr;
use std::sync::Arc;
use std::time::Duration;

use prometheus::{IntCounterVec, IntGauge, Registry};
use tokio::sync::watch;
use tokio::time::{MissedTickBehavior, interval};
use tonic::transport::{Channel, Endpoint};

use super::ReportSource;
use crate::proto::StatusCode;
use crate::proto::coordinator_server_client::CoordinatorServerClient;
use uniffle_base::clock::timeout;
use uniffle_base::metrics;
use uniffle_base::runtime::Tasks;
use uniffle_base::schema::kind::{HOUR, Kind, SECOND, list, parsed, seconds};
use uniffle_base::schema::section;

/// Address of a coordinator: `host:port`, `1.2.3.4:port` or `[v6]:port`. The name is resolved at
/// each connect.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct CoordinatorAddress(String);

/// A text that is not `host:port`.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{0:?} is not a coordinator address, expected host:port")]
pub struct InvalidAddress(String);

impl FromStr for CoordinatorAddress {
    type Err = InvalidAddress;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let text = text.trim();
        let invalid = || InvalidAddress(text.to_owned());
        let (host, port) = text.rsplit_once(':').ok_or_else(invalid)?;
        let is_port = port.parse::<u16>().is_ok_and(|port| port != 0);
        let is_host = match host.strip_prefix('[').and_then(|host| host.strip_suffix(']')) {
            Some(literal) => literal.parse::<Ipv6Addr>().is_ok(),
            None => {
                let is_host_char = |c: char| c.is_ascii_alphanumeric() || matches!(c, '.' | '-' | '_');
                (1..=253).contains(&host.len()) && host.chars().all(is_host_char)
            }
        };
        if is_port && is_host { Ok(Self(text.to_owned())) } else { Err(invalid()) }
    }
}

impl CoordinatorAddress {
    /// Returns the host name or IP address, IPv6 without brackets.
    pub fn host(&self) -> &str {
        let host = self.0.rsplit_once(':').map_or("", |(host, _)| host);
        host.trim_start_matches('[').trim_end_matches(']')
    }
}

impl fmt::Display for CoordinatorAddress {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

section! {
    /// Settings of the heartbeats.
    pub struct HeartbeatConfig {
        /// Coordinators to register with. Default: none; the worker runs its own embedded
        /// coordinator.
        #[key(
            "coordinator_quorum", list(16, address()), Restart,
            example "[\"coordinator1:21000\", \"coordinator2:21000\"]"
        )]
        pub coordinators: Vec<CoordinatorAddress> = Vec::new(),
        /// Interval and timeout of heartbeats to the coordinators.
        #[key("heartbeat_interval_seconds", seconds(SECOND / 10..=HOUR), AtOnce)]
        pub interval: Duration = 10 * SECOND,
    }
}

fn address() -> Kind<CoordinatorAddress> {
    let allowed = "entries of the form host:port, such as \"coordinator1:21000\"";
    parsed("host:port", move |text| text.parse().map_err(|_| allowed.to_owned()))
}

/// Outcome of the latest heartbeat to a coordinator.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Link {
    /// No heartbeat has ended yet.
    Untried,
    /// The coordinator accepted the heartbeat.
    Up {
        /// Number of consecutive accepted heartbeats.
        beats: u64,
    },
    /// The heartbeat failed or was refused.
    Down {
        /// Reason of the latest failure.
        reason: String,
    },
}

/// Handle of the running heartbeats. They end with their `Tasks`, not with this handle.
#[derive(Debug, Clone)]
pub struct Heartbeats {
    links: Vec<(CoordinatorAddress, watch::Receiver<Link>)>,
    nudge: Arc<watch::Sender<()>>,
    pace: Arc<watch::Sender<Duration>>,
}

metrics::table! {
    /// Metrics of the heartbeats.
    #[derive(Clone)]
    pub(crate) struct Metrics {
        heartbeats: IntCounterVec["result"] = "coordinator_heartbeats_total", "Heartbeats, by result";
        up: IntGauge = "coordinators_up", "Coordinators that accepted the latest heartbeat";
    }
}

/// Starts one task per coordinator, which sends its first heartbeat at once.
///
/// # Errors
/// If a metric of the same name is already registered.
pub fn start(
    config: HeartbeatConfig,
    source: &ReportSource,
    tasks: &Tasks,
    registry: &Registry,
) -> Result<Heartbeats, prometheus::Error> {
    let metrics = Metrics::new(registry)?;
    let (nudge, _) = watch::channel(());
    let nudge = Arc::new(nudge);
    let pace = Arc::new(watch::Sender::new(config.interval));
    let mut links = Vec::with_capacity(config.coordinators.len());
    for address in config.coordinators {
        let (state, link) = watch::channel(Link::Untried);
        let beater = Beater {
            address: address.clone(),
            interval: config.interval,
            pace: pace.subscribe(),
            source: source.clone(),
            metrics: metrics.clone(),
            state,
            client: None,
        };
        let (nudged, cancelled) = (nudge.subscribe(), tasks.cancelled());
        tasks.spawn("heartbeat", beater.run(nudged, cancelled));
        links.push((address, link));
    }
    Ok(Heartbeats { links, nudge, pace })
}

impl Heartbeats {
    /// Sends a heartbeat now, because the worker's state has changed.
    pub fn beat_now(&self) {
        self.nudge.send_replace(());
    }

    /// Changes the interval, which is also the deadline of a heartbeat, and sends one at once.
    pub fn set_interval(&self, interval: Duration) {
        self.pace.send_replace(interval);
    }

    /// Returns the coordinators and their links, in the order of the configuration.
    pub fn links(&self) -> impl Iterator<Item = (&CoordinatorAddress, Link)> {
        self.links.iter().map(|(address, link)| (address, link.borrow().clone()))
    }

    /// Returns the link of coordinator `at` as a receiver of changes.
    pub fn watch(&self, at: usize) -> Option<watch::Receiver<Link>> {
        self.links.get(at).map(|(_, link)| link.clone())
    }
}

/// The heartbeats to one coordinator.
struct Beater {
    address: CoordinatorAddress,
    interval: Duration,
    pace: watch::Receiver<Duration>,
    source: ReportSource,
    metrics: Metrics,
    state: watch::Sender<Link>,
    client: Option<CoordinatorServerClient<Channel>>,
}

impl Beater {
    async fn run(mut self, mut nudged: watch::Receiver<()>, cancelled: impl Future<Output = ()>) {
        let mut ticks = interval(self.interval);
        ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
        tokio::pin!(cancelled);
        loop {
            // Without the handle `changed` always fails, which leaves only the ticks.
            tokio::select! {
                biased;
                () = &mut cancelled => return,
                _ = ticks.tick() => {}
                Ok(()) = nudged.changed() => {}
                Ok(()) = self.pace.changed() => {
                    self.interval = *self.pace.borrow_and_update();
                    ticks = interval(self.interval);
                    ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
                    continue;
                }
            }
            let outcome = tokio::select! {
                biased;
                () = &mut cancelled => return,
                outcome = timeout(self.interval, self.beat()) => outcome,
            };
            let outcome = outcome.unwrap_or_else(|_| Err(format!("no answer within {:?}", self.interval)));
            self.note(outcome);
        }
    }

    /// Sends one heartbeat, over the open connection or a new one. The connection is kept only
    /// after an answer: otherwise it may be half open, or the name may have a new address.
    async fn beat(&mut self) -> Result<(), String> {
        let mut client = match self.client.take() {
            Some(client) => client,
            None => CoordinatorServerClient::new(self.connect().await?),
        };
        let report = self.source.now_on_thread().await.map_err(|error| describe(&error))?;
        let mut request = tonic::Request::new(report.into_request());
        request.set_timeout(self.interval);
        let answer = client.heartbeat(request).await.map_err(|status| describe(&status))?.into_inner();
        self.client = Some(client);
        match StatusCode::try_from(answer.status) {
            Ok(StatusCode::Success) => Ok(()),
            _ => Err(format!("refused with status {}: {}", answer.status, short(&answer.ret_msg))),
        }
    }

    async fn connect(&self) -> Result<Channel, String> {
        let endpoint =
            Endpoint::from_shared(format!("http://{}", self.address)).map_err(|error| describe(&error))?;
        endpoint.tcp_nodelay(true).connect().await.map_err(|error| describe(&error))
    }

    fn note(&self, outcome: Result<(), String>) {
        let address = &self.address;
        let result = if outcome.is_ok() { "ok" } else { "failed" };
        self.metrics.heartbeats.with_label_values(&[result]).inc();
        self.state.send_modify(|link| match outcome {
            Ok(()) => {
                let beats = if let Link::Up { beats } = link { *beats } else { 0 };
                if beats == 0 {
                    self.metrics.up.inc();
                    tracing::info!(coordinator = %address, "coordinator accepts heartbeats");
                }
                *link = Link::Up { beats: beats + 1 };
            }
            Err(reason) => {
                if matches!(link, Link::Up { .. }) {
                    self.metrics.up.dec();
                }
                if !matches!(link, Link::Down { .. }) {
                    tracing::warn!(coordinator = %address, %reason, "heartbeat failed; retrying forever");
                }
                *link = Link::Down { reason };
            }
        });
    }
}

/// Returns the error with all its causes. tonic's own text is only "transport error".
fn describe(error: &(dyn std::error::Error + 'static)) -> String {
    let mut text = error.to_string();
    let mut cause = error.source();
    while let Some(error) = cause {
        text.push_str(": ");
        text.push_str(&error.to_string());
        cause = error.source();
    }
    short(&text).to_owned()
}

/// Returns at most 300 bytes of a text from the other side.
fn short(text: &str) -> &str {
    &text[..text.floor_char_boundary(300)]
}

#[cfg(test)]
mod tests;
