//! Files that are taken over, resized or refused, or that other programs remove, truncate or extend
//! meanwhile. Also blocks whose bytes were changed.

use super::*;

fn shm() -> tempfile::TempDir {
    tempfile::tempdir_in("/dev/shm").unwrap()
}

fn in_directory(
    path: &std::path::Path,
    change: impl FnOnce(&mut MemoryConfig, &mut Owner),
) -> Result<Arc<Memory>, MemoryFileError> {
    let (mut config, mut owner) = (config(Backing::Directory(path.to_owned())), owner());
    change(&mut config, &mut owner);
    Memory::open(&config, &owner, None, &Registry::new())
}

/// Leaves a file with one block of a process that has ended.
fn leave_block(path: &std::path::Path) {
    with_one_block(path).release();
}

/// Returns the path and the length of the only file in `directory`.
fn file_in(directory: &std::path::Path) -> (std::path::PathBuf, u64) {
    let entry = std::fs::read_dir(directory).unwrap().next().unwrap().unwrap();
    (entry.path(), entry.metadata().unwrap().len())
}

/// Opens memory in `directory` and stores a block of shuffle 0.
fn with_one_block(directory: &std::path::Path) -> Arc<Memory> {
    let memory = in_directory(directory, |_, _| {}).unwrap();
    restored(&memory, |_, _, _| false);
    names::send_one(&memory, 0, 1);
    memory
}

#[test]
fn directory_has_one_worker_and_keeps_its_memory() {
    let directory = shm();
    leave_block(directory.path());
    let again = in_directory(directory.path(), |_, _| {}).unwrap();
    assert!(matches!(in_directory(directory.path(), |_, _| {}), Err(MemoryFileError::InUse)));
    assert_eq!(restored(&again, |_, _, _| false), Found::from([((0, 0), vec![1])]));
    assert_eq!(read(&again), Found::from([((0, 0), vec![1])]));
    drop(again.forget(&key(0)));
    again.release();
    assert_eq!(std::fs::read_dir(directory.path()).unwrap().count(), 0, "an empty file must be deleted");
    assert!(in_directory(directory.path(), |config, _| config.capacity_bytes = 8 * MIB).is_ok());
}

#[test]
fn foreign_files_are_refused_and_not_changed() {
    let directory = shm();
    leave_block(directory.path());
    let refusal = |change: fn(&mut MemoryConfig, &mut Owner)| {
        in_directory(directory.path(), change).unwrap_err().to_string()
    };
    assert!(refusal(|_, owner| owner.node = "other".to_owned()).contains("belongs to worker 10.0.0.1-19999"));
    assert!(refusal(|_, owner| owner.boot = 8).contains("last boot of the machine"));
    let nowhere = in_directory(std::path::Path::new("/proc"), |_, _| {});
    assert!(matches!(nowhere, Err(MemoryFileError::NoTmpfs)));
    let file = directory.path().join("uniffle-worker.memory");
    let whole = std::fs::OpenOptions::new().write(true).open(&file).unwrap();
    let bytes = whole.metadata().unwrap().len();
    whole.set_len(bytes - 1).unwrap();
    assert!(refusal(|_, _| {}).contains("truncated"));
    whole.set_len(bytes).unwrap();
    let put = |at: u64, byte: u8| rustix::io::pwrite(&whole, &[byte], at).map(drop).unwrap();
    for other in [1, 3] {
        put(8, other);
        assert!(refusal(|_, _| {}).contains(&format!("layout version {other}")));
    }
    put(8, 2);
    put(100, 0xff);
    assert!(refusal(|_, _| {}).contains("corrupt"));
    put(100, 0);
    put(0, b'x');
    assert!(refusal(|_, _| {}).contains("not a memory file of a worker"));
    put(0, b'U');
    let again = in_directory(directory.path(), |_, _| {}).unwrap();
    assert_eq!(restored(&again, |_, _, _| false), Found::from([((0, 0), vec![1])]));
}

/// The state after a reboot of the machine.
#[test]
fn missing_directory_in_tmpfs_is_created() {
    let tmpfs = shm();
    let directory = tmpfs.path().join("worker");
    let check = |path: &std::path::Path| {
        Memory::check_backing_file(&config(Backing::Directory(path.to_owned())), &owner())
    };
    assert!(check(&directory).is_ok() && check(&directory.join("deeper")).is_err());
    assert!(!directory.exists(), "the check created the directory");
    leave_block(&directory);
    let again = in_directory(&directory, |_, _| {}).unwrap();
    assert_eq!(restored(&again, |_, _, _| false), Found::from([((0, 0), vec![1])]));
    let elsewhere = tempfile::tempdir().unwrap();
    assert!(in_directory(&elsewhere.path().join("worker"), |_, _| {}).is_err());
    assert_eq!(std::fs::read_dir(elsewhere.path()).unwrap().count(), 0);
}

#[test]
fn incomplete_region_is_created_again() {
    let directory = shm();
    leave_block(directory.path());
    let file = directory.path().join("uniffle-worker.memory");
    let half = std::fs::OpenOptions::new().write(true).open(&file).unwrap();
    rustix::io::pwrite(&half, &[0; 8], 0).unwrap();
    let again = in_directory(directory.path(), |config, _| config.capacity_bytes = 8 * MIB).unwrap();
    assert_eq!(restored(&again, |_, _, _| false), Found::new());
}

/// The header does not change: no store turns it into another region.
#[test]
fn region_grows_with_its_content_and_shrinks_without_blocks() {
    let directory = shm();
    leave_block(directory.path());
    let grown = |config: &mut MemoryConfig, _: &mut Owner| config.capacity_bytes = 8 * MIB;
    for _ in 0..2 {
        let again = in_directory(directory.path(), grown).unwrap();
        assert_eq!(restored(&again, |_, _, _| false), Found::from([((0, 0), vec![1])]));
        assert_eq!(read(&again), Found::from([((0, 0), vec![1])]));
        assert!(again.shared.supply.region.capacity_bytes() >= 8 * MIB);
        let mut funds = funds(&again, 6 * MIB).unwrap();
        let mut fill = buffer(&again, 0, 1).reserve(6 << 20, &mut funds).unwrap();
        assert_eq!(fill.write(&vec![7; 6 << 20]), 6 << 20, "the whole capacity must be usable");
        drop((fill, funds));
        again.release();
    }
    let bytes = || std::fs::metadata(directory.path().join("uniffle-worker.memory")).unwrap().len();
    let grown_bytes = bytes();
    let again = in_directory(directory.path(), |_, _| {}).unwrap();
    assert_eq!(bytes(), grown_bytes - 6 * MIB);
    assert_eq!(restored(&again, |_, _, _| false), Found::from([((0, 0), vec![1])]));
    drop(again);
    let again = in_directory(directory.path(), grown).unwrap();
    restored(&again, |_, _, _| false);
    let (mut funds, buffer) = (funds(&again, 6 * MIB).unwrap(), buffer(&again, 0, 1));
    let mut fill = buffer.reserve(5 << 20, &mut funds).unwrap();
    fill.write(&payload(2, 5 << 20));
    let (block_id, task_attempt_id, length) = (BlockId(2), TaskAttemptId(1), 5 << 20);
    let meta = BlockMeta { block_id, task_attempt_id, length, uncompressed_length: 1, crc: 0 };
    buffer.commit(vec![(meta, fill)], &mut funds).unwrap();
    drop(funds);
    again.release();
    drop((buffer, again));
    let refused = in_directory(directory.path(), |_, _| {}).unwrap_err();
    assert!(matches!(refused, MemoryFileError::Size { .. }), "{refused}");
    assert!(refused.to_string().contains("memory_store.capacity"), "{refused}");
    assert_eq!(bytes(), grown_bytes, "the refused file changed");
    let check = |change: fn(&mut MemoryConfig)| {
        let mut config = config(Backing::Directory(directory.path().to_owned()));
        change(&mut config);
        Memory::check_backing_file(&config, &owner())
    };
    assert!(matches!(check(|_| {}), Err(MemoryFileError::Size { .. })));
    assert!(check(|config| config.capacity_bytes = 8 * MIB).is_ok());
    assert!(check(|config| config.capacity_bytes = 16 * MIB).is_ok());
}

/// Another program extended the file, and the worker was killed before it noticed.
#[test]
fn file_extended_before_a_kill_is_accepted() {
    for with_bytes in [false, true] {
        let directory = shm();
        leave_block(directory.path());
        let path = directory.path().join("uniffle-worker.memory");
        let bytes = std::fs::metadata(&path).unwrap().len();
        for more in [777, MIB, 4 * MIB, 1 << 40] {
            let file = std::fs::OpenOptions::new().write(true).open(&path).unwrap();
            file.set_len(bytes + more).unwrap();
            if with_bytes {
                rustix::io::pwrite(&file, &[7; 777], bytes + more - 777).unwrap();
            }
            Memory::check_backing_file(&config(Backing::Directory(directory.path().to_owned())), &owner())
                .unwrap();
            let again = in_directory(directory.path(), |_, _| {}).unwrap();
            assert_eq!(
                std::fs::metadata(&path).unwrap().len(),
                bytes,
                "the file was extended by {more} bytes"
            );
            assert_eq!(
                restored(&again, |_, _, _| false),
                Found::from([((0, 0), vec![1])]),
                "the file was extended by {more} bytes"
            );
            assert_eq!(
                read(&again),
                Found::from([((0, 0), vec![1])]),
                "the file was extended by {more} bytes"
            );
            again.release();
        }
    }
}

/// The size of the block table is fixed at creation.
#[test]
fn changed_block_count_is_limited_by_slots() {
    let directory = shm();
    leave_block(directory.path());
    let rows = u64::from(table_geometry().rows);
    for (wanted, got) in [(77, 77), (1 << 20, rows)] {
        let again = in_directory(directory.path(), |config, _| config.blocks_max = wanted).unwrap();
        assert_eq!(again.blocks_max(), got);
        assert_eq!(restored(&again, |_, _, _| false), Found::from([((0, 0), vec![1])]));
        again.release();
    }
}

/// Flips a bit in the middle of the only block.
fn damage(path: &std::path::Path) {
    let flipped =
        std::fs::OpenOptions::new().read(true).write(true).open(path.join("uniffle-worker.memory")).unwrap();
    let at = table_geometry().front_bytes() + 3000;
    let mut byte = [0];
    rustix::io::pread(&flipped, &mut byte[..], at).unwrap();
    assert_eq!(byte[0], payload(1, 5000)[3000], "the file has no such byte of the block");
    rustix::io::pwrite(&flipped, &[byte[0] ^ 4], at).unwrap();
}

fn found_damaged(is_flushed: bool) {
    let directory = shm();
    leave_block(directory.path());
    damage(directory.path());
    let again = in_directory(directory.path(), |_, _| {}).unwrap();
    let notified = Arc::new(Mutex::new(Vec::new()));
    let listener = Arc::clone(&notified);
    again.on_damage(Arc::new(move |key: &ShuffleKey, partition: PartitionId, _: &str| {
        listener.lock().push((key.clone(), partition));
    }));
    assert_eq!(
        restored(&again, |_, _, _| false),
        Found::from([((0, 0), vec![1])]),
        "unverified blocks must be restored"
    );
    assert!(again.has_unverified());
    let buffer = buffer(&again, 0, 0);
    let sealed = is_flushed.then(|| buffer.seal().unwrap());
    buffer.verify();
    buffer.verify();
    assert_eq!(*notified.lock(), [(key(0), PartitionId(0))]);
    assert_eq!((read(&again), again.has_unverified(), buffer.block_count()), (Found::new(), false, 0));
    assert_eq!(rows_left(&again), 0, "the damaged block must not be found again");
    assert_eq!(again.block_count(), u64::from(is_flushed), "damaged blocks must not be flushed");
    if let Some(sealed) = sealed {
        let extent = sealed.extent(Distribution::Normal);
        assert_eq!((sealed.bytes(), extent.blocks.len()), (0, 0));
        buffer.release(&sealed);
    }
    // It may be sent again, and the next process finds the new copy.
    let mut funds = funds(&again, 100_000).unwrap();
    let mut fill = buffer.reserve(5000, &mut funds).unwrap();
    fill.write(&payload(1, 5000));
    let (block_id, task_attempt_id) = (BlockId(1), TaskAttemptId(1));
    let crc = crc32fast::hash(&payload(1, 5000));
    let meta = BlockMeta { block_id, task_attempt_id, length: 5000, uncompressed_length: 1, crc };
    assert_eq!(buffer.commit(vec![(meta, fill)], &mut funds).unwrap().blocks, 1);
    assert_eq!(read(&again), Found::from([((0, 0), vec![1])]));
    drop(funds);
    drop((buffer, again));
    let last = in_directory(directory.path(), |_, _| {}).unwrap();
    assert_eq!(restored(&last, |_, _, _| false), Found::from([((0, 0), vec![1])]));
    last.buffers().iter().for_each(|buffer| buffer.verify());
    assert_eq!(read(&last), Found::from([((0, 0), vec![1])]));
    drop(last.forget(&key(0)));
    assert_eq!(last.used_bytes(), 0);
}

#[test]
fn damaged_block_is_detected_before_it_is_read() {
    found_damaged(false);
    found_damaged(true);
}

#[test]
fn blocks_purged_before_the_scan_are_gone() {
    let directory = shm();
    leave_block(directory.path());
    let again = in_directory(directory.path(), |_, _| {}).unwrap();
    assert_eq!(restored(&again, |_, _, _| false).len(), 1);
    let buffer = buffer(&again, 0, 0);
    drop(again.forget(&key(0)));
    assert!(!again.has_unverified());
    buffer.verify();
    assert_eq!((again.used_bytes(), again.block_count(), again.has_unverified()), (0, 0, false));
}

#[test]
fn reader_continues_after_a_damaged_and_resent_block() {
    let memory = open(None);
    restored(&memory, |_, _, _| false);
    let send = |memory: &Memory, ids: &[i64], is_whole: bool| {
        let (buffer, mut funds) = (buffer(memory, 0, 0), funds(memory, 100_000).unwrap());
        let block = |id: &i64| {
            let mut fill = buffer.reserve(100, &mut funds).unwrap();
            fill.write(&payload(*id, 100));
            let crc = crc32fast::hash(&payload(*id, 100)) ^ u32::from(!is_whole && *id == 1);
            let (block_id, task_attempt_id) = (BlockId(*id), TaskAttemptId(1));
            (BlockMeta { block_id, task_attempt_id, length: 100, uncompressed_length: 1, crc }, fill)
        };
        let blocks: Vec<_> = ids.iter().map(block).collect();
        buffer.commit(blocks, &mut funds).unwrap();
    };
    send(&memory, &[1, 2], false);
    let file = memory.duplicate_for_successor().unwrap();
    memory.release();
    let again = open(file);
    assert_eq!(restored(&again, |_, _, _| false), Found::from([((0, 0), vec![1, 2])]));
    let buffer = buffer(&again, 0, 0);
    buffer.verify();
    send(&again, &[1], true);
    let (mut read, mut after) = (Vec::new(), None);
    while let [block] = buffer.read(after, 1, None).blocks[..] {
        read.push(block.block_id.0);
        assert!(read.len() <= 2, "a circular list of blocks was not detected: {read:?}");
        after = Some(block.block_id);
    }
    assert_eq!(read, [2, 1]);
    let mut ids = buffer.ids();
    ids.sort_unstable();
    assert_eq!(ids, [1, 2]);
}

#[test]
fn removed_or_replaced_file_is_noticed() {
    for is_replaced in [false, true] {
        let directory = shm();
        let memory = in_directory(directory.path(), |_, _| {}).unwrap();
        assert!(memory.outlives_process() && !memory.backing_vanished());
        assert_eq!(memory.backing_fault(), None);
        let (entry, _) = file_in(directory.path());
        std::fs::remove_file(&entry).unwrap();
        let other = is_replaced.then(|| in_directory(directory.path(), |_, _| {}).unwrap());
        assert!(memory.backing_vanished() && !memory.outlives_process());
        let fault = memory.backing_fault().unwrap();
        assert!(
            fault.contains("a kill would lose blocks") && fault.contains(&*entry.to_string_lossy()),
            "{fault}"
        );
        memory.release();
        assert_eq!(entry.exists(), is_replaced, "the file of another worker must stay");
        drop(other);
    }
}

#[test]
fn truncated_file_is_noticed_and_gets_its_length_back() {
    for length in [0, 4096, MIB] {
        let directory = shm();
        let memory = with_one_block(directory.path());
        let (entry, bytes) = file_in(directory.path());
        assert!(!memory.backing_vanished() && length < bytes);
        std::fs::OpenOptions::new().write(true).open(&entry).unwrap().set_len(length).unwrap();
        assert!(memory.backing_vanished() && !memory.outlives_process());
        assert!(memory.backing_fault().is_some_and(|fault| fault.contains("truncated")));
        // No page is missing, so that an access does not end the process. Later blocks are intact.
        assert_eq!(file_in(directory.path()).1, bytes);
        names::send_one(&memory, 1, 2);
        let read = buffer(&memory, 1, 0).read(None, u64::MAX, None);
        assert!(read.data.concat() == payload(2, 5000), "the file was truncated to {length} bytes");
        let damaged = buffer(&memory, 0, 0).read(None, u64::MAX, None);
        assert_eq!(damaged.data.concat().len(), 5000);
        drop((read, damaged));
        (0..SHUFFLES).for_each(|shuffle| drop(memory.forget(&key(shuffle))));
        assert_eq!(memory.used_bytes(), 0);
        memory.release();
    }
}

#[test]
fn file_that_was_extended_gets_its_length_back() {
    let directory = shm();
    let memory = with_one_block(directory.path());
    let (entry, bytes) = file_in(directory.path());
    std::fs::OpenOptions::new().write(true).open(&entry).unwrap().set_len(bytes + MIB).unwrap();
    assert!(
        !memory.backing_vanished() && memory.outlives_process(),
        "an extension of the file must not matter"
    );
    assert_eq!(file_in(directory.path()).1, bytes, "the next process must take the file");
    let read = buffer(&memory, 0, 0).read(None, u64::MAX, None);
    assert_eq!(read.data.concat(), payload(1, 5000));
    drop(read);
    (0..SHUFFLES).for_each(|shuffle| drop(memory.forget(&key(shuffle))));
    memory.release();
}
