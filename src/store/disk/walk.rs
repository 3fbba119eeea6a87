//! Visits the partitions and extents of a shuffle in batches. A shuffle may have millions, so the
//! lock is held for one batch at a time, and the task yields after each batch.

use super::shuffle::DiskShuffle;
use uniffle_wire::types::PartitionId;

/// Number of partitions or extents per batch.
pub(in crate::store) const WALK_BATCH_MAX: usize = 4096;

/// Adds `more` visited partitions or extents to `visited`, and yields after each batch.
pub(in crate::store) async fn yield_per_batch(visited: &mut usize, more: usize) {
    *visited += more;
    if *visited >= WALK_BATCH_MAX {
        *visited = 0;
        tokio::task::yield_now().await;
    }
}

/// Returns all partitions of a shuffle. The lock is held for one batch at a time.
pub(in crate::store) async fn partitions_of(shuffle: &DiskShuffle) -> Vec<PartitionId> {
    let (mut all, mut visited) = (Vec::new(), 0);
    loop {
        let some = shuffle.with_streams(|streams| streams.partitions_from(all.len(), WALK_BATCH_MAX));
        if some.is_empty() {
            return all;
        }
        yield_per_batch(&mut visited, some.len()).await;
        all.extend(some);
    }
}

#[cfg(test)]
mod tests {
    use std::pin::pin;

    use super::*;
    use crate::store::extents::extent::Extent;
    use uniffle_base::budget::Budget;
    use uniffle_wire::types::{AppId, ShuffleId, ShuffleKey};

    #[tokio::test]
    async fn partitions_are_listed_in_batches_with_new_ones() {
        let key = ShuffleKey::new(AppId::parse("app").unwrap(), ShuffleId(1));
        let shuffle = DiskShuffle::new(key, 1, 0, &Budget::new(u64::MAX));
        let mut next = 0;
        let mut publish = |count: usize| {
            let some: Vec<_> =
                (next..).take(count).map(|id| (PartitionId(-id), Extent::gap(0, 10))).collect();
            next += i32::try_from(count).unwrap();
            shuffle.apply(&some).unwrap();
        };
        publish(2 * WALK_BATCH_MAX);
        assert_eq!(shuffle.with_streams(|it| it.partitions_from(0, WALK_BATCH_MAX)).len(), WALK_BATCH_MAX);
        let mut listed = pin!(partitions_of(&shuffle));
        let mut times = 0;
        let all = loop {
            match futures::poll!(&mut listed) {
                std::task::Poll::Ready(all) => break all,
                std::task::Poll::Pending => times += 1,
            }
            if times <= 2 {
                publish(10);
            }
        };
        assert_eq!(times, 2, "expected a yield after each of two full batches");
        assert_eq!(all, (0..next).map(|id| PartitionId(-id)).collect::<Vec<_>>());
    }
}
