//! Reads the configuration file and files that it names.
//!
//! Only regular files up to a size limit are read. A device would never end, a FIFO without a
//! writer would block, and the content is held in memory outside the memory budget.

use std::fs::OpenOptions;
use std::io::{self, Read as _};
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::Path;

use rustix::fs::OFlags;

/// Size limit for a file with certificates or a key. A system's CA bundle has about 250 KiB.
pub const PEM_BYTES_MAX: u64 = 1 << 20;

/// Returns the content of the file.
///
/// # Errors
/// If the file cannot be read, is not a regular file, or has more than `bytes_max` bytes.
pub fn read(path: &Path, bytes_max: u64) -> io::Result<Vec<u8>> {
    #[expect(clippy::cast_possible_wrap, reason = "flags")]
    let without_waiting = OFlags::NONBLOCK.bits() as i32;
    let file = OpenOptions::new().read(true).custom_flags(without_waiting).open(path)?;
    let found = file.metadata()?;
    if found.is_dir() {
        return Err(io::ErrorKind::IsADirectory.into());
    }
    if !found.is_file() {
        return Err(io::Error::other("not a regular file"));
    }
    let mut bytes = Vec::new();
    file.take(bytes_max + 1).read_to_end(&mut bytes)?;
    if bytes.len() as u64 > bytes_max {
        let has = found.len().max(bytes.len() as u64);
        let text = format!("file has {has} bytes, the limit is {bytes_max}");
        return Err(io::Error::new(io::ErrorKind::FileTooLarge, text));
    }
    Ok(bytes)
}

/// Returns the content of a text file; see [`read`].
///
/// # Errors
/// The errors of [`read`], and content that is not UTF-8.
pub fn read_text(path: &Path, bytes_max: u64) -> io::Result<String> {
    let bytes = read(path, bytes_max)?;
    String::from_utf8(bytes).map_err(|error| io::Error::new(io::ErrorKind::InvalidData, error.utf8_error()))
}

#[cfg(test)]
mod tests {
    use rustix::fs::{CWD, FileType, Mode, mknodat};

    use super::*;

    #[test]
    fn only_ordinary_files_of_a_bounded_size_are_read() {
        let directory = tempfile::tempdir().unwrap();
        let path = |name: &str| directory.path().join(name);
        std::fs::write(path("small"), "text").unwrap();
        assert_eq!(read_text(&path("small"), 4).unwrap(), "text");
        assert_eq!(read(&path("small"), 3).unwrap_err().to_string(), "file has 4 bytes, the limit is 3");
        std::fs::File::create(path("sparse")).unwrap().set_len(1 << 40).unwrap();
        assert_eq!(read(&path("sparse"), 3).unwrap_err().kind(), io::ErrorKind::FileTooLarge);
        mknodat(CWD, path("fifo"), FileType::Fifo, Mode::RUSR | Mode::WUSR, 0).unwrap();
        for other in [path("fifo"), "/dev/zero".into()] {
            assert_eq!(read(&other, 3).unwrap_err().to_string(), "not a regular file");
        }
        assert_eq!(read(directory.path(), 3).unwrap_err().kind(), io::ErrorKind::IsADirectory);
        assert_eq!(read(&path("none"), 3).unwrap_err().kind(), io::ErrorKind::NotFound);
        std::fs::write(path("bytes"), [0xff]).unwrap();
        assert_eq!(read_text(&path("bytes"), 4).unwrap_err().kind(), io::ErrorKind::InvalidData);
    }
}
