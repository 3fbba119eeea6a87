//! Seeded corruptions of the data directories of a stopped worker, checked by the oracle against
//! the responses to clients. The real service runs over disks in memory, under paused time.
//!
//! Files are found by walking the directories, so new kinds of file are covered. `DAMAGE_SEEDS` and
//! `DAMAGE_SEED` choose the seeds. `DAMAGE_GAPS=1` adds the known gap
//! ([`corruption::Damage::is_known_gap`]).

mod corruption;
mod fixture;
mod mutations;
mod reregistration;
mod rewrite;
mod tally;

use std::collections::BTreeSet;
use std::path::Path;
use std::time::Duration;

use rand::RngExt;

use uniffle_testkit::on_disk::{self, CLAIM, DirectoryFiles, stored_blocks};
use uniffle_testkit::oracle::{ShuffleVerification, WorkerRefusal, WorkerView, verify};
use uniffle_testkit::{say, seeds};
use uniffle_wire::types::{BlockId, ShuffleKey, TaskAttemptId};
use uniffle_worker::service::ServiceError;
use uniffle_worker::store::{StoreError, StoreErrorKind};

use self::corruption::{Damage, readable};
use self::fixture::{Fixture, LAYOUT, Life};
use self::mutations::Mutation;
use self::tally::{Report, Total};

/// Seeds in CI.
const SEEDS_DEFAULT: u64 = 1_000;
/// Time after which a probe returns a disk that failed a read.
const PROBED_WITHIN: Duration = Duration::from_secs(150);
/// Share of undamaged blocks that must be served, in 1/10,000.
const SERVED_OF_10_000: u64 = 9_900;

/// After any corruption:
/// - A result contains every block whose report was acknowledged, or its refusal names the shuffle.
/// - No block has wrong bytes, and every block of a result that is not served is reported lost.
/// - At least 99 % of the undamaged blocks are served.
/// - Damage to one file costs no result if another copy exists. Nor does a damaged claim, once it
///   is restored from the error of the refused start.
/// - A refused shuffle can be unregistered, and its next registration is complete.
#[test]
fn results_of_damaged_directories_are_complete_or_refused() {
    let (seeds, alone) = seeds::from_env("DAMAGE", SEEDS_DEFAULT);
    if alone {
        let filter = std::env::var("RUST_LOG").unwrap_or_else(|_| "uniffle=info,audit=info".to_owned());
        let _ = tracing_subscriber::fmt().with_env_filter(filter).with_test_writer().try_init();
    }
    let mut total = Total::default();
    for (seed, report) in seeds::run_all(seeds, |seed| run(seed, Mutation::None)) {
        total.add(seed, report.unwrap_or_else(Report::panicked));
    }
    say(&total.to_string());
    let failures = total.failures();
    assert!(
        failures.is_empty(),
        "{} seeds failed (DAMAGE_SEED=n repeats one):\n{}",
        failures.len(),
        failures.join("\n")
    );
    let (intact, served) = total.intact_and_served();
    assert!(
        served * 10_000 >= intact * SERVED_OF_10_000,
        "only {served} of {intact} intact blocks are served"
    );
    let unchosen = total.unchosen();
    assert!(alone || unchosen.is_empty(), "no seed chose these corruptions: {unchosen:?}");
}

/// A process that ended between a write and a sync of the metadata log leaves a record that is
/// known but not on the device.
#[test]
fn known_report_is_refused_while_log_is_unwritable() {
    let mut fixture = Fixture::new(1);
    fixture.disks.truncate(1);
    fixture.faults.truncate(1);
    fixture.present.truncate(1);
    let lived = fixture.live(async |fixture, life| {
        let key = fixture.some_key();
        life.client.register(&key, 3).await.unwrap();
        for _ in 0..5 {
            fixture.run_task_of(life, &key).await;
        }
        fixture.flush(life).await;
        key
    });
    let key = lived.unwrap();
    let history = &fixture.histories[&key].partitions;
    let report: Vec<(i32, Vec<BlockId>)> = history
        .iter()
        .map(|(partition, history)| (*partition, history.reported.iter().copied().collect()))
        .collect();
    fixture.faults[0].set_read_only(true);
    let lived = fixture.live(async |fixture, life| {
        let again = life.client.report(&key, TaskAttemptId(1), &report).await;
        assert!(matches!(again, Err(ServiceError::Store(_))), "{again:?}");
        fixture.faults[0].set_read_only(false);
        tokio::time::sleep(PROBED_WITHIN).await;
        life.client.report(&key, TaskAttemptId(1), &report).await
    });
    assert!(matches!(lived, Ok(Ok(()))), "{lived:?}");
}

fn run_safely(seed: u64, mutation: Mutation) -> Report {
    seeds::run(|| run(seed, mutation)).unwrap_or_else(Report::panicked)
}

/// Runs one seed: processes, a corruption, and the starts after it.
fn run(seed: u64, mutation: Mutation) -> Report {
    let mut fixture = Fixture::new(seed);
    mutation.apply_to_worker(&mut fixture);
    for _ in 0..fixture.rng.random_range(1..=3) {
        let steps = fixture.rng.random_range(8..30);
        let lived = fixture.live(async |fixture, life| {
            fixture.work(life, steps).await;
            fixture.end(life).await;
        });
        lived.expect("a run without damage must succeed");
        fixture.remember_version();
    }
    let before = fixture.files();
    let damage = corruption::damage(&mut fixture);
    fixture.is_damaged = true;
    if damage.is_known_gap(&fixture) && std::env::var_os("DAMAGE_GAPS").is_none() {
        return Report::known_gap(damage.corruption);
    }
    mutation.apply_to_disks(&mut fixture);
    let mut report = Report::new(&damage, fixture.disks.len(), mutation.damages_more());
    outlive(&mut fixture, damage, before, mutation, &mut report);
    report
}

/// Starts until everything temporary has returned, and checks each start.
fn outlive(
    fixture: &mut Fixture,
    mut damage: Damage,
    mut before: Vec<DirectoryFiles>,
    mutation: Mutation,
    report: &mut Report,
) {
    let mut lives = if damage.heals() { 2 } else { fixture.rng.random_range(1..=2) };
    loop {
        mutation.apply_to_start(fixture);
        lives -= 1;
        let is_last = lives == 0;
        let files = (before, std::mem::take(&mut damage.after));
        if live_and_check(fixture, files, is_last, report).is_err() {
            report.refused_start();
        }
        if is_last {
            return;
        }
        before = fixture.files();
        if damage.heal_next(fixture) {
            lives += 1;
        }
        damage.after = readable(fixture);
    }
}

/// Runs one process on the present disks. If a start is refused, omits the named directory or
/// restores the claim as the error says.
fn live_and_check(
    fixture: &mut Fixture,
    (before, mut after): (Vec<DirectoryFiles>, Vec<DirectoryFiles>),
    is_last: bool,
    report: &mut Report,
) -> Result<(), StoreError> {
    // Data acknowledged on an empty mount point disappears with it, and nothing can report that.
    let damage_is_unseen = after.iter().all(DirectoryFiles::is_empty);
    loop {
        let lived = fixture.live(async |fixture, life| {
            check(fixture, life, (&before, &after), report).await;
            if is_last {
                finish(fixture, life, report).await;
            } else {
                let steps = if damage_is_unseen { 0 } else { fixture.rng.random_range(0..15) };
                fixture.work(life, steps).await;
                fixture.end(life).await;
            }
        });
        let Err(error) = lived else { return Ok(()) };
        let text = error.to_string();
        let named = (0..fixture.disks.len()).find(|disk| text.contains(&format!("/disk{disk}")));
        let Some(named) = named.filter(|disk| fixture.present[*disk]) else {
            report.fail(format!("a start is refused without a directory's name: {text}"));
            return Err(error);
        };
        if error.kind == StoreErrorKind::Unclaimed
            && let Some((_, claim)) = on_disk::suggested_claim(&text)
        {
            if before[named].get(Path::new(CLAIM)) != Some(&claim) {
                report.fail(format!("WrongClaim: it was not that of /disk{named}: {text}"));
            }
            fixture.disks[named].put(Path::new(CLAIM), Some(claim));
            report.wrote_claim();
            continue;
        }
        fixture.present[named] = false;
        if !fixture.present.contains(&true) {
            return Err(error);
        }
        after[named].clear();
        report.skipped();
    }
}

async fn check(
    fixture: &mut Fixture,
    life: &Life,
    (before, after): (&[DirectoryFiles], &[DirectoryFiles]),
    report: &mut Report,
) {
    let stored = stored_blocks(before);
    let untouched: BTreeSet<(&ShuffleKey, i32, BlockId)> = stored
        .iter()
        .filter(|block| block.is_untouched(before, after))
        .map(|block| (&block.key, block.partition, block.id))
        .collect();
    let mut unknown = Vec::new();
    for (key, history) in &fixture.histories {
        let there = |partition, id| untouched.contains(&(key, partition, id));
        let findings = verify(&life.client, key, history, LAYOUT, there).await;
        if matches!(findings.results_refused, Some(WorkerRefusal::Unknown(_))) {
            unknown.push(key.clone());
        }
        report.take(key, findings);
    }
    // The jobs of these shuffles fail. A new registration begins from scratch.
    unknown.iter().for_each(|key| _ = fixture.histories.remove(key));
}

/// Checks that everything can be unregistered, and that a new registration is complete.
async fn finish(fixture: &mut Fixture, life: &Life, report: &mut Report) {
    let keys: Vec<ShuffleKey> = fixture.histories.keys().cloned().collect();
    let service = &life.client.service;
    for key in &keys {
        fixture.unregister(life, key);
    }
    for app in service.apps().apps() {
        service.lifecycle.unregister_app(app.id().as_str()).expect("the application is registered");
    }
    tokio::time::sleep(PROBED_WITHIN).await;
    let key = keys.first().cloned().unwrap_or_else(|| fixture.some_key());
    if keys.is_empty() && life.client.register(&key, 3).await.is_ok() {
        // Recovery may have known the shuffle. Its results are refused until it is unregistered.
        fixture.unregister(life, &key);
    }
    for key in &keys {
        let known = life.client.results(key, 0).await.unwrap_or_default();
        if !known.is_empty() {
            report.fail(format!("{key} was unregistered and its result has {} blocks", known.len()));
        }
    }
    if let Err(error) = life.client.register(&key, 3).await {
        return report.fail(format!("{key} cannot be registered again: {error}"));
    }
    for _ in 0..3 {
        fixture.run_task_of(life, &key).await;
    }
    let history = &fixture.histories[&key];
    let findings = verify(&life.client, &key, history, LAYOUT, |_, _| true).await;
    report.expect_whole(&key, "registered again", findings);
}

impl Report {
    fn expect_whole(&mut self, key: &ShuffleKey, what: &str, findings: ShuffleVerification) {
        if let Some(WorkerRefusal::Failed(text) | WorkerRefusal::Unknown(text)) = &findings.results_refused {
            self.fail(format!("{key} is refused, {what}: {text}"));
        }
        for violation in &findings.violations {
            self.fail(format!("{what}: {violation}"));
        }
        if let Some(missing) = findings.missing.first() {
            self.fail(format!("{key} {what}: block {} is not served: {}", missing.block, missing.why));
        }
    }
}
