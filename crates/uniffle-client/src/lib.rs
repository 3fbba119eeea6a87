#![doc = include_str!("../README.md")]
//!
//! # Types
//!
//! - [`Cluster`], [`Application`], [`Coordinators`]: coordinators, and the heartbeats of an
//!   application
//! - [`Shuffle`], [`ShuffleHandle`], [`Assignment`]: a registered shuffle, and its form for other
//!   processes
//! - [`ShuffleWriter`], [`IdLayout`], [`block::task_attempt_id`]: writing, with block ids in Java's
//!   layouts
//! - [`ShuffleReader`], [`TaskFilter`]: reading each reported block once and undamaged
//! - [`ClientOptions`], [`Transport`], [`StorageType`], [`Replicas`], [`TlsOptions`], [`Backoff`]:
//!   settings
//! - [`RemoteFiles`]: access to remote files
//! - [`Error`], [`ClientError`]: errors of operations, and of the single calls below them

mod assignment;
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

#[cfg_attr(
    not(feature = "proto"),
    allow(dead_code, unreachable_pub, unused_imports, reason = "public with the feature `proto`")
)]
mod protocol;
#[cfg(feature = "proto")]
pub use self::protocol::{grpc, proto, read, send, tcp};
#[cfg(not(feature = "proto"))]
use self::protocol::{grpc, proto, read, send, tcp};

pub use uniffle_wire::types;

pub use self::assignment::{Assignment, ServerAddress};
pub use self::block::{Block, IdLayout};
pub use self::cluster::{Application, Cluster};
pub use self::coordinators::Coordinators;
pub use self::error::{Error, MissingBlocks};
pub use self::grpc::{Backoff, ClientError};
pub use self::handle::ShuffleHandle;
pub use self::options::{ClientOptions, Replicas, StorageType, Transport};
pub use self::proto::StatusCode;
pub use self::read::Malformed;
pub use self::reader::ShuffleReader;
pub use self::remote::{BoxFuture, RemoteDirectory, RemoteFile, RemoteFiles};
pub use self::results::TaskFilter;
pub use self::shuffle::Shuffle;
pub use self::tls::TlsOptions;
pub use self::writer::{ShuffleWriter, WriteTotals};

#[cfg(test)]
mod tests {
    #[test]
    fn readme_shows_the_tested_example() {
        let (readme, example) = (include_str!("../README.md"), include_str!("../examples/quick_start.rs"));
        assert!(
            readme.contains(&format!("```rust,no_run\n{example}```\n")),
            "README.md differs from the example"
        );
    }
}
