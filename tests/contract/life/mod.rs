//! The life of a block as an executable model: seeded random interleavings of sends, aborts, flushes, reports, faults,
//! purges, time-outs, reads, crashes and restarts run against the real service, memory, flusher and store over in-memory
//! disks, under paused time. Every life of the worker has a runtime of its own: when it is dropped, so is everything that
//! had not reached a disk. In half of the histories writes are synced (`localfile_store.sync = "group"`): there the machine
//! may go down as well, and takes from the disks what was not synced.
//!
//! Invariants, checked at every read and at the end:
//! - **every acknowledged and reported block is readable byte-exact or reported lost**, whatever happened; and no loss is
//!   reported that cannot be one;
//! - what was acknowledged in this life, or stood in an index once, is readable, byte for byte;
//! - a partition's data stream is gapless, and what an index said once holds forever, for readers of an earlier life too;
//! - reports that were acknowledged are known, and none that was never made;
//! - nothing that was not acknowledged is ever visible, except blocks of a send that failed after some partitions;
//! - when everything is unregistered, every counter is zero and no file is left.
//!
//! `LIFE_SEEDS=10000 cargo test --test contract life` runs more seeds; `LIFE_SEED=17` runs one of them alone.

mod history;
mod process;
mod promises;
mod reader;
mod tally;
use self::history::History;
use self::tally::Tally;

/// Seeds in CI.
const SEEDS_DEFAULT: u64 = 2_000;

fn number_from_env(name: &str) -> Option<u64> {
    std::env::var(name).ok().map(|text| text.parse().expect("LIFE_SEED and LIFE_SEEDS are numbers"))
}

fn run_history(seed: u64) -> Tally {
    let mut history = History::new(seed);
    let mut goes_on = true;
    while goes_on {
        let life = tokio::runtime::Builder::new_current_thread()
            .enable_time()
            .start_paused(true)
            .build()
            .expect("a runtime");
        goes_on = life.block_on(history.live());
    }
    history.tally
}

#[test]
fn every_acknowledged_and_reported_block_is_readable_or_reported_lost() {
    let seeds = match number_from_env("LIFE_SEED") {
        Some(seed) => seed..seed + 1,
        None => 0..number_from_env("LIFE_SEEDS").unwrap_or(SEEDS_DEFAULT),
    };
    let alone = seeds.end - seeds.start == 1;
    if alone {
        // One history is run to see what happens in it.
        let filter = std::env::var("RUST_LOG")
            .unwrap_or_else(|_| "uniffle_worker=info,audit=info,life=info".to_owned());
        let _ = tracing_subscriber::fmt().with_env_filter(filter).with_test_writer().try_init();
    }
    let mut total = Tally::default();
    for seed in seeds {
        match std::panic::catch_unwind(|| run_history(seed)) {
            Ok(tally) => total.add(tally),
            Err(cause) => {
                eprintln!("reproduce with: LIFE_SEED={seed} cargo test --test contract life");
                std::panic::resume_unwind(cause);
            }
        }
    }
    println!("{total:?}");
    assert!(alone || total.never().is_empty(), "the model never reached {:?}", total.never());
}
