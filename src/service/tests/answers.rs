//! Responses from memory: their size follows the pace of the connection, only filters of many
//! blocks count as long work, and unread responses of one application leave room for others.

use super::*;
use crate::service::ReadLimits;

/// Bytes of a block of [`Fixture::fill`].
const BLOCK: u64 = 10_000;
const BLOCKS: u64 = 120;
const SLOW: Duration = Duration::from_secs(3);

/// Reads the partition as clients do, and takes `took` for each response. Returns the lengths of
/// the responses.
async fn read(fixture: &Fixture, connection: &ReadLimits, took: Duration) -> Vec<u64> {
    let (mut last_block_id, mut lengths, mut seen) = (-1, Vec::new(), 0);
    loop {
        let request = MemoryReadRequest {
            app: APP,
            shuffle: 0,
            partition: 3,
            last_block_id,
            read_buffer_size: 14 << 20,
            task_filter: None,
            window: Some(connection.window()),
        };
        let answer = fixture.service.reads.read_memory(request).unwrap();
        let Some(last) = answer.read.blocks.last() else { break };
        seen += answer.read.blocks.len() as u64;
        last_block_id = last.block_id.0;
        lengths.push(answer.read.length);
        assert_eq!(connection.window().pinned_bytes(), answer.read.length);
        tokio::time::advance(took).await;
        let is_end = answer.read.is_end;
        drop(answer);
        if is_end {
            break;
        }
    }
    assert_eq!(seen, BLOCKS, "the reader did not get all blocks");
    assert_eq!(connection.window().pinned_bytes(), 0);
    lengths
}

#[tokio::test(start_paused = true)]
async fn slow_reader_pins_less_memory_than_a_fast_one() {
    let mut fixture = Fixture::new(PartitionLimits::default(), quiet()).await;
    fixture.fill(3, BLOCK * BLOCKS);
    let (slow, fast) = (fixture.service.reads.read_limits(), fixture.service.reads.read_limits());
    // Limit of one response from the connection's share, regardless of its pace.
    let most = slow.window().limit(i32::MAX).unwrap();
    let one_more = |limit: u64| limit.div_ceil(BLOCK) * BLOCK;

    let at_first = read(&fixture, &fast, Duration::ZERO).await;
    assert_eq!(
        at_first[..2],
        [one_more(most); 2],
        "the first responses of {BLOCKS} blocks are not of full size"
    );
    let lengths = read(&fixture, &slow, SLOW).await;
    assert_eq!(lengths[0], one_more(most), "a connection without a measured pace must get full responses");
    assert!(lengths[1..].iter().all(|length| *length <= one_more(most / 2)), "{lengths:?}");
    assert_eq!(
        read(&fixture, &fast, Duration::ZERO).await,
        at_first,
        "the pace of another connection must not matter"
    );

    let lengths = read(&fixture, &slow, Duration::ZERO).await;
    assert!(lengths[0] <= one_more(most / 2), "{lengths:?}");
    assert_eq!(
        read(&fixture, &slow, Duration::ZERO).await,
        at_first,
        "a connection that is prompt again must get full responses"
    );
    fixture.stop().await;
}

#[tokio::test(start_paused = true)]
async fn only_filters_of_many_blocks_may_take_long() {
    fn request<'a>(
        app: &'a str,
        partition: i32,
        task_filter: Option<&'static [u8]>,
    ) -> MemoryReadRequest<'a> {
        MemoryReadRequest {
            app,
            shuffle: 0,
            partition,
            last_block_id: -1,
            read_buffer_size: 14 << 20,
            task_filter,
            window: None,
        }
    }
    let mut fixture = Fixture::new(PartitionLimits::default(), quiet()).await;
    fixture.fill(3, BLOCK * BLOCKS);
    let blocks = usize::try_from(BLOCKS).unwrap();
    let reads = &fixture.service.reads;
    let filter: Option<&'static [u8]> = Some(&[0; 8]);
    assert!(reads.filters_more_than(blocks - 1, &request(APP, 3, filter)));
    assert!(!reads.filters_more_than(blocks, &request(APP, 3, filter)));
    for quick in
        [request(APP, 3, None), request(APP, 3, Some(&[])), request(APP, 4, filter), request("", 3, filter)]
    {
        assert!(!reads.filters_more_than(0, &quick), "{quick:?}");
    }
    assert!(
        !reads.may_take_long(&request(APP, 3, filter)),
        "a filter of a partition with few blocks is quick"
    );
    fixture.stop().await;
}

/// Regression test: with half of the budget for each application, two of them held all of it.
#[tokio::test(start_paused = true)]
async fn unread_responses_of_greedy_apps_leave_room_for_another() {
    let mut fixture = Fixture::new(PartitionLimits::default(), quiet()).await;
    let greedy: Vec<String> = (0..4).map(|number| format!("greedy-{number}")).collect();
    for app in greedy.iter().map(String::as_str).chain(["honest"]) {
        fixture.register(app, &[]).await;
        for _ in 0..10 {
            fixture.send_of(app, 3, 100_000).unwrap();
        }
    }
    let answered = fixture.memory.answered().clone();
    let read = |app: &str, connection: &ReadLimits| {
        let request = MemoryReadRequest {
            app,
            shuffle: 0,
            partition: 3,
            last_block_id: -1,
            read_buffer_size: 14 << 20,
            task_filter: None,
            window: Some(connection.window()),
        };
        fixture.service.reads.read_memory(request)
    };
    let mut unread = Vec::new();
    for app in &greedy {
        let held_before = answered.used();
        for connection in (0..8).map(|_| fixture.service.reads.read_limits()) {
            unread.extend(std::iter::from_fn(|| read(app, &connection).ok()));
        }
        let held = answered.used() - held_before;
        assert!(
            held > 0 && held <= answered.capacity() / 2 + 100_000,
            "responses to {app} hold {held} bytes"
        );
    }
    let honest = read("honest", &fixture.service.reads.read_limits()).unwrap();
    assert!(honest.read.length > 0);
    assert!(
        answered.used() < answered.capacity(),
        "responses hold {} bytes, all of the budget",
        answered.used()
    );
    drop((honest, unread));
    assert_eq!(answered.used(), 0);
    for app in greedy.iter().map(String::as_str).chain(["honest"]) {
        fixture.service.lifecycle.unregister_app(app).unwrap();
    }
    fixture.stop().await;
}
