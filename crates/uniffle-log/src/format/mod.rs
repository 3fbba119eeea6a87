//! The bytes of the metadata log: frames, and the records in them. Pure: no I/O.

pub mod frame;
pub(crate) mod plain;
pub(crate) mod record;
