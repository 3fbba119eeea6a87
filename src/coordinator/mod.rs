//! The coordinator protocol: the worker reports to coordinators, and can be a small one itself.
//!
//! [`heartbeat`] reports to all coordinators, [`embedded`] is a `CoordinatorServer` in this
//! process, and [`identity`] determines id, address and tags of the worker. The composition root
//! collects the figures into a [`NodeReport`], so that this module does not depend on other state.

pub mod embedded;
pub mod heartbeat;
pub mod identity;
mod report;

pub use report::{NodeReport, ReportSource};
