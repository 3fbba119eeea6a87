//! Fairness: order and limits between applications that want the same resource.
//!
//! [`FairQueue`] orders requests by virtual time. [`FairSemaphore`] is a bounded amount with such a
//! queue: it serves the application that holds least by its weight, and breaks ties by virtual
//! time. [`shares`] has the rules for how much one application may hold. This module allocates no
//! buffers. Of a request it knows only the amount and the shares of devices.

mod fair_queue;
mod fair_semaphore;
pub mod shares;

pub use fair_queue::FairQueue;
pub use fair_semaphore::{DevicePermit, FairSemaphore, Grant, Holder, Permit, Reserve};
