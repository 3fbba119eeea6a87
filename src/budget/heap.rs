//! The budget of the heap: what requests make the process hold beside the region and the read memory.
//!
//! Everything a client can make grow is charged here before it is held, by kind. Requests that are arriving wait for it
//! (HTTP/2 windows and TCP reads are the back-pressure); what would be kept is refused with the kind's name.
//!
//! Invariants: all kinds together stay within the whole. What outlives its request (registrations, ids, partitions) has
//! three quarters of it at most, so that requests can always be answered; what ends with its request leaves a sixteenth, so
//! that a flood of requests refuses nobody what is kept. Of each of the kinds that are kept, and of blocks that are not
//! committed, an application has as much as it leaves to others (`left`): half when it is alone, and the next one finds some.

use super::ledger::{Budget, Charge, NoCapacity};

/// What heap is held for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum HeapKind {
    /// Requests that are arriving or being answered: their bytes, and the messages made of them.
    Requests,
    /// Blocks of sends that are not committed, and lists of those in memory for which the region cedes nothing.
    Blocks,
    /// Answers that are made or not taken yet: their heads, bitmaps of block ids.
    Answers,
    /// What registrations keep: applications, shuffles, ranges, properties.
    Registrations,
    /// Block ids of finished task attempts, and those that a start found in the tiers.
    ReportedIds,
    /// Partitions that were ever written to.
    Partitions,
}

impl HeapKind {
    /// All of them.
    pub const ALL: [Self; 6] = [
        Self::Requests,
        Self::Blocks,
        Self::Answers,
        Self::Registrations,
        Self::ReportedIds,
        Self::Partitions,
    ];

    /// As metrics, the status and errors call it.
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

    /// Sixteenths of the whole that it may have.
    fn sixteenths(self) -> u64 {
        match self {
            Self::Requests | Self::Blocks | Self::Answers | Self::ReportedIds => 8,
            // The finest of what is kept: of two large applications each has 100,000 with a heap of 128 MiB.
            Self::Partitions => 10,
            Self::Registrations => 4,
        }
    }

    /// Whether it is refused when there is none, so that an application must leave some to others. Requests and answers wait.
    fn is_shared_out(self) -> bool {
        self == Self::Blocks || self.outlives_its_request()
    }

    fn outlives_its_request(self) -> bool {
        match self {
            Self::Requests | Self::Blocks | Self::Answers => false,
            Self::Registrations | Self::ReportedIds | Self::Partitions => true,
        }
    }
}

/// No heap for something.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("heap is full for {kind}: {asked} bytes requested, {free} free (see memory_store.heap_capacity)")]
pub struct HeapFull {
    /// What for.
    pub kind: &'static str,
    /// What was asked for.
    pub asked: u64,
    /// What was free.
    pub free: u64,
}

impl HeapFull {
    /// A refusal of a budget of `kind`.
    #[must_use]
    pub fn of(kind: HeapKind, refusal: NoCapacity) -> Self {
        Self { kind: kind.name(), asked: refusal.asked, free: refusal.free }
    }
}

/// Sixteenths of the whole for all that outlives its request.
const KEPT_SIXTEENTHS: u64 = 12;

/// Sixteenths that what ends with its request leaves of the whole.
const LEFT_SIXTEENTHS: u64 = 1;

/// What clients make the worker hold beside blocks. Clones share it.
#[derive(Debug, Clone)]
pub struct Heap {
    whole: Budget,
    kinds: [Budget; HeapKind::ALL.len()],
}

impl Heap {
    /// A heap of `capacity_bytes`.
    #[must_use]
    pub fn new(capacity_bytes: u64) -> Self {
        Self::of_whole(Budget::new(capacity_bytes))
    }

    /// As [`Heap::new`]; `return_freed` is called after each `step_bytes` that were charged, before they are held. The memory of
    /// what was given back may be with the allocator still: when it returns that memory to the system then, no more than the heap
    /// and a step is resident.
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

    /// All kinds together.
    #[must_use]
    pub fn whole(&self) -> &Budget {
        &self.whole
    }

    /// The budget of a kind.
    #[must_use]
    pub fn of(&self, kind: HeapKind) -> &Budget {
        &self.kinds[kind as usize]
    }

    /// What one application may have of a kind: half, and of what is refused instead of waited for less the less is free.
    #[must_use]
    pub fn of_one_app(&self, kind: HeapKind) -> Budget {
        let budget = self.of(kind);
        if kind.is_shared_out() { budget.share() } else { budget.child(budget.capacity() / 2) }
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
        assert_eq!(refused, HeapFull { kind: "registrations", asked: 1, free: 0 });
        assert!(
            heap.try_charge(HeapKind::Partitions, 1).is_err(),
            "a kind of its own, within the same three quarters"
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

    /// The adversary suite found it twice: while requests filled the heap, an honest application's next id was refused.
    #[test]
    fn full_requests_leave_application_shares_intact() {
        let heap = Heap::new(1600);
        let app = heap.of_one_app(HeapKind::ReportedIds);
        let held = app.try_charge(200).unwrap();
        let passing = [HeapKind::Requests, HeapKind::Blocks, HeapKind::Answers].map(|kind| heap.of(kind));
        let flood = passing.map(|budget| budget.try_charge(budget.free()).unwrap());
        assert!(passing.iter().all(|budget| budget.try_charge(1).is_err()), "all that they may have");
        assert_eq!((app.free(), heap.whole().free()), (100, 100), "a sixteenth");
        let more = app.try_charge(40).unwrap();
        drop(flood);
        let flood = passing.map(|budget| budget.try_charge(budget.free()).unwrap());
        assert_eq!(app.free(), 100, "and it is left again");
        drop((flood, held, more));
        assert_eq!(heap.whole().used(), 0);
    }

    #[test]
    fn full_applications_leave_heap_for_the_next() {
        let heap = Heap::new(16 << 20);
        for kind in [HeapKind::Blocks, HeapKind::Registrations, HeapKind::ReportedIds, HeapKind::Partitions] {
            let mut held = Vec::new();
            for number in 0..10 {
                let app = heap.of_one_app(kind);
                let free = app.free();
                assert!(free >= heap.of(kind).capacity() >> 8, "{}: {free} for number {number}", kind.name());
                assert_eq!(app.try_charge(free + 1).unwrap_err().free, free);
                held.push(app.try_charge(free).unwrap());
                assert!(app.try_charge(1).is_err(), "{}: number {number} has its part", kind.name());
            }
        }
        assert_eq!(heap.whole().used(), 0);
    }
}
