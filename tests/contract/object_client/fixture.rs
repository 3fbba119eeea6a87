//! A client with its own tasks and metrics. At the end none of its tasks and connections may
//! remain.

use std::future::Future;
use std::ops::Range;
use std::sync::Arc;
use std::time::Duration;

use object_store::ObjectStore;
use prometheus::{Registry, TextEncoder};
use uniffle_testkit::eventually;
use uniffle_worker::runtime::Tasks;
use uniffle_worker::store::ObjectConfig;
use uniffle_worker::store::object::client::Client;

/// Limit of [`soon`]. Anything slower hangs.
const WAIT_MAX: Duration = Duration::from_secs(120);

pub(crate) struct Opened {
    pub(crate) client: Client,
    pub(crate) store: Arc<dyn ObjectStore>,
    tasks: Tasks,
    registry: Registry,
}

pub(crate) fn open(config: &ObjectConfig) -> Opened {
    let (tasks, registry) = (Tasks::new(), Registry::new());
    let client = Client::open(config, &tasks, &registry).unwrap();
    let store = client.store();
    Opened { client, store, tasks, registry }
}

impl Opened {
    /// Returns the value of the sample that begins with `name`, labels included.
    pub(crate) fn metric(&self, name: &str) -> f64 {
        let text = TextEncoder::new().encode_to_string(&self.registry.gather()).unwrap();
        let value = text.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(' '));
        value.unwrap_or_else(|| panic!("{name} is missing: {text}")).parse().unwrap()
    }

    /// Asserts that nothing is in flight, and that no task or connection remains without the
    /// client.
    pub(crate) async fn end(self) {
        assert_eq!(self.metric("object_store_requests_in_flight"), 0.0);
        let Self { client, store, tasks, registry } = self;
        drop((client, store));
        eventually("the client's tasks end", || match tasks.running() {
            0 => Ok(()),
            remaining => Err(format!("{remaining} tasks are left")),
        })
        .await;
        let text = TextEncoder::new().encode_to_string(&registry.gather()).unwrap();
        assert!(text.contains("\nobject_store_connections 0\n"), "{text}");
    }
}

/// Fails instead of hanging.
pub(crate) async fn soon<T>(future: impl Future<Output = T>) -> T {
    tokio::time::timeout(WAIT_MAX, future).await.expect("the call did not end in time")
}

/// Returns `bytes` bytes of content that depend on their offset in an object.
pub(crate) fn content(bytes: usize) -> Vec<u8> {
    let spread = |at: u64| at.wrapping_mul(0x9E37_79B9_7F4A_7C15).to_be_bytes()[0];
    (0u64..).map(spread).take(bytes).collect()
}

/// Returns the bytes of `range`.
pub(crate) fn part(bytes: &[u8], range: &Range<u64>) -> Vec<u8> {
    let at = |place: u64| usize::try_from(place).unwrap();
    bytes[at(range.start)..at(range.end)].to_vec()
}
