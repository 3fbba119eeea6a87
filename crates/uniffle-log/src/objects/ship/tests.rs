//! The shipped log on a store in memory.

use std::collections::BTreeMap;

use bytes::Bytes;
use futures::FutureExt as _;
use futures::future::BoxFuture;
use uniffle_wire::types::{AppId, ShuffleId, ShuffleKey};

use super::task::OBJECTS_MAX;
use super::*;
use crate::metadata_log::RecordReader;
use crate::objects::object::{ListedObject, LogObject, OBJECT_COPIES};

/// A store that counts puts, also failed ones. Puts fail while `fails` is set. The first `flips`
/// responses to gets are damaged.
#[derive(Debug, Default)]
struct MemoryObjects {
    flips: Mutex<usize>,
    all: Mutex<BTreeMap<String, Bytes>>,
    fails: Mutex<Option<io::ErrorKind>>,
    puts: Mutex<usize>,
}

impl LogObjects for MemoryObjects {
    fn put(&self, object: LogObject, bytes: Bytes) -> BoxFuture<'_, Result<(), LogError>> {
        let put = async move {
            *self.puts.lock() += 1;
            if let Some(kind) = *self.fails.lock() {
                return Err(LogError::of(kind, "the test wants it so"));
            }
            for copy in 0..2 {
                let before = self.all.lock().insert(object.name(copy), bytes.clone());
                assert!(before.is_none_or(|before| before == bytes), "{} was overwritten", object.name(copy));
            }
            Ok(())
        };
        put.boxed()
    }

    fn get(&self, object: LogObject, copy: usize) -> BoxFuture<'_, Result<Option<Bytes>, LogError>> {
        let get = async move {
            let mut flips = self.flips.lock();
            let is_flipped = *flips > 0;
            *flips = flips.saturating_sub(1);
            let got = self.all.lock().get(&object.name(copy)).cloned();
            Ok(if is_flipped { got.map(|_| Bytes::from_static(b"damaged")) } else { got })
        };
        get.boxed()
    }

    fn list(&self) -> BoxFuture<'_, Result<Vec<ListedObject>, LogError>> {
        let listed = |(name, bytes): (&String, &Bytes)| {
            let (object, copy) = LogObject::parse(name)?;
            Some(ListedObject { object, copy, bytes: bytes.len() as u64 })
        };
        async move { Ok(self.all.lock().iter().filter_map(listed).collect()) }.boxed()
    }

    fn delete(&self, objects: Vec<ListedObject>) -> BoxFuture<'_, Result<(), LogError>> {
        let delete = async move {
            for ListedObject { object, copy, .. } in objects {
                self.all.lock().remove(&object.name(copy));
            }
            Ok(())
        };
        delete.boxed()
    }
}

struct Log {
    objects: Arc<MemoryObjects>,
    shipper: Shipper,
    tasks: Tasks,
}

impl Log {
    async fn found(objects: &Arc<MemoryObjects>) -> Arc<ShippedLog> {
        let listed = objects.list().await.unwrap();
        let objects = Arc::clone(objects) as Arc<dyn LogObjects>;
        ShippedLog::read(objects, &listed, &Budget::new(u64::MAX), false).await.unwrap()
    }

    /// Opens the log for start number `start` of the worker.
    async fn open(objects: &Arc<MemoryObjects>, start: u32) -> Self {
        let found = Self::found(objects).await;
        let (tasks, memory) = (Tasks::new(), Budget::new(u64::MAX));
        let shared = Arc::clone(objects) as Arc<dyn LogObjects>;
        let shipper = Shipper::open(shared, &found, start, &memory, &tasks);
        shipper.begin();
        Self { objects: Arc::clone(objects), shipper, tasks }
    }

    async fn append(&self, number: u64, record: &'static [u8]) -> Result<(), LogError> {
        self.shipper.append(FrameContent::Record(shuffle(number), Bytes::from_static(record))).await.map(drop)
    }

    async fn end(self) -> Arc<MemoryObjects> {
        self.tasks.cancel();
        self.tasks.close();
        self.tasks.drained().await;
        self.objects
    }
}

fn shuffle(number: u64) -> Incarnation {
    Incarnation { key: ShuffleKey::new(AppId::parse("app").unwrap(), ShuffleId(1)), number }
}

async fn records(found: &Arc<ShippedLog>) -> Vec<Bytes> {
    let all = found.shuffles().values().map(|it| it.incarnation).collect();
    let (mut reader, mut records) = (RecordReader::stored(Arc::clone(found), all), Vec::new());
    while let Some((_, record)) = reader.next().await.unwrap() {
        records.push(record);
    }
    records
}

#[tokio::test(start_paused = true)]
async fn records_of_each_start_are_found_by_the_next() {
    let mut objects = Arc::new(MemoryObjects::default());
    for start in 1..5 {
        let log = Log::open(&objects, start).await;
        log.append(7, b"record").await.unwrap();
        objects = log.end().await;
        let found = Log::found(&objects).await;
        assert_eq!((records(&found).await.len(), found.gap()), (start as usize, None));
        assert_eq!(found.last_start(), start);
    }
}

#[tokio::test(start_paused = true)]
async fn purge_behind_a_long_queue_drops_no_record() {
    let log = Log::open(&Arc::default(), 1).await;
    log.append(7, b"first").await.unwrap();
    let long = Bytes::from(vec![1; 5 << 20]);
    let append = || log.shipper.append(FrameContent::Record(shuffle(7), long.clone()));
    // All three are in the queue before the task takes any.
    let appended = async { futures::join!(append(), append(), async { log.shipper.purge(shuffle(6)) }) };
    let (one, other, _) = tokio::time::timeout(Duration::from_secs(60), appended).await.unwrap();
    one.unwrap();
    other.unwrap();
    let found = Log::found(&log.end().await).await;
    assert_eq!((records(&found).await.len(), found.gap()), (3, None));
}

/// Regression test: an object with later entries acknowledged the dropped ones, if the queue became
/// too long while the task was about to take them.
#[tokio::test(start_paused = true)]
async fn entry_after_dropped_ones_waits_for_the_checkpoint() {
    let (objects, tasks) = (Arc::new(MemoryObjects::default()), Tasks::new());
    let found = Log::found(&objects).await;
    let shipper = Shipper::open(objects, &found, 1, &Budget::new(u64::MAX), &tasks);
    let long = Bytes::from(vec![1; 5 << 20]);
    for record in [long.clone(), long, Bytes::from_static(b"later")] {
        shipper.add([FrameContent::Record(shuffle(7), record)]);
    }
    assert_eq!(shipper.0.state.lock().pop(), None);
}

#[tokio::test(start_paused = true)]
async fn failed_record_is_not_acknowledged_and_later_ones_are() {
    let log = Log::open(&Arc::default(), 1).await;
    log.append(7, b"first").await.unwrap();
    *log.objects.fails.lock() = Some(io::ErrorKind::TimedOut);
    log.append(7, b"second").await.unwrap_err();
    log.append(7, b"third").await.unwrap_err();
    let end = log.shipper.purge(shuffle(6));
    log.shipper.known(end).await.unwrap_err();
    *log.objects.fails.lock() = None;
    log.append(7, b"fourth").await.unwrap();
    assert!(log.shipper.knows(end), "the stored position lacks the end");
    let found = Log::found(&log.end().await).await;
    // The second was in progress. The third was dropped when its caller got the error.
    assert_eq!(records(&found).await, ["first", "second", "fourth"]);
}

#[tokio::test(start_paused = true)]
async fn position_is_known_once_every_record_before_it_is() {
    let log = Log::open(&Arc::default(), 1).await;
    let early = log.shipper.known(0);
    early.await.unwrap();
    assert!(log.shipper.is_begun(), "the generation of this process has not begun");
    *log.objects.fails.lock() = Some(io::ErrorKind::TimedOut);
    let end = log.shipper.purge(shuffle(1));
    tokio::time::sleep(Duration::from_secs(600)).await;
    assert!(!log.shipper.knows(end));
    *log.objects.fails.lock() = None;
    tokio::time::sleep(Duration::from_secs(60)).await;
    assert!(log.shipper.knows(end));
}

#[tokio::test(start_paused = true)]
async fn log_is_bounded_and_rewritten_regularly() {
    let log = Log::open(&Arc::default(), 1).await;
    for number in 0..OBJECTS_MAX as u64 + 100 {
        log.append(number, b"registration").await.unwrap();
        log.shipper.purge(shuffle(number));
    }
    let objects = log.objects.all.lock().len();
    assert!(objects < 2 * OBJECTS_MAX, "the log has {objects} objects");
    tokio::time::sleep(REFRESH + Duration::from_secs(60)).await;
    assert_eq!(log.objects.all.lock().len(), 2, "expected two copies of an empty checkpoint");
    let puts = *log.objects.puts.lock();
    tokio::time::sleep(REFRESH * 3).await;
    assert_eq!(*log.objects.puts.lock(), puts + 3);
}

#[tokio::test(start_paused = true)]
async fn process_that_lost_its_prefix_stores_nothing_more() {
    let log = Log::open(&Arc::default(), 1).await;
    log.append(7, b"first").await.unwrap();
    *log.objects.fails.lock() = Some(io::ErrorKind::ResourceBusy);
    log.append(7, b"second").await.unwrap_err();
    *log.objects.fails.lock() = None;
    let puts = *log.objects.puts.lock();
    log.append(7, b"third").await.unwrap_err();
    assert_eq!(*log.objects.puts.lock(), puts);
}

/// Regression test: a checkpoint of the other process hid acknowledged records. Two starts get the
/// same number in a store without conditions, or if a bucket rule has deleted the claim and the
/// first process ends before its first object arrives.
#[tokio::test(start_paused = true)]
async fn rival_of_the_same_start_leaves_a_gap() {
    // Which object of the two processes is listed first is random.
    for _ in 0..16 {
        let objects = Log::open(&Arc::default(), 1).await.end().await;
        let (rival, log) = (Log::open(&objects, 2).await, Log::open(&objects, 2).await);
        rival.shipper.known(0).await.unwrap();
        log.append(7, b"record").await.unwrap();
        rival.end().await;
        let found = Log::found(&log.end().await).await;
        assert!(found.gap().is_some_and(|gap| gap.contains("two processes")), "{:?}", found.gap());
    }
}

/// Regression test: damage of both copies in transit made shuffles incomplete for good.
#[tokio::test(start_paused = true)]
async fn object_damaged_in_transit_is_requested_again() {
    let log = Log::open(&Arc::default(), 1).await;
    log.append(7, b"first").await.unwrap();
    let objects = log.end().await;
    *objects.flips.lock() = OBJECT_COPIES;
    let found = Log::found(&objects).await;
    assert_eq!((records(&found).await.len(), found.gap()), (1, None));
    drop(found);
    let log = Log::open(&objects, 2).await;
    *log.objects.flips.lock() = OBJECT_COPIES;
    log.append(7, b"second").await.unwrap();
    let found = Log::found(&log.end().await).await;
    assert_eq!((records(&found).await.len(), found.unknown_gap()), (2, None));
}

/// Regression test: the second checkpoint of a process had no gap.
#[tokio::test(start_paused = true)]
async fn each_checkpoint_of_a_process_repeats_the_gap() {
    let log = Log::open(&Arc::default(), 1).await;
    log.append(7, b"first").await.unwrap();
    let objects = log.end().await;
    objects.all.lock().values_mut().for_each(|bytes| *bytes = Bytes::from_static(b"damaged"));
    let log = Log::open(&objects, 2).await;
    log.append(7, b"second").await.unwrap();
    tokio::time::sleep(REFRESH + Duration::from_secs(60)).await;
    log.append(7, b"third").await.unwrap();
    let objects = log.end().await;
    let found = Log::found(&objects).await;
    assert_eq!(found.gap(), None);
    assert!(found.unknown_gap().is_some());
    let next = found.next_incarnation();

    // The checkpoints repeat the end of the gap too.
    let log = Log::open(&objects, 3).await;
    log.shipper.purge(shuffle(7));
    log.shipper.append(FrameContent::Epoch(Box::default())).await.unwrap();
    let refreshes = [Duration::ZERO, REFRESH * 2];
    for refresh in refreshes {
        tokio::time::sleep(refresh + Duration::from_secs(60)).await;
        let found = Log::found(&objects).await;
        assert_eq!((found.may_lack_registrations(), found.next_incarnation()), (false, next), "{refresh:?}");
    }
}
