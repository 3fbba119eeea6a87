//! What a tier finds out of its disks while no client reads: a reader is told what is lost, and takes no hole for data.

use bytes::Bytes;

use super::*;
use crate::app::ShuffleState;
use crate::schema::SpareMemory;
use crate::tiers::{Backlog, ExtentData, ExtentWrite, InMemory, Released, TierBatch};
use uniffle_io::buffers::HeapBuffers;
use uniffle_testkit::fault::EIO;
use uniffle_wire::types::{BlockId, BlockMeta, ShuffleId, ShuffleKey, TaskAttemptId};

const PARTITION: i32 = 3;
const BLOCK: u32 = 1 << 20;
const BYTE: u8 = 7;
/// What goes by way of the page cache.
const LONG: Backlog = Backlog { bytes: 64 << 20, is_waited_for: true, is_last: false };

fn key() -> ShuffleKey {
    ShuffleKey::new(AppId::parse(APP).unwrap(), ShuffleId(0))
}

fn batch(id: i64, (backlog, released): (Backlog, Released)) -> TierBatch {
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
    TierBatch { backlog, released, ..vec![extent].into() }
}

impl Fixture {
    /// Over a disk of 16 MiB a second that does not take what is in the page cache next.
    async fn over_a_disk_that_takes_no_page() -> Self {
        let local = LocalConfig {
            page_cache_bytes: u64::MAX,
            spare_memory: SpareMemory::Always(u64::MAX),
            ..LocalConfig::default()
        };
        let fixture = Self::with(local, PartitionLimits::default(), quiet()).await;
        fixture.faults.set_speed(16 << 20);
        fixture.faults.add(Rule::once(Operation::WriteBack, Fault::Errno(EIO)));
        fixture
    }

    /// Two blocks that are on the disk, both reported. The second one is written while so much waits, and is in memory until then.
    async fn two_blocks(&self, second: (Backlog, Released)) {
        let shuffle = self.flusher.tiers().iter().next().unwrap().shuffle(&key()).unwrap();
        shuffle.write(batch(0, Default::default())).await.unwrap();
        shuffle.write(batch(1, second)).await.unwrap();
        self.report_blocks().await.unwrap();
    }

    async fn report_blocks(&self) -> Result<(), ServiceError> {
        let report = ReportRequest {
            app: APP,
            shuffle: 0,
            task_attempt: 0,
            bitmap_count: 1,
            partitions: vec![(PartitionId(PARTITION), vec![0, 1])],
            records: Vec::new(),
        };
        self.service.ingest.report(report).await
    }

    fn shuffle(&self) -> Arc<ShuffleState> {
        self.service.lifecycle.known.app(APP).unwrap().shuffles().remove(0)
    }

    /// A move finds out that the second block cannot be read any more: both stand together and are read as one, whose middle byte
    /// is in it.
    async fn find_damage(&self) {
        let local = self.flusher.tiers().find::<LocalStore>().unwrap();
        let moving = local.moving(&local.handle(&key()).unwrap());
        self.faults.add(Rule::always(Operation::Read, Fault::Flip).on(".data"));
        let run = moving.next_run(PartitionId(PARTITION), 0, 2 * u64::from(BLOCK)).unwrap();
        moving.data(&run).unwrap().next_chunk(&HeapBuffers).await.unwrap_err();
    }

    async fn read_blocks(&self, first: u32, count: u32) -> Result<Vec<u8>, ServiceError> {
        let length = i32::try_from(count * BLOCK).unwrap();
        let offset = i64::from(first * BLOCK);
        let mut chunks = self.service.reads.read_data(APP, 0, PARTITION, offset, length).await?.chunks;
        let mut bytes = Vec::new();
        while let Some(chunk) = chunks.next().await? {
            bytes.extend_from_slice(&chunk);
        }
        Ok(bytes)
    }

    /// Reads both blocks as long as it is not known that one is lost; what is said of that.
    async fn until_named(&self) -> String {
        for _ in 0..100 {
            match self.read_blocks(0, 2).await {
                Ok(bytes) => assert!(bytes.iter().all(|byte| *byte == BYTE), "no hole is taken for data"),
                Err(ServiceError::Lost(text)) => return text,
                Err(error) => assert!(matches!(error, ServiceError::Unverified(_)), "{error}"),
            }
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
        panic!("no loss of a block is told");
    }
}

#[tokio::test(start_paused = true)]
async fn unwritten_page_cache_data_is_lost_and_not_zeros() {
    let fixture = Fixture::over_a_disk_that_takes_no_page().await;
    fixture.two_blocks((LONG, Released::default())).await;
    let text = fixture.until_named().await;
    assert!(text.contains("(ids 1)") && text.contains(".data"), "{text}");
    assert_eq!(fixture.faults.injected(), 1, "it went by way of the page cache");
    assert_eq!(fixture.read_blocks(0, 1).await.unwrap().len(), BLOCK as usize, "the other one is served");
    assert_eq!(fixture.service.insight.losses().losses.len(), 1);
    fixture.stop().await;
}

#[tokio::test(start_paused = true)]
async fn unwritten_page_cache_data_is_lost_after_release() {
    let mut fixture = Fixture::over_a_disk_that_takes_no_page().await;
    fixture.send(PARTITION, BLOCK as usize).unwrap();
    let (in_memory, released) = InMemory::begin();
    fixture.two_blocks((LONG, released)).await;
    within_time("it is not written back", || fixture.faults.injected() == 1).await;
    tokio::time::sleep(Duration::from_secs(60)).await;
    let buffer = fixture.buffer(PARTITION);
    buffer.release(&buffer.seal().unwrap());
    drop(in_memory);
    let text = fixture.until_named().await;
    assert!(text.contains("(ids 1)"), "{text}");
    fixture.stop().await;
}

#[tokio::test(start_paused = true)]
async fn damage_found_during_a_move_is_reported_to_readers() {
    let fixture = Fixture::new(PartitionLimits::default(), quiet()).await;
    fixture.two_blocks(Default::default()).await;
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
    shuffle.write(batch(0, Default::default())).await.unwrap();
    shuffle.write(batch(1, Default::default())).await.unwrap();
    let second = Duration::from_secs(1);
    fixture.faults.add(Rule::always(Operation::Write, Fault::Slow(second)).on("/log"));
    let damage = async {
        tokio::time::sleep(second / 4).await;
        fixture.find_damage().await;
        fixture.faults.clear();
        tokio::time::sleep(second / 4).await;
        let state = fixture.shuffle();
        assert_eq!(
            (state.ledger().verifying(), state.ledger().losses()),
            (0, Vec::new()),
            "nothing is reported"
        );
        assert!(state.ledger().is_watched() && state.block_ids().lock().count() == 0);
    };
    let (reported, ()) = tokio::join!(fixture.report_blocks(), damage);
    reported.unwrap();
    let text = fixture.until_named().await;
    assert!(text.contains("(ids 1)") && text.contains("while their report was written down"), "{text}");
    drop(shuffle);
    fixture.stop().await;
}

#[tokio::test(start_paused = true)]
async fn block_committed_during_a_count_is_recounted() {
    let fixture = Fixture::new(PartitionLimits::default(), quiet()).await;
    let (shuffle, lifecycle) = (fixture.shuffle(), &fixture.service.lifecycle);
    lifecycle.verifier.suspect(&shuffle, PartitionId(PARTITION), "a disk has failed");
    within_time("nothing is found", || shuffle.ledger().verifying() == 0).await;
    // Their sender asked before that whether anybody counts.
    let tier = fixture.flusher.tiers().iter().next().unwrap().shuffle(&key()).unwrap();
    tier.write(batch(0, Default::default())).await.unwrap();
    tier.write(batch(1, Default::default())).await.unwrap();
    let refused = fixture.report_blocks().await.unwrap_err();
    assert!(matches!(refused, ServiceError::Lost(_)), "{refused}");
    lifecycle.losses.count_again(&shuffle, PartitionId(PARTITION));
    fixture.report_blocks().await.unwrap();
    assert_eq!(fixture.read_blocks(0, 2).await.unwrap().len(), 2 * BLOCK as usize);
    drop((tier, shuffle));
    fixture.stop().await;
}
