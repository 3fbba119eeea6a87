//! Latencies by load: what a call takes while the server has nothing else to do, and at shares of what it does at most.
//!
//! The most is measured first, in the same run: the rates of a busy machine are not those of a quiet one. Below it loads are
//! open: calls have due times, and a server that falls behind is not asked for less.

use bytesize::ByteSize;

use crate::options::{LoadArgs, RunArgs};
use crate::report::RunReport;
use crate::run::{self, Cluster};

/// Shares of the most, by what they are called.
const SHARES: [(&str, f64); 2] = [("half", 0.5), ("nine tenths", 0.9)];
/// One writer alone writes this share of the bytes.
const ALONE: u64 = 8;

/// Writes and reads at each load.
pub(crate) async fn by_load(args: &RunArgs) -> anyhow::Result<RunReport> {
    run::with_cluster("latency", args, async |cluster| {
        let all = cluster.load_mut().clone();
        let bytes = ByteSize::b(all.bytes.as_u64() / ALONE);
        *cluster.load_mut() = LoadArgs { writers: 1, readers: Some(1), tasks: Some(1), bytes, ..all.clone() };
        round(cluster, 0, "alone").await?;
        *cluster.load_mut() = all.clone();
        let (write, read) = round(cluster, 1, "the most").await?;
        for (number, (name, share)) in (2..).zip(SHARES) {
            let (rate, read_rate) = (Some(part(write, share)), Some(part(read, share)));
            *cluster.load_mut() = LoadArgs { rate, read_rate, ..all.clone() };
            round(cluster, number, name).await?;
        }
        Ok(())
    })
    .await
}

fn part(most: u64, share: f64) -> ByteSize {
    ByteSize::b(format!("{:.0}", most as f64 * share).parse().unwrap_or(1).max(1))
}

/// Bytes per second written and read.
async fn round(cluster: &mut Cluster, number: u32, load: &str) -> anyhow::Result<(u64, u64)> {
    let shuffle = cluster.shuffle(number).await?;
    cluster.write(&format!("write, {load}"), &shuffle).await?;
    let written = cluster.last_bytes_per_second();
    cluster.read(&format!("read, {load}"), &shuffle).await?;
    let read = cluster.last_bytes_per_second();
    cluster.unregister(&shuffle).await?;
    Ok((written, read))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shares_are_of_the_most_and_never_nothing() {
        assert_eq!((part(1_000, 0.9), part(0, 0.5)), (ByteSize::b(900), ByteSize::b(1)));
    }
}
