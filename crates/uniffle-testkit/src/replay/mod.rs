//! Sessions of clients on the wire: a [`Recorder`] stands between a client and a worker and writes down what they say,
//! a [`Player`] says a session's requests again to another worker and compares what the answers mean.

pub mod call;
pub mod meaning;
mod player;
mod reads;
mod recorder;

pub use player::{Player, Summary};
pub use recorder::Recorder;
