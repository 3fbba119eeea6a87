//! The worker's two sides of the coordinator protocol: it reports to coordinators, and it can be a small one.
//!
//! [`heartbeat`] tells N coordinators about this worker; [`embedded`] is a `CoordinatorServer` for one process;
//! [`identity`] decides under which id, address and tags the worker is known. Not here: the figures themselves. The
//! composition root collects them into a [`NodeReport`], so that this module knows no state module.

pub mod embedded;
pub mod heartbeat;
pub mod identity;
mod report;

pub use report::{NodeReport, ReportSource};
