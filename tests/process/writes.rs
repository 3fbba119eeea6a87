//! Blocks written by a test, and reading them back.

use std::collections::BTreeMap;

use bytes::Bytes;
use uniffle_client::block::{Block, IdLayout};
use uniffle_client::grpc::{ClientError, ReadOptions, ShuffleClient};
use uniffle_client::send::SendForm;
use uniffle_testkit::block_generator::BlockGenerator;
use uniffle_wire::types::{BlockId, PartitionId, ShuffleKey, TaskAttemptId};

pub(crate) use uniffle_testkit::clients::{client_of, key, local, long_backoff};

/// Blocks of one shuffle with `partitions` partitions.
#[derive(Debug)]
pub(crate) struct Written {
    pub(crate) key: ShuffleKey,
    generator: BlockGenerator,
    partitions: i32,
    pub(crate) blocks: BTreeMap<i32, Vec<Block>>,
}

impl Written {
    /// Registers the shuffle.
    pub(crate) async fn register(client: &ShuffleClient, key: ShuffleKey, partitions: i32) -> Self {
        let written = Self::of(key, partitions);
        written.registered(client).await;
        written
    }

    /// Uses a shuffle that was registered before.
    pub(crate) fn of(key: ShuffleKey, partitions: i32) -> Self {
        Self { key, generator: BlockGenerator::new(7, IdLayout::SPARK), partitions, blocks: BTreeMap::new() }
    }

    pub(crate) async fn registered(&self, client: &ShuffleClient) {
        client.register(&self.key, &[(0, self.partitions - 1)]).await.unwrap();
    }

    pub(crate) fn batch(&self, task: i64, length: u32) -> Vec<(PartitionId, Vec<Block>)> {
        let block = |partition| self.generator.block(PartitionId(partition), TaskAttemptId(task), 0, length);
        (0..self.partitions).map(|at| (PartitionId(at), vec![block(at)])).collect()
    }

    /// Adds the blocks of a task to the expected ones, without sending them.
    pub(crate) fn expect(&mut self, task: i64, length: u32) {
        for (partition, blocks) in self.batch(task, length) {
            self.blocks.entry(partition.0).or_default().extend(blocks);
        }
    }

    /// Sends and reports one task's blocks: `length` bytes for each partition.
    pub(crate) async fn task(
        &mut self,
        client: &ShuffleClient,
        task: i64,
        length: u32,
    ) -> Result<(), ClientError> {
        let batch = self.batch(task, length);
        client.push(&self.key, SendForm::Classic, &batch).await?;
        let ids: Vec<_> = batch.iter().map(|(at, blocks)| (*at, vec![blocks[0].meta.block_id])).collect();
        client.report(&self.key, TaskAttemptId(task), &ids).await?;
        self.expect(task, length);
        Ok(())
    }

    /// Returns the bytes of all blocks.
    pub(crate) fn bytes(&self) -> u64 {
        self.blocks.values().flatten().map(|block| block.data.len() as u64).sum()
    }

    /// Asserts that every partition has the reported ids and each block byte for byte.
    pub(crate) async fn assert_readable(&self, client: &ShuffleClient) {
        self.readable(client).await.unwrap_or_else(|error| panic!("{error}"));
    }

    /// Like [`Written::assert_readable`], but calls may fail.
    pub(crate) async fn readable(&self, client: &ShuffleClient) -> Result<(), ClientError> {
        for (partition, blocks) in &self.blocks {
            let partition = PartitionId(*partition);
            let reported = client.results(&self.key, &[partition], None).await?;
            let read = client.read_partition(&self.key, partition, &ReadOptions::default()).await?;
            assert_eq!(reported.cardinality(), blocks.len() as u64, "{partition:?}");
            for block in blocks {
                let id = block.meta.block_id;
                assert!(reported.contains(id.0.cast_unsigned()), "{id:?} is not in the result");
                assert!(
                    has(&read.blocks, id, &block.data),
                    "{id:?} of {partition:?} is missing or has other bytes"
                );
            }
        }
        Ok(())
    }
}

fn has(read: &BTreeMap<BlockId, Bytes>, id: BlockId, data: &Bytes) -> bool {
    read.get(&id).is_some_and(|found| found == data)
}
