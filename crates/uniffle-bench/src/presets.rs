//! Named workloads: `terasort` and `tpcds-stress`, which reports of other servers use, and `scale`,
//! a goal of this project.

use bytesize::ByteSize;

use crate::content::Sizes;
use crate::options::{LoadArgs, PresetArgs};
use crate::report::BenchReport;
use crate::run;

/// Connections that 11,200 tasks share: those of 56 executors with two each.
const SCALE_CONNECTIONS: u32 = 112;

/// Scales `full` by the preset's size, to at least 1.
fn scaled(full: u32, size: f64) -> u32 {
    format!("{:.0}", f64::from(full) * size).parse().unwrap_or(1).max(1)
}

fn scaled_bytes(full: ByteSize, size: f64) -> ByteSize {
    ByteSize::b(format!("{:.0}", full.as_u64() as f64 * size).parse().unwrap_or(1).max(1))
}

fn check(args: &PresetArgs) -> anyhow::Result<f64> {
    anyhow::ensure!(args.size > 0.0 && args.size <= 1.0, "--size must be more than 0.0 and at most 1.0");
    anyhow::ensure!(args.run.load.shape.is_none(), "a preset cannot be combined with --shape");
    Ok(args.size)
}

/// Runs 11,200 writers at full speed, then in an open loop at half that rate. Latencies of the
/// paced phase count from the due time of a message.
pub(crate) async fn scale(mut args: PresetArgs) -> anyhow::Result<BenchReport> {
    let size = check(&args)?;
    args.run.load = LoadArgs {
        writers: scaled(11_200, size),
        readers: Some(scaled(64, size)),
        partitions: scaled(20_000, size),
        connections: scaled(SCALE_CONNECTIONS, size),
        message_size: ByteSize::kib(16),
        message_partitions: 4,
        blocks: Sizes::fixed(4 << 10),
        bytes: scaled_bytes(ByteSize::gb(4), size),
        read_buffer: ByteSize::mib(1),
        unchecked: false,
        ..args.run.load
    };
    let report = run::with_cluster("scale", &args.run, async |cluster| {
        let unpaced = cluster.shuffle(0).await?;
        cluster.write("unpaced", &unpaced).await?;
        let peak = cluster.last_bytes_per_second();
        cluster.read("read", &unpaced).await?;
        cluster.unregister(&unpaced).await?;
        let paced = cluster.shuffle(1).await?;
        cluster.load_mut().rate = Some(scaled_bytes(ByteSize::b(peak), 0.5));
        cluster.write("paced", &paced).await?;
        cluster.read("read", &paced).await?;
        cluster.unregister(&paced).await
    });
    Ok(BenchReport { runs: vec![report.await?], ..BenchReport::default() })
}

/// Writes everything, then reads everything: with a server whose memory is small, and, if
/// `--large-cmd` is given, with one that holds all data.
pub(crate) async fn terasort(mut args: PresetArgs) -> anyhow::Result<BenchReport> {
    let size = check(&args)?;
    args.run.load = LoadArgs {
        partitions: scaled(1_000, size.sqrt()),
        tasks: Some(scaled(64, size.sqrt())),
        bytes: scaled_bytes(ByteSize::gb(8), size),
        ..args.run.load
    };
    let mut report = BenchReport::default();
    report.runs.push(run::write_and_read("small memory", &args.run).await?);
    if let Some(command) = args.large_cmd {
        args.run.server.server_cmd = Some(command);
        args.run.server.pid = None;
        report.runs.push(run::write_and_read("large memory", &args.run).await?);
    }
    Ok(report)
}

/// Writes 20,000 partitions with 32 MiB sends, and reads 1.7 times as much at the same time.
pub(crate) async fn tpcds_stress(mut args: PresetArgs) -> anyhow::Result<BenchReport> {
    let size = check(&args)?;
    args.run.load = LoadArgs {
        partitions: scaled(20_000, size),
        message_size: ByteSize::mib(32),
        message_partitions: 1_024,
        blocks: "spark-mix".parse().map_err(anyhow::Error::msg)?,
        bytes: scaled_bytes(ByteSize::gb(4), size),
        reads: 1.7,
        ..args.run.load
    };
    Ok(BenchReport { runs: vec![run::mixed("tpcds-stress", &args.run).await?], ..BenchReport::default() })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn scaled_sizes_are_at_least_one() {
        assert_eq!((scaled(20_000, 1.0), scaled(20_000, 0.01), scaled(64, 0.001)), (20_000, 200, 1));
        assert_eq!(scaled_bytes(ByteSize::gb(4), 0.25), ByteSize::gb(1));
    }
}
