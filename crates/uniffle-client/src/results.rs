//! Blocks that a reader must find: the union of the reports that a quorum of replicas returns.
//!
//! Invariant: no reported block is missing from the union, because write and read quorum together
//! exceed the number of replicas (`ClientOptions` checks that). Finding the blocks themselves is up
//! to `reader`.

use std::collections::BTreeMap;

use croaring::Treemap;

use crate::context::ShuffleContext;
use crate::error::Error;
use uniffle_wire::types::{BlockId, PartitionId, TaskAttemptId};

/// Task attempts whose blocks a reader wants.
#[derive(Debug, Clone, Default)]
pub struct TaskFilter(Option<Treemap>);

impl TaskFilter {
    /// Accepts the blocks of every task attempt that reported.
    #[must_use]
    pub fn all() -> Self {
        Self(None)
    }

    /// Accepts the blocks of these task attempts only: the successful ones if several attempts of a
    /// task reported (speculation), or a subset if several readers share a large partition.
    #[must_use]
    pub fn of(tasks: impl IntoIterator<Item = TaskAttemptId>) -> Self {
        Self(Some(tasks.into_iter().map(|task| task.0.cast_unsigned()).collect()))
    }

    /// Returns the accepted task attempts, or `None` for all.
    pub(crate) fn tasks(&self) -> Option<&Treemap> {
        self.0.as_ref()
    }

    fn accepts(&self, task: TaskAttemptId) -> bool {
        self.0.as_ref().is_none_or(|tasks| tasks.contains(task.0.cast_unsigned()))
    }
}

/// Returns the expected block ids of each of `partitions`, in their order. Partitions with the same
/// replicas share a call.
pub(crate) async fn expected_blocks(
    shuffle: &ShuffleContext,
    partitions: &[PartitionId],
    filter: &TaskFilter,
) -> Result<Vec<Treemap>, Error> {
    let mut by_replicas: BTreeMap<Vec<usize>, Vec<PartitionId>> = BTreeMap::new();
    for &partition in partitions {
        by_replicas.entry(shuffle.replica_servers(partition)?).or_default().push(partition);
    }
    let mut expected: BTreeMap<PartitionId, Treemap> = BTreeMap::new();
    for (replicas, together) in by_replicas {
        let layout = shuffle.options().layout;
        for id in reported_ids(shuffle, &replicas, &together).await?.iter() {
            let id = BlockId(id.cast_signed());
            let partition = i32::try_from(layout.partition_of(id)).map(PartitionId);
            if filter.accepts(layout.task_of(id))
                && let Ok(partition) = partition
            {
                expected.entry(partition).or_default().add(id.0.cast_unsigned());
            }
        }
    }
    // Ids of partitions that were not asked for are dropped here.
    Ok(partitions.iter().map(|partition| expected.get(partition).cloned().unwrap_or_default()).collect())
}

/// Asks one replica after another until `replicas.read` have answered. A report was acknowledged by
/// `replicas.write` replicas, so at least one of these knows it.
async fn reported_ids(
    shuffle: &ShuffleContext,
    replicas: &[usize],
    partitions: &[PartitionId],
) -> Result<Treemap, Error> {
    let options = shuffle.options();
    let needed = options.replicas.read;
    let (mut union, mut answered, mut failure) = (Treemap::new(), 0, None);
    for &replica in replicas {
        match shuffle.server(replica).results(shuffle.key(), partitions, options.layout).await {
            Ok(ids) => {
                union.or_inplace(&ids);
                answered += 1;
            }
            Err(error) => failure = Some(Box::new(error)),
        }
        if answered == needed {
            return Ok(union);
        }
    }
    let partition = partitions.first().copied().unwrap_or(PartitionId(0));
    Err(Error::ReadQuorum { partition, answered, needed, source: failure })
}
