//! A whole worker as the people see it who run it: administration, status, reload, TLS, and what `deploy/` holds.

#![allow(clippy::panic, reason = "to panic is how a test fails")]
#![allow(clippy::unwrap_used, reason = "to panic is how a test fails")]

#[path = "operations/admin.rs"]
mod admin;
#[path = "operations/api.rs"]
mod api;
#[path = "operations/browser.rs"]
mod browser;
#[path = "operations/page.rs"]
mod page;
#[path = "operations/reload.rs"]
mod reload;
mod support;
#[path = "operations/tls.rs"]
mod tls;
#[path = "operations/world.rs"]
mod world;
