//! A Rust client for Apache Uniffle's remote shuffle servers: this repository's worker, and the
//! Java servers since 0.9.
//!
//! ```no_run
//! use uniffle_client::{ClientOptions, Cluster, Error, TaskFilter};
//! use uniffle_client::types::{PartitionId, ShuffleId, TaskAttemptId};
//!
//! # async fn example() -> Result<(), Error> {
//! // The driver: an application with heartbeats, and a shuffle of 8 partitions.
//! let cluster = Cluster::new(["coordinator1:21100", "coordinator2:21100"], ClientOptions::default())?;
//! let application = cluster.application("my-job-0001").await?;
//! let shuffle = application.register_shuffle(ShuffleId(0), 8).await?;
//!
//! // A map task, perhaps in another process: `cluster.attach(ShuffleHandle::decode(&bytes)?)`.
//! let mut writer = shuffle.writer(TaskAttemptId(0))?;
//! writer.write(PartitionId(3), &b"records of one partition, serialised and compressed by the engine"[..]).await?;
//! writer.finish().await?;
//!
//! // A reduce task, after the map tasks.
//! let mut reader = shuffle.reader(PartitionId(3), &TaskFilter::all()).await?;
//! while let Some(block) = reader.next().await? {
//!     println!("{} bytes of task {}", block.data.len(), block.meta.task_attempt_id);
//! }
//!
//! shuffle.unregister().await?;
//! application.unregister().await
//! # }
//! ```
//!
//! `examples/word_count.rs` is a complete program. The client provides:
//!
//! - **Coordinators** ([`Coordinators`]): any member of a quorum answers queries. All members
//!   receive the application and its heartbeats.
//! - **Transports** ([`Transport`]): block data over gRPC or over the raw TCP protocol of Uniffle's
//!   Netty port.
//! - **Writing** ([`ShuffleWriter`]): block ids in Java's layouts, checksums, batches of bounded
//!   size, retries while a server has no memory, resends, [`Replicas`], and the report that makes
//!   blocks visible.
//! - **Reading** ([`ShuffleReader`]): reported blocks from a quorum of replicas; memory, the
//!   servers' disks and remote files; each block once and undamaged; failover to the next replica;
//!   an error that lists missing blocks.
//! - **Remote files** ([`RemoteFiles`]): the feature `hdfs` provides HDFS (`hdfs::Hdfs`).
//!   Applications can bring their own.
//!
//! Every call has a deadline and every retry is bounded ([`ClientOptions`]). The engine provides
//! task scheduling, unique task attempt ids ([`block::task_attempt_id`]), serialisation,
//! compression, and the choice of the successful attempts ([`TaskFilter`]). Reassignment of
//! partitions during a write and server-side merge are not supported.
//!
//! Tests and load generators use the single calls of the protocol directly: [`send`] and [`read`]
//! are codecs, [`grpc`] and [`tcp`] are connections to one server, and [`proto`] has the generated
//! messages and services.

mod assignment;
mod calls;
mod cluster;
mod context;
mod coordinators;
mod error;
mod handle;
mod options;
mod reader;
mod remote;
mod results;
mod server;
mod shuffle;
mod tls;
mod writer;

#[cfg(feature = "hdfs")]
pub mod hdfs;

pub mod block;
pub mod grpc;
pub mod proto;
pub mod read;
pub mod send;
pub mod tcp;

pub use uniffle_wire::types;

pub use self::assignment::{Assignment, ServerAddress};
pub use self::block::{Block, IdLayout};
pub use self::cluster::{Application, Cluster};
pub use self::coordinators::Coordinators;
pub use self::error::{Error, MissingBlocks};
pub use self::grpc::{Backoff, ClientError};
pub use self::handle::ShuffleHandle;
pub use self::options::{ClientOptions, Replicas, StorageType, Transport};
pub use self::reader::ShuffleReader;
pub use self::remote::{BoxFuture, RemoteFile, RemoteFiles, RemoteStorage};
pub use self::results::TaskFilter;
pub use self::shuffle::Shuffle;
pub use self::tls::TlsOptions;
pub use self::writer::{ShuffleWriter, WriteTotals};
