//! The shape of a recorded client session: block lengths, sizes and partitions of its sends, and
//! their concurrency. The load generator produces any amount of work of this shape.

use std::collections::{BTreeMap, HashSet};
use std::path::Path;

use anyhow::{Context as _, ensure};
use bytesize::ByteSize;
use uniffle_testkit::recording::{RecordedExchange, RecordedSession};

use crate::content::Sizes;
use crate::options::LoadArgs;
use crate::plan::MessageShape;

/// Number of block lengths that are kept, spread evenly over all lengths.
const QUANTILES: usize = 32;

/// Shape of a session.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct SessionShape {
    pub(crate) blocks: Sizes,
    /// Size and number of partitions of every send.
    pub(crate) messages: Vec<MessageShape>,
    /// Payload of each partition, added up over all shuffles.
    pub(crate) partition_bytes: Vec<u64>,
    /// Maximum number of concurrent sends.
    pub(crate) writers: u32,
    /// Number of connections that carried the sends.
    pub(crate) connections: u32,
    /// Number of task attempts that sent.
    pub(crate) tasks: u32,
}

impl SessionShape {
    /// Loads the shape of a recording.
    pub(crate) fn load(path: &Path) -> anyhow::Result<Self> {
        let describe = || format!("--shape {}", path.display());
        let file = std::fs::read(path).with_context(describe)?;
        let session = RecordedSession::decode(file).map_err(anyhow::Error::msg).with_context(describe)?;
        Self::of(&session).with_context(describe)
    }

    /// Applies the shape to the options of a run.
    pub(crate) fn apply_to(&self, load: &mut LoadArgs) {
        load.blocks = self.blocks.clone();
        load.partitions = u32::try_from(self.partition_bytes.len()).unwrap_or(u32::MAX);
        load.message_size =
            ByteSize::b(self.messages.iter().map(|message| message.bytes).max().unwrap_or(1).max(1));
        load.writers = self.writers.saturating_mul(load.executors);
        load.connections = self.connections.saturating_mul(load.executors);
        load.tasks = Some(self.tasks.saturating_mul(load.executors).max(load.writers));
    }

    fn of(session: &RecordedSession) -> anyhow::Result<Self> {
        let (mut lengths, mut messages, mut sends) = (Vec::new(), Vec::new(), Vec::new());
        let mut partition_bytes: BTreeMap<u32, u64> = BTreeMap::new();
        let (mut connections, mut tasks) = (HashSet::new(), HashSet::new());
        for exchange in &session.exchanges {
            let Some(sent) = exchange.sent().map_err(anyhow::Error::msg)? else { continue };
            sends.push(exchange);
            connections.insert(exchange.connection);
            let mut shape = MessageShape { bytes: 0, partitions: 0 };
            for (partition, blocks) in &sent.partitions {
                shape.partitions += 1;
                let sum = partition_bytes.entry(u32::try_from(*partition)?).or_default();
                for block in blocks {
                    lengths.push(block.meta.length);
                    shape.bytes += u64::from(block.meta.length);
                    *sum += u64::from(block.meta.length);
                    tasks.insert((sent.shuffle, block.meta.task_attempt_id));
                }
            }
            messages.push(shape);
        }
        let lengths = quantiles(lengths);
        ensure!(!lengths.is_empty(), "no block in this session");
        let last = partition_bytes.last_key_value().map_or(0, |(partition, _)| *partition);
        Ok(Self {
            blocks: Sizes::sample("recorded", lengths),
            messages,
            partition_bytes: (0..=last).map(|p| partition_bytes.get(&p).copied().unwrap_or(0)).collect(),
            writers: max_concurrency(&sends),
            connections: u32::try_from(connections.len())?,
            tasks: u32::try_from(tasks.len())?,
        })
    }
}

/// Returns up to [`QUANTILES`] lengths, spread evenly over all lengths.
fn quantiles(mut lengths: Vec<u32>) -> Vec<u32> {
    lengths.sort_unstable();
    lengths.retain(|&length| length > 0);
    let kept = lengths.len().min(QUANTILES);
    (0..kept).map(|n| lengths[(2 * n + 1) * lengths.len() / (2 * kept)]).collect()
}

/// Returns the maximum number of concurrent sends, at least 1.
fn max_concurrency(sends: &[&RecordedExchange]) -> u32 {
    let overlaps =
        |send: &RecordedExchange, at: u64| send.began_us <= at && at < send.ended_us.max(send.began_us + 1);
    let concurrent = |at: u64| sends.iter().filter(|send| overlaps(send, at)).count();
    let most = sends.iter().map(|send| concurrent(send.began_us)).max().unwrap_or(1);
    u32::try_from(most).unwrap_or(u32::MAX).max(1)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn recording(name: &str) -> std::path::PathBuf {
        Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/contract/replay").join(name)
    }

    #[test]
    fn grpc_and_tcp_recordings_have_equal_shapes() {
        let of = |plane| {
            SessionShape::load(&recording(&format!("spark-3.5.6-client-0.9.2-{plane}-memory.rec"))).unwrap()
        };
        let (grpc, tcp) = (of("grpc"), of("tcp"));
        assert_eq!(grpc.blocks, tcp.blocks);
        assert_eq!((grpc.tasks, grpc.messages.len()), (tcp.tasks, tcp.messages.len()));
        assert_eq!(grpc.partition_bytes, tcp.partition_bytes);
        let sent: u64 = grpc.messages.iter().map(|message| message.bytes).sum();
        assert_eq!(sent, grpc.partition_bytes.iter().sum::<u64>());
        assert!(grpc.writers >= 1 && grpc.connections >= 1, "{grpc:?}");
    }

    #[test]
    fn quantiles_are_few_and_ascending() {
        let all = quantiles((0..=1_000).rev().collect());
        assert_eq!((all.len(), all[0], all[QUANTILES - 1]), (QUANTILES, 16, 985));
        assert!(all.is_sorted());
        assert_eq!(quantiles(vec![7, 0, 3]), [3, 7]);
        assert!(quantiles(vec![0]).is_empty());
    }

    #[test]
    fn concurrent_sends_are_counted() {
        let exchange = |began_us, ended_us| RecordedExchange {
            began_us,
            ended_us,
            connection: 0,
            plane: uniffle_testkit::recording::Plane::Tcp,
            request: bytes::Bytes::new(),
            answer: bytes::Bytes::new(),
        };
        let sends = [exchange(0, 10), exchange(5, 6), exchange(6, 12), exchange(10, 11), exchange(20, 20)];
        assert_eq!(max_concurrency(&sends.iter().collect::<Vec<_>>()), 2);
        assert_eq!(max_concurrency(&[]), 1);
    }
}
