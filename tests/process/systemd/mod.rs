//! The unit of `deploy/systemd` under a real systemd: what it keeps when the worker is killed, upgraded or restarted.

mod manager;

use std::path::Path;

use tokio::task::block_in_place;

use self::manager::{Manager, USER};
use crate::upgrades::FreezableDisk;
use crate::writes::{Written, key};

const BLOCK_BYTES: u32 = 14 << 10;
const TAKEN: &str = "took over blocks that an earlier process left in memory";

/// Writes one more task, kills the worker, and reads everything from the next.
async fn kept_over_a_kill(manager: &Manager, written: &mut Written, task: i64) {
    written.task(&manager.client().await, task, BLOCK_BYTES).await.expect("sent");
    block_in_place(|| manager.kill());
    written.assert_readable(&manager.client().await).await;
    let in_memory = manager.metrics().total("total_in_memory_block_count");
    let blocks = written.blocks.values().map(Vec::len).sum::<usize>();
    assert_eq!(in_memory.map(|count| count.to_string()), Some(blocks.to_string()), "nothing was flushed");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn systemd_keeps_the_memory_of_a_killed_worker_and_of_its_successors() {
    let Some(manager) = block_in_place(Manager::start) else { return };
    block_in_place(|| {
        manager.configure("256M", "memfd", &["data"]);
        manager.systemctl(&["start"]);
    });
    let mut written = Written::register(&manager.client().await, key("app", 0), 50).await;
    kept_over_a_kill(&manager, &mut written, 0).await;
    kept_over_a_kill(&manager, &mut written, 1).await;
    // Handed over, the same and grown, and then killed.
    for (task, capacity) in [(2, "256M"), (4, "300M")] {
        let pid = manager.property("MainPID");
        written.task(&manager.client().await, task, BLOCK_BYTES).await.expect("sent");
        block_in_place(|| {
            manager.configure(capacity, "memfd", &["data"]);
            manager.upgrade();
        });
        assert_eq!(manager.property("MainPID"), pid);
        kept_over_a_kill(&manager, &mut written, task + 1).await;
    }
    block_in_place(|| manager.systemctl(&["reload"]));
    assert_eq!(manager.log().matches(TAKEN).count(), 6);
    block_in_place(|| manager.systemctl(&["stop"]));
    assert_eq!(manager.property("Result"), "success");
}

/// A smaller memory is a new one: what systemd had of the old is given back, and the new one is kept.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn systemd_keeps_the_new_memory_where_a_successor_has_another() {
    let Some(manager) = block_in_place(Manager::start) else { return };
    block_in_place(|| {
        manager.configure("256M", "memfd", &["data"]);
        manager.systemctl(&["start"]);
    });
    let stored = manager.property("NFileDescriptorStore");
    let mut first = Written::register(&manager.client().await, key("app", 0), 50).await;
    first.task(&manager.client().await, 0, BLOCK_BYTES).await.expect("sent");
    block_in_place(|| {
        manager.configure("128M", "memfd", &["data"]);
        manager.upgrade();
    });
    assert_eq!(manager.property("NFileDescriptorStore"), stored, "one memory");
    let mut second = Written::register(&manager.client().await, key("app", 1), 50).await;
    kept_over_a_kill(&manager, &mut second, 0).await;
    first.assert_readable(&manager.client().await).await;
    // An orderly restart flushes, and so may have any size.
    block_in_place(|| {
        manager.configure("64M", "memfd", &["data"]);
        manager.systemctl(&["restart"]);
    });
    first.assert_readable(&manager.client().await).await;
    second.assert_readable(&manager.client().await).await;
    // One that has none leaves none in the store.
    block_in_place(|| {
        manager.configure("64M", "private", &["data"]);
        manager.upgrade();
    });
    assert_ne!(manager.property("NFileDescriptorStore"), stored, "no memory");
    second.assert_readable(&manager.client().await).await;
    block_in_place(|| manager.systemctl(&["stop"]));
}

/// A start that is refused, be it by what is in memory or by the configuration, is tried again, and what is in memory stays in the store
/// meanwhile.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn systemd_keeps_the_memory_while_starts_are_refused() {
    // More than any limit of starts that systemd has by itself (5 in 10 s).
    const ATTEMPTS: u32 = 8;
    let Some(manager) = block_in_place(Manager::start) else { return };
    block_in_place(|| {
        manager.configure("256M", "memfd", &["data"]);
        manager.systemctl(&["start"]);
    });
    let mut written = Written::register(&manager.client().await, key("app", 0), 50).await;
    written.task(&manager.client().await, 0, BLOCK_BYTES).await.expect("sent");
    block_in_place(|| {
        for (capacity, said) in
            [("128M", "start with the memory_store.capacity of before"), ("a lot", "memory_store.capacity")]
        {
            let before = manager.restarts();
            manager.configure(capacity, "memfd", &["data"]);
            if capacity == "128M" {
                manager.signal(rustix::process::Signal::KILL);
            }
            manager.wait_refused(before, ATTEMPTS);
            manager.wait_log(said);
        }
        manager.configure("256M", "memfd", &["data"]);
        manager.wait_active();
    });
    written.assert_readable(&manager.client().await).await;
    assert_eq!(manager.log().matches(TAKEN).count(), 1);
    block_in_place(|| manager.systemctl(&["stop"]));
    assert_eq!(manager.property("Result"), "success");
}

/// A successor beside a process of which a thread hangs is not systemd's child: what it has is kept all the same, and its death
/// is a failure of the unit.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn systemd_keeps_the_memory_of_a_successor_beside_a_process_that_hangs() {
    let mount = |state: &Path| {
        let disk = FreezableDisk::mount(state)?;
        std::os::unix::fs::chown(&disk.0, Some(USER), Some(USER)).expect("our own");
        Some(disk)
    };
    let Some((manager, disk)) = block_in_place(|| Manager::start_on(mount)) else { return };
    block_in_place(|| {
        manager.configure("256M", "memfd", &["mounted/data", "disk1"]);
        manager.systemctl(&["start"]);
    });
    let client = manager.client().await;
    let mut before = Written::register(&client, key("app", 0), 5).await;
    before.task(&client, 0, BLOCK_BYTES).await.expect("sent");
    let frozen = disk.freeze();
    // Notes of it go to both disks.
    let mut meanwhile = Written::register(&client, key("app", 1), 5).await;
    block_in_place(|| manager.wait_log("disk failed, avoiding it"));
    meanwhile.task(&client, 0, BLOCK_BYTES).await.expect("it goes on");
    let first = manager.ready().pid;
    block_in_place(|| manager.upgrade());
    assert_ne!(manager.ready().pid, first, "another process serves");
    let client = manager.client().await;
    let mut after = Written::register(&client, key("app", 2), 5).await;
    after.task(&client, 0, BLOCK_BYTES).await.expect("it goes on");
    block_in_place(|| {
        let restarts = manager.restarts();
        manager.kill_serving();
        manager.wait_log("the successor has ended, and this process with it");
        drop(frozen);
        manager.wait_restarted(restarts);
    });
    let client = manager.client().await;
    for written in [&before, &meanwhile, &after] {
        written.assert_readable(&client).await;
    }
    assert!(manager.log().contains(TAKEN));
    block_in_place(|| manager.systemctl(&["stop"]));
}
