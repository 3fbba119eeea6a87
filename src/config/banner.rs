//! Spark settings for a first-time user: as `spark-submit` options in the start-up text, and as
//! lines of `spark-defaults.conf` on the status page. Both come from [`SparkOptions`].

use std::net::{IpAddr, SocketAddr};

use super::worker::StoreType;

/// Published client package in the text. README.md lists the supported versions.
const CLIENT_PACKAGE: &str = "org.apache.uniffle:rss-client-spark3-shaded:0.9.2";

/// Settings for raw TCP besides the client type. On JDK 9+ its client cannot read from memory
/// without the flag.
const TCP_SETTINGS: [(&str, &str); 2] = [
    ("spark.driver.extraJavaOptions", "-Dorg.apache.uniffle.shaded.io.netty.noUnsafe=true"),
    ("spark.executor.extraJavaOptions", "-Dorg.apache.uniffle.shaded.io.netty.noUnsafe=true"),
];

/// Lines about executors that lack the client package.
const PACKAGE_NOTE: [&str; 2] = [
    "With any master except local[…], executors of Spark 3 load the shuffle manager before packages take",
    "effect: copy the same jar to their $SPARK_HOME/jars, or add it to spark.executor.extraClassPath.",
];

/// Options with which Spark uses this worker.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SparkOptions {
    settings: Vec<(&'static str, String)>,
    has_tcp: bool,
}

impl SparkOptions {
    /// Returns the options for clients of the coordinators in `quorum`. `has_tcp` says whether the
    /// worker listens for raw TCP.
    #[must_use]
    pub fn new(quorum: &str, store_type: StoreType, has_tcp: bool) -> Self {
        let settings = [
            ("spark.shuffle.manager", "org.apache.spark.shuffle.RssShuffleManager"),
            ("spark.serializer", "org.apache.spark.serializer.KryoSerializer"),
            ("spark.rss.coordinator.quorum", quorum),
            ("spark.rss.storage.type", store_type.of_clients().as_str()),
            ("spark.rss.client.type", "GRPC"),
            ("spark.shuffle.service.enabled", "false"),
            ("spark.sql.adaptive.localShuffleReader.enabled", "false"),
        ];
        Self { settings: settings.map(|(key, value)| (key, value.to_owned())).to_vec(), has_tcp }
    }

    /// Returns the options as a command with notes.
    fn to_command(&self) -> String {
        let conf = |key: &str, value: &str| format!("  --conf {key}={value}");
        let settings = self.settings.iter().map(|(key, value)| conf(key, value) + " \\\n");
        let settings: String = settings.collect();
        let tcp = TCP_SETTINGS.map(|(key, value)| conf(key, value)).join(" \\\n");
        let tcp = match self.has_tcp {
            true => format!(
                "For the faster raw TCP transport, set spark.rss.client.type=GRPC_NETTY, and with Java 9 or later add\n\
                 {tcp}\n\n"
            ),
            false => String::new(),
        };
        let note = PACKAGE_NOTE.join("\n");
        format!(
            "spark-submit \\\n  --packages {CLIENT_PACKAGE} \\\n{settings}  YOUR_APPLICATION\n\n{tcp}{note}\n"
        )
    }

    /// Returns the options as lines of `spark-defaults.conf`, with notes as comments.
    #[must_use]
    pub fn to_defaults(&self) -> String {
        let line = |key: &str, value: &str| format!("{key} {value}\n");
        let mut text = line("spark.jars.packages", CLIENT_PACKAGE);
        text.extend(self.settings.iter().map(|(key, value)| line(key, value)));
        if self.has_tcp {
            text.push_str("# For the faster raw TCP transport; the Java options with Java 9 or later:\n");
            text.push_str(&format!("# {}", line("spark.rss.client.type", "GRPC_NETTY")));
            text.extend(TCP_SETTINGS.map(|(key, value)| format!("# {}", line(key, value))));
        }
        text.extend(PACKAGE_NOTE.map(|note| format!("# {note}\n")));
        text
    }
}

/// Returns the start-up text with the `spark-submit` options for this worker.
///
/// `grpc` and `http` are the bound addresses. `host` is an address through which Spark reaches this
/// machine.
pub fn startup_banner(host: IpAddr, grpc: SocketAddr, http: SocketAddr, options: &SparkOptions) -> String {
    let coordinator = SocketAddr::new(host, grpc.port());
    let status = SocketAddr::new(host, http.port());
    format!(
        "uniffle-worker {version} is ready: gRPC and embedded coordinator at {coordinator}, \
         metrics at http://{status}/metrics\n\
         To use it with Spark 3:\n\
         \n\
         {command}",
        version = env!("CARGO_PKG_VERSION"),
        command = options.to_command(),
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
            &SparkOptions::new("127.0.0.1:21100", StoreType::MemoryLocalfile, true),
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
            assert!(text.contains(part), "the banner lacks {part}: {text}");
        }
    }
    #[test]
    fn both_forms_have_the_same_settings() {
        let settings = |text: &str, separator: char| -> Vec<(String, String)> {
            let line = |line: &str| {
                let line = line.trim_start_matches("# ").trim_start().trim_start_matches("--conf ");
                let (key, value) = line.trim_end_matches(" \\").split_once(separator)?;
                key.starts_with("spark.").then(|| (key.to_owned(), value.to_owned()))
            };
            text.lines().filter_map(line).collect()
        };
        for has_tcp in [false, true] {
            let options = SparkOptions::new("a:1,b:1", StoreType::MemoryObject, has_tcp);
            let command = settings(&options.to_command(), '=');
            let mut defaults = settings(&options.to_defaults(), ' ');
            assert_eq!(defaults.remove(0).1, CLIENT_PACKAGE);
            // The command names it in the sentence.
            defaults.retain(|(_, value)| value != "GRPC_NETTY");
            assert_eq!(command, defaults);
            assert_eq!(command.len(), if has_tcp { 9 } else { 7 });
            assert!(command.contains(&("spark.rss.storage.type".to_owned(), "MEMORY_LOCALFILE".to_owned())));
            assert_eq!(options.to_defaults().contains("GRPC_NETTY"), has_tcp);
        }
    }
}
