//! Health of a disk, derived from errors: full, read-only, detached, hung or broken. A pure state
//! machine; `directory` does the I/O.
//!
//! A full disk has no fault: its data is served, and it takes batches again when there is space.
//! Fullness has two watermarks. A disk that refused a write for lack of space is full until a probe
//! can write or files are removed. A disk with a fault must pass a probe.

use std::io;

use bytesize::ByteSize;
use rustix::io::Errno;

use super::placement;
use crate::store::DiskCondition;
use uniffle_io::{Space, Vanished};

/// Meaning of an error.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ErrorClass {
    /// Not a fault of the disk: the process lacks descriptors or memory, a name does not exist, or
    /// a task was dropped.
    NotTheDisk,
    /// The file cannot be written, and a new one may work: it was removed or replaced, or is too
    /// large.
    TheFile,
    /// No space (or quota) left.
    Full,
    /// The file system is read-only.
    ReadOnly,
    /// The path leads to another directory.
    Detached,
    /// No answer in time.
    Hung,
    /// The disk fails, or returns wrong bytes.
    Broken,
}

/// Classifies an error of a file operation.
#[must_use]
pub fn classify(error: &io::Error) -> ErrorClass {
    match Vanished::of(error) {
        Some(Vanished::File) => return ErrorClass::TheFile,
        Some(Vanished::Root) => return ErrorClass::Detached,
        None => {}
    }
    if let Some(errno) = error.raw_os_error().map(Errno::from_raw_os_error) {
        return match errno {
            Errno::NOSPC | Errno::DQUOT => ErrorClass::Full,
            // FAULT: pages of the region's file (`memory_store.backing`) are missing, because it
            // was cut short.
            Errno::MFILE
            | Errno::NFILE
            | Errno::INTR
            | Errno::NOMEM
            | Errno::AGAIN
            | Errno::NOENT
            | Errno::FAULT => ErrorClass::NotTheDisk,
            Errno::FBIG | Errno::STALE => ErrorClass::TheFile,
            Errno::ROFS => ErrorClass::ReadOnly,
            Errno::TIMEDOUT => ErrorClass::Hung,
            _ => ErrorClass::Broken,
        };
    }
    match error.kind() {
        io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded => ErrorClass::Full,
        io::ErrorKind::FileTooLarge
        | io::ErrorKind::StaleNetworkFileHandle
        // The file is shorter than its written content: another program cut it.
        | io::ErrorKind::UnexpectedEof => ErrorClass::TheFile,
        io::ErrorKind::ReadOnlyFilesystem => ErrorClass::ReadOnly,
        io::ErrorKind::TimedOut => ErrorClass::Hung,
        io::ErrorKind::InvalidData | io::ErrorKind::WriteZero => ErrorClass::Broken,
        // These are our own errors: a missing name, a wrong argument, a task that ended with the
        // runtime.
        _ => ErrorClass::NotTheDisk,
    }
}

/// Health of one disk.
#[derive(Debug, Default)]
pub(in crate::store) struct DiskHealth {
    fault: Option<DiskFault>,
    above_watermark: bool,
    refusal: Option<NoSpaceReason>,
    failures: u64,
    /// Number of changes from no fault to a fault.
    faults: u64,
}

#[derive(Debug)]
struct DiskFault {
    text: String,
    condition: DiskCondition,
}

/// Reason why a write found no space.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum NoSpaceReason {
    Space,
    Quota,
}

impl NoSpaceReason {
    fn of(error: &io::Error) -> Self {
        match error.kind() {
            io::ErrorKind::QuotaExceeded => Self::Quota,
            _ => Self::Space,
        }
    }
}

impl DiskHealth {
    /// Returns the current condition.
    pub(in crate::store) fn condition(&self) -> DiskCondition {
        match &self.fault {
            Some(fault) => fault.condition,
            None if self.is_full() => DiskCondition::Full,
            None => DiskCondition::Healthy,
        }
    }

    /// Returns why it is read-only, detached, hung or broken.
    pub(in crate::store::disk) fn fault(&self) -> Option<&str> {
        self.fault.as_ref().map(|fault| fault.text.as_str())
    }

    /// Returns whether the disk is full. It may also be unhealthy.
    pub(in crate::store::disk) fn is_full(&self) -> bool {
        self.above_watermark || self.refusal.is_some()
    }

    /// Returns whether a write found no space, and since then no probe has succeeded and no file
    /// was removed.
    pub(in crate::store) fn refuses(&self) -> bool {
        self.refusal.is_some()
    }

    /// Returns why the disk is full and what to do, with the figures of `space`. Returns `None` if
    /// it is not full.
    pub(super) fn why_full(&self, space: &Space) -> Option<String> {
        let Space { total_bytes, free_bytes, total_inodes, free_inodes, .. } = *space;
        let bytes = format!("{} of {} are free", ByteSize(free_bytes), ByteSize(total_bytes));
        let has_inodes = total_inodes > 0;
        let text = match self.refusal {
            Some(NoSpaceReason::Quota) => {
                format!("the disk quota is used up, although {bytes} in the file system; raise the quota")
            }
            Some(NoSpaceReason::Space) if has_inodes && free_inodes == 0 => format!(
                "no inodes are left, 0 of {total_inodes} are free, although {bytes}; remove files of other \
                 programs there"
            ),
            Some(NoSpaceReason::Space) if has_inodes => format!(
                "a write found no space, {bytes} and {free_inodes} of {total_inodes} inodes; free space \
                 there"
            ),
            Some(NoSpaceReason::Space) => format!("a write found no space, {bytes}; free space there"),
            None if self.above_watermark => {
                format!("{bytes}, the disk is above its watermark; free space there")
            }
            None => return None,
        };
        Some(text)
    }

    /// Returns the number of errors counted against the disk.
    pub(in crate::store::disk) fn failures(&self) -> u64 {
        self.failures
    }

    /// Returns how many times a fault began.
    pub(in crate::store) fn faults(&self) -> u64 {
        self.faults
    }

    /// Applies a failed operation.
    pub(in crate::store) fn note(&mut self, error: &io::Error) -> ErrorClass {
        let verdict = classify(error);
        let was_healthy = self.fault.is_none();
        let fault = |condition| Some(DiskFault { text: error.to_string(), condition });
        match verdict {
            ErrorClass::NotTheDisk | ErrorClass::TheFile => return verdict,
            ErrorClass::Full => self.refusal = Some(NoSpaceReason::of(error)),
            ErrorClass::ReadOnly => self.fault = fault(DiskCondition::ReadOnly),
            ErrorClass::Detached => self.fault = fault(DiskCondition::Detached),
            ErrorClass::Hung => self.fault = fault(DiskCondition::Hung),
            ErrorClass::Broken => self.fault = fault(DiskCondition::Broken),
        }
        self.failures = self.failures.saturating_add(1);
        self.faults = self.faults.saturating_add(u64::from(was_healthy && self.fault.is_some()));
        verdict
    }

    /// Ends a refusal, because files were removed.
    pub(in crate::store) fn note_space_freed(&mut self) {
        self.refusal = None;
    }

    /// Applies a successful probe. Returns the earlier fault, or that a write found no space.
    pub(super) fn note_probe_passed(&mut self) -> Option<String> {
        let refused = self.refusal.take().map(|_| "a write found no space".to_owned());
        self.fault.take().map(|fault| fault.text).or(refused)
    }

    /// Applies the watermarks. Returns whether the disk crossed one.
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
    fn errors_are_classified() {
        for own in
            [Errno::MFILE, Errno::NFILE, Errno::INTR, Errno::NOMEM, Errno::AGAIN, Errno::NOENT, Errno::FAULT]
        {
            assert_eq!(classify(&errno(own)), ErrorClass::NotTheDisk, "{own:?}");
        }
        assert_eq!(classify(&io::Error::other("dropped")), ErrorClass::NotTheDisk);
        assert_eq!(classify(&errno(Errno::NOSPC)), ErrorClass::Full);
        assert_eq!(classify(&errno(Errno::DQUOT)), ErrorClass::Full);
        assert_eq!(classify(&io::ErrorKind::TimedOut.into()), ErrorClass::Hung);
        assert_eq!(classify(&errno(Errno::ROFS)), ErrorClass::ReadOnly);
        assert_eq!(classify(&io::ErrorKind::ReadOnlyFilesystem.into()), ErrorClass::ReadOnly);
        for broken in [Errno::IO, Errno::NXIO, Errno::NODEV] {
            assert_eq!(classify(&errno(broken)), ErrorClass::Broken, "{broken:?}");
        }
        assert_eq!(classify(&io::ErrorKind::InvalidData.into()), ErrorClass::Broken);
    }

    #[test]
    fn error_of_a_file_does_not_blame_the_disk() {
        for error in [errno(Errno::FBIG), errno(Errno::STALE), Vanished::File.into()] {
            let mut health = DiskHealth::default();
            assert_eq!(health.note(&error), ErrorClass::TheFile, "{error}");
            assert_eq!((health.condition(), health.failures()), (DiskCondition::Healthy, 0));
        }
        let mut health = DiskHealth::default();
        health.note(&Vanished::Root.into());
        assert_eq!(health.condition(), DiskCondition::Detached);
    }

    #[test]
    fn failure_outweighs_fullness_until_a_probe() {
        let mut health = DiskHealth::default();
        assert!(health.measured(0.9, 0.8, 0.7));
        assert_eq!(health.condition(), DiskCondition::Full);
        health.note(&io::ErrorKind::TimedOut.into());
        assert_eq!(health.condition(), DiskCondition::Hung);
        health.note(&errno(Errno::IO));
        assert_eq!(health.condition(), DiskCondition::Broken);
        health.note(&errno(Errno::MFILE));
        assert_eq!((health.failures(), health.note_probe_passed().is_some()), (2, true));
        assert_eq!(health.condition(), DiskCondition::Full);
        assert!(!health.measured(0.75, 0.8, 0.7), "the state must not change between the watermarks");
        assert!(health.measured(0.69, 0.8, 0.7));
        assert_eq!(health.condition(), DiskCondition::Healthy);
    }

    #[test]
    fn each_return_to_a_fault_is_counted() {
        let mut health = DiskHealth::default();
        health.note(&errno(Errno::NOSPC));
        assert_eq!(health.faults(), 0, "a full disk counts as faulty");
        for times in 1..=3 {
            health.note(&errno(Errno::IO));
            health.note(&errno(Errno::ROFS));
            assert_eq!(health.faults(), times);
            health.note_probe_passed();
        }
    }

    #[test]
    fn refusal_ends_with_one_probe_however_often_it_came() {
        let mut health = DiskHealth::default();
        for _ in 0..8 {
            health.note(&errno(Errno::NOSPC));
            health.note(&errno(Errno::NOSPC));
            assert!(health.is_full() && health.refuses());
            assert!(health.note_probe_passed().is_some());
            assert_eq!(health.condition(), DiskCondition::Healthy);
        }
    }

    #[test]
    fn full_disk_says_whether_bytes_inodes_or_quota_lack() {
        let space =
            Space { total_bytes: 100, free_bytes: 90, total_inodes: 8, free_inodes: 0, file_system: 1 };
        let why = |error: Option<Errno>, space: &Space| {
            let mut health = DiskHealth::default();
            health.measured(0.1, 0.8, 0.7);
            if let Some(error) = error {
                health.note(&errno(error));
            }
            health.why_full(space)
        };
        assert_eq!(why(None, &space), None);
        let text = why(Some(Errno::NOSPC), &space).unwrap();
        assert!(
            text.contains("0 of 8") && text.contains("inodes") && text.contains("90 B of 100 B"),
            "{text}"
        );
        let text = why(Some(Errno::DQUOT), &space).unwrap();
        assert!(text.contains("quota") && text.contains("90 B of 100 B"), "{text}");
        for total_inodes in [0, 8] {
            let space = Space { free_bytes: 0, total_inodes, free_inodes: total_inodes / 2, ..space };
            let text = why(Some(Errno::NOSPC), &space).unwrap();
            assert!(text.contains("no space, 0 B of 100 B"), "{text}");
        }
        let mut health = DiskHealth::default();
        health.measured(0.9, 0.8, 0.7);
        assert!(health.why_full(&space).unwrap().contains("above its watermark"));
    }
}
