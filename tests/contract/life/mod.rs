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
mod fault_plan;
mod history;
mod invariants;
mod moves;
mod objects;
mod process;
mod reader;
mod recovered;
mod tally;
mod unmounted;

use uniffle_testkit::{say, seeds};

use self::history::History;
use self::tally::{
    DISK_EVENTS, DISKS_ALONE_EVENTS, LATE_EVENTS, MOVE_EVENTS, OBJECT_EVENTS, Tally, UNMOUNTED_EVENTS,
};

/// Seeds in CI.
const SEEDS_DEFAULT: u64 = 2_000;
/// Of those above objects.
const OBJECT_SEEDS_DEFAULT: u64 = 300;
/// Of those with disks above objects.
const MOVED_SEEDS_DEFAULT: u64 = 600;
/// Of those with disks above objects that are damaged.
const DAMAGED_SEEDS_DEFAULT: u64 = 300;

/// What is storage the worker.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Storage {
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
    NoHandOff,
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

fn run_history(seed: u64, storage: Storage, mutation: Mutation) -> Tally {
    let mut history = match storage {
        Storage::Disks => History::new(seed, mutation),
        Storage::Objects => History::above_objects(seed, mutation),
        Storage::Both => History::with_moves(seed, mutation),
        Storage::BothDamaged => History::with_moves_and_damage(seed, mutation),
    };
    let mut has_more = true;
    while has_more {
        let life = tokio::runtime::Builder::new_current_thread()
            .enable_time()
            .start_paused(true)
            .build()
            .expect("a runtime");
        has_more = life.block_on(history.live());
    }
    history.tally
}

fn run_safely(seed: u64, storage: Storage, mutation: Mutation) -> Result<Tally, String> {
    seeds::run(|| run_history(seed, storage, mutation))
}

#[test]
fn acknowledged_blocks_on_disks_are_served_or_reported_lost() {
    run_seeds(("LIFE", SEEDS_DEFAULT), Storage::Disks, &[OBJECT_EVENTS, MOVE_EVENTS, LATE_EVENTS]);
}

#[test]
fn acknowledged_blocks_in_objects_are_served_or_reported_lost() {
    run_seeds(
        ("OBJECT_LIFE", OBJECT_SEEDS_DEFAULT),
        Storage::Objects,
        &[DISK_EVENTS, MOVE_EVENTS, LATE_EVENTS],
    );
}

#[test]
fn moved_blocks_are_served_or_reported_lost() {
    run_seeds(
        ("MOVED_LIFE", MOVED_SEEDS_DEFAULT),
        Storage::Both,
        &[OBJECT_EVENTS, LATE_EVENTS, DISKS_ALONE_EVENTS],
    );
}

#[test]
fn blocks_of_damaged_objects_are_served_or_reported_lost() {
    run_seeds(
        ("DAMAGED_LIFE", DAMAGED_SEEDS_DEFAULT),
        Storage::BothDamaged,
        &[&["refused_starts"], UNMOUNTED_EVENTS, DISKS_ALONE_EVENTS],
    );
}

/// The results of the registration before were given, which the store still had: of the first in nearly every run.
#[test]
fn reregistered_shuffle_hides_moved_results_of_predecessor() {
    for seed in [5011, 7300] {
        let ran = run_safely(seed, Storage::Both, Mutation::None);
        assert!(ran.is_ok(), "MOVED_LIFE_SEED={seed}: {ran:?}");
    }
}

fn run_seeds((variable, count): (&str, u64), storage: Storage, elsewhere: &[&[&str]]) {
    let (seeds, alone) = seeds::from_env(variable, count);
    if alone {
        // One history is run to see what happens in it.
        let filter = std::env::var("RUST_LOG")
            .unwrap_or_else(|_| "uniffle_worker=info,audit=info,life=info".to_owned());
        let _ = tracing_subscriber::fmt().with_env_filter(filter).with_test_writer().try_init();
    }
    let (mut total, mut failures) = (Tally::default(), Vec::new());
    for (seed, ran) in seeds::run_all(seeds, |seed| run_history(seed, storage, Mutation::None)) {
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

fn must_be_noticed(storage: Storage, mutation: Mutation) {
    let is_sound = |seed| run_safely(seed, storage, Mutation::None).is_ok();
    let noticed =
        (0..SEEDS_DEFAULT).find_map(|seed| Some((seed, run_safely(seed, storage, mutation).err()?)));
    let (seed, cause) = noticed.unwrap_or_else(|| panic!("{mutation:?} is not noticed"));
    assert!(is_sound(seed), "seed {seed} fails without {mutation:?} too");
    say(&format!("{mutation:?} is noticed at seed {seed}: {cause}"));
}

#[test]
fn ineffective_syncs_fail_the_model() {
    must_be_noticed(Storage::Disks, Mutation::NoSync);
}

#[test]
fn lost_indexes_fail_the_model() {
    must_be_noticed(Storage::Disks, Mutation::NoIndexes);
}

#[test]
fn missing_hand_off_fails_the_model() {
    must_be_noticed(Storage::Disks, Mutation::NoHandOff);
}

#[test]
fn unreadable_claim_taken_as_new_fails_the_model() {
    must_be_noticed(Storage::Disks, Mutation::NoUnclaimed);
}

#[test]
fn stop_without_sync_fails_the_model() {
    must_be_noticed(Storage::Disks, Mutation::NoLastSync);
}

#[test]
fn deadlines_counting_pauses_fail_the_model() {
    must_be_noticed(Storage::Disks, Mutation::PausesCount);
}

#[test]
fn unlogged_end_fails_the_model() {
    must_be_noticed(Storage::Disks, Mutation::NoEndLog);
}

#[test]
fn missing_mount_guard_fails_the_model() {
    must_be_noticed(Storage::Both, Mutation::NoMountGuard);
}

#[test]
fn appends_to_removed_files_fail_the_model() {
    must_be_noticed(Storage::Disks, Mutation::NoLinkCount);
}

#[test]
fn stop_that_obeys_watermarks_fails_the_model() {
    must_be_noticed(Storage::Disks, Mutation::NoLastFlush);
}

#[test]
fn metadata_pages_without_copies_fail_the_model() {
    must_be_noticed(Storage::Objects, Mutation::NoCopies);
}

#[test]
fn lost_segments_fail_the_model() {
    must_be_noticed(Storage::Objects, Mutation::NoIndexes);
}

#[test]
fn lost_moved_segments_fail_the_model() {
    must_be_noticed(Storage::Both, Mutation::NoIndexes);
}
