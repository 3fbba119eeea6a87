//! Recovery of the store's data at a start.
//!
//! The metadata log has the living shuffles. Their segments form a chain, which is followed from
//! the newest to the oldest. Segments outside the chain are uploads of unknown outcome. If a
//! segment is missing or damaged, only its blocks are lost. The reported reason names the object.
//!
//! The number of concurrent requests of each kind is bounded, and memory for responses is charged.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use futures::stream::{self, StreamExt as _, TryStreamExt as _};
use object_store::{ObjectMeta, ObjectStore as _};

use super::object_indexes::{Data, IndexMemory, Indexes};
use crate::clock::sleep;
use crate::log::{Incarnation, ListedObject, ShippedLog};
use crate::store::object::claim::{claim_key, earlier_layout};
use crate::store::object::core::ObjectCore;
use crate::store::object::layout::{Name, Registered, is_page, parse_key, path_of, shuffle_prefix};
use crate::store::object::log_objects::StoredLog;
use crate::store::object::shuffle::ObjectShuffle;
use crate::store::object::upload::segment::SegmentNumbers;
use crate::store::{StoreError, StoreErrorKind, StoredShuffle};

/// Maximum number of shuffles read concurrently.
const AT_ONCE: usize = 64;

/// Number of skipped segment numbers, because requests of the previous process may still arrive.
const NUMBERS_LEFT_OUT: u32 = 1000;

/// Pauses after outdated lists of objects.
const LIST_PAUSES: [Duration; 4] =
    [Duration::from_secs(1), Duration::from_secs(3), Duration::from_secs(10), Duration::from_secs(15)];

/// Segments of a registration: size by number.
type Segments = BTreeMap<u32, u64>;

/// A recovered shuffle.
#[derive(Debug)]
pub(in crate::store) struct FoundRegistration {
    pub(in crate::store) shuffle: Arc<ObjectShuffle>,
    pub(in crate::store) stored: StoredShuffle,
    /// Keys of segments outside the chain. Empty if data of the shuffle is missing.
    pub(in crate::store) strays: Vec<String>,
}

/// Recovered state of the store.
#[derive(Debug)]
pub(in crate::store) struct BucketSurvey {
    pub(in crate::store) log: Arc<ShippedLog>,
    pub(in crate::store) found: Vec<FoundRegistration>,
    /// Registrations that were removed or never offloaded, but have segments. Empty if the log may
    /// lack registrations.
    pub(in crate::store) abandoned: Vec<Registered>,
    pub(in crate::store) next_incarnation: u64,
}

/// Reads the state below the worker's prefix.
///
/// # Errors
/// The store does not answer or refuses, its lists stay outdated, or an earlier development build
/// wrote there. Then the state is unknown, and the worker must not start.
pub(in crate::store) async fn survey(core: &Arc<ObjectCore>) -> Result<BucketSurvey, StoreError> {
    let (mut segments, names) = list_current(core).await?;
    let objects = Arc::new(StoredLog(Arc::clone(core)));
    let log = ShippedLog::read(objects, &names, &core.extents, !segments.is_empty()).await;
    let log = log.map_err(|error| StoreError::of_log(&error, &core.settings.root))?;
    let highest = segments.keys().map(|name| name.incarnation.saturating_add(1)).max();
    let next_incarnation = log.next_incarnation().max(highest.unwrap_or(0));
    let memory = IndexMemory::default();
    // If nothing of a shuffle was offloaded, local disks have all its data.
    let living = log.shuffles().iter().filter(|(_, found)| found.is_moved);
    let mut reads = Vec::new();
    for (key, found) in living {
        let name = Registered { key: key.clone(), incarnation: found.incarnation };
        let of_it = segments.remove(&name).unwrap_or_default();
        reads.push(read(core, name, of_it, &memory));
    }
    if let Some(gap) = log.gap() {
        // Local disks may know these registrations, so their segments stay.
        let unknown: Vec<Registered> =
            segments.keys().filter(|name| !log.is_over(&incarnation_of(name))).cloned().collect();
        tracing::error!(
            reason = gap,
            registrations = unknown.len(),
            "the metadata log in the object store is incomplete; keeping segments of unknown registrations"
        );
        for name in unknown {
            let of_it = segments.remove(&name).unwrap_or_default();
            reads.push(read(core, name, of_it, &memory));
        }
    }
    let mut found: Vec<FoundRegistration> = stream::iter(reads).buffered(AT_ONCE).try_collect().await?;
    for it in &mut found {
        if !log.knows(&incarnation_of(&it.shuffle.name)) && it.stored.reason.is_empty() {
            "the registration is lost".clone_into(&mut it.stored.reason);
        }
    }
    let abandoned = if log.may_lack_registrations() { Vec::new() } else { segments.into_keys().collect() };
    Ok(BucketSurvey { log, found, abandoned, next_incarnation })
}

fn incarnation_of(name: &Registered) -> Incarnation {
    Incarnation { key: name.key.clone(), number: name.incarnation }
}

type Listed = (BTreeMap<Registered, Segments>, Vec<ListedObject>);

/// Lists the objects below the worker's prefix. Lists again while the list is older than the claim
/// of this start, because such a list may lack objects of the previous process.
///
/// # Errors
/// The store does not answer or refuses, its lists stay outdated, or an earlier development build
/// wrote there.
async fn list_current(core: &ObjectCore) -> Result<Listed, StoreError> {
    let root = &core.settings.root;
    for pause in LIST_PAUSES {
        let (listed, claim) = list(core).await?;
        if core.claim.is_listed(&*core.store, claim.as_ref()).await? {
            return Ok(listed);
        }
        tracing::warn!(prefix = root, "the object store's list of objects is old; listing again");
        sleep(pause).await;
    }
    let what = format!(
        "the list of objects lacks {}, which was written before, so the list is old and may lack data; restart when \
         the store lists current objects",
        claim_key(root)
    );
    Err(StoreError::remote(StoreErrorKind::Unreachable, root, what))
}

/// Returns the objects below the worker's prefix, and its claim as listed.
async fn list(core: &ObjectCore) -> Result<(Listed, Option<ObjectMeta>), StoreError> {
    let root = &core.settings.root;
    let ((mut segments, mut log), mut claim): (Listed, _) = Default::default();
    let mut listed = core.store.list(Some(&path_of(root)));
    while let Some(object) = core.observe(root, listed.try_next().await)? {
        let key = object.location.as_ref();
        match parse_key(root, key) {
            Some(Name::Segment(name, number)) => {
                segments.entry(name).or_default().insert(number, object.size);
            }
            Some(Name::Log(log_object, copy)) => {
                log.push(ListedObject { object: log_object, copy, bytes: object.size });
            }
            Some(Name::Settings(_)) => {}
            None if key == claim_key(root) => claim = Some(object),
            None if is_page(root, key) => return Err(earlier_layout(key)),
            None => {
                tracing::warn!(key, "ignoring an object of another program below this worker's prefix")
            }
        }
    }
    Ok(((segments, log), claim))
}

async fn read(
    core: &Arc<ObjectCore>,
    name: Registered,
    segments: Segments,
    memory: &IndexMemory,
) -> Result<FoundRegistration, StoreError> {
    let prefix = shuffle_prefix(&core.settings.root, &name);
    let indexes = Indexes { core, prefix: &prefix, incarnation: name.incarnation, memory };
    let (chain, data) = indexes.read(&segments).await?;
    let last = segments.keys().next_back().copied();
    let published = segments.keys().rev().find(|number| chain.contains_key(number));
    let last_number = last.unwrap_or(0).saturating_add(NUMBERS_LEFT_OUT);
    let numbers = SegmentNumbers { last_number, published: published.copied().unwrap_or(0) };
    let is_stray = |number: &&u32| !chain.contains_key(number) && data.reason.is_empty();
    let shuffle = ObjectShuffle::restored(core, name, numbers);
    let strays = segments.keys().filter(is_stray).map(|number| shuffle.segment_key(*number)).collect();
    for (number, tail) in &chain {
        shuffle.count(core, tail.payload_bytes, segments.get(number).copied().unwrap_or(0));
    }
    let Data { extents, charge, present, reason, .. } = data;
    let incarnation = shuffle.name.incarnation;
    let stored = StoredShuffle { incarnation, extents, present, reason, _charge: charge };
    Ok(FoundRegistration { shuffle: Arc::new(shuffle), stored, strays })
}
