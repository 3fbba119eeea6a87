//! Checksums of what an earlier process left, looked at before anybody is given it.
//!
//! Stores of a process that dies are whole; a file in memory can still be written to by others, and memory has faults. A block
//! that does not have the checksum that its sender gave is not shown: it counts as lost, and what its shuffle said is compared
//! with what is there as for any other lost block. One of which the sender gave none (0) is taken as it is.
//!
//! It is done at the start, where nobody waits for a runtime's thread, by as many threads as there are cores: a core sums
//! several GB/s, so 10 GB are a matter of a second divided by the cores.

use std::thread;

/// So many bytes are worth a thread.
const BYTES_PER_THREAD: usize = 512 << 10;

/// A block to be looked at: what it should sum to, and its bytes.
pub(super) struct Sum<'a> {
    pub(super) crc: u32,
    pub(super) bytes: Vec<&'a [u8]>,
}

impl Sum<'_> {
    fn is_right(&self) -> bool {
        let mut hasher = crc32fast::Hasher::new();
        self.bytes.iter().for_each(|bytes| hasher.update(bytes));
        self.crc == 0 || hasher.finalize() == self.crc
    }

    fn len(&self) -> usize {
        self.bytes.iter().map(|bytes| bytes.len()).sum()
    }
}

/// Which of `sums` are right, in their order.
pub(super) fn are_right(sums: &[Sum<'_>]) -> Vec<bool> {
    let bytes: usize = sums.iter().map(Sum::len).sum();
    let threads = (bytes / BYTES_PER_THREAD).min(thread::available_parallelism().map_or(1, usize::from));
    if threads < 2 {
        return sums.iter().map(Sum::is_right).collect();
    }
    let share = sums.len().div_ceil(threads);
    let look = |some: &[Sum<'_>]| some.iter().map(Sum::is_right).collect::<Vec<_>>();
    thread::scope(|scope| {
        let begun: Vec<_> = sums
            .chunks(share)
            .map(|some| {
                let named = thread::Builder::new().name("memory sums".to_owned());
                (some, named.spawn_scoped(scope, move || look(some)))
            })
            .collect();
        // Where there is no thread to be had, this one does it.
        let ended = begun.into_iter().flat_map(|(some, thread)| {
            let seen = thread.ok().and_then(|thread| thread.join().ok());
            seen.unwrap_or_else(|| look(some))
        });
        ended.collect()
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_wrong_sum_is_found_among_right_ones_by_one_thread_and_by_several() {
        let bytes: Vec<u8> = (0..64u32 << 10).map(|at| at.to_le_bytes()[0]).collect();
        let (left, right) = bytes.split_at(1000);
        let crc = crc32fast::hash(&bytes);
        for count in [0, 3, 100] {
            let sum = |at: usize| Sum { crc: if at == 2 { crc ^ 1 } else { crc }, bytes: vec![left, right] };
            let seen = are_right(&(0..count).map(sum).collect::<Vec<_>>());
            assert_eq!(seen, (0..count).map(|at| at != 2).collect::<Vec<_>>());
        }
        assert_eq!(are_right(&[Sum { crc: 0, bytes: vec![right] }]), [true], "none was given");
    }
}
