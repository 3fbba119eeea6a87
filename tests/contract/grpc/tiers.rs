//! Reads while blocks move from memory to disk (docs/protocol.md §3.4, §3.5 and §4.5), also with
//! task filters and LOCAL_ORDER.

use std::collections::BTreeSet;

use croaring::Treemap;
use uniffle_client::block::{Block, IdLayout};
use uniffle_client::grpc::{ReadOptions, register_request};
use uniffle_testkit::fault::{Fault, Operation, Rule};
use uniffle_wire::types::{BlockId, BlockMeta, PartitionId};
use uniffle_worker::proto::DataDistribution;

use super::blocks::{batch, block, blocks, payload};
use super::fixture::{WorkerFixture, assert_same, eventually, key};
use super::parts::parts;

const P: PartitionId = PartitionId(0);

fn ids(blocks: &[Block]) -> Vec<BlockId> {
    blocks.iter().map(|block| block.meta.block_id).collect()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn flushed_cursor_restarts_at_the_first_block() {
    let (fixture, key) = (WorkerFixture::start().await, key("app-1", 1));
    fixture.client.register(&key, &[(0, 0)]).await.unwrap();
    let (old, new) = (blocks(0, 1, 0..6), blocks(0, 2, 0..4));
    fixture.push(&key, &batch(0, &old)).await;
    let seen = fixture.client.read_memory(&key, P, None, 1000, None).await.unwrap().blocks;
    fixture.flush().await;
    fixture.push(&key, &batch(0, &new)).await;

    let cursor = seen.last().map(|block| block.meta.block_id);
    let again = fixture.client.read_memory(&key, P, cursor, 1 << 20, None).await.unwrap();
    assert_eq!(ids(&again.blocks), ids(&new));
    let index = fixture.client.read_index(&key, P).await.unwrap();
    let on_disk: Vec<BlockId> = index.records.iter().map(|record| record.meta.block_id).collect();
    assert_eq!(on_disk, ids(&old));
    assert_eq!(index.data_length, Some(payload(&old)));
    assert!(index.storage_ids.is_empty());
    fixture.finish().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn batch_in_flight_is_read_from_memory_until_published() {
    let (fixture, key) = (parts().start().await, key("app-1", 1));
    let client = fixture.client().await;
    client.register(&key, &[(0, 0)]).await.unwrap();
    let (first, second) = (blocks(0, 1, 0..5), blocks(0, 2, 0..5));
    for faults in &fixture.faults {
        faults.add(Rule::always(Operation::Write, Fault::Hang));
    }
    client.push(&key, Default::default(), &batch(0, &first)).await.unwrap();
    fixture.flusher.flush_all();
    eventually("the write hangs", || if fixture.hung() > 0 { Ok(()) } else { Err(String::new()) }).await;
    client.push(&key, Default::default(), &batch(0, &second)).await.unwrap();

    assert!(fixture.memory.in_flight_bytes() > 0);
    assert!(client.read_index(&key, P).await.unwrap().records.is_empty());
    let all: Vec<Block> = first.iter().chain(&second).cloned().collect();
    let memory = client.read_memory(&key, P, None, 1 << 20, None).await.unwrap();
    assert_eq!(ids(&memory.blocks), ids(&all), "blocks of the batch in flight must come first");
    // The cursor crosses from the batch to later blocks.
    let cursor = Some(first[4].meta.block_id);
    let rest = client.read_memory(&key, P, cursor, 1 << 20, None).await.unwrap();
    assert_eq!(ids(&rest.blocks), ids(&second));

    fixture.heal().await;
    fixture.flushed().await;
    let memory = client.read_memory(&key, P, None, 1 << 20, None).await.unwrap();
    assert_eq!(ids(&memory.blocks), ids(&second));
    assert_eq!(client.read_index(&key, P).await.unwrap().records.len(), 5);
    let read = client.read_partition(&key, P, &ReadOptions::default()).await.unwrap();
    assert_same(&read.blocks, &all);
    drop(client);
    fixture.finish().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn index_after_empty_memory_response_is_complete() {
    let (fixture, key) = (WorkerFixture::start().await, key("app-1", 1));
    fixture.client.register(&key, &[(0, 0)]).await.unwrap();
    let mut all = Vec::new();
    for round in 0..40 {
        let new = blocks(0, i64::from(round), 0..20);
        fixture.push(&key, &batch(0, &new)).await;
        all.extend(new);
        // Not awaited: the reads run while the batch is written, published and released.
        fixture.begin_flush();
        fixture.assert_reads(&key, 0, &all).await;
    }
    fixture.flush().await;
    fixture.assert_reads(&key, 0, &all).await;
    fixture.finish().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn local_order_extents_are_sorted_and_gapless() {
    let (fixture, key) = (WorkerFixture::start().await, key("app-1", 1));
    let mut request = register_request(&key, &[(0, 0)]);
    request.set_shuffle_data_distribution(DataDistribution::LocalOrder);
    fixture.client.register_with(request).await.unwrap();
    let mut all = Vec::new();
    for flush in 0..3 {
        for sequence in 0..8 {
            let new: Vec<Block> =
                [5, 2, 9].map(|task| block(0, task, flush * 8 + sequence, 700 + sequence)).to_vec();
            fixture.push(&key, &batch(0, &new)).await;
            all.extend(new);
        }
        fixture.flush().await;
    }
    let metas: Vec<BlockMeta> =
        fixture.client.read_index(&key, P).await.unwrap().records.iter().map(|record| record.meta).collect();
    for (flush, extent) in metas.chunks(24).enumerate() {
        let order: Vec<(i64, i64)> =
            extent.iter().map(|meta| (meta.task_attempt_id.0, meta.block_id.0)).collect();
        assert!(order.is_sorted(), "blocks of extent {flush} are not sorted: {order:?}");
    }
    // Fails if there is a gap between two records.
    fixture.assert_reads(&key, 0, &all).await;

    // A reader of a skewed partition wants some tasks only, and needs one range per extent.
    let options = ReadOptions { tasks: Some(Treemap::of(&[5])), ..Default::default() };
    let read = fixture.client.read_partition(&key, P, &options).await.unwrap();
    let wanted: Vec<Block> = all.iter().filter(|block| block.meta.task_attempt_id.0 == 5).cloned().collect();
    assert_same(&read.blocks, &wanted);
    fixture.finish().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn task_filter_excludes_other_tasks_in_all_tiers() {
    let (fixture, key) = (WorkerFixture::start().await, key("app-1", 1));
    fixture.client.register(&key, &[(0, 0)]).await.unwrap();
    let mut all = Vec::new();
    for sequence in 0..10 {
        all.extend((0..4).map(|task| block(0, task, sequence, 300)));
    }
    fixture.push(&key, &batch(0, &all)).await;
    let tasks = Treemap::of(&[1, 3]);
    let wanted: Vec<Block> =
        all.iter().filter(|block| block.meta.task_attempt_id.0 % 2 == 1).cloned().collect();

    let memory = fixture.client.read_memory(&key, P, None, 1 << 20, Some(&tasks)).await.unwrap();
    assert_eq!(ids(&memory.blocks), ids(&wanted));
    // The cursor may be a block that the filter excludes.
    let cursor = Some(all[4].meta.block_id);
    let rest = fixture.client.read_memory(&key, P, cursor, 1 << 20, Some(&tasks)).await.unwrap();
    assert_eq!(ids(&rest.blocks), ids(&wanted[2..]));
    let other = Treemap::of(&[99]);
    let nothing = fixture.client.read_memory(&key, P, None, 1 << 20, Some(&other)).await.unwrap();
    assert_eq!((nothing.blocks.len(), nothing.is_end), (0, Some(true)));

    fixture.flush().await;
    let options = ReadOptions { tasks: Some(tasks), ..Default::default() };
    let read = fixture.client.read_partition(&key, P, &options).await.unwrap();
    assert_same(&read.blocks, &wanted);
    fixture.finish().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn reducers_with_different_filters_are_independent() {
    let (fixture, key) = (WorkerFixture::start().await, key("app-1", 1));
    fixture.client.register(&key, &[(0, 0)]).await.unwrap();
    let mut all = Vec::new();
    for sequence in 0..50 {
        let new: Vec<Block> = (0..6).map(|task| block(0, task, sequence, 900)).collect();
        fixture.push(&key, &batch(0, &new)).await;
        all.extend(new);
        if sequence == 20 {
            fixture.flush().await;
        }
    }
    fixture.begin_flush();
    let reducer = |tasks: [u64; 3]| {
        let (client, key) = (fixture.client.clone(), key.clone());
        let tasks = Some(Treemap::of(&tasks));
        let options = ReadOptions { tasks, read_buffer_size: 3000, ..Default::default() };
        async move { client.read_partition(&key, P, &options).await.unwrap() }
    };
    let (even, odd, first) = tokio::join!(reducer([0, 2, 4]), reducer([1, 3, 5]), reducer([0, 1, 2]));
    for (read, tasks) in [(even, [0, 2, 4]), (odd, [1, 3, 5]), (first, [0, 1, 2])] {
        let tasks: BTreeSet<i64> = tasks.into();
        let wanted: Vec<Block> =
            all.iter().filter(|block| tasks.contains(&block.meta.task_attempt_id.0)).cloned().collect();
        assert_same(&read.blocks, &wanted);
    }
    fixture.finish().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn block_id_zero_is_valid() {
    let (fixture, key) = (WorkerFixture::start().await, key("app-1", 1));
    fixture.client.register(&key, &[(0, 0)]).await.unwrap();
    let all = blocks(0, 0, 0..3);
    assert_eq!(
        all[0].meta.block_id,
        BlockId(0),
        "the block with sequence number, partition and task 0 must have id 0"
    );
    fixture.push(&key, &batch(0, &all)).await;
    let after_0 = fixture.client.read_memory(&key, P, Some(BlockId(0)), 1 << 20, None).await.unwrap();
    assert_eq!(ids(&after_0.blocks), ids(&all[1..]), "0 as a cursor must not be the start");
    fixture.assert_reads(&key, 0, &all).await;
    fixture.flush().await;
    fixture.assert_reads(&key, 0, &all).await;
    assert_eq!(IdLayout::SPARK.partition_of(BlockId(0)), 0);
    fixture.finish().await;
}
