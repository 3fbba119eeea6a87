//! Simulated clients: they register, send in pieces, abort, report and unregister.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::time::Duration;

use bytes::Bytes;
use rand::rngs::StdRng;
use rand::seq::IndexedRandom;
use rand::{Rng, RngExt, SeedableRng};

use uniffle_wire::types::{BlockId, Distribution, PartitionId};
use uniffle_worker::log::PartitionBlockIds;
use uniffle_worker::service::{
    BlockHeader, IncomingSend, RegisterRequest, ReportRequest, RequireRequest, SendSession, ServiceError,
};

use super::Mutation;
use super::history::{APPS, History, Key, LAYOUT};
use super::invariants::{Invariants, PARTITIONS};

const SHUFFLES: [i32; 2] = [1, 10];

/// A send whose bytes are still arriving.
pub(super) struct OpenSend {
    key: Key,
    epoch: u64,
    session: SendSession,
    blocks: Vec<(i32, i64, Vec<u8>)>,
    next: usize,
}

impl History {
    fn key(&mut self) -> Key {
        (APPS[self.rng.random_range(0..APPS.len())], SHUFFLES[self.rng.random_range(0..SHUFFLES.len())])
    }

    pub(super) fn known_key(&mut self) -> Option<Key> {
        let mut keys: Vec<Key> = self.expected.keys().copied().collect();
        keys.sort_unstable();
        keys.choose(&mut self.rng).copied()
    }

    pub(super) fn heartbeat(&self) {
        for app in APPS {
            let _ = self.service().lifecycle.heartbeat(app);
        }
    }

    pub(super) async fn register(&mut self) {
        let key = self.key();
        // A refused registration counts too: it may have been written.
        let is_again = !self.registered.insert(key);
        self.ended.remove(&key);
        let local_order = match self.expected.get(&key) {
            Some(expected) => expected.local_order,
            None => self.rng.random(),
        };
        let request = RegisterRequest {
            app: key.0,
            shuffle: key.1,
            ranges: vec![(0, PARTITIONS - 1)],
            user: "model".to_owned(),
            distribution: if local_order { Distribution::LocalOrder } else { Distribution::Normal },
            properties: HashMap::new(),
            remote_storage: None,
            from: None,
        };
        if let Err(error) = self.service().lifecycle.register(request).await {
            assert!(matches!(error, ServiceError::Store(_)), "only disks may refuse a registration: {error}");
            return;
        }
        self.next_epoch += 1;
        let fresh = Invariants { epoch: self.next_epoch, local_order, is_again, ..Invariants::default() };
        self.expected.entry(key).or_insert(fresh);
    }

    pub(super) async fn open_send(&mut self) {
        let Some(key) = self.known_key() else { return self.register().await };
        let is_left = self.rng.random_bool(0.1); // The ticket is left to expire.
        if self.begin_send(key, is_left) && self.rng.random_bool(0.5) {
            self.feed(self.sends.len() - 1, usize::MAX);
        }
    }

    /// Sends some blocks to a shuffle at once. Returns the new ones, unless there is no memory for
    /// them.
    pub(super) fn send_to(&mut self, key: Key) -> BTreeSet<(i32, i64)> {
        let first = self.next_block;
        if !self.begin_send(key, false) {
            return BTreeSet::new();
        }
        let last = self.sends.len() - 1;
        let ids = self.sends[last].blocks.iter().map(|(partition, id, _)| (*partition, *id));
        let fresh = ids.filter(|(_, id)| *id >= first).collect();
        self.feed(last, usize::MAX);
        fresh
    }

    /// Requires memory for blocks, and begins to send them unless the ticket `is_left` unused.
    /// Returns whether it has begun.
    fn begin_send(&mut self, key: Key, is_left: bool) -> bool {
        let blocks = self.blocks(key);
        let bytes: usize = blocks.iter().map(|(_, _, data)| data.len() + 32).sum();
        let partitions: Vec<i32> = (0..PARTITIONS).collect();
        let request = RequireRequest {
            app: key.0,
            shuffle: key.1,
            bytes: i32::try_from(bytes).unwrap(),
            partitions: &partitions,
            partition_sizes: &[],
        };
        let grant = match self.service().ingest.require_buffer(request) {
            Ok(grant) => grant,
            Err(error) => {
                self.tally.refused_tickets += 1;
                assert_eq!(error.status() as i32, 2, "only NO_BUFFER may refuse a small request: {error}");
                return false;
            }
        };
        if is_left {
            return false;
        }
        let header = IncomingSend {
            app: key.0,
            shuffle: key.1,
            ticket: grant.ticket,
            message_bytes: bytes as u64 + 1_000,
        };
        let session = self.service().ingest.begin_send(header).expect("a send with a new ticket was refused");
        let expected = self.expected.get_mut(&key).unwrap();
        for (partition, id, data) in &blocks {
            expected.sent.entry(*partition).or_default().insert(*id, Bytes::copy_from_slice(data));
        }
        let epoch = expected.epoch;
        self.sends.push(OpenSend { key, epoch, session, blocks, next: 0 });
        true
    }

    fn blocks(&mut self, key: Key) -> Vec<(i32, i64, Vec<u8>)> {
        let count = self.rng.random_range(1..8);
        let mut blocks: Vec<(i32, i64, Vec<u8>)> = (0..count).map(|_| self.block(key)).collect();
        blocks.sort_by_key(|(partition, ..)| *partition);
        blocks
    }

    /// Returns a block whose length and bytes are a function of its id, because clients resend ids
    /// after a timeout. Two registrations never share a block, so each stored block identifies its
    /// shuffle.
    fn block(&mut self, key: Key) -> (i32, i64, Vec<u8>) {
        let sent = self.expected.get(&key).map(|expected| &expected.sent);
        let mut again: Vec<i64> =
            sent.into_iter().flat_map(HashMap::values).flat_map(BTreeMap::keys).copied().collect();
        again.sort_unstable();
        let again = again.choose(&mut self.rng).copied().filter(|_| self.rng.random_bool(0.15));
        let id = again.unwrap_or(self.next_block);
        self.next_block = self.next_block.max(id + 1);
        let mut content = StdRng::seed_from_u64(id.unsigned_abs());
        let length = match content.random_range(0..10) {
            0..3 => content.random_range(1..100),
            3..9 => content.random_range(100..20_000),
            _ => content.random_range(20_000..90_000),
        };
        let mut data = vec![0; length];
        content.fill_bytes(&mut data);
        (i32::try_from(id % i64::from(PARTITIONS)).unwrap(), id, data)
    }

    pub(super) async fn feed_some(&mut self) {
        if self.sends.is_empty() {
            return self.open_send().await;
        }
        let index = self.rng.random_range(0..self.sends.len());
        let blocks = self.rng.random_range(1..4);
        self.feed(index, blocks);
    }

    /// Sends up to `blocks` blocks of a send. Commits it after its last block.
    fn feed(&mut self, index: usize, blocks: usize) {
        let send = &mut self.sends[index];
        for _ in 0..blocks {
            let Some((partition, id, data)) = send.blocks.get(send.next) else { break };
            let new_run = send.next == 0 || send.blocks[send.next - 1].0 != *partition;
            if let Err(error) = feed_block(&mut send.session, new_run.then_some(*partition), *id, data) {
                assert_eq!(error.status() as i32, 4, "only a purge may stop a send with a ticket: {error}");
                self.sends.swap_remove(index);
                return;
            }
            send.next += 1;
        }
        if send.next == send.blocks.len() {
            let send = self.sends.swap_remove(index);
            self.commit(send);
        }
    }

    fn commit(&mut self, send: OpenSend) {
        let committed = send.session.commit();
        let Some(expected) = self.expected.get_mut(&send.key).filter(|expected| expected.epoch == send.epoch)
        else {
            assert!(committed.is_err(), "a send into a purged shuffle was acknowledged");
            return;
        };
        committed.expect("a send with a ticket into a registered shuffle failed");
        let ids: Vec<_> = send.blocks.iter().map(|(partition, id, _)| (*partition, *id)).collect();
        tracing::info!(target: "life", key = ?send.key, ?ids, "acknowledged");
        for (partition, id, data) in send.blocks {
            expected.acknowledge(partition, id, data, self.life);
            self.readers.iter_mut().for_each(|reader| reader.note_acknowledged(send.key, partition, id));
            self.tally.acknowledged += 1;
        }
    }

    pub(super) fn abort_one(&mut self) {
        if !self.sends.is_empty() {
            let index = self.rng.random_range(0..self.sends.len());
            let mut send = self.sends.swap_remove(index);
            self.tally.aborted += 1;
            if let Some((_, _, data)) = send.blocks.get(send.next).filter(|_| send.next > 0) {
                // Cut in the middle of a block.
                if send.session.begin_block(u32::try_from(data.len()).unwrap()).is_ok() {
                    send.session
                        .write(&data[..data.len() / 2])
                        .expect("the decoder refused a part of the announced bytes");
                }
            }
        }
    }

    pub(super) async fn purge_one(&mut self) {
        let Some(key) = self.known_key() else { return };
        let is_of_app = self.rng.random_bool(0.5);
        let _ = self.purge(key, is_of_app).await;
    }

    /// Ends a shuffle, or its application. An error means that a start may find it again.
    pub(super) async fn purge(&mut self, key: Key, is_of_app: bool) -> Result<(), ServiceError> {
        let lifecycle = &self.service().lifecycle;
        let ended = match (self.mutation == Mutation::NoEndLog, is_of_app) {
            (false, false) => lifecycle.end_shuffle(key.0, key.1).await,
            (false, true) => lifecycle.end_app(key.0).await,
            (true, false) => lifecycle.unregister_shuffle(key.0, key.1),
            (true, true) => lifecycle.unregister_app(key.0),
        };
        tracing::info!(target: "life", ?key, is_of_app, ?ended, "unregistered");
        if let Err(error) = &ended {
            assert!(
                matches!(error, ServiceError::Store(_)),
                "the end of a known shuffle was refused: {error}"
            );
        }
        let has_ended = |other: &Key| if is_of_app { other.0 == key.0 } else { *other == key };
        let keys: Vec<Key> = self.expected.keys().copied().filter(has_ended).collect();
        self.expected.retain(|other, _| !has_ended(other));
        if ended.is_ok() {
            self.ended.extend(keys);
        }
        ended
    }

    /// Reports acknowledged blocks of a random shuffle as a task does.
    pub(super) async fn report_some(&mut self, wait: bool) {
        let Some(key) = self.known_key() else { return };
        self.report_of(key, wait).await;
    }

    /// Reports acknowledged blocks of the shuffle `key` as a task does.
    pub(super) async fn report_of(&mut self, key: Key, wait: bool) {
        let now = self.now();
        let expected = self.expected.get_mut(&key).unwrap();
        let mut partitions = expected.unreported();
        for (_, ids) in &mut partitions {
            ids.retain(|_| self.rng.random_bool(0.7));
        }
        partitions.retain(|(_, ids)| !ids.is_empty());
        if partitions.is_empty() {
            return;
        }
        for (partition, ids) in &partitions {
            expected.tried.entry(*partition).or_default().extend(ids);
        }
        let ids = |(partition, ids): &(i32, Vec<i64>)| PartitionBlockIds {
            partition: PartitionId(*partition),
            block_ids: ids.clone(),
        };
        let request = ReportRequest {
            app: key.0,
            shuffle: key.1,
            task_attempt: 7,
            bitmap_count: 1,
            partitions: partitions.iter().map(ids).collect(),
            records: Vec::new(),
        };
        let service = self.service();
        let reporting = service.ingest.report(request);
        let answer = match wait {
            true => reporting.await,
            // The worker ends before it responds.
            false => match tokio::time::timeout(Duration::from_millis(5), reporting).await {
                Ok(answer) => answer,
                Err(_) => return,
            },
        };
        let expected = self.expected.get_mut(&key).unwrap();
        match answer {
            Ok(()) => {
                tracing::info!(target: "life", ?key, ?partitions, "reported");
                self.tally.reports += 1;
                for (partition, ids) in partitions {
                    expected.reported.entry(partition).or_default().extend(ids);
                }
            }
            Err(ServiceError::Lost(text)) => {
                assert!(expected.can_miss(&partitions, now), "a report was refused without a loss: {text}");
                self.tally.reports_refused += 1;
            }
            Err(error) => assert!(matches!(error, ServiceError::Store(_)), "a report failed: {error}"),
        }
    }
}

fn feed_block(
    session: &mut SendSession,
    partition: Option<i32>,
    id: i64,
    data: &[u8],
) -> Result<(), ServiceError> {
    if let Some(partition) = partition {
        session.partition(partition)?;
    }
    let length = u32::try_from(data.len()).unwrap();
    session.begin_block(length)?;
    let (first, second) = data.split_at(data.len() / 3);
    session.write(first)?;
    session.write(second)?;
    session.end_block(BlockHeader {
        block_id: id,
        length: i32::try_from(length).unwrap(),
        uncompressed_length: 7,
        crc: i64::from(crc32fast::hash(data)),
        task_attempt_id: LAYOUT.task_of(BlockId(id)).0,
    })
}
