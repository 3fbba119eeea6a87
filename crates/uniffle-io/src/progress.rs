//! Progress of positioned writes and reads, separate from the system calls.
//!
//! A short call is continued, and a call that never gets further fails. Invariant: a direct write
//! that ended inside a block continues at the start of that block, since its offsets must stay
//! aligned.

use std::io;

use bytes::Bytes;

use super::BLOCK_ALIGN;

/// Most pieces per `pwritev` call: Linux's `UIO_MAXIOV`.
pub(super) const IOVECS_MAX: usize = 1024;

/// Consecutive short writes without progress after which a write fails. A direct write may end
/// inside a block, which is then written again. A file system that never gets further is broken.
const SHORT_WRITES_WITHOUT_PROGRESS_MAX: u32 = 8;

/// Pieces that are being written to a file.
#[derive(Debug)]
pub(super) struct WriteProgress {
    pieces: Vec<Bytes>,
    /// First piece that is not completely written.
    piece: usize,
    /// Number of its bytes that are written.
    inside: usize,
    at: u64,
    stuck: u32,
    grain: usize,
}

impl WriteProgress {
    /// Starts writing `pieces` contiguously from `offset`. A direct write that ended inside a block
    /// resumes at the start of that block.
    pub(super) fn new(pieces: Vec<Bytes>, offset: u64, direct: bool) -> Self {
        let grain = if direct { BLOCK_ALIGN } else { 1 };
        Self { pieces, piece: 0, inside: 0, at: offset, stuck: 0, grain }
    }

    pub(super) fn is_done(&self) -> bool {
        self.piece == self.pieces.len()
    }

    /// Returns the offset of the next call.
    pub(super) fn offset(&self) -> u64 {
        self.at
    }

    /// Returns the data of the next call: at most [`IOVECS_MAX`] pieces.
    pub(super) fn next(&self) -> impl Iterator<Item = &[u8]> {
        let pieces = self.pieces[self.piece..].iter().take(IOVECS_MAX).enumerate();
        pieces.map(|(n, bytes)| if n == 0 { &bytes[self.inside..] } else { &bytes[..] })
    }

    /// Records the result of the call that wrote [`WriteProgress::next`].
    pub(super) fn advance(&mut self, written: io::Result<usize>) -> io::Result<()> {
        let requested: usize = self.next().map(<[u8]>::len).sum();
        let written = match written {
            Ok(0) if requested > 0 => return Err(io::ErrorKind::WriteZero.into()),
            Ok(written) => written,
            Err(error) if error.kind() == io::ErrorKind::Interrupted => return Ok(()),
            Err(error) => return Err(error),
        };
        let mut advance = if written == requested { written } else { written - written % self.grain };
        if advance == 0 && requested > 0 {
            self.stuck += 1;
            let broken = self.stuck > SHORT_WRITES_WITHOUT_PROGRESS_MAX;
            return if broken { Err(io::ErrorKind::WriteZero.into()) } else { Ok(()) };
        }
        self.stuck = 0;
        self.at += advance as u64;
        while let Some(piece) = self.pieces.get(self.piece)
            && piece.len() - self.inside <= advance
        {
            advance -= piece.len() - self.inside;
            (self.piece, self.inside) = (self.piece + 1, 0);
        }
        self.inside += advance;
        Ok(())
    }
}

/// Progress of a read into one buffer.
#[derive(Debug, Clone, Copy)]
pub(super) struct ReadProgress {
    filled: usize,
    needed: usize,
    direct: bool,
}

impl ReadProgress {
    /// Starts a read of at least `needed` bytes.
    pub(super) fn new(needed: usize, direct: bool) -> Self {
        Self { filled: 0, needed, direct }
    }

    pub(super) fn is_done(&self) -> bool {
        self.filled >= self.needed
    }

    pub(super) fn filled(&self) -> usize {
        self.filled
    }

    /// Records the result of a call that read bytes behind the filled part.
    pub(super) fn advance(&mut self, read: io::Result<usize>) -> io::Result<()> {
        match read {
            Ok(count) => {
                self.filled += count;
                // A direct call that ends inside a block has reached the end of the file.
                let at_end = count == 0 || self.direct && !self.filled.is_multiple_of(BLOCK_ALIGN);
                if !self.is_done() && at_end { Err(too_short()) } else { Ok(()) }
            }
            Err(error) if error.kind() == io::ErrorKind::Interrupted => Ok(()),
            Err(error) => Err(error),
        }
    }
}

/// Returns the error of a read beyond the end of the file.
#[must_use]
pub fn too_short() -> io::Error {
    io::Error::new(io::ErrorKind::UnexpectedEof, "the file is shorter than expected")
}

/// Bounce buffer of a direct read whose target is not aligned to blocks.
#[derive(Debug)]
pub(super) struct BounceBuffer {
    memory: Vec<u8>,
    aligned: usize,
    room: usize,
    skip: usize,
    needed: usize,
}

impl BounceBuffer {
    /// Creates a bounce buffer for `bytes` at `offset`. Returns `None` if the target can be read
    /// directly.
    pub(super) fn of(bytes: &[u8], offset: u64) -> Option<Self> {
        let grain = BLOCK_ALIGN as u64;
        let whole = offset.is_multiple_of(grain) && bytes.len().is_multiple_of(BLOCK_ALIGN);
        if whole && bytes.as_ptr().addr().is_multiple_of(BLOCK_ALIGN) {
            return None;
        }
        let skip = usize::try_from(offset % grain).unwrap_or(0);
        let needed = skip + bytes.len();
        let room = needed.next_multiple_of(BLOCK_ALIGN);
        let memory = vec![0; room + BLOCK_ALIGN];
        let aligned = memory.as_ptr().align_offset(BLOCK_ALIGN);
        Some(Self { memory, aligned, room, skip, needed })
    }

    /// Returns the buffer to read into. It starts with the block that contains `offset`.
    pub(super) fn blocks(&mut self) -> &mut [u8] {
        &mut self.memory[self.aligned..self.aligned + self.room]
    }

    /// Returns the number of bytes that must be read into the buffer.
    pub(super) fn needed(&self) -> usize {
        self.needed
    }

    /// Returns the requested bytes.
    pub(super) fn bytes(&self) -> &[u8] {
        &self.memory[self.aligned + self.skip..self.aligned + self.needed]
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use rand::{RngExt, SeedableRng};

    use super::*;

    fn write_all(
        pieces: Vec<Bytes>,
        offset: u64,
        direct: bool,
        mut write: impl FnMut(&[&[u8]], u64) -> io::Result<usize>,
    ) -> io::Result<()> {
        let mut progress = WriteProgress::new(pieces, offset, direct);
        while !progress.is_done() {
            let written = write(&progress.next().collect::<Vec<_>>(), progress.offset());
            progress.advance(written)?;
        }
        Ok(())
    }

    proptest! {
        /// However short or interrupted the single writes are, the file equals the pieces.
        #[test]
        fn short_and_interrupted_writes_are_completed(
            lengths in prop::collection::vec(0usize..40, 0..3000), seed: u64,
        ) {
            let mut random = rand_chacha::ChaCha8Rng::seed_from_u64(seed);
            let pieces: Vec<Bytes> =
                lengths.iter().map(|len| (0..*len).map(|_| random.random()).collect::<Vec<u8>>().into()).collect();
            let mut file = Vec::new();
            write_all(pieces.clone(), 10, false, |slices, at| {
                assert!(slices.len() <= IOVECS_MAX);
                if random.random_bool(0.2) {
                    return Err(io::ErrorKind::Interrupted.into());
                }
                assert_eq!(at, 10 + file.len() as u64);
                let all = slices.concat();
                let written = if all.is_empty() { 0 } else { random.random_range(1..=all.len()) };
                file.extend_from_slice(&all[..written]);
                Ok(written)
            }).unwrap();
            prop_assert_eq!(file, pieces.concat());
        }
    }

    #[test]
    fn short_direct_write_resumes_at_a_block_boundary() {
        let pieces = vec![Bytes::from(vec![1; BLOCK_ALIGN]), Bytes::from(vec![2; 2 * BLOCK_ALIGN])];
        let mut calls = Vec::new();
        write_all(pieces, 0, true, |slices, at| {
            let requested: usize = slices.iter().map(|slice| slice.len()).sum();
            calls.push((at, requested));
            Ok(if calls.len() == 1 { BLOCK_ALIGN + 512 } else { requested })
        })
        .unwrap();
        assert_eq!(calls, [(0, 3 * BLOCK_ALIGN), (BLOCK_ALIGN as u64, 2 * BLOCK_ALIGN)]);
    }

    #[test]
    fn no_progress_and_errors_end_the_write() {
        let pieces = || vec![Bytes::from(vec![1; BLOCK_ALIGN])];
        let stuck = write_all(pieces(), 0, true, |_, _| Ok(512)).unwrap_err();
        assert_eq!(stuck.kind(), io::ErrorKind::WriteZero);
        let zero = write_all(pieces(), 0, false, |_, _| Ok(0)).unwrap_err();
        assert_eq!(zero.kind(), io::ErrorKind::WriteZero);
        let full = write_all(pieces(), 0, false, |_, _| Err(io::ErrorKind::StorageFull.into())).unwrap_err();
        assert_eq!(full.kind(), io::ErrorKind::StorageFull);
    }

    #[test]
    fn read_ends_when_filled_or_at_end_of_file() {
        let mut read = ReadProgress::new(5000, true);
        read.advance(Err(io::ErrorKind::Interrupted.into())).unwrap();
        read.advance(Ok(4096)).unwrap();
        assert!(!read.is_done());
        read.advance(Ok(904)).unwrap();
        assert!(read.is_done());
        let mut read = ReadProgress::new(5000, true);
        assert_eq!(read.advance(Ok(904)).unwrap_err().kind(), io::ErrorKind::UnexpectedEof);
        let mut read = ReadProgress::new(5000, false);
        read.advance(Ok(904)).unwrap();
        assert_eq!(read.advance(Ok(0)).unwrap_err().kind(), io::ErrorKind::UnexpectedEof);
    }
}
