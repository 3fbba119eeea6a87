//! Reads that are longer than one chunk of their reader.

use futures::FutureExt as _;
use futures::future::BoxFuture;
use uniffle_io::{ReadBuffer, ReadBuffers};
use uniffle_testkit::object_fault::{Call, ObjectFault};

use super::*;
use crate::store::object::location::CLAIM;

/// Buffers for chunks of this many bytes.
struct Chunks(usize);

impl ReadBuffers for Chunks {
    fn acquire(&self, len: usize) -> BoxFuture<'_, Box<dyn ReadBuffer>> {
        HeapBuffers.acquire(len)
    }

    fn chunk_bytes(&self) -> usize {
        self.0
    }
}

const CHUNKS: Chunks = Chunks(700);
const BYTES: u32 = 4000;

/// Starts a process with a shuffle whose partition 0 has 4,000 adjacent bytes in one segment.
async fn with_a_run(answers_ahead: usize) -> Process {
    let settings = ObjectSettings { answers_ahead, ..settings() };
    let process = Process::with(&FaultyObjects::default(), settings).await.unwrap();
    let shuffle = process.register(&key(1));
    shuffle.write(vec![extent(1, 0..9, 500), extent(0, 0..40, 100)].into()).await.unwrap();
    process
}

impl Process {
    fn begin(&self, (offset, length): (u64, u32)) -> Box<dyn ChunkRead> {
        self.tier.data(&key(1), PartitionId(0), offset, length).unwrap().chunks
    }

    fn get_count(&self) -> usize {
        let calls = self.store.calls();
        calls.iter().filter(|(call, key)| *call == Call::Get && !key.ends_with(CLAIM)).count()
    }
}

async fn rest_of(mut read: Box<dyn ChunkRead>) -> Result<Vec<u8>, StoreError> {
    let mut bytes = Vec::new();
    while let Some(chunk) = read.next_chunk(&CHUNKS).await? {
        bytes.extend_from_slice(&chunk);
    }
    Ok(bytes)
}

fn written() -> Vec<u8> {
    (0..40).flat_map(|id| content(id, 100)).collect()
}

#[tokio::test]
async fn contiguous_chunks_are_one_request() {
    let process = with_a_run(8).await;
    assert!(rest_of(process.begin((0, BYTES))).await.unwrap() == written());
    assert_eq!(process.get_count(), 1);
    assert!(rest_of(process.begin((150, 2500))).await.unwrap() == written()[150..2650]);
    assert_eq!(process.get_count(), 2);

    let process = with_a_run(0).await;
    assert!(rest_of(process.begin((0, BYTES))).await.unwrap() == written());
    assert_eq!(process.get_count(), 6, "without a permit each chunk must be a request");
}

#[tokio::test]
async fn slow_readers_hold_no_request_permit() {
    let process = with_a_run(1).await;
    let mut slow = process.begin((0, BYTES));
    let first = slow.next_chunk(&CHUNKS).await.unwrap().unwrap();
    assert!(rest_of(process.begin((0, BYTES))).await.unwrap() == written());
    assert_eq!(process.get_count(), 1 + 6);
    assert!([first.to_vec(), rest_of(slow).await.unwrap()].concat() == written());
    assert_eq!(process.get_count(), 1 + 6);
    assert!(rest_of(process.begin((0, BYTES))).await.unwrap() == written());
    assert_eq!(process.get_count(), 1 + 6 + 1, "the permit was not returned");
    drop(process.begin((0, BYTES)).next_chunk(&CHUNKS).now_or_never());
    assert!(rest_of(process.begin((0, BYTES))).await.unwrap() == written());
    assert_eq!(process.get_count(), 1 + 6 + 1 + 2, "a dropped reader did not return its permit");
}

#[tokio::test]
async fn cut_or_wrong_response_is_requested_again() {
    for (fault, gets) in [(ObjectFault::Cut, 2), (ObjectFault::Flip, 2)] {
        let process = with_a_run(8).await;
        let mut faults = vec![fault].into_iter();
        process.store.set(move |call, _| match call {
            Call::Get => faults.next().unwrap_or(ObjectFault::None),
            _ => ObjectFault::None,
        });
        assert!(rest_of(process.begin((0, BYTES))).await.unwrap() == written(), "{fault:?}");
        assert_eq!(process.get_count(), gets, "{fault:?}");
    }
}
