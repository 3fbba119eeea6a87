//! A reducer that follows the Java client step by step: memory until empty, the index once, then
//! data segments. It may outlive the worker that it began with, because offsets stay valid.

use std::collections::BTreeMap;

use uniffle_wire::index::FILLER_BLOCK_ID;
use uniffle_worker::service::{ChunkStream, MemoryReadRequest, ReadRange, RequestedPartition, ServiceError};

use super::history::{History, Key};
use super::invariants::{Invariants, Now};

/// Bytes of an index record (docs/protocol.md §5.2).
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
    began: Now,
    read_buffer_size: i32,
    /// Blocks that it must find, unless their loss is reported to it.
    required: BTreeMap<i64, Vec<u8>>,
    found: BTreeMap<i64, Vec<u8>>,
    phase: Phase,
    /// A read was refused.
    is_refused: bool,
    /// The block at its cursor was sent again. If its first copy had left memory, the cursor is now
    /// behind blocks that were not read. The client notices that they are missing and reads again.
    is_misled: bool,
}

impl Reader {
    pub(crate) fn new(
        key: Key,
        partition: i32,
        read_buffer_size: i32,
        (expected, now): (&Invariants, Now),
    ) -> Self {
        Self {
            key,
            partition,
            epoch: expected.epoch,
            began: now,
            read_buffer_size,
            required: expected.required(partition, now),
            found: BTreeMap::new(),
            phase: Phase::Memory { cursor: -1 },
            is_refused: false,
            is_misled: false,
        }
    }

    /// Notes that a block was acknowledged.
    pub(crate) fn note_acknowledged(&mut self, key: Key, partition: i32, id: i64) {
        let is_at_cursor = matches!(self.phase, Phase::Memory { cursor } if cursor == id);
        self.is_misled |= is_at_cursor && (self.key, self.partition) == (key, partition);
    }

    pub(crate) fn is_done(&self) -> bool {
        matches!(self.phase, Phase::Done)
    }

    /// Sends one request of the client. Ends after the last one, if a read is refused, if the
    /// shuffle was purged, or if its offsets are no longer valid.
    pub(crate) async fn step(&mut self, history: &mut History) {
        if self.is_done() {
            return;
        }
        if history.expected.get(&self.key).is_none_or(|expected| expected.epoch != self.epoch) {
            self.phase = Phase::Done;
            return;
        }
        let step = match std::mem::replace(&mut self.phase, Phase::Done) {
            Phase::Memory { cursor } => self.read_memory(history, cursor),
            Phase::Index => self.read_index(history).await,
            Phase::Data { records, next } => self.read_data(history, records, next).await,
            Phase::Done => Ok(()),
        };
        match step {
            Err(error) => {
                self.is_refused = true;
                self.check_refusal(history, &error);
            }
            // A restart in between loses memory: the client notices missing blocks and retries.
            Ok(()) if self.is_done() && self.began.life == history.life() => self.check_found(history),
            Ok(()) => {}
        }
    }

    fn check_found(&self, history: &History) {
        for (id, data) in &self.required {
            let found = self.found.get(id);
            // Data abandoned after the read of memory is reported to the next reader.
            let may_be_given_up = self.began.reads_fail || self.began.files_removed;
            if found.is_none() && may_be_given_up && history.is_reported_lost(self.key, self.partition, *id) {
                continue;
            }
            if found.is_none() && self.is_misled {
                continue;
            }
            assert!(found.is_some(), "block {id} of {:?}/{} is missing", self.key, self.partition);
            assert_eq!(found, Some(data), "block {id} has other bytes");
        }
    }

    /// Checks that only a possible loss, a failing or missing disk, or removed files refuse a read.
    fn check_refusal(&self, history: &mut History, error: &ServiceError) {
        let now = history.now();
        let expected = &history.expected[&self.key];
        match error {
            ServiceError::Lost(text) => {
                assert!(
                    expected.can_have_lost(self.partition, now),
                    "the reported loss is impossible: {text}"
                );
                tracing::info!(target: "life", text, "a read is refused");
                history.tally.reads_refused += 1;
            }
            // Clients retry until a probe of the disk succeeds.
            ServiceError::DiskHangs(_) => {}
            // Stored data is unreachable now, or was when the reader began: a disk fails or is
            // missing, or files were removed.
            _ if now.has_holes() || self.began.has_holes() => {}
            other => panic!("a read failed: {other}"),
        }
    }

    /// Checks bytes with a wrong checksum. A hole is read as zeros, so that clients can fetch the
    /// bytes between two blocks at once. Only a reader with an older index takes a hole for a
    /// block. The checksum tells its client, which reads again: then it finds a copy of a reported
    /// block, or gets the error that it is lost.
    async fn check_hole(&self, history: &mut History, id: i64, bytes: &[u8]) {
        // Two starts that miss different disks may give one offset to different blocks. A start on
        // all disks then serves one of them, and a start without its disk serves the other.
        let has_overlaps = self.began.disk_is_missing || history.expected[&self.key].has_overlaps;
        let may_overlap = has_overlaps && history.now().disk_is_missing;
        let is_hole = bytes.iter().all(|byte| *byte == 0);
        assert!(is_hole || may_overlap, "block {id} is neither intact nor a hole");
        let expected = &history.expected[&self.key];
        if expected.is_refused || !expected.is_reported(self.partition, id) {
            return;
        }
        let mut again = Self::new(self.key, self.partition, 10_000, (expected, history.now()));
        while !again.is_done() {
            Box::pin(again.step(history)).await;
        }
        let is_known = again.is_refused || again.found.contains_key(&id);
        assert!(is_known, "the reported block {id} reads as a hole, and the next read misses it");
    }

    fn read_memory(&mut self, history: &mut History, cursor: i64) -> Result<(), ServiceError> {
        let request = MemoryReadRequest {
            app: self.key.0,
            shuffle: self.key.1,
            partition: self.partition,
            last_block_id: cursor,
            read_buffer_size: self.read_buffer_size,
            task_filter: None,
            window: None,
        };
        let answer = history.service().reads.read_memory(request)?.read;
        let data: Vec<u8> = answer.data.iter().flat_map(|piece| piece.iter().copied()).collect();
        let mut at = 0;
        for block in &answer.blocks {
            let end = at + block.length as usize;
            self.found.insert(block.block_id.0, data[at..end].to_vec());
            history.tally.read_from_memory += 1;
            at = end;
        }
        assert_eq!(at, data.len(), "blocks and bytes of a response from memory disagree");
        self.phase = match answer.blocks.last() {
            Some(last) => Phase::Memory { cursor: last.block_id.0 },
            None => Phase::Index,
        };
        Ok(())
    }

    fn target(&self) -> RequestedPartition<'static> {
        RequestedPartition { app: self.key.0, shuffle: self.key.1, partition: self.partition }
    }

    async fn read_index(&mut self, history: &mut History) -> Result<(), ServiceError> {
        let reads = &history.service().reads;
        let limits = reads.read_limits();
        let answer = reads.read_index(&limits, self.target()).await?;
        let records = collect(answer.chunks, answer.length).await?;
        assert_eq!(records.len() % RECORD, 0);
        check_gapless(&records, answer.data_length);
        let now = history.now();
        let expected = history.expected.get_mut(&self.key).expect("`step` checked that the shuffle exists");
        let seen = expected.index_seen.entry(self.partition).or_default();
        check_index(seen, &records, now.has_holes());
        if !now.has_holes() {
            let ids = records.chunks(RECORD).filter(|record| !is_filler(record)).map(id_of);
            expected.durable.entry(self.partition).or_default().extend(ids);
            seen.clone_from(&records);
        }
        self.phase = Phase::Data { records, next: 0 };
        Ok(())
    }

    async fn read_data(
        &mut self,
        history: &mut History,
        records: Vec<u8>,
        next: usize,
    ) -> Result<(), ServiceError> {
        let mut first = next;
        while records.chunks(RECORD).nth(first).is_some_and(is_filler) {
            first += 1;
        }
        let mut end = first;
        let mut length = 0;
        while end < records.len() / RECORD
            && length < u64::try_from(self.read_buffer_size).unwrap_or(0)
            && !is_filler(&records[end * RECORD..][..RECORD])
        {
            length += u64::from(u32_at(&records, end * RECORD + 8));
            end += 1;
        }
        if first == end {
            return Ok(());
        }
        let offset = u64_at(&records, first * RECORD);
        let range =
            ReadRange { offset: i64::try_from(offset).unwrap(), length: i32::try_from(length).unwrap() };
        let reads = &history.service().reads;
        let limits = reads.read_limits();
        let answer = reads.read_data(&limits, self.target(), range).await?;
        let data = collect(answer.chunks, length).await?;
        let older = self.began.life != history.life();
        for record in first..end {
            let at = usize::try_from(u64_at(&records, record * RECORD) - offset).unwrap();
            let bytes = &data[at..at + u32_at(&records, record * RECORD + 8) as usize];
            let crc = u64_at(&records, record * RECORD + 16);
            let fits = crc == u64::from(crc32fast::hash(bytes));
            let id = i64::try_from(u64_at(&records, record * RECORD + 24)).expect("ids are not negative");
            // The index may be of a process under which files were removed: a later one has a hole.
            if !fits && (history.now().has_holes() || self.began.files_removed) {
                self.check_hole(history, id, bytes).await;
                self.required.clear();
                return Ok(());
            }
            assert!(fits, "a block on disk has a wrong checksum");
            self.found.insert(id, bytes.to_vec());
            history.tally.read_from_disk += 1;
            history.tally.read_across_restarts += u64::from(older);
        }
        self.phase = Phase::Data { records, next: end };
        Ok(())
    }
}

async fn collect(mut chunks: ChunkStream, length: u64) -> Result<Vec<u8>, ServiceError> {
    let mut all = Vec::new();
    while let Some(chunk) = chunks.next().await? {
        all.extend_from_slice(&chunk);
    }
    assert_eq!(all.len() as u64, length, "a response has another length than announced");
    Ok(all)
}

fn check_gapless(records: &[u8], data_length: u64) {
    let mut end = 0;
    for record in records.chunks(RECORD) {
        assert_eq!(u64_at(record, 0), end, "the data stream has a hole");
        end += u64::from(u32_at(record, 8));
    }
    assert_eq!(end, data_length, "index and data length disagree");
}

/// Checks that an index keeps every block at its place. Only missing and failing disks and removed
/// files leave holes. Holes of the earlier index may have become blocks: the data of a missing disk
/// is found when the disk returns.
fn check_index(seen: &[u8], records: &[u8], may_have_holes: bool) {
    let mut now: BTreeMap<u64, &[u8]> = BTreeMap::new();
    for record in records.chunks(RECORD) {
        now.insert(u64_at(record, 0), record);
    }
    for record in seen.chunks(RECORD).filter(|record| !is_filler(record)) {
        match now.get(&u64_at(record, 0)) {
            Some(same) if !is_filler(same) => assert_eq!(*same, record, "a record of the index has changed"),
            _ => assert!(may_have_holes, "block {} is missing in the index", id_of(record)),
        }
    }
}

fn is_filler(record: &[u8]) -> bool {
    id_of(record) == FILLER_BLOCK_ID
}

fn id_of(record: &[u8]) -> i64 {
    i64::from_be_bytes(record[24..32].try_into().unwrap())
}

fn u64_at(bytes: &[u8], at: usize) -> u64 {
    u64::from_be_bytes(bytes[at..at + 8].try_into().unwrap())
}

fn u32_at(bytes: &[u8], at: usize) -> u32 {
    u32::from_be_bytes(bytes[at..at + 4].try_into().unwrap())
}
