//! Properties of the ledger of a partition, against a model.

use std::collections::BTreeSet;

use proptest::prelude::*;

use super::*;
use crate::ranges;
use uniffle_wire::types::{BlockId, PartitionId};

type Ids = BTreeSet<u64>;

#[derive(Debug, Clone)]
enum Step {
    Scan,
    Fail,
    Resolve,
    Commit(Ids),
    Report(Ids),
    /// A tier can no longer read blocks, and reports it.
    Vanish(Ids),
}

fn ids() -> impl Strategy<Value = Ids> {
    prop::collection::btree_set(0u64..12, 0..5)
}

fn steps() -> impl Strategy<Value = Vec<Step>> {
    let step = prop_oneof![
        Just(Step::Scan),
        Just(Step::Fail),
        Just(Step::Resolve),
        ids().prop_map(Step::Commit),
        ids().prop_map(Step::Report),
        ids().prop_map(Step::Vanish),
    ];
    prop::collection::vec(step, 0..30)
}

fn cause(reason: &str) -> LossCause {
    LossCause { extents: Vec::new(), reason: Arc::from(reason), at_ms: 7 }
}

fn list(ids: &Ids) -> Vec<u64> {
    ids.iter().copied().collect()
}

fn held(heap: &Budget, ids: &Ids) -> Option<HeldIds> {
    let mut held = HeldIds::new(heap);
    held.add(&list(ids)).then_some(held)
}

/// The ledger with the true state, and a caller that scans when it should.
struct Model {
    heap: Budget,
    ledger: Ledger,
    there: Ids,
    acknowledged: Ids,
    /// Blocks present when the current scan began, and the blocks that it searches.
    scan: Option<(Ids, Ids)>,
    is_verifying: bool,
}

impl Model {
    /// `recovered` from an earlier process: acknowledged blocks, those on local disks and those in
    /// remote files.
    fn new(heap: Budget, recovered: Option<(Ids, Ids, Ids)>, has_remote: bool) -> Self {
        let Some((acknowledged, local, remote)) = recovered else {
            let (ledger, none) = (Ledger::new(&heap), Ids::new);
            let (there, acknowledged) = (none(), none());
            return Self { heap, ledger, there, acknowledged, scan: None, is_verifying: false };
        };
        let mut ledger = Ledger::recovered(&heap, held(&heap, &local), !has_remote);
        let remote = if has_remote { remote } else { Ids::new() };
        let is_verifying = ledger.acknowledge(&list(&acknowledged)).unwrap_or_else(|missing| {
            ledger.enter(&missing, &cause("killed"));
            false
        });
        Self { heap, ledger, there: &local | &remote, acknowledged, scan: None, is_verifying }
    }

    fn mark_unverified(&mut self, ids: Option<&[u64]>) {
        assert_eq!(self.ledger.mark_unverified(ids), !self.is_verifying, "exactly one caller scans");
        self.is_verifying = true;
    }

    fn step(&mut self, step: Step) {
        match step {
            Step::Scan if self.is_verifying => {
                let unverified = self.ledger.begin_scan();
                let sought: Ids = unverified.into_iter().chain(self.acknowledged.iter().copied()).collect();
                self.scan = Some((self.there.clone(), sought));
            }
            Step::Fail if self.scan.take().is_some() => {
                self.ledger.fail_scan();
                assert!(!self.ledger.is_scanning());
            }
            Step::Resolve => self.resolve(),
            Step::Scan | Step::Fail => {}
            Step::Commit(ids) => {
                let before = self.ledger.lost_blocks();
                assert_eq!(self.ledger.commit(&list(&ids)), before - self.ledger.lost_blocks());
                self.there.extend(ids);
            }
            Step::Report(ids) => match self.ledger.acknowledge(&list(&ids)) {
                Err(missing) => {
                    assert!(missing.iter().all(|id| ids.contains(id) && !self.there.contains(id)));
                }
                Ok(is_first) => {
                    assert!(!(is_first && self.is_verifying), "exactly one caller scans");
                    self.is_verifying |= is_first;
                    // While the ledger verifies, a scan decides about the ids. Otherwise it trusts
                    // tasks, which report only blocks that they have sent.
                    let is_acknowledged = |id: &&u64| self.is_verifying || self.there.contains(id);
                    self.acknowledged.extend(ids.iter().filter(is_acknowledged));
                }
            },
            Step::Vanish(ids) => {
                self.mark_unverified(None);
                self.there.retain(|id| !ids.contains(id));
                self.mark_unverified(None);
            }
        }
    }

    fn resolve(&mut self) {
        let Some((there, sought)) = self.scan.take() else { return };
        let found = held(&self.heap, &there).filter(|_| !self.ledger.is_in_tiers());
        let scan = ScanResult { found, missing: list(&(&sought - &there)), more_missing: 0 };
        match self.ledger.resolve(scan, &cause("disk")) {
            None => self.scan = None,
            Some(_) => {
                let listed = self.ledger.losses().iter().flat_map(|loss| loss.ids.iter());
                // A scan that lists all present blocks also decides about later reports.
                let missing = &(&sought | &self.acknowledged) - &self.there;
                let lost: Ids = listed.chain(missing).collect();
                assert_eq!(self.ledger.lost_blocks(), lost.len() as u64, "each lost block counts once");
                assert_ne!(self.ledger.phase(), LedgerPhase::Verifying);
                self.is_verifying = false;
            }
        }
    }

    fn check(&self) {
        assert_eq!(self.ledger.phase() == LedgerPhase::Verifying, self.is_verifying);
        assert_eq!(
            self.ledger.phase() == LedgerPhase::Lossy,
            !self.is_verifying && self.ledger.lost_blocks() > 0
        );
        for id in &self.acknowledged {
            let availability = self.ledger.availability(|ids| ids.and(&IdSet::from([*id])));
            match (self.there.contains(id), self.is_verifying, &availability) {
                (false, _, Availability::Serve) => panic!("block {id} is missing, but reads are served"),
                (false, false, Availability::Wait(_)) => {
                    panic!("block {id} is missing, and no scan searches it")
                }
                (true, _, Availability::Lost(..)) => panic!("block {id} is present, but reported as lost"),
                (true, false, Availability::Wait(_)) => {
                    panic!("block {id} is present, but reads wait and no scan runs")
                }
                _ => {}
            }
        }
    }
}

proptest! {
    /// No missing acknowledged block is ever served as present, and no present one is reported as
    /// lost.
    #[test]
    fn missing_blocks_are_reported_and_present_ones_served(
        recovered: Option<(u16, u16, u16)>, has_remote: bool, steps in steps(), heap in prop_oneof![Just(u64::MAX), 0u64..400],
    ) {
        let ids = |bits: u16| (0..12).filter(|n| bits >> n & 1 == 1).collect::<Ids>();
        let recovered = recovered.map(|(acknowledged, local, remote)| (ids(acknowledged), ids(local), ids(remote)));
        let mut model = Model::new(Budget::new(heap), recovered, has_remote);
        model.check();
        for step in steps {
            model.step(step);
            model.check();
        }
        if model.is_verifying {
            model.step(Step::Scan);
            model.step(Step::Resolve);
            model.check();
            prop_assert!(!model.is_verifying);
        }
    }
}

#[test]
fn losses_are_listed_by_extent_and_merged_by_reason() {
    let extent = |id: i64, reason: &str| LostExtent {
        partition: PartitionId(1),
        blocks: vec![(BlockId(id), 10), (BlockId(id + 1), 20)],
        reason: Arc::from(reason),
    };
    let heap = Budget::new(u64::MAX);
    let mut ledger = Ledger::recovered(&heap, Some(HeldIds::new(&heap)), true);
    let why =
        LossCause { extents: vec![extent(1, "/a"), extent(5, "/b"), extent(3, "/a")], ..cause("killed") };
    let new = ledger.enter(&[1, 2, 3, 9], &why);
    let reported: Vec<_> = new.losses.iter().map(|it| (ranges(&it.ids), it.bytes, &*it.reason)).collect();
    assert_eq!(
        reported,
        [(vec![(1, 2)], Some(30), "/a"), (vec![(3, 3)], Some(10), "/a"), (vec![(9, 9)], None, "killed")]
    );
    let listed: Vec<_> = ledger.losses().iter().map(|it| (ranges(&it.ids), it.bytes, &*it.reason)).collect();
    assert_eq!(listed, [(vec![(1, 3)], Some(40), "/a"), (vec![(9, 9)], None, "killed")]);
    assert!(ledger.enter(&[1, 9], &why).losses.is_empty());
    let wants_9 = ledger.availability(|ids| ids.and(&IdSet::from([9, 10])));
    assert_eq!(wants_9, Availability::Lost(IdSet::from([9]), Arc::from("killed")));
    assert_eq!(ledger.availability(|ids| ids.and(&IdSet::from([4]))), Availability::Serve);
    assert_eq!((ledger.commit(&[3, 4, 9]), ledger.losses().len(), ledger.lost_blocks()), (2, 1, 2));
}

/// Regression test: each scan added the unlisted blocks to those of the scans before.
#[test]
fn unlisted_blocks_are_counted_anew_by_each_scan() {
    let heap = Budget::new(0);
    let mut ledger = Ledger::recovered(&heap, None, true);
    let mut scan = |missing: &[u64], lost_meanwhile: &[u64]| {
        ledger.mark_unverified(None);
        ledger.begin_scan();
        ledger.enter(lost_meanwhile, &cause("report"));
        let scan = ScanResult { found: None, missing: missing.to_vec(), more_missing: 10 };
        let new = ledger.resolve(scan, &cause("disk")).unwrap();
        (new.unlisted, ledger.lost_blocks())
    };
    assert_eq!(scan(&[1, 2], &[]), (12, 12));
    assert_eq!(scan(&[1, 2, 3], &[]), (1, 13));
    assert_eq!(scan(&[1, 2, 3], &[4, 5]), (0, 15), "this scan does not know the report");
    assert_eq!(scan(&[4], &[]), (0, 11), "some were resent");
}
