//! Reads of several parts in one job.
//!
//! Buffered parts are asked for twice: first only for what the page cache has, which starts the device on everything
//! else at once, then waiting. One thread so has as much under way as the file system allows.

use std::fs::File;
use std::io::{self, IoSliceMut};
use std::num::NonZeroU64;
use std::ops::Range;
use std::os::unix::fs::FileExt;

use rustix::fs::Advice;
use rustix::io::{Errno, ReadWriteFlags, preadv2};

use crate::progress::{Detour, ReadProgress};
use crate::{BLOCK_ALIGN, ReadTarget};

/// The kernel reads no more than this ahead on one call, by default (`read_ahead_kb`); what is asked for beyond it is dropped.
const ADVISED_BYTES: u64 = 128 << 10;

/// Starts the device on a range that is read soon by way of the page cache.
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
        at_hand(target, &mut filled, |bytes, offset| {
            preadv2(file, &mut [IoSliceMut::new(bytes)], offset, ReadWriteFlags::NOWAIT)
        });
    }
    let mut filled = filled.into_iter();
    each(target, |bytes, offset| {
        let filled: usize = filled.next().unwrap_or(0);
        file.read_exact_at(&mut bytes[filled..], offset + filled as u64)
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

/// Takes what `read` gives without waiting; how much of each part that was. Errors are left to the read that waits.
fn at_hand(
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
            // Not every file system knows the flag.
            Err(_) => return,
        }
    }
}

/// Fills `bytes` from a direct file: where they are when everything is aligned, else by a detour.
fn read_direct(file: &File, bytes: &mut [u8], offset: u64) -> io::Result<()> {
    let Some(mut detour) = Detour::of(bytes, offset) else {
        let needed = bytes.len();
        return read_blocks(file, bytes, offset, needed);
    };
    let (start, needed) = (offset - offset % BLOCK_ALIGN as u64, detour.needed());
    read_blocks(file, detour.blocks(), start, needed)?;
    bytes.copy_from_slice(detour.bytes());
    Ok(())
}

/// Reads at least the first `needed` bytes of `blocks`, which is aligned as `start` is.
fn read_blocks(file: &File, blocks: &mut [u8], start: u64, needed: usize) -> io::Result<()> {
    let mut progress = ReadProgress::new(needed, true);
    while !progress.is_done() {
        let filled = progress.filled();
        progress.advance(file.read_at(&mut blocks[filled..], start + filled as u64))?;
    }
    Ok(())
}
