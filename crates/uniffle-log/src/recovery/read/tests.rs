//! Reads [`LogCopies`] with two copies of one generation, and with a copy whose epoch is unknown.

use bytes::{Bytes, BytesMut};
use uniffle_testkit::memory_disk::MemoryDisk;
use uniffle_wire::types::{AppId, ShuffleId, ShuffleKey};

use super::*;
use crate::Incarnation;

#[derive(Debug)]
struct Sound;

impl DirectoryHealth for Sound {
    fn rank(&self) -> Option<u8> {
        Some(0)
    }

    fn failed(&self, _: &io::Error) {}
}

#[tokio::test]
async fn records_of_all_generations_are_read_once() {
    let health: Arc<dyn DirectoryHealth> = Arc::new(Sound);
    let disk = MemoryDisk::new("/d", None);
    let key = ShuffleKey::new(AppId::parse("app").unwrap(), ShuffleId(1));
    let record = |content: &str| {
        let shuffle = Incarnation { key: key.clone(), number: 7 };
        FrameContent::Record(shuffle, Bytes::copy_from_slice(content.as_bytes()))
    };
    let copy = |generation: u64, epoch: Option<u64>, entries: &[FrameContent]| {
        let (mut bytes, mut encoder) = (BytesMut::new(), frame::Encoder::new(generation));
        entries.iter().for_each(|entry| assert!(encoder.encode(entry, 0, &mut bytes)));
        let path = PathBuf::from(format!("{generation}"));
        disk.put(&path, Some(bytes.to_vec()));
        LogCopy { directory: Some(0), path, generation, epoch, frames: u64::MAX, file: None }
    };
    let (one, two, three, four) = (record("one"), record("two"), record("three"), record("four"));
    let parts = vec![
        copy(1, Some(5), &[one.clone(), two.clone()]),
        copy(2, Some(5), std::slice::from_ref(&three)),
        copy(3, None, std::slice::from_ref(&four)),
        LogCopy {
            directory: Some(0),
            path: "1".into(),
            generation: 1,
            epoch: Some(5),
            frames: u64::MAX,
            file: None,
        },
    ];
    let directory = Directory {
        uuid: Uuid::nil(),
        label: "/d".to_owned(),
        io: Arc::new(disk.clone()),
        health: Arc::downgrade(&health),
    };
    let directories = [directory];
    let copies = LogCopies { parts, shipped: None };
    let mut reader = copies.read(&directories, Duration::from_secs(1));
    let mut read = Vec::new();
    while let Some(entry) = reader.next().await.unwrap() {
        read.push(entry);
    }
    assert_eq!(read, [one, two, three, four]);
}
