//! The handle of a shuffle, with which other processes write and read it.

use bytes::Bytes;
use prost::Message as _;

use crate::assignment::Assignment;
use crate::error::Error;
use crate::proto;
use crate::remote::RemoteDirectory;
use uniffle_wire::types::{AppId, ShuffleId, ShuffleKey};

/// Description of a shuffle for other processes. An engine's driver sends it to its executors.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct ShuffleHandle {
    /// Application and shuffle.
    pub key: ShuffleKey,
    /// Assignment of partitions to servers.
    pub assignment: Assignment,
    /// Remote directory (HDFS) to which servers flush, if the storage type includes one.
    pub remote_storage: Option<RemoteDirectory>,
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
            remote_storage: self.remote_storage.as_ref().map(RemoteDirectory::to_message),
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
        // The number of replicas was checked when the shuffle was registered, so 1 suffices here.
        let assignment = Assignment::new(message.partitions, 1, &message.assignment)?;
        Ok(Self {
            key: ShuffleKey::new(app, ShuffleId(message.shuffle)),
            assignment,
            remote_storage: message.remote_storage.map(RemoteDirectory::from_message),
        })
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
            remote_storage: Some(RemoteDirectory {
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
