//! Whether a worker keeps what clients were told, one block at a time.
//!
//! [`Told`] is what clients of one shuffle were told. [`verify`] asks a worker ([`Answers`]) for the results and for every
//! block, with task filters that lead around those it calls lost, and lists what does not fit. It is strict on purpose: a
//! worker that serves nothing and calls everything lost breaks no rule of the protocol, so each block that should be there
//! and is not served is named ([`Findings::withheld`]), and the caller says which blocks should be there.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;

use bytes::Bytes;
use croaring::Treemap;
use uniffle_client::block::IdLayout;
use uniffle_wire::types::{BlockId, ShuffleKey};

/// Blocks by id.
pub type Blocks = BTreeMap<BlockId, Bytes>;

/// Ids of a report, by partition.
pub type Report = [(i32, Vec<BlockId>)];

/// What clients of one registered shuffle sent and were told, by partition.
#[derive(Debug, Clone, Default)]
pub struct Told {
    pub partitions: BTreeMap<i32, ToldPartition>,
}

#[derive(Debug, Clone, Default)]
pub struct ToldPartition {
    /// Everything that was sent, whatever came of it.
    pub sent: Blocks,
    /// Ids in reports that were acknowledged.
    pub reported: BTreeSet<BlockId>,
    /// Ids in reports of any outcome: one without an answer may have been taken.
    pub tried: BTreeSet<BlockId>,
}

impl Told {
    pub fn partition(&mut self, partition: i32) -> &mut ToldPartition {
        self.partitions.entry(partition).or_default()
    }

    /// A report that was sent.
    pub fn tried(&mut self, report: &Report) {
        for (partition, ids) in report {
            self.partition(*partition).tried.extend(ids);
        }
    }

    /// A report that was acknowledged.
    pub fn reported(&mut self, report: &Report) {
        self.tried(report);
        for (partition, ids) in report {
            self.partition(*partition).reported.extend(ids);
        }
    }
}

/// Why a worker does not answer.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Refusal {
    /// It says that something is lost or may be missing, or that it failed.
    Told(String),
    /// It does not know the application or the shuffle (NO_REGISTER).
    Unknown(String),
}

impl Refusal {
    #[must_use]
    pub fn text(&self) -> &str {
        match self {
            Self::Told(text) | Self::Unknown(text) => text,
        }
    }
}

/// A worker as readers see it. Waiting while it says NO_BUFFER is the implementation's business.
pub trait Answers {
    /// `getShuffleResult` of one partition.
    fn results(
        &self,
        key: &ShuffleKey,
        partition: i32,
    ) -> impl Future<Output = Result<BTreeSet<BlockId>, Refusal>>;

    /// Blocks of these task attempts, through all tiers, checksums compared.
    fn read(
        &self,
        key: &ShuffleKey,
        partition: i32,
        tasks: &Treemap,
    ) -> impl Future<Output = Result<Blocks, Refusal>>;
}

/// What must never be.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Breach {
    /// A result without a block whose report was acknowledged: a job computes with less.
    ShortResult,
    /// A result with a block that no report named.
    StrangeResult,
    /// A block with other bytes than were sent.
    WrongBytes,
    /// A block that was never sent.
    StrangeBlock,
    /// A block of the result that is not served, and a read that wants it succeeds.
    UntoldLoss,
    /// A refusal that does not name the shuffle.
    NamelessRefusal,
}

/// A [`Breach`] and where.
#[derive(Debug, Clone)]
pub struct Violation {
    pub breach: Breach,
    pub place: String,
}

impl fmt::Display for Violation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:?}: {}", self.breach, self.place)
    }
}

/// A block that should be there and was not served, and what was said instead.
#[derive(Debug, Clone)]
pub struct Withheld {
    pub partition: i32,
    pub block: BlockId,
    pub why: String,
}

/// What [`verify`] found of one shuffle.
#[derive(Debug, Default)]
pub struct Findings {
    pub violations: Vec<Violation>,
    /// Blocks that should be there and were not served.
    pub withheld: Vec<Withheld>,
    /// Blocks that should be there.
    pub intact: u64,
    /// Blocks that were served, each once.
    pub served: u64,
    /// Blocks whose loss is told, exactly.
    pub lost: BTreeSet<(i32, BlockId)>,
    /// Why results are refused; of one partition, as they are refused for all.
    pub results_refused: Option<Refusal>,
}

impl Findings {
    fn violate(&mut self, breach: Breach, place: String) {
        self.violations.push(Violation { breach, place });
    }
}

/// Asks for everything of a shuffle. `should_be_there` says of a block that was sent whether it must be served.
pub async fn verify(
    worker: &impl Answers,
    key: &ShuffleKey,
    told: &Told,
    layout: IdLayout,
    should_be_there: impl Fn(i32, BlockId) -> bool,
) -> Findings {
    let mut findings = Findings::default();
    for (partition, told) in &told.partitions {
        let known = judge_results(worker, key, (*partition, told), &mut findings).await;
        let wanted = told.sent.keys().chain(known.iter().flatten());
        let tasks: Treemap = wanted.map(|id| layout.task_of(*id).0.cast_unsigned()).collect();
        let read = read_around(worker, key, *partition, tasks).await;
        let refused = |id: BlockId| read.refused.get(&layout.task_of(id).0.cast_unsigned());
        findings.served += read.blocks.len() as u64;
        for (id, data) in &read.blocks {
            match told.sent.get(id) {
                Some(sent) if sent == data => {}
                Some(_) => findings.violate(Breach::WrongBytes, format!("block {id} of {key}/{partition}")),
                None => findings.violate(Breach::StrangeBlock, format!("block {id} of {key}/{partition}")),
            }
        }
        for id in known.iter().flatten().filter(|id| !read.blocks.contains_key(id)) {
            match refused(*id) {
                Some(_) => _ = findings.lost.insert((*partition, *id)),
                None => findings.violate(Breach::UntoldLoss, format!("block {id} of {key}/{partition}")),
            }
        }
        for block in told.sent.keys().copied().filter(|id| should_be_there(*partition, *id)) {
            findings.intact += 1;
            if !read.blocks.contains_key(&block) {
                let why = refused(block).map_or("it is not there", |text| text.as_str()).to_owned();
                findings.withheld.push(Withheld { partition: *partition, block, why });
            }
        }
    }
    findings
}

/// The result of a partition, if there is one.
async fn judge_results(
    worker: &impl Answers,
    key: &ShuffleKey,
    (partition, told): (i32, &ToldPartition),
    findings: &mut Findings,
) -> Option<BTreeSet<BlockId>> {
    match worker.results(key, partition).await {
        Ok(known) => {
            let missing: Vec<_> = told.reported.difference(&known).collect();
            if let Some(first) = missing.first() {
                let place = format!(
                    "{} of {} reported blocks of {key}/{partition} are missing, the first is {first}",
                    missing.len(),
                    told.reported.len()
                );
                findings.violate(Breach::ShortResult, place);
            }
            if let Some(strange) = known.difference(&told.tried).next() {
                findings.violate(Breach::StrangeResult, format!("block {strange} of {key}/{partition}"));
            }
            Some(known)
        }
        Err(refusal) => {
            let is_named =
                matches!(refusal, Refusal::Unknown(_)) || refusal.text().contains(&key.to_string());
            if !is_named {
                let place = format!("results of {key}/{partition}: {}", refusal.text());
                findings.violate(Breach::NamelessRefusal, place);
            }
            findings.results_refused = Some(refusal);
            None
        }
    }
}

/// What could be read of some tasks, and which tasks were refused with what text.
#[derive(Debug, Default)]
struct AroundLosses {
    blocks: Blocks,
    refused: BTreeMap<u64, String>,
}

/// Reads blocks of `tasks`: what is refused is asked for again in halves, down to a single task.
async fn read_around(
    worker: &impl Answers,
    key: &ShuffleKey,
    partition: i32,
    tasks: Treemap,
) -> AroundLosses {
    let mut around = AroundLosses::default();
    let mut left: Vec<Vec<u64>> = vec![tasks.to_vec()];
    while let Some(some) = left.pop().filter(|some| !some.is_empty()) {
        match worker.read(key, partition, &Treemap::of(&some)).await {
            Ok(blocks) => around.blocks.extend(blocks),
            Err(Refusal::Told(_)) if some.len() > 1 => {
                let (first, second) = some.split_at(some.len() / 2);
                left.extend([first.to_vec(), second.to_vec()]);
            }
            Err(refusal) => {
                around.refused.extend(some.into_iter().map(|task| (task, refusal.text().to_owned())));
            }
        }
    }
    around
}
