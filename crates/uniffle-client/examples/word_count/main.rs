//! Counts words with a shuffle between counting and adding up, as an engine would.
//!
//! Several map tasks write concurrently, one attempt fails half-way and is repeated, and one task
//! runs twice. The partitions are read in parallel.
//!
//! Start a worker, whose embedded coordinator listens on port 21100, and then the example:
//!
//! ```text
//! cargo run --release
//! cargo run --release --package uniffle-client --example word_count -- localhost:21100
//! ```

#![allow(clippy::print_stdout, reason = "a program for the terminal")]

mod job;

use uniffle_client::{ClientOptions, Error};

#[tokio::main]
async fn main() -> Result<(), Error> {
    let coordinators = std::env::args().nth(1).unwrap_or_else(|| "localhost:21100".to_owned());
    let counts = job::run(&coordinators, ClientOptions::default()).await?;
    for (word, count) in &counts {
        println!("{count:6} {word}");
    }
    assert_eq!(counts, job::expected(), "the shuffle lost or repeated words");
    println!("{} words, as counted without a shuffle", counts.len());
    Ok(())
}
