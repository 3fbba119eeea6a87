//! Workers that a coordinator has lost. They are in no server list, so `status` and `top` add them
//! here.

use std::collections::BTreeSet;

use serde_json::Value;

use crate::answers::{Answer, ask_all};
use crate::arguments::Arguments;
use crate::failure::Failure;
use crate::http::{Base, Client};
use crate::workers::Target;

/// Adds the workers that coordinators among `targets` have lost, if the command covers a whole
/// cluster.
pub(crate) async fn with_lost(
    client: &Client,
    arguments: &Arguments,
    mut targets: Vec<Target>,
) -> Vec<Target> {
    targets.retain(|target| !target.is_lost);
    if arguments.coordinator.is_empty() || !arguments.only.is_empty() {
        return targets;
    }
    let answers = ask_all(&targets, |target| cluster(client, target)).await;
    let known: BTreeSet<&str> = targets.iter().map(|target| target.name.as_str()).collect();
    let heard = answers.iter().filter_map(|(_, answer)| answer.as_ref().ok());
    let ids = heard.filter_map(|cluster| cluster["lost"].as_array()).flatten().filter_map(Value::as_str);
    let lost: BTreeSet<String> = ids.filter(|id| !known.contains(id)).map(str::to_owned).collect();
    drop(answers);
    targets.extend(lost.into_iter().map(target));
    targets
}

/// Checks that no coordinator has lost the worker.
///
/// # Errors
/// Fails if a coordinator has lost the worker.
pub(crate) fn require_known(target: &Target) -> Result<(), Failure> {
    match target.is_lost {
        true => Err(Failure::Unreachable("lost: its coordinator receives no heartbeats".to_owned())),
        false => Ok(()),
    }
}

async fn cluster(client: &Client, target: &Target) -> Answer {
    client.get(&target.http, "/api/v1/cluster").await
}

fn target(id: String) -> Target {
    // Never called: the coordinator only keeps the id.
    let base = Base { is_tls: false, host: id.clone(), port: 0 };
    Target { name: id, http: base.clone(), admin: base, is_lost: true }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
    use tokio::net::TcpListener;

    use super::*;

    #[derive(clap::Parser)]
    struct Line {
        #[command(flatten)]
        arguments: Arguments,
    }

    /// Answers every request with `body`.
    async fn answer(listener: TcpListener, body: &str) {
        let length = body.len();
        loop {
            let (mut stream, _) = listener.accept().await.unwrap();
            let mut request = [0; 4096];
            let _head = stream.read(&mut request).await.unwrap();
            let text =
                format!("HTTP/1.1 200 OK\r\ncontent-length: {length}\r\nconnection: close\r\n\r\n{body}");
            stream.write_all(text.as_bytes()).await.unwrap();
        }
    }

    #[tokio::test]
    async fn lost_workers_are_listed_once_and_not_queried() {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let http =
            Base { is_tls: false, host: "127.0.0.1".to_owned(), port: listener.local_addr().unwrap().port() };
        let known = Target { name: "w-1".to_owned(), http: http.clone(), admin: http, is_lost: false };
        let line = ["ctl", "--coordinator", "127.0.0.1:1", "top"];
        let arguments =
            <Line as clap::Parser>::try_parse_from(line).unwrap_or_else(|error| panic!("{error}")).arguments;
        let client = Client::of(None, Duration::from_secs(10));
        let listing = async {
            let once = with_lost(&client, &arguments, vec![known]).await;
            with_lost(&client, &arguments, once).await
        };
        let listed = tokio::select! {
            listed = listing => listed,
            () = answer(listener, r#"{"lost":["w-1","w-2"]}"#) => unreachable!(),
        };
        let names: Vec<_> = listed.iter().map(|target| target.name.as_str()).collect();
        assert_eq!(names, ["w-1", "w-2"]);
        assert!(require_known(&listed[0]).is_ok());
        assert!(require_known(&listed[1]).unwrap_err().to_string().starts_with("lost"));
    }
}
