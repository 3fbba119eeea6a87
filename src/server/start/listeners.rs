//! Opens the listeners of a worker and announces it to coordinators.
//!
//! It runs last at a start, after recovery: clients connect to a worker that has its earlier state.
//! Its own coordinator hears of it before that gets requests, others after all listeners accept.
//! Sockets are bound in `sockets`, and accepted connections are served in `listeners`.

use std::net::{SocketAddr, TcpListener, TcpStream};
use std::sync::Arc;
use std::time::Duration;

use anyhow::Context as _;
use axum::Router;
use parking_lot::Mutex;
use prometheus::IntGauge;
use tokio::sync::watch;
use tonic::service::RoutesBuilder;

use crate::compat::http::JavaHooks;
use crate::config::{Config, SparkOptions};
use crate::listeners::Binding;
use crate::listeners::grpc::{GrpcMetrics, GrpcServer};
use crate::listeners::http::admin::{AdminHooks, AdminServer, Control, Token};
use crate::listeners::http::api::{self, ApiHooks};
use crate::listeners::http::push::Pusher;
use crate::listeners::http::{self, HttpMetrics, HttpServer, NodeView, Pages, gathering_pool};
use crate::listeners::tcp::TcpServer;
use crate::runtime::BlockingPool;
use crate::schema::files;
use crate::server::Worker;
use crate::server::settings::HeartbeatSenders;
use crate::server::sockets::{Sockets, accepting};
use crate::server::status::cluster::ClusterPage;
use crate::server::status::health::Watch;
use crate::server::status::report;
use crate::server::status::snapshot::{Inspector, OpenConnections, ProcessGauges};
use crate::server::tls::Tls;
use uniffle_coordinator::proto::coordinator_server_server::CoordinatorServerServer;
use uniffle_coordinator::{NodeReport, ReportSource, heartbeat};

use super::tiers;

/// Largest token file read.
const TOKEN_FILE_BYTES_MAX: u64 = 4 << 10;

impl Worker {
    /// Opens all listeners, then announces the worker to coordinators.
    pub(super) fn open_listeners(
        &self,
        config: &Config,
        sockets: Sockets,
        tls: Tls,
        gauges: ProcessGauges,
    ) -> anyhow::Result<()> {
        let grpc_metrics = GrpcMetrics::new(&self.registry)?;
        let inherited = sockets.tcp_connections;
        let tcp = sockets.tcp.map(|listener| self.open_tcp(config, listener, inherited)).transpose()?;
        let metrics = HttpMetrics::new(&self.registry)?;
        let grpc = grpc_metrics.connections().clone();
        let connections = OpenConnections { grpc, tcp, http: metrics.connections.clone() };
        let inspector = Arc::new(Inspector {
            build: self.identity.build,
            fixed: self.report(),
            store_type: config.worker.store_type.as_str(),
            spark_options: self.spark_options(config).to_defaults(),
            service: Arc::clone(&self.service),
            live: Arc::clone(&self.live),
            reloader: Arc::clone(&self.reloader),
            gauges,
            connections,
            latest: Mutex::new(None),
            cluster: self.embedded.clone().map(|embedded| ClusterPage::new(embedded, tls.worker_trust)),
        });
        let source = report::source(Arc::clone(&inspector));
        let embedded = self.join_embedded(config, &source);
        let binding = Binding {
            listener: accepting(sockets.grpc)?,
            tls: tls.grpc,
            handover: self.handover.grpc.clone(),
            inherited: sockets.grpc_connections,
        };
        self.open_grpc(config, binding, grpc_metrics);
        let node: Arc<dyn NodeView> = inspector;
        if let Some(gateway) = &config.push.endpoint {
            let instance = self.identity.server_id();
            let (registry, node) = (self.registry.clone(), Arc::clone(&node));
            Pusher::start(&config.push, gateway, &instance, registry, node, &self.tasks.http)?;
        }
        let profiles = http::debug::routes(self.tasks.http.clone());
        let binding = Binding { tls: tls.http, ..Binding::from(accepting(sockets.http)?) };
        self.open_http(config, binding, metrics, node, &profiles)?;
        if let Some(listener) = sockets.admin {
            let binding = Binding { tls: tls.admin, ..Binding::from(accepting(listener)?) };
            self.open_admin(config, binding, profiles)?;
        }
        self.announce(config, &source, embedded)
    }

    /// Reports this worker to its embedded coordinator, before that gets requests. Returns the
    /// sender that changes the interval of the reports.
    fn join_embedded(&self, config: &Config, source: &ReportSource) -> Option<watch::Sender<Duration>> {
        let (embedded, interval) = (self.embedded.as_ref()?, config.heartbeat.interval);
        let pace = embedded.keep_reporting(source.clone(), interval, &self.tasks.background);
        if config.expects_workers() {
            embedded.wait_for_workers(interval);
        }
        Some(pace)
    }

    fn open_grpc(&self, config: &Config, binding: Binding, metrics: GrpcMetrics) {
        let mut routes = RoutesBuilder::default();
        if let Some(embedded) = &self.embedded {
            routes.add_service(CoordinatorServerServer::new(embedded.clone()));
        }
        let (service, tasks) = (Arc::clone(&self.service), self.tasks.listeners.clone());
        GrpcServer::start(config.grpc.clone(), binding, routes, service, tasks, metrics);
    }

    /// Opens pages, the API and metrics. They are in a task group of their own, so that the last
    /// flush stays observable.
    fn open_http(
        &self,
        config: &Config,
        binding: Binding,
        metrics: HttpMetrics,
        node: Arc<dyn NodeView>,
        profiles: &Router,
    ) -> anyhow::Result<()> {
        let open_profiles = if config.http.profiles { profiles.clone() } else { Router::new() };
        let pool = gathering_pool();
        let api = api::router(ApiHooks {
            service: Arc::clone(&self.service),
            node: Arc::clone(&node),
            pool: pool.clone(),
        });
        let java = crate::compat::http::router(JavaHooks {
            registry: self.registry.clone(),
            node: node.clone(),
            pool: pool.clone(),
        });
        let mounted = api.merge(java).merge(open_profiles);
        let pages = Pages {
            registry: self.registry.clone(),
            metrics,
            mounted,
            node,
            pool,
            ready: BlockingPool::new(1),
        };
        HttpServer::start(config.http, binding, pages, &self.tasks.http)?;
        Ok(())
    }

    fn open_admin(&self, config: &Config, binding: Binding, profiles: Router) -> anyhow::Result<()> {
        let control: Arc<dyn Control> = Arc::clone(&self.reloader) as _;
        let (service, coordinator) = (Arc::clone(&self.service), self.embedded.clone());
        let hooks = AdminHooks { service, control, coordinator };
        let mounted = http::debug::admin_routes(profiles).merge(tiers::admin_routes(self.service.tiers()));
        let token = admin_token(config)?;
        AdminServer::start(binding, token, hooks, mounted, &self.registry, &self.tasks.http)?;
        Ok(())
    }

    /// Opens the raw TCP listener. Returns the gauge of its open connections.
    fn open_tcp(
        &self,
        config: &Config,
        listener: TcpListener,
        inherited: Vec<TcpStream>,
    ) -> anyhow::Result<IntGauge> {
        let handover = self.handover.tcp.clone();
        let binding = Binding { handover, inherited, ..Binding::from(accepting(listener)?) };
        let service = Arc::clone(&self.service);
        TcpServer::start(config.tcp.clone(), binding, service, &self.tasks.listeners, &self.registry)
    }

    /// Returns the options for clients of the configured coordinators, or of the embedded one.
    pub(in crate::server) fn spark_options(&self, config: &Config) -> SparkOptions {
        let quorum: Vec<_> = config.heartbeat.coordinators.iter().map(ToString::to_string).collect();
        let quorum = match quorum.is_empty() {
            true => SocketAddr::new(self.identity.ip, self.identity.addresses.grpc.port()).to_string(),
            false => quorum.join(","),
        };
        SparkOptions::new(&quorum, config.worker.store_type, self.identity.addresses.tcp.is_some())
    }

    /// Returns the part of a heartbeat report that never changes.
    fn report(&self) -> NodeReport {
        let netty_port = self.identity.addresses.tcp.map(|address| address.port());
        let grpc_port = self.identity.addresses.grpc.port();
        let mut fixed = NodeReport::new(self.identity.server_id(), self.identity.ip, grpc_port);
        fixed.netty_port = netty_port;
        fixed.http_port = Some(self.identity.addresses.http.port());
        fixed.version = self.identity.build.version.to_owned();
        fixed.git_commit = self.identity.build.commit.to_owned();
        fixed.start_time_ms = self.started_ms;
        fixed
    }

    /// Starts the heartbeats once the listeners are open, and sends one at once after every change
    /// of state. `pace` changes the interval of the reports to the embedded coordinator.
    fn announce(
        &self,
        config: &Config,
        source: &ReportSource,
        pace: Option<watch::Sender<Duration>>,
    ) -> anyhow::Result<()> {
        let (embedded, state) = (self.embedded.clone(), Arc::clone(&self.state));
        let watch = Watch { service: Arc::clone(&self.service), live: Arc::clone(&self.live) };
        let stop = self.tasks.background.cancelled();
        let quorum = match config.has_quorum() {
            true => Some(heartbeat::start(
                config.heartbeat.clone(),
                source,
                &self.tasks.background,
                &self.registry,
            )?),
            false => None,
        };
        self.live.set_heartbeat_senders(HeartbeatSenders { embedded: pace, quorum: quorum.clone() });
        let notify = move || {
            state.notify();
            if let Some(embedded) = &embedded {
                embedded.report_now();
            }
            if let Some(heartbeats) = &quorum {
                heartbeats.beat_now();
            }
        };
        self.tasks.background.spawn("state watch", watch.run(notify, stop));
        Ok(())
    }
}

/// Returns the token required from callers, if one is configured.
pub(super) fn admin_token(config: &Config) -> anyhow::Result<Option<Token>> {
    let Some(path) = &config.admin.token_file else { return Ok(config.admin.token.clone()) };
    let read =
        || -> anyhow::Result<Token> { Ok(Token::parse(&files::read_text(path, TOKEN_FILE_BYTES_MAX)?)?) };
    read().map(Some).with_context(|| format!("admin.token_file = {}", path.display()))
}
