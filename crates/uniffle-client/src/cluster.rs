//! A cluster as an application uses it: coordinators, connections to servers, registrations, and
//! heartbeats.
//!
//! Writing and reading are in `shuffle`, `writer` and `reader`.

use std::collections::HashMap;
use std::sync::Arc;

use parking_lot::Mutex;
use tokio::task::JoinSet;
use tokio::time::{Instant, MissedTickBehavior, interval_at, sleep};

use crate::assignment::{Assignment, ServerAddress};
use crate::coordinators::Coordinators;
use crate::error::{Error, first_error};
use crate::grpc::register_request;
use crate::handle::ShuffleHandle;
use crate::options::ClientOptions;
use crate::remote::RemoteDirectory;
use crate::server::Server;
use crate::shuffle::Shuffle;
use uniffle_wire::types::{AppId, ShuffleId, ShuffleKey};

/// Entry point of the client. Clones share connections.
#[derive(Debug, Clone)]
pub struct Cluster {
    inner: Arc<ClusterInner>,
}

#[derive(Debug)]
struct ClusterInner {
    coordinators: Coordinators,
    options: Arc<ClientOptions>,
    /// Connections by address. A client talks to the few servers that its shuffles were assigned
    /// to.
    servers: Mutex<HashMap<ServerAddress, Arc<Server>>>,
}

impl Cluster {
    /// Creates a cluster from the coordinators at `addresses`, each `host:port`. An address
    /// `http://host:port` uses plaintext even if the options have TLS. Connects lazily. Must be
    /// called in a tokio runtime.
    ///
    /// # Errors
    /// [`Error::Invalid`] for invalid options or addresses.
    pub fn new(
        addresses: impl IntoIterator<Item = impl AsRef<str>>,
        options: ClientOptions,
    ) -> Result<Self, Error> {
        let coordinators = Coordinators::new(addresses, options.clone())?;
        let inner = ClusterInner { coordinators, options: Arc::new(options), servers: Mutex::default() };
        Ok(Self { inner: Arc::new(inner) })
    }

    /// Returns the coordinators, for direct calls.
    #[must_use]
    pub fn coordinators(&self) -> &Coordinators {
        &self.inner.coordinators
    }

    /// Returns the options.
    #[must_use]
    pub fn options(&self) -> &ClientOptions {
        &self.inner.options
    }

    /// Registers an application and starts its heartbeats. One process of an application does this
    /// (its driver). The others [`attach`](Cluster::attach) to the shuffles that it registers.
    ///
    /// # Errors
    /// [`Error::Invalid`] if `id` is not an application id; otherwise an error if no coordinator
    /// accepted the application.
    pub async fn application(&self, id: &str) -> Result<Application, Error> {
        let id = AppId::parse(id).map_err(|error| Error::Invalid(error.to_string()))?;
        self.coordinators().register_application(&id).await?;
        let servers = Arc::default();
        let mut heartbeats = JoinSet::new();
        heartbeats.spawn(send_heartbeats(self.clone(), id.clone(), Arc::clone(&servers)));
        Ok(Application { cluster: self.clone(), id, servers, heartbeats })
    }

    /// Opens a shuffle that another process registered.
    ///
    /// # Errors
    /// [`Error::Assignment`] if its servers cannot be used with these options.
    pub fn attach(&self, handle: ShuffleHandle) -> Result<Shuffle, Error> {
        let servers = self.servers(&handle.assignment)?;
        Ok(Shuffle::new(Arc::clone(&self.inner.options), servers, handle))
    }

    fn servers(&self, assignment: &Assignment) -> Result<Vec<Arc<Server>>, Error> {
        let mut known = self.inner.servers.lock();
        let server = |address: &ServerAddress| {
            if let Some(server) = known.get(address) {
                return Ok(Arc::clone(server));
            }
            let server = Arc::new(Server::new(address.clone(), Arc::clone(&self.inner.options))?);
            known.insert(address.clone(), Arc::clone(&server));
            Ok(server)
        };
        assignment.servers().iter().map(server).collect()
    }
}

/// A registered application. Heartbeats are sent until it is unregistered or dropped.
///
/// After a drop, its data remains until the servers miss the heartbeats (a minute or more,
/// depending on their configuration).
#[derive(Debug)]
pub struct Application {
    cluster: Cluster,
    id: AppId,
    /// All servers of the shuffles that this application has registered.
    servers: Arc<Mutex<HashMap<String, Arc<Server>>>>,
    heartbeats: JoinSet<()>,
}

impl Application {
    /// Returns the application id.
    #[must_use]
    pub fn id(&self) -> &AppId {
        &self.id
    }

    /// Registers a shuffle of `partitions` partitions on servers that the coordinator chooses.
    /// After a failed call, the next attempt excludes all servers that failed so far.
    /// `failures.attempts` limits the attempts.
    ///
    /// # Errors
    /// Fails if there is no usable assignment, if the last attempt to register failed, or if the
    /// storage type includes HDFS and the coordinator has no remote storage.
    pub async fn register_shuffle(&self, shuffle: ShuffleId, partitions: i32) -> Result<Shuffle, Error> {
        let options = self.cluster.options();
        let key = ShuffleKey::new(self.id.clone(), shuffle);
        let remote_storage = match options.storage.has_hdfs() {
            true => Some(self.remote_storage().await?),
            false => None,
        };
        let mut faulty = Vec::new();
        let mut failures = 0;
        loop {
            let assignment = self.cluster.coordinators().assignment(&key, partitions, &faulty).await?;
            let handle =
                ShuffleHandle { key: key.clone(), assignment, remote_storage: remote_storage.clone() };
            let servers = self.cluster.servers(&handle.assignment)?;
            let Err(error) = register(options, &servers, &handle).await else {
                let ids = servers.iter().map(|server| (server.id().to_owned(), Arc::clone(server)));
                self.servers.lock().extend(ids);
                return Ok(Shuffle::new(Arc::clone(&self.cluster.inner.options), servers, handle));
            };
            failures += 1;
            let server = match &error {
                Error::Call { peer, .. } if failures < options.failures.attempts => peer.clone(),
                _ => return Err(error),
            };
            tracing::warn!(server, %error, "cannot register the shuffle; trying other servers");
            faulty.push(server);
            sleep(options.failures.pause(failures - 1)).await;
        }
    }

    async fn remote_storage(&self) -> Result<RemoteDirectory, Error> {
        let storage = self.cluster.coordinators().remote_storage(&self.id).await?;
        storage.ok_or_else(|| Error::Invalid("the coordinator has no remote storage".to_owned()))
    }

    /// Ends the application: stops its heartbeats and deletes its data on its servers.
    ///
    /// # Errors
    /// Returns the first error after all servers were asked. A server that did not confirm drops
    /// the application itself once it misses the heartbeats.
    pub async fn unregister(mut self) -> Result<(), Error> {
        self.heartbeats.shutdown().await;
        let mut calls = JoinSet::new();
        for server in std::mem::take(&mut *self.servers.lock()).into_values() {
            let app = self.id.clone();
            calls.spawn(async move { server.unregister_app(app.as_str()).await });
        }
        first_error(calls).await
    }
}

/// Registers on all servers at once. Returns the first error, which names its server.
async fn register(
    options: &ClientOptions,
    servers: &[Arc<Server>],
    handle: &ShuffleHandle,
) -> Result<(), Error> {
    let mut calls = JoinSet::new();
    for (number, server) in servers.iter().enumerate() {
        let mut request = register_request(&handle.key, &handle.assignment.ranges_of(number));
        request.user.clone_from(&options.user);
        request.properties = options.properties.clone().into_iter().collect();
        request.remote_storage = handle.remote_storage.as_ref().map(RemoteDirectory::to_message);
        let server = Arc::clone(server);
        calls.spawn(async move { server.register(request).await });
    }
    first_error(calls).await
}

/// Sends heartbeats to coordinators and servers, the first after half an interval.
async fn send_heartbeats(cluster: Cluster, app: AppId, servers: Arc<Mutex<HashMap<String, Arc<Server>>>>) {
    let period = cluster.options().heartbeat_interval;
    let mut ticks = interval_at(Instant::now() + period / 2, period);
    ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
    loop {
        ticks.tick().await;
        let mut calls = JoinSet::new();
        for server in servers.lock().values().map(Arc::clone) {
            let app = app.clone();
            calls.spawn(async move { server.heartbeat(app.as_str()).await });
        }
        let (cluster, to_coordinators) = (cluster.clone(), app.clone());
        calls.spawn(async move { cluster.coordinators().heartbeat(&to_coordinators).await });
        while let Some(ended) = calls.join_next().await {
            if let Err(error) = ended.unwrap_or_else(|error| Err(Error::unfinished(&error))) {
                tracing::warn!(%app, %error, "heartbeat failed");
            }
        }
    }
}
