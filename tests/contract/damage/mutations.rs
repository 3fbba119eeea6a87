//! Mutations: with a defence switched off, or a worker that gives false responses, the checks must
//! fail.

use std::collections::BTreeSet;
use std::path::Path;

use croaring::Treemap;
use rand::RngExt;
use rand::seq::IndexedRandom;
use uniffle_testkit::fault::Faults;
use uniffle_testkit::in_process::InProcess;
use uniffle_testkit::on_disk::{self, CLAIM, is_claim};
use uniffle_testkit::oracle::{
    Blocks, ShuffleVerification, ViolationKind, WorkerRefusal, WorkerView, verify,
};
use uniffle_testkit::say;
use uniffle_wire::types::{BlockId, ShuffleKey};
use uniffle_worker::log::format::frame::{Frame, FrameContent};
use uniffle_worker::store::VerifyReads;

use super::fixture::{Fixture, LAYOUT};
use super::rewrite;
use super::run_safely;

/// Seeds within which a mutation must be noticed.
const SEEDS_MAX: u64 = 2_000;

/// A defence that is switched off. Disks simulate it where the worker has no switch.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Mutation {
    None,
    /// Syncs do not write to the device.
    NoSync,
    /// Metadata is missing on all disks but the first.
    NoSecondCopy,
    /// All metadata copies are outdated.
    OldMetadata,
    /// Reads do not verify checksums.
    NoVerifiedReads,
    /// Nothing is recovered.
    NoRecovery,
    /// No index is found, and everything is reported lost.
    NoIndexes,
    /// Checksums of the metadata log are not verified.
    NoLogChecksums,
    /// A frame missing in all copies of the metadata log is not noticed by its successors.
    NoLogChain,
    /// The same frame is damaged and all defences work: the control of [`Self::NoLogChain`].
    DamagedFrame,
    /// Only the copies of the metadata log say which records are acknowledged.
    NoMarks,
    /// A start does not check for missing members with newer metadata.
    NoMembers,
    /// The checksum of a claim is not verified.
    NoClaimChecksum,
    /// A directory whose claim is unreadable is treated as new.
    NoUnclaimed,
    /// Checksums of index groups are not verified.
    NoIndexChecksums,
    /// Read-only disks are omitted.
    NoReadOnlyDisks,
}

impl Mutation {
    /// Applies the mutation to the workers or disks before the first process.
    pub(crate) fn apply_to_worker(self, fixture: &mut Fixture) {
        match self {
            Self::NoSync => fixture.disks.iter().for_each(|disk| disk.ignore_syncs()),
            Self::NoVerifiedReads => fixture.verify_reads = VerifyReads::Off,
            Self::NoRecovery => fixture.recovery = false,
            _ => {}
        }
    }

    /// Applies the mutation to the disks after the corruption, unseen by the checks.
    pub(crate) fn apply_to_disks(self, fixture: &mut Fixture) {
        match self {
            Self::NoSecondCopy => {
                for disk in fixture.disks.iter().skip(1) {
                    remove(disk.files(), is_metadata, |path| disk.put(path, None));
                }
            }
            Self::OldMetadata => {
                let count = fixture.versions.len();
                let version = fixture.versions[fixture.rng.random_range(0..count)].clone();
                for (disk, files) in fixture.disks.iter().zip(version) {
                    remove(disk.files(), is_metadata, |path| disk.put(path, None));
                    for (path, content) in files.into_iter().filter(|(path, _)| is_metadata(path)) {
                        disk.put(&path, Some(content));
                    }
                }
            }
            Self::NoIndexes => {
                for disk in &fixture.disks {
                    remove(disk.files(), rewrite::is_index, |path| disk.put(path, None));
                }
            }
            Self::NoLogChecksums => rewrite(fixture, |path, content| {
                if rewrite::is_log(path) || rewrite::is_members(path) {
                    rewrite::reseal_log(content);
                }
            }),
            Self::NoLogChain => change_a_frame(fixture, |content, removed| {
                rewrite::chained(content, |frame| (frame.sequence != removed).then_some(frame.entry))
            }),
            Self::DamagedFrame => change_a_frame(fixture, |content, damaged| {
                let before =
                    rewrite::chained(content, |frame| (frame.sequence < damaged).then_some(frame.entry));
                let mut content = content.to_vec();
                content[before.len()] ^= 1;
                content
            }),
            Self::NoMarks => {
                for disk in &fixture.disks {
                    remove(disk.files(), |path| path.ends_with("acknowledged"), |path| disk.put(path, None));
                }
            }
            Self::NoClaimChecksum => rewrite(fixture, |path, content| {
                if let Some(resealed) = rewrite::reseal_claim(content).filter(|_| is_claim(path)) {
                    *content = resealed;
                }
            }),
            Self::NoUnclaimed => {
                for disk in fixture.disks.iter().filter(|disk| !disk.files().is_empty()) {
                    let claim = disk.content(Path::new(CLAIM)).filter(|claim| rewrite::is_sound_claim(claim));
                    if claim.is_none() {
                        disk.put(Path::new(CLAIM), Some(on_disk::new_claim()));
                    }
                }
            }
            Self::NoIndexChecksums => rewrite(fixture, |path, content| {
                if rewrite::is_index(path) {
                    rewrite::reseal_index(content);
                }
            }),
            Self::NoReadOnlyDisks if fixture.disks.len() > 1 => {
                let read_only = fixture.faults.iter().map(Faults::is_read_only);
                fixture.present.iter_mut().zip(read_only).for_each(|(present, is)| *present &= !is);
            }
            _ => {}
        }
    }

    /// Applies the mutation before a checked start, but not again after a refused one.
    pub(crate) fn apply_to_start(self, fixture: &mut Fixture) {
        if self == Self::NoMembers {
            clear_missing_members(fixture);
        }
    }

    /// Returns whether the mutation damages more than one corruption does.
    pub(crate) fn damages_more(self) -> bool {
        matches!(self, Self::NoLogChain | Self::DamagedFrame)
    }
}

/// Passes every file of the disks to `change`.
fn rewrite(fixture: &Fixture, change: impl Fn(&Path, &mut Vec<u8>)) {
    for disk in &fixture.disks {
        for (path, before) in disk.snapshot() {
            let mut after = before.clone();
            change(&path, &mut after);
            if after != before {
                disk.put(&path, Some(after));
            }
        }
    }
}

/// Applies `change` to all complete copies of the log, with the number of a random frame that is
/// not the last.
fn change_a_frame(fixture: &mut Fixture, change: impl Fn(&[u8], u64) -> Vec<u8>) {
    let files: Vec<_> = fixture.disks.iter().flat_map(|disk| disk.snapshot()).collect();
    let frames = files.iter().filter(|(path, _)| rewrite::is_log(path)).map(|(_, log)| rewrite::frames(log));
    let Some(longest) = frames.max_by_key(Vec::len) else { return };
    let listed: Vec<u64> = longest[..longest.len().saturating_sub(1)]
        .iter()
        .filter(|frame| matches!(frame.entry, FrameContent::Record(..)))
        .map(|frame| frame.sequence)
        .collect();
    let Some(chosen) = listed.choose(&mut fixture.rng).copied() else { return };
    rewrite(fixture, |path, content| {
        if rewrite::is_log(path) && rewrite::frames(content).len() == longest.len() {
            *content = change(content, chosen);
        }
    });
}

/// Removes absent directories from every list and log.
fn clear_missing_members(fixture: &Fixture) {
    let here: Vec<_> = fixture.disks.iter().zip(&fixture.present).filter(|(_, present)| **present).collect();
    let files: Vec<_> = here.iter().flat_map(|(disk, _)| disk.snapshot()).collect();
    let claims = files.iter().filter(|(path, _)| is_claim(path));
    let uuid = |claim: &[u8]| String::from_utf8_lossy(claim).lines().nth(1).unwrap_or_default().to_owned();
    let uuids: Vec<String> = claims.map(|(_, claim)| uuid(claim)).collect();
    let says_epoch = |path: &Path| rewrite::is_log(path) || rewrite::is_members(path);
    let logs = files.iter().filter(|(path, _)| says_epoch(path));
    let epoch = |frame: Frame| match frame.entry {
        FrameContent::Epoch(epoch) => Some(epoch.id),
        _ => None,
    };
    let ids: Vec<u64> = logs.flat_map(|(_, log)| rewrite::frames(log)).filter_map(epoch).collect();
    rewrite(fixture, |path, content| {
        if says_epoch(path) {
            *content = rewrite::chained(content, |frame| match frame.entry {
                FrameContent::Epoch(epoch) => Some(FrameContent::Epoch(Box::new(
                    rewrite::without_missing_members(*epoch, &uuids, &ids),
                ))),
                record => Some(record),
            });
        }
    });
}

fn remove(files: Vec<std::path::PathBuf>, which: impl Fn(&Path) -> bool, remove: impl Fn(&Path)) {
    files.iter().filter(|path| which(path)).for_each(|path| remove(path));
}

/// Returns whether the file is neither data, index nor claim, and is not in the trash.
fn is_metadata(path: &Path) -> bool {
    let of_data = path.extension().is_some_and(|extension| extension == "data" || extension == "index");
    !of_data && !is_claim(path) && !path.starts_with("trash")
}

fn must_be_noticed(mutation: Mutation) {
    must_be_noticed_as("", mutation, Mutation::None);
}

/// Requires a breach that starts with `kind`. `control` differs from the mutation only in the
/// defence.
fn must_be_noticed_as(kind: &str, mutation: Mutation, control: Mutation) {
    // A seed that fails without the mutation proves nothing.
    let is_sound = |seed| run_safely(seed, control).breaches().is_empty();
    let noticed = |seed| {
        let mut breaches = run_safely(seed, mutation).breaches().into_iter();
        breaches
            .find(|breach| breach.starts_with(kind))
            .filter(|_| is_sound(seed))
            .map(|breach| (seed, breach))
    };
    let noticed = (0..SEEDS_MAX).find_map(noticed);
    let (seed, breach) =
        noticed.unwrap_or_else(|| panic!("{mutation:?} was not detected with {SEEDS_MAX} seeds"));
    say(&format!("{mutation:?} is noticed at seed {seed}: {breach}"));
}

#[test]
fn ineffective_syncs_are_noticed() {
    must_be_noticed(Mutation::NoSync);
}

#[test]
fn missing_second_copy_is_noticed() {
    must_be_noticed(Mutation::NoSecondCopy);
}

#[test]
fn outdated_metadata_is_noticed() {
    must_be_noticed(Mutation::OldMetadata);
}

#[test]
fn unverified_reads_are_noticed() {
    must_be_noticed_as("WrongBytes", Mutation::NoVerifiedReads, Mutation::None);
}

#[test]
fn missing_recovery_is_noticed() {
    must_be_noticed(Mutation::NoRecovery);
}

#[test]
fn missing_indexes_are_noticed() {
    must_be_noticed_as("TooLittle", Mutation::NoIndexes, Mutation::None);
}

#[test]
fn missing_log_checksums_are_noticed() {
    must_be_noticed_as("ShortResult", Mutation::NoLogChecksums, Mutation::None);
}

#[test]
fn missing_log_chain_is_noticed() {
    must_be_noticed_as("ShortResult", Mutation::NoLogChain, Mutation::DamagedFrame);
}

#[test]
fn missing_marks_are_noticed() {
    must_be_noticed_as("ShortResult", Mutation::NoMarks, Mutation::None);
}

#[test]
fn missing_member_check_is_noticed() {
    must_be_noticed_as("ShortResult", Mutation::NoMembers, Mutation::None);
}

#[test]
fn missing_claim_checksum_is_noticed() {
    must_be_noticed(Mutation::NoClaimChecksum);
}

#[test]
fn unreadable_claim_taken_as_new_is_noticed() {
    must_be_noticed(Mutation::NoUnclaimed);
}

#[test]
fn missing_index_checksums_are_noticed() {
    must_be_noticed(Mutation::NoIndexChecksums);
}

#[test]
fn skipped_read_only_disk_is_noticed() {
    must_be_noticed(Mutation::NoReadOnlyDisks);
}

/// A false response of a worker.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Lie {
    None,
    /// One block of a result is omitted.
    ShortResult,
    /// A result is empty, with success.
    EmptyResult,
    /// A result contains a block that nobody reported.
    UnexpectedId,
    /// One bit of a block is flipped.
    WrongBytes,
    /// Every block is reported lost.
    AllLost,
    /// A read omits a block.
    UnreportedLoss,
    /// A result is refused without a reason.
    UnnamedRefusal,
}

struct Liar<'a> {
    client: &'a InProcess,
    lie: Lie,
}

impl WorkerView for Liar<'_> {
    async fn results(&self, key: &ShuffleKey, partition: i32) -> Result<BTreeSet<BlockId>, WorkerRefusal> {
        let mut known = self.client.results(key, partition).await?;
        match self.lie {
            Lie::ShortResult => drop(known.pop_last()),
            Lie::EmptyResult => known.clear(),
            Lie::UnexpectedId => drop(known.insert(BlockId(i64::MAX))),
            Lie::UnnamedRefusal => return Err(WorkerRefusal::Failed("something is wrong".to_owned())),
            Lie::None | Lie::WrongBytes | Lie::AllLost | Lie::UnreportedLoss => {}
        }
        Ok(known)
    }

    async fn read(&self, key: &ShuffleKey, partition: i32, tasks: &Treemap) -> Result<Blocks, WorkerRefusal> {
        let mut blocks = self.client.read(key, partition, tasks).await?;
        match self.lie {
            Lie::WrongBytes => {
                if let Some(mut block) = blocks.first_entry() {
                    let mut data = block.get().to_vec();
                    data[0] ^= 1;
                    block.insert(data.into());
                }
            }
            Lie::AllLost => return Err(WorkerRefusal::Failed(format!("blocks of {key} are lost"))),
            Lie::UnreportedLoss => drop(blocks.pop_last()),
            Lie::None | Lie::ShortResult | Lie::EmptyResult | Lie::UnexpectedId | Lie::UnnamedRefusal => {}
        }
        Ok(blocks)
    }
}

/// Returns the findings of the oracle for a healthy worker with false responses.
fn findings_for(lie: Lie) -> ShuffleVerification {
    let mut fixture = Fixture::new(1);
    let lived = fixture.live(async |fixture, life| {
        let key = fixture.some_key();
        life.client.register(&key, 3).await.unwrap();
        for _ in 0..5 {
            fixture.run_task_of(life, &key).await;
        }
        fixture.flush(life).await;
        fixture.run_task_of(life, &key).await;
        let liar = Liar { client: &life.client, lie };
        verify(&liar, &key, &fixture.histories[&key], LAYOUT, |_, _| true).await
    });
    lived.unwrap()
}

#[test]
fn false_responses_are_detected() {
    let honest = findings_for(Lie::None);
    assert!(honest.violations.is_empty() && honest.missing.is_empty(), "{honest:?}");
    assert!(honest.intact > 5 && honest.served == honest.intact && honest.lost.is_empty(), "{honest:?}");
    let found = |lie, kind| findings_for(lie).violations.iter().any(|violation| violation.kind == kind);
    assert!(found(Lie::ShortResult, ViolationKind::ShortResult));
    assert!(found(Lie::EmptyResult, ViolationKind::ShortResult));
    assert!(found(Lie::UnexpectedId, ViolationKind::UnexpectedId));
    assert!(found(Lie::WrongBytes, ViolationKind::WrongBytes));
    assert!(found(Lie::UnreportedLoss, ViolationKind::UnreportedLoss));
    assert!(found(Lie::UnnamedRefusal, ViolationKind::UnnamedRefusal));
    let nothing = findings_for(Lie::AllLost);
    assert_eq!((nothing.served, nothing.missing.len() as u64), (0, nothing.intact));
    assert!(!findings_for(Lie::UnreportedLoss).missing.is_empty());
}
