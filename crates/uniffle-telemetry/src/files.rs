//! Log files with rotation.
//!
//! A program such as logrotate may rename or delete the current file; lines written more than a
//! second later go to a new file. No signal is needed for that. Writing happens on a thread of its
//! own (`writer`), so that a slow disk delays no other thread.

use std::fs;
use std::io::{self, Write};
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::Context as _;
use rustix::fs::Access;
use tracing_appender::rolling;

use super::settings::{Rotation, TelemetryConfig};
use uniffle_base::clock::Instant;

/// Interval of the checks whether the current file still exists.
const CHECK_INTERVAL: Duration = Duration::from_secs(1);

/// Suffix of the names of log files.
const SUFFIX: &str = "log";

/// Opens the log file in `directory` with the prefix `name`.
pub(super) fn open(config: &TelemetryConfig, directory: &Path, name: &str) -> anyhow::Result<LogFile> {
    fs::create_dir_all(directory)
        .with_context(|| format!("cannot create the log directory {}", directory.display()))?;
    let mut file = LogFile {
        rotation: match config.rotation {
            Rotation::Daily => rolling::Rotation::DAILY,
            Rotation::Hourly => rolling::Rotation::HOURLY,
            Rotation::Never => rolling::Rotation::NEVER,
        },
        files_max: config.files_max,
        directory: directory.to_owned(),
        name: name.to_owned(),
        appender: None,
        current: None,
        looked: Instant::now(),
    };
    file.reopen().with_context(|| format!("cannot log into {}", directory.display()))?;
    Ok(file)
}

/// Checks whether files can be created in `directory`, or else in its nearest existing parent.
pub(super) fn check_writable(directory: &Path) -> io::Result<()> {
    let existing = directory.ancestors().find(|path| path.symlink_metadata().is_ok());
    let existing = existing.unwrap_or(directory);
    if !fs::metadata(existing)?.is_dir() {
        return Err(io::ErrorKind::NotADirectory.into());
    }
    Ok(rustix::fs::access(existing, Access::WRITE_OK | Access::EXEC_OK)?)
}

/// The current log file of one kind, and the settings for the next one.
#[derive(Debug)]
pub(super) struct LogFile {
    rotation: rolling::Rotation,
    files_max: usize,
    directory: PathBuf,
    name: String,
    appender: Option<rolling::RollingFileAppender>,
    /// Name and inode of the current file.
    current: Option<(String, u64)>,
    looked: Instant,
}

impl LogFile {
    fn reopen(&mut self) -> Result<(), rolling::InitError> {
        let appender = rolling::Builder::new()
            .rotation(self.rotation.clone())
            .filename_prefix(&self.name)
            .filename_suffix(SUFFIX)
            .max_log_files(self.files_max)
            .build(&self.directory)?;
        self.appender = Some(appender);
        self.current = self.latest();
        Ok(())
    }

    /// Returns the file with the latest date in its name, which is the current one.
    fn latest(&self) -> Option<(String, u64)> {
        let is_ours = |name: &str| {
            let rest = name.strip_prefix(&self.name).and_then(|rest| rest.strip_suffix(SUFFIX));
            rest.is_some_and(|date| date.starts_with('.'))
        };
        let files = fs::read_dir(&self.directory).ok()?.filter_map(|entry| {
            let entry = entry.ok()?;
            let name = entry.file_name().into_string().ok().filter(|name| is_ours(name))?;
            Some((name, entry.metadata().ok()?.ino()))
        });
        files.max()
    }

    /// Opens a new file if the current one was renamed or deleted. The appender itself rotates by
    /// time.
    fn follow_rename(&mut self) {
        if self.looked.elapsed() < CHECK_INTERVAL {
            return;
        }
        self.looked = Instant::now();
        let latest = self.latest();
        let is_later =
            |(name, _): &(String, u64)| self.current.as_ref().is_none_or(|(known, _)| name > known);
        if latest.as_ref().is_some_and(is_later) {
            self.current = latest;
        } else if latest != self.current {
            // After a failure, lines go to the old file until the next check.
            let _ = self.reopen();
        }
    }
}

impl Write for LogFile {
    fn write(&mut self, lines: &[u8]) -> io::Result<usize> {
        self.follow_rename();
        self.appender.as_mut().map_or(Ok(lines.len()), |appender| appender.write(lines))
    }

    fn flush(&mut self) -> io::Result<()> {
        self.appender.as_mut().map_or(Ok(()), Write::flush)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn opened(directory: &Path, rotation: Rotation) -> LogFile {
        let config = TelemetryConfig { rotation, ..TelemetryConfig::default() };
        open(&config, directory, "worker").unwrap()
    }

    /// Makes the next check due, and writes `line`.
    fn write(file: &mut LogFile, line: &str) {
        file.looked = file.looked.checked_sub(CHECK_INTERVAL).unwrap();
        file.write_all(line.as_bytes()).unwrap();
    }

    #[test]
    fn renamed_and_deleted_files_are_followed_by_new_ones() {
        for rotation in [Rotation::Never, Rotation::Daily, Rotation::Hourly] {
            let directory = tempfile::tempdir().unwrap();
            let mut file = opened(directory.path(), rotation);
            let path = |file: &LogFile| directory.path().join(&file.current.as_ref().unwrap().0);
            write(&mut file, "one\n");
            let renamed = directory.path().join("worker.log.1");
            fs::rename(path(&file), &renamed).unwrap();
            write(&mut file, "two\n");
            assert_eq!(fs::read_to_string(&renamed).unwrap(), "one\n");
            assert_eq!(fs::read_to_string(path(&file)).unwrap(), "two\n");
            fs::remove_file(path(&file)).unwrap();
            write(&mut file, "three\n");
            write(&mut file, "four\n");
            assert_eq!(fs::read_to_string(path(&file)).unwrap(), "three\nfour\n");
        }
    }

    #[test]
    fn failed_reopening_is_retried_at_the_next_check() {
        let parent = tempfile::tempdir().unwrap();
        let (directory, aside) = (parent.path().join("logs"), parent.path().join("aside"));
        let mut file = opened(&directory, Rotation::Never);
        fs::rename(&directory, &aside).unwrap();
        fs::write(&directory, "no directory").unwrap();
        write(&mut file, "one\n");
        fs::remove_file(&directory).unwrap();
        fs::create_dir(&directory).unwrap();
        write(&mut file, "two\n");
        assert_eq!(fs::read_to_string(aside.join("worker.log")).unwrap(), "one\n");
        assert_eq!(fs::read_to_string(directory.join("worker.log")).unwrap(), "two\n");
    }

    #[test]
    fn other_files_are_not_taken_for_the_current_one() {
        let directory = tempfile::tempdir().unwrap();
        let mut file = opened(directory.path(), Rotation::Never);
        fs::write(directory.path().join("worker-2.log"), "").unwrap();
        fs::write(directory.path().join("zzz"), "").unwrap();
        write(&mut file, "one\n");
        assert_eq!(fs::read_to_string(directory.path().join("worker.log")).unwrap(), "one\n");
    }
}
