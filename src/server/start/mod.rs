//! Starts a worker in phases: bind, memory, store, recovery, serve.
//!
//! Each phase consumes the result of the phase before it, so the types enforce the order. If a
//! phase fails, everything that the earlier phases opened is dropped. Connects wait in the backlog
//! until the last phase opens the listeners. Only then the worker announces itself to coordinators.

mod listeners;
pub(super) mod machine;
pub(super) mod memory_backing;
pub(super) mod tiers;

use std::os::fd::{AsFd, OwnedFd};
use std::path::Path;
use std::sync::{Arc, Weak};
use std::time::{SystemTime, UNIX_EPOCH};

use anyhow::Context as _;
use bytesize::ByteSize;
use prometheus::Registry;

use crate::app::AppRegistry;
use crate::build::Build;
use crate::config::Config;
use crate::flush::Flusher;
use crate::memory::{Memory, Prefault};
use crate::metrics::clamped;
use crate::runtime::{Handover, RuntimeMetrics, Tasks};
use crate::service::{Service, SettingsStore};
use crate::store::Tier;
use crate::telemetry::LogFilter;
use uniffle_base::allocator::AllocatorMetrics;
use uniffle_base::budget::Heap;
use uniffle_coordinator::embedded::EmbeddedCoordinator;

use self::tiers::{Precheck, TierInputs};
use super::process::notify;
use super::settings::RuntimeSettings;
use super::settings::reload::{ConfigOrigin, Reloader};
use super::settings::runtime_state::{RuntimeState, StateWriter};
use super::sockets::{Inherited, Sockets};
use super::status::snapshot::ProcessGauges;
use super::stop::ForcedStop;
use super::tls::Tls;
use super::upgrade::{UpgradeMetrics, read_tickets};
use super::{SocketHandover, Worker, WorkerIdentity, WorkerTasks, advertised_ip, metrics, until};

/// The parts of the surrounding process that a worker uses. The default suits one worker among
/// several in a process.
#[derive(Debug, Clone, Default)]
pub struct Environment {
    /// The program.
    pub build: Build,
    /// The log filter, if this worker may change it.
    pub log: Option<LogFilter>,
    /// The origin of the configuration, if it can be reloaded.
    pub origin: Option<ConfigOrigin>,
    /// Handle for a stop that does not wait.
    pub forced_stop: ForcedStop,
    /// Further tiers, placed after the configured ones.
    pub tiers: Vec<Arc<dyn Tier>>,
}

impl Worker {
    /// Starts a worker, which runs in the current runtime until [`Worker::stop`].
    ///
    /// # Errors
    /// A port in use, a data directory that is foreign or in use, or memory that cannot be mapped.
    pub async fn start(config: &Config) -> anyhow::Result<Self> {
        Self::start_in(Environment::default(), Inherited::default(), config).await
    }

    /// Starts a worker as a part of `environment`. It uses the sockets of its predecessor where
    /// `inherited` has any.
    ///
    /// # Errors
    /// See [`Worker::start`].
    pub async fn start_in(
        environment: Environment,
        inherited: Inherited,
        config: &Config,
    ) -> anyhow::Result<Self> {
        let start = AfterBind::bind(environment, inherited, config).await?;
        let start = start.open_memory().await?;
        let start = start.open_store().await?;
        start.recover().await?.serve()
    }
}

/// The parts that every phase of a start uses.
struct StartContext<'a> {
    config: &'a Config,
    identity: WorkerIdentity,
    log: Option<LogFilter>,
    origin: Option<ConfigOrigin>,
    gauges: ProcessGauges,
    tasks: WorkerTasks,
    registry: Registry,
    sockets: Sockets,
    tls: Tls,
}

/// Run-time state that an upgrade transfers in unnamed files.
struct TransferredState {
    tickets: Option<OwnedFd>,
    settings: Option<OwnedFd>,
}

/// A start whose listeners are bound or inherited. Memory and tiers are not opened yet.
struct AfterBind<'a> {
    memory_file: Option<OwnedFd>,
    tiers: TierInputs,
    transferred: TransferredState,
    base: StartContext<'a>,
}

impl<'a> AfterBind<'a> {
    /// Binds the listeners before any slow step, so that a port in use is reported at once.
    async fn bind(
        environment: Environment,
        mut inherited: Inherited,
        config: &'a Config,
    ) -> anyhow::Result<Self> {
        let Environment { build, log, origin, tiers, .. } = environment;
        let precheck = if inherited.gap_began_ms.is_some() { Precheck::Done } else { Precheck::AsConfigured };
        let tls = Tls::load(config)?;
        let (hand_off, memory_file) = (inherited.hand_off.take(), inherited.memory.take());
        let transferred =
            TransferredState { tickets: inherited.tickets.take(), settings: inherited.state.take() };
        let sockets = Sockets::open(config, inherited)?;
        let addresses = sockets.addresses()?;
        let identity = WorkerIdentity { build, ip: advertised_ip(config).await?, addresses };
        let registry = crate::metrics::registry()?;
        let listeners = Tasks::new();
        let gauges = ProcessGauges {
            runtime: RuntimeMetrics::new(listeners.clone(), &registry)?,
            allocator: AllocatorMetrics::new(&registry)?,
        };
        let tasks = WorkerTasks { background: listeners.sibling(), http: listeners.sibling(), listeners };
        let server_id = identity.server_id();
        log_start(build, config, &server_id);
        metrics::register_build(build, &registry)?;
        let tiers = TierInputs { server_id, precheck, hand_off, further_tiers: tiers };
        let base = StartContext { config, identity, log, origin, gauges, tasks, registry, sockets, tls };
        Ok(Self { memory_file, tiers, transferred, base })
    }

    /// Maps the memory and finds the blocks that an earlier process left there.
    async fn open_memory(self) -> anyhow::Result<AfterMemory<'a>> {
        let Self { memory_file, tiers, transferred, base } = self;
        let is_inherited = memory_file.is_some();
        let server_id = &tiers.server_id;
        let memory = memory_backing::open(base.config, server_id, memory_file, &base.registry).await?;
        Ok(AfterMemory { memory: OpenMemory { memory, is_inherited }, tiers, transferred, base })
    }
}

/// The mapped memory.
struct OpenMemory {
    memory: Arc<Memory>,
    /// The process started with a memory file from its predecessor or the service manager.
    is_inherited: bool,
}

/// A start with mapped memory.
struct AfterMemory<'a> {
    tiers: TierInputs,
    transferred: TransferredState,
    memory: OpenMemory,
    base: StartContext<'a>,
}

impl<'a> AfterMemory<'a> {
    /// Claims the data directories and object prefixes, and starts the flusher.
    async fn open_store(self) -> anyhow::Result<AfterStore<'a>> {
        let Self { tiers, transferred, memory, base } = self;
        let background = &base.tasks.background;
        let flusher = tiers::start(base.config, tiers, &memory.memory, background, &base.registry).await?;
        // Before the first block is acknowledged, and after this worker has claimed the
        // directories.
        memory_backing::note(base.config).await;
        Ok(AfterStore { flusher, transferred, memory, base })
    }
}

/// A start with open tiers. They have recovered their own state.
struct AfterStore<'a> {
    flusher: Option<Arc<Flusher>>,
    transferred: TransferredState,
    memory: OpenMemory,
    base: StartContext<'a>,
}

impl<'a> AfterStore<'a> {
    /// Restores registrations, reports, blocks in memory, tickets and run-time settings.
    async fn recover(self) -> anyhow::Result<AfterRecovery<'a>> {
        let Self { flusher, transferred, memory, base } = self;
        let (config, registry, heap) = (base.config, &base.registry, memory.memory.heap());
        let apps = Arc::new(AppRegistry::new(config.app.clone(), heap, memory.memory.answered()));
        let service = Service::new(
            config.service.clone(),
            apps,
            Arc::clone(&memory.memory),
            flusher,
            base.tasks.background.clone(),
            registry,
        )?;
        let state = RuntimeState::recover(config, &service, transferred.settings).await;
        restore(&service, &memory.memory).await;
        transferred.tickets.into_iter().for_each(|file| read_tickets(&memory.memory, file));
        service.lifecycle.set_quotas(&config.service.quota);
        let live = Arc::new(RuntimeSettings::new(config, base.log.clone()));
        let embedded = embedded_coordinator(config, heap, registry)?;
        let state = resume(config, state, Arc::clone(&service), Arc::clone(&live), embedded.clone());
        Ok(AfterRecovery { state, embedded, live, service, memory, base })
    }
}

/// A start with the state of the earlier process, which is durable.
struct AfterRecovery<'a> {
    state: Arc<StateWriter>,
    embedded: Option<EmbeddedCoordinator>,
    live: Arc<RuntimeSettings>,
    service: Arc<Service>,
    memory: OpenMemory,
    base: StartContext<'a>,
}

impl AfterRecovery<'_> {
    /// Opens the listeners and announces the worker.
    fn serve(self) -> anyhow::Result<Worker> {
        let Self { state, embedded, live, service, memory, base } = self;
        let StartContext { config, identity, origin, gauges, tasks, registry, sockets, tls, .. } = base;
        let reloader =
            Reloader::new(config, origin, Arc::clone(&service), Arc::clone(&live), tls.clone(), &registry)?;
        let held = for_a_successor(&sockets, &memory)?;
        let worker = Worker {
            identity,
            memory: memory.memory,
            service,
            upgrades: UpgradeMetrics::with_labels(&registry)?,
            registry,
            live,
            embedded,
            state,
            reloader: Arc::new(reloader),
            started_ms: unix_ms(),
            tasks,
            handover: SocketHandover { held, grpc: Handover::default(), tcp: Handover::default() },
            flush_timeout: config.worker.flush_timeout,
        };
        worker.spawn_upkeep(config);
        worker.open_listeners(config, sockets, tls, gauges)?;
        Ok(worker)
    }
}

impl Worker {
    /// Starts the periodic tasks.
    fn spawn_upkeep(&self, config: &Config) {
        let service = Arc::clone(&self.service);
        let (tickets_every, apps_every) = (config.service.ticket_check_interval, config.app.check_interval());
        let expiry = move || Arc::clone(&service.lifecycle).run_expiry(tickets_every, apps_every);
        self.tasks.background.spawn_again("expiry", expiry);
        if config.memory.prefault == Prefault::Idle {
            self.memory.prefault();
        }
        if self.memory.is_transferable() {
            let memory = Arc::clone(&self.memory);
            self.spawn_until_stop("memory pages", move || {
                let memory = Arc::clone(&memory);
                async move { memory.run_ahead().await }
            });
        }
        if self.memory.outlives_process() {
            let (memory, interval) = (Arc::clone(&self.memory), config.local.probe_interval);
            self.spawn_until_stop("memory file", move || {
                memory_backing::watch(Arc::clone(&memory), interval)
            });
        }
        let (reloader, tasks) = (Arc::clone(&self.reloader), self.tasks.background.clone());
        let watch = move || Arc::clone(&reloader).watch(tasks.cancelled());
        self.tasks.background.spawn_again("configuration watch", watch);
        let service = Arc::clone(&self.service);
        let sampling = move || Arc::clone(&service.diagnostics).run_sampling();
        self.tasks.background.spawn_again("sampling", sampling);
        let state = Arc::clone(&self.state);
        self.spawn_until_stop("state writer", move || Arc::clone(&state).run());
    }

    /// Spawns the work that `make` returns, again after a panic, until the background tasks are
    /// cancelled.
    fn spawn_until_stop<F>(&self, name: &'static str, make: impl Fn() -> F + Send + 'static)
    where
        F: Future<Output = ()> + Send + 'static,
    {
        let tasks = self.tasks.background.clone();
        self.tasks.background.spawn_again(name, move || until(tasks.cancelled(), make()));
    }
}

/// Logs which program starts with which configuration, as one line.
fn log_start(build: Build, config: &Config, server_id: &str) {
    let file = config.source.as_deref().unwrap_or(Path::new("none"));
    let paths = config.local.paths.iter().filter(|_| config.worker.store_type.has_local());
    let objects = config.object.url.iter().filter(|_| config.worker.store_type.has_object());
    let data = paths.map(|path| path.display().to_string()).chain(objects.map(ToString::to_string));
    tracing::info!(
        version = build.version,
        commit = build.commit,
        config = %file.display(),
        id = server_id,
        store_type = config.worker.store_type.as_str(),
        capacity = %ByteSize(config.memory.capacity_bytes),
        data = data.collect::<Vec<_>>().join(", "),
        "starting"
    );
}

/// Creates the embedded coordinator if the configuration enables it.
fn embedded_coordinator(
    config: &Config,
    heap: &Heap,
    registry: &Registry,
) -> anyhow::Result<Option<EmbeddedCoordinator>> {
    let made =
        config.is_embedded().then(|| EmbeddedCoordinator::new(config.embedded.clone(), heap, registry));
    Ok(made.transpose()?)
}

/// Applies the settings made at run time in an earlier process. Returns the writer that saves later
/// changes.
fn resume(
    config: &Config,
    state: RuntimeState,
    service: Arc<Service>,
    live: Arc<RuntimeSettings>,
    embedded: Option<EmbeddedCoordinator>,
) -> Arc<StateWriter> {
    if state.decommission {
        tracing::info!(
            "decommissioning continues after the restart; POST /admin/cancel-decommission cancels it"
        );
        service.lifecycle.decommission();
    }
    if let Some(tags) = state.tags(&config.worker.tags) {
        tracing::info!(?tags, "tags set by a call before the restart remain in effect");
        live.set_tags(tags);
    }
    if let Some(embedded) = &embedded {
        embedded.restore_apps(&state.apps);
        embedded.restore_nodes(&state.nodes);
    }
    let lifecycle = Arc::clone(&service.lifecycle);
    let writer = Arc::new(StateWriter::new(config, state, service, live, embedded));
    let store: Weak<dyn SettingsStore> = Arc::<StateWriter>::downgrade(&writer);
    lifecycle.set_settings_store(store);
    writer
}

/// Duplicates the listeners and the memory file for a successor. Also hands the memory file to the
/// service manager, which may have passed it in.
fn for_a_successor(sockets: &Sockets, memory: &OpenMemory) -> anyhow::Result<Inherited> {
    let mut held = sockets.duplicate().context("cannot duplicate a listener")?;
    held.memory = memory
        .memory
        .duplicate_for_successor()
        .context("cannot duplicate the descriptor of the memory file")?;
    notify::keep_memory(held.memory.as_ref().map(AsFd::as_fd), memory.is_inherited && held.memory.is_some());
    Ok(held)
}

/// Recovers the state of an earlier process. When this returns, the recovered state is durable.
async fn restore(service: &Service, memory: &Memory) {
    for tier in service.tiers().iter() {
        let recovered = tier.metadata().map(|tier| tier.take_recovered()).unwrap_or_default();
        service.lifecycle.restore(recovered).await;
    }
    finish_restore(memory);
    if let Some(tier) = service.tiers().metadata() {
        tier.recovered_durable().await;
    }
    service.lifecycle.verify_memory();
}

fn finish_restore(memory: &Memory) {
    let (found, restored) = memory.finish_restore();
    if found > 0 {
        tracing::info!(found, restored, "recovered blocks from memory");
    }
}

fn unix_ms() -> i64 {
    let since = SystemTime::now().duration_since(UNIX_EPOCH);
    since.map_or(0, |since| clamped(since.as_millis()))
}
