//! A registered shuffle as its writers and readers see it: options, servers and handle.

use std::sync::Arc;

use crate::error::Error;
use crate::handle::ShuffleHandle;
use crate::options::ClientOptions;
use crate::server::Server;
use uniffle_wire::types::{PartitionId, ShuffleKey};

/// Shared by a shuffle, its writers and its readers.
#[derive(Debug)]
pub(crate) struct ShuffleContext {
    options: Arc<ClientOptions>,
    /// Servers, numbered as in the assignment.
    servers: Vec<Arc<Server>>,
    handle: ShuffleHandle,
}

impl ShuffleContext {
    pub(crate) fn new(options: Arc<ClientOptions>, servers: Vec<Arc<Server>>, handle: ShuffleHandle) -> Self {
        Self { options, servers, handle }
    }

    pub(crate) fn key(&self) -> &ShuffleKey {
        &self.handle.key
    }

    pub(crate) fn handle(&self) -> &ShuffleHandle {
        &self.handle
    }

    pub(crate) fn servers(&self) -> &[Arc<Server>] {
        &self.servers
    }

    pub(crate) fn options(&self) -> &ClientOptions {
        &self.options
    }

    pub(crate) fn server(&self, index: usize) -> &Arc<Server> {
        &self.servers[index]
    }

    /// Returns the indexes of the servers that store replicas of `partition`, in the assignment's
    /// order. Servers whose last call failed come after the others.
    ///
    /// # Errors
    /// [`Error::Invalid`] if the partition does not exist.
    pub(crate) fn replica_servers(&self, partition: PartitionId) -> Result<Vec<usize>, Error> {
        let mut replicas = self.handle.assignment.replicas(partition).to_vec();
        if replicas.is_empty() {
            let partitions = self.handle.assignment.partitions();
            return Err(Error::Invalid(format!(
                "partition {partition} does not exist; the shuffle has {partitions} partitions"
            )));
        }
        replicas.sort_by_key(|&index| self.servers[index].is_suspect());
        Ok(replicas)
    }
}
