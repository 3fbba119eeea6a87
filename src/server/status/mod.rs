//! Descriptions of the worker for operators and coordinators.
//!
//! [`snapshot`] takes the worker's figures for the status page, and [`report`] renders them for
//! coordinators. [`health`] judges the state of the tiers. [`cluster`] renders the nodes that the
//! embedded coordinator knows. Only [`health`] changes anything: whether the worker is unhealthy,
//! and whether it is without room.

pub(super) mod cluster;
pub(super) mod health;
pub(super) mod report;
pub(super) mod snapshot;
