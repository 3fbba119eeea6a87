//! The coordinator protocol: a worker reports to coordinators, and can be a small one itself.
//!
//! [`heartbeat`] reports to all coordinators, [`embedded`] is a `CoordinatorServer` in the worker's
//! process, and [`identity`] determines id, address and tags of the worker. The worker collects the
//! figures into a [`NodeReport`], so that this crate does not depend on the worker's state.

pub mod embedded;
pub mod heartbeat;
pub mod identity;
pub mod proto;
mod report;

use uniffle_base::metrics::Description;

pub use report::{NodeReport, ReportSource};

/// Returns the descriptions of all metrics of this crate.
#[must_use]
pub fn metric_descriptions() -> Vec<Description> {
    [embedded::metrics::Metrics::described(), heartbeat::Metrics::described()].concat()
}
