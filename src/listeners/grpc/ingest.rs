//! `sendShuffleData`: HTTP/2 DATA frames → decoder → the service's send session, in cache, without a message buffer.
//!
//! Not here: tickets, limits and statuses (the session's), the format (`wire::send_message`).
//!
//! Invariant: the session is committed only when the whole message was decoded and the client has half-closed; any
//! other way out drops it, which takes everything back. The answer may be early: then what the client still sends is
//! read and thrown away, in a bounded task, so that it sees the answer and not a reset stream.

use std::sync::Arc;

use bytes::Bytes;
use tokio::time::{Instant, timeout_at};
use tonic::Status;
use tonic::body::Body;

use super::config::GrpcConfig;
use super::convert::{DOOR, note_broken_call};
use super::message::{RequestBody, next_data, read_prefix, respond_message};
use crate::metrics::TransitTimes;
use crate::proto::{SendShuffleDataResponse, StatusCode};
use crate::runtime::Tasks;
use crate::service::{self, SendSession, Service, ServiceError};
use uniffle_wire::DecodeError;
use uniffle_wire::send_message::{BlockHeader, Decoder, Header, Limits, SendSink, Summary};

/// Why a send is refused.
#[derive(Debug)]
enum Refusal {
    /// The call itself is broken: a gRPC status.
    Call(Status),
    /// The message is broken: a status in the answer.
    Decode(DecodeError),
    /// The message has no block: a status in the answer.
    NoData,
    /// The service said no: a status in the answer.
    Service(ServiceError),
}

impl From<DecodeError> for Refusal {
    fn from(error: DecodeError) -> Self {
        Self::Decode(error)
    }
}

impl From<ServiceError> for Refusal {
    fn from(error: ServiceError) -> Self {
        Self::Service(error)
    }
}

impl From<Status> for Refusal {
    fn from(status: Status) -> Self {
        Self::Call(status)
    }
}

/// Hands decoded blocks to the service.
struct Intake<'s> {
    service: &'s Arc<Service>,
    message_bytes: u64,
    session: Option<SendSession>,
}

impl Intake<'_> {
    fn session(&mut self) -> Result<&mut SendSession, Refusal> {
        // The decoder delivers the header first; a broken promise is the decoder's fault, not a panic.
        self.session
            .as_mut()
            .ok_or(Refusal::Decode(DecodeError::Malformed { what: "data before its header", at: 0 }))
    }
}

impl SendSink for Intake<'_> {
    type Error = Refusal;

    fn header(&mut self, header: Header<'_>) -> Result<(), Refusal> {
        self.session = Some(self.service.begin_send(service::SendHeader {
            app: header.app_id,
            shuffle: header.shuffle_id,
            ticket: header.ticket,
            message_bytes: self.message_bytes,
        })?);
        Ok(())
    }

    fn partition(&mut self, partition_id: i32) -> Result<(), Refusal> {
        Ok(self.session()?.partition(partition_id)?)
    }

    fn begin_block(&mut self, length: u32) -> Result<(), Refusal> {
        Ok(self.session()?.begin_block(length)?)
    }

    fn write(&mut self, bytes: &[u8]) -> Result<(), Refusal> {
        Ok(self.session()?.write(bytes)?)
    }

    fn end_block(&mut self, block: BlockHeader) -> Result<(), Refusal> {
        Ok(self.session()?.end_block(service::BlockHeader {
            block_id: block.block_id,
            length: block.length,
            uncompressed_length: block.uncompressed_length,
            crc: block.crc,
            task_attempt_id: block.task_attempt_id,
        })?)
    }
}

/// Serves one call.
pub(super) async fn send_shuffle_data<B: RequestBody>(
    service: &Arc<Service>,
    config: &GrpcConfig,
    tasks: &Tasks,
    transit: &TransitTimes,
    mut body: B,
) -> http::Response<Body> {
    let deadline = Instant::now() + config.send_deadline;
    let refusal = match timeout_at(deadline, receive(service, config, transit, &mut body)).await {
        Ok(Ok(())) => return answer(StatusCode::Success, "OK"),
        Ok(Err(refusal)) => refusal,
        Err(_elapsed) => Refusal::Call(Status::deadline_exceeded(format!(
            "the request was not complete after {} s",
            config.send_deadline.as_secs()
        ))),
    };
    if !body.is_end_stream() {
        discard_rest(body, config.discard_bytes_max, deadline, tasks);
    }
    match refusal {
        Refusal::Call(status) => {
            note_broken_call(service, &status);
            status.into_http()
        }
        Refusal::Decode(error) => {
            service.note_malformed(DOOR, &error);
            answer(StatusCode::InternalError, &error.to_string())
        }
        Refusal::NoData => answer(StatusCode::InternalError, "No data in request"),
        Refusal::Service(error) => {
            service.note_refusal(DOOR, &error);
            answer(error.status(), &error.to_string())
        }
    }
}

async fn receive<B: RequestBody>(
    service: &Arc<Service>,
    config: &GrpcConfig,
    transit: &TransitTimes,
    body: &mut B,
) -> Result<(), Refusal> {
    let (message_bytes, first) = read_prefix(body, config.max_message_bytes).await?;
    let mut intake = Intake { service, message_bytes: u64::from(message_bytes), session: None };
    let summary = fill(body, message_bytes, first, config.send_limits, &mut intake).await?;
    transit.arrived(summary.timestamp_ms);
    match intake.session {
        Some(session) if summary.blocks > 0 => Ok(session.commit(summary.stage_attempt)?),
        // The session is dropped, so that the ticket returns its bytes.
        _ => Err(Refusal::NoData),
    }
}

/// Feeds the message of `message_bytes` bytes to `sink`, up to the client's half-close.
async fn fill<B, S>(
    body: &mut B,
    message_bytes: u32,
    first: Bytes,
    limits: Limits,
    sink: &mut S,
) -> Result<Summary, S::Error>
where
    B: RequestBody,
    S: SendSink<Error: From<Status>>,
{
    let mut decoder = Decoder::new(u64::from(message_bytes), limits);
    decoder.feed(&first, sink)?;
    drop(first);
    while let Some(data) = next_data(body).await? {
        decoder.feed(&data, sink)?;
    }
    decoder.finish(sink)
}

fn answer(status: StatusCode, text: &str) -> http::Response<Body> {
    respond_message(&SendShuffleDataResponse { status: status.into(), ret_msg: text.to_owned() })
}

/// Reads `body` to its end, at most `bytes_max` bytes until `deadline`; then the stream is reset.
fn discard_rest<B: RequestBody>(mut body: B, bytes_max: u64, deadline: Instant, tasks: &Tasks) {
    let cancelled = tasks.cancelled();
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
            () = cancelled => {}
        }
    });
}

#[cfg(test)]
mod tests {
    use super::super::message::tests::{body_of, framed};
    use super::*;
    use crate::proto;

    #[derive(Debug, PartialEq)]
    enum Refused {
        Call(tonic::Code),
        Decode(DecodeError),
        Sink,
    }

    impl From<Status> for Refused {
        fn from(status: Status) -> Self {
            Self::Call(status.code())
        }
    }

    impl From<DecodeError> for Refused {
        fn from(error: DecodeError) -> Self {
            Self::Decode(error)
        }
    }

    /// Counts payload bytes and refuses after `allowed` blocks.
    struct Counter {
        allowed: usize,
        bytes: usize,
    }

    impl SendSink for Counter {
        type Error = Refused;

        fn header(&mut self, header: Header<'_>) -> Result<(), Refused> {
            assert_eq!(header, Header { app_id: "app-1", shuffle_id: 3, ticket: 0 });
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

    async fn receive_into(sink: &mut Counter, pieces: Vec<Bytes>) -> Result<Summary, Refused> {
        let mut body = body_of(pieces);
        let (length, first) = read_prefix(&mut body, 1 << 20).await?;
        fill(&mut body, length, first, Limits::default(), sink).await
    }

    #[tokio::test]
    async fn payload_reaches_the_sink_however_frames_are_cut() {
        for cut in [1, 3, 7, 64, 1000, 4000] {
            let mut sink = Counter { allowed: 2, bytes: 0 };
            let summary = receive_into(&mut sink, framed(&request(), cut)).await.unwrap();
            assert_eq!((summary.blocks, summary.payload_bytes, sink.bytes), (2, 1500, 1500));
        }
    }

    #[tokio::test]
    async fn a_body_that_ends_early_or_goes_on_is_refused() {
        let mut pieces = framed(&request(), 100);
        pieces.push(Bytes::from_static(b"more"));
        let result = receive_into(&mut Counter { allowed: 2, bytes: 0 }, pieces.clone()).await;
        assert!(matches!(result, Err(Refused::Decode(DecodeError::Malformed { .. }))));
        pieces.truncate(4);
        let result = receive_into(&mut Counter { allowed: 2, bytes: 0 }, pieces).await;
        assert_eq!(result, Err(Refused::Decode(DecodeError::Incomplete)));
    }

    #[tokio::test]
    async fn the_sinks_refusal_ends_the_reading() {
        let mut sink = Counter { allowed: 1, bytes: 0 };
        assert_eq!(receive_into(&mut sink, framed(&request(), 10)).await, Err(Refused::Sink));
        assert_eq!(sink.bytes, 1000);
    }

    #[tokio::test(start_paused = true)]
    async fn what_follows_an_early_answer_is_read_and_thrown_away_in_bounds() {
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
        assert!(!sender.is_closed(), "within the bound");
        sender.unbounded_send(Bytes::from_static(b"678901")).unwrap();
        tasks.drained().await;
        assert!(sender.is_closed(), "over the bound");

        // A client that sends nothing more is waited for until the deadline only.
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
