//! Start-up text that shows a first-time user how to connect Spark to an embedded worker.

use std::net::{IpAddr, SocketAddr};

use super::worker::StoreType;

/// Published client package in the text. README.md lists the supported versions.
const CLIENT_PACKAGE: &str = "org.apache.uniffle:rss-client-spark3-shaded:0.9.2";

/// Additional settings for raw TCP. On JDK 9+ its client cannot read from memory without the flag.
const TCP_LINES: &str = "For the faster raw TCP transport, set spark.rss.client.type=GRPC_NETTY, and with Java 9 or later add\n  \
       --conf spark.driver.extraJavaOptions=-Dorg.apache.uniffle.shaded.io.netty.noUnsafe=true \\\n  \
       --conf spark.executor.extraJavaOptions=-Dorg.apache.uniffle.shaded.io.netty.noUnsafe=true\n\n";

/// Returns the start-up text with the `spark-submit` options for this worker.
///
/// `grpc` and `http` are the bound addresses. `host` is an address through which Spark reaches this
/// machine. `quorum` lists the coordinators for clients; if empty, this worker is the coordinator.
pub fn startup_banner(
    host: IpAddr,
    grpc: SocketAddr,
    http: SocketAddr,
    tcp: bool,
    store_type: StoreType,
    quorum: &str,
) -> String {
    let coordinator = SocketAddr::new(host, grpc.port());
    let quorum = if quorum.is_empty() { coordinator.to_string() } else { quorum.to_owned() };
    let status = SocketAddr::new(host, http.port());
    let storage = store_type.of_clients().as_str();
    let tcp_lines = if tcp { TCP_LINES } else { "" };
    format!(
        "uniffle-worker {version} is ready: gRPC and embedded coordinator at {coordinator}, \
         metrics at http://{status}/metrics\n\
         To use it with Spark 3:\n\
         \n\
         spark-submit \\\n  \
           --packages {CLIENT_PACKAGE} \\\n  \
           --conf spark.shuffle.manager=org.apache.spark.shuffle.RssShuffleManager \\\n  \
           --conf spark.serializer=org.apache.spark.serializer.KryoSerializer \\\n  \
           --conf spark.rss.coordinator.quorum={quorum} \\\n  \
           --conf spark.rss.storage.type={storage} \\\n  \
           --conf spark.rss.client.type=GRPC \\\n  \
           --conf spark.shuffle.service.enabled=false \\\n  \
           --conf spark.sql.adaptive.localShuffleReader.enabled=false \\\n  \
           YOUR_APPLICATION\n\
         \n{tcp_lines}\
         With any master except local[…], executors of Spark 3 load the shuffle manager before --packages takes\n\
         effect: copy the same jar to their $SPARK_HOME/jars, or add it to spark.executor.extraClassPath.\n",
        version = env!("CARGO_PKG_VERSION"),
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn banner_lines_can_be_copied_into_a_shell() {
        let host = IpAddr::from([127, 0, 0, 1]);
        let text = startup_banner(
            host,
            "0.0.0.0:21100".parse().unwrap(),
            "0.0.0.0:19998".parse().unwrap(),
            true,
            StoreType::MemoryLocalfile,
            "",
        );
        let command: Vec<&str> = text
            .lines()
            .skip_while(|line| !line.starts_with("spark-submit"))
            .take_while(|line| !line.is_empty())
            .collect();
        let end = command.iter().position(|line| !line.ends_with(" \\")).unwrap();
        let (last, continued) = (command[end], &command[..end]);
        assert_eq!(continued.len(), 9, "{text}");
        assert_eq!(last.trim(), "YOUR_APPLICATION");
        assert_eq!(command.iter().filter(|line| line.trim_start().starts_with("--conf spark.")).count(), 7);
        for part in [
            "--packages org.apache.uniffle:rss-client-spark3-shaded:0.9.2",
            "spark.rss.coordinator.quorum=127.0.0.1:21100",
            "spark.rss.storage.type=MEMORY_LOCALFILE",
            "http://127.0.0.1:19998/metrics",
            "spark.rss.client.type=GRPC_NETTY",
        ] {
            assert!(text.contains(part), "{part} in {text}");
        }
    }
}
