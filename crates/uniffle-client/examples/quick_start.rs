use futures::TryStreamExt as _;
use uniffle_client::types::{PartitionId, ShuffleId, TaskAttemptId};
use uniffle_client::{ClientOptions, Cluster, Error, ShuffleHandle, TaskFilter};

#[tokio::main]
async fn main() -> Result<(), Error> {
    let coordinators: Vec<String> = std::env::args().skip(1).collect();
    let read = run(&coordinators).await?;
    assert_eq!(read, b"the records of partition 3");
    Ok(())
}

/// Writes a block and reads it back through the servers that the coordinators assign.
async fn run(coordinators: &[String]) -> Result<Vec<u8>, Error> {
    // The driver registers the application, whose heartbeats start, and a shuffle of 8 partitions.
    let cluster = Cluster::new(coordinators, ClientOptions::default())?;
    let application = cluster.application("quick-start").await?;
    let shuffle = application.register_shuffle(ShuffleId(0), 8).await?;
    let handle = shuffle.handle().encode();

    // A map task, perhaps in another process, which receives the handle.
    let shuffle = cluster.attach(ShuffleHandle::decode(&handle)?)?;
    let mut writer = shuffle.writer(TaskAttemptId(0))?;
    writer.write(PartitionId(3), &b"the records of partition 3"[..]).await?;
    writer.finish().await?;

    // A reduce task, after all map tasks. The stream holds one response in memory.
    let mut blocks = shuffle.reader(PartitionId(3), &TaskFilter::all()).await?.into_stream();
    let mut read = Vec::new();
    while let Some(block) = blocks.try_next().await? {
        read.extend_from_slice(&block.data);
    }

    shuffle.unregister().await?;
    application.unregister().await?;
    Ok(read)
}
