//! A registered shuffle: creates writers and readers. Attempt ids must be unique, because block ids
//! contain them, and readers are created after the reports of all tasks.

use std::sync::Arc;

use croaring::Treemap;
use tokio::task::JoinSet;

use crate::context::ShuffleContext;
use crate::error::{Error, first_error};
use crate::handle::ShuffleHandle;
use crate::options::ClientOptions;
use crate::reader::ShuffleReader;
use crate::results::{self, TaskFilter};
use crate::server::Server;
use crate::writer::ShuffleWriter;
use uniffle_wire::types::{PartitionId, ShuffleKey, TaskAttemptId};

/// A registered shuffle. Clones refer to the same shuffle.
#[derive(Debug, Clone)]
pub struct Shuffle {
    inner: Arc<ShuffleContext>,
}

impl Shuffle {
    pub(crate) fn new(options: Arc<ClientOptions>, servers: Vec<Arc<Server>>, handle: ShuffleHandle) -> Self {
        Self { inner: Arc::new(ShuffleContext::new(options, servers, handle)) }
    }

    /// Returns the ids of the application and the shuffle.
    #[must_use]
    pub fn key(&self) -> &ShuffleKey {
        self.inner.key()
    }

    /// Returns the handle that another process needs to [`attach`](crate::Cluster::attach).
    #[must_use]
    pub fn handle(&self) -> &ShuffleHandle {
        self.inner.handle()
    }

    /// Creates a writer for one attempt at one task. Attempt ids must be unique in the shuffle,
    /// because block ids contain them.
    ///
    /// # Errors
    /// [`Error::Invalid`] if the id does not fit the block id layout.
    pub fn writer(&self, task: TaskAttemptId) -> Result<ShuffleWriter, Error> {
        ShuffleWriter::new(Arc::clone(&self.inner), task)
    }

    /// Creates a reader of `partition`. Call it after all tasks to be read have reported.
    ///
    /// # Errors
    /// [`Error::ReadQuorum`] if too few replicas answered, [`Error::Invalid`] if the partition does
    /// not exist.
    pub async fn reader(&self, partition: PartitionId, filter: &TaskFilter) -> Result<ShuffleReader, Error> {
        // `readers` returns one reader per partition, and refuses a partition that does not exist.
        let mut readers = self.readers(&[partition], filter).await?;
        readers.pop().ok_or_else(|| Error::Invalid(format!("partition {partition} does not exist")))
    }

    /// Creates readers of several partitions, in their order. Partitions with the same replicas
    /// share a call.
    ///
    /// # Errors
    /// See [`Shuffle::reader`].
    pub async fn readers(
        &self,
        partitions: &[PartitionId],
        filter: &TaskFilter,
    ) -> Result<Vec<ShuffleReader>, Error> {
        let expected = results::expected_blocks(&self.inner, partitions, filter).await?;
        let reader = |(partition, expected): (&PartitionId, Treemap)| {
            ShuffleReader::new(Arc::clone(&self.inner), *partition, expected, filter)
        };
        Ok(partitions.iter().zip(expected).map(reader).collect())
    }

    /// Deletes the shuffle on all its servers.
    ///
    /// # Errors
    /// Returns the first error after all servers were asked.
    pub async fn unregister(&self) -> Result<(), Error> {
        let mut calls = JoinSet::new();
        for server in self.inner.servers() {
            let (server, key) = (Arc::clone(server), self.key().clone());
            calls.spawn(async move { server.unregister(&key).await });
        }
        first_error(calls).await
    }
}
