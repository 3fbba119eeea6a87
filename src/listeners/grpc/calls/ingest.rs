//! `sendShuffleData` and `requireBuffer`. A send feeds HTTP/2 DATA frames through the decoder into
//! the service's send session, while they are in the processor's cache. No message of a send is
//! buffered as a whole.
//!
//! Tickets, limits and statuses belong to the session, the format to `wire::send_message`.
//!
//! Invariant: the session is committed only when the whole message was decoded and the client has
//! half-closed. Any earlier exit drops it, which undoes everything. A commit that has begun
//! completes even if the deadline passes. A refusal may be sent early. The rest of the request is
//! then read and discarded in a bounded task, so that the client sees the response and not a reset
//! stream.

use std::sync::Arc;

use bytes::Bytes;
use tokio::sync::Semaphore;
use tonic::Status;
use tonic::body::Body;

use super::convert::{note_broken_call, refusal, success, verdict};
use crate::clock::{Instant, timeout_at};
use crate::listeners::grpc::config::GrpcConfig;
use crate::listeners::grpc::transport::message::{
    RequestBody, next_data, next_data_paced, read_prefix, respond_message,
};
use crate::metrics::TransitTimes;
use crate::proto::{RequireBufferRequest, RequireBufferResponse, SendShuffleDataResponse};
use crate::runtime::{PollBudget, Tasks};
use crate::service::{Commit, RequireRequest, SendSink, Service, ServiceError};
use uniffle_wire::BlockSink;
use uniffle_wire::send_message::{Decoder, MessageLimits, MessageSummary};

/// Number of bytes decoded before the task may yield. In the worst case they are headers of
/// partitions without blocks, which take some milliseconds.
const PIECE_BYTES: usize = 64 << 10;

/// Bytes of a refused request that are read and discarded, so that the client sees the response.
const DISCARD_BYTES_MAX: u64 = 64 << 20;

/// Ticket id of a refusal.
const NO_TICKET: i64 = -1;

/// Receives a send's blocks and decides whether to wait for further bytes.
trait PacedSink: BlockSink {
    /// Accounts for `bytes` of headers that the decoder keeps.
    fn keep(&mut self, bytes: u64) -> Result<(), Self::Error>;

    /// Returns when to call [`PacedSink::check_pace`] next if no byte arrives.
    fn next_check(&self) -> Instant;

    /// Fails if the send must end. `arrived` bytes of its message have been received.
    fn check_pace(&mut self, arrived: u64) -> Result<(), Self::Error>;
}

impl PacedSink for SendSink {
    fn keep(&mut self, bytes: u64) -> Result<(), ServiceError> {
        Self::keep(self, bytes)
    }

    fn next_check(&self) -> Instant {
        Self::next_check(self)
    }

    fn check_pace(&mut self, arrived: u64) -> Result<(), ServiceError> {
        Self::check_pace(self, arrived)
    }
}

/// Serves one call of `sendShuffleData`.
pub(in crate::listeners::grpc) async fn send_shuffle_data<B: RequestBody>(
    service: &Arc<Service>,
    config: &GrpcConfig,
    tasks: &Tasks,
    transit: &TransitTimes,
    mut body: B,
) -> http::Response<Body> {
    let deadline = Instant::now() + config.call_deadline;
    let received = timeout_at(deadline, receive(service, config, transit, &mut body)).await;
    let received = received.unwrap_or_else(|_elapsed| {
        let text = format!("request timed out after {} s", config.call_deadline.as_secs());
        Err(Status::deadline_exceeded(text))
    });
    if !matches!(received, Ok(Ok(()))) && !body.is_end_stream() && !tasks.is_closing() {
        discard_rest(body, DISCARD_BYTES_MAX, deadline, tasks);
    }
    match received {
        Ok(stored) => {
            let (status, ret_msg) = verdict(service, stored, "OK");
            respond_message(&SendShuffleDataResponse { status, ret_msg })
        }
        Err(status) => {
            note_broken_call(service, &status);
            status.into_http()
        }
    }
}

/// Receives one message and stores its blocks. The outer error is a broken call, the inner one a
/// refusal for the response.
async fn receive<B: RequestBody>(
    service: &Arc<Service>,
    config: &GrpcConfig,
    transit: &TransitTimes,
    body: &mut B,
) -> Result<Result<(), ServiceError>, Status> {
    let (message_bytes, first) = read_prefix(body, config.max_message_bytes).await?;
    let mut sink = SendSink::new(Arc::clone(&service.ingest), message_bytes);
    let filled = fill(body, message_bytes, first, &mut sink).await?;
    let summary = match filled {
        Ok(summary) => summary,
        Err(error) => return Ok(Err(error)),
    };
    transit.arrived(summary.timestamp_ms);
    match sink.commit() {
        Commit::Done(stored) => Ok(stored),
        Commit::Background(mut committing) => Ok(committing.outcome().await),
    }
}

/// Feeds the message of `message_bytes` bytes to `sink`, up to the client's half-close.
async fn fill<B, S>(
    body: &mut B,
    message_bytes: u32,
    first: Bytes,
    sink: &mut S,
) -> Result<Result<MessageSummary, S::Error>, Status>
where
    B: RequestBody,
    S: PacedSink,
{
    let mut decoder = Decoder::new(u64::from(message_bytes), MessageLimits::default());
    let mut poll_budget = PollBudget::default();
    let mut arrived = 0;
    let mut next = Some(first);
    while let Some(data) = next {
        arrived += data.len() as u64;
        for piece in data.chunks(PIECE_BYTES) {
            let began = Instant::now();
            let fed = decoder.feed(piece, sink);
            if let Err(error) = fed.and_then(|()| sink.keep(decoder.collected_bytes() as u64)) {
                return Ok(Err(error));
            }
            poll_budget.add(began.elapsed());
            if poll_budget.take_exhausted() {
                tokio::task::yield_now().await;
            }
        }
        drop(data);
        let waited = next_data_paced(body, |now| {
            if sink.next_check() <= now {
                sink.check_pace(arrived)?;
            }
            Ok(Some(sink.next_check()))
        });
        next = match waited.await? {
            Ok(data) => data,
            Err(error) => return Ok(Err(error)),
        };
    }
    Ok(decoder.finish(sink))
}

/// Reads `body` to its end, at most `bytes_max` bytes, until `deadline` or until the listener
/// closes. Then the stream is reset.
fn discard_rest<B: RequestBody>(mut body: B, bytes_max: u64, deadline: Instant, tasks: &Tasks) {
    let closing = tasks.closing();
    tasks.spawn("grpc discard", async move {
        let read = async {
            let mut discarded = 0_u64;
            while let Ok(Some(data)) = next_data(&mut body).await {
                discarded += data.len() as u64;
                if discarded > bytes_max {
                    break;
                }
            }
        };
        tokio::select! {
            biased;
            _ = timeout_at(deadline, read) => {}
            () = closing => {}
        }
    });
}

/// `requireBuffer`, served without tonic: every send needs one, more when memory is short, and
/// tonic's codec allocates 16 KiB for each call.
pub(in crate::listeners::grpc) async fn require_buffer(
    service: &Arc<Service>,
    waiting: &Semaphore,
    request: RequireBufferRequest,
) -> Result<http::Response<Body>, Status> {
    let required = RequireRequest {
        app: &request.app_id,
        shuffle: request.shuffle_id,
        bytes: request.require_size,
        partitions: &request.partition_ids,
        partition_sizes: &request.partition_require_sizes,
    };
    let grant = service.ingest.require_buffer_in_line(required, waiting).await;
    let (require_buffer_id, (status, ret_msg), need_split_partition_ids) = match grant {
        Ok(grant) => (grant.ticket, success(""), grant.split_partitions),
        Err(error) => (NO_TICKET, refusal(service, &error), Vec::new()),
    };
    Ok(respond_message(&RequireBufferResponse {
        require_buffer_id,
        status,
        ret_msg,
        need_split_partition_ids,
    }))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::listeners::grpc::transport::message::tests::{body_of, framed};
    use crate::proto;
    use uniffle_wire::{BlockHeader, DecodeError, SendHeader};

    #[derive(Debug, PartialEq)]
    enum Refused {
        Decode(DecodeError),
        Sink,
    }

    impl From<DecodeError> for Refused {
        fn from(error: DecodeError) -> Self {
            Self::Decode(error)
        }
    }

    /// Counts payload bytes, refuses after `allowed` blocks, and waits only after `needed` bytes of
    /// the message.
    struct Counter {
        allowed: usize,
        bytes: usize,
        needed: u64,
    }

    impl BlockSink for Counter {
        type Error = Refused;

        fn header(&mut self, header: SendHeader<'_>) -> Result<(), Refused> {
            assert_eq!(header, SendHeader { app: "app-1", shuffle: 3, ticket: 0 });
            Ok(())
        }

        fn partition(&mut self, _: i32) -> Result<(), Refused> {
            Ok(())
        }

        fn begin_block(&mut self, _: u32) -> Result<(), Refused> {
            self.allowed = self.allowed.checked_sub(1).ok_or(Refused::Sink)?;
            Ok(())
        }

        fn write(&mut self, bytes: &[u8]) -> Result<(), Refused> {
            self.bytes += bytes.len();
            Ok(())
        }

        fn end_block(&mut self, _: BlockHeader) -> Result<(), Refused> {
            Ok(())
        }
    }

    impl PacedSink for Counter {
        fn keep(&mut self, _: u64) -> Result<(), Refused> {
            Ok(())
        }

        fn next_check(&self) -> Instant {
            Instant::now() - std::time::Duration::from_secs(1)
        }

        fn check_pace(&mut self, arrived: u64) -> Result<(), Refused> {
            if arrived < self.needed { Err(Refused::Sink) } else { Ok(()) }
        }
    }

    fn request() -> proto::SendShuffleDataRequest {
        let block = |length: usize| proto::ShuffleBlock {
            length: i32::try_from(length).unwrap(),
            data: vec![1; length].into(),
            ..Default::default()
        };
        proto::SendShuffleDataRequest {
            app_id: "app-1".into(),
            shuffle_id: 3,
            shuffle_data: vec![proto::ShuffleData { partition_id: 1, block: vec![block(1000), block(500)] }],
            ..Default::default()
        }
    }

    async fn receive_into(sink: &mut Counter, pieces: Vec<Bytes>) -> Result<MessageSummary, Refused> {
        let mut body = body_of(pieces);
        let (length, first) = read_prefix(&mut body, 1 << 20).await.unwrap();
        fill(&mut body, length, first, sink).await.unwrap()
    }

    #[tokio::test]
    async fn payload_reaches_the_sink_in_any_frames() {
        for cut in [1, 3, 7, 64, 1000, 4000] {
            let mut sink = Counter { allowed: 2, bytes: 0, needed: 0 };
            let summary = receive_into(&mut sink, framed(&request(), cut)).await.unwrap();
            assert_eq!((summary.blocks, summary.payload_bytes, sink.bytes), (2, 1500, 1500));
        }
    }

    #[tokio::test]
    async fn body_of_wrong_length_is_refused() {
        let mut pieces = framed(&request(), 100);
        pieces.push(Bytes::from_static(b"more"));
        let result = receive_into(&mut Counter { allowed: 2, bytes: 0, needed: 0 }, pieces.clone()).await;
        assert!(matches!(result, Err(Refused::Decode(DecodeError::Malformed { .. }))));
        pieces.truncate(4);
        let result = receive_into(&mut Counter { allowed: 2, bytes: 0, needed: 0 }, pieces).await;
        assert_eq!(result, Err(Refused::Decode(DecodeError::Incomplete)));
    }

    #[tokio::test]
    async fn refusal_by_the_sink_ends_the_read() {
        let mut sink = Counter { allowed: 1, bytes: 0, needed: 0 };
        assert_eq!(receive_into(&mut sink, framed(&request(), 10)).await, Err(Refused::Sink));
        assert_eq!(sink.bytes, 1000);
    }

    #[tokio::test]
    async fn slow_send_ends_without_another_frame() {
        // The first piece has 5 bytes of prefix and 995 of the message.
        let all = framed(&request(), 1000);
        for (needed, waits) in [(1000, false), (900, true)] {
            let (sender, receiver) = futures::channel::mpsc::unbounded();
            let frames = futures::StreamExt::map(receiver, |data| {
                Ok::<_, std::convert::Infallible>(http_body::Frame::data(data))
            });
            sender.unbounded_send(all[0].clone()).unwrap();
            let mut body = http_body_util::StreamBody::new(frames);
            let (length, first) = read_prefix(&mut body, 1 << 20).await.unwrap();
            let mut sink = Counter { allowed: 2, bytes: 0, needed };
            let filled = fill(&mut body, length, first, &mut sink);
            let filled = futures::FutureExt::now_or_never(filled);
            assert_eq!(filled.map(Result::unwrap), (!waits).then_some(Err(Refused::Sink)));
        }
    }

    #[tokio::test(start_paused = true)]
    async fn data_after_early_response_is_discarded_up_to_a_limit() {
        let tasks = Tasks::new();
        let (sender, receiver) = futures::channel::mpsc::unbounded();
        let frames = futures::StreamExt::map(receiver, |data| {
            Ok::<_, std::convert::Infallible>(http_body::Frame::data(data))
        });
        discard_rest(
            http_body_util::StreamBody::new(frames),
            10,
            Instant::now() + std::time::Duration::from_secs(5),
            &tasks,
        );
        sender.unbounded_send(Bytes::from_static(b"12345")).unwrap();
        tokio::task::yield_now().await;
        assert!(!sender.is_closed());
        sender.unbounded_send(Bytes::from_static(b"678901")).unwrap();
        tasks.drained().await;
        assert!(sender.is_closed());

        // A client that sends nothing more is awaited only until the deadline.
        let (silent, receiver) = futures::channel::mpsc::unbounded::<Bytes>();
        let frames = futures::StreamExt::map(receiver, |data| {
            Ok::<_, std::convert::Infallible>(http_body::Frame::data(data))
        });
        discard_rest(
            http_body_util::StreamBody::new(frames),
            10,
            Instant::now() + std::time::Duration::from_secs(5),
            &tasks,
        );
        tasks.drained().await;
        assert!(silent.is_closed());
    }
}
