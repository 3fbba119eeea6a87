//! One shuffle server: calls with deadlines, and most with retries. Block data uses gRPC or raw
//! TCP, all other calls gRPC.
//!
//! Replicas and the order of calls are handled by the callers. NO_BUFFER is retried as the options
//! allow. A send is retried after any temporary failure, because duplicate blocks are legal.
//! Registrations, reports and reads are retried if their response was lost; heartbeats and
//! unregistrations are not. TCP connections are opened on demand, and again after they break.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use bytes::Bytes;
use croaring::Treemap;
use parking_lot::Mutex;
use tokio::net::lookup_host;
use tokio::task::JoinSet;
use tokio::time::sleep;

use crate::assignment::ServerAddress;
use crate::block::IdLayout;
use crate::error::{Error, is_final, within};
use crate::grpc::{self, Backoff, ClientError, IndexResponse, MemoryResponse, ShuffleClient};
use crate::options::{ClientOptions, Transport};
use crate::proto::{ShuffleRegisterRequest, StatusCode};
use crate::read;
use crate::send::{Batch, SendForm};
use crate::tcp::TcpClient;
use crate::tls;
use uniffle_wire::types::{BlockId, PartitionId, ShuffleKey, TaskAttemptId};

/// No retries.
const ONCE: Backoff =
    Backoff { attempts: 1, first: std::time::Duration::ZERO, longest: std::time::Duration::ZERO };

#[derive(Debug)]
pub(crate) struct Server {
    address: ServerAddress,
    grpc: ShuffleClient,
    tcp: Mutex<Option<Arc<OpenConnection>>>,
    /// True if the last call failed. Other replicas are preferred then.
    suspect: AtomicBool,
    options: Arc<ClientOptions>,
}

#[derive(Debug)]
struct OpenConnection {
    client: TcpClient,
    driver: JoinSet<()>,
}

impl OpenConnection {
    fn is_open(&self) -> bool {
        !self.client.is_closed() && !self.driver.is_empty()
    }
}

impl Server {
    /// Creates a server, which connects on the first call. Must be called in a tokio runtime.
    pub(crate) fn new(address: ServerAddress, options: Arc<ClientOptions>) -> Result<Self, Error> {
        let authority = address.grpc_authority();
        let invalid = |error| Error::Assignment(format!("server address {authority:?}: {error}"));
        if options.transport == Transport::Tcp && address.tcp_port.is_none() {
            return Err(Error::Assignment(format!("server {:?} has no TCP port", address.id)));
        }
        let endpoint = tls::endpoint(&authority, options.tls.as_ref()).map_err(invalid)?;
        let channel = grpc::tuned(endpoint).connect_timeout(options.connect_timeout).connect_lazy();
        let grpc =
            ShuffleClient::on(channel).with_backoff(ONCE).with_answer_bytes_max(options.answer_bytes_max());
        Ok(Self { address, grpc, tcp: Mutex::default(), suspect: AtomicBool::new(false), options })
    }

    pub(crate) fn id(&self) -> &str {
        &self.address.id
    }

    pub(crate) fn is_suspect(&self) -> bool {
        self.suspect.load(Ordering::Relaxed)
    }

    pub(crate) async fn register(&self, request: ShuffleRegisterRequest) -> Result<(), Error> {
        let register = || self.grpc.register_with(request.clone());
        self.with_retries("registerShuffle", self.options.failures, register).await
    }

    pub(crate) async fn heartbeat(&self, app: &str) -> Result<(), Error> {
        let deadline = self.options.heartbeat_interval / 2;
        self.record_outcome(within("appHeartbeat", deadline, self.grpc.heartbeat(app)).await)
    }

    /// Unregisters the shuffle. NO_REGISTER counts as success: the server has no data of it.
    pub(crate) async fn unregister(&self, key: &ShuffleKey) -> Result<(), Error> {
        let deadline = self.options.unregister_timeout;
        self.record_outcome(ignore_unknown(
            within("unregisterShuffle", deadline, self.grpc.unregister(key)).await,
        ))
    }

    /// Unregisters the application. Servers before 0.9 do not know this call; they drop the
    /// application when its heartbeats stop.
    pub(crate) async fn unregister_app(&self, app: &str) -> Result<(), Error> {
        let deadline = self.options.unregister_timeout;
        let result = within("unregisterShuffleByAppId", deadline, self.grpc.unregister_app(app)).await;
        let unknown_call = |error: &ClientError| matches!(error, ClientError::Rpc { status, .. } if status.code() == tonic::Code::Unimplemented);
        self.record_outcome(if result.as_ref().is_err_and(unknown_call) {
            Ok(())
        } else {
            ignore_unknown(result)
        })
    }

    pub(crate) async fn report(
        &self,
        key: &ShuffleKey,
        task: TaskAttemptId,
        blocks: &[(PartitionId, Vec<BlockId>)],
    ) -> Result<(), Error> {
        let report = || self.grpc.report(key, task, blocks);
        self.with_retries("reportShuffleResult", self.options.failures, report).await
    }

    pub(crate) async fn results(
        &self,
        key: &ShuffleKey,
        partitions: &[PartitionId],
        layout: IdLayout,
    ) -> Result<Treemap, Error> {
        let results = || self.grpc.results(key, partitions, Some(layout));
        self.with_retries("getShuffleResultForMultiPart", self.options.read_failures(), results).await
    }

    /// Sends blocks: requires a ticket and sends the data with it. Retries with a backoff. A ticket
    /// is valid once, so each retry requires a new one.
    pub(crate) async fn push(&self, key: &ShuffleKey, batch: &Batch) -> Result<(), Error> {
        let backoff = self.options.failures;
        let mut failures = 0;
        loop {
            let error = match self.push_once(key, batch).await {
                Ok(()) => return self.record_outcome(Ok(())),
                Err(error) => error,
            };
            failures += 1;
            if failures >= backoff.attempts || !is_retryable(&error) {
                return self.record_outcome(Err(error));
            }
            sleep(backoff.pause(failures - 1)).await;
        }
    }

    async fn push_once(&self, key: &ShuffleKey, batch: &Batch) -> Result<(), ClientError> {
        let deadline = self.options.rpc_timeout;
        let mut request = grpc::require_request(key, batch)?;
        if self.options.transport == Transport::Tcp {
            // Java's Netty server accounts for the whole message while it decodes it.
            let message = self.tcp().await?.client.send_message_bytes(key, batch);
            let size = i64::from(request.require_size).saturating_add_unsigned(message);
            request.require_size = i32::try_from(size).map_err(|_| ClientError::BatchTooLarge)?;
        }
        let require = || self.grpc.require_once(request.clone());
        let ticket = self.attempts("requireBuffer", ONCE, require).await?;
        match self.options.transport {
            Transport::Grpc => {
                within("sendShuffleData", deadline, self.grpc.send(key, ticket, SendForm::Classic, batch))
                    .await
            }
            Transport::Tcp => {
                let connection = self.tcp().await?;
                let send = async {
                    let sent = connection.client.send(key, ticket, batch).await;
                    sent.map_err(|error| error.in_call("sendShuffleData"))
                };
                within("sendShuffleData", deadline, send).await
            }
        }
    }

    pub(crate) async fn read_memory(
        &self,
        key: &ShuffleKey,
        partition: PartitionId,
        after: Option<BlockId>,
        tasks: Option<&Treemap>,
    ) -> Result<MemoryResponse, Error> {
        const RPC: &str = "getMemoryShuffleData";
        let bytes = self.options.read_buffer_bytes;
        let filter = tasks.map(read::encode_bitmap);
        self.with_retries(RPC, self.options.read_failures(), || async {
            match self.options.transport {
                Transport::Grpc => self.grpc.read_memory(key, partition, after, bytes, tasks).await,
                Transport::Tcp => {
                    let (after, bytes) =
                        (after.map_or(-1, |id| id.0), i32::try_from(bytes).unwrap_or(i32::MAX));
                    let connection = self.tcp().await?;
                    let reply =
                        connection.client.read_memory(key, partition, after, bytes, filter.as_deref());
                    reply.await.and_then(TcpClient::memory_answer).map_err(|error| error.in_call(RPC))
                }
            }
        })
        .await
    }

    pub(crate) async fn read_index(
        &self,
        key: &ShuffleKey,
        partition: PartitionId,
    ) -> Result<IndexResponse, Error> {
        const RPC: &str = "getLocalShuffleIndex";
        self.with_retries(RPC, self.options.read_failures(), || async {
            match self.options.transport {
                Transport::Grpc => self.grpc.read_index(key, partition).await,
                Transport::Tcp => {
                    let connection = self.tcp().await?;
                    let reply = connection.client.read_index(key, partition).await;
                    reply.and_then(TcpClient::index_answer).map_err(|error| error.in_call(RPC))
                }
            }
        })
        .await
    }

    /// Reads from the disk with number `storage`, or −1 if the server has one stream per partition.
    pub(crate) async fn read_data(
        &self,
        key: &ShuffleKey,
        partition: PartitionId,
        storage: i32,
        offset: u64,
        length: u64,
    ) -> Result<Bytes, Error> {
        const RPC: &str = "getLocalShuffleData";
        self.with_retries(RPC, self.options.read_failures(), || async {
            match self.options.transport {
                Transport::Grpc => self.grpc.read_data_of(key, partition, storage, offset, length).await,
                Transport::Tcp => {
                    let connection = self.tcp().await?;
                    let data = connection.client.read_data_of(key, partition, storage, offset, length).await;
                    data.map_err(|error| error.in_call(RPC))
                }
            }
        })
        .await
    }

    /// Returns the TCP connection. Connects if none is open.
    async fn tcp(&self) -> Result<Arc<OpenConnection>, ClientError> {
        if let Some(open) = self.tcp.lock().as_ref().filter(|connection| connection.is_open()) {
            return Ok(Arc::clone(open));
        }
        let connect = async {
            let target = (self.address.host.as_str(), self.address.tcp_port.unwrap_or_default());
            let address = lookup_host(target).await?.next().ok_or(std::io::ErrorKind::NotFound)?;
            TcpClient::connect_bounded(address, self.options.answer_bytes_max()).await
        };
        let connect = async { connect.await.map_err(|source| ClientError::Connection { source }) };
        let (client, drive) = within("connect", self.options.connect_timeout, connect).await?;
        let mut driver = JoinSet::new();
        driver.spawn(drive);
        let connection = Arc::new(OpenConnection { client, driver });
        // Two callers may connect concurrently. Each uses its own connection; the later one is kept
        // for other calls.
        *self.tcp.lock() = Some(Arc::clone(&connection));
        Ok(connection)
    }

    async fn with_retries<T, F>(
        &self,
        rpc: &'static str,
        failures: Backoff,
        call: impl FnMut() -> F,
    ) -> Result<T, Error>
    where
        F: Future<Output = Result<T, ClientError>>,
    {
        let result = self.attempts(rpc, failures, call).await;
        self.record_outcome(result)
    }

    /// Calls until a response arrives, or until the retries for NO_BUFFER or for lost calls are
    /// used up.
    async fn attempts<T, F>(
        &self,
        rpc: &'static str,
        failures: Backoff,
        mut call: impl FnMut() -> F,
    ) -> Result<T, ClientError>
    where
        F: Future<Output = Result<T, ClientError>>,
    {
        let (mut refused, mut failed) = (0, 0);
        loop {
            let error = match within(rpc, self.options.rpc_timeout, call()).await {
                Ok(answer) => return Ok(answer),
                Err(error) => error,
            };
            let (backoff, count) = match &error {
                error if is_no_buffer(error) => (self.options.no_buffer, &mut refused),
                error if is_lost(error) => (failures, &mut failed),
                _ => return Err(error),
            };
            *count += 1;
            if *count >= backoff.attempts {
                return Err(error);
            }
            sleep(backoff.pause(*count - 1)).await;
        }
    }

    /// Records whether the call succeeded, and adds the server's id to its error.
    fn record_outcome<T>(&self, result: Result<T, ClientError>) -> Result<T, Error> {
        self.suspect.store(result.is_err(), Ordering::Relaxed);
        result.map_err(Error::call(self.id()))
    }
}

fn ignore_unknown(result: Result<(), ClientError>) -> Result<(), ClientError> {
    let unknown = [Some(StatusCode::NoRegister), Some(StatusCode::AppNotFound)];
    match result {
        Err(error) if unknown.contains(&error.status()) => Ok(()),
        result => result,
    }
}

fn is_no_buffer(error: &ClientError) -> bool {
    matches!(error.status(), Some(StatusCode::NoBuffer | StatusCode::NoBufferForHugePartition))
}

/// Returns true if there was no Uniffle status, so the effect on the server is unknown.
fn is_lost(error: &ClientError) -> bool {
    matches!(
        error,
        ClientError::Rpc { .. }
            | ClientError::Timeout { .. }
            | ClientError::Connection { .. }
            | ClientError::Connect(_)
    )
}

/// Returns true if a failed send is tried again with a new ticket. NO_BUFFER is not: it has its own
/// retries, which those of sends must not multiply.
fn is_retryable(error: &ClientError) -> bool {
    match error {
        ClientError::Refused { status, .. } => !is_final(*status) && !is_no_buffer(error),
        ClientError::BatchTooLarge => false,
        _ => true,
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;
    use crate::block::sample;
    use crate::grpc::tests::{Double, Running, Script, serve};
    use uniffle_wire::types::{AppId, ShuffleId};

    async fn server(script: Script) -> (Double, Server, Running) {
        let (double, address, running) = serve(script).await;
        let address = ServerAddress {
            id: format!("h-{}", address.port()),
            host: address.ip().to_string(),
            grpc_port: address.port(),
            tcp_port: None,
            http_port: None,
        };
        let quickly = |attempts| Backoff {
            attempts,
            first: Duration::from_millis(1),
            longest: Duration::from_millis(2),
        };
        let options = ClientOptions { no_buffer: quickly(5), failures: quickly(3), ..Default::default() };
        (double, Server::new(address, Arc::new(options)).unwrap(), running)
    }

    fn key() -> ShuffleKey {
        ShuffleKey::new(AppId::parse("app").unwrap(), ShuffleId(1))
    }

    fn batch() -> Vec<(PartitionId, Vec<crate::Block>)> {
        vec![(PartitionId(2), vec![sample(PartitionId(2), TaskAttemptId(1), 0, 10)])]
    }

    #[test]
    fn only_transient_failures_are_retried() {
        let refused = |status| ClientError::Refused { rpc: "sendShuffleData", status, text: String::new() };
        assert!(
            is_retryable(&refused(StatusCode::InternalError)),
            "the ticket may have expired, so the error must be retryable"
        );
        assert!(is_retryable(&ClientError::Timeout { rpc: "x", after: Duration::ZERO }));
        for status in [StatusCode::NoRegister, StatusCode::NoBuffer, StatusCode::ExceedHugePartitionHardLimit]
        {
            assert!(!is_retryable(&refused(status)), "{status:?}");
        }
        assert!(!is_retryable(&ClientError::BatchTooLarge));
    }

    #[tokio::test]
    async fn send_retry_requests_a_new_ticket() {
        let failing = [StatusCode::InternalError, StatusCode::Timeout];
        let script = Script { no_buffer: 4, send_answers: failing.into(), ..Default::default() };
        let (double, server, running) = server(script).await;
        server.push(&key(), &batch()).await.unwrap();
        assert_eq!(double.0.lock().sent.len(), 3);
        assert!(!server.is_suspect());

        // The push fails after five refusals, three failures, or a permanent failure.
        double.0.lock().no_buffer = 9;
        let error = server.push(&key(), &batch()).await.unwrap_err();
        let is = |error: &Error, expected| matches!(error, Error::Call { source, .. } if source.status() == Some(expected));
        assert!(is(&error, StatusCode::NoBuffer), "{error}");
        assert_eq!(double.0.lock().no_buffer, 4);
        assert!(server.is_suspect());
        for (answers, sends) in
            [(vec![StatusCode::InternalError; 9], 3), (vec![StatusCode::NoRegister; 9], 1)]
        {
            let answer = answers[0];
            {
                let mut script = double.0.lock();
                (script.no_buffer, script.send_answers) = (0, answers.into());
                script.sent.clear();
            }
            let error = server.push(&key(), &batch()).await.unwrap_err();
            assert!(is(&error, answer), "{error}");
            assert_eq!(double.0.lock().sent.len(), sends);
        }
        drop(server);
        running.end().await;
    }

    #[tokio::test]
    async fn unreachable_server_is_tried_until_the_failure_limit() {
        let (_, server, running) = server(Script::default()).await;
        running.end().await;
        let error = server.read_index(&key(), PartitionId(0)).await.unwrap_err();
        assert!(matches!(&error, Error::Call { source, .. } if is_lost(source)), "{error}");
        assert!(server.is_suspect());
        let tcp = ClientOptions { transport: Transport::Tcp, ..Default::default() };
        let without_port = Server::new(server.address.clone(), Arc::new(tcp)).unwrap_err();
        assert!(matches!(without_port, Error::Assignment(_)));
    }

    #[tokio::test]
    async fn unregistering_unknown_shuffle_succeeds() {
        // The double implements neither call. The first is also unknown to servers before 0.9, so
        // its failure is ignored.
        let (_, server, running) = server(Script::default()).await;
        server.unregister_app("app").await.unwrap();
        assert!(server.unregister(&key()).await.is_err());
        drop(server);
        running.end().await;
        let refused = |status| ClientError::Refused { rpc: "x", status, text: String::new() };
        assert!(ignore_unknown(Err(refused(StatusCode::NoRegister))).is_ok());
        assert!(ignore_unknown(Err(refused(StatusCode::InternalError))).is_err());
    }
}
