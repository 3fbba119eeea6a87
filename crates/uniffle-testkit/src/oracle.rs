//! The oracle: checks block by block that a worker keeps its guarantees to clients.
//!
//! [`ShuffleHistory`] records the responses to the clients of one shuffle. [`verify`] asks a worker
//! ([`WorkerView`]) for the results and for every block, with task filters that avoid the lost
//! blocks, and lists the contradictions. A worker that serves nothing and reports everything as
//! lost breaks no rule of the protocol. Therefore the caller says which blocks must be present, and
//! each one that is not served is listed ([`ShuffleVerification::missing`]).

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;

use bytes::Bytes;
use croaring::Treemap;
use uniffle_client::block::IdLayout;
use uniffle_wire::types::{BlockId, ShuffleKey};

/// Blocks by id.
pub type Blocks = BTreeMap<BlockId, Bytes>;

/// Ids of a report, by partition.
pub type ReportedIds = [(i32, Vec<BlockId>)];

/// Blocks that clients of one registered shuffle sent, and the responses, by partition.
#[derive(Debug, Clone, Default)]
pub struct ShuffleHistory {
    pub partitions: BTreeMap<i32, PartitionHistory>,
}

#[derive(Debug, Clone, Default)]
pub struct PartitionHistory {
    /// All blocks that were sent, whatever the outcome.
    pub sent: Blocks,
    /// Ids in acknowledged reports.
    pub reported: BTreeSet<BlockId>,
    /// Ids in all reports. A report without a response may have been accepted.
    pub tried: BTreeSet<BlockId>,
}

impl ShuffleHistory {
    pub fn partition(&mut self, partition: i32) -> &mut PartitionHistory {
        self.partitions.entry(partition).or_default()
    }

    /// Records a report that was sent.
    pub fn tried(&mut self, report: &ReportedIds) {
        for (partition, ids) in report {
            self.partition(*partition).tried.extend(ids);
        }
    }

    /// Records a report that was acknowledged.
    pub fn reported(&mut self, report: &ReportedIds) {
        self.tried(report);
        for (partition, ids) in report {
            self.partition(*partition).reported.extend(ids);
        }
    }
}

/// Reason why a worker refuses a request.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum WorkerRefusal {
    /// The worker reports a loss, possibly missing data, or a failure.
    Failed(String),
    /// The worker does not know the application or the shuffle (NO_REGISTER).
    Unknown(String),
}

impl WorkerRefusal {
    #[must_use]
    pub fn text(&self) -> &str {
        match self {
            Self::Failed(text) | Self::Unknown(text) => text,
        }
    }
}

/// A worker as readers see it. Implementations wait during NO_BUFFER.
pub trait WorkerView {
    /// Calls `getShuffleResult` for one partition.
    fn results(
        &self,
        key: &ShuffleKey,
        partition: i32,
    ) -> impl Future<Output = Result<BTreeSet<BlockId>, WorkerRefusal>>;

    /// Reads the blocks of these task attempts through all tiers and verifies checksums.
    fn read(
        &self,
        key: &ShuffleKey,
        partition: i32,
        tasks: &Treemap,
    ) -> impl Future<Output = Result<Blocks, WorkerRefusal>>;
}

/// Violations of the guarantees.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum ViolationKind {
    /// A result lacks a block whose report was acknowledged, so a job computes with less data.
    ShortResult,
    /// A result contains a block that was never reported.
    UnexpectedId,
    /// A block has different bytes than were sent.
    WrongBytes,
    /// A block was never sent.
    UnexpectedBlock,
    /// A block of the result is not served, although a read that wants it succeeds.
    UnreportedLoss,
    /// A refusal of results other than NO_REGISTER does not name the shuffle.
    UnnamedRefusal,
}

/// A [`ViolationKind`] and its place.
#[derive(Debug, Clone)]
pub struct Violation {
    pub kind: ViolationKind,
    pub place: String,
}

impl fmt::Display for Violation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:?}: {}", self.kind, self.place)
    }
}

/// A block that must be present but was not served, and the worker's explanation.
#[derive(Debug, Clone)]
pub struct MissingBlock {
    pub partition: i32,
    pub block: BlockId,
    pub why: String,
}

/// Result of [`verify`] for one shuffle.
#[derive(Debug, Default)]
pub struct ShuffleVerification {
    pub violations: Vec<Violation>,
    /// Blocks that must be present but were not served.
    pub missing: Vec<MissingBlock>,
    /// Number of blocks that must be present.
    pub intact: u64,
    /// Number of blocks that were served, each counted once.
    pub served: u64,
    /// Blocks of results whose reads were refused.
    pub lost: BTreeSet<(i32, BlockId)>,
    /// Reason why results are refused. A refusal concerns all partitions.
    pub results_refused: Option<WorkerRefusal>,
}

impl ShuffleVerification {
    fn violate(&mut self, kind: ViolationKind, place: String) {
        self.violations.push(Violation { kind, place });
    }
}

/// Verifies the results and all blocks of a shuffle. `must_be_served` returns true for sent blocks
/// that must be served.
pub async fn verify(
    worker: &impl WorkerView,
    key: &ShuffleKey,
    history: &ShuffleHistory,
    layout: IdLayout,
    must_be_served: impl Fn(i32, BlockId) -> bool,
) -> ShuffleVerification {
    let mut findings = ShuffleVerification::default();
    for (partition, history) in &history.partitions {
        let known = check_results(worker, key, *partition, history, &mut findings).await;
        let wanted = history.sent.keys().chain(known.iter().flatten());
        let tasks: Treemap = wanted.map(|id| layout.task_of(*id).0.cast_unsigned()).collect();
        let read = read_split(worker, key, *partition, tasks).await;
        let refused = |id: BlockId| read.refused.get(&layout.task_of(id).0.cast_unsigned());
        findings.served += read.blocks.len() as u64;
        for (id, data) in &read.blocks {
            match history.sent.get(id) {
                Some(sent) if sent == data => {}
                Some(_) => {
                    findings.violate(ViolationKind::WrongBytes, format!("block {id} of {key}/{partition}"))
                }
                None => findings
                    .violate(ViolationKind::UnexpectedBlock, format!("block {id} of {key}/{partition}")),
            }
        }
        for id in known.iter().flatten().filter(|id| !read.blocks.contains_key(id)) {
            match refused(*id) {
                Some(_) => _ = findings.lost.insert((*partition, *id)),
                None => findings
                    .violate(ViolationKind::UnreportedLoss, format!("block {id} of {key}/{partition}")),
            }
        }
        for block in history.sent.keys().copied().filter(|id| must_be_served(*partition, *id)) {
            findings.intact += 1;
            if !read.blocks.contains_key(&block) {
                let why = refused(block).map_or("missing", |text| text.as_str()).to_owned();
                findings.missing.push(MissingBlock { partition: *partition, block, why });
            }
        }
    }
    findings
}

/// Returns the result of a partition, if there is one.
async fn check_results(
    worker: &impl WorkerView,
    key: &ShuffleKey,
    partition: i32,
    history: &PartitionHistory,
    findings: &mut ShuffleVerification,
) -> Option<BTreeSet<BlockId>> {
    match worker.results(key, partition).await {
        Ok(known) => {
            let missing: Vec<_> = history.reported.difference(&known).collect();
            if let Some(first) = missing.first() {
                let place = format!(
                    "{} of {} reported blocks of {key}/{partition} are missing, the first is {first}",
                    missing.len(),
                    history.reported.len()
                );
                findings.violate(ViolationKind::ShortResult, place);
            }
            if let Some(strange) = known.difference(&history.tried).next() {
                findings
                    .violate(ViolationKind::UnexpectedId, format!("block {strange} of {key}/{partition}"));
            }
            Some(known)
        }
        Err(refusal) => {
            let is_named =
                matches!(refusal, WorkerRefusal::Unknown(_)) || refusal.text().contains(&key.to_string());
            if !is_named {
                let place = format!("results of {key}/{partition}: {}", refusal.text());
                findings.violate(ViolationKind::UnnamedRefusal, place);
            }
            findings.results_refused = Some(refusal);
            None
        }
    }
}

/// Blocks that could be read, and the refused tasks with their texts.
#[derive(Debug, Default)]
struct SplitRead {
    blocks: Blocks,
    refused: BTreeMap<u64, String>,
}

/// Reads the blocks of `tasks`. A request that fails ([`WorkerRefusal::Failed`]) is split in
/// halves, down to a single task.
async fn read_split(worker: &impl WorkerView, key: &ShuffleKey, partition: i32, tasks: Treemap) -> SplitRead {
    let mut split = SplitRead::default();
    let mut remaining: Vec<Vec<u64>> = vec![tasks.to_vec()];
    while let Some(some) = remaining.pop().filter(|some| !some.is_empty()) {
        match worker.read(key, partition, &Treemap::of(&some)).await {
            Ok(blocks) => split.blocks.extend(blocks),
            Err(WorkerRefusal::Failed(_)) if some.len() > 1 => {
                let (first, second) = some.split_at(some.len() / 2);
                remaining.extend([first.to_vec(), second.to_vec()]);
            }
            Err(refusal) => {
                split.refused.extend(some.into_iter().map(|task| (task, refusal.text().to_owned())));
            }
        }
    }
    split
}
