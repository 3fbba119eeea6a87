//! Shares of memory and of local reads among applications that request more than there is, and the
//! price of a ticket.

use futures::FutureExt as _;
use futures::future::BoxFuture;
use tokio::time::Instant;

use super::*;
use crate::service::reads::DataAnswer;

const KIB: u64 = 1 << 10;
const MIB: u64 = 1 << 20;

/// Bytes of one ticket of a flood. [`FLOOD_TICKET_HELD`] includes the allowance of a request
/// without partitions.
const FLOOD_TICKET: u64 = 256 * KIB;
const FLOOD_TICKET_HELD: u64 = 320 * KIB;

fn ask(fixture: &Fixture, app: &str, bytes: u64) -> Result<i64, ServiceError> {
    let bytes = i32::try_from(bytes).unwrap();
    let request = RequireRequest { app, shuffle: 0, bytes, partitions: &[], partition_sizes: &[] };
    fixture.service.ingest.require_buffer(request).map(|grant| grant.ticket)
}

/// Takes all available tickets and uses none.
fn flood(fixture: &Fixture, app: &str) {
    while ask(fixture, app, FLOOD_TICKET).is_ok() {}
}

async fn flood_for(fixture: &Fixture, floods: &[String], seconds: u64) {
    let until = Instant::now() + Duration::from_secs(seconds);
    while Instant::now() < until {
        floods.iter().for_each(|app| flood(fixture, app));
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
}

/// Returns how long `app` is refused if it asks between floods.
async fn refused_for(fixture: &Fixture, floods: &[String], app: &str, bytes: u64) -> Duration {
    let began = Instant::now();
    while ask(fixture, app, bytes).is_err() {
        assert!(began.elapsed() < Duration::from_secs(60), "{app} was refused for 60 s");
        floods.iter().for_each(|app| flood(fixture, app));
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    began.elapsed()
}

fn held(fixture: &Fixture, app: &str) -> u64 {
    fixture.memory.tickets().standing(&AppId::parse(app).unwrap()).held
}

async fn fixture_with(apps: &[String]) -> Fixture {
    let fixture = Fixture::new(PartitionLimits::default(), quiet()).await;
    for app in apps {
        fixture.register(app, &[]).await;
    }
    fixture
}

async fn stop(fixture: Fixture, apps: &[String]) {
    for app in apps {
        fixture.service.lifecycle.unregister_app(app).unwrap();
    }
    fixture.stop().await;
}

#[tokio::test(start_paused = true)]
async fn honest_app_gets_memory_beside_a_greedy_one() {
    let floods = ["flood".to_owned()];
    let fixture = fixture_with(&floods).await;
    flood_for(&fixture, &floods, 40).await;
    assert!(
        held(&fixture, "flood") > CAPACITY - FLOOD_TICKET_HELD,
        "a single application must get all memory"
    );
    assert!(refused_for(&fixture, &floods, APP, 4 * MIB).await <= Duration::from_secs(1));

    // The same holds if none of its tickets is old.
    fixture.memory.tickets().forget_app(&AppId::parse(APP).unwrap());
    fixture.memory.tickets().forget_app(&AppId::parse("flood").unwrap());
    flood(&fixture, "flood");
    let refused = ask(&fixture, APP, 4 * MIB).unwrap_err();
    assert_eq!(refused.status(), StatusCode::NoBuffer);
    assert!(refused_for(&fixture, &floods, APP, 4 * MIB).await <= Duration::from_secs(1));

    // The flood gets the memory that the honest application does not request. An unused ticket is
    // revoked after five seconds.
    flood_for(&fixture, &floods, 4).await;
    let honest = 4 * MIB + 64 * KIB;
    assert_eq!(held(&fixture, APP), honest);
    assert!(held(&fixture, "flood") + honest > CAPACITY - FLOOD_TICKET_HELD, "{}", held(&fixture, "flood"));
    fixture.service.lifecycle.unregister_app(APP).unwrap();
    assert_eq!(held(&fixture, APP), 0, "an ended application still holds memory");
    flood_for(&fixture, &floods, 1).await;
    assert!(held(&fixture, "flood") > CAPACITY - FLOOD_TICKET_HELD);
    assert!(fixture.memory.tickets().revoked() > 0);
    fixture.register(APP, &[]).await;
    stop(fixture, &floods).await;
}

#[tokio::test(start_paused = true)]
async fn nine_greedy_apps_leave_an_honest_app_its_share() {
    let floods: Vec<String> = (0..9).map(|n| format!("flood-{n}")).collect();
    let fixture = fixture_with(&floods).await;
    flood_for(&fixture, &floods, 10).await;
    let share = CAPACITY / 9;
    for app in &floods {
        assert!(held(&fixture, app).abs_diff(share) <= FLOOD_TICKET_HELD, "{app}: {}", held(&fixture, app));
    }
    assert!(refused_for(&fixture, &floods, APP, MIB).await <= Duration::from_secs(1));
    flood_for(&fixture, &floods, 5).await;
    let all: u64 = floods.iter().map(|app| held(&fixture, app)).sum();
    assert!(all + MIB + 64 * KIB + FLOOD_TICKET_HELD > CAPACITY, "only {all} bytes are in use");
    stop(fixture, &floods).await;
}

#[tokio::test(start_paused = true)]
async fn scarce_memory_is_divided_by_reloadable_weights() {
    let apps = ["adhoc-1".to_owned(), "etl-1".to_owned()];
    let fixture = fixture_with(&apps).await;
    let config = |text: &str| {
        let text = format!("[fairness]\nweights = [{text}]");
        let machine = crate::schema::Machine::default();
        let mut schema = crate::schema::Schema::default();
        <FairnessConfig as crate::schema::Section>::describe(&mut schema);
        let mut reader = crate::schema::ValueReader::new(&schema, text.parse().unwrap(), HashMap::new());
        <FairnessConfig as crate::schema::Section>::read(&mut reader, &machine)
    };
    flood_for(&fixture, &apps, 5).await;
    assert!(held(&fixture, "etl-1").abs_diff(CAPACITY / 2) <= FLOOD_TICKET_HELD);
    fixture.service.lifecycle.set_fairness(&config("{ app = \"etl-*\", weight = 3 }"));
    flood_for(&fixture, &apps, 5).await;
    assert!(held(&fixture, "etl-1").abs_diff(CAPACITY / 4 * 3) <= FLOOD_TICKET_HELD);
    assert!(held(&fixture, "adhoc-1").abs_diff(CAPACITY / 4) <= FLOOD_TICKET_HELD);
    // The weight also applies to applications that come later.
    fixture.register("etl-2", &[]).await;
    assert_eq!(fixture.memory.tickets().weight_of(&AppId::parse("etl-2").unwrap()), 3);
    fixture.service.lifecycle.unregister_app("etl-2").unwrap();
    stop(fixture, &apps).await;
}

#[tokio::test(start_paused = true)]
async fn app_over_its_share_is_flushed_first() {
    let apps = ["flood".to_owned()];
    let mut fixture = fixture_with(&apps).await;
    for block in 0..17 {
        fixture.send_of("flood", block % 10, 500_000).unwrap();
    }
    // The largest partitions belong to the honest application.
    for _ in 0..4 {
        fixture.send(3, 500_000).unwrap();
    }
    let waited = refused_for(&fixture, &[], APP, 10 * MIB).await;
    assert!(waited > Duration::ZERO && waited <= Duration::from_secs(1), "{waited:?}");
    assert_eq!(
        fixture.buffer_of(APP, 3).in_memory_bytes(),
        2_000_000,
        "blocks of the honest application were flushed"
    );
    assert!(fixture.flusher.flushed_bytes() > 0);
    stop(fixture, &apps).await;
}

#[tokio::test(start_paused = true)]
async fn tickets_need_registration_and_cost_their_size() {
    let fixture = fixture_with(&["no-shuffles".to_owned()]).await;
    let of = |app, shuffle, partitions| {
        let request = RequireRequest { app, shuffle, bytes: 0, partitions, partition_sizes: &[] };
        fixture.service.ingest.require_buffer(request)
    };
    assert_eq!(code(of(APP, 1, &[0])), StatusCode::NoRegister);
    assert_eq!(code(of("other", 0, &[0])), StatusCode::NoRegister);
    of(APP, 0, &[0, 1]).unwrap();
    assert_eq!(fixture.memory.used_bytes(), 2 * 4 * KIB);
    // A client before 0.9 names neither shuffle nor partition.
    of(APP, 7, &[]).unwrap();
    assert_eq!(fixture.memory.used_bytes(), (2 * 4 + 64) * KIB);
    fixture.service.lifecycle.unregister_shuffle("no-shuffles", 0).unwrap();
    assert_eq!(code(of("no-shuffles", 0, &[])), StatusCode::NoRegister);
    stop(fixture, &["no-shuffles".to_owned()]).await;
}

#[tokio::test(start_paused = true)]
async fn ticket_does_not_wait_while_all_tiers_fail() {
    let fixture = Fixture::new(PartitionLimits::default(), quiet()).await;
    let capacity = i32::try_from(CAPACITY).unwrap();
    let request =
        |bytes| RequireRequest { app: APP, shuffle: 0, bytes, partitions: &[], partition_sizes: &[] };
    fixture.service.ingest.require_buffer(request(capacity / 16 * 13)).unwrap();
    let places = tokio::sync::Semaphore::new(1);
    let waited = async || {
        let began = tokio::time::Instant::now();
        let answer = fixture.service.ingest.require_buffer_in_line(request(capacity / 2), &places).await;
        assert_eq!(code(answer), StatusCode::NoBuffer);
        began.elapsed()
    };
    assert!(waited().await >= Duration::from_secs(1));
    fixture.service.status().set_without_room(true);
    assert_eq!(waited().await, Duration::ZERO);
    fixture.service.status().set_without_room(false);
    assert!(waited().await >= Duration::from_secs(1));
    fixture.memory.tickets().forget_app(&AppId::parse(APP).unwrap());
    fixture.stop().await;
}

/// Reads the first `bytes` bytes of partition 3 of `app`, which are on the disk.
async fn read_of(fixture: &Fixture, app: &str, bytes: u64) -> Result<DataAnswer, ServiceError> {
    let reads = &fixture.service.reads;
    let range = ReadRange { offset: 0, length: i32::try_from(bytes).unwrap() };
    reads.read_data(&reads.read_limits(), target(app, 3), range).await
}

#[tokio::test(start_paused = true)]
async fn unread_local_reads_do_not_block_other_applications() {
    const READS: usize = 200;
    let small: Vec<String> = (0..5).map(|n| format!("small-{n}")).collect();
    // The store divides as many bytes as the fixture's read pool has: the disk gets half of them.
    let local = LocalConfig { read_memory_bytes: 4 * MIB, ..LocalConfig::default() };
    let mut fixture = Fixture::with(local, PartitionLimits::default(), quiet()).await;
    fixture.send(3, 1_000_000).unwrap();
    for app in &small {
        fixture.register(app, &[]).await;
        fixture.send_of(app, 3, 200_000).unwrap();
    }
    fixture.flusher.flush_all();
    fixture.settle().await;

    let mut of_hog: Vec<_> = (0..READS).map(|_| read_of(&fixture, APP, 1_000_000).boxed()).collect();
    let mut untaken: Vec<DataAnswer> = Vec::new();
    type Read<'a> = BoxFuture<'a, Result<DataAnswer, ServiceError>>;
    let waits = |untaken: &mut Vec<DataAnswer>, of_hog: &mut Vec<Read<'_>>| {
        of_hog.retain_mut(|read| match read.now_or_never() {
            Some(answer) => {
                untaken.extend(answer.ok());
                false
            }
            None => true,
        });
    };
    for _ in 0..20 {
        waits(&mut untaken, &mut of_hog);
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
    assert!(untaken.len() >= 3 && of_hog.len() > 100, "{} {}", untaken.len(), of_hog.len());
    let began = Instant::now();
    for app in &small {
        let answer = tokio::time::timeout(Duration::from_secs(1), read_of(&fixture, app, 200_000)).await;
        let mut chunks = answer.unwrap_or_else(|_| panic!("the read of {app} waits")).unwrap().chunks;
        assert_eq!(chunks.next().await.unwrap().unwrap().len(), 200_000);
    }
    assert!(began.elapsed() < Duration::from_secs(1), "reads waited {:?} of paused time", began.elapsed());
    // Waiting reads are refused after their time, and late chunks are still correct.
    let refused = futures::future::join_all(of_hog).await;
    assert!(
        refused.iter().all(|answer| answer.as_ref().is_err_and(|it| it.status() == StatusCode::NoBuffer))
    );
    for answer in &mut untaken {
        assert_eq!(answer.chunks.next().await.unwrap().unwrap(), [7; 1_000_000].as_slice());
    }
    drop(untaken);
    assert_eq!(fixture.memory.read_pool().used_bytes(), 0);
    stop(fixture, &small).await;
}
