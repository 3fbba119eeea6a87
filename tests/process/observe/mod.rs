//! Observability with real tools: `go tool pprof`, Prometheus, promtool, a Pushgateway and an OTLP
//! receiver. Includes logs, alerts under faults, and hostile requests to the HTTP listener.

mod alerts;
mod alerts_process;
mod alerts_stores;
mod bad_input;
mod logs;
mod profiles;
mod prometheus;
mod tools;
mod traces;
