//! Admission of local reads: one call acquires the permits that a read holds for its response.
//!
//! These are a permit of the connection, and one of the listener if its responses queue for a
//! socket. The listener's permit is released with the first chunk, the other one on drop. Each
//! chunk acquires its memory together with parts of its devices' shares (`memory::ReadPool`), the
//! first one before the read's call returns. Acquired once for all chunks, they would be held while
//! a slow client receives the first one, and a read larger than the read memory could never begin.

use std::sync::Arc;
use std::time::Duration;

use tokio::sync::{OwnedSemaphorePermit, Semaphore};

use super::response_window::ResponseWindow;
use crate::clock::timeout;
use crate::service::ServiceError;
use uniffle_base::sched::{FairSemaphore, Holder, Permit};
use uniffle_wire::types::AppId;

/// Limits on the reads of one connection.
#[derive(Debug)]
pub struct ReadLimits {
    window: ResponseWindow,
    /// Permits for local responses, in the order of arrival: all are of one client.
    permits: Arc<Semaphore>,
    /// Longest wait for one of `permits`. `None` has no limit.
    wait: Option<Duration>,
    /// Permits for local responses of all connections, and the longest wait for one.
    listener: Option<(Arc<FairSemaphore>, Duration)>,
}

/// Permits of a local read, held until its response is sent.
#[derive(Debug)]
pub struct ReadAdmission {
    _connection: Option<OwnedSemaphorePermit>,
    listener: Option<Permit>,
}

impl ReadLimits {
    /// Creates the limits. At most `permits` local responses run at a time; further ones wait up to
    /// `wait`.
    pub(in crate::service) fn new(window: ResponseWindow, permits: usize, wait: Duration) -> Self {
        Self { window, permits: Arc::new(Semaphore::new(permits)), wait: Some(wait), listener: None }
    }

    /// Returns the limits of a connection that sends its responses one after the other. At most
    /// `permits` local responses run at a time, and further ones wait for them without limit. Until
    /// its first chunk is sent, each also holds a permit of `listener`, for which it waits up to
    /// `wait`.
    #[must_use]
    pub(crate) fn in_order(self, permits: usize, listener: &Arc<FairSemaphore>, wait: Duration) -> Self {
        let listener = Some((Arc::clone(listener), wait));
        Self { permits: Arc::new(Semaphore::new(permits)), wait: None, listener, ..self }
    }

    /// Returns the limits on responses from memory.
    #[must_use]
    pub fn window(&self) -> &ResponseWindow {
        &self.window
    }

    /// Waits until a local read of `app` may begin. An invalid id is refused later.
    pub(in crate::service) async fn admit(&self, app: &str) -> Result<ReadAdmission, ServiceError> {
        let permit = Arc::clone(&self.permits).acquire_owned();
        let _connection = match self.wait {
            Some(wait) => within(wait, permit).await?.ok(),
            None => permit.await.ok(),
        };
        let mut listener = None;
        if let Some((permits, wait)) = &self.listener
            && let Ok(app) = AppId::parse(app)
        {
            let holder = Holder { app: Some(app), weight: 1 };
            listener = Some(within(*wait, permits.acquire(&holder, 1)).await?);
        }
        Ok(ReadAdmission { _connection, listener })
    }
}

impl ReadAdmission {
    /// Releases the permit of the listener: the response no longer waits behind others, and its
    /// memory depends only on its reader.
    pub fn first_chunk_is_sent(&mut self) {
        self.listener = None;
    }
}

async fn within<T>(wait: Duration, permit: impl Future<Output = T>) -> Result<T, ServiceError> {
    timeout(wait, permit).await.map_err(|_| no_read_memory(0, wait))
}

/// Returns the refusal of a read that did not get `requested` bytes of read memory in time, or no
/// permit if `requested` is 0.
pub(super) fn no_read_memory(requested: u64, wait: Duration) -> ServiceError {
    ServiceError::NoReadMemory { requested, waited_ms: u64::try_from(wait.as_millis()).unwrap_or(u64::MAX) }
}
