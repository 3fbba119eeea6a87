//! Modules that all parts of the worker use: budgets, wait queues, clock, tasks, allocator, metrics
//! and configuration keys.
//!
//! [`budget`] bounds memory, and [`sched`] decides which application is next. [`allocator`] returns
//! freed memory. [`runtime`] owns tasks and threads. [`clock`] excludes pauses of the process from
//! deadlines. [`metrics::table!`] declares metrics, and [`schema::section!`] the keys of a module.
//! [`damage`] notifies the service of lost blocks.

pub mod allocator;
pub mod budget;
pub mod clock;
pub mod damage;
mod log_limiter;
pub mod metrics;
pub mod runtime;
pub mod sched;
pub mod schema;

pub use log_limiter::LogLimiter;
