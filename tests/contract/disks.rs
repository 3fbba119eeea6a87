//! One suite for the real disk and the testkit's doubles: the calls that the store relies on. Then
//! tests of one disk each: changed files, and the faults and power losses of the doubles.

use std::io;
use std::path::Path;
use std::sync::Arc;

use bytes::Bytes;

use uniffle_io::blocking::BlockingDisk;
use uniffle_io::{Disk, File, ReadPart, ReadTarget, Vanished, WriteOpen, buffers};
use uniffle_testkit::fault::{self, FaultDisk, Faults};
use uniffle_testkit::memory_disk::MemoryDisk;

async fn read(file: &Arc<dyn File>, offset: u64, len: usize) -> io::Result<Vec<u8>> {
    let target = ReadTarget::one(Box::new(vec![0xee; len + 2]), 1..len + 1, offset);
    let (mut target, result) = file.read(target).await;
    let bytes = target.part_mut(0).unwrap().to_vec();
    let whole = (*target.buffer).as_mut();
    assert_eq!((whole[0], whole[len + 1]), (0xee, 0xee), "bytes outside the range were written");
    result.map(|()| bytes)
}

async fn suite(disk: Arc<dyn Disk>, direct: bool) {
    let path = Path::new("a/b/file");
    let kind = |result: io::Result<Arc<dyn File>>| result.map(drop).unwrap_err().kind();
    let new = WriteOpen { create: true, direct, ..WriteOpen::default() };
    let old = WriteOpen { create: false, direct, ..WriteOpen::default() };
    assert_eq!(kind(disk.open_write(path, new).await), io::ErrorKind::NotFound);
    disk.create_dir_all(Path::new("a/b")).await.unwrap();
    disk.create_dir_all(Path::new("a/b")).await.unwrap();
    assert_eq!(kind(disk.open_write(path, old).await), io::ErrorKind::NotFound);
    assert_eq!(kind(disk.open_read(path).await), io::ErrorKind::NotFound);

    let file = disk.open_write(path, new).await.unwrap();
    assert_eq!(kind(disk.open_write(path, new).await), io::ErrorKind::AlreadyExists);
    let mut staging = buffers::AlignedBuffer::unpooled();
    for n in 0u8..200 {
        staging.put(&[n; 100]);
    }
    staging.pad();
    let bytes = staging.freeze();
    let pieces = vec![bytes.slice(..8192), bytes.slice(8192..)];
    file.write_at(pieces, 4096).await.unwrap();
    file.write_at(vec![bytes.slice(..4096)], 0).await.unwrap();
    file.sync().await.unwrap();
    assert_eq!(file.size().await.unwrap(), 4096 + 20480);

    let reader = disk.open_read(path).await.unwrap();
    assert_eq!(read(&reader, 4096 + 5, 19_995).await.unwrap(), bytes[5..20_000]);
    assert_eq!(read(&reader, 3, 10).await.unwrap(), bytes[3..13]);
    let end = read(&reader, 20_000, 5000).await.unwrap_err();
    assert_eq!(end.kind(), io::ErrorKind::UnexpectedEof);
    let outside = ReadTarget::one(Box::new(vec![0; 4]), 2..8, 0);
    assert_eq!(reader.read(outside).await.1.unwrap_err().kind(), io::ErrorKind::InvalidInput);

    // Ranges out of order, overlapping, empty, and beyond the end of the file.
    reader.advise(vec![4096..24_576, 1..2, 0..300_000, 1 << 40..(1 << 40) + 1, 5..5]).await.unwrap();
    reader.advise(Vec::new()).await.unwrap();
    assert_eq!(read(&reader, 3, 10).await.unwrap(), bytes[3..13]);

    let direct_reader = disk.open_read_direct(path).await.unwrap();
    for (offset, len) in [(4096, 8192), (4096 + 5, 19_995), (8191, 2), (0, 20_000)] {
        let at = usize::try_from(offset).unwrap();
        let expected = read(&reader, offset, len).await.unwrap();
        assert!(read(&direct_reader, offset, len).await.unwrap() == expected, "read of {len} bytes at {at}");
    }
    let end = read(&direct_reader, 20_000, 50_000).await.unwrap_err();
    assert_eq!(end.kind(), io::ErrorKind::UnexpectedEof);
    for file in [&reader, &direct_reader] {
        read_in_parts(file, &bytes).await;
    }

    for directory in ["", "a", "a/b"] {
        disk.sync_dir(Path::new(directory)).await.unwrap();
    }
    assert_eq!(disk.sync_dir(Path::new("b")).await.unwrap_err().kind(), io::ErrorKind::NotFound);
    disk.sync_all().await.unwrap();
    let busy = disk.remove_dir(Path::new("a/b")).await.unwrap_err();
    assert_eq!(busy.kind(), io::ErrorKind::DirectoryNotEmpty);
    disk.create_dir_all(Path::new("trash")).await.unwrap();
    disk.rename(Path::new("a/b"), Path::new("trash/1")).await.unwrap();
    let gone = disk.rename(Path::new("a/b"), Path::new("trash/2")).await.unwrap_err();
    assert_eq!(gone.kind(), io::ErrorKind::NotFound);
    assert_eq!(disk.list(Path::new("")).await.unwrap(), ["a", "trash"]);
    assert_eq!(disk.list(Path::new("trash/1")).await.unwrap(), ["file"]);
    disk.remove_dir(Path::new("a")).await.unwrap();
    disk.remove_dir_all(Path::new("trash")).await.unwrap();
    assert_eq!(disk.remove_dir_all(Path::new("trash")).await.unwrap_err().kind(), io::ErrorKind::NotFound);
    assert_eq!(read(&reader, 0, 10).await.unwrap(), bytes[..10], "an open file must outlive its name");
    names_and_locks(&disk).await;
}

/// Checks reads of several parts into one buffer. `file` has `bytes` from offset 4,096 on.
async fn read_in_parts(file: &Arc<dyn File>, bytes: &[u8]) {
    let parts = [(4096u64, 0..5000), (20_000, 5001..6001), (4096, 6001..6001), (4097, 6001..9000)];
    let parts = |end| {
        let parts = parts[..end].iter().cloned();
        parts.map(|(offset, range)| ReadPart { range, offset }).collect::<Vec<_>>()
    };
    let target = ReadTarget { buffer: Box::new(vec![0xee; 10_000]), parts: parts(4) };
    let (mut target, result) = file.read(target).await;
    result.unwrap();
    let whole = (*target.buffer).as_mut();
    assert!(whole[..5000] == bytes[..5000] && whole[5001..6001] == bytes[15_904..16_904]);
    assert!(whole[6001..9000] == bytes[1..3000], "overlapping parts have wrong bytes");
    assert!(whole[5000] == 0xee && whole[9000..].iter().all(|byte| *byte == 0xee));
    let mut late = parts(2);
    late.push(ReadPart { range: 7000..8000, offset: 24_500 });
    let target = ReadTarget { buffer: Box::new(vec![0; 10_000]), parts: late };
    assert_eq!(file.read(target).await.1.unwrap_err().kind(), io::ErrorKind::UnexpectedEof);
}

async fn names_and_locks(disk: &Arc<dyn Disk>) {
    let marker = Path::new("marker");
    let lock = disk.lock(marker).await.unwrap();
    disk.write_small(marker, b"longer content".to_vec()).await.unwrap();
    disk.write_small(marker, b"content".to_vec()).await.unwrap();
    assert_eq!(disk.read_small(marker).await.unwrap(), b"content");
    assert_eq!(disk.lock(marker).await.unwrap_err().kind(), io::ErrorKind::WouldBlock);
    drop(lock);
    drop(disk.lock(marker).await.unwrap());
    assert_eq!(disk.read_small(marker).await.unwrap(), b"content", "locking changed the content");
    for path in ["../x", "/etc", "a/../../x"] {
        let error = disk.create_dir_all(Path::new(path)).await.unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::InvalidInput, "{path}");
    }
    let space = disk.space().await.unwrap();
    assert!(space.total_bytes >= space.free_bytes && space.free_bytes > 0);
}

#[tokio::test]
async fn memory_disk_fulfils_the_contract() {
    suite(Arc::new(MemoryDisk::new("/memory", None)), false).await;
}

#[tokio::test]
async fn fault_disk_without_faults_fulfils_the_contract() {
    let disk = Arc::new(MemoryDisk::new("/memory", None));
    suite(Arc::new(FaultDisk::new(disk, Faults::default())), false).await;
}

#[tokio::test]
async fn real_disk_fulfils_the_contract_buffered_and_direct() {
    for direct in [false, true] {
        let root = tempfile::tempdir().unwrap();
        suite(Arc::new(BlockingDisk::new(root.path(), 2, 2)), direct).await;
    }
}

#[tokio::test]
async fn append_fails_when_its_file_was_changed() {
    let root = tempfile::tempdir().unwrap();
    let disk = BlockingDisk::new(root.path(), 2, 2);
    let path = root.path().join("log");
    let changes: [fn(&Path); 5] = [
        |path| std::fs::remove_file(path).unwrap(),
        |path| std::fs::rename(path, path.with_extension("moved")).unwrap(),
        |path| {
            std::fs::write(path.with_extension("other"), b"12345678").unwrap();
            std::fs::rename(path.with_extension("other"), path).unwrap();
        },
        |path| {
            std::fs::rename(path, path.with_extension("linked")).unwrap();
            std::os::unix::fs::symlink(path.with_extension("linked"), path).unwrap();
        },
        |path| std::fs::OpenOptions::new().write(true).open(path).unwrap().set_len(3).unwrap(),
    ];
    for (number, change) in changes.into_iter().enumerate() {
        let how = WriteOpen { create: true, is_named: true, ..WriteOpen::default() };
        let file = disk.open_write(Path::new("log"), how).await.unwrap();
        let append = |at| file.write_at(vec![Bytes::from_static(b"12345678")], at);
        append(0).await.unwrap();
        file.verify().await.unwrap();
        change(&path);
        let error = append(8).await.unwrap_err();
        assert_eq!(Vanished::of(&error), Some(Vanished::File), "{number}: {error}");
        let _ = std::fs::remove_file(&path);
    }
}

#[tokio::test]
async fn full_memory_disk_stores_a_partial_write() {
    let disk = MemoryDisk::new("/memory", Some(10));
    let file =
        disk.open_write(Path::new("f"), WriteOpen { create: true, ..WriteOpen::default() }).await.unwrap();
    file.write_at(vec![Bytes::from_static(b"1234")], 0).await.unwrap();
    let pieces = vec![Bytes::from_static(b"56"), Bytes::from_static(b"7890abc")];
    let full = file.write_at(pieces, 4).await.unwrap_err();
    assert_eq!(full.kind(), io::ErrorKind::StorageFull);
    assert_eq!(disk.content(Path::new("f")).unwrap(), b"1234567890");
    disk.set_capacity(Some(20));
    file.write_at(vec![Bytes::from_static(b"abc")], 10).await.unwrap();
}

#[tokio::test]
async fn hung_write_completes_after_its_caller_is_dropped() {
    let memory = Arc::new(MemoryDisk::new("/memory", None));
    let faults = Faults::default();
    let disk = FaultDisk::new(Arc::clone(&memory) as Arc<dyn Disk>, faults.clone());
    let file =
        disk.open_write(Path::new("f"), WriteOpen { create: true, ..WriteOpen::default() }).await.unwrap();
    faults.add(fault::Rule::once(fault::Operation::Write, fault::Fault::Hang));
    drop(file.write_at(vec![Bytes::from_static(b"late")], 0));
    assert_eq!(faults.hung(), 1);
    assert_eq!(file.size().await.unwrap(), 0);
    faults.release().await;
    assert_eq!(memory.content(Path::new("f")).unwrap(), b"late");
}

#[tokio::test]
async fn seeded_faults_repeat() {
    let mut runs = Vec::new();
    for _ in 0..2 {
        let faults = Faults::default();
        let disk = FaultDisk::new(Arc::new(MemoryDisk::new("/m", None)), faults.clone());
        let file = disk
            .open_write(Path::new("f"), WriteOpen { create: true, ..WriteOpen::default() })
            .await
            .unwrap();
        faults.seed(7, 3, vec![(fault::Operation::Write, fault::Fault::Errno(fault::EIO))]);
        let mut run = Vec::new();
        for _ in 0..60 {
            run.push(file.write_at(vec![Bytes::from_static(b"x")], 0).await.is_ok());
        }
        runs.push(run);
    }
    assert_eq!(runs[0], runs[1]);
    assert!(runs[0].contains(&true) && runs[0].contains(&false));
}

#[tokio::test]
async fn memory_disk_loses_only_unsynced_data() {
    let path = Path::new("a/f");
    let (mut shorter, mut zeroed, mut whole, mut nameless) = (0, 0, 0, 0);
    for seed in 0..200 {
        let disk = MemoryDisk::new("/memory", None);
        disk.create_dir_all(Path::new("a")).await.unwrap();
        let file = disk.open_write(path, WriteOpen { create: true, ..WriteOpen::default() }).await.unwrap();
        file.write_at(vec![Bytes::from(vec![1; 700])], 0).await.unwrap();
        file.sync().await.unwrap();
        if seed % 2 == 0 {
            disk.sync_dir(Path::new("a")).await.unwrap();
            disk.sync_dir(Path::new("")).await.unwrap();
        }
        file.write_at(vec![Bytes::from(vec![2; 1300])], 700).await.unwrap();
        disk.lose_power(seed);
        let Some(content) = disk.content(path) else {
            assert!(seed % 2 == 1, "the name was lost although it was synced");
            nameless += 1;
            continue;
        };
        assert_eq!(content[..700], [1; 700], "synced bytes were lost");
        assert!(content[700..].iter().all(|byte| [0, 2].contains(byte)));
        shorter += u32::from(content.len() < 2000);
        zeroed += u32::from(content[700..].contains(&0));
        whole += u32::from(content.len() == 2000 && !content[700..].contains(&0));
    }
    assert!([shorter, zeroed, whole, nameless].iter().all(|count| *count > 0));
}

#[tokio::test]
async fn failed_sync_is_not_repaired_by_the_next() {
    let path = Path::new("f");
    let disk = MemoryDisk::new("/memory", None);
    let file = disk.open_write(path, WriteOpen { create: true, ..WriteOpen::default() }).await.unwrap();
    disk.sync_dir(Path::new("")).await.unwrap();
    file.write_at(vec![Bytes::from(vec![1; 5000])], 0).await.unwrap();
    disk.fail_syncs(1);
    assert!(file.sync().await.is_err());
    file.sync().await.unwrap();
    disk.lose_power(1);
    assert_ne!(disk.content(path).unwrap(), vec![1; 5000]);
}
