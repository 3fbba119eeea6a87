//! Damage that a tier finds on its disks while no client reads: readers get an error that names the
//! loss, and no zeros of a hole. Also: blocks committed while a partition is scanned.

use std::collections::HashSet;

use bytes::Bytes;

use super::*;
use crate::app::ShuffleState;
use crate::log::PartitionBlockIds;
use crate::store::{ChunkRead as _, ExtentData, ExtentWrite, TierBatch};
use uniffle_io::buffers::HeapBuffers;
use uniffle_wire::types::{BlockId, BlockMeta, ShuffleId, ShuffleKey, TaskAttemptId};

const PARTITION: i32 = 3;
const BLOCK: u32 = 1 << 20;
const BYTE: u8 = 7;

fn key() -> ShuffleKey {
    ShuffleKey::new(AppId::parse(APP).unwrap(), ShuffleId(0))
}

fn batch(id: i64) -> TierBatch {
    let bytes = Bytes::from(vec![BYTE; BLOCK as usize]);
    let block = BlockMeta {
        block_id: BlockId(id),
        task_attempt_id: TaskAttemptId(0),
        length: BLOCK,
        uncompressed_length: BLOCK,
        crc: crc32fast::hash(&bytes),
    };
    let extent = ExtentWrite {
        partition: PartitionId(PARTITION),
        blocks: vec![block],
        length: BLOCK.into(),
        data: ExtentData::Pieces(vec![bytes]),
    };
    vec![extent].into()
}

impl Fixture {
    /// Writes two blocks to the disk, and reports both.
    async fn two_blocks(&self) {
        let shuffle = self.flusher.tiers().iter().next().unwrap().shuffle(&key()).unwrap();
        shuffle.write(batch(0)).await.unwrap();
        shuffle.write(batch(1)).await.unwrap();
        self.report_blocks().await.unwrap();
    }

    async fn report_blocks(&self) -> Result<(), ServiceError> {
        let report = ReportRequest {
            app: APP,
            shuffle: 0,
            task_attempt: 0,
            bitmap_count: 1,
            partitions: vec![PartitionBlockIds { partition: PartitionId(PARTITION), block_ids: vec![0, 1] }],
            records: Vec::new(),
        };
        self.service.ingest.report(report).await
    }

    fn shuffle(&self) -> Arc<ShuffleState> {
        self.service.parts.app(APP).unwrap().shuffles().remove(0)
    }

    /// Makes an offload find that the second block is damaged. The blocks are adjacent and read as
    /// one range. [`Fault::Flip`] changes its middle byte, which is in the second block.
    async fn find_damage(&self) {
        let local = self.flusher.tiers().find::<LocalStore>().unwrap();
        let handle = local.handle(&key()).unwrap();
        let mut chosen = local.oldest(&handle, u64::MAX, HashSet::new()).await;
        self.faults.add(Rule::always(Operation::Read, Fault::Flip).on(".data"));
        let run = chosen.next_run().await.unwrap();
        chosen.data(&run).next_chunk(&HeapBuffers).await.unwrap_err();
    }

    async fn read_blocks(&self, first: u32, count: u32) -> Result<Vec<u8>, ServiceError> {
        let length = i32::try_from(count * BLOCK).unwrap();
        let offset = i64::from(first * BLOCK);
        let reads = &self.service.reads;
        let answer = reads
            .read_data(&reads.read_limits(), target(APP, PARTITION), ReadRange { offset, length })
            .await?;
        let mut chunks = answer.chunks;
        let mut bytes = Vec::new();
        while let Some(chunk) = chunks.next().await? {
            bytes.extend_from_slice(&chunk);
        }
        Ok(bytes)
    }

    /// Reads both blocks until one is known to be lost. Returns the error text.
    async fn until_named(&self) -> String {
        for _ in 0..100 {
            match self.read_blocks(0, 2).await {
                Ok(bytes) => assert!(bytes.iter().all(|byte| *byte == BYTE), "a hole was served as data"),
                Err(ServiceError::Lost(text)) => return text,
                Err(error) => assert!(matches!(error, ServiceError::Unverified(_)), "{error}"),
            }
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
        panic!("no loss was reported");
    }
}

#[tokio::test(start_paused = true)]
async fn damage_found_by_an_offload_is_reported_to_readers() {
    let fixture = Fixture::new(PartitionLimits::default(), quiet()).await;
    fixture.two_blocks().await;
    fixture.find_damage().await;
    fixture.faults.clear();
    let text = fixture.until_named().await;
    assert!(text.contains("(ids 1)"), "{text}");
    fixture.stop().await;
}

#[tokio::test(start_paused = true)]
async fn damage_found_during_a_report_is_recorded() {
    let fixture = Fixture::new(PartitionLimits::default(), quiet()).await;
    let shuffle = fixture.flusher.tiers().iter().next().unwrap().shuffle(&key()).unwrap();
    shuffle.write(batch(0)).await.unwrap();
    shuffle.write(batch(1)).await.unwrap();
    let second = Duration::from_secs(1);
    fixture.faults.add(Rule::always(Operation::Write, Fault::Slow(second)).on("/log"));
    let damage = async {
        tokio::time::sleep(second / 4).await;
        fixture.find_damage().await;
        fixture.faults.clear();
        tokio::time::sleep(second / 4).await;
        let state = fixture.shuffle();
        assert_eq!(
            (state.ledger.verifying(), state.ledger.losses()),
            (0, Vec::new()),
            "damage of blocks that no report names was recorded as a loss"
        );
        assert!(state.ledger.is_watched() && state.reports.block_ids.lock().count() == 0);
    };
    let (reported, ()) = tokio::join!(fixture.report_blocks(), damage);
    reported.unwrap();
    let text = fixture.until_named().await;
    assert!(text.contains("(ids 1)") && text.contains("while their report was being stored"), "{text}");
    drop(shuffle);
    fixture.stop().await;
}

#[tokio::test(start_paused = true)]
async fn block_committed_during_a_scan_is_found_by_the_next() {
    let fixture = Fixture::new(PartitionLimits::default(), quiet()).await;
    let (shuffle, parts) = (fixture.shuffle(), &fixture.service.parts);
    parts.verifier.mark_unverified(&shuffle, PartitionId(PARTITION), "a disk has failed");
    within_time("nothing is found", || shuffle.ledger.verifying() == 0).await;
    // Like a send that saw an unwatched ledger before the scan: the ledger is informed of no block.
    let tier = fixture.flusher.tiers().iter().next().unwrap().shuffle(&key()).unwrap();
    tier.write(batch(0)).await.unwrap();
    tier.write(batch(1)).await.unwrap();
    let refused = fixture.report_blocks().await.unwrap_err();
    assert!(matches!(refused, ServiceError::Lost(_)), "{refused}");
    parts.losses.count_again(&shuffle, PartitionId(PARTITION));
    fixture.report_blocks().await.unwrap();
    assert_eq!(fixture.read_blocks(0, 2).await.unwrap().len(), 2 * BLOCK as usize);
    drop((tier, shuffle));
    fixture.stop().await;
}
