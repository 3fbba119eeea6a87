//! Clients register a shuffle again after the worker has lost its registration.

use uniffle_testkit::oracle::{WorkerRefusal, WorkerView as _};
use uniffle_wire::types::{AppId, BlockId, ShuffleId, ShuffleKey};
use uniffle_worker::log::METADATA;

use super::fixture::{Fixture, Life};

/// Unregisters and registers a shuffle, and runs a task of it.
async fn register_again(fixture: &mut Fixture, life: &Life, key: &ShuffleKey) {
    fixture.unregister(life, key);
    life.client.register(key, 3).await.unwrap();
    fixture.run_task_of(life, key).await;
}

/// Returns the results of partition 0 from a new process.
fn results_of(fixture: &mut Fixture, key: &ShuffleKey) -> Result<Vec<BlockId>, String> {
    let lived = fixture.live(async |_, life| life.client.results(key, 0).await);
    match lived.unwrap() {
        Ok(ids) => Ok(ids.into_iter().collect()),
        Err(WorkerRefusal::Failed(text) | WorkerRefusal::Unknown(text)) => Err(text),
    }
}

#[test]
fn results_after_lost_registration_are_refused() {
    let mut fixture = Fixture::new(3);
    let key = |shuffle| ShuffleKey::new(AppId::parse("app-1").unwrap(), ShuffleId(shuffle));
    let keys = [key(0), key(1), key(10)];
    let lived = fixture.live(async |fixture, life| {
        for key in &keys {
            life.client.register(key, 3).await.unwrap();
            fixture.run_task_of(life, key).await;
        }
        fixture.flush(life).await;
    });
    lived.unwrap();
    for disk in &fixture.disks {
        let logs: Vec<_> = disk.files().into_iter().filter(|path| path.starts_with(METADATA)).collect();
        logs.iter().for_each(|path| {
            let zeros = disk.content(path).map(|content| vec![0; content.len()]);
            disk.put(path, zeros);
        });
    }
    let lived = fixture.live(async |fixture, life| {
        for key in &keys {
            life.client.register(key, 3).await.unwrap();
            fixture.run_task_of(life, key).await;
        }
        // An id above all recovered ones is new.
        let new = ShuffleKey::new(keys[0].app.clone(), ShuffleId(11));
        register_again(fixture, life, &new).await;
        assert!(
            !life
                .client
                .results(&new, 0)
                .await
                .expect("the results of a new shuffle must not be refused")
                .is_empty()
        );
        life.client.results(&keys[1], 0).await
    });
    let refusal = lived.unwrap().expect_err("the results of the earlier registration must be refused");
    assert!(
        matches!(&refusal, WorkerRefusal::Failed(text) if text.contains("may have been registered before"))
    );
    for key in &keys {
        let text = results_of(&mut fixture, key).expect_err("the next start must refuse the results too");
        assert!(text.contains("may have been registered before"), "{key}: {text}");
    }
    let lived = fixture.live(async |fixture, life| register_again(fixture, life, &keys[1]).await);
    lived.unwrap();
    assert_eq!(results_of(&mut fixture, &keys[1]).map(|ids| ids.len()), Ok(1));
}
