//! Options of the client. Most defaults are those of the Java client (docs/protocol.md §2.15), but
//! the pauses after failures are shorter.

use std::collections::BTreeMap;
use std::str::FromStr;
use std::sync::Arc;
use std::time::Duration;

use crate::block::IdLayout;
use crate::error::Error;
use crate::grpc::Backoff;
use crate::remote::RemoteFiles;
use crate::tls::TlsOptions;
use uniffle_wire::types::BLOCK_BYTES_MAX;

/// Largest `send_bytes_max`. Even with one block of maximum size added, and doubled over TCP, the
/// size fits an `i32`.
const SEND_BYTES_LIMIT: u64 = 256 << 20;
/// Largest `read_buffer_bytes`. A response has up to one block more, which still fits one message.
const READ_BUFFER_BYTES_LIMIT: u32 = 512 << 20;
/// Allowance for a response's content besides block data: the segments' metadata, or an index of
/// six million blocks.
const ANSWER_METADATA_BYTES: usize = 256 << 20;

/// Transport of block data. Registration, tickets, reports and heartbeats always use gRPC.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[non_exhaustive]
pub enum Transport {
    /// Over gRPC, like all other calls (client type `GRPC`).
    #[default]
    Grpc,
    /// Over the raw TCP protocol of Uniffle's Netty port (client type `GRPC_NETTY`). Never
    /// encrypted.
    Tcp,
}

impl Transport {
    /// Returns the tag of servers that support this transport.
    #[must_use]
    pub fn tag(self) -> &'static str {
        match self {
            Self::Grpc => "GRPC",
            Self::Tcp => "GRPC_NETTY",
        }
    }
}

/// Tiers that a reader visits after the servers' memory (`rss.storage.type`).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[non_exhaustive]
pub enum StorageType {
    /// The servers' own disks.
    #[default]
    MemoryLocalfile,
    /// Remote files, which readers open themselves.
    MemoryHdfs,
    /// Both, disks first.
    MemoryLocalfileHdfs,
}

impl StorageType {
    /// Returns true if servers store data on their own disks.
    #[must_use]
    pub fn has_localfile(self) -> bool {
        matches!(self, Self::MemoryLocalfile | Self::MemoryLocalfileHdfs)
    }

    /// Returns true if data may be in remote files.
    #[must_use]
    pub fn has_hdfs(self) -> bool {
        matches!(self, Self::MemoryHdfs | Self::MemoryLocalfileHdfs)
    }
}

impl FromStr for StorageType {
    type Err = Error;

    /// Parses a value of `rss.storage.type`, which a coordinator may prescribe.
    fn from_str(text: &str) -> Result<Self, Error> {
        match text {
            "MEMORY_LOCALFILE" => Ok(Self::MemoryLocalfile),
            "MEMORY_HDFS" => Ok(Self::MemoryHdfs),
            "MEMORY_LOCALFILE_HDFS" => Ok(Self::MemoryLocalfileHdfs),
            _ => Err(Error::Invalid(format!("rss.storage.type {text:?} is not supported"))),
        }
    }
}

/// Replication of blocks (`rss.data.replica`, `.write`, `.read`).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Replicas {
    /// Servers assigned to each partition.
    pub total: usize,
    /// Servers that must acknowledge a block and its report before a write succeeds.
    pub write: usize,
    /// Servers that must answer which blocks exist before a read begins.
    pub read: usize,
}

impl Default for Replicas {
    fn default() -> Self {
        Self { total: 1, write: 1, read: 1 }
    }
}

/// Settings of a [`Cluster`](crate::Cluster).
///
/// ```
/// use uniffle_client::{ClientOptions, Replicas};
///
/// let options = ClientOptions::default().with(|options| {
///     options.replicas = Replicas { total: 3, write: 2, read: 2 };
///     options.send_bytes_max = 8 << 20;
/// });
/// assert_eq!(options.replicas.write, 2);
/// ```
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct ClientOptions {
    /// Transport of block data. Default: gRPC.
    pub transport: Transport,
    /// TLS of gRPC. Default: none, gRPC in plaintext.
    pub tls: Option<TlsOptions>,
    /// Tiers that a reader visits. Default: memory and the servers' disks.
    pub storage: StorageType,
    /// Replication. Default: one server, no replicas.
    pub replicas: Replicas,
    /// Layout of block ids. All tasks of a shuffle must use the same. Default: Spark's.
    pub layout: IdLayout,
    /// Tags that servers must have besides the protocol's version and the transport
    /// (`rss.client.assignment.tags`). Default: none.
    pub tags: Vec<String>,
    /// Owner of the application. Servers write remote files as this user. Default:
    /// `uniffle-client`.
    pub user: String,
    /// Properties sent to servers and coordinators (`registerShuffle.properties`,
    /// `fetchClientConfV2.properties`). Default: none.
    pub properties: BTreeMap<String, String>,
    /// Number of servers requested per shuffle. `None` leaves the choice to the coordinator.
    /// Default: `None`.
    pub servers_per_shuffle: Option<u32>,
    /// Deadline of each call (`rss.client.rpc.timeout.ms`). Default: 60 s.
    pub rpc_timeout: Duration,
    /// Deadline of each connection attempt. Default: 10 s.
    pub connect_timeout: Duration,
    /// Deadline of each unregister call (`rss.client.unregister.request.timeout.sec`). Default: 10
    /// s.
    pub unregister_timeout: Duration,
    /// Interval of the application's heartbeats. Each has half of it as its deadline. Default: 10
    /// s.
    pub heartbeat_interval: Duration,
    /// Retries after NO_BUFFER. Default: 50 calls, 2 to 10 s apart.
    pub no_buffer: Backoff,
    /// Retries after other failures of sends, reports, registrations of shuffles, queries to
    /// coordinators, and of reads without replicas. Default: 3 calls, 1 to 3 s apart.
    pub failures: Backoff,
    /// Bytes of blocks that a writer collects before it sends them (`rss.client.send.size.limit`).
    /// Each block counts 128 bytes more than its data. Default: 16 MiB.
    pub send_bytes_max: u64,
    /// Concurrent sends of one writer. A writer holds one more batch in memory. Default: 2.
    pub sends_in_flight: usize,
    /// Bytes requested by one read (`rss.client.read.buffer.size`). Default: 14 MiB.
    pub read_buffer_bytes: u32,
    /// Access to remote files. Required if `storage` includes HDFS. Default: none.
    pub remote_files: Option<Arc<dyn RemoteFiles>>,
}

impl Default for ClientOptions {
    fn default() -> Self {
        Self {
            transport: Transport::default(),
            tls: None,
            storage: StorageType::default(),
            replicas: Replicas::default(),
            layout: IdLayout::SPARK,
            tags: Vec::new(),
            user: "uniffle-client".to_owned(),
            properties: BTreeMap::new(),
            servers_per_shuffle: None,
            rpc_timeout: Duration::from_secs(60),
            connect_timeout: Duration::from_secs(10),
            unregister_timeout: Duration::from_secs(10),
            heartbeat_interval: Duration::from_secs(10),
            no_buffer: Backoff::default(),
            failures: Backoff {
                attempts: 3,
                first: Duration::from_secs(1),
                longest: Duration::from_secs(10),
            },
            send_bytes_max: 16 << 20,
            sends_in_flight: 2,
            read_buffer_bytes: 14 << 20,
            remote_files: None,
        }
    }
}

impl ClientOptions {
    /// Returns the settings after `set` has changed them.
    #[must_use]
    pub fn with(mut self, set: impl FnOnce(&mut Self)) -> Self {
        set(&mut self);
        self
    }

    /// Rejects invalid settings.
    pub(crate) fn validate(&self) -> Result<(), Error> {
        let Replicas { total, write, read } = self.replicas;
        let durations =
            [self.rpc_timeout, self.connect_timeout, self.unregister_timeout, self.heartbeat_interval];
        let sends_plaintext =
            self.transport == Transport::Tcp && self.tls.as_ref().is_some_and(|tls| !tls.has_plain_tcp());
        let rules = [
            (!sends_plaintext, "transport: raw TCP has no TLS; use gRPC or TlsOptions::with_plain_tcp"),
            (
                total >= 1 && (1..=total).contains(&write) && (1..=total).contains(&read),
                "replicas: 1 ≤ write, read ≤ total",
            ),
            (write + read > total, "replicas: write + read must exceed total, or a read may miss a write"),
            (self.layout.is_legal(), "layout: three fields of 1 to 31 bits that sum to 63"),
            (
                self.no_buffer.attempts >= 1 && self.failures.attempts >= 1,
                "no_buffer, failures: at least one attempt",
            ),
            ((1..=SEND_BYTES_LIMIT).contains(&self.send_bytes_max), "send_bytes_max: 1 byte to 256 MiB"),
            (self.sends_in_flight >= 1, "sends_in_flight: at least 1"),
            (
                (1..=READ_BUFFER_BYTES_LIMIT).contains(&self.read_buffer_bytes),
                "read_buffer_bytes: 1 byte to 512 MiB",
            ),
            (durations.iter().all(|duration| !duration.is_zero()), "timeouts and intervals: more than 0"),
            (!self.storage.has_hdfs() || self.remote_files.is_some(), "storage with HDFS needs remote_files"),
        ];
        match rules.into_iter().find(|(holds, _)| !holds) {
            Some((_, rule)) => Err(Error::Invalid(rule.to_owned())),
            None => Ok(()),
        }
    }

    /// Returns the size of the largest accepted response: the requested bytes, one more block, and
    /// metadata.
    pub(crate) fn answer_bytes_max(&self) -> usize {
        self.read_buffer_bytes as usize + BLOCK_BYTES_MAX as usize + ANSWER_METADATA_BYTES
    }

    /// Returns the retries of a failed read. With replicas there are none: the next replica is
    /// asked instead.
    pub(crate) fn read_failures(&self) -> Backoff {
        let attempts = if self.replicas.total > 1 { 1 } else { self.failures.attempts };
        Backoff { attempts, ..self.failures }
    }

    /// Returns the tags that a server must have. `ss_v5` is the protocol since 0.9.
    pub(crate) fn required_tags(&self) -> Vec<String> {
        let own = ["ss_v5", self.transport.tag()].map(str::to_owned);
        own.into_iter().chain(self.tags.iter().cloned()).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn default_options_are_valid_and_conflicts_refused() {
        assert!(ClientOptions::default().validate().is_ok());
        let wrong: [fn(&mut ClientOptions); 6] = [
            |o| o.replicas = Replicas { total: 3, write: 1, read: 2 },
            |o| o.replicas = Replicas { total: 2, write: 3, read: 1 },
            |o| o.layout = IdLayout { sequence_bits: 40, partition_bits: 2, task_bits: 21 },
            |o| o.send_bytes_max = 0,
            |o| o.rpc_timeout = Duration::ZERO,
            |o| o.storage = StorageType::MemoryHdfs,
        ];
        for make_wrong in wrong {
            let mut options = ClientOptions::default();
            make_wrong(&mut options);
            assert!(matches!(options.validate(), Err(Error::Invalid(_))), "{options:?}");
        }
    }

    #[test]
    fn plaintext_data_beside_tls_must_be_allowed() {
        let authority = rcgen::generate_simple_self_signed(["localhost".to_owned()]).unwrap();
        let tls = TlsOptions::new(authority.cert.pem()).unwrap();
        let options = ClientOptions::default().with(|options| options.tls = Some(tls.clone()));
        assert!(options.validate().is_ok());
        let over_tcp = options.with(|options| options.transport = Transport::Tcp);
        let error = over_tcp.validate().unwrap_err().to_string();
        assert!(error.contains("with_plain_tcp"), "{error}");
        let allowed = over_tcp.with(|options| options.tls = Some(tls.with_plain_tcp()));
        assert!(allowed.validate().is_ok());
    }

    #[test]
    fn storage_type_names_match_java() {
        assert_eq!("MEMORY_LOCALFILE_HDFS".parse::<StorageType>().unwrap(), StorageType::MemoryLocalfileHdfs);
        assert!("LOCALFILE".parse::<StorageType>().is_err());
    }
}
