//! Reads of the local tier over TCP.

use uniffle_client::block::Block;
use uniffle_testkit::fault::{EIO, Fault, Operation, Rule};

use super::fixture::{PARTITION, TcpFixture, block, key};

fn joined(blocks: &[Block]) -> Vec<u8> {
    blocks.iter().flat_map(|block| block.data.iter().copied()).collect()
}

#[tokio::test]
async fn many_local_reads_share_the_read_memory() {
    let fixture = TcpFixture::new().await;
    let blocks: Vec<_> = (0..30).map(|i| block(i, 100_000)).collect();
    fixture.store(&blocks).await;
    let all = joined(&blocks);
    // 60 responses of 3 MB in flight with 8 MiB of read memory.
    let clients = [fixture.client().await, fixture.client().await, fixture.client().await];
    let key = key();
    let reads = (0..60).map(|i| clients[i % 3].read_data(&key, PARTITION, 0, 3_000_000));
    for read in futures::future::join_all(reads).await {
        assert!(read.unwrap().body == all);
    }
    drop(clients);
    fixture.finish().await;
}

#[tokio::test]
async fn hung_disk_blocks_neither_memory_reads_nor_sends() {
    let fixture = TcpFixture::new().await;
    let client = fixture.client().await;
    fixture.store(&[block(0, 100)]).await;
    fixture.faults.add(Rule::always(Operation::Read, Fault::Hang));
    let key = key();
    let mut hung = Box::pin(client.read_data(&key, PARTITION, 0, 100));
    assert!(futures::poll!(&mut hung).is_pending());
    fixture.until("the disk hangs", |fixture| fixture.faults.hung() > 0).await;
    let in_progress = |fixture: &TcpFixture| {
        ["netty_get_local_shuffle_data_request", "urpc_request_number", "read_local_data_file_thread_num"]
            .map(|name| fixture.metric(name))
    };
    assert_eq!(in_progress(&fixture), [1.0; 3]);
    assert_eq!(fixture.metric("read_local_data_file_buffer_size"), 100.0);
    for i in 1..20 {
        fixture.send(&client, &[(PARTITION, vec![block(i, 1000)])]).await;
        client.read_memory(&key, PARTITION, -1, 1 << 20, None).await.unwrap();
    }
    assert!(futures::poll!(&mut hung).is_pending());
    fixture.faults.clear();
    fixture.faults.release().await;
    assert_eq!((&mut hung).await.unwrap().body.len(), 100);
    drop(hung);
    fixture.until("the read is answered", |fixture| in_progress(fixture) == [0.0; 3]).await;
    drop(client);
    fixture.finish().await;
}

#[tokio::test]
async fn disk_error_within_response_closes_connection() {
    let fixture = TcpFixture::new().await;
    let (client, other) = (fixture.client().await, fixture.client().await);
    let blocks: Vec<_> = (0..40).map(|i| block(i, 100_000)).collect();
    fixture.store(&blocks).await;
    fixture.faults.add(Rule::always(Operation::Read, Fault::Errno(EIO)).after(1));
    let cut =
        client.read_data(&key(), PARTITION, 0, 4_000_000).await.map(|reply| reply.body.len()).unwrap_err();
    assert_eq!(cut.status(), None, "{cut}");
    fixture.faults.clear();
    assert!(other.read_data(&key(), PARTITION, 0, 4_000_000).await.unwrap().body == joined(&blocks));
    assert!(fixture.metric("netty_handle_exception") >= 1.0);
    drop((client, other));
    fixture.finish().await;
}
