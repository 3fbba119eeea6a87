//! Order and limits of applications that want the same resource: who is next, and how much one may
//! hold.
//!
//! Who is next is decided by [`FairQueue`] alone, also in the bounded amounts with wait queues
//! ([`FairSemaphore`]). How much one application may hold of state that cannot be taken back is
//! decided by [`app_limit`]. This module holds no memory, and does not know what is requested.

pub mod app_limit;
mod fair_queue;
mod fair_semaphore;

pub use fair_queue::FairQueue;
pub use fair_semaphore::{DevicePermit, FairSemaphore, Grant, Holder, Permit, Reserve};
