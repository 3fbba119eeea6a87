//! The tasks of the job, and its expected result.

use std::collections::BTreeMap;
use std::hash::{DefaultHasher, Hash as _, Hasher as _};
use std::time::{SystemTime, UNIX_EPOCH};

use tokio::task::JoinSet;
use uniffle_client::block::task_attempt_id;
use uniffle_client::types::{PartitionId, ShuffleId, TaskAttemptId};
use uniffle_client::{ClientOptions, Cluster, Error, IdLayout, Shuffle, TaskFilter};

/// Input of the map tasks, one text per task.
const TEXTS: [&str; 4] = [
    "the worker keeps blocks in memory and flushes them to disk",
    "the client sends blocks and reports them to the worker",
    "a failed attempt at a task leaves blocks that no reader wants",
    "the reader asks for reported blocks and reads memory and then the disk",
];
const PARTITIONS: i32 = 3;
/// Maximum number of attempts per task, as in Spark.
const ATTEMPTS_MAX: u32 = 4;
/// Size of one block. A real engine uses blocks a thousand times as large.
const BLOCK_BYTES: usize = 64;

/// Number of occurrences per word.
pub(crate) type Counts = BTreeMap<String, u64>;

/// Runs the whole job against the coordinators at `addresses` (`host:port,host:port`).
pub(crate) async fn run(addresses: &str, options: ClientOptions) -> Result<Counts, Error> {
    let cluster = Cluster::new(addresses.split(','), options)?;
    let started = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    let application = cluster.application(&format!("word_count_{}", started.as_millis())).await?;
    let shuffle = application.register_shuffle(ShuffleId(0), PARTITIONS).await?;

    let successful = map(&shuffle).await?;
    let counts = reduce(&shuffle, &successful).await?;

    shuffle.unregister().await?;
    application.unregister().await?;
    Ok(counts)
}

/// Runs all map tasks. Returns the attempts whose output counts.
async fn map(shuffle: &Shuffle) -> Result<Vec<TaskAttemptId>, Error> {
    // Task 2 fails at first. Both attempts at task 3 succeed; the scheduler picks the first.
    write(shuffle, attempt(2, 0)?, TEXTS[2], true).await?;
    write(shuffle, attempt(3, 1)?, TEXTS[3], false).await?;
    let successful = [attempt(0, 0)?, attempt(1, 0)?, attempt(2, 1)?, attempt(3, 0)?];
    let mut tasks = JoinSet::new();
    for (task, text) in successful.into_iter().zip(TEXTS) {
        let shuffle = shuffle.clone();
        tasks.spawn(async move { write(&shuffle, task, text, false).await });
    }
    for written in tasks.join_all().await {
        written?;
    }
    Ok(successful.to_vec())
}

fn attempt(task: u32, number: u32) -> Result<TaskAttemptId, Error> {
    let id = task_attempt_id(task, number, IdLayout::attempt_bits(ATTEMPTS_MAX, false));
    id.ok_or_else(|| Error::Invalid(format!("attempt {number} at task {task} has no id")))
}

/// Runs one attempt at a map task: counts the words of `text` and writes them by partition.
async fn write(shuffle: &Shuffle, task: TaskAttemptId, text: &str, fails: bool) -> Result<(), Error> {
    let mut writer = shuffle.writer(task)?;
    let mut outputs: BTreeMap<PartitionId, String> = BTreeMap::new();
    for (word, count) in count(text) {
        let partition = partition_of(&word);
        let output = outputs.entry(partition).or_default();
        output.push_str(&format!("{word} {count}\n"));
        if output.len() >= BLOCK_BYTES {
            writer.write(partition, std::mem::take(output)).await?;
        }
    }
    if fails {
        // Dropped without `finish`: the blocks that it sent are never reported, so no reader
        // expects them.
        return Ok(());
    }
    for (partition, output) in outputs.into_iter().filter(|(_, output)| !output.is_empty()) {
        writer.write(partition, output).await?;
    }
    writer.finish().await.map(drop)
}

/// Runs all reduce tasks: adds up the counts of the map tasks.
async fn reduce(shuffle: &Shuffle, successful: &[TaskAttemptId]) -> Result<Counts, Error> {
    let partitions: Vec<PartitionId> = (0..PARTITIONS).map(PartitionId).collect();
    let filter = TaskFilter::of(successful.iter().copied());
    let mut tasks = JoinSet::new();
    for mut reader in shuffle.readers(&partitions, &filter).await? {
        tasks.spawn(async move {
            let mut counts = Counts::new();
            while let Some(block) = reader.next().await? {
                add(&mut counts, &block.data)?;
            }
            Ok::<_, Error>(counts)
        });
    }
    let mut all = Counts::new();
    for counts in tasks.join_all().await {
        all.extend(counts?);
    }
    Ok(all)
}

fn add(counts: &mut Counts, block: &[u8]) -> Result<(), Error> {
    let invalid = || Error::Invalid("a block that is not of this program".to_owned());
    for line in std::str::from_utf8(block).map_err(|_| invalid())?.lines() {
        let (word, count) = line.split_once(' ').ok_or_else(invalid)?;
        *counts.entry(word.to_owned()).or_default() += count.parse::<u64>().map_err(|_| invalid())?;
    }
    Ok(())
}

/// Counts the words of `text` without a shuffle.
pub(crate) fn count(text: &str) -> Counts {
    let mut counts = Counts::new();
    for word in text.split_whitespace() {
        *counts.entry(word.to_owned()).or_default() += 1;
    }
    counts
}

/// Returns the expected result of [`run`].
pub(crate) fn expected() -> Counts {
    count(&TEXTS.join(" "))
}

fn partition_of(word: &str) -> PartitionId {
    let mut hasher = DefaultHasher::new();
    word.hash(&mut hasher);
    let partition = hasher.finish() % u64::from(PARTITIONS.unsigned_abs());
    PartitionId(i32::try_from(partition).unwrap_or_default())
}
