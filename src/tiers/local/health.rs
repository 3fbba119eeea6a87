//! What errors say about a disk: full, read-only, hung, broken, or nothing at all. A pure state machine with the clock passed in.
//!
//! Not here: who does the I/O (`disk`). Full and sick are different things: a full disk is healthy, its data is served,
//! and it takes batches again when there is room. Neither state flaps: fullness has two watermarks, a disk that says
//! "no space" below them is left alone for a time that doubles, and a sick one has to pass a probe.

use std::io;
use std::time::Duration;

use rustix::io::Errno;

use super::placement;
use crate::clock::Instant;
use crate::tiers::DiskCondition;

/// Longest time that a disk is left alone for saying "no space" while it measures free space.
const REFUSAL_TIME_MAX: Duration = Duration::from_secs(600);
/// How long for the second time in a row; the first is over at the next maintenance.
const REFUSAL_TIME: Duration = Duration::from_secs(20);

/// What one error says.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Verdict {
    /// Nothing about the disk: the process lacks descriptors or memory, a name is gone, a task was dropped.
    NotTheDisk,
    /// No space (or quota) left.
    Full,
    /// Its file system takes no changes: what is there can be read.
    ReadOnly,
    /// No answer in time.
    Hung,
    /// It fails, or returns other bytes than were written.
    Broken,
}

/// Judges an error of a file operation.
#[must_use]
pub fn judge(error: &io::Error) -> Verdict {
    if let Some(errno) = error.raw_os_error().map(Errno::from_raw_os_error) {
        return match errno {
            Errno::NOSPC | Errno::DQUOT => Verdict::Full,
            Errno::MFILE | Errno::NFILE | Errno::INTR | Errno::NOMEM | Errno::AGAIN | Errno::NOENT => {
                Verdict::NotTheDisk
            }
            Errno::ROFS => Verdict::ReadOnly,
            Errno::TIMEDOUT => Verdict::Hung,
            _ => Verdict::Broken,
        };
    }
    match error.kind() {
        io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded => Verdict::Full,
        io::ErrorKind::ReadOnlyFilesystem => Verdict::ReadOnly,
        io::ErrorKind::TimedOut => Verdict::Hung,
        io::ErrorKind::InvalidData | io::ErrorKind::UnexpectedEof | io::ErrorKind::WriteZero => {
            Verdict::Broken
        }
        // Ours: a missing name, a wrong argument, a task that ended with the runtime.
        _ => Verdict::NotTheDisk,
    }
}

/// What the calls of one disk have shown of it so far.
#[derive(Debug, Default)]
pub(super) struct Health {
    fault: Option<Fault>,
    above_watermark: bool,
    refusal: Option<Refusal>,
    /// "No space" answers since the last write that succeeded.
    refusals: u32,
    failures: u64,
}

#[derive(Debug)]
struct Fault {
    text: String,
    condition: DiskCondition,
}

#[derive(Debug)]
struct Refusal {
    until: Instant,
}

impl Health {
    /// The state now.
    pub(super) fn condition(&self) -> DiskCondition {
        match &self.fault {
            Some(fault) => fault.condition,
            None if self.above_watermark || self.refusal.is_some() => DiskCondition::Full,
            None => DiskCondition::Healthy,
        }
    }

    /// Why it is read-only, detached, hung or broken.
    pub(super) fn fault(&self) -> Option<&str> {
        self.fault.as_ref().map(|fault| fault.text.as_str())
    }

    /// Full, whether or not it is sick besides.
    pub(super) fn is_full(&self) -> bool {
        self.above_watermark || self.refusal.is_some()
    }

    /// Errors that were held against it.
    pub(super) fn failures(&self) -> u64 {
        self.failures
    }

    /// Draws the consequences of a failed operation.
    pub(super) fn note(&mut self, error: &io::Error, now: Instant) -> Verdict {
        let verdict = judge(error);
        let fault = |condition| Some(Fault { text: error.to_string(), condition });
        match verdict {
            Verdict::NotTheDisk => return verdict,
            Verdict::Full => {
                let doubled = REFUSAL_TIME.saturating_mul(1 << self.refusals.saturating_sub(1).min(16));
                let time = if self.refusals == 0 { Duration::ZERO } else { doubled.min(REFUSAL_TIME_MAX) };
                // Many writers may be told at once: that is one refusal.
                if self.refusal.is_none() {
                    self.refusal = Some(Refusal { until: now + time });
                    self.refusals = self.refusals.saturating_add(1);
                }
            }
            Verdict::ReadOnly => self.fault = fault(DiskCondition::ReadOnly),
            Verdict::Hung => self.fault = fault(DiskCondition::Hung),
            Verdict::Broken => self.fault = fault(DiskCondition::Broken),
        }
        self.failures = self.failures.saturating_add(1);
        verdict
    }

    /// Its path leads elsewhere: whatever was wrong before, nothing is to be written there.
    pub(super) fn detached(&mut self, text: &str) {
        self.fault = Some(Fault { text: text.to_owned(), condition: DiskCondition::Detached });
        self.failures = self.failures.saturating_add(1);
    }

    /// Lets a disk that said "no space" be tried again when its time is over. Every try may cost a file.
    pub(super) fn forgive(&mut self, now: Instant) {
        self.refusal.take_if(|refusal| refusal.until <= now);
    }

    /// Files were removed since it said "no space".
    pub(super) fn made_room(&mut self) {
        self.refusal = None;
    }

    /// A batch was written.
    pub(super) fn wrote(&mut self) {
        self.refusals = 0;
    }

    /// A probe succeeded; returns what was wrong before.
    pub(super) fn proved(&mut self) -> Option<String> {
        self.fault.take().map(|fault| fault.text)
    }

    /// Applies the watermarks; true when the disk crossed one.
    pub(super) fn measured(&mut self, used_ratio: f64, high: f64, low: f64) -> bool {
        let before = self.above_watermark;
        self.above_watermark = placement::is_full(before, used_ratio, high, low);
        before != self.above_watermark
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn errno(errno: Errno) -> io::Error {
        io::Error::from_raw_os_error(errno.raw_os_error())
    }

    #[test]
    fn errors_are_told_apart() {
        for own in [Errno::MFILE, Errno::NFILE, Errno::INTR, Errno::NOMEM, Errno::AGAIN, Errno::NOENT] {
            assert_eq!(judge(&errno(own)), Verdict::NotTheDisk, "{own:?}");
        }
        assert_eq!(judge(&io::Error::other("dropped")), Verdict::NotTheDisk);
        assert_eq!(judge(&errno(Errno::NOSPC)), Verdict::Full);
        assert_eq!(judge(&errno(Errno::DQUOT)), Verdict::Full);
        assert_eq!(judge(&io::ErrorKind::TimedOut.into()), Verdict::Hung);
        assert_eq!(judge(&errno(Errno::ROFS)), Verdict::ReadOnly);
        assert_eq!(judge(&io::ErrorKind::ReadOnlyFilesystem.into()), Verdict::ReadOnly);
        for broken in [Errno::IO, Errno::NXIO, Errno::NODEV] {
            assert_eq!(judge(&errno(broken)), Verdict::Broken, "{broken:?}");
        }
        assert_eq!(judge(&io::ErrorKind::InvalidData.into()), Verdict::Broken);
    }

    #[test]
    fn sickness_outweighs_fullness_and_ends_with_a_probe() {
        let mut health = Health::default();
        let now = Instant::now();
        assert!(health.measured(0.9, 0.8, 0.7));
        assert_eq!(health.condition(), DiskCondition::Full);
        health.note(&io::ErrorKind::TimedOut.into(), now);
        assert_eq!(health.condition(), DiskCondition::Hung);
        health.note(&errno(Errno::IO), now);
        assert_eq!(health.condition(), DiskCondition::Broken);
        health.note(&errno(Errno::MFILE), now);
        assert_eq!((health.failures(), health.proved().is_some()), (2, true));
        assert_eq!(health.condition(), DiskCondition::Full);
        assert!(!health.measured(0.75, 0.8, 0.7), "between the watermarks nothing changes");
        assert!(health.measured(0.69, 0.8, 0.7));
        assert_eq!(health.condition(), DiskCondition::Healthy);
    }

    #[test]
    fn a_disk_that_goes_on_saying_full_is_asked_less_and_less() {
        let mut health = Health::default();
        let mut now = Instant::now();
        let mut waited = Vec::new();
        for _ in 0..8 {
            health.note(&errno(Errno::NOSPC), now);
            health.note(&errno(Errno::NOSPC), now);
            let since = now;
            health.forgive(now);
            while health.is_full() {
                now += Duration::from_secs(10);
                health.forgive(now);
            }
            waited.push((now - since).as_secs());
        }
        assert_eq!(waited, [0, 20, 40, 80, 160, 320, 600, 600]);
        health.wrote();
        health.note(&errno(Errno::NOSPC), now);
        health.forgive(now);
        assert!(!health.is_full(), "a write in between makes it a first time again");
    }
}
