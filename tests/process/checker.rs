//! Random writers and readers against a worker with local disks; `uniffle_testkit::checker` has the
//! invariants.

use rand::RngExt as _;
use tokio::task::block_in_place;

use uniffle_testkit::checker::{Checker, RoundEnd, run_of};
use uniffle_testkit::clients::client_of;
use uniffle_testkit::worker::{Setup, WorkerProcess};

const ROUNDS: u64 = 30;

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn reported_blocks_are_readable_or_listed_as_lost() {
    let (rounds, mut random) = run_of(ROUNDS);
    let setup = Setup { name: "checker", capacity: "24MiB", disks: 2, ..Setup::default() };
    let mut worker = block_in_place(|| WorkerProcess::start(&setup));
    let mut checker = Checker::default();
    for round in 0..rounds {
        let end = [RoundEnd::Kill, RoundEnd::Stop, RoundEnd::Upgrade][random.random_range(0..3)];
        checker.round(i32::try_from(round).unwrap(), end, &mut worker, &mut random).await;
    }
    let client = client_of(&worker).await;
    client.unregister_app("checker").await.unwrap();
    worker.assert_clean();
    block_in_place(|| worker.stop());
}
