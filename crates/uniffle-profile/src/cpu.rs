//! CPU profiles. `sampler` takes samples, and `child` renders them.

use std::collections::HashMap;
use std::num::NonZero;
use std::ops::RangeInclusive;
use std::thread::available_parallelism;
use std::time::SystemTime;

use tokio::time::Duration;

use super::job::{CountedStack, ProfileJob, RenderJob, SampleUnit, Samples};
use super::maps::{AddressSet, Maps};
use super::sampler::{Sampling, SamplingError, UnresolvedReport};
use super::{ExclusivePermit, Format, ProfileError, child, in_background};
use uniffle_base::clock::sleep;
use uniffle_base::runtime::Tasks;

/// Allowed duration of a profile.
pub const SECONDS: RangeInclusive<u64> = 1..=300;

/// Allowed samples per second of CPU time. At higher rates the signal handler would distort
/// results.
pub const FREQUENCY: RangeInclusive<u32> = 1..=1000;

/// Default frequency. It is not a multiple of common timer frequencies such as 100 Hz.
pub const FREQUENCY_DEFAULT: u32 = 99;

/// Maximum samples per profile, unless one per second of CPU time already exceeds it. The profiler
/// uses more than a kilobyte per distinct stack.
const SAMPLES_MAX: u64 = 16_384;

/// Takes samples for `duration`, then renders them. Dropping the future ends the profile.
///
/// While sampling is active, a task of `tasks` is active too. The timer would survive an exec of
/// the process, and its signal would kill the next program.
///
/// # Errors
/// [`ProfileError::Busy`] if another profile is being taken, [`ProfileError::Failed`] if the
/// profiler fails.
pub async fn profile(
    permit: &ExclusivePermit,
    duration: Duration,
    frequency: u32,
    format: Format,
    tasks: &Tasks,
) -> Result<Vec<u8>, ProfileError> {
    let processors = available_parallelism().map_or(1, NonZero::get);
    let frequency = bounded(frequency, duration, processors as u64);
    let counted = tasks.token();
    // The tuple is dropped in this order: sampling ends before the task token.
    let begin = move || Ok((Sampling::start(frequency).map_err(failed)?, counted));
    let running = in_background(permit, begin).await?;
    sleep(duration).await;
    in_background(permit, move || {
        let report = running.0.report().map_err(failed)?;
        // Sampling ends before resolving names, which takes long.
        drop(running);
        child::made(&job(report, format))
    })
    .await
}

/// Builds the job. Threads with the same name are combined.
fn job(report: UnresolvedReport, format: Format) -> RenderJob {
    let UnresolvedReport { data, timing } = report;
    let mut addresses = AddressSet::default();
    let mut stacks: HashMap<(String, Vec<u32>), i64> = HashMap::new();
    for (sample, count) in data {
        let name = String::from_utf8_lossy(&sample.thread_name[..sample.thread_name_length]).into_owned();
        let thread = if name.is_empty() { sample.thread_id.to_string() } else { name };
        let mut frames = sample.frames.iter().map(|frame| frame.ip as u64);
        // The first frame is the current instruction; the others are return addresses.
        let at: Vec<u32> = frames.next().map(|address| addresses.number(address)).into_iter().collect();
        let stack =
            at.into_iter().chain(frames.map(|returns_to| addresses.call_before(returns_to))).collect();
        *stacks.entry((thread, stack)).or_default() += count as i64;
    }
    let nanos = |duration: Duration| i64::try_from(duration.as_nanos()).unwrap_or(i64::MAX);
    let stacks = stacks.into_iter();
    let samples = Samples {
        kind: SampleUnit::Cpu { period_nanos: 1_000_000_000 / i64::from(timing.frequency.max(1)) },
        began_nanos: nanos(timing.start_time.duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default()),
        duration_nanos: nanos(timing.duration),
        stacks: stacks
            .map(|((thread, frames), found)| CountedStack { thread: Some(thread), frames, found })
            .collect(),
    };
    RenderJob {
        places: addresses.into_table(&Maps::of_this_process()),
        what: ProfileJob::Profile(samples, format),
    }
}

/// Lowers the frequency so that a process that is busy on all processors stays within
/// [`SAMPLES_MAX`], but to no less than 1.
fn bounded(frequency: u32, duration: Duration, processors: u64) -> u32 {
    let seconds_of_cpu = duration.as_secs().saturating_mul(processors).max(1);
    let most = u32::try_from(SAMPLES_MAX / seconds_of_cpu).unwrap_or(u32::MAX);
    frequency.min(most.max(1))
}

fn failed(error: SamplingError) -> ProfileError {
    match error {
        SamplingError::Busy => ProfileError::Busy,
        error => ProfileError::Failed(error.to_string()),
    }
}

#[cfg(test)]
mod tests {
    use super::super::PermitSource;
    use super::*;

    /// The only test that samples, because the process has one sampler.
    #[tokio::test]
    async fn abandoned_profile_counts_until_sampling_ends() {
        let (tasks, permit) = (Tasks::new(), PermitSource::new().try_take().unwrap());
        let duration = Duration::from_secs(300);
        let mut asked = Box::pin(profile(&permit, duration, 1, Format::Protobuf, &tasks));
        assert!(futures::poll!(&mut asked).is_pending());
        assert_eq!(tasks.running(), 1, "sampling has not begun");
        drop(asked);
        tasks.drained().await;
        let sampling = Sampling::start(99).unwrap();
        assert!(matches!(Sampling::start(99), Err(SamplingError::Busy)));
        sampling.report().unwrap();
        drop(sampling);
        drop(Sampling::start(1).unwrap());
    }

    #[test]
    fn long_profile_of_many_cores_samples_less_often() {
        let seconds = Duration::from_secs;
        for (frequency, duration, processors, expected) in [
            (99, seconds(30), 2, 99),
            (1000, seconds(5), 2, 1000),
            (99, seconds(30), 64, 8),
            (1000, seconds(300), 2, 27),
            (1000, seconds(300), 256, 1),
            (1, seconds(1), 1, 1),
        ] {
            assert_eq!(
                bounded(frequency, duration, processors),
                expected,
                "{frequency} {duration:?} {processors}"
            );
        }
    }
}
