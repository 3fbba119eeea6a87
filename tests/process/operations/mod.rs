//! A worker as its operators use it: admin listener, command line, status page, reload and TLS.

mod admin;
mod api;
mod browser;
mod ctl;
mod documents;
mod fixture;
#[cfg(feature = "object")]
mod orphans;
mod page;
mod reload;
mod tls;
mod top;
mod upgrade;
