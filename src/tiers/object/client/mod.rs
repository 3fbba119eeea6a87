//! The connection to a store that speaks S3: `object_store` over this worker's own HTTP and TLS.
//!
//! The rest of the tier sees an `ObjectStore` whose paths begin below `object_store.url`, and [`Failure`], which says what
//! an error of it means. Objects and parts are sent as the caller's `Bytes`; answers come in pieces of at most 256 KiB.
//!
//! | file | does |
//! | --- | --- |
//! | `open` | a client as it is configured, and what of that can be checked beforehand |
//! | `service` | one attempt of a request: permit, connection, deadline, counts |
//! | `answer` | its body: bounded, counted, timed |
//! | `pool`, `connect`, `trust` | connections that are used again, new ones, whom they trust |
//! | `operation` | what a request asks, whether an answer fits (pure) |
//! | `credentials` | keys out of a file that changes |
//! | `failure` | what an error means and what helps (pure) |
//! | `probe` | whether the store can be used at all |
//! | `uploads` | uploads that nobody will end |
//!
//! Invariant: every request ends, with an answer or an error, within its deadlines, and one that is dropped ends at once;
//! no task and no connection outlives the [`Client`].

mod answer;
mod connect;
mod credentials;
mod failure;
mod metrics;
mod open;
mod open_error;
mod operation;
mod pool;
mod probe;
mod service;
mod trust;
mod uploads;

pub use self::credentials::CredentialsError;
pub use self::failure::{Failure, Refusal, explain};
pub use self::metrics::Metrics;
pub use self::open::{Client, check_files};
pub use self::open_error::OpenError;
pub use self::operation::{Mismatch, Operation};
pub use self::probe::ProbeError;
pub use self::uploads::Abandoned;
