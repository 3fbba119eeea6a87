//! What the person on call looks at, with the tools that people use: `go tool pprof`, Prometheus and promtool, a
//! pushgateway, an OTLP receiver. And what strangers may ask of it without anybody noticing.

mod bad_input;
mod logs;
mod profiles;
mod prometheus;
mod tools;
mod traces;
