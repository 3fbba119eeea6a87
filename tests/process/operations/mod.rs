//! A whole worker as the people see it who run it: administration, status, reload, TLS, and what `deploy/` holds.

mod admin;
mod api;
mod browser;
mod ctl;
mod fixture;
#[cfg(feature = "object")]
mod orphans;
mod page;
mod reload;
mod tls;
mod top;
