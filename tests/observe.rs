//! What the person on call looks at, with the tools that people use: `go tool pprof`, Prometheus and promtool, a
//! pushgateway, an OTLP receiver. And what strangers may ask of it without anybody noticing.

#![allow(clippy::panic, clippy::unwrap_used, clippy::expect_used, reason = "to panic is how a test fails")]

mod support;

mod observe {
    pub(crate) mod bad_input;
    pub(crate) mod logs;
    pub(crate) mod profiles;
    pub(crate) mod prometheus;
    pub(crate) mod tools;
    pub(crate) mod traces;
}
