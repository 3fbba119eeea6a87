//! Calls: each is translated into a call of the service, and its result into a response.

pub(super) mod bookkeeping;
pub(super) mod convert;
pub(super) mod ingest;
pub(super) mod internal;
pub(super) mod reads;
pub(super) mod shuffle;
