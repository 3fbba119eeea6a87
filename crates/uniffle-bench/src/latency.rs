//! Latencies at several loads: on an idle server, at its maximum, and at shares of the maximum.
//!
//! The maximum is measured in the same run, before its shares, because the speed of the machine
//! varies. A given `--rate` or `--read-rate` limits the maximum too. The shares are open loads:
//! calls have due times, so a server that falls behind does not receive fewer calls.

use bytesize::ByteSize;

use crate::options::{LoadArgs, RunArgs};
use crate::report::RunReport;
use crate::run::{self, ClientGroup};

/// Names of the loads and their shares of the maximum.
const SHARES: [(&str, f64); 2] = [("half", 0.5), ("nine tenths", 0.9)];
/// A single writer writes one `ALONE`-th of the bytes.
const ALONE: u64 = 8;

/// Measures writes and reads at each load.
pub(crate) async fn by_load(args: &RunArgs) -> anyhow::Result<RunReport> {
    run::with_cluster("latency", args, async |cluster| {
        let all = cluster.load_mut().clone();
        let bytes = ByteSize::b(all.bytes.as_u64() / ALONE);
        *cluster.load_mut() = LoadArgs { writers: 1, readers: Some(1), tasks: Some(1), bytes, ..all.clone() };
        round(cluster, 0, "alone").await?;
        *cluster.load_mut() = all.clone();
        let (write, read) = round(cluster, 1, "maximum").await?;
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

/// Writes and reads one shuffle. Returns the bytes per second of both.
async fn round(cluster: &mut ClientGroup, number: u32, load: &str) -> anyhow::Result<(u64, u64)> {
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
    fn load_shares_are_never_zero() {
        assert_eq!((part(1_000, 0.9), part(0, 0.5)), (ByteSize::b(900), ByteSize::b(1)));
    }
}
