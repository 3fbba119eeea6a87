//! Fairness: order and limits between applications that want the same resource.
//!
//! [`FairQueue`] orders requests by virtual time. [`FairSemaphore`] is a bounded amount with such a
//! queue: it serves the application that holds least by its weight, and breaks ties by virtual
//! time. [`shares`] has the rules for how much one application may hold. A grant is a number, and
//! parts of devices' shares; the caller has the buffers.

mod fair_queue;
mod fair_semaphore;
pub mod shares;

pub use fair_queue::FairQueue;
pub use fair_semaphore::{DevicePermit, FairSemaphore, Grant, Holder, Permit, Reserve};
