//! Reads of several parts in one job.
//!
//! Several buffered parts are read twice. The first pass only takes cached bytes, which starts the
//! device on all missing ranges at once. The second pass waits for them. One thread thus keeps as
//! many reads in flight as the file system allows.

use std::fs::File;
use std::io::{self, IoSliceMut};
use std::num::NonZeroU64;
use std::ops::Range;
use std::os::unix::fs::FileExt;

use rustix::fs::Advice;
use rustix::io::{Errno, ReadWriteFlags, preadv2};

use crate::progress::{BounceBuffer, ReadProgress, too_short};
use crate::{BLOCK_ALIGN, ReadTarget};

/// Largest range per advice. By default the kernel reads no more ahead per call (`read_ahead_kb`)
/// and ignores the excess.
const ADVISED_BYTES: u64 = 128 << 10;

/// Starts loading a range, which will be read soon, into the page cache.
pub(super) fn advise(file: &File, range: Range<u64>) -> io::Result<()> {
    let mut at = range.start;
    while let Some(length) = NonZeroU64::new(range.end.saturating_sub(at).min(ADVISED_BYTES)) {
        rustix::fs::fadvise(file, at, Some(length), Advice::WillNeed)?;
        at += length.get();
    }
    Ok(())
}

/// Fills the parts of `target`.
pub(super) fn fill(file: &File, direct: bool, target: &mut ReadTarget) -> io::Result<()> {
    if direct {
        return each(target, |bytes, offset| read_direct(file, bytes, offset));
    }
    let mut filled = vec![0; target.parts.len()];
    if target.parts.len() > 1 {
        read_cached(target, &mut filled, |bytes, offset| {
            preadv2(file, &mut [IoSliceMut::new(bytes)], offset, ReadWriteFlags::NOWAIT)
        });
    }
    let mut filled = filled.into_iter();
    each(target, |bytes, offset| {
        let filled: usize = filled.next().unwrap_or(0);
        let read = file.read_exact_at(&mut bytes[filled..], offset + filled as u64);
        read.map_err(|error| if error.kind() == io::ErrorKind::UnexpectedEof { too_short() } else { error })
    })
}

fn each(target: &mut ReadTarget, mut read: impl FnMut(&mut [u8], u64) -> io::Result<()>) -> io::Result<()> {
    for part in 0..target.parts.len() {
        let offset = target.parts[part].offset;
        let bytes = target.part_mut(part);
        let outside = || io::Error::new(io::ErrorKind::InvalidInput, "range outside the buffer");
        read(bytes.ok_or_else(outside)?, offset)?;
    }
    Ok(())
}

/// Copies cached bytes without waiting, and stores the number per part in `filled`. Errors are left
/// to the read that waits.
fn read_cached(
    target: &mut ReadTarget,
    filled: &mut [usize],
    mut read: impl FnMut(&mut [u8], u64) -> Result<usize, Errno>,
) {
    for (part, filled) in filled.iter_mut().enumerate() {
        let offset = target.parts[part].offset;
        let Some(bytes) = target.part_mut(part) else { return };
        match read(bytes, offset) {
            Ok(count) => *filled = count.min(bytes.len()),
            Err(Errno::AGAIN | Errno::INTR) => {}
            // Not every file system supports the flag.
            Err(_) => return,
        }
    }
}

/// Fills `bytes` from a direct file. Uses a bounce buffer if the target is not aligned.
fn read_direct(file: &File, bytes: &mut [u8], offset: u64) -> io::Result<()> {
    let Some(mut bounce) = BounceBuffer::of(bytes, offset) else {
        let needed = bytes.len();
        return read_blocks(file, bytes, offset, needed);
    };
    let (start, needed) = (offset - offset % BLOCK_ALIGN as u64, bounce.needed());
    read_blocks(file, bounce.blocks(), start, needed)?;
    bytes.copy_from_slice(bounce.bytes());
    Ok(())
}

/// Reads at least the first `needed` bytes of `blocks`, which must be aligned like `start`.
fn read_blocks(file: &File, blocks: &mut [u8], start: u64, needed: usize) -> io::Result<()> {
    let mut progress = ReadProgress::new(needed, true);
    while !progress.is_done() {
        let filled = progress.filled();
        progress.advance(file.read_at(&mut blocks[filled..], start + filled as u64))?;
    }
    Ok(())
}
