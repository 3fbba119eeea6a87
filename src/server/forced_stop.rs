//! A second signal to stop, which ends the process without waiting for the graceful stop.
//!
//! Sends are refused first, so that nothing is acknowledged any more. Then the unflushed blocks are
//! logged, and the exit code tells whether acknowledged blocks are lost.

use std::sync::{Arc, Weak};

use parking_lot::Mutex;

use super::memory_backing::Outlives;
use crate::memory::Memory;
use crate::service::Service;

/// Handle that lets the process cut the worker's stop short. Clones share it.
#[derive(Debug, Clone, Default)]
pub struct ForcedStop(Arc<Mutex<Running>>);

/// The worker running in the process. The handle does not keep it alive.
#[derive(Debug, Default)]
struct Running {
    service: Weak<Service>,
    memory: Weak<Memory>,
}

impl ForcedStop {
    /// Attaches the handle to the worker with `service` and `memory`.
    pub(super) fn watch(&self, service: &Arc<Service>, memory: &Arc<Memory>) {
        *self.0.lock() = Running { service: Arc::downgrade(service), memory: Arc::downgrade(memory) };
    }

    /// Refuses all further sends and logs unflushed blocks. Returns whether acknowledged blocks are
    /// lost with the process.
    #[must_use]
    pub fn end(&self) -> bool {
        let (service, memory) = {
            let running = self.0.lock();
            (running.service.upgrade(), running.memory.upgrade())
        };
        if let Some(service) = service {
            service.ingest.refuse_sends();
        }
        memory.is_some_and(|memory| Outlives::of(&memory).name_losses(&memory.contents()))
    }
}
