//! Records sessions: of Spark with the published client (by hand), and of the client crate (a test
//! of the recorder).

use uniffle_client::block::IdLayout;
use uniffle_client::grpc::{ReadOptions, ShuffleClient};
use uniffle_client::send::SendForm;
use uniffle_testkit::block_generator::BlockGenerator;
use uniffle_wire::types::{AppId, PartitionId, ShuffleId, ShuffleKey, TaskAttemptId};

use super::{MEMORY, RECORDINGS, SPILLING, Server, replay};
use uniffle_testkit::replay::Recorder;
use uniffle_testkit::say;
use uniffle_testkit::spark::{Jvm, JvmKind};

#[tokio::test(flavor = "multi_thread")]
async fn session_of_client_crate_is_recorded_and_replayed() {
    let server = Server::start(MEMORY).await;
    let (grpc, tcp) = server.addresses();
    let recorder = Recorder::start(grpc, Some(tcp)).await.unwrap();
    let client = ShuffleClient::connect(recorder.address()).await.expect("cannot connect to the recorder");
    let key = ShuffleKey::new(AppId::parse("app").unwrap(), ShuffleId(1));
    client.register(&key, &[(0, 0), (1, 1)]).await.unwrap();
    let generator = BlockGenerator::new(1, IdLayout::SPARK);
    for partition in [PartitionId(0), PartitionId(1)] {
        let block = |sequence| generator.block(partition, TaskAttemptId(3), sequence, 100);
        let batch = [(partition, vec![block(0), block(1)])];
        client.push(&key, SendForm::Classic, &batch).await.unwrap();
        let read = client.read_partition(&key, partition, &ReadOptions::default()).await.unwrap();
        assert_eq!(read.blocks.len(), 2, "the recorder changed the traffic");
    }
    client.unregister_app("app").await.unwrap();
    let session = recorder.stop("our own client").await;
    server.stop_clean().await;

    let summary = replay(&session, MEMORY).await.expect("the replay failed");
    assert_eq!((summary.blocks_sent, summary.from_memory, summary.caught_up), (4, 4, 0), "{summary:?}");
    let summary = replay(&session, SPILLING).await.expect("the replay failed");
    assert_eq!(summary.blocks_sent, 4, "{summary:?}");
}

/// Overwrites the four recordings of client 0.9.2.
#[tokio::test(flavor = "multi_thread")]
#[ignore = "makes the files that the other tests read"]
async fn record_spark() {
    let mut jvm = Jvm::start(JvmKind::NoUnsafe);
    for (client, listener) in [("GRPC", "grpc"), ("GRPC_NETTY", "tcp")] {
        for (tables, tier) in [(MEMORY, "memory"), (SPILLING, "local")] {
            let server = Server::start(tables).await;
            let (grpc, tcp) = server.addresses();
            let recorder = Recorder::start(grpc, Some(tcp)).await.unwrap();
            let quorum = recorder.address();
            let words = format!("scenarios=recorded_pairs,recorded_skew client={client} quorum={quorum}");
            jvm.begin("vanilla,uniffle", &words).unwrap_or_else(|error| panic!("{error}"));
            // Waiting for the JVM blocks this thread only.
            let answers: Vec<_> = (0..2).flat_map(|_| jvm.finish().expect("the JVM did not run")).collect();
            assert!(answers.iter().all(|answer| answer["ok"] == true), "{answers:?}");
            let title = format!(
                "rss-client-spark3-shaded 0.9.2 on Spark 3.5.6, client type {client}, local[2]: \
                 RECORDED_PAIRS and RECORDED_SKEW of tests/spark, blocks in tier {tier}"
            );
            let session = recorder.stop(&title).await;
            server.stop_clean().await;
            let path = format!("{RECORDINGS}/spark-3.5.6-client-0.9.2-{listener}-{tier}.rec");
            let file = session.encode();
            say(&format!("{path}: {} exchanges, {} bytes", session.exchanges.len(), file.len()));
            std::fs::write(path, file).unwrap();
        }
    }
}
