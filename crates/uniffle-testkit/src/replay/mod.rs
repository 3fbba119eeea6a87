//! Client sessions on the wire: a [`Recorder`] is a proxy that records the exchanges of a client
//! and a worker. A [`Player`] sends a session's requests to another worker and compares the meaning
//! of the responses.

pub mod call;
pub mod meaning;
mod player;
mod reads;
mod recorder;

pub use player::{Player, ReplaySummary};
pub use recorder::Recorder;
