//! The life of a block as an executable model: seeded random interleavings of sends, aborts, flushes, reports, faults,
//! purges, time-outs, reads, crashes and restarts run against the real service, memory, flusher and store over in-memory
//! disks, under paused time. Every life of the worker has a runtime of its own: when it is dropped, so is everything that
//! had not reached a disk. There are one to three disks. In half of the histories writes are synced
//! (`localfile_store.sync = "group"`). The machine may go down, and takes from the disks what was not synced. A life may
//! begin without one of the disks, with one that is read-only or cannot be listed, or with a damaged metadata file or claim. It may end
//! with an upgrade beside a disk that hangs, which the next life then does without. The process may be paused for longer than every
//! timeout. Files may be removed under the worker, and a stop may find its disks above their watermarks. Small extents are copied
//! together at any time (`localfile_store.rewrite_below`). Before a life all disks may be unmounted, so that a worker is started on
//! empty directories in between.
//!
//! Invariants, checked at every read and at the end:
//! - **every acknowledged and reported block is readable byte-exact or reported lost**, whatever happened; and no loss is
//!   reported that cannot be one;
//! - what was acknowledged in this life, or stood in an index once, is readable, byte for byte;
//! - a partition's data stream is gapless, and what an index said once holds forever, for readers of an earlier life too;
//! - after a start every block that the disks have is served, and those that are told as lost are not there, one by one;
//! - reports that were acknowledged are known, and none that was never made; where metadata was damaged or missing, or the
//!   machine went down with something unsynced, the results are refused instead, never short;
//! - nothing that was not acknowledged is ever visible, except blocks of a send that failed after some partitions;
//! - what an orderly stop has flushed outlives power, too;
//! - a shuffle whose end was acknowledged does not come back;
//! - empty directories are refused while the object store has a part of what is on the disks, and cost nothing where they are taken;
//! - a store that hangs delays no report of a shuffle of which it has nothing;
//! - when everything is unregistered, every counter is zero and no file is left.
//!
//! The same histories run above an object store instead of disks ([`objects`]), and on disks from which data is moved to a store
//! meanwhile ([`moves`]), also to one whose objects are damaged.
//!
//! `LIFE_SEEDS=10000 cargo test --test contract life` runs more seeds; `LIFE_SEED=17` runs one of them alone, as do
//! `OBJECT_LIFE_SEEDS` and `OBJECT_LIFE_SEED` those above objects, `MOVED_LIFE_SEEDS` and `MOVED_LIFE_SEED` those with moves, `DAMAGED_LIFE_SEEDS` and
//! `DAMAGED_LIFE_SEED` those with moves and damage.

mod clients;
mod history;
mod moves;
mod objects;
mod process;
mod promises;
mod reader;
mod recovered;
mod tally;
mod troubles;
mod unmounted;

use uniffle_testkit::{say, seeds};

use self::history::History;
use self::tally::{OF_DAMAGED_MOVES, OF_DISKS, OF_DISKS_ALONE, OF_MOVES, OF_OBJECTS, Tally, UNMOUNTED};

/// Seeds in CI.
const SEEDS_DEFAULT: u64 = 2_000;
/// Of those above objects.
const OBJECT_SEEDS_DEFAULT: u64 = 300;
/// Of those with disks above objects.
const MOVED_SEEDS_DEFAULT: u64 = 600;
/// Of those with disks above objects that are damaged.
const DAMAGED_SEEDS_DEFAULT: u64 = 300;

/// What is below the worker.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Below {
    Disks,
    Objects,
    /// Disks, from which data is moved to a store.
    Both,
    /// The same, and objects are damaged, and writes of pages that were not answered are done late.
    BothDamaged,
}

/// A defence that is off: the model must fail then.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Mutation {
    None,
    /// Syncs bring nothing to the device.
    NoSync,
    /// No index is found at a start: nothing is served, and everything told as lost.
    NoIndexes,
    /// A stop does not sync what it has flushed.
    NoLastSync,
    /// A successor beside a disk that hangs is not told that nothing newer is there.
    NoVouching,
    /// A directory whose claim cannot be read is taken for a new one.
    NoUnclaimed,
    /// The copies of pages of metadata do not reach the object store.
    NoCopies,
    /// Deadlines count the time in which the process is paused.
    PausesCount,
    /// The end of a shuffle is acknowledged before it is in the metadata log.
    NoEndLog,
    /// Empty directories are taken for new ones, whatever the object store knows.
    NoMountGuard,
    /// Nobody looks whether a file that is written is still there.
    NoLinkCount,
    /// The last flush obeys watermarks and earlier refusals.
    NoLastFlush,
}

fn run_history(seed: u64, below: Below, mutation: Mutation) -> Tally {
    let mut history = match below {
        Below::Disks => History::new(seed, mutation),
        Below::Objects => History::above_objects(seed, mutation),
        Below::Both => History::with_moves(seed, mutation),
        Below::BothDamaged => History::with_moves_and_damage(seed, mutation),
    };
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

fn run_safely(seed: u64, below: Below, mutation: Mutation) -> Result<Tally, String> {
    seeds::run(|| run_history(seed, below, mutation))
}

#[test]
fn every_acknowledged_and_reported_block_is_readable_or_reported_lost() {
    run_seeds(("LIFE", SEEDS_DEFAULT), Below::Disks, &[OF_OBJECTS, OF_MOVES, OF_DAMAGED_MOVES]);
}

#[test]
fn above_an_object_store_every_acknowledged_and_reported_block_is_readable_or_reported_lost() {
    run_seeds(("OBJECT_LIFE", OBJECT_SEEDS_DEFAULT), Below::Objects, &[OF_DISKS, OF_MOVES, OF_DAMAGED_MOVES]);
}

#[test]
fn with_moves_to_an_object_store_every_acknowledged_and_reported_block_is_readable_or_reported_lost() {
    run_seeds(
        ("MOVED_LIFE", MOVED_SEEDS_DEFAULT),
        Below::Both,
        &[OF_OBJECTS, OF_DAMAGED_MOVES, OF_DISKS_ALONE],
    );
}

#[test]
fn with_moves_to_objects_that_are_damaged_every_acknowledged_and_reported_block_is_readable_or_reported_lost()
{
    run_seeds(
        ("DAMAGED_LIFE", DAMAGED_SEEDS_DEFAULT),
        Below::BothDamaged,
        &[&["refused_starts"], UNMOUNTED, OF_DISKS_ALONE],
    );
}

/// The results of the registration before were given, which the store still had: of the first in nearly every run.
#[test]
fn a_shuffle_registered_again_is_not_given_what_the_store_has_of_the_one_before() {
    for seed in [5011, 7300] {
        let ran = run_safely(seed, Below::Both, Mutation::None);
        assert!(ran.is_ok(), "MOVED_LIFE_SEED={seed}: {ran:?}");
    }
}

fn run_seeds((variable, count): (&str, u64), below: Below, elsewhere: &[&[&str]]) {
    let (seeds, alone) = seeds::from_env(variable, count);
    if alone {
        // One history is run to see what happens in it.
        let filter = std::env::var("RUST_LOG")
            .unwrap_or_else(|_| "uniffle_worker=info,audit=info,life=info".to_owned());
        let _ = tracing_subscriber::fmt().with_env_filter(filter).with_test_writer().try_init();
    }
    let (mut total, mut failures) = (Tally::default(), Vec::new());
    for (seed, ran) in seeds::run_all(seeds, |seed| run_history(seed, below, Mutation::None)) {
        match ran {
            Ok(tally) => total.add(tally),
            Err(cause) => failures.push(format!("{variable}_SEED={seed}: {cause}")),
        }
    }
    say(&format!("{total:?}"));
    assert!(failures.is_empty(), "{} histories fail:\n{}", failures.len(), failures.join("\n"));
    let never = total.never(elsewhere);
    assert!(alone || never.is_empty(), "the model never reached {never:?}");
}

fn must_be_noticed(below: Below, mutation: Mutation) {
    let is_sound = |seed| run_safely(seed, below, Mutation::None).is_ok();
    let noticed = (0..SEEDS_DEFAULT).find_map(|seed| Some((seed, run_safely(seed, below, mutation).err()?)));
    let (seed, cause) = noticed.unwrap_or_else(|| panic!("{mutation:?} is not noticed"));
    assert!(is_sound(seed), "seed {seed} fails without {mutation:?} too");
    say(&format!("{mutation:?} is noticed at seed {seed}: {cause}"));
}

#[test]
fn a_model_with_syncs_that_do_nothing_fails() {
    must_be_noticed(Below::Disks, Mutation::NoSync);
}

#[test]
fn t1_a_recovery_that_serves_nothing_and_calls_all_lost_fails_the_model() {
    must_be_noticed(Below::Disks, Mutation::NoIndexes);
}

#[test]
fn d5_a_successor_that_nobody_vouches_for_fails_the_model() {
    must_be_noticed(Below::Disks, Mutation::NoVouching);
}

#[test]
fn a_directory_without_its_claim_that_is_taken_for_a_new_one_fails_the_model() {
    must_be_noticed(Below::Disks, Mutation::NoUnclaimed);
}

#[test]
fn a_stop_that_does_not_sync_fails_the_model() {
    must_be_noticed(Below::Disks, Mutation::NoLastSync);
}

#[test]
fn deadlines_that_count_pauses_fail_the_model() {
    must_be_noticed(Below::Disks, Mutation::PausesCount);
}

#[test]
fn an_end_that_is_acknowledged_before_it_is_logged_fails_the_model() {
    must_be_noticed(Below::Disks, Mutation::NoEndLog);
}

#[test]
fn empty_directories_that_are_taken_for_new_ones_fail_the_model() {
    must_be_noticed(Below::Both, Mutation::NoMountGuard);
}

#[test]
fn appends_to_removed_files_fail_the_model() {
    must_be_noticed(Below::Disks, Mutation::NoLinkCount);
}

#[test]
fn stop_that_obeys_watermarks_fails_the_model() {
    must_be_noticed(Below::Disks, Mutation::NoLastFlush);
}

#[test]
fn pages_of_metadata_without_copies_fail_the_model() {
    must_be_noticed(Below::Objects, Mutation::NoCopies);
}

#[test]
fn segments_that_are_gone_though_nothing_was_damaged_fail_the_model() {
    must_be_noticed(Below::Objects, Mutation::NoIndexes);
}

#[test]
fn moved_segments_that_are_gone_fail_the_model() {
    must_be_noticed(Below::Both, Mutation::NoIndexes);
}
