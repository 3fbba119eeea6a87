//! A reducer that follows the Java client step by step: memory until empty, index once, data segments.

use std::collections::BTreeMap;

use uniffle_worker::service::{ChunkStream, MemoryReadRequest};

use super::world::{Key, Promised, World};

/// Bytes of an index record (PROTOCOL §5.2).
const RECORD: usize = 40;

#[derive(Debug)]
enum Phase {
    Memory { cursor: i64 },
    Index,
    Data { records: Vec<u8>, next: usize },
    Done,
}

#[derive(Debug)]
pub(crate) struct Reader {
    key: Key,
    partition: i32,
    epoch: u64,
    read_buffer_size: i32,
    /// Acknowledged before this reader began: must be found.
    must: BTreeMap<i64, Vec<u8>>,
    found: BTreeMap<i64, Vec<u8>>,
    phase: Phase,
}

impl Reader {
    pub(crate) fn new(key: Key, partition: i32, read_buffer_size: i32, promised: &Promised) -> Self {
        Self {
            key,
            partition,
            epoch: promised.epoch,
            read_buffer_size,
            must: promised.acknowledged.get(&partition).cloned().unwrap_or_default(),
            found: BTreeMap::new(),
            phase: Phase::Memory { cursor: -1 },
        }
    }

    pub(crate) fn is_done(&self) -> bool {
        matches!(self.phase, Phase::Done)
    }

    /// One RPC of the client. A reader whose shuffle was purged gives up.
    pub(crate) async fn step(&mut self, world: &mut World) {
        if world.promised.get(&self.key).is_none_or(|promised| promised.epoch != self.epoch) {
            self.phase = Phase::Done;
            return;
        }
        match std::mem::replace(&mut self.phase, Phase::Done) {
            Phase::Memory { cursor } => self.read_memory(world, cursor),
            Phase::Index => self.read_index(world).await,
            Phase::Data { records, next } => self.read_data(world, records, next).await,
            Phase::Done => {}
        }
        if self.is_done() {
            for (id, data) in &self.must {
                let found = self.found.get(id);
                assert!(
                    found.is_some(),
                    "block {id} of {:?}/{} was acknowledged and is gone",
                    self.key,
                    self.partition
                );
                assert_eq!(found, Some(data), "block {id} has other bytes");
            }
        }
    }

    fn read_memory(&mut self, world: &mut World, cursor: i64) {
        let request = MemoryReadRequest {
            app: self.key.0,
            shuffle: self.key.1,
            partition: self.partition,
            last_block_id: cursor,
            read_buffer_size: self.read_buffer_size,
            task_filter: None,
        };
        let answer = world.service.read_memory(request).expect("the app is known").read;
        let data: Vec<u8> = answer.data.iter().flat_map(|piece| piece.iter().copied()).collect();
        let mut at = 0;
        for block in &answer.blocks {
            let end = at + block.length as usize;
            self.found.insert(block.block_id.0, data[at..end].to_vec());
            world.tally.read_from_memory += 1;
            at = end;
        }
        assert_eq!(at, data.len(), "blocks and bytes of a memory answer disagree");
        self.phase = match answer.blocks.last() {
            Some(last) => Phase::Memory { cursor: last.block_id.0 },
            None => Phase::Index,
        };
    }

    async fn read_index(&mut self, world: &mut World) {
        let answer = world
            .service
            .read_index(self.key.0, self.key.1, self.partition)
            .await
            .expect("reads have no faults");
        let records = collect(answer.chunks, answer.length).await;
        assert_eq!(records.len() % RECORD, 0);
        check_gapless(&records, answer.data_length);
        let promised = world.promised.get_mut(&self.key).expect("checked by step");
        let seen = promised.index_seen.entry(self.partition).or_default();
        let common = seen.len().min(records.len());
        assert_eq!(seen[..common], records[..common], "an index that was read has changed");
        if records.len() > seen.len() {
            seen.clone_from(&records);
        }
        self.phase = Phase::Data { records, next: 0 };
    }

    async fn read_data(&mut self, world: &mut World, records: Vec<u8>, next: usize) {
        let first = next;
        let mut end = next;
        let mut length = 0;
        while end < records.len() / RECORD && length < u64::try_from(self.read_buffer_size).unwrap_or(0) {
            length += u64::from(u32_at(&records, end * RECORD + 8));
            end += 1;
        }
        if first == end {
            return;
        }
        let offset = u64_at(&records, first * RECORD);
        let answer = world
            .service
            .read_data(
                self.key.0,
                self.key.1,
                self.partition,
                i64::try_from(offset).expect("small"),
                i32::try_from(length).expect("small"),
            )
            .await
            .expect("a range of a published index can be read");
        let data = collect(answer.chunks, length).await;
        for record in first..end {
            let at = usize::try_from(u64_at(&records, record * RECORD) - offset).expect("small");
            let bytes = &data[at..at + u32_at(&records, record * RECORD + 8) as usize];
            let crc = u64_at(&records, record * RECORD + 16);
            assert_eq!(crc, u64::from(crc32fast::hash(bytes)), "crc of a block on disk");
            let id = i64::try_from(u64_at(&records, record * RECORD + 24)).expect("ids are positive");
            self.found.insert(id, bytes.to_vec());
            world.tally.read_from_disk += 1;
        }
        self.phase = Phase::Data { records, next: end };
    }
}

async fn collect(mut chunks: ChunkStream, length: u64) -> Vec<u8> {
    let mut all = Vec::new();
    while let Some(chunk) = chunks.next().await.expect("reads have no faults") {
        all.extend_from_slice(&chunk);
    }
    assert_eq!(all.len() as u64, length, "an answer has another length than announced");
    all
}

fn check_gapless(records: &[u8], data_length: u64) {
    let mut end = 0;
    for record in records.chunks(RECORD) {
        assert_eq!(u64_at(record, 0), end, "a hole in the data stream");
        end += u64::from(u32_at(record, 8));
    }
    assert_eq!(end, data_length, "index and data length disagree");
}

fn u64_at(bytes: &[u8], at: usize) -> u64 {
    u64::from_be_bytes(bytes[at..at + 8].try_into().expect("eight bytes"))
}

fn u32_at(bytes: &[u8], at: usize) -> u32 {
    u32::from_be_bytes(bytes[at..at + 4].try_into().expect("four bytes"))
}
