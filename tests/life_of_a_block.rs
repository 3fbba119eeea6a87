//! The life of a block as an executable model: seeded random interleavings of sends, aborts, flushes, faults, purges,
//! time-outs and reads run against the real service, memory, flusher and store over in-memory disks, under paused time.
//!
//! Invariants, checked at every read and at the end:
//! - from its acknowledgement on, a block is visible in at least one tier to a reader that starts later, byte for byte;
//! - a partition's data stream is gapless and stable: an index that was read once stays a prefix of every later one;
//! - nothing that was not acknowledged is ever visible, except blocks of a send that failed after some partitions;
//! - when everything is unregistered, every counter is zero and no file is left.
//!
//! `LIFE_SEEDS=10000 cargo test --test life_of_a_block` runs more seeds; `LIFE_SEED=17` runs one of them alone.

#![allow(clippy::panic, reason = "to panic is how a test fails")]

mod life {
    pub(crate) mod reader;
    pub(crate) mod world;
}

use life::world::{Tally, World};

/// Seeds in CI.
const SEEDS_DEFAULT: u64 = 2_000;
/// Random steps of one history.
const STEPS: usize = 60;

fn number_from_env(name: &str) -> Option<u64> {
    std::env::var(name).ok().map(|text| text.parse().expect("LIFE_SEED and LIFE_SEEDS are numbers"))
}

fn run_history(seed: u64) -> Tally {
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_time()
        .start_paused(true)
        .build()
        .expect("a runtime");
    runtime.block_on(async {
        let mut world = World::new(seed).await;
        for _ in 0..STEPS {
            world.step().await;
        }
        world.finish().await
    })
}

#[test]
fn every_acknowledged_block_is_visible_in_some_tier() {
    let seeds = match number_from_env("LIFE_SEED") {
        Some(seed) => seed..seed + 1,
        None => 0..number_from_env("LIFE_SEEDS").unwrap_or(SEEDS_DEFAULT),
    };
    let alone = seeds.end - seeds.start == 1;
    let mut total = Tally::default();
    for seed in seeds {
        match std::panic::catch_unwind(|| run_history(seed)) {
            Ok(tally) => total.add(tally),
            Err(cause) => {
                eprintln!("reproduce with: LIFE_SEED={seed} cargo test --test life_of_a_block");
                std::panic::resume_unwind(cause);
            }
        }
    }
    println!("{total:?}");
    assert!(alone || total.never().is_empty(), "the model never reached {:?}", total.never());
}
