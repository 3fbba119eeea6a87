//! The mapping of a region and the advice given to the kernel about it. It returns addresses but
//! never accesses segments.

use std::io;
use std::ops::Range;
use std::ptr::NonNull;
use std::sync::atomic::AtomicU64;

use super::buddy::BLOCK_BYTES;

pub(super) fn too_large() -> io::Error {
    io::Error::new(io::ErrorKind::InvalidInput, "memory capacity exceeds the address space")
}

/// The memory: whole 2 MiB blocks at a 2 MiB boundary, preceded by the blocks of the front.
pub(super) struct Mapping {
    base: NonNull<u8>,
    pub(super) bytes: usize,
    front_bytes: usize,
    backing: backend::MappingSource,
}

// SAFETY: the mapping is plain memory that belongs to no thread. The handles above decide who may
// touch which part of it, on whatever thread they are.
unsafe impl Send for Mapping {}
// SAFETY: as above; `&Mapping` alone returns addresses and gives no access to segments.
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
        assert!(front_bytes.is_multiple_of(BLOCK_BYTES), "segments must begin at the boundary of a block");
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
        // SAFETY: the front is in the mapping, directly before `base`.
        let start = unsafe { self.base.sub(self.front_bytes) };
        // SAFETY: mapped while `self` exists, page-aligned and initialised (a hole of the file
        // reads as zeros). `at` returns no address before `base`, so these bytes are only ever
        // accessed as atomics.
        unsafe { std::slice::from_raw_parts(start.cast::<AtomicU64>().as_ptr(), self.front_bytes / 8) }
    }

    pub(super) fn at(&self, offset: usize, len: usize) -> *mut u8 {
        assert!(offset + len <= self.bytes, "range {offset}+{len} exceeds a region of {} bytes", self.bytes);
        self.base.as_ptr().wrapping_add(offset)
    }

    /// Advises huge pages for the segments, or advises against them. The front gets small pages,
    /// because it is used in small pieces.
    pub(super) fn advise_huge_pages(&self, is_wanted: bool) {
        backend::advise_huge_pages(self.front_at(0), self.front_bytes, false);
        backend::advise_huge_pages(self.at(0, self.bytes), self.bytes, is_wanted);
    }

    /// Advises huge pages for the first `bytes` of the segments.
    pub(super) fn advise_used_pages(&self, bytes: usize) {
        backend::advise_huge_pages(self.at(0, bytes), bytes, true);
    }

    /// Returns the bytes before the segments.
    pub(super) fn front_bytes(&self) -> usize {
        self.front_bytes
    }

    /// Allocates the pages of `range`, which counts from the front. Fails if there are none.
    pub(super) fn populate(&self, range: Range<usize>) -> io::Result<()> {
        let whole = self.front_bytes + self.bytes;
        assert!(
            range.start <= range.end && range.end <= whole,
            "{range:?} exceeds a mapping of {whole} bytes"
        );
        backend::populate(&self.backing, self.front_at(range.start), range)
    }

    /// Allocates missing pages of `range` without making them writable, which is much cheaper where
    /// most pages exist.
    #[cfg(not(miri))]
    pub(super) fn fill(&self, range: Range<usize>) -> io::Result<()> {
        let whole = self.front_bytes + self.bytes;
        assert!(
            range.start <= range.end && range.end <= whole,
            "{range:?} exceeds a mapping of {whole} bytes"
        );
        backend::fill(&self.backing, self.front_at(range.start), range)
    }

    fn front_at(&self, offset: usize) -> *mut u8 {
        self.base.as_ptr().wrapping_sub(self.front_bytes).wrapping_add(offset)
    }

    /// Removes `range` of the segments from the page table of this process. Pages of a file stay
    /// and are mapped again on access. Private memory is left alone.
    pub(super) fn unlink(&self, range: Range<usize>) {
        backend::unlink(&self.backing, self.at(range.start, range.len()), range.len());
    }

    /// Returns the parts of `range`, which counts from the front, that have no pages.
    #[cfg(not(miri))]
    pub(super) fn holes(&self, range: Range<usize>) -> io::Result<Vec<Range<usize>>> {
        backend::holes(&self.backing, range)
    }

    /// Gives the pages of `range` of the front back to the kernel, after which it reads as zeros.
    /// The pages stay if the kernel refuses.
    #[cfg(not(miri))]
    pub(super) fn discard_front(&self, range: Range<usize>) {
        assert!(range.end <= self.front_bytes, "{range:?} exceeds the front");
        backend::punch(&self.backing, range);
    }

    /// Gives the pages of `bytes` at `offset` back to the kernel. No range of them may be handed
    /// out.
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

    /// The whole mapping and its file.
    pub(super) struct MappingSource {
        start: *mut c_void,
        /// One block more than is used, for the alignment.
        bytes: usize,
        /// The mapped file, unless the memory is private.
        file: Option<OwnedFd>,
    }

    pub(super) fn map(bytes: usize) -> io::Result<(NonNull<u8>, MappingSource)> {
        let with_slack = bytes.checked_add(BLOCK_BYTES).ok_or_else(too_large)?;
        let access = ProtFlags::READ | ProtFlags::WRITE;
        let flags = MapFlags::PRIVATE | MapFlags::NORESERVE;
        // SAFETY: a new anonymous mapping at an address of the kernel's choice touches no memory in
        // use.
        let start = unsafe { mmap_anonymous(null_mut(), with_slack, access, flags) }?;
        let aligned = start.wrapping_byte_add(start.addr().next_multiple_of(BLOCK_BYTES) - start.addr());
        let base = NonNull::new(aligned.cast()).ok_or_else(|| io::Error::other("mapping at address 0"))?;
        Ok((base, MappingSource { start, bytes: with_slack, file: None }))
    }

    /// Maps the first `bytes` of `file`, like [`map`].
    pub(super) fn map_shared(file: impl AsFd, bytes: usize) -> io::Result<(NonNull<u8>, MappingSource)> {
        let with_slack = bytes.checked_add(BLOCK_BYTES).ok_or_else(too_large)?;
        let flags = MapFlags::PRIVATE | MapFlags::NORESERVE;
        // SAFETY: as in `map`; it reserves addresses only, which nobody can access.
        let start = unsafe { mmap_anonymous(null_mut(), with_slack, ProtFlags::empty(), flags) }?;
        let descriptor = Some(file.as_fd().try_clone_to_owned()?);
        let backing = MappingSource { start, bytes: with_slack, file: descriptor };
        let aligned = start.wrapping_byte_add(start.addr().next_multiple_of(BLOCK_BYTES) - start.addr());
        let access = ProtFlags::READ | ProtFlags::WRITE;
        // SAFETY: replaces a part of the mapping just made, which nobody knows yet. Another process
        // that stored there, or truncated the file, would break the promises of the handles: the
        // caller holds the file's lock and its mode is 0600.
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
        // SAFETY: the range is in the mapping, and the advice changes no content. A failure only
        // costs speed (a kernel without transparent huge pages), so it is not an error.
        let _advised = unsafe { madvise(start.cast(), bytes, advice) };
    }

    /// Removes the pages of `range` from the file.
    pub(super) fn punch(backing: &MappingSource, range: Range<usize>) {
        let Some(file) = &backing.file else { return };
        let flags = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
        let punched = fallocate(file, flags, range.start as u64, range.len() as u64);
        debug_assert!(punched.is_ok(), "tmpfs must support punched holes");
    }

    /// Drops the pages of a piece of the mapping of which no range was handed out.
    pub(super) fn discard(backing: &MappingSource, start: *mut u8, bytes: usize) {
        // Pages of a file stay unless they are removed from it.
        let advice = if backing.file.is_some() { Advice::LinuxRemove } else { Advice::LinuxDontNeed };
        // SAFETY: the piece is in the mapping, and no `Fill` or `Slice` of it exists or can be
        // created meanwhile: its only handle is borrowed mutably by the caller. The bytes stay
        // initialised: they read as zeros.
        let discarded = unsafe { madvise(start.cast(), bytes, advice) };
        debug_assert!(discarded.is_ok(), "advice on an own mapping cannot fail");
    }

    pub(super) fn unlink(backing: &MappingSource, start: *mut u8, bytes: usize) {
        if backing.file.is_some() {
            // SAFETY: the range is in the mapping, which is shared: stored data belongs to the file
            // and stays, also for threads that read or write it meanwhile.
            let unlinked = unsafe { madvise(start.cast(), bytes, Advice::LinuxDontNeed) };
            debug_assert!(unlinked.is_ok(), "advice on an own mapping cannot fail");
        }
    }

    /// Touches each page; the kernel reports a page for which a plain access would have ended the
    /// process. Unlike `fallocate` it gives huge pages where they are advised. Before Linux 5.14
    /// only `fallocate` exists.
    pub(super) fn populate(backing: &MappingSource, start: *mut u8, range: Range<usize>) -> io::Result<()> {
        touch(backing, start, Advice::LinuxPopulateWrite, range)
    }

    /// Touches each page like a reader. The kernel processes existing pages in batches, and a hole
    /// gets a page as with a write.
    pub(super) fn fill(backing: &MappingSource, start: *mut u8, range: Range<usize>) -> io::Result<()> {
        touch(backing, start, Advice::LinuxPopulateRead, range)
    }

    fn touch(backing: &MappingSource, start: *mut u8, how: Advice, range: Range<usize>) -> io::Result<()> {
        // SAFETY: the range is in the mapping. The contents of its pages stay.
        let populated = unsafe { madvise(start.cast(), range.len(), how) };
        match (populated, &backing.file) {
            (Err(Errno::FAULT), _) => Err(io::ErrorKind::StorageFull.into()),
            (Err(Errno::INVAL), Some(file)) => {
                Ok(fallocate(file, FallocateFlags::KEEP_SIZE, range.start as u64, range.len() as u64)?)
            }
            (populated, _) => Ok(populated?),
        }
    }

    pub(super) fn holes(backing: &MappingSource, range: Range<usize>) -> io::Result<Vec<Range<usize>>> {
        let Some(file) = &backing.file else { return Ok(Vec::new()) };
        let offset = |found: u64| usize::try_from(found).unwrap_or(range.end).min(range.end);
        let (mut holes, mut at) = (Vec::new(), range.start);
        while at < range.end {
            let from = offset(seek(file, SeekFrom::Hole(at as u64))?);
            let until = match seek(file, SeekFrom::Data(from as u64)) {
                Ok(data) => offset(data),
                // No data follows.
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

    pub(super) fn unmap(backing: &MappingSource) {
        // SAFETY: exactly the range that was mapped, once. Either the owner is being dropped, and
        // every handle held that owner, or the file could not be mapped and there is no owner.
        let unmapped = unsafe { munmap(backing.start, backing.bytes) };
        debug_assert!(unmapped.is_ok(), "munmap of an own mapping cannot fail");
    }
}

#[cfg(miri)]
mod backend {
    use std::alloc::{Layout, alloc_zeroed, dealloc};
    use std::io;
    use std::ops::Range;
    use std::ptr::NonNull;

    use super::BLOCK_BYTES;

    pub(super) struct MappingSource {
        start: NonNull<u8>,
        layout: Layout,
    }

    pub(super) fn map(bytes: usize) -> io::Result<(NonNull<u8>, MappingSource)> {
        let layout = Layout::from_size_align(bytes, BLOCK_BYTES).map_err(io::Error::other)?;
        // SAFETY: a region has at least one block, so the layout is not empty.
        let start = unsafe { alloc_zeroed(layout) };
        let start = NonNull::new(start).ok_or(io::ErrorKind::OutOfMemory)?;
        Ok((start, MappingSource { start, layout }))
    }

    pub(super) fn discard(_: &MappingSource, start: *mut u8, bytes: usize) {
        // SAFETY: as in `discard` of the mapped backend: the piece is in the allocation and has no
        // other handle.
        unsafe { start.write_bytes(0, bytes) };
    }

    pub(super) fn advise_huge_pages(_: *mut u8, _: usize, _: bool) {}

    pub(super) fn populate(_: &MappingSource, _: *mut u8, _: Range<usize>) -> io::Result<()> {
        Ok(())
    }

    pub(super) fn unlink(_: &MappingSource, _: *mut u8, _: usize) {}

    pub(super) fn unmap(backing: &MappingSource) {
        // SAFETY: allocated by `map` with this layout and freed once: the owner is being dropped.
        unsafe { dealloc(backing.start.as_ptr(), backing.layout) };
    }
}
