//! A registered shuffle: creates writers and readers, and the handle for other processes.

use std::sync::Arc;

use bytes::Bytes;
use croaring::Treemap;
use prost::Message as _;
use tokio::task::JoinSet;

use crate::assignment::Assignment;
use crate::cluster::first_error;
use crate::coordinators::RemoteStorage;
use crate::error::Error;
use crate::options::ClientOptions;
use crate::proto;
use crate::reader::{ShuffleReader, TaskFilter};
use crate::results;
use crate::server::Server;
use crate::writer::ShuffleWriter;
use uniffle_wire::types::{AppId, PartitionId, ShuffleId, ShuffleKey, TaskAttemptId};

/// Description of a shuffle for other processes. An engine's driver sends it to its executors.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct ShuffleHandle {
    /// Application and shuffle.
    pub key: ShuffleKey,
    /// Assignment of partitions to servers.
    pub assignment: Assignment,
    /// Storage for cold data, if remote files are used.
    pub remote_storage: Option<RemoteStorage>,
}

/// Encoded form of a [`ShuffleHandle`].
#[derive(Clone, PartialEq, prost::Message)]
struct HandleMessage {
    #[prost(string, tag = "1")]
    app: String,
    #[prost(int32, tag = "2")]
    shuffle: i32,
    #[prost(int32, tag = "3")]
    partitions: i32,
    #[prost(message, repeated, tag = "4")]
    assignment: Vec<proto::PartitionRangeAssignment>,
    #[prost(message, optional, tag = "5")]
    remote_storage: Option<proto::RemoteStorage>,
}

impl ShuffleHandle {
    /// Encodes the handle for other processes.
    #[must_use]
    pub fn encode(&self) -> Bytes {
        let message = HandleMessage {
            app: self.key.app.as_str().to_owned(),
            shuffle: self.key.shuffle.0,
            partitions: self.assignment.partitions(),
            assignment: self.assignment.to_message(),
            remote_storage: self.remote_storage.as_ref().map(RemoteStorage::to_message),
        };
        message.encode_to_vec().into()
    }

    /// Decodes a handle.
    ///
    /// # Errors
    /// [`Error::Invalid`] and [`Error::Assignment`].
    pub fn decode(bytes: &[u8]) -> Result<Self, Error> {
        let invalid = |error: String| Error::Invalid(format!("shuffle handle: {error}"));
        let message = HandleMessage::decode(bytes).map_err(|error| invalid(error.to_string()))?;
        let app = AppId::parse(&message.app).map_err(|error| invalid(error.to_string()))?;
        Ok(Self {
            key: ShuffleKey::new(app, ShuffleId(message.shuffle)),
            assignment: Assignment::new(message.partitions, 1, &message.assignment)?,
            remote_storage: message.remote_storage.map(RemoteStorage::from_message),
        })
    }
}

/// A registered shuffle. Clones refer to the same shuffle.
#[derive(Debug, Clone)]
pub struct Shuffle {
    inner: Arc<Inner>,
}

#[derive(Debug)]
struct Inner {
    options: Arc<ClientOptions>,
    /// Servers, numbered as in the assignment.
    servers: Vec<Arc<Server>>,
    handle: ShuffleHandle,
}

impl Shuffle {
    pub(crate) fn new(options: Arc<ClientOptions>, servers: Vec<Arc<Server>>, handle: ShuffleHandle) -> Self {
        Self { inner: Arc::new(Inner { options, servers, handle }) }
    }

    /// Returns application and shuffle.
    #[must_use]
    pub fn key(&self) -> &ShuffleKey {
        &self.inner.handle.key
    }

    /// Returns the handle that another process needs to [`attach`](crate::Cluster::attach).
    #[must_use]
    pub fn handle(&self) -> &ShuffleHandle {
        &self.inner.handle
    }

    /// Creates a writer for one attempt at one task. Attempt ids must be unique in the shuffle,
    /// because block ids contain them.
    ///
    /// # Errors
    /// [`Error::Invalid`] if the id does not fit the layout.
    pub fn writer(&self, task: TaskAttemptId) -> Result<ShuffleWriter, Error> {
        ShuffleWriter::new(self.clone(), task)
    }

    /// Creates a reader of `partition`. Call it after all tasks to be read have reported.
    ///
    /// # Errors
    /// [`Error::ReadQuorum`] if too few replicas answered, [`Error::Invalid`] if the partition does
    /// not exist.
    pub async fn reader(&self, partition: PartitionId, filter: &TaskFilter) -> Result<ShuffleReader, Error> {
        let mut readers = self.readers(&[partition], filter).await?;
        readers.pop().ok_or_else(|| Error::Invalid(format!("partition {partition} does not exist")))
    }

    /// Creates readers of several partitions, in their order. Needs fewer calls than single
    /// readers.
    ///
    /// # Errors
    /// See [`Shuffle::reader`].
    pub async fn readers(
        &self,
        partitions: &[PartitionId],
        filter: &TaskFilter,
    ) -> Result<Vec<ShuffleReader>, Error> {
        let expected = results::expected_blocks(self, partitions, filter).await?;
        let reader = |(partition, expected): (&PartitionId, Treemap)| {
            ShuffleReader::new(self.clone(), *partition, expected, filter)
        };
        Ok(partitions.iter().zip(expected).map(reader).collect())
    }

    /// Deletes the shuffle on all its servers.
    ///
    /// # Errors
    /// Returns the first error after all servers were asked.
    pub async fn unregister(&self) -> Result<(), Error> {
        let mut calls = JoinSet::new();
        for server in &self.inner.servers {
            let (server, key) = (Arc::clone(server), self.key().clone());
            calls.spawn(async move { server.unregister(&key).await });
        }
        first_error(calls).await
    }

    pub(crate) fn options(&self) -> &ClientOptions {
        &self.inner.options
    }

    pub(crate) fn server(&self, number: usize) -> &Arc<Server> {
        &self.inner.servers[number]
    }

    /// Returns the replicas of `partition` in the assignment's order, with recently failed ones
    /// last.
    ///
    /// # Errors
    /// [`Error::Invalid`] if the partition does not exist.
    pub(crate) fn replicas(&self, partition: PartitionId) -> Result<Vec<usize>, Error> {
        let mut replicas = self.inner.handle.assignment.replicas(partition).to_vec();
        if replicas.is_empty() {
            let partitions = self.inner.handle.assignment.partitions();
            return Err(Error::Invalid(format!(
                "partition {partition} does not exist; the shuffle has {partitions}"
            )));
        }
        replicas.sort_by_key(|&number| self.inner.servers[number].is_suspect());
        Ok(replicas)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shuffle_handle_round_trips() {
        let server = |port: i32| proto::ShuffleServerId {
            id: format!("h-{port}-{port}"),
            ip: "h".to_owned(),
            port,
            netty_port: port,
            jetty_port: 0,
        };
        let assignment = [proto::PartitionRangeAssignment {
            start_partition: 0,
            end_partition: 3,
            server: vec![server(5), server(6)],
        }];
        let handle = ShuffleHandle {
            key: ShuffleKey::new(AppId::parse("app").unwrap(), ShuffleId(3)),
            assignment: Assignment::new(4, 2, &assignment).unwrap(),
            remote_storage: Some(RemoteStorage {
                path: "hdfs://nn/rss".to_owned(),
                conf: vec![("dfs.a".to_owned(), "b".to_owned())],
            }),
        };
        let bytes = handle.encode();
        assert_eq!(ShuffleHandle::decode(&bytes).unwrap(), handle);
        assert!(ShuffleHandle::decode(&bytes[..bytes.len() / 2]).is_err());
        assert!(ShuffleHandle::decode(&[]).is_err());
    }
}
