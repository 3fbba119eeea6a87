//! The tasks of the job, and its expected result.

use std::collections::BTreeMap;
use std::time::{SystemTime, UNIX_EPOCH};

use tokio::task::JoinSet;
use uniffle_client::block::task_attempt_id;
use uniffle_client::types::{PartitionId, ShuffleId, TaskAttemptId};
use uniffle_client::{Application, ClientOptions, Cluster, Error, IdLayout, Shuffle, TaskFilter};

/// Input of the map tasks, one text per task.
const TEXTS: [&str; 4] = [
    "the worker keeps blocks in memory and flushes them to disk",
    "the client sends blocks and reports them to the worker",
    "a failed attempt at a task leaves blocks that no reader wants",
    "the reader asks for reported blocks and reads memory and then the disk",
];
pub(crate) const PARTITIONS: i32 = 3;
/// Maximum number of attempts per task, as in Spark.
const ATTEMPTS_MAX: u32 = 4;
/// Minimum size of a full block. A real engine uses blocks of about one megabyte.
const BLOCK_BYTES: usize = 16;
/// Size of one batch: every block is sent at once, so the failed attempt leaves blocks on the
/// worker. A real engine uses the default.
const SEND_BYTES: u64 = 1;

/// Number of occurrences per word.
pub(crate) type Counts = BTreeMap<String, u64>;

/// Runs the whole job against the coordinators at `addresses` (`host:port,host:port`).
pub(crate) async fn run(addresses: &str, options: ClientOptions) -> Result<Counts, Error> {
    let (application, shuffle) = register(addresses, options).await?;

    let successful = map(&shuffle).await?;
    let counts = reduce(&shuffle, &successful).await?;

    shuffle.unregister().await?;
    application.unregister().await?;
    Ok(counts)
}

/// Registers the application and its shuffle.
pub(crate) async fn register(
    addresses: &str,
    options: ClientOptions,
) -> Result<(Application, Shuffle), Error> {
    let options = options.with(|options| options.send_bytes_max = SEND_BYTES);
    let cluster = Cluster::new(addresses.split(','), options)?;
    let started = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    let application = cluster.application(&format!("word_count_{}", started.as_millis())).await?;
    let shuffle = application.register_shuffle(ShuffleId(0), PARTITIONS).await?;
    Ok((application, shuffle))
}

/// Runs all map tasks. Returns the attempts whose output counts.
pub(crate) async fn map(shuffle: &Shuffle) -> Result<Vec<TaskAttemptId>, Error> {
    // Attempt 0 at task 2 fails. Both attempts at task 3 succeed; the scheduler picks attempt 0.
    write(shuffle, failed_attempt()?, TEXTS[2], true).await?;
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

/// Returns the attempt that sends some of its blocks and then fails.
pub(crate) fn failed_attempt() -> Result<TaskAttemptId, Error> {
    attempt(2, 0)
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
pub(crate) async fn reduce(shuffle: &Shuffle, successful: &[TaskAttemptId]) -> Result<Counts, Error> {
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
        // Each word is in one partition, so no count replaces another.
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

/// Counts the words of `text`.
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

/// Returns the partition of `word`. All executors must agree on it, so its hash is independent of
/// the Rust release, unlike that of `DefaultHasher`.
fn partition_of(word: &str) -> PartitionId {
    let hash = word.bytes().fold(0_u32, |hash, byte| hash.wrapping_mul(31).wrapping_add(u32::from(byte)));
    let partition = hash % PARTITIONS.unsigned_abs();
    PartitionId(i32::try_from(partition).unwrap_or_default())
}
