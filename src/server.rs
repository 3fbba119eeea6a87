//! The composition root: builds every part from the [`Config`], hands out handles, stops in order.
//!
//! Start: bind the listeners, build the tiers bottom-up, open the doors, and only then tell a coordinator. Stop: refuse
//! tickets, close the doors (connections finish what they have begun), then the background tasks.

mod admin;
mod health;
mod parts;
mod report;

use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::sync::Arc;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use anyhow::Context as _;
use axum::Router;
use prometheus::Registry;
use tokio::net::TcpListener;
use tonic::service::RoutesBuilder;

use crate::app::AppRegistry;
use crate::config::{Config, startup_banner};
use crate::coordinator::embedded::EmbeddedCoordinator;
use crate::coordinator::{NodeReport, ReportSource, heartbeat, identity};
use crate::flush::Flusher;
use crate::grpc::GrpcServer;
use crate::http::HttpServer;
use crate::http::admin::AdminServer;
use crate::memory::Memory;
use crate::metrics;
use crate::proto::coordinator_server_server::CoordinatorServerServer;
use crate::runtime::Tasks;
use crate::service::{LocalTier, Service};
use crate::store::LocalStore;
use crate::tcp::TcpDoor;
use crate::telemetry::LogFilter;

use self::admin::Live;
use self::health::Watch;

/// How long connections may take to end after the doors were told to close.
const DRAIN_DEADLINE: Duration = Duration::from_secs(30);

/// Where the doors are, as bound.
#[derive(Debug, Clone, Copy)]
pub struct Addresses {
    /// gRPC, and the embedded coordinator where there is one.
    pub grpc: SocketAddr,
    /// HTTP.
    pub http: SocketAddr,
    /// Raw TCP.
    pub urpc: Option<SocketAddr>,
    /// Administration.
    pub admin: Option<SocketAddr>,
}

/// A running worker.
#[derive(Debug)]
pub struct Worker {
    addresses: Addresses,
    ip: IpAddr,
    apps: Arc<AppRegistry>,
    memory: Arc<Memory>,
    local: Option<LocalTier>,
    service: Arc<Service>,
    registry: Registry,
    live: Arc<Live>,
    doors: Tasks,
    background: Tasks,
}

/// What a worker is given of the process that it runs in. The default is a worker among others.
#[derive(Debug, Clone, Default)]
pub struct Surroundings {
    /// The log filter, if it is this worker's to change.
    pub log: Option<LogFilter>,
}

/// Listeners, bound before anything else so that a port in use is the first thing to be told.
struct Listeners {
    grpc: TcpListener,
    http: TcpListener,
    urpc: Option<TcpListener>,
    admin: Option<TcpListener>,
}

impl Listeners {
    async fn bind(config: &Config) -> anyhow::Result<Self> {
        let optional = async |address, port: Option<u16>, key| match port {
            Some(port) => bind(address, port, key).await.map(Some),
            None => Ok(None),
        };
        Ok(Self {
            grpc: bind(config.bind_address, config.grpc_port, "grpc_port").await?,
            http: bind(config.bind_address, config.http_port, "http_port").await?,
            urpc: optional(config.bind_address, config.urpc_port, "urpc_port").await?,
            admin: optional(config.admin.bind_address, config.admin.port, "admin.port").await?,
        })
    }

    fn addresses(&self) -> anyhow::Result<Addresses> {
        let optional =
            |listener: &Option<TcpListener>| listener.as_ref().map(TcpListener::local_addr).transpose();
        Ok(Addresses {
            grpc: self.grpc.local_addr().context("grpc_port has no address")?,
            http: self.http.local_addr().context("http_port has no address")?,
            urpc: optional(&self.urpc).context("urpc_port has no address")?,
            admin: optional(&self.admin).context("admin.port has no address")?,
        })
    }
}

impl Worker {
    /// Starts a worker; it runs in the current runtime until [`Worker::stop`].
    ///
    /// # Errors
    /// A port in use, a data directory that is not ours or in use, memory that can not be mapped.
    pub async fn start(config: &Config) -> anyhow::Result<Self> {
        Self::start_in(Surroundings::default(), config).await
    }

    /// As [`Worker::start`], as a part of `surroundings`.
    ///
    /// # Errors
    /// See [`Worker::start`].
    pub async fn start_in(surroundings: Surroundings, config: &Config) -> anyhow::Result<Self> {
        let listeners = Listeners::bind(config).await?;
        let addresses = listeners.addresses()?;
        let ip = match config.advertised_ip {
            Some(ip) => ip,
            None => identity::worker_ip().context("no usable address of this machine; set WORKER_IP")?,
        };
        let registry = metrics::registry()?;
        let (doors, background) = (Tasks::new(), Tasks::new());
        let memory = Memory::new(&parts::memory(config), &registry).with_context(|| {
            format!("can not map memory_store.capacity = {} bytes", config.memory.capacity_bytes)
        })?;
        let local = match config.store_type.has_local() {
            true => Some(start_local(config, &memory, &background, &registry).await?),
            false => None,
        };
        let apps = Arc::new(AppRegistry::new(parts::app(config)));
        let service = Service::new(
            parts::service(config),
            Arc::clone(&apps),
            Arc::clone(&memory),
            local.clone(),
            background.clone(),
            &registry,
        )?;
        let live = Arc::new(Live::new(config, surroundings.log));
        let worker = Self { addresses, ip, apps, memory, local, service, registry, live, doors, background };
        worker.open_doors(config, listeners)?;
        Ok(worker)
    }

    fn open_doors(&self, config: &Config, listeners: Listeners) -> anyhow::Result<()> {
        let expiry = Arc::clone(&self.service)
            .run_expiry(config.memory.ticket_check_interval, parts::app_check_interval(config));
        self.background.spawn("expiry", expiry);
        let embedded = if config.coordinator_quorum.is_empty() {
            Some(EmbeddedCoordinator::new(parts::embedded(config), &self.registry)?)
        } else {
            None
        };
        let mut routes = RoutesBuilder::default();
        if let Some(embedded) = &embedded {
            routes.add_service(CoordinatorServerServer::new(embedded.clone()));
        }
        let service = Arc::clone(&self.service);
        GrpcServer::new(
            parts::grpc(config),
            listeners.grpc,
            routes,
            service,
            self.doors.clone(),
            &self.registry,
        )?
        .start();
        if let Some(listener) = listeners.urpc {
            TcpDoor::start(
                parts::tcp(config),
                listener,
                Arc::clone(&self.service),
                &self.doors,
                &self.registry,
            )?;
        }
        let refresh = self.refresher();
        HttpServer::start(
            parts::http(config),
            listeners.http,
            self.registry.clone(),
            Arc::new(refresh),
            self.readiness(),
            &self.doors,
        )?;
        if let Some(listener) = listeners.admin {
            let hooks = admin::hooks(Arc::clone(&self.service), &self.live);
            let mounted = Router::new();
            AdminServer::start(listener, admin::token(config)?, hooks, mounted, &self.registry, &self.doors)?;
        }
        self.announce(config, embedded)
    }

    /// Where the doors are.
    #[must_use]
    pub fn addresses(&self) -> Addresses {
        self.addresses
    }

    /// The address told to clients.
    #[must_use]
    pub fn ip(&self) -> IpAddr {
        self.ip
    }

    /// The service behind the doors.
    #[must_use]
    pub fn service(&self) -> &Arc<Service> {
        &self.service
    }

    /// The memory tier.
    #[must_use]
    pub fn memory(&self) -> &Arc<Memory> {
        &self.memory
    }

    /// The applications.
    #[must_use]
    pub fn apps(&self) -> &Arc<AppRegistry> {
        &self.apps
    }

    /// The tier below memory.
    #[must_use]
    pub fn local(&self) -> Option<&LocalTier> {
        self.local.as_ref()
    }

    /// The registry of metrics.
    #[must_use]
    pub fn registry(&self) -> &Registry {
        &self.registry
    }

    /// Stops in order and waits until no task is left. Returns how many tasks had to be left behind (a disk call that
    /// hangs); 0 is the rule.
    pub async fn stop(self) -> usize {
        self.service.status().stop();
        self.doors.cancel();
        if tokio::time::timeout(DRAIN_DEADLINE, self.doors.drained()).await.is_err() {
            tracing::warn!(tasks = self.doors.running(), "connections did not end in time");
        }
        self.background.cancel();
        if tokio::time::timeout(DRAIN_DEADLINE, self.background.drained()).await.is_err() {
            tracing::warn!(tasks = self.background.running(), "background tasks did not end in time");
        }
        self.doors.running() + self.background.running()
    }

    fn refresher(&self) -> impl Fn() + Send + Sync + 'static {
        let (service, memory, local) =
            (Arc::clone(&self.service), Arc::clone(&self.memory), self.local.clone());
        move || {
            service.refresh_metrics();
            memory.refresh_metrics();
            if let Some(local) = &local {
                local.flusher.refresh_metrics();
                local.store.refresh_metrics();
            }
        }
    }

    fn readiness(&self) -> Arc<dyn Fn() -> Result<(), String> + Send + Sync> {
        let service = Arc::clone(&self.service);
        Arc::new(move || match health::not_ready(&service) {
            None => Ok(()),
            Some(reason) => Err(reason.to_owned()),
        })
    }

    fn report_source(&self) -> ReportSource {
        let netty_port = self.addresses.urpc.map(|address| address.port());
        let grpc_port = self.addresses.grpc.port();
        let mut fixed =
            NodeReport::new(identity::server_id(self.ip, grpc_port, netty_port), self.ip, grpc_port);
        fixed.netty_port = netty_port;
        fixed.http_port = Some(self.addresses.http.port());
        fixed.version = env!("CARGO_PKG_VERSION").to_owned();
        fixed.git_commit = env!("WORKER_GIT_COMMIT").to_owned();
        fixed.start_time_ms = SystemTime::now()
            .duration_since(UNIX_EPOCH)
            .map_or(0, |since| i64::try_from(since.as_millis()).unwrap_or(i64::MAX));
        let (service, memory, local) =
            (Arc::clone(&self.service), Arc::clone(&self.memory), self.local.clone());
        report::source(fixed, report::Parts { service, memory, local, live: Arc::clone(&self.live) })
    }

    /// The doors are open: from now on coordinators hear of this worker, and at once of every change of its state.
    fn announce(&self, config: &Config, embedded: Option<EmbeddedCoordinator>) -> anyhow::Result<()> {
        let source = self.report_source();
        let watch = Watch {
            service: Arc::clone(&self.service),
            store: self.local.as_ref().map(|local| Arc::clone(&local.store)),
            min_disks: config.localfile.healthy_check_min_disks,
            live: Arc::clone(&self.live),
        };
        let stop = self.background.cancelled();
        match embedded {
            Some(embedded) => {
                embedded.keep_reporting(source.clone(), config.heartbeat_interval, &self.background);
                let tell = move || embedded.report_now(&source);
                self.background.spawn("state watch", watch.run(tell, stop));
            }
            None => {
                let heartbeats =
                    heartbeat::start(parts::heartbeat(config)?, &source, &self.background, &self.registry)?;
                let tell = move || heartbeats.beat_now();
                self.background.spawn("state watch", watch.run(tell, stop));
            }
        }
        Ok(())
    }
}

async fn bind(address: IpAddr, port: u16, key: &str) -> anyhow::Result<TcpListener> {
    TcpListener::bind((address, port))
        .await
        .with_context(|| format!("can not listen on {key} = {address}:{port}"))
}

async fn start_local(
    config: &Config,
    memory: &Arc<Memory>,
    tasks: &Tasks,
    registry: &Registry,
) -> anyhow::Result<LocalTier> {
    let settings = parts::store(config);
    let disks = settings.blocking_disks();
    let flush = parts::flush(config, disks.len());
    let store = LocalStore::open(settings, disks, registry).await.context("localfile_store.data_paths")?;
    tasks.spawn("store maintenance", Arc::clone(&store).maintain(tasks.cancelled()));
    let flusher = Flusher::start(flush, Arc::clone(memory), Arc::clone(&store), tasks.clone(), registry)?;
    Ok(LocalTier { store, flusher })
}

/// Runs a worker until `stop` resolves. Prints the banner and writes the ready file (`WORKER_READY_FILE`: one line of
/// JSON with the bound ports, for whoever started the worker with port 0).
///
/// # Errors
/// See [`Worker::start`].
pub async fn run(
    config: Config,
    surroundings: Surroundings,
    stop: impl Future<Output = ()>,
) -> anyhow::Result<()> {
    let worker = Worker::start_in(surroundings, &config).await?;
    let addresses = worker.addresses();
    tracing::info!(grpc = %addresses.grpc, http = %addresses.http, urpc = ?addresses.urpc, admin = ?addresses.admin, "listening");
    if let Some(path) = std::env::var_os("WORKER_READY_FILE") {
        write_ready_file(path.as_ref(), addresses).context("WORKER_READY_FILE")?;
    }
    if config.coordinator_quorum.is_empty() {
        let host = if addresses.grpc.ip().is_loopback() { Ipv4Addr::LOCALHOST.into() } else { worker.ip() };
        banner(&startup_banner(
            host,
            addresses.grpc,
            addresses.http,
            addresses.urpc.is_some(),
            config.store_type,
        ));
    }
    let retired = async {
        match config.decommission_shutdown {
            true => worker.service().status().decommissioned().await,
            false => std::future::pending().await,
        }
    };
    tokio::select! {
        biased;
        () = stop => {}
        () = retired => tracing::info!("decommissioned, stopping"),
    }
    let left = worker.stop().await;
    tracing::info!(tasks_left = left, "stopped");
    Ok(())
}

/// Whole or not at all: written beside and renamed, so that a reader never sees half a line.
fn write_ready_file(path: &std::path::Path, addresses: Addresses) -> std::io::Result<()> {
    let line = serde_json::json!({
        "grpc_port": addresses.grpc.port(),
        "http_port": addresses.http.port(),
        "urpc_port": addresses.urpc.map(|address| address.port()),
        "admin_port": addresses.admin.map(|address| address.port()),
        "pid": std::process::id(),
    });
    let beside = path.with_extension("tmp");
    std::fs::write(&beside, format!("{line}\n"))?;
    std::fs::rename(beside, path)
}

#[expect(clippy::print_stdout, reason = "the banner is for the person who started the worker")]
fn banner(text: &str) {
    println!("{text}");
}
