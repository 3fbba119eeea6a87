//! Log files, which are rotated by the worker or by others.
//!
//! A program such as logrotate may rename or delete the current file; the next line then goes to a new one. No signal is needed
//! for that. Not here: the thread that writes (`writer`), so that a slow disk delays nobody.

use std::fs;
use std::io::{self, Write};
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::Context as _;
use tracing_appender::rolling;

use super::settings::{Rotation, TelemetryConfig};
use crate::clock::Instant;

/// Between two looks whether the current file is still there.
const LOOK_INTERVAL: Duration = Duration::from_secs(1);

/// The end of the name of every log file.
const SUFFIX: &str = "log";

/// Opens the log file in `directory` whose name begins with `name`.
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

/// The current log file of one kind, and what its successor is opened with.
#[derive(Debug)]
pub(super) struct LogFile {
    rotation: rolling::Rotation,
    files_max: usize,
    directory: PathBuf,
    name: String,
    appender: Option<rolling::RollingFileAppender>,
    /// Name and inode of the file that is written to.
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

    /// The file with the latest date in its name, which is the one that is written to.
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

    /// Opens a new file if the current one was renamed or deleted. A later one is the appender's own.
    fn follow_rename(&mut self) {
        if self.looked.elapsed() < LOOK_INTERVAL {
            return;
        }
        self.looked = Instant::now();
        let latest = self.latest();
        let is_later =
            |(name, _): &(String, u64)| self.current.as_ref().is_none_or(|(known, _)| name > known);
        if latest.as_ref().is_some_and(is_later) {
            self.current = latest;
        } else if latest != self.current && self.reopen().is_err() {
            // The old file takes the lines until the next look.
            self.current = latest;
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

    /// As if the last look were long ago.
    fn write(file: &mut LogFile, line: &str) {
        file.looked = file.looked.checked_sub(LOOK_INTERVAL).unwrap();
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
    fn other_files_are_not_taken_for_the_current_one() {
        let directory = tempfile::tempdir().unwrap();
        let mut file = opened(directory.path(), Rotation::Never);
        fs::write(directory.path().join("worker-2.log"), "").unwrap();
        fs::write(directory.path().join("zzz"), "").unwrap();
        write(&mut file, "one\n");
        assert_eq!(fs::read_to_string(directory.path().join("worker.log")).unwrap(), "one\n");
    }
}
