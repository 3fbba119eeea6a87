//! Pure codecs of the protocol's messages and file formats: no I/O and no tokio.

pub mod bitmap;
mod block_sink;
pub mod error;
pub mod frame;
#[cfg(test)]
mod golden;
pub mod index;
pub mod proto;
pub mod reply;
pub mod request;
pub mod send_frame;
pub mod send_message;
pub mod types;

pub use block_sink::{BlockHeader, BlockSink, SendHeader};
pub use error::DecodeError;
