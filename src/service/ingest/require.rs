//! `requireBuffer`: asks whether a number of bytes may be sent to some partitions.
//!
//! The partitions are checked first ([`super::partition_limit`]): the first partition that may not
//! grow decides for the whole request, and nothing is reserved. Then a ticket is requested, which
//! an application over its share of the memory does not get while others wait
//! ([`crate::memory::admission`]). A request that cannot be granted now waits in a queue for a
//! limited time ([`super::ticket_queue`]), if the caller asks for that.

use std::sync::Arc;

use tokio::sync::Semaphore;

use crate::app::{App, QuotaResource, WaitStage};
use crate::memory::{MemoryError, ShuffleBuffers};
use crate::metrics::clamped;
use uniffle_wire::types::{PartitionId, ShuffleId, ShuffleKey, TicketId};

use super::Ingest;
use super::partition_limit::{LimitDecision, PartitionSizes};
use super::ticket_queue::{QueuedRequest, is_worth_waiting};
use crate::service::ServiceError;
use crate::service::parts::PARTITIONS_PER_REQUEST_MAX;

/// A `requireBuffer` request.
#[derive(Debug, Clone, Copy)]
pub struct RequireRequest<'a> {
    /// Application id as sent.
    pub app: &'a str,
    /// Shuffle id.
    pub shuffle: i32,
    /// Requested bytes.
    pub bytes: i32,
    /// Partitions that will be sent to; empty from clients before 0.9.
    pub partitions: &'a [i32],
    /// Bytes per partition; empty from clients before 0.10.
    pub partition_sizes: &'a [i32],
}

/// A granted `requireBuffer`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RequireGrant {
    /// The ticket.
    pub ticket: i64,
    /// Partitions that the client should write elsewhere.
    pub split_partitions: Vec<i32>,
}

/// A valid request.
struct TicketRequest {
    app: Arc<App>,
    wanted: QueuedRequest,
    split_partitions: Vec<i32>,
    /// True if the request has waited in the queue, or tried to.
    has_waited: bool,
}

impl Ingest {
    /// Reserves memory as [`Ingest::require_buffer`] does, but waits if memory is short. The wait
    /// lasts at most `memory_store.buffer_ticket_wait_sec`. It requires a free permit of
    /// `connection_permits` and tiers that accept data.
    ///
    /// # Errors
    /// The errors of [`Ingest::require_buffer`].
    pub async fn require_buffer_in_line(
        &self,
        request: RequireRequest<'_>,
        connection_permits: &Semaphore,
    ) -> Result<RequireGrant, ServiceError> {
        let mut ticket_request = self.check(&request)?;
        let must_queue = !self.ticket_wait.is_zero() && self.ticket_queue.has(ticket_request.app.id());
        let refused = match must_queue {
            true => None,
            false => match self.ticket(&ticket_request) {
                Err(refused) if is_worth_waiting(&refused) => Some(refused),
                ticket => return self.grant(ticket_request, ticket),
            },
        };
        // If the tiers accept nothing, waiting frees nothing: another worker is the better choice.
        let may_wait = !self.ticket_wait.is_zero() && !self.parts.status.is_without_room();
        let permit = connection_permits.try_acquire().ok().filter(|_| may_wait);
        if permit.is_none() {
            let ticket = refused.map_or_else(|| self.ticket(&ticket_request), Err);
            return self.grant(ticket_request, ticket);
        }
        ticket_request.has_waited = true;
        self.begin_wait(&ticket_request.app, ticket_request.wanted.bytes);
        let (tickets, memory) = (self.parts.memory.tickets(), self.parts.memory.budget());
        let waiting = self.ticket_queue.wait(
            tickets,
            memory,
            ticket_request.app.id(),
            ticket_request.wanted,
            self.ticket_wait,
        );
        let waited = waiting.await;
        let is_in_line = matches!(waited, Some(Ok(_)));
        let ticket = waited.unwrap_or_else(|| self.ticket(&ticket_request));
        let recheck = self.check_again(&request, &ticket_request);
        if let (Err(_), Ok(ticket)) = (&recheck, &ticket) {
            drop(tickets.redeem(ticket_request.app.id(), *ticket));
        }
        recheck?;
        self.parts.metrics.require_buffer_waited.inc_by(u64::from(is_in_line));
        self.grant(ticket_request, ticket)
    }

    /// Returns the number of requests in the queue.
    pub fn tickets_in_line(&self) -> usize {
        self.ticket_queue.len()
    }

    /// Reserves memory for a send.
    ///
    /// # Errors
    /// - `NO_REGISTER` for an unknown app or shuffle
    /// - `NO_BUFFER` while memory is short, or if the worker is stopping or being drained
    /// - `NO_BUFFER_FOR_HUGE_PARTITION` while a huge partition fills its share
    /// - [`ServiceError::PartitionTooLarge`] for a partition that may never grow again
    /// - an exhausted quota of disk bytes
    /// - `INVALID_REQUEST` for a negative size, too many partitions, or a size that no worker of
    ///   this capacity could ever accept
    pub fn require_buffer(&self, request: RequireRequest<'_>) -> Result<RequireGrant, ServiceError> {
        let ticket_request = self.check(&request)?;
        let ticket = self.ticket(&ticket_request);
        self.grant(ticket_request, ticket)
    }

    /// Checks everything except for free memory. Counts splits and refusals, and may flush the
    /// partition that must wait.
    fn check(&self, request: &RequireRequest<'_>) -> Result<TicketRequest, ServiceError> {
        let app = self.parts.app(request.app)?;
        if self.parts.status.is_stopping() {
            return Err(ServiceError::Stopping);
        }
        let bytes = size(request.bytes, "requireSize")?;
        if request.partitions.len() > PARTITIONS_PER_REQUEST_MAX {
            return Err(ServiceError::InvalidField {
                field: "partitionIds",
                value: clamped(request.partitions.len()),
                allowed: "must be at most 1000000 partitions",
            });
        }
        check_shuffle(&app, request)?;
        app.usage.check(QuotaResource::DiskBytes, bytes)?;
        let split_partitions = self.check_partitions(&app, request)?;
        let wanted = QueuedRequest { bytes, partitions: request.partitions.len() };
        Ok(TicketRequest { app, wanted, split_partitions, has_waited: false })
    }

    /// Checks again that the worker is not stopping and that the shuffle is registered. Called
    /// after a request has waited.
    fn check_again(
        &self,
        request: &RequireRequest<'_>,
        ticket_request: &TicketRequest,
    ) -> Result<(), ServiceError> {
        if self.parts.status.is_stopping() {
            return Err(ServiceError::Stopping);
        }
        let app = self.parts.app(request.app)?;
        if !Arc::ptr_eq(&app, &ticket_request.app) {
            return Err(ServiceError::NotRegistered);
        }
        check_shuffle(&app, request)
    }

    fn ticket(&self, ticket_request: &TicketRequest) -> Result<TicketId, MemoryError> {
        self.parts.memory.tickets().require(
            ticket_request.app.id(),
            ticket_request.wanted.bytes,
            ticket_request.wanted.partitions,
        )
    }

    fn grant(
        &self,
        ticket_request: TicketRequest,
        ticket: Result<TicketId, MemoryError>,
    ) -> Result<RequireGrant, ServiceError> {
        let TicketRequest { app, wanted: QueuedRequest { bytes, .. }, split_partitions, has_waited } =
            ticket_request;
        if let Err(refused) = &ticket
            && is_worth_waiting(refused)
        {
            self.count_refused_ticket(refused);
            if !has_waited {
                self.begin_wait(&app, bytes);
            }
        }
        let TicketId(ticket) = ticket?;
        if let Some(waited) = app.account.granted(bytes) {
            self.parts.metrics.ticket_wait.observe(waited.as_secs_f64());
        }
        self.parts.metrics.ticket_bytes.observe(as_observed(bytes));
        Ok(RequireGrant { ticket, split_partitions })
    }

    /// Begins a wait for memory, and makes the flusher free that memory even below the watermarks.
    fn begin_wait(&self, app: &App, bytes: u64) {
        app.account.refused(WaitStage::TicketWait, bytes);
        if let Some(flusher) = &self.parts.flusher {
            flusher.refused(bytes);
        }
    }

    fn count_refused_ticket(&self, refused: &MemoryError) {
        let is_over_share = matches!(refused, MemoryError::OverShare { .. });
        self.parts.metrics.count_regular_refusal();
        self.parts.metrics.require_buffer_refused_over_share.inc_by(u64::from(is_over_share));
    }

    /// Returns the partitions to be split, if all partitions may take the requested bytes. Counts
    /// splits and refusals, and may flush the partition that must wait.
    fn check_partitions(&self, app: &App, request: &RequireRequest<'_>) -> Result<Vec<i32>, ServiceError> {
        let mut split = Vec::new();
        let limits = self.partition_limits();
        if !limits.decide_anything() {
            return Ok(split);
        }
        let key = ShuffleKey::new(app.id().clone(), ShuffleId(request.shuffle));
        // `None` before the shuffle's first block.
        let buffers = self.parts.memory.shuffle(&key);
        // Data in memory must be flushed to a disk. If disks are short, other workers are the
        // better choice.
        let disks_are_short = limits.split_bytes.is_some() && self.parts.status.is_without_room();
        let has_sizes = request.partition_sizes.len() == request.partitions.len();
        for (at, partition) in request.partitions.iter().enumerate() {
            let requested = match has_sizes {
                true => size(request.partition_sizes[at], "partitionRequireSizes")?,
                false => 0,
            };
            let sizes = partition_sizes(buffers.as_deref(), *partition, requested);
            match limits.decide(sizes) {
                LimitDecision::Fits if !disks_are_short => {}
                LimitDecision::Fits | LimitDecision::Split => {
                    self.parts.metrics.splits.inc();
                    split.push(*partition);
                }
                LimitDecision::Wait => {
                    app.account.refused(WaitStage::PartitionWait, sizes.requested);
                    return Err(self.huge_partition_waits(buffers.as_deref(), *partition, sizes));
                }
                LimitDecision::TooLarge => return Err(self.partition_too_large(app, &key, *partition, sizes)),
            }
        }
        Ok(split)
    }

    /// Refuses a request temporarily, and flushes the partition if needed: the watermarks may never
    /// require that.
    fn huge_partition_waits(
        &self,
        buffers: Option<&ShuffleBuffers>,
        partition: i32,
        sizes: PartitionSizes,
    ) -> ServiceError {
        self.parts.metrics.count_huge_refusal();
        if let (Some(flusher), Some(buffers)) = (&self.parts.flusher, buffers)
            && let Some(buffer) = buffers.existing(PartitionId(partition))
        {
            flusher.flush_if_stuck(buffers, &buffer);
        }
        ServiceError::HugePartitionWaits {
            partition,
            received: sizes.received,
            in_memory: sizes.in_memory,
            max: self.partition_limits().huge_in_memory_bytes_max.unwrap_or(u64::MAX),
        }
    }

    /// Counts a permanent refusal and returns an error that the app's client understands.
    pub(super) fn partition_too_large(
        &self,
        app: &App,
        key: &ShuffleKey,
        partition: i32,
        sizes: PartitionSizes,
    ) -> ServiceError {
        self.parts.metrics.hard_limit_exceeded.inc();
        tracing::debug!(shuffle = %key, partition, ?sizes, "partition exceeds the hard limit");
        ServiceError::PartitionTooLarge {
            partition,
            total: sizes.received.saturating_add(sizes.requested),
            max: self.partition_limits().bytes_max.unwrap_or(u64::MAX),
            client_knows_code: app.client.is_since_0_10(),
        }
    }
}

/// Checks that the shuffle of a ticket is registered. Clients before 0.9 do not name it, and name
/// no partition either.
fn check_shuffle(app: &App, request: &RequireRequest<'_>) -> Result<(), ServiceError> {
    let is_known = match request.partitions {
        [] => app.has_shuffles(),
        _ => app.shuffle(ShuffleId(request.shuffle)).is_some(),
    };
    let missing = || ServiceError::NotRegisteredPart(format!("shuffle {}", request.shuffle));
    is_known.then_some(()).ok_or_else(missing)
}

fn partition_sizes(buffers: Option<&ShuffleBuffers>, partition: i32, requested: u64) -> PartitionSizes {
    match buffers.and_then(|buffers| buffers.existing(PartitionId(partition))) {
        Some(buffer) => PartitionSizes {
            received: buffer.received_bytes(),
            in_memory: buffer.in_memory_bytes(),
            requested,
        },
        None => PartitionSizes { received: 0, in_memory: 0, requested },
    }
}

#[expect(clippy::cast_precision_loss, reason = "a histogram's observation")]
fn as_observed(bytes: u64) -> f64 {
    bytes as f64
}

fn size(bytes: i32, field: &'static str) -> Result<u64, ServiceError> {
    u64::try_from(bytes).map_err(|_| ServiceError::InvalidField {
        field,
        value: i64::from(bytes),
        allowed: "must be 0 or more",
    })
}
