//! gRPC methods by topic. Each translates its request into a call of the service, and the result
//! into a response. Only `internal` decides something: whose calls it accepts.

pub(super) mod bookkeeping;
pub(super) mod convert;
pub(super) mod ingest;
pub(super) mod internal;
pub(super) mod reads;
pub(super) mod shuffle;
