//! The client of a store that speaks S3: the crate `object_store` over the worker's own HTTP and
//! TLS.
//!
//! The rest of the tier sees an `ObjectStore` whose paths begin below the configured URL, and
//! [`Failure`], the class of its errors. The crate builds, signs and retries requests. This module
//! limits and counts them, limits responses, reuses connections, and reads credentials from a file.
//!
//! Invariant: a request with a permit ends within its deadlines, with a response or an error,
//! unless its reader pauses. A dropped request ends at once. No task and no connection outlives
//! the [`Client`], its stores and their responses.

mod answer;
mod connect;
mod credentials;
mod failure;
mod metrics;
mod open;
mod operation;
mod pool;
mod probe;
mod service;
mod trust;
mod uploads;

pub use self::credentials::CredentialsError;
pub use self::failure::{Failure, StoreRefusal, explain};
pub use self::metrics::Metrics;
pub use self::open::{Client, check_files};
pub use self::operation::StoreOperation;
pub use self::probe::ProbeError;
pub use self::trust::OpenError;
pub use self::uploads::Abandoned;
