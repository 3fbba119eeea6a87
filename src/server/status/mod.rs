//! Descriptions of the worker for operators and coordinators.
//!
//! [`snapshot`] takes the figures, [`health`] judges them, and [`report`] and [`cluster`] render
//! them for coordinators and for the cluster page. Nothing here changes the worker's state, except
//! that [`health`] marks it unhealthy.

pub(super) mod cluster;
pub(super) mod health;
pub(super) mod report;
pub(super) mod snapshot;
