//! The unit of `deploy/systemd` under a real systemd: memory survives kills, upgrades and refused
//! starts.

mod manager;

use tokio::task::block_in_place;

use self::manager::Manager;
use crate::writes::{Written, key};

const BLOCK_BYTES: u32 = 14 << 10;
const TAKEN: &str = "recovered blocks from memory";

/// Writes one more task, kills the worker, and reads everything from its replacement.
async fn survives_kill(manager: &Manager, written: &mut Written, task: i64) {
    written.task(&manager.client().await, task, BLOCK_BYTES).await.unwrap();
    block_in_place(|| manager.kill());
    written.assert_readable(&manager.client().await).await;
    let in_memory = manager.metrics().total("total_in_memory_block_count");
    let blocks = written.blocks.values().map(Vec::len).sum::<usize>();
    assert_eq!(in_memory.map(|count| count.to_string()), Some(blocks.to_string()), "blocks were flushed");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn systemd_stores_memory_across_kills_and_upgrades() {
    let Some(manager) = block_in_place(Manager::start) else { return };
    block_in_place(|| {
        manager.configure("256M", "memfd", &["data"]);
        manager.systemctl(&["start"]);
    });
    let mut written = Written::register(&manager.client().await, key("app", 0), 50).await;
    survives_kill(&manager, &mut written, 0).await;
    survives_kill(&manager, &mut written, 1).await;
    // Hand-over with the same capacity and with a larger one, then a kill.
    for (task, capacity) in [(2, "256M"), (4, "300M")] {
        let pid = manager.property("MainPID");
        written.task(&manager.client().await, task, BLOCK_BYTES).await.unwrap();
        block_in_place(|| {
            manager.configure(capacity, "memfd", &["data"]);
            manager.upgrade();
        });
        assert_eq!(manager.property("MainPID"), pid);
        survives_kill(&manager, &mut written, task + 1).await;
    }
    block_in_place(|| manager.systemctl(&["reload"]));
    assert_eq!(manager.log().matches(TAKEN).count(), 6);
    block_in_place(|| manager.systemctl(&["stop"]));
    assert_eq!(manager.property("Result"), "success");
}

/// A smaller capacity needs a new region: the old descriptor is removed from systemd, the new one
/// is stored.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn systemd_replaces_memory_of_other_size() {
    let Some(manager) = block_in_place(Manager::start) else { return };
    block_in_place(|| {
        manager.configure("256M", "memfd", &["data"]);
        manager.systemctl(&["start"]);
    });
    let stored = manager.property("NFileDescriptorStore");
    let mut first = Written::register(&manager.client().await, key("app", 0), 50).await;
    first.task(&manager.client().await, 0, BLOCK_BYTES).await.unwrap();
    block_in_place(|| {
        manager.configure("128M", "memfd", &["data"]);
        manager.upgrade();
    });
    assert_eq!(manager.property("NFileDescriptorStore"), stored, "the manager must store one memory");
    let mut second = Written::register(&manager.client().await, key("app", 1), 50).await;
    survives_kill(&manager, &mut second, 0).await;
    first.assert_readable(&manager.client().await).await;
    // A graceful restart flushes, so any capacity is allowed.
    block_in_place(|| {
        manager.configure("64M", "memfd", &["data"]);
        manager.systemctl(&["restart"]);
    });
    first.assert_readable(&manager.client().await).await;
    second.assert_readable(&manager.client().await).await;
    // A worker without persistent memory stores no descriptor.
    block_in_place(|| {
        manager.configure("64M", "private", &["data"]);
        manager.upgrade();
    });
    assert_ne!(manager.property("NFileDescriptorStore"), stored);
    second.assert_readable(&manager.client().await).await;
    block_in_place(|| manager.systemctl(&["stop"]));
}

/// A refused start, because of memory or configuration, is retried. Memory stays in the descriptor
/// store.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn systemd_keeps_memory_while_starts_fail() {
    // More than systemd's default start limit (5 in 10 s).
    const ATTEMPTS: u32 = 8;
    let Some(manager) = block_in_place(Manager::start) else { return };
    block_in_place(|| {
        manager.configure("256M", "memfd", &["data"]);
        manager.systemctl(&["start"]);
    });
    let mut written = Written::register(&manager.client().await, key("app", 0), 50).await;
    written.task(&manager.client().await, 0, BLOCK_BYTES).await.unwrap();
    block_in_place(|| {
        let before = manager.restarts();
        manager.configure("a lot", "memfd", &["data"]);
        manager.signal(rustix::process::Signal::KILL);
        manager.wait_refused(before, ATTEMPTS);
        manager.wait_log("memory_store.capacity");
        manager.configure("256M", "memfd", &["data"]);
        manager.wait_active();
    });
    written.assert_readable(&manager.client().await).await;
    assert_eq!(manager.log().matches(TAKEN).count(), 1);
    block_in_place(|| manager.systemctl(&["stop"]));
    assert_eq!(manager.property("Result"), "success");
}
