//! Histories of a memory whose process dies at every single store into the front of its region. The
//! blocks that the next process finds are compared with the committed ones. Also regions with
//! flipped bits. The helpers serve the tests of files, names and pages too.

mod files;
mod names;
mod pages;

use std::collections::{BTreeMap, BTreeSet};
use std::os::fd::OwnedFd;
use std::sync::Arc;

use parking_lot::Mutex;
use prometheus::Registry;
use proptest::prelude::*;

use super::layout::{Geometry, HEADER_WORDS, NAME_WORDS, ROW_WORDS};
use super::rows::FreeRows;
use super::table::BlockTable;
use crate::{
    Backing, BlockFill, Buffer, IsElsewhere, Memory, MemoryConfig, MemoryFileError, Owner, Reservation,
};
use uniffle_base::budget::HeapKind;
use uniffle_wire::types::{
    AppId, BlockId, BlockMeta, Distribution, PartitionId, ShuffleId, ShuffleKey, TaskAttemptId,
};

const MIB: u64 = 1 << 20;
const SHUFFLES: i32 = 2;
const PARTITIONS: i32 = 2;

fn config(backing: Backing) -> MemoryConfig {
    MemoryConfig {
        capacity_bytes: 2 * MIB,
        read_capacity_bytes: 2 * MIB,
        heap_bytes: 96 * MIB,
        ticket_timeout: std::time::Duration::from_secs(300),
        tickets_max: 1000,
        blocks_max: 2000,
        backing,
        ..MemoryConfig::default()
    }
}

fn owner() -> Owner {
    Owner { node: "10.0.0.1-19999".to_owned(), boot: 7 }
}

fn open(file: Option<OwnedFd>) -> Arc<Memory> {
    Memory::open(&config(Backing::Memfd), &owner(), file, &Registry::new()).unwrap()
}

fn key(shuffle: i32) -> ShuffleKey {
    ShuffleKey::new(AppId::parse("app").unwrap(), ShuffleId(shuffle))
}

fn table(memory: &Memory) -> &Arc<BlockTable> {
    &memory.persistent.as_ref().unwrap().table
}

/// Returns the number of committed rows.
fn rows_left(memory: &Memory) -> usize {
    let table = table(memory);
    table.found_rows(table.rows.to_be_read()).count()
}

fn buffer(memory: &Memory, shuffle: i32, partition: i32) -> Arc<Buffer> {
    let heap = memory.heap().of(HeapKind::Partitions);
    memory.register(&key(shuffle), Distribution::Normal).buffer(PartitionId(partition), heap).unwrap()
}

fn funds(memory: &Memory, bytes: u64) -> Option<Reservation> {
    let app = AppId::parse("app").unwrap();
    let ticket = memory.tickets().require(&app, bytes, 1).ok()?;
    Some(memory.tickets().redeem(&app, ticket).unwrap())
}

/// Block contents are derived from the id.
fn payload(id: i64, len: u32) -> Vec<u8> {
    let unit: [u8; 251] =
        std::array::from_fn(|at| id.wrapping_mul(31).wrapping_add(at as i64 * 7).to_le_bytes()[0]);
    let mut bytes = unit.repeat(len as usize / unit.len() + 1);
    bytes.truncate(len as usize);
    bytes
}

/// Registers all shuffles and restores their blocks, except those in a tier.
fn restored(memory: &Memory, is_elsewhere: impl Fn(i32, PartitionId, BlockId) -> bool + Sync) -> Found {
    restored_of(memory, SHUFFLES, is_elsewhere)
}

/// Restores like [`restored`], with only the first `known` shuffles registered.
fn restored_of(
    memory: &Memory,
    known: i32,
    is_elsewhere: impl Fn(i32, PartitionId, BlockId) -> bool + Sync,
) -> Found {
    let mut found = Found::new();
    for shuffle in 0..known {
        memory.register(&key(shuffle), Distribution::Normal);
    }
    for shuffle in 0..known {
        let heap = memory.heap().of(HeapKind::Partitions);
        let is_elsewhere = &is_elsewhere;
        let elsewhere =
            |partition| -> IsElsewhere<'_> { Box::new(move |id| is_elsewhere(shuffle, partition, id)) };
        let ids = memory.restore(&key(shuffle), elsewhere, heap, |_, ids| ids);
        for (PartitionId(partition), ids) in ids {
            found.insert((shuffle, partition), ids.into_iter().map(|BlockId(id)| id).collect());
        }
    }
    memory.finish_restore();
    found
}

/// Ids by shuffle and partition, in read order.
type Found = BTreeMap<(i32, i32), Vec<i64>>;

/// Returns the ids that a reader finds, and checks their bytes.
fn read(memory: &Memory) -> Found {
    let mut found = Found::new();
    for shuffle in 0..SHUFFLES {
        let Some(buffers) = memory.shuffle(&key(shuffle)) else { continue };
        for buffer in buffers.all() {
            let read = buffer.read(None, u64::MAX, None);
            let bytes = read.data.concat();
            let mut at = 0;
            for block in &read.blocks {
                let end = at + block.length as usize;
                assert!(
                    bytes[at..end] == payload(block.block_id.0, block.length),
                    "block {block:?} has other bytes"
                );
                at = end;
            }
            let ids: Vec<i64> = read.blocks.iter().map(|block| block.block_id.0).collect();
            if !ids.is_empty() {
                found.insert((shuffle, buffer.partition().0), ids);
            }
        }
    }
    found
}

/// Blocks that must be found if the process dies now, and blocks that may be.
#[derive(Debug, Default)]
struct Model {
    must: Found,
    /// Blocks that are being committed, released or purged. During a restart, also blocks that a
    /// tier has, and blocks of a shuffle that the log does not know.
    may: BTreeSet<i64>,
    /// Blocks whose bytes were changed. They may be found but are never shown.
    damaged: BTreeSet<i64>,
    stores: usize,
}

impl Model {
    /// Returns the visible part of `found` after verification.
    fn shown(&self, mut found: Found) -> Found {
        found.values_mut().for_each(|ids| ids.retain(|id| !self.damaged.contains(id)));
        found.retain(|_, ids| !ids.is_empty());
        found
    }

    fn compare(&self, found: &Found) {
        for (at, ids) in &self.must {
            let there = found.get(at).cloned().unwrap_or_default();
            let there: Vec<i64> = there.into_iter().filter(|id| ids.contains(id)).collect();
            assert_eq!(&there, ids, "wrong blocks in {at:?} at store {}", self.stores);
        }
        for (at, ids) in found {
            let must = self.must.get(at);
            let unexpected =
                ids.iter().find(|id| !must.is_some_and(|all| all.contains(id)) && !self.may.contains(id));
            assert_eq!(unexpected, None, "unexpected blocks at store {} of {at:?}", self.stores);
            assert_eq!(
                ids.iter().collect::<BTreeSet<_>>().len(),
                ids.len(),
                "a block is found twice in {at:?}"
            );
        }
    }
}

const ZEROES: [u8; 16 << 10] = [0; 16 << 10];

/// Copies the current region to another file: the header, the first 64 names, the first 600 rows
/// and all segments. The histories use no more.
fn copy(file: &OwnedFd) -> OwnedFd {
    let geometry = table_geometry();
    let to = rustix::fs::memfd_create("copy", rustix::fs::MemfdFlags::CLOEXEC).unwrap();
    rustix::fs::ftruncate(&to, geometry.bytes()).unwrap();
    let ranges = [
        (0, 8 * (HEADER_WORDS + 64 * NAME_WORDS)),
        (8 * geometry.row_at(0), 8 * 600 * ROW_WORDS),
        (usize::try_from(geometry.front_bytes()).unwrap(), usize::try_from(geometry.data_bytes).unwrap()),
    ];
    for (at, bytes) in ranges {
        let mut content = vec![0; bytes];
        let read = rustix::io::pread(file, &mut content[..], at as u64).unwrap();
        // Zero chunks stay holes.
        for (number, chunk) in content[..read].chunks(ZEROES.len()).enumerate() {
            if chunk != &ZEROES[..chunk.len()] {
                rustix::io::pwrite(&to, chunk, (at + number * ZEROES.len()) as u64).unwrap();
            }
        }
    }
    to
}

fn table_geometry() -> Geometry {
    let size = crate::region_size(&config(Backing::Memfd));
    Geometry::of(crate::Region::bytes_of(size.bytes).unwrap(), size.blocks)
}

/// Checks that the next process finds the expected blocks, and holds nothing after a purge.
fn look(file: &OwnedFd, model: &Model) {
    let memory = open(Some(copy(file)));
    let found = restored(&memory, |_, _, _| false);
    memory.buffers().iter().for_each(|buffer| buffer.verify());
    let found = model.shown(found);
    assert_eq!(read(&memory), found);
    model.compare(&found);
    for shuffle in 0..SHUFFLES {
        drop(memory.forget(&key(shuffle)));
    }
    assert_eq!((memory.used_bytes(), memory.block_count()), (0, 0));
    assert_eq!(rows_left(&memory) + table(&memory).found_names().len(), 0);
    let BlockTable { names, rows, .. } = &**table(&memory);
    assert!(names.lock().slots.with_pages().is_empty() && rows.lock().slots.with_pages().is_empty());
}

#[derive(Debug, Clone)]
enum Step {
    /// One send with blocks of these lengths.
    Send(i32, i32, Vec<u32>),
    /// A send that is aborted before its commit.
    Abort(i32, i32, Vec<u32>),
    /// A repeated send of the present blocks.
    Resend(i32, i32),
    /// A block that is committed after its chain was sealed and released.
    Late(i32, i32, u32),
    /// A batch that is sealed and released.
    Flush(i32, i32),
    /// A batch that is sealed and stays in flight.
    Seal(i32, i32),
    /// Unregistered and registered again, with a new block before the old memory is freed.
    Purge(i32),
    /// Another process takes over. A tier has this number of each partition's oldest blocks.
    Restart(usize),
    /// The newest block of each partition is damaged before a restart, which detects it.
    BlockDamage,
    /// A restart after which the log does not know the last shuffle.
    Unknown,
}

fn steps() -> impl Strategy<Value = Vec<Step>> {
    let place = || (0..SHUFFLES, 0..PARTITIONS);
    let len = || prop_oneof![1u32..200, 3000u32..6000, 20_000u32..90_000];
    let lens = prop::collection::vec(len(), 1..4);
    let step = prop_oneof![
        5 => (place(), lens.clone()).prop_map(|((s, p), lens)| Step::Send(s, p, lens)),
        1 => (place(), lens).prop_map(|((s, p), lens)| Step::Abort(s, p, lens)),
        1 => place().prop_map(|(s, p)| Step::Resend(s, p)),
        1 => (place(), len()).prop_map(|((s, p), len)| Step::Late(s, p, len)),
        2 => place().prop_map(|(s, p)| Step::Flush(s, p)),
        1 => place().prop_map(|(s, p)| Step::Seal(s, p)),
        1 => (0..SHUFFLES).prop_map(Step::Purge),
        1 => (0usize..3).prop_map(Step::Restart),
        1 => prop_oneof![Just(Step::BlockDamage), Just(Step::Unknown)],
    ];
    prop::collection::vec(step, 1..15)
}

struct Fixture {
    memory: Arc<Memory>,
    file: Arc<OwnedFd>,
    model: Arc<Mutex<Model>>,
    next_id: i64,
    lengths: BTreeMap<i64, u32>,
    /// Taken slots of most of a chunk, so that blocks use chunks whose pages are allocated and
    /// freed.
    held: Option<FreeRows>,
}

impl Fixture {
    fn new() -> Self {
        let memory = open(None);
        let file = Arc::new(memory.duplicate_for_successor().unwrap().unwrap());
        let (model, lengths) = (Arc::default(), BTreeMap::new());
        let mut fixture = Self { memory, file, model, next_id: 1, lengths, held: None };
        restored(&fixture.memory, |_, _, _| false);
        fixture.hold_slots();
        fixture.hook();
        fixture
    }

    fn hold_slots(&mut self) {
        let shuffle = self.memory.shuffle(&key(0)).unwrap();
        self.held = Some(shuffle.name.as_ref().unwrap().get().unwrap().rows(62).unwrap());
    }

    /// Simulates the death of the process after every store.
    fn hook(&self) {
        let (file, model) = (Arc::clone(&self.file), Arc::clone(&self.model));
        *table(&self.memory).after_store.lock() = Some(Box::new(move |_| {
            let mut model = model.lock();
            model.stores += 1;
            look(&file, &model);
        }));
    }

    fn may(&self, ids: impl IntoIterator<Item = i64>) {
        self.model.lock().may = ids.into_iter().collect();
    }

    fn fill(
        &self,
        (shuffle, partition): (i32, i32),
        ids: &[i64],
        funds: &mut Reservation,
    ) -> Vec<(BlockMeta, BlockFill)> {
        let buffer = buffer(&self.memory, shuffle, partition);
        let mut blocks = Vec::new();
        for id in ids {
            let length = self.lengths[id];
            let Ok(mut fill) = buffer.reserve(length, funds) else { return Vec::new() };
            fill.write(&payload(*id, length));
            let meta = BlockMeta {
                block_id: BlockId(*id),
                task_attempt_id: TaskAttemptId(*id % 3),
                length,
                uncompressed_length: length * 2,
                crc: crc32fast::hash(&payload(*id, length)),
            };
            blocks.push((meta, fill));
        }
        // Uncommitted bytes are written over freed ones.
        look(&self.file, &self.model.lock());
        blocks
    }

    fn commit(&self, at: (i32, i32), blocks: Vec<(BlockMeta, BlockFill)>, funds: &mut Reservation) {
        let known = self.model.lock().must.get(&at).cloned().unwrap_or_default();
        let ids: Vec<i64> = blocks.iter().map(|(meta, _)| meta.block_id.0).collect();
        let new: Vec<i64> = ids.into_iter().filter(|id| !known.contains(id)).collect();
        self.may(new.clone());
        if !blocks.is_empty()
            && buffer(&self.memory, at.0, at.1).commit(blocks, funds).is_ok()
            && !new.is_empty()
        {
            self.model.lock().must.entry(at).or_default().extend(new);
        }
        self.may([]);
    }

    fn ids(&mut self, lengths: &[u32]) -> Vec<i64> {
        let ids: Vec<i64> = (self.next_id..).take(lengths.len()).collect();
        self.next_id += ids.len() as i64;
        self.lengths.extend(ids.iter().copied().zip(lengths.iter().copied()));
        ids
    }

    fn send(&mut self, at: (i32, i32), ids: &[i64], is_committed: bool) {
        let bytes = ids.iter().map(|id| u64::from(self.lengths[id])).sum::<u64>() + 16 * 4096;
        let Some(mut funds) = funds(&self.memory, bytes) else { return };
        let blocks = self.fill(at, ids, &mut funds);
        if is_committed {
            self.commit(at, blocks, &mut funds);
        }
    }

    fn late(&mut self, at: (i32, i32), length: u32) {
        let ids = self.ids(&[length]);
        let Some(mut funds) = funds(&self.memory, u64::from(length) + 16 * 4096) else { return };
        let blocks = self.fill(at, &ids, &mut funds);
        self.flush(at);
        self.commit(at, blocks, &mut funds);
    }

    fn flush(&self, at: (i32, i32)) {
        let buffer = buffer(&self.memory, at.0, at.1);
        let Some(batch) = buffer.seal() else { return };
        let gone: Vec<i64> =
            batch.extent(Distribution::Normal).blocks.iter().map(|block| block.block_id.0).collect();
        let mut model = self.model.lock();
        model.must.entry(at).or_default().retain(|id| !gone.contains(id));
        model.may = gone.into_iter().collect();
        drop(model);
        buffer.release(&batch);
        drop(batch);
        self.may([]);
    }

    fn purge(&mut self, shuffle: i32) {
        let mut model = self.model.lock();
        let all: Vec<i64> =
            model.must.iter().filter(|(at, _)| at.0 == shuffle).flat_map(|(_, ids)| ids.clone()).collect();
        model.must.retain(|at, _| at.0 != shuffle);
        model.may = all.into_iter().collect();
        drop(model);
        let purged = self.memory.forget(&key(shuffle));
        self.may([]);
        let ids = self.ids(&[5000]);
        self.send((shuffle, 0), &ids, true);
        drop(purged);
    }

    /// Flips a bit of the newest block of each partition. The next process must detect it.
    fn damage(&self) {
        let mut model = self.model.lock();
        let newest: BTreeSet<i64> = model.must.values().filter_map(|ids| ids.last().copied()).collect();
        let table = table(&self.memory);
        let rows: Vec<_> = table.found_rows(table.rows.to_be_read()).collect();
        for (_, row) in rows.iter().filter(|(_, row)| newest.contains(&row.meta.block_id.0)) {
            let (mut byte, at) = ([0], table_geometry().front_bytes() + row.offset);
            rustix::io::pread(&self.file, &mut byte[..], at).unwrap();
            rustix::io::pwrite(&self.file, &[byte[0] ^ 4], at).unwrap();
        }
        model.must.values_mut().for_each(|ids| ids.retain(|id| !newest.contains(id)));
        model.damaged.extend(newest);
    }

    /// Restarts with the oldest blocks of each partition in a tier and the first `known` shuffles
    /// in the log.
    fn restart(&mut self, elsewhere: usize, known: i32) {
        *table(&self.memory).after_store.lock() = None;
        let mut model = self.model.lock();
        let unknown = model.must.iter().filter(|(at, _)| at.0 >= known);
        let unknown: Vec<i64> = unknown.flat_map(|(_, ids)| ids.clone()).collect();
        model.must.retain(|at, _| at.0 < known);
        let oldest: BTreeSet<i64> =
            model.must.values().flat_map(|ids| ids.iter().take(elsewhere).copied()).collect();
        model.must.values_mut().for_each(|ids| ids.retain(|id| !oldest.contains(id)));
        model.may = oldest.iter().copied().chain(unknown).collect();
        drop(model);
        self.memory.release();
        // The previous memory is dropped, and its contents stay in the file.
        self.memory = open(Some(self.file.try_clone().unwrap()));
        // The new process may die while it takes over.
        self.hook();
        let found = restored_of(&self.memory, known, |_, _, BlockId(id)| oldest.contains(&id));
        self.may([]);
        self.memory.buffers().iter().for_each(|buffer| buffer.verify());
        self.hold_slots();
        let found = self.model.lock().shown(found);
        assert_eq!(read(&self.memory), found);
        self.model.lock().compare(&found);
    }

    fn step(&mut self, step: Step) {
        match step {
            Step::Send(s, p, lens) => {
                let ids = self.ids(&lens);
                self.send((s, p), &ids, true);
            }
            Step::Abort(s, p, lens) => {
                let ids = self.ids(&lens);
                self.send((s, p), &ids, false);
            }
            Step::Resend(s, p) => {
                let ids = self.model.lock().must.get(&(s, p)).cloned().unwrap_or_default();
                self.send((s, p), &ids, true);
            }
            Step::Late(s, p, len) => self.late((s, p), len),
            Step::Flush(s, p) => self.flush((s, p)),
            Step::Seal(s, p) => drop(buffer(&self.memory, s, p).seal()),
            Step::Purge(shuffle) => self.purge(shuffle),
            Step::Restart(elsewhere) => self.restart(elsewhere, SHUFFLES),
            Step::BlockDamage => {
                self.damage();
                self.restart(0, SHUFFLES);
            }
            Step::Unknown => self.restart(0, SHUFFLES - 1),
        }
        assert_eq!(
            read(&self.memory),
            self.model.lock().must.clone().into_iter().filter(|(_, ids)| !ids.is_empty()).collect()
        );
    }
}

/// Number of histories. Each dies at hundreds of stores.
fn cases() -> u32 {
    std::env::var("STORE_CASES").ok().and_then(|text| text.parse().ok()).unwrap_or(5)
}

proptest! {
    #![proptest_config(ProptestConfig { max_shrink_iters: 100, ..ProptestConfig::with_cases(cases()) })]

    #[test]
    fn committed_blocks_survive_a_crash_at_any_store(steps in steps()) {
        let mut fixture = Fixture::new();
        for step in steps {
            fixture.step(step);
        }
        *table(&fixture.memory).after_store.lock() = None;
    }

    /// With flipped bits in names and rows, blocks may be missing. Those that are found are whole.
    #[test]
    fn damaged_region_is_opened_without_panic(bits in prop::collection::vec((any::<prop::sample::Index>(), 0u8..8), 1..40)) {
        let mut fixture = Fixture::new();
        for (shuffle, partition) in [(0, 0), (0, 1), (1, 0)] {
            let ids = fixture.ids(&[100, 80_000, 5000, 30_000]);
            *table(&fixture.memory).after_store.lock() = None;
            fixture.send((shuffle, partition), &ids, true);
        }
        let damaged = copy(&fixture.file);
        let geometry = table_geometry();
        let parts = [(geometry.name_at(0), 2 * NAME_WORDS), (geometry.row_at(0), 30 * ROW_WORDS)];
        for (index, bit) in bits {
            let (at, words) = parts[index.index(parts.len())];
            let at = 8 * at as u64 + index.index(8 * words) as u64;
            let mut byte = [0];
            rustix::io::pread(&damaged, &mut byte, at).unwrap();
            rustix::io::pwrite(&damaged, &[byte[0] ^ 1 << bit], at).unwrap();
        }
        let memory = open(Some(damaged));
        restored(&memory, |_, _, _| false);
        let found = read(&memory);
        for (at, ids) in found {
            prop_assert!(ids.iter().all(|id| fixture.model.lock().must[&at].contains(id)));
        }
    }
}
