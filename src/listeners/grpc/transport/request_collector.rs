//! Collects requests that are decoded as a whole, and charges them to the heap as they arrive.
//!
//! Sends are not collected (`ingest`), and pauses of callers are limited in `message`.
//!
//! Invariant: if a request has more than [`FREE_BYTES`], its bytes are charged before they are
//! collected, and its decoded message before it is allocated, until the call has its response. A
//! full heap is backpressure: a request is not read further, and its HTTP/2 window stays closed. It
//! continues when heap is freed, or fails after a while and frees its own. The number of waiting
//! requests is limited, since each has a window of buffered bytes. Large requests are admitted in
//! turns by application, so that their bytes leave heap for the decoded messages.

use std::pin::pin;
use std::sync::Arc;

use bytes::Bytes;
use http::Request;
use http_body_util::Full;
use prost::Message;
use tokio::time::Duration;
use tonic::Status;

use super::heap_estimate::{EstimateHeap, nested};
use super::message::{PREFIX_BYTES, RequestBody, next_data, read_prefix};
use super::request_queues::RequestQueues;
use crate::clock::{Instant, timeout};
use crate::runtime::BlockingPool;
use uniffle_base::budget::heap::HeapFull;
use uniffle_base::budget::{Budget, Charge, Heap, HeapKind, NoCapacity};
use uniffle_base::sched::Permit;
use uniffle_wire::types::AppId;

/// First allocation for a message that arrives in pieces. It grows with the bytes that arrive.
const COLLECT_BYTES: usize = 64 << 10;

/// Messages up to this size are part of the base cost of a call, and the number of calls is
/// bounded.
const FREE_BYTES: usize = 256;

/// Larger messages are decoded on a blocking thread: that many bytes take half a millisecond.
pub(in crate::listeners::grpc) const INLINE_BYTES_MAX: usize = 64 << 10;

/// Eviction: a charged request whose peer pauses for this time yields to others that wait for heap
/// or admission. Garbage collection of a JVM does not pause that long.
const PAUSE_MAX: Duration = Duration::from_secs(5);

/// A request that takes longer than [`PAUSE_MAX`] also yields if it brings fewer bytes per second.
const BYTES_PER_SEC_MIN: u64 = 256 << 10;

/// The heap budget for requests of all connections.
#[derive(Debug)]
pub(in crate::listeners::grpc) struct RequestHeap {
    budget: Budget,
    queues: Arc<RequestQueues>,
    wait: Duration,
    /// Pool for decoding large messages and encoding large responses.
    pub(in crate::listeners::grpc) pool: BlockingPool,
}

impl RequestHeap {
    pub(in crate::listeners::grpc) fn new(heap: &Heap, wait: Duration) -> Self {
        let budget = heap.of(HeapKind::Requests).clone();
        let queues = Arc::new(RequestQueues::new(budget.capacity()));
        Self { budget, queues, wait, pool: BlockingPool::sized_by_cores() }
    }

    /// Returns the collector of a connection. Its limit is half of the budget, so that one
    /// connection cannot use it up.
    pub(in crate::listeners::grpc) fn collector(&self) -> RequestCollector {
        let budget = self.budget.child(self.budget.capacity() / 2);
        RequestCollector {
            budget,
            queues: Arc::clone(&self.queues),
            wait: self.wait,
            pool: self.pool.clone(),
        }
    }
}

/// Collects the requests of one connection.
#[derive(Debug)]
pub(in crate::listeners::grpc) struct RequestCollector {
    budget: Budget,
    queues: Arc<RequestQueues>,
    wait: Duration,
    /// Pool for decoding large messages and encoding large responses.
    pub(in crate::listeners::grpc) pool: BlockingPool,
}

impl RequestCollector {
    /// Reads one whole message. Returns it with its charge.
    pub(in crate::listeners::grpc) async fn message<B, M>(
        &self,
        body: &mut B,
        length_max: u32,
        estimate: EstimateHeap,
    ) -> Result<(M, Charge), Status>
    where
        B: RequestBody,
        M: Message + Default + 'static,
    {
        let (length, first) = read_prefix(body, length_max).await?;
        let _permit = self.admit(length, &first).await?;
        let (bytes, charge) = self.collect(body, length as usize, first, 0).await?;
        let decode = |bytes| {
            M::decode(bytes).map_err(|error| Status::internal(format!("cannot decode the request: {error}")))
        };
        if bytes.len() <= FREE_BYTES {
            return Ok((decode(bytes)?, charge));
        }
        let is_small = bytes.len() <= INLINE_BYTES_MAX;
        let (weight, bytes, mut charge) =
            run_blocking(&self.pool, is_small, move || (estimate(&bytes), bytes, charge)).await?;
        self.charge(&mut charge, weight, 0).await?;
        // The work owns the charge, because it continues even if its caller is dropped.
        let (decoded, charge) = run_blocking(&self.pool, is_small, move || (decode(bytes), charge)).await?;
        Ok((decoded?, charge))
    }

    /// Returns `request` with its whole body collected, and the charge.
    pub(in crate::listeners::grpc) async fn whole<B: RequestBody>(
        &self,
        request: Request<B>,
        length_max: u32,
    ) -> Result<(Request<Full<Bytes>>, Charge), Status> {
        let (head, mut body) = request.into_parts();
        let (length, first) = read_prefix(&mut body, length_max).await?;
        let _permit = self.admit(length, &first).await?;
        let (bytes, mut charge) = self.collect(&mut body, length as usize, first, PREFIX_BYTES).await?;
        // tonic copies the bytes and then builds the message.
        let weight = bytes.len() as u64 + nested(&bytes[PREFIX_BYTES..]);
        if bytes.len() > FREE_BYTES {
            self.charge(&mut charge, weight, 0).await?;
        }
        Ok((Request::from_parts(head, Full::new(bytes)), charge))
    }

    /// Waits until a request of `length` bytes is admitted, of which `first` have arrived. A small
    /// request needs no permit.
    async fn admit(&self, length: u32, first: &[u8]) -> Result<Option<Permit>, Status> {
        if length as usize <= INLINE_BYTES_MAX {
            return Ok(None);
        }
        let permit = self.queues.admit(length, first, self.wait).await;
        let refused = || full(NoCapacity { requested: length.into(), free: self.budget.free() });
        permit.map(Some).ok_or_else(refused)
    }

    /// Collects the message of `length` bytes that begins with `first`. If `prefix_bytes` is not 0,
    /// the result includes the prefix.
    async fn collect<B: RequestBody>(
        &self,
        body: &mut B,
        length: usize,
        first: Bytes,
        prefix_bytes: usize,
    ) -> Result<(Bytes, Charge), Status> {
        let mut charge = self.budget.empty_charge();
        if first.len() == length && prefix_bytes == 0 {
            // Nothing is copied: the frame's memory becomes the message.
            if length > FREE_BYTES {
                self.charge(&mut charge, length as u64, length).await?;
            }
            self.ended(body).await?;
            return Ok((first, charge));
        }
        let whole = prefix_bytes + length;
        let latest = PAUSE_MAX + Duration::from_secs(length as u64 / BYTES_PER_SEC_MIN);
        let (mut all, began) = (Vec::new(), Instant::now());
        self.make_room(&mut all, &mut charge, prefix_bytes + first.len(), whole).await?;
        if prefix_bytes > 0 {
            all.push(0);
            all.extend_from_slice(&u32::try_from(length).unwrap_or(u32::MAX).to_be_bytes());
        }
        all.extend_from_slice(&first);
        drop(first);
        while all.len() < whole {
            let Some(data) = self.next(body).await? else {
                return Err(Status::internal("request ended inside its message"));
            };
            if began.elapsed() > latest && self.queues.has_waiters() {
                return Err(slow());
            }
            self.make_room(&mut all, &mut charge, data.len(), whole).await?;
            all.extend_from_slice(&data);
        }
        self.ended(body).await?;
        Ok((all.into(), charge))
    }

    /// Returns the next bytes of a request.
    async fn next<B: RequestBody>(&self, body: &mut B) -> Result<Option<Bytes>, Status> {
        let mut next = pin!(next_data(body));
        loop {
            match timeout(PAUSE_MAX, &mut next).await {
                Ok(data) => return data,
                Err(_elapsed) if self.queues.has_waiters() => return Err(slow()),
                Err(_elapsed) => {}
            }
        }
    }

    async fn ended<B: RequestBody>(&self, body: &mut B) -> Result<(), Status> {
        // Almost always known with the last bytes.
        if body.is_end_stream() || self.next(body).await?.is_none() { Ok(()) } else { Err(more_than_one()) }
    }

    /// Reserves space for `more` bytes of a message of `whole` bytes. Charges it first.
    async fn make_room(
        &self,
        all: &mut Vec<u8>,
        charge: &mut Charge,
        more: usize,
        whole: usize,
    ) -> Result<(), Status> {
        let needed = all.len() + more;
        if needed > whole {
            return Err(more_than_one());
        }
        if needed <= all.capacity() {
            return Ok(());
        }
        let wanted = (2 * all.capacity()).max(COLLECT_BYTES).max(needed).min(whole);
        if whole > FREE_BYTES {
            self.charge(charge, (wanted - all.capacity()) as u64, more).await?;
        }
        all.reserve_exact(wanted - all.len());
        Ok(())
    }

    /// Charges `bytes` more, waiting within the limits of a request. Meanwhile it holds `uncharged`
    /// bytes that were read. A charge that can never fit beside the request's own charge fails at
    /// once.
    async fn charge(&self, charge: &mut Charge, bytes: u64, uncharged: usize) -> Result<(), Status> {
        let Err(refusal) = charge.try_grow(bytes) else { return Ok(()) };
        let (requested, max) = (charge.bytes().saturating_add(bytes), self.budget.max_charge());
        if requested > max {
            return Err(too_large(requested, max));
        }
        let is_small = charge.bytes() + bytes <= INLINE_BYTES_MAX as u64;
        let Some(_waiter) = self.queues.wait_for_heap(is_small, uncharged) else { return Err(full(refusal)) };
        match timeout(self.wait, self.budget.charge(bytes)).await {
            Ok(Ok(more)) => charge.merge(more),
            Ok(Err(refusal)) => return Err(full(refusal)),
            Err(_elapsed) => return Err(full(refusal)),
        }
        Ok(())
    }
}

fn full(refusal: NoCapacity) -> Status {
    let error = HeapFull::of(HeapKind::Requests, refusal);
    excused(Status::resource_exhausted(format!("{error}; retry later")))
}

/// Builds the error for a request that waiting cannot help. A request may use half of the budget,
/// so that one connection cannot use it up.
fn too_large(requested: u64, max: u64) -> Status {
    excused(Status::resource_exhausted(format!(
        "request needs {requested} bytes of heap, the limit per connection is {max} (a quarter of \
         memory_store.heap_capacity); do not retry"
    )))
}

fn slow() -> Status {
    excused(Status::resource_exhausted(
        "request paused for 5 s, or was too slow, while others wait for memory \
         (memory_store.heap_capacity); retry later",
    ))
}

/// Marks the status of a well-formed call.
#[derive(Debug, thiserror::Error)]
#[error("the call is well-formed")]
struct WellFormed;

/// Marks a status that is caused by full heap or a failure of this worker.
pub(in crate::listeners::grpc) fn excused(mut status: Status) -> Status {
    status.set_source(Arc::new(WellFormed));
    status
}

/// Returns whether the call may be malformed, because its status is not [`excused`].
pub(in crate::listeners::grpc) fn is_client_fault(status: &Status) -> bool {
    !std::error::Error::source(status).is_some_and(|source| source.is::<WellFormed>())
}

fn more_than_one() -> Status {
    Status::internal("request has more than one message")
}

/// Runs `work` here if it is small, otherwise in the pool `pool`.
pub(in crate::listeners::grpc) async fn run_blocking<T: Send + 'static>(
    pool: &BlockingPool,
    is_small: bool,
    work: impl FnOnce() -> T + Send + 'static,
) -> Result<T, Status> {
    run_blocking_for(None, pool, is_small, work).await
}

/// Runs `work` of `app` here if it is small, otherwise in the pool `pool`, which is fair between
/// applications.
pub(in crate::listeners::grpc) async fn run_blocking_for<T: Send + 'static>(
    app: Option<AppId>,
    pool: &BlockingPool,
    is_small: bool,
    work: impl FnOnce() -> T + Send + 'static,
) -> Result<T, Status> {
    if is_small {
        return Ok(work());
    }
    let failed = |error| excused(Status::internal(format!("task on a blocking thread failed: {error}")));
    pool.run_for(app, work).await.map_err(failed)
}

#[cfg(test)]
mod tests {
    use std::cell::Cell;

    use futures::{StreamExt as _, poll};
    use tokio::sync::mpsc;
    use tonic::Code;

    use super::*;
    use crate::listeners::grpc::transport::message::tests::{body_of, framed};
    use crate::proto;

    const WAIT: Duration = Duration::from_secs(10);

    fn heap() -> Heap {
        Heap::new(16 << 20)
    }

    async fn heartbeat(pieces: Vec<Bytes>, max: u32) -> Result<proto::AppHeartBeatRequest, Code> {
        let collector = RequestHeap::new(&heap(), WAIT).collector();
        let read = collector.message(&mut body_of(pieces), max, nested).await;
        read.map(|(message, _)| message).map_err(|status| status.code())
    }

    #[tokio::test]
    async fn messages_are_read_in_any_pieces() {
        for app_id in ["app-1".to_owned(), "a".repeat(3000)] {
            let request = proto::AppHeartBeatRequest { app_id };
            for cut in [1, 2, 3, 4, 5, 6, 7, 11, 19, 2999, 4000] {
                assert_eq!(
                    heartbeat(framed(&request, cut), 4000).await.as_ref(),
                    Ok(&request),
                    "request cut at byte {cut}"
                );
                let collector = RequestHeap::new(&heap(), WAIT).collector();
                let (whole, _) =
                    collector.whole(Request::new(body_of(framed(&request, cut))), 4000).await.unwrap();
                let bytes = http_body_util::BodyExt::collect(whole.into_body()).await.unwrap().to_bytes();
                assert_eq!(bytes, framed(&request, 4000)[0], "request cut at byte {cut}");
            }
        }
        let empty = proto::AppHeartBeatRequest::default();
        assert_eq!(heartbeat(framed(&empty, 5), 100).await, Ok(empty));
    }

    #[tokio::test]
    async fn message_in_pieces_is_charged_like_a_whole_one() {
        let collector = RequestHeap::new(&heap(), WAIT).collector();
        for bytes in [FREE_BYTES, FREE_BYTES + 1, FREE_BYTES + PREFIX_BYTES, 1000] {
            let request = proto::AppHeartBeatRequest { app_id: "a".repeat(bytes - 3) };
            assert_eq!(request.encoded_len(), bytes);
            let charged = async |cut: usize| {
                let mut body = body_of(framed(&request, cut));
                let read = collector.message::<_, proto::AppHeartBeatRequest>(&mut body, 4000, nested);
                read.await.unwrap().1.bytes()
            };
            let (in_pieces, whole) = (charged(50).await, charged(4000).await);
            assert_eq!(in_pieces, whole, "a message of {bytes} bytes");
        }
    }

    #[tokio::test]
    async fn failed_thread_is_no_fault_of_the_client() {
        let pool = BlockingPool::new(1);
        let failed = run_blocking(&pool, false, || panic!("boom")).await;
        let status = failed.map(|never: ()| never).unwrap_err();
        assert!(status.code() == Code::Internal && !is_client_fault(&status), "{status}");
    }

    #[tokio::test]
    async fn broken_framing_is_refused() {
        let whole = framed(&proto::AppHeartBeatRequest { app_id: "app-1".into() }, 100);
        assert_eq!(heartbeat(Vec::new(), 100).await, Err(Code::Internal));
        assert_eq!(heartbeat(vec![whole[0].slice(..4)], 100).await, Err(Code::Internal));
        assert_eq!(heartbeat(vec![whole[0].slice(..8)], 100).await, Err(Code::Internal));
        assert_eq!(
            heartbeat(vec![whole[0].clone(), Bytes::from_static(b"x")], 100).await,
            Err(Code::Internal)
        );
        assert_eq!(heartbeat(whole.clone(), 6).await, Err(Code::ResourceExhausted));
        let claim = Bytes::from_static(&[0, 0xFF, 0xFF, 0xFF, 0xFF]);
        assert_eq!(heartbeat(vec![claim], 100).await, Err(Code::ResourceExhausted));
        let compressed = Bytes::from_static(&[1, 0, 0, 0, 0]);
        assert_eq!(heartbeat(vec![compressed], 100).await, Err(Code::Unimplemented));
    }

    /// Returns a request of `announced` bytes, whose bytes arrive through the channel.
    fn unfinished(announced: u32) -> (mpsc::UnboundedSender<Bytes>, impl RequestBody) {
        let (sender, receiver) = mpsc::unbounded_channel();
        let frames = tokio_stream::wrappers::UnboundedReceiverStream::new(receiver);
        let mut prefix = vec![0];
        prefix.extend_from_slice(&announced.to_be_bytes());
        sender.send(Bytes::from(prefix)).unwrap();
        let frames = frames.map(|data| Ok::<_, std::convert::Infallible>(http_body::Frame::data(data)));
        (sender, http_body_util::StreamBody::new(frames))
    }

    #[tokio::test(start_paused = true)]
    async fn paused_request_is_evicted_only_for_a_waiting_one() {
        let heap = heap();
        let requests = RequestHeap::new(&heap, WAIT);
        let most = u32::try_from(heap.of(HeapKind::Requests).capacity()).unwrap();
        // Leaves just as much heap as one connection may use.
        let others = heap.of(HeapKind::Requests).try_charge(u64::from(most / 2)).unwrap();
        let mut stalled = std::pin::pin!(async {
            let (sender, mut body) = unfinished(most / 2);
            sender.send(vec![0; most as usize / 2 - 1].into()).unwrap();
            let collector = requests.collector();
            let read = collector.message::<_, proto::AppHeartBeatRequest>(&mut body, most, nested).await;
            read.map(drop).map_err(|status| (status.code(), is_client_fault(&status)))
        });
        assert!(
            timeout(Duration::from_secs(30), &mut stalled).await.is_err(),
            "the request was closed although no request waits"
        );
        let began = tokio::time::Instant::now();
        let collector = requests.collector();
        let mut charge = collector.budget.empty_charge();
        let charging = collector.charge(&mut charge, u64::from(most) / 4, 0);
        let (ended, granted) = tokio::join!(&mut stalled, charging);
        assert_eq!(ended, Err((Code::ResourceExhausted, false)));
        assert!(granted.is_ok() && began.elapsed() <= PAUSE_MAX, "{:?}", began.elapsed());
        drop((others, charge));
        assert_eq!(heap.whole().used(), 0);
    }

    #[tokio::test(start_paused = true)]
    #[expect(clippy::excessive_nesting, reason = "a loop over cases around what each does")]
    async fn unfinished_requests_stay_within_the_heap() {
        let heap = heap();
        let requests = RequestHeap::new(&heap, WAIT);
        let most = heap.of(HeapKind::Requests).capacity();
        let ended = Cell::new(0);
        let (mut senders, mut calls) = (Vec::new(), Vec::new());
        for _ in 0..24 {
            let (sender, mut body) = unfinished(64 << 20);
            let (collector, ended) = (requests.collector(), &ended);
            calls.push(async move {
                let read =
                    collector.message::<_, proto::ReportShuffleResultRequest>(&mut body, 64 << 20, nested);
                let read = read.await.map(drop);
                ended.set(ended.get() + 1);
                read
            });
            senders.push(sender);
        }
        let sending = async {
            let mut peak = 0;
            for _ in 0..64 {
                for sender in &senders {
                    let _refused = sender.send(Bytes::from(vec![0x80; 1 << 20]));
                }
                tokio::task::yield_now().await;
                peak = peak.max(heap.of(HeapKind::Requests).used());
            }
            // Waiting requests fail after a while and free their heap, so that others could
            // continue.
            tokio::time::sleep(100 * WAIT).await;
            assert_eq!(ended.get(), 24);
            peak
        };
        let (peak, read) = tokio::join!(sending, futures::future::join_all(calls));
        assert!(peak > most / 2 && peak <= most, "the peak is {peak} of at most {most} bytes");
        for status in read.into_iter().map(Result::unwrap_err) {
            assert!(status.code() == Code::ResourceExhausted && !is_client_fault(&status), "{status}");
        }
        assert_eq!(heap.whole().used(), 0);
    }

    fn report_of(app: &str, ids: i64) -> proto::ReportShuffleResultRequest {
        let block_ids = (0..ids).map(|id| id << 45).collect();
        proto::ReportShuffleResultRequest {
            app_id: app.to_owned(),
            partition_to_block_ids: vec![proto::PartitionToBlockIds { partition_id: 0, block_ids }],
            ..Default::default()
        }
    }

    /// Reports arrive together when the map tasks of a stage end.
    #[tokio::test(start_paused = true)]
    async fn concurrent_large_reports_are_read_in_turn() {
        let heap = heap();
        let requests = RequestHeap::new(&heap, WAIT);
        let pieces = framed(&report_of("app-1", 20_000), 16 << 10);
        let bytes: usize = pieces.iter().map(Bytes::len).sum();
        let calls = (0..80).map(|_| {
            let (collector, mut body) = (requests.collector(), body_of(pieces.clone()));
            async move {
                let read = collector.message(&mut body, 64 << 20, nested).await;
                let (report, charge): (proto::ReportShuffleResultRequest, _) = read?;
                tokio::time::sleep(Duration::from_millis(100)).await;
                drop(charge);
                Ok::<_, Status>(report.partition_to_block_ids[0].block_ids.len())
            }
        });
        let read = futures::future::try_join_all(calls).await.unwrap();
        assert_eq!(read, [20_000; 80], "some of 80 requests of {bytes} bytes were refused");
        assert_eq!((heap.whole().used(), requests.queues.has_waiters()), (0, false));
    }

    /// Regression test: the request waited 10 s for heap that it held itself, and was told to
    /// retry.
    #[tokio::test(start_paused = true)]
    async fn request_beyond_the_heap_is_refused_with_its_key() {
        let heap = heap();
        let collector = RequestHeap::new(&heap, WAIT).collector();
        let most = collector.budget.max_charge();
        let of_ids = |count: usize| proto::GetShuffleServerRequest {
            faulty_server_ids: vec!["10.0.0.1-21100".to_owned(); count],
            ..Default::default()
        };
        let weight_of_one = nested(&of_ids(1).encode_to_vec());
        let request = of_ids(usize::try_from(most / weight_of_one).unwrap());
        let (bytes, weight) = (request.encoded_len() as u64, nested(&request.encode_to_vec()));
        assert!(
            weight <= most && weight + bytes > most,
            "the request has {bytes} bytes and weighs {weight}, the maximum charge is {most}"
        );
        let began = tokio::time::Instant::now();
        let mut body = body_of(framed(&request, 16 << 10));
        let refused =
            collector.message::<_, proto::GetShuffleServerRequest>(&mut body, 4 << 20, nested).await;
        let whole = collector.whole(Request::new(body_of(framed(&request, 16 << 10))), 4 << 20).await;
        for refused in [refused.map(drop).unwrap_err(), whole.map(drop).unwrap_err()] {
            let text = refused.message();
            assert!(
                text.contains("memory_store.heap_capacity") && text.contains(&most.to_string()),
                "{text}"
            );
            assert!(refused.code() == Code::ResourceExhausted && text.contains("do not retry"), "{text}");
        }
        assert_eq!(
            (began.elapsed(), heap.whole().used()),
            (Duration::ZERO, 0),
            "a request that can never fit must be refused at once and without a charge"
        );
    }

    /// A peer that sends single bytes does not keep its permit from others.
    #[tokio::test(start_paused = true)]
    async fn slow_large_request_is_evicted_for_waiting_ones() {
        let heap = heap();
        let requests = RequestHeap::new(&heap, WAIT);
        let mut trickling = std::pin::pin!(async {
            let (sender, mut body) = unfinished(1 << 20);
            let collector = requests.collector();
            let reading = collector.message::<_, proto::AppHeartBeatRequest>(&mut body, 1 << 20, nested);
            let trickle = async {
                while sender.send(Bytes::from_static(&[0])).is_ok() {
                    tokio::time::sleep(PAUSE_MAX / 2).await;
                }
            };
            tokio::select! { read = reading => read.map(drop).map_err(|status| status.code()), () = trickle => Ok(()) }
        });
        assert!(
            timeout(Duration::from_secs(60), &mut trickling).await.is_err(),
            "the request was closed although no request waits"
        );
        let _waits = requests.queues.wait_for_heap(false, 0).unwrap();
        assert_eq!(timeout(PAUSE_MAX, &mut trickling).await, Ok(Err(Code::ResourceExhausted)));
    }

    #[tokio::test(start_paused = true)]
    async fn request_resumes_after_backpressure_of_the_heap() {
        let heap = heap();
        let collector = RequestHeap::new(&heap, WAIT).collector();
        let held = heap.of(HeapKind::Requests).try_charge(heap.of(HeapKind::Requests).free()).unwrap();
        let request = proto::AppHeartBeatRequest { app_id: "a".repeat(3000) };
        let mut body = body_of(framed(&request, 100));
        let mut read = std::pin::pin!(collector.message(&mut body, 4000, nested));
        assert!(poll!(&mut read).is_pending());
        drop(held);
        let (message, charge): (proto::AppHeartBeatRequest, _) = read.await.unwrap();
        assert_eq!(message, request);
        assert!(charge.bytes() > 3000, "{}", charge.bytes());
        drop(charge);
        assert_eq!(heap.whole().used(), 0);
    }
}
