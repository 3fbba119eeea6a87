//! Behaviour of the data calls that is the same over gRPC and over TCP.
//!
//! Each test runs once per transport, as `transports::FILE::grpc::NAME` and
//! `transports::FILE::tcp::NAME`. Only `metrics`, whose names differ, has a test for each
//! transport. Tests of frames, connections and deadlines of a transport belong to `grpc` and `tcp`.

/// Defines a test per transport for each function, which takes the [`client::Transport`]. Boxes the
/// tests, which are large futures.
macro_rules! over_both_transports {
    ($($test:ident),+ $(,)?) => {
        mod grpc {
            $(#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
            async fn $test() {
                Box::pin(super::$test(super::Transport::Grpc)).await;
            })+
        }

        mod tcp {
            $(#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
            async fn $test() {
                Box::pin(super::$test(super::Transport::Tcp)).await;
            })+
        }
    };
}

mod client;
mod metrics;
mod reads;
mod sends;
mod tickets;
