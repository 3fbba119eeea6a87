//! CPU profiles by SIGPROF: every `1 / frequency` seconds of CPU time the thread that runs is asked for its stack.
//!
//! Stacks are unwound in the signal handler by framehop: it reads unwind tables that were loaded before, allocates
//! nothing, takes no lock, and checks each address of the stack before it reads it. Tried and dropped: libgcc's unwinder,
//! which is safe only when samples in libc are thrown away, and those (system calls, memcpy) are where a shuffle
//! server's time goes; frame pointers, which lose the function that runs, and its caller too when that is in libc.

use std::collections::HashMap;
use std::io;
use std::ops::RangeInclusive;

use pprof::{Frames, ProfilerGuard, ProfilerGuardBuilder, Report};
use signal_hook::consts::SIGPROF;
use signal_hook::low_level::raise;
use tokio::time::{Duration, sleep};

use super::{Format, ProfileError, Turn, in_background, render};

/// How long a profile may take.
pub const SECONDS: RangeInclusive<u64> = 1..=300;

/// Samples per second of CPU time. Above, the handler itself would show.
pub const FREQUENCY: RangeInclusive<u32> = 1..=1000;

/// Off the beat of timers that fire a hundred times a second.
pub const FREQUENCY_DEFAULT: u32 = 99;

/// Samples for `duration`, then renders. Dropping the future ends the profile.
///
/// # Errors
/// [`ProfileError::Busy`] while another one runs.
pub async fn profile(
    turn: &Turn,
    duration: Duration,
    (frequency, format): (u32, Format),
) -> Result<Vec<u8>, ProfileError> {
    let running = in_background(turn, move || {
        load_unwind_tables()?;
        start(frequency)
    })
    .await?;
    sleep(duration).await;
    in_background(turn, move || {
        let samples = running.report().build_unresolved().map_err(failed)?;
        // Before symbols are resolved, which takes long: the timer would outlive an exec of the process.
        drop(running);
        let resolved = samples.data.into_iter().map(|(frames, count)| (Frames::from(frames), count));
        let mut data: HashMap<Frames, isize> = HashMap::new();
        for (frames, count) in resolved {
            *data.entry(frames).or_default() += count;
        }
        let report = Report { data, timing: samples.timing };
        match format {
            Format::Protobuf => Ok(render::protobuf(&report)),
            Format::Svg => render::svg(&report).map_err(failed),
        }
    })
    .await
}

fn start(frequency: u32) -> Result<ProfilerGuard<'static>, ProfileError> {
    let frequency = i32::try_from(frequency).unwrap_or(i32::MAX);
    ProfilerGuardBuilder::default().frequency(frequency).build().map_err(|error| match error {
        pprof::Error::Running => ProfileError::Busy,
        error => failed(error),
    })
}

/// The tables are loaded by the first sample, which allocates and reads files. Here that sample is taken at a place
/// where this is safe: this thread sends itself the signal, a second of CPU time before the timer sends one.
fn load_unwind_tables() -> Result<(), ProfileError> {
    let warm_up = start(1)?;
    let raised: io::Result<()> = raise(SIGPROF);
    drop(warm_up);
    raised.map_err(failed)
}

fn failed(error: impl std::fmt::Display) -> ProfileError {
    ProfileError::Failed(error.to_string())
}
