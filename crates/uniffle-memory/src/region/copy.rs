//! Copies that do not disturb the cache: large pieces are written to memory with non-temporal
//! stores.
//!
//! A block is read again seconds later, by a disk or a socket. A plain copy first loads every line
//! that it overwrites, and evicts the hot read chunk from the cache. A streaming store does
//! neither. For a small piece, the incomplete lines at its ends and the fence cost more than that
//! saves (docs/design/data-path.md §2).
//!
//! This module does not decide which range may be written. Its one function is safe: it copies
//! between two slices of equal length.

/// Copies of at least this length use non-temporal stores, on an x86-64 CPU with AVX.
pub(super) const STREAM_BYTES_MIN: usize = 4 << 10;

/// Copies `from` to `to`, which have the same length.
pub(super) fn copy(to: &mut [u8], from: &[u8]) {
    assert_eq!(to.len(), from.len(), "source and target must have equal lengths");
    #[cfg(all(target_arch = "x86_64", not(miri)))]
    if from.len() >= STREAM_BYTES_MIN && stream::copy(to, from) {
        return;
    }
    to.copy_from_slice(from);
}

#[cfg(all(target_arch = "x86_64", not(miri)))]
mod stream {
    use std::arch::x86_64::{
        __m256i, __m512i, _mm_sfence, _mm256_loadu_si256, _mm256_stream_si256, _mm512_loadu_si512,
        _mm512_stream_si512,
    };

    /// A cache line: the unit that a streaming store should complete.
    const LINE_BYTES: usize = 64;

    /// Copies whole lines with streaming stores and the ends with plain ones. Returns false and
    /// copies nothing on a CPU without AVX.
    pub(super) fn copy(to: &mut [u8], from: &[u8]) -> bool {
        let wide = is_x86_feature_detected!("avx512f");
        if !wide && !is_x86_feature_detected!("avx") {
            return false;
        }
        let head = to.as_ptr().align_offset(LINE_BYTES).min(to.len());
        let (to_head, to) = to.split_at_mut(head);
        let (from_head, from) = from.split_at(head);
        to_head.copy_from_slice(from_head);
        let lines = to.len() / LINE_BYTES * LINE_BYTES;
        let (to, to_tail) = to.split_at_mut(lines);
        let (from, from_tail) = from.split_at(lines);
        if wide {
            // SAFETY: the CPU has AVX-512F; `to` begins at a line, and both are whole lines of
            // equal length.
            unsafe { lines_avx512(to, from) }
        } else {
            // SAFETY: the CPU has AVX; `to` begins at a line, and both are whole lines of equal
            // length.
            unsafe { lines_avx(to, from) }
        }
        to_tail.copy_from_slice(from_tail);
        true
    }

    // Loops over positions, not iterators: without link-time optimization an iterator's `next` is a
    // call per line.

    /// # Safety
    /// Needs AVX-512F. `to` begins at a multiple of 64; `from` has the length of `to`, a multiple
    /// of 64.
    #[target_feature(enable = "avx512f")]
    unsafe fn lines_avx512(to: &mut [u8], from: &[u8]) {
        debug_assert!(to.as_ptr().addr().is_multiple_of(LINE_BYTES) && to.len() == from.len());
        let mut at = 0;
        while at < from.len() {
            // SAFETY: 64 bytes of a slice are read, at any alignment.
            let line = unsafe { _mm512_loadu_si512(from.as_ptr().wrapping_add(at).cast::<__m512i>()) };
            // SAFETY: 64 bytes of a slice that is ours alone are written, at a multiple of 64.
            unsafe { _mm512_stream_si512(to.as_mut_ptr().wrapping_add(at).cast::<__m512i>(), line) };
            at += LINE_BYTES;
        }
        // Streaming stores are not ordered with others, not even by a lock. The fence orders them
        // before any store that tells another thread about these bytes, as `_mm512_stream_si512`
        // requires before `to` is used.
        _mm_sfence();
    }

    /// # Safety
    /// Needs AVX. `to` begins at a multiple of 64; `from` has the length of `to`, a multiple of 64.
    #[target_feature(enable = "avx")]
    unsafe fn lines_avx(to: &mut [u8], from: &[u8]) {
        const HALF_BYTES: usize = LINE_BYTES / 2;
        debug_assert!(to.as_ptr().addr().is_multiple_of(LINE_BYTES) && to.len() == from.len());
        let mut at = 0;
        while at < from.len() {
            // SAFETY: 32 bytes of a slice are read, at any alignment.
            let half = unsafe { _mm256_loadu_si256(from.as_ptr().wrapping_add(at).cast::<__m256i>()) };
            // SAFETY: 32 bytes of a slice that is ours alone are written, at a multiple of 32.
            unsafe { _mm256_stream_si256(to.as_mut_ptr().wrapping_add(at).cast::<__m256i>(), half) };
            at += HALF_BYTES;
        }
        // See `lines_avx512`.
        _mm_sfence();
    }

    #[cfg(test)]
    mod tests {
        use super::*;

        /// Also covers the narrow loop on a machine that would always use the wide one.
        #[test]
        fn both_widths_copy_whole_lines() {
            let from: Vec<u8> = (0..4096u32).map(|n| n.to_le_bytes()[0] ^ n.to_le_bytes()[1]).collect();
            let mut room = vec![0; 4096 + LINE_BYTES];
            let start = room.as_ptr().align_offset(LINE_BYTES);
            if is_x86_feature_detected!("avx") {
                // SAFETY: the CPU has AVX; `start` is at a line, and both have 4,096 bytes.
                unsafe { lines_avx(&mut room[start..start + 4096], &from) };
                assert_eq!(room[start..start + 4096], from);
            }
            room.fill(0);
            if is_x86_feature_detected!("avx512f") {
                // SAFETY: the CPU has AVX-512F; `start` is at a line, and both have 4,096 bytes.
                unsafe { lines_avx512(&mut room[start..start + 4096], &from) };
                assert_eq!(room[start..start + 4096], from);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Covers every alignment of both ends of the target within a line, lengths around and well
    /// above the threshold, and guards on both sides.
    #[test]
    fn every_alignment_and_length_is_copied_exactly() {
        let lengths: &[usize] = if cfg!(miri) {
            &[0, 1, STREAM_BYTES_MIN]
        } else {
            &[
                0,
                1,
                63,
                STREAM_BYTES_MIN - 1,
                STREAM_BYTES_MIN,
                STREAM_BYTES_MIN + 1,
                14 << 10,
                (14 << 10) + 61,
            ]
        };
        let step = if cfg!(miri) { 21 } else { 1 };
        let source: Vec<u8> = (0..16_384u32 + 128).map(|n| (n * 7 + n / 251).to_le_bytes()[0]).collect();
        let mut target = vec![0xEE; source.len() + 64];
        for &length in lengths {
            for to in (0..64).step_by(step) {
                // Each alignment of the target with an aligned source, an equal one and another
                // one.
                for from in [0, to, (to * 5 + 3) % 64] {
                    target[..length + 128].fill(0xEE);
                    copy(&mut target[to..to + length], &source[from..from + length]);
                    assert_eq!(target[to..to + length], source[from..from + length], "{length} {from} {to}");
                    assert!(
                        target[..to].iter().all(|byte| *byte == 0xEE),
                        "a copy of {length} bytes from {from} to {to} overwrote bytes before the target"
                    );
                    assert!(
                        target[to + length..length + 128].iter().all(|byte| *byte == 0xEE),
                        "bytes after the target were overwritten"
                    );
                }
            }
        }
    }
}
