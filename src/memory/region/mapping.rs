//! The mapping itself: addresses of it, never access; and what is asked of the kernel for it.

use std::io;
use std::ops::Range;
use std::ptr::NonNull;
use std::sync::atomic::AtomicU64;

use super::super::buddy::BLOCK_BYTES;

pub(super) fn too_large() -> io::Error {
    io::Error::new(io::ErrorKind::InvalidInput, "memory capacity exceeds the address space")
}

/// The memory itself: whole 2 MiB blocks at a 2 MiB boundary, and before them, as many as the front has.
pub(super) struct Mapping {
    base: NonNull<u8>,
    pub(super) bytes: usize,
    front_bytes: usize,
    backing: backend::Backing,
}

// SAFETY: the mapping is plain memory that belongs to no thread; who may touch which part of it is settled by the
// handles above, whatever thread they are on.
unsafe impl Send for Mapping {}
// SAFETY: as above; `&Mapping` alone gives addresses, never access.
unsafe impl Sync for Mapping {}

impl Mapping {
    pub(super) fn new(blocks: usize) -> io::Result<Self> {
        let bytes = blocks.checked_mul(BLOCK_BYTES).ok_or_else(too_large)?;
        let (base, backing) = backend::map(bytes)?;
        Ok(Self { base, bytes, front_bytes: 0, backing })
    }

    #[cfg(not(miri))]
    pub(super) fn shared(
        file: impl std::os::fd::AsFd,
        front_bytes: usize,
        blocks: usize,
    ) -> io::Result<Self> {
        assert!(front_bytes.is_multiple_of(BLOCK_BYTES), "segments begin at a block's boundary");
        let bytes = blocks.checked_mul(BLOCK_BYTES).ok_or_else(too_large)?;
        let whole = bytes.checked_add(front_bytes).ok_or_else(too_large)?;
        let (start, backing) = backend::map_shared(file, whole)?;
        // SAFETY: the mapping has `front_bytes` and `bytes` from `start` on.
        let base = unsafe { start.add(front_bytes) };
        Ok(Self { base, bytes, front_bytes, backing })
    }

    pub(super) fn front(&self) -> &[AtomicU64] {
        if self.front_bytes == 0 {
            return &[];
        }
        // SAFETY: the front lies in the mapping, right before `base`.
        let start = unsafe { self.base.sub(self.front_bytes) };
        // SAFETY: mapped as long as `self` is, page-aligned and initialised (a hole of the file reads as zeroes). `at` gives no
        // address before `base`, so these bytes are only ever accessed as atomics.
        unsafe { std::slice::from_raw_parts(start.cast::<AtomicU64>().as_ptr(), self.front_bytes / 8) }
    }

    pub(super) fn at(&self, offset: usize, len: usize) -> *mut u8 {
        assert!(offset + len <= self.bytes, "range {offset}+{len} of a region of {}", self.bytes);
        self.base.as_ptr().wrapping_add(offset)
    }

    /// Asks the kernel for huge pages, or for none. The front gets small pages: it is used in small pieces.
    pub(super) fn advise_huge_pages(&self, is_wanted: bool) {
        backend::advise_huge_pages(self.front_at(0), self.front_bytes, false);
        backend::advise_huge_pages(self.at(0, self.bytes), self.bytes, is_wanted);
    }

    /// Bytes before the segments.
    pub(super) fn front_bytes(&self) -> usize {
        self.front_bytes
    }

    /// Takes the pages of `range`, which counts from the front, or says that there are none.
    pub(super) fn populate(&self, range: Range<usize>) -> io::Result<()> {
        let whole = self.front_bytes + self.bytes;
        assert!(range.start <= range.end && range.end <= whole, "{range:?} of a mapping of {whole}");
        backend::populate(&self.backing, self.front_at(range.start), range)
    }

    /// The same of a range that may have its pages, at a small part of the cost then: they are not made ready to be written to.
    #[cfg(not(miri))]
    pub(super) fn fill(&self, range: Range<usize>) -> io::Result<()> {
        let whole = self.front_bytes + self.bytes;
        assert!(range.start <= range.end && range.end <= whole, "{range:?} of a mapping of {whole}");
        backend::fill(&self.backing, self.front_at(range.start), range)
    }

    fn front_at(&self, offset: usize) -> *mut u8 {
        self.base.as_ptr().wrapping_sub(self.front_bytes).wrapping_add(offset)
    }

    /// Takes `range` of the segments out of the page table of this process. Of a file the pages stay, and each is found again
    /// when it is touched; private memory is left alone.
    pub(super) fn unlink(&self, range: Range<usize>) {
        backend::unlink(&self.backing, self.at(range.start, range.len()), range.len());
    }

    /// Parts of `range`, which counts from the front, without pages.
    #[cfg(not(miri))]
    pub(super) fn holes(&self, range: Range<usize>) -> io::Result<Vec<Range<usize>>> {
        backend::holes(&self.backing, range)
    }

    /// Gives the pages of `range` of the front back to the kernel: it reads as zeroes. They stay where the kernel refuses.
    #[cfg(not(miri))]
    pub(super) fn discard_front(&self, range: Range<usize>) {
        assert!(range.end <= self.front_bytes, "{range:?} of the front");
        backend::punch(&self.backing, range);
    }

    /// Gives the pages of `bytes` at `offset`, in which no range is handed out, back to the kernel.
    pub(super) fn discard(&self, offset: usize, bytes: usize) {
        backend::discard(&self.backing, self.at(offset, bytes), bytes);
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        backend::unmap(&self.backing);
    }
}

#[cfg(not(miri))]
mod backend {
    use std::ffi::c_void;
    use std::io;
    use std::ops::Range;
    use std::os::fd::{AsFd, OwnedFd};
    use std::ptr::{NonNull, null_mut};

    use rustix::fs::{FallocateFlags, SeekFrom, fallocate, seek};
    use rustix::io::Errno;
    use rustix::mm::{Advice, MapFlags, ProtFlags, madvise, mmap, mmap_anonymous, munmap};

    use super::{BLOCK_BYTES, too_large};

    /// What `munmap` needs: one block more than is used, for the alignment.
    pub(super) struct Backing {
        start: *mut c_void,
        bytes: usize,
        /// What is mapped, if it is not private.
        file: Option<OwnedFd>,
    }

    pub(super) fn map(bytes: usize) -> io::Result<(NonNull<u8>, Backing)> {
        let with_slack = bytes.checked_add(BLOCK_BYTES).ok_or_else(too_large)?;
        let access = ProtFlags::READ | ProtFlags::WRITE;
        let flags = MapFlags::PRIVATE | MapFlags::NORESERVE;
        // SAFETY: a new anonymous mapping at an address of the kernel's choice touches no memory in use.
        let start = unsafe { mmap_anonymous(null_mut(), with_slack, access, flags) }?;
        let aligned = start.wrapping_byte_add(start.addr().next_multiple_of(BLOCK_BYTES) - start.addr());
        let base = NonNull::new(aligned.cast()).ok_or_else(|| io::Error::other("mapping at address 0"))?;
        Ok((base, Backing { start, bytes: with_slack, file: None }))
    }

    /// Like [`map`], for the first `bytes` of `file`.
    pub(super) fn map_shared(file: impl AsFd, bytes: usize) -> io::Result<(NonNull<u8>, Backing)> {
        let with_slack = bytes.checked_add(BLOCK_BYTES).ok_or_else(too_large)?;
        let flags = MapFlags::PRIVATE | MapFlags::NORESERVE;
        // SAFETY: as in `map`; addresses only, which nobody can access.
        let start = unsafe { mmap_anonymous(null_mut(), with_slack, ProtFlags::empty(), flags) }?;
        let descriptor = Some(file.as_fd().try_clone_to_owned()?);
        let backing = Backing { start, bytes: with_slack, file: descriptor };
        let aligned = start.wrapping_byte_add(start.addr().next_multiple_of(BLOCK_BYTES) - start.addr());
        let access = ProtFlags::READ | ProtFlags::WRITE;
        // SAFETY: replaces a part of the mapping just made, of which nobody knows yet. Another process that stored there, or
        // cut the file short, would break what the handles promise: the caller holds the file's lock and its mode is 0600.
        let mapped = unsafe { mmap(aligned, bytes, access, MapFlags::SHARED | MapFlags::FIXED, file, 0) };
        if let Err(error) = mapped {
            unmap(&backing);
            return Err(error.into());
        }
        let base = NonNull::new(aligned.cast()).ok_or_else(|| io::Error::other("mapping at address 0"))?;
        Ok((base, backing))
    }

    pub(super) fn advise_huge_pages(start: *mut u8, bytes: usize, is_wanted: bool) {
        let advice = if is_wanted { Advice::LinuxHugepage } else { Advice::LinuxNoHugepage };
        // SAFETY: the range lies in the mapping, and the advice changes no content. Its failure only costs
        // speed (a kernel without transparent huge pages), so it is not an error.
        let _advised = unsafe { madvise(start.cast(), bytes, advice) };
    }

    /// Takes the pages of `range` out of the file.
    pub(super) fn punch(backing: &Backing, range: Range<usize>) {
        let Some(file) = &backing.file else { return };
        let flags = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
        let punched = fallocate(file, flags, range.start as u64, range.len() as u64);
        debug_assert!(punched.is_ok(), "of a file in memory");
    }

    /// Drops the pages of a piece of the mapping in which no range was handed out.
    pub(super) fn discard(backing: &Backing, start: *mut u8, bytes: usize) {
        // Of a file the pages stay unless they are taken out of it.
        let advice = if backing.file.is_some() { Advice::LinuxRemove } else { Advice::LinuxDontNeed };
        // SAFETY: the piece lies in the mapping, and no `Fill` or `Slice` of it exists nor can be made meanwhile: its only
        // handle is borrowed mutably by the caller. The bytes stay initialised: they read as zeroes.
        let discarded = unsafe { madvise(start.cast(), bytes, advice) };
        debug_assert!(discarded.is_ok(), "advice on a mapping of our own");
    }

    pub(super) fn unlink(backing: &Backing, start: *mut u8, bytes: usize) {
        if backing.file.is_some() {
            // SAFETY: the range lies in the mapping, which is shared: what is stored in it is the file's and stays, for those who
            // read or write it meanwhile, too.
            let unlinked = unsafe { madvise(start.cast(), bytes, Advice::LinuxDontNeed) };
            debug_assert!(unlinked.is_ok(), "advice on a mapping of our own");
        }
    }

    /// A touch of each page, of which the kernel says whether it would have ended the process. Unlike `fallocate` it gives huge
    /// pages where those are advised; before Linux 5.14 there is only that.
    pub(super) fn populate(backing: &Backing, start: *mut u8, range: Range<usize>) -> io::Result<()> {
        touch(backing, (start, Advice::LinuxPopulateWrite), range)
    }

    /// As a reader: the kernel goes through those that are there many at a time, and a hole gets a page as at a write.
    pub(super) fn fill(backing: &Backing, start: *mut u8, range: Range<usize>) -> io::Result<()> {
        touch(backing, (start, Advice::LinuxPopulateRead), range)
    }

    fn touch(backing: &Backing, (start, how): (*mut u8, Advice), range: Range<usize>) -> io::Result<()> {
        // SAFETY: the range lies in the mapping. What is in its pages stays.
        let populated = unsafe { madvise(start.cast(), range.len(), how) };
        match (populated, &backing.file) {
            (Err(Errno::FAULT), _) => Err(io::ErrorKind::StorageFull.into()),
            (Err(Errno::INVAL), Some(file)) => {
                Ok(fallocate(file, FallocateFlags::KEEP_SIZE, range.start as u64, range.len() as u64)?)
            }
            (populated, _) => Ok(populated?),
        }
    }

    pub(super) fn holes(backing: &Backing, range: Range<usize>) -> io::Result<Vec<Range<usize>>> {
        let Some(file) = &backing.file else { return Ok(Vec::new()) };
        let offset = |found: u64| usize::try_from(found).unwrap_or(range.end).min(range.end);
        let (mut holes, mut at) = (Vec::new(), range.start);
        while at < range.end {
            let from = offset(seek(file, SeekFrom::Hole(at as u64))?);
            let until = match seek(file, SeekFrom::Data(from as u64)) {
                Ok(data) => offset(data),
                // No data behind.
                Err(Errno::NXIO) => range.end,
                Err(error) => return Err(error.into()),
            };
            if from < until {
                holes.push(from..until);
            }
            at = until;
        }
        Ok(holes)
    }

    pub(super) fn unmap(backing: &Backing) {
        // SAFETY: exactly what `map` mapped, once: the owner is being dropped, and every handle held that owner.
        let unmapped = unsafe { munmap(backing.start, backing.bytes) };
        debug_assert!(unmapped.is_ok(), "munmap of a mapping of our own");
    }
}

#[cfg(miri)]
mod backend {
    use std::alloc::{Layout, alloc_zeroed, dealloc};
    use std::io;
    use std::ops::Range;
    use std::ptr::NonNull;

    use super::BLOCK_BYTES;

    pub(super) struct Backing {
        start: NonNull<u8>,
        layout: Layout,
    }

    pub(super) fn map(bytes: usize) -> io::Result<(NonNull<u8>, Backing)> {
        let layout = Layout::from_size_align(bytes, BLOCK_BYTES).map_err(io::Error::other)?;
        // SAFETY: a region has at least one block, so the layout is not empty.
        let start = unsafe { alloc_zeroed(layout) };
        let start = NonNull::new(start).ok_or(io::ErrorKind::OutOfMemory)?;
        Ok((start, Backing { start, layout }))
    }

    pub(super) fn discard(_: &Backing, start: *mut u8, bytes: usize) {
        // SAFETY: as there.
        unsafe { start.write_bytes(0, bytes) };
    }

    pub(super) fn advise_huge_pages(_: *mut u8, _: usize, _: bool) {}

    pub(super) fn populate(_: &Backing, _: *mut u8, _: Range<usize>) -> io::Result<()> {
        Ok(())
    }

    pub(super) fn unlink(_: &Backing, _: *mut u8, _: usize) {}

    pub(super) fn unmap(backing: &Backing) {
        // SAFETY: allocated by `map` with this layout, freed once: the owner is being dropped.
        unsafe { dealloc(backing.start.as_ptr(), backing.layout) };
    }
}
