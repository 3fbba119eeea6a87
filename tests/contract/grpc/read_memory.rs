//! Read memory, the budget for reads of disks, is bounded and is charged until the socket has
//! accepted the bytes. Clients that do not read keep their read memory, and requests beyond the
//! limit get NO_BUFFER. Responses from the memory tier are smaller on a slow connection.

use std::time::Duration;

use futures::future::join_all;
use http_body_util::BodyExt;
use prost::Message;
use tokio::time::{Instant, sleep};
use tonic::transport::{Channel, Endpoint};
use uniffle_worker::proto::{
    GetLocalShuffleDataRequest, GetLocalShuffleDataResponse, GetMemoryShuffleDataRequest,
    GetMemoryShuffleDataResponse, StatusCode,
};

use super::blocks::{batch, block};
use super::fixture::{Setup, WorkerFixture, eventually, key};
use super::raw;

const GET_LOCAL_DATA: &str = "/rss.common.ShuffleServer/getLocalShuffleData";
const GET_MEMORY_DATA: &str = "/rss.common.ShuffleServer/getMemoryShuffleData";
const WAIT_MAX: Duration = Duration::from_secs(60);
const READERS: usize = 32;
const CONNECTIONS: usize = 8;
/// The smallest read memory that can be configured.
const SETUP: Setup<'_> = Setup {
    store_type: "MEMORY_LOCALFILE",
    capacity: "64MiB",
    memory: "read_buffer_capacity = \"4MiB\"",
    local: "",
    top: "",
    tables: "",
};

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn reads_beyond_pinned_read_memory_get_no_buffer() {
    let (fixture, key) = (WorkerFixture::with(SETUP).await, key("app-1", 1));
    fixture.client.register(&key, &[(0, 0)]).await.unwrap();
    let length = 8 << 20;
    fixture.push(&key, &batch(0, &[block(0, 1, 0, length)])).await;
    fixture.flush().await;
    let request = GetLocalShuffleDataRequest {
        app_id: key.app.as_str().to_owned(),
        shuffle_id: key.shuffle.0,
        partition_num_per_range: 1,
        partition_num: 1,
        length: i32::try_from(length).unwrap(),
        ..GetLocalShuffleDataRequest::default()
    };

    let pool = fixture.memory().read_pool().clone();
    assert_eq!(pool.used_bytes(), 0);
    // Several connections, because each may have only two permits.
    let channels = join_all((0..CONNECTIONS).map(|_| raw::connect(fixture.worker.addresses().grpc))).await;
    // Nobody reads, so windows, socket buffers and read memory fill up, and further reads wait in
    // vain.
    let opened = (0..READERS)
        .map(|reader| raw::open(&channels[reader % CONNECTIONS], GET_LOCAL_DATA, raw::framed(&request)));
    let bodies = join_all(opened).await;
    // The last eighth is reserved for other applications.
    let most = pool.capacity_bytes() - pool.capacity_bytes() / 8;
    let held = pool.used_bytes();
    assert!(held <= most && held + (1 << 20) > most, "unread responses must hold their memory: {held}");

    let (mut complete, mut refused) = (0, 0);
    // All at once, because unread data of one stream uses the window of the connection.
    for whole in join_all(bodies.into_iter().map(BodyExt::collect)).await {
        let whole = whole.unwrap().to_bytes();
        let answer = GetLocalShuffleDataResponse::decode(whole.slice(5..)).unwrap();
        match answer.status() {
            StatusCode::Success => {
                assert_eq!(answer.data.len(), length as usize, "a reader that continues must get all bytes");
                complete += 1;
            }
            status => {
                assert_eq!(status, StatusCode::NoBuffer, "{}", answer.ret_msg);
                assert!(answer.ret_msg.contains("read memory"), "{}", answer.ret_msg);
                refused += 1;
            }
        }
    }
    assert!(complete > 0 && refused > 0, "{complete} reads were complete, {refused} refused");
    eventually("the read memory is back", || match pool.used_bytes() {
        0 => Ok(()),
        used => Err(format!("{used} bytes")),
    })
    .await;
    drop(channels);
    fixture.finish().await;
}

/// Returns the payload bytes of a response from memory. The response is read at once.
async fn payload_size(channel: &Channel, request: &GetMemoryShuffleDataRequest) -> usize {
    let whole = raw::open(channel, GET_MEMORY_DATA, raw::framed(request)).await.collect().await.unwrap();
    let answer = GetMemoryShuffleDataResponse::decode(whole.to_bytes().slice(5..)).unwrap();
    assert_eq!(answer.status(), StatusCode::Success, "{}", answer.ret_msg);
    answer.data.len()
}

async fn until_payload_size(channel: &Channel, request: &GetMemoryShuffleDataRequest, expected: usize) {
    let began = Instant::now();
    while payload_size(channel, request).await != expected {
        assert!(began.elapsed() < WAIT_MAX, "no response has {expected} bytes");
        sleep(Duration::from_millis(20)).await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn slow_connection_gets_smaller_responses() {
    let setup = Setup { capacity: "64MiB", ..Setup::default() };
    let (fixture, key) = (WorkerFixture::with(setup).await, key("app-1", 1));
    fixture.client.register(&key, &[(0, 0)]).await.unwrap();
    let blocks: Vec<_> = (0..32).map(|n| block(0, 1, n, 64 << 10)).collect();
    fixture.push(&key, &batch(0, &blocks)).await;
    let asked = 1 << 20;
    let request = GetMemoryShuffleDataRequest {
        app_id: key.app.as_str().to_owned(),
        shuffle_id: key.shuffle.0,
        last_block_id: -1,
        read_buffer_size: asked,
        ..GetMemoryShuffleDataRequest::default()
    };
    let asked = usize::try_from(asked).unwrap();
    // An unread stream stops at its own window and leaves that of the connection to others.
    let endpoint = Endpoint::from_shared(format!("http://{}", fixture.worker.addresses().grpc)).unwrap();
    let endpoint = endpoint.initial_stream_window_size(65_535).initial_connection_window_size(8 << 20);
    let slow = endpoint.connect().await.unwrap();
    let fast = raw::connect(fixture.worker.addresses().grpc).await;
    let unread = raw::open(&slow, GET_MEMORY_DATA, raw::framed(&request)).await;
    until_payload_size(&slow, &request, asked / 2).await;
    until_payload_size(&fast, &request, asked).await;
    let whole = unread.collect().await.unwrap().to_bytes();
    let answer = GetMemoryShuffleDataResponse::decode(whole.slice(5..)).unwrap();
    assert_eq!(answer.data.len(), asked, "a prompt connection must get its requested size");
    until_payload_size(&slow, &request, asked).await;
    fixture.assert_reads(&key, 0, &blocks).await;
    drop((slow, fast));
    fixture.finish().await;
}
