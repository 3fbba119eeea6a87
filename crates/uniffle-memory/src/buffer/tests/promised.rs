//! A valid ticket always finds its bytes, whatever other senders do.

use proptest::prelude::*;

use super::*;

/// The region of 4 MiB exceeds this capacity by 63 KiB.
const CAPACITY_BYTES: u64 = (4 * MIB) / 65 * 64;
const SHARED_PARTITIONS: i32 = 2;

#[derive(Debug, Clone)]
enum Step {
    /// Starts a send of an application whose sends share partitions.
    Open {
        kib: u64,
    },
    /// Adds a block to such a send.
    Fill {
        send: prop::sample::Index,
        partition: i32,
        len: u32,
    },
    Commit(prop::sample::Index),
    Abort(prop::sample::Index),
    Seal(i32),
    Release(prop::sample::Index),
    /// One complete send of another application, in its own partition.
    Honest {
        kib: u64,
        len: u32,
    },
    ForgetHonest,
}

fn steps() -> impl Strategy<Value = Vec<Step>> {
    let at = any::<prop::sample::Index>();
    let partition = 0..SHARED_PARTITIONS;
    let len = prop_oneof![4 => 1u32..64, 2 => 1u32..9000, 1 => 1u32..300_000];
    let step = prop_oneof![
        3 => (1u64..1500).prop_map(|kib| Step::Open { kib }),
        12 => (at.clone(), partition.clone(), len.clone())
            .prop_map(|(send, partition, len)| Step::Fill { send, partition, len }),
        2 => at.clone().prop_map(Step::Commit),
        1 => at.clone().prop_map(Step::Abort),
        3 => partition.prop_map(Step::Seal),
        1 => at.prop_map(Step::Release),
        2 => (1u64..1500, len).prop_map(|(kib, len)| Step::Honest { kib, len }),
        1 => Just(Step::ForgetHonest),
    ];
    prop::collection::vec(step, 1..400)
}

struct Send {
    funds: Reservation,
    blocks: Vec<(i32, (BlockMeta, BlockFill))>,
}

struct Run {
    memory: Arc<Memory>,
    shared: Vec<Arc<Buffer>>,
    sends: Vec<Send>,
    batches: Vec<(i32, Arc<SealedBatch>)>,
    honest: i32,
    next: i64,
}

fn app_named(name: &str) -> AppId {
    AppId::parse(name).unwrap()
}

fn shuffle_of(memory: &Memory, app: &str) -> Arc<crate::ShuffleBuffers> {
    memory.register(&ShuffleKey::new(app_named(app), ShuffleId(0)), Distribution::Normal)
}

fn ticket(memory: &Memory, app: &str, bytes: u64, partitions: usize) -> Option<Reservation> {
    let app = app_named(app);
    let id = memory.tickets().require(&app, bytes, partitions).ok()?;
    Some(memory.tickets().redeem(&app, id).unwrap())
}

fn index(partition: i32) -> usize {
    usize::try_from(partition).unwrap()
}

impl Run {
    fn new() -> Self {
        let memory = memory(CAPACITY_BYTES);
        let shuffle = shuffle_of(&memory, "shared");
        let heap = partitions(&memory).clone();
        let shared =
            (0..SHARED_PARTITIONS).map(|at| shuffle.buffer(PartitionId(at), &heap).unwrap()).collect();
        Self { memory, shared, sends: Vec::new(), batches: Vec::new(), honest: 0, next: 0 }
    }

    fn step(&mut self, step: Step) {
        match step {
            Step::Open { kib } => {
                let funds = ticket(&self.memory, "shared", kib << 10, self.shared.len());
                self.sends.extend(funds.map(|funds| Send { funds, blocks: Vec::new() }));
            }
            Step::Fill { send, partition, len } if !self.sends.is_empty() => {
                let send = send.index(self.sends.len());
                self.fill(send, partition, len);
            }
            Step::Commit(at) if !self.sends.is_empty() => {
                let Send { mut funds, blocks } = self.sends.swap_remove(at.index(self.sends.len()));
                for (partition, block) in blocks {
                    // Refused beyond the limit of blocks, which is equivalent to an abort.
                    let _ = self.shared[index(partition)].commit(vec![block], &mut funds);
                }
            }
            Step::Abort(at) if !self.sends.is_empty() => {
                self.sends.swap_remove(at.index(self.sends.len()));
            }
            Step::Seal(partition) => {
                self.batches.extend(self.shared[index(partition)].seal().map(|batch| (partition, batch)));
            }
            Step::Release(at) if !self.batches.is_empty() => {
                let (partition, batch) = self.batches.swap_remove(at.index(self.batches.len()));
                self.shared[index(partition)].release(&batch);
            }
            Step::Honest { kib, len } => self.honest(kib << 10, len),
            Step::ForgetHonest => {
                drop(self.memory.forget(&ShuffleKey::new(app_named("honest"), ShuffleId(0))));
            }
            Step::Fill { .. } | Step::Commit(_) | Step::Abort(_) | Step::Release(_) => {}
        }
    }

    fn fill(&mut self, send: usize, partition: i32, len: u32) {
        let Send { funds, blocks } = &mut self.sends[send];
        let held = funds.held_bytes();
        match self.shared[index(partition)].reserve(len, funds) {
            Ok(mut fill) => {
                fill.write(&vec![7; len as usize]);
                blocks.push((partition, (meta(self.next, 0, len as usize), fill)));
                self.next += 1;
            }
            Err(MemoryError::TicketOverspent { .. }) => {}
            Err(refused) => {
                assert!(matches!(refused, MemoryError::NoCapacity { .. }), "{refused}");
                let needed = u64::from(len).next_multiple_of(4096);
                assert!(held < needed, "{held} of {needed} needed bytes are held: {refused}");
                self.sends.swap_remove(send);
            }
        }
    }

    /// Uses the bytes of the ticket, in up to 300 blocks of `len`.
    fn honest(&mut self, bytes: u64, len: u32) {
        let Some(mut funds) = ticket(&self.memory, "honest", bytes, 1) else { return };
        self.honest += 1;
        let buffer = shuffle_of(&self.memory, "honest")
            .buffer(PartitionId(self.honest), partitions(&self.memory))
            .unwrap();
        let mut blocks = Vec::new();
        for _ in 0..(bytes / u64::from(len)).min(300) {
            let mut fill = buffer.reserve(len, &mut funds).expect("the ticket covers the block");
            fill.write(&vec![7; len as usize]);
            blocks.push((meta(self.next, 0, len as usize), fill));
            self.next += 1;
        }
        let _ = buffer.commit(blocks, &mut funds);
    }

    fn check(&self) {
        let free = self.memory.shared.supply.region.free_bytes();
        let promised = self.memory.pre_allocated_bytes();
        assert!(free >= promised, "{promised} bytes are promised, but only {free} are free");
    }
}

proptest! {
    #[test]
    fn ticket_guarantees_its_bytes(steps in steps()) {
        let mut run = Run::new();
        for step in steps {
            run.step(step);
            run.check();
        }
    }
}

#[test]
fn metadata_beyond_capacity_does_not_reduce_a_ticket() {
    let memory = memory(CAPACITY_BYTES);
    let mut funds = ticket(&memory, "honest", MIB, 1).unwrap();
    let flood = shuffle_of(&memory, "flood").buffer(PartitionId(0), partitions(&memory)).unwrap();
    let mut all = ticket(&memory, "flood", memory.budget().free() - 4096, 1).unwrap();
    let blocks: Vec<_> = (0..9000).map(|id| fill(&flood, id, 0, 8, &mut all)).collect();
    let rest = u32::try_from(all.remaining_bytes()).unwrap();
    let large = flood.reserve(rest, &mut all).unwrap();
    flood.commit(blocks, &mut all).unwrap();
    assert!(memory.used_bytes() > memory.capacity_bytes());
    let honest = shuffle_of(&memory, "honest").buffer(PartitionId(0), partitions(&memory)).unwrap();
    for _ in 0..64 {
        let _ = honest.reserve(16 << 10, &mut funds).expect("the ticket covers the block");
    }
    drop(large);
}

/// The lists of a ticket's partitions are not reserved by the ticket.
#[test]
fn new_partition_lists_stay_bounded_under_full_tickets() {
    use crate::admission::metadata_reserve::FREE_BYTES;
    let (capacity_bytes, heap_bytes) = (64 * MIB, 16 * MIB);
    let config = MemoryConfig { capacity_bytes, heap_bytes, ..MemoryConfig::default() };
    let memory = Memory::new(&config, &Registry::new()).unwrap();
    let all: Vec<_> = std::iter::from_fn(|| ticket(&memory, "many", 64, 64)).collect();
    assert!(memory.budget().free() < 64 * 4097 && all.len() > 250);
    let (region, lists) = (&memory.shared.supply.region, &memory.shared.supply.lists);
    let (mut stored, mut refused) = (0_u32, 0_u32);
    for (mut funds, at) in all.into_iter().zip(0..) {
        for partition in at * 64..(at + 1) * 64 {
            let buffer =
                shuffle_of(&memory, "many").buffer(PartitionId(partition), partitions(&memory)).unwrap();
            let kept = buffer.reserve(1, &mut funds).and_then(|mut fill| {
                fill.write(&[7]);
                buffer.commit(vec![(meta(i64::from(partition), 0, 1), fill)], &mut funds)
            });
            *(if kept.is_ok() { &mut stored } else { &mut refused }) += 1;
            let chains = region.capacity_bytes() - region.free_bytes() - lists.ceded_bytes();
            let lent = memory.heap().of(HeapKind::Blocks).used();
            let bound = region.capacity_bytes() + FREE_BYTES + lent + LIST_BYTES;
            assert!(chains + lists.charged_bytes() <= bound && lent <= heap_bytes / 2);
        }
    }
    assert!(stored > 10_000 && refused > 0, "{stored} blocks were stored, {refused} refused");
    drop(memory.forget(&ShuffleKey::new(app_named("many"), ShuffleId(0))));
    assert_eq!((memory.used_bytes(), memory.heap().whole().used()), (0, 0));
}
