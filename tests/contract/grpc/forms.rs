//! The three forms of `sendShuffleData`, and invalid forms (docs/protocol.md §1.8). Also absent
//! checksums, and a block that occurs three times in a message.

use prost::Message;
use uniffle_client::send::{self, SendForm};
use uniffle_wire::types::PartitionId;
use uniffle_worker::proto::{CombinedShuffleData, SendShuffleDataRequest, ShuffleData, StatusCode};

use super::blocks::{block, blocks};
use super::fixture::{WorkerFixture, key};

type Parts = Vec<(PartitionId, Vec<uniffle_client::block::Block>)>;

fn parts(task: i64) -> Parts {
    (0..3).map(|p| (PartitionId(p), blocks(p, task, 0..4))).collect()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn all_three_forms_store_the_same_blocks() {
    let (fixture, key) = (WorkerFixture::start().await, key("app-1", 1));
    fixture.client.register(&key, &[(0, 2)]).await.unwrap();
    for (task, form) in [(1, SendForm::Classic), (2, SendForm::Contiguous), (3, SendForm::Combined)] {
        fixture.client.push(&key, form, &parts(task)).await.unwrap();
    }
    for flushed in [false, true] {
        for p in 0..3 {
            let all: Vec<_> = (1..4).flat_map(|task| blocks(p, task, 0..4)).collect();
            fixture.assert_reads(&key, p, &all).await;
        }
        if !flushed {
            fixture.flush().await;
        }
    }
    fixture.finish().await;
}

/// A change that makes a valid request of the form invalid.
struct Malformed {
    name: &'static str,
    form: SendForm,
    corrupt: fn(&mut SendShuffleDataRequest),
}

fn first(request: &mut SendShuffleDataRequest) -> &mut ShuffleData {
    &mut request.shuffle_data[0]
}

fn corrupt_combined(request: &mut SendShuffleDataRequest, corrupt: fn(&mut CombinedShuffleData)) {
    let mut message = CombinedShuffleData::decode(request.contiguous_shuffle_data.clone()).unwrap();
    corrupt(&mut message);
    request.contiguous_shuffle_data = message.encode_to_vec().into();
}

/// docs/protocol.md §1.8 rule 4, and docs/architecture.md §6 item 5.
const MALFORMED: &[Malformed] = &[
    Malformed {
        name: "length larger than the data",
        form: SendForm::Classic,
        corrupt: |request| first(request).block[1].length += 1,
    },
    Malformed {
        name: "length smaller than the data",
        form: SendForm::Classic,
        corrupt: |request| first(request).block[1].length -= 1,
    },
    Malformed {
        name: "negative length",
        form: SendForm::Classic,
        corrupt: |request| first(request).block[1].length = -1,
    },
    Malformed {
        name: "a block without data among others",
        form: SendForm::Classic,
        corrupt: |request| first(request).block[1].data.clear(),
    },
    Malformed {
        name: "data in the block and in field 7",
        form: SendForm::Classic,
        corrupt: |request| request.contiguous_shuffle_data = vec![1; 2000].into(),
    },
    Malformed {
        name: "field 7 too short",
        form: SendForm::Contiguous,
        corrupt: |request| {
            let short = request.contiguous_shuffle_data.len() - 1;
            request.contiguous_shuffle_data.truncate(short);
        },
    },
    Malformed {
        name: "field 7 too long",
        form: SendForm::Contiguous,
        corrupt: |request| {
            let mut long = request.contiguous_shuffle_data.to_vec();
            long.push(0);
            request.contiguous_shuffle_data = long.into();
        },
    },
    Malformed {
        name: "field 7 absent",
        form: SendForm::Contiguous,
        corrupt: |request| request.contiguous_shuffle_data.clear(),
    },
    Malformed {
        name: "lengths that wrap around",
        form: SendForm::Contiguous,
        corrupt: |request| {
            first(request).block[0].length = i32::MAX;
            first(request).block[1].length = i32::MIN;
        },
    },
    Malformed {
        name: "field 7 that is no message",
        form: SendForm::Combined,
        corrupt: |request| request.contiguous_shuffle_data = vec![0xFF; 500].into(),
    },
    Malformed {
        name: "fewer counts than partitions",
        form: SendForm::Combined,
        corrupt: |request| corrupt_combined(request, |it| it.partition_block_counts.truncate(2)),
    },
    Malformed {
        name: "counts of more blocks than there are",
        form: SendForm::Combined,
        corrupt: |request| corrupt_combined(request, |it| it.partition_block_counts[1] = i32::MAX),
    },
    Malformed {
        name: "a negative count",
        form: SendForm::Combined,
        corrupt: |request| corrupt_combined(request, |it| it.partition_block_counts[1] = -4),
    },
    Malformed {
        name: "fewer ids than blocks",
        form: SendForm::Combined,
        corrupt: |request| corrupt_combined(request, |it| it.block_ids.truncate(5)),
    },
    Malformed {
        name: "lengths beyond the bytes",
        form: SendForm::Combined,
        corrupt: |request| corrupt_combined(request, |it| it.lengths[3] += 7),
    },
    Malformed {
        name: "bytes beyond the lengths",
        form: SendForm::Combined,
        corrupt: |request| corrupt_combined(request, |it| it.lengths[3] -= 7),
    },
    Malformed {
        name: "a negative length in the array",
        form: SendForm::Combined,
        corrupt: |request| corrupt_combined(request, |it| it.lengths[0] = -1),
    },
    Malformed {
        name: "arrays and no bytes",
        form: SendForm::Combined,
        corrupt: |request| corrupt_combined(request, |it| it.combined_data.clear()),
    },
];

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn malformed_sends_store_nothing_and_leak_nothing() {
    let (fixture, key) = (WorkerFixture::start().await, key("app-1", 1));
    fixture.client.register(&key, &[(0, 2)]).await.unwrap();
    for Malformed { name, form, corrupt } in MALFORMED {
        let ticket = fixture.client.require_buffer(&key, &parts(1)).await.unwrap();
        let mut request = send::request(&key, ticket, *form, &parts(1));
        corrupt(&mut request);
        let answer = fixture.client.raw().send_shuffle_data(request).await.unwrap().into_inner();
        let status = answer.status();
        let is_refused = matches!(status, StatusCode::InternalError | StatusCode::InvalidRequest);
        assert!(is_refused && !answer.ret_msg.is_empty(), "{name}: {status:?} {}", answer.ret_msg);
        fixture.assert_memory_is_free().await;
        let again = fixture.client.send(&key, ticket, *form, &parts(1)).await.unwrap_err();
        assert_eq!(again.status(), Some(StatusCode::InternalError), "{name}: a spent ticket was accepted");
    }
    for partition in 0..3 {
        fixture.assert_reads(&key, partition, &[]).await;
    }
    fixture.client.push(&key, SendForm::Combined, &parts(1)).await.unwrap();
    fixture.assert_reads(&key, 2, &blocks(2, 1, 0..4)).await;
    fixture.finish().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn checksum_of_zero_is_not_verified() {
    let (fixture, key) = (WorkerFixture::start().await, key("app-1", 1));
    fixture.client.register(&key, &[(0, 0)]).await.unwrap();
    let mut all = blocks(0, 1, 0..2);
    all[0].meta.crc = 0;
    let parts = vec![(PartitionId(0), all.clone())];
    fixture.client.push(&key, SendForm::Classic, &parts).await.unwrap();
    let memory = fixture.client.read_memory(&key, PartitionId(0), None, 1 << 20, None).await.unwrap();
    assert_eq!(memory.blocks[0].meta, all[0].meta, "a field differs from the sent block");
    fixture.flush().await;
    let index = fixture.client.read_index(&key, PartitionId(0)).await.unwrap();
    assert_eq!(index.records[0].meta, all[0].meta);
    fixture.finish().await;
}

/// The same id occurs three times in one message.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn repeated_block_in_message_is_stored_once() {
    let (fixture, key) = (WorkerFixture::start().await, key("app-1", 1));
    fixture.client.register(&key, &[(0, 0)]).await.unwrap();
    let one = block(0, 1, 0, 5000);
    let parts = vec![(PartitionId(0), vec![one.clone(), one.clone(), one.clone()])];
    fixture.client.push(&key, SendForm::Classic, &parts).await.unwrap();
    assert_eq!(fixture.memory().block_count(), 1);
    let memory = fixture.client.read_memory(&key, PartitionId(0), None, 1 << 20, None).await.unwrap();
    assert_eq!(memory.blocks, std::slice::from_ref(&one));
    fixture.flush().await;
    fixture.assert_reads(&key, 0, &[one]).await;
    fixture.finish().await;
}
