//! The budget of the heap: memory that requests make the process hold beside the region and the
//! read memory.
//!
//! Requests, responses and stored state are charged here by kind before they are held. Buffers of
//! connections are not: `memory_plan` counts them. Arriving requests wait for room, and the client
//! stops sending. Stored state is refused with an error that names its kind. Invariant: all kinds
//! together stay within the whole ([`Heap`]), except for unchecked charges, which are bounded
//! elsewhere.

use super::tree::{Budget, Charge, NoCapacity};

/// Purpose of a heap charge.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum HeapKind {
    /// Requests that are arriving or being answered: their bytes and the messages decoded from
    /// them.
    Requests,
    /// Blocks of uncommitted sends, and lists of blocks in memory for which the region cedes
    /// nothing.
    Blocks,
    /// Responses that are being built or not yet taken by the client: their heads, bitmaps of block
    /// ids.
    Answers,
    /// State of registrations: applications, shuffles, ranges, properties.
    Registrations,
    /// Block ids of finished task attempts, and block ids that a start found in the tiers.
    ReportedIds,
    /// Partitions that were ever written to.
    Partitions,
}

impl HeapKind {
    /// All kinds, in the order of their discriminants.
    pub const ALL: [Self; 6] = [
        Self::Requests,
        Self::Blocks,
        Self::Answers,
        Self::Registrations,
        Self::ReportedIds,
        Self::Partitions,
    ];

    /// Returns the name used in metrics, status and errors.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Requests => "requests",
            Self::Blocks => "unfinished_blocks",
            Self::Answers => "answers",
            Self::Registrations => "registrations",
            Self::ReportedIds => "reported_ids",
            Self::Partitions => "partitions",
        }
    }

    /// Returns the largest part of the whole in sixteenths.
    fn sixteenths(self) -> u64 {
        match self {
            Self::Requests | Self::Blocks | Self::Answers | Self::ReportedIds => 8,
            // The finest-grained stored kind: with a heap of 128 MiB, two large applications get
            // 100,000 partitions each.
            Self::Partitions => 10,
            Self::Registrations => 4,
        }
    }

    fn outlives_its_request(self) -> bool {
        match self {
            Self::Requests | Self::Blocks | Self::Answers => false,
            Self::Registrations | Self::ReportedIds | Self::Partitions => true,
        }
    }
}

/// Error: the heap has no room for a charge.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("heap is full for {kind}: {requested} bytes requested, {free} free (see memory_store.heap_capacity)")]
pub struct HeapFull {
    /// Name of the kind.
    pub kind: &'static str,
    /// Requested bytes.
    pub requested: u64,
    /// Bytes that were free.
    pub free: u64,
}

impl HeapFull {
    /// Converts the refusal of a budget of `kind`.
    #[must_use]
    pub fn of(kind: HeapKind, refusal: NoCapacity) -> Self {
        Self { kind: kind.name(), requested: refusal.requested, free: refusal.free }
    }
}

/// Sixteenths of the whole for all kinds that outlive their request.
const KEPT_SIXTEENTHS: u64 = 12;

/// Sixteenths of the whole that the other kinds leave free.
const LEFT_SIXTEENTHS: u64 = 1;

/// The heap that clients make the worker hold beside blocks. Clones share it.
///
/// Invariants, except for unchecked charges ([`Budget::charge_unchecked`]), which are bounded
/// elsewhere: all kinds together stay within the whole. State that outlives its request
/// (registrations, ids, partitions) gets at most three quarters, so that requests can always be
/// answered. State that ends with its request leaves a sixteenth free, so that a flood of requests
/// does not block stored state. Of a kind that is divided among applications, each may hold as much
/// as it leaves to others (`sched::shares`): half if it is alone.
#[derive(Debug, Clone)]
pub struct Heap {
    whole: Budget,
    kinds: [Budget; HeapKind::ALL.len()],
}

impl Heap {
    /// Creates a heap of `capacity_bytes`.
    #[must_use]
    pub fn new(capacity_bytes: u64) -> Self {
        Self::of_whole(Budget::new(capacity_bytes))
    }

    /// Creates a heap that calls `return_freed` after each `step_bytes` charged, before they are
    /// held. The allocator may still keep memory of dropped charges. If `return_freed` returns it
    /// to the system, at most the heap and one step are resident.
    #[must_use]
    pub fn returning(capacity_bytes: u64, step_bytes: u64, return_freed: fn()) -> Self {
        Self::of_whole(Budget::with_step(capacity_bytes, step_bytes, return_freed))
    }

    fn of_whole(whole: Budget) -> Self {
        let capacity_bytes = whole.capacity();
        let kept = whole.child(capacity_bytes / 16 * KEPT_SIXTEENTHS);
        let kinds = HeapKind::ALL.map(|kind| {
            let most = capacity_bytes / 16 * kind.sixteenths();
            if kind.outlives_its_request() {
                kept.child(most)
            } else {
                whole.child_leaving(capacity_bytes / 16 * LEFT_SIXTEENTHS, most)
            }
        });
        Self { whole, kinds }
    }

    /// Returns the budget of all kinds together.
    #[must_use]
    pub fn whole(&self) -> &Budget {
        &self.whole
    }

    /// Returns the budget of a kind.
    #[must_use]
    pub fn of(&self, kind: HeapKind) -> &Budget {
        &self.kinds[kind as usize]
    }

    /// Returns a budget for one application: at most half of the kind, and less as less is free.
    #[must_use]
    pub fn of_one_app(&self, kind: HeapKind) -> Budget {
        self.of(kind).share()
    }

    /// Charges `bytes` of a kind, or nothing.
    ///
    /// # Errors
    /// [`HeapFull`] when fewer are free.
    pub fn try_charge(&self, kind: HeapKind, bytes: u64) -> Result<Charge, HeapFull> {
        self.of(kind).try_charge(bytes).map_err(|refusal| HeapFull::of(kind, refusal))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn stored_state_leaves_a_quarter_for_requests() {
        let heap = Heap::new(1600);
        for (number, kind) in HeapKind::ALL.into_iter().enumerate() {
            assert_eq!(kind as usize, number);
        }
        let ids = heap.try_charge(HeapKind::ReportedIds, 800).unwrap();
        let registered = heap.try_charge(HeapKind::Registrations, 400).unwrap();
        let refused = heap.try_charge(HeapKind::Registrations, 1).unwrap_err();
        assert_eq!(refused, HeapFull { kind: "registrations", requested: 1, free: 0 });
        assert!(
            heap.try_charge(HeapKind::Partitions, 1).is_err(),
            "another kind got heap although three quarters are in use"
        );
        let text = refused.to_string();
        assert!(text.contains("registrations") && text.contains("memory_store.heap_capacity"), "{text}");
        drop(heap.try_charge(HeapKind::Requests, 300).unwrap());
        assert!(heap.try_charge(HeapKind::Requests, 301).is_err());
        drop((ids, registered));
        assert_eq!(heap.whole().used(), 0);
    }

    #[test]
    fn one_application_gets_half_of_a_kind() {
        let heap = Heap::new(1600);
        for kind in HeapKind::ALL {
            let most = heap.of(kind).capacity() / 2;
            let (some, other) = (heap.of_one_app(kind), heap.of_one_app(kind));
            assert_eq!((some.capacity(), some.free()), (most, most));
            let held = some.try_charge(most).unwrap();
            assert!(some.try_charge(1).is_err() && other.try_charge(most / 2).is_ok());
            drop(held);
        }
        assert_eq!(heap.whole().used(), 0);
    }

    /// Requests that fill the heap must not block the next id of an honest application.
    #[test]
    fn full_requests_leave_application_shares_intact() {
        let heap = Heap::new(1600);
        let app = heap.of_one_app(HeapKind::ReportedIds);
        let held = app.try_charge(200).unwrap();
        let passing = [HeapKind::Requests, HeapKind::Blocks, HeapKind::Answers].map(|kind| heap.of(kind));
        let flood = passing.map(|budget| budget.try_charge(budget.free()).unwrap());
        assert!(
            passing.iter().all(|budget| budget.try_charge(1).is_err()),
            "requests must fill their part of the heap"
        );
        assert_eq!((app.free(), heap.whole().free()), (100, 100), "a sixteenth of the heap must be left");
        let more = app.try_charge(40).unwrap();
        drop(flood);
        let flood = passing.map(|budget| budget.try_charge(budget.free()).unwrap());
        assert_eq!(app.free(), 100, "a sixteenth must be left again");
        drop((flood, held, more));
        assert_eq!(heap.whole().used(), 0);
    }

    #[test]
    fn full_applications_leave_heap_for_the_next() {
        let heap = Heap::new(16 << 20);
        for kind in HeapKind::ALL.into_iter().filter(|kind| *kind != HeapKind::Requests) {
            let mut held = Vec::new();
            for number in 0..10 {
                let app = heap.of_one_app(kind);
                let free = app.free();
                assert!(
                    free >= heap.of(kind).capacity() >> 8,
                    "{}: application {number} has only {free} bytes",
                    kind.name()
                );
                assert_eq!(app.try_charge(free + 1).unwrap_err().free, free);
                held.push(app.try_charge(free).unwrap());
                assert!(app.try_charge(1).is_err(), "{}: application {number} exceeds its part", kind.name());
            }
        }
        assert_eq!(heap.whole().used(), 0);
    }
}
