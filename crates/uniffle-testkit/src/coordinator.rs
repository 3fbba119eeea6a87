//! A coordinator double that shows the heartbeats it receives and responds as a test requires.
//!
//! All other calls are UNIMPLEMENTED, because workers do not make them.

use std::future::Future;
use std::net::SocketAddr;
use std::pin::Pin;
use std::time::Duration;

use tokio::net::TcpListener;
use tokio::sync::watch;
use tokio::time::{sleep, timeout};
use tokio_stream::wrappers::TcpListenerStream;
use tonic::transport::Server;
use tonic::{Request, Response, Status};
use uniffle_coordinator::proto::coordinator_server_server::{CoordinatorServer, CoordinatorServerServer};
use uniffle_worker::proto::{self, ShuffleServerHeartBeatRequest, StatusCode};
use uniffle_worker::runtime::Tasks;

const WAIT_MAX: Duration = Duration::from_secs(20);

/// Response to heartbeats.
#[derive(Debug, Clone, Copy)]
pub enum HeartbeatReply {
    /// Responds with SUCCESS.
    Succeed,
    /// Responds with this status.
    Refuse(StatusCode),
    /// Responds with a gRPC error.
    Fail,
    /// Responds with SUCCESS after this delay.
    Delay(Duration),
}

/// A coordinator on its own port. Ends with [`CoordinatorDouble::stop`].
#[derive(Debug)]
pub struct CoordinatorDouble {
    pub address: SocketAddr,
    response: watch::Sender<HeartbeatReply>,
    seen: watch::Receiver<SeenHeartbeats>,
    tasks: Tasks,
}

/// Heartbeats received so far.
#[derive(Debug, Default)]
struct SeenHeartbeats {
    count: u64,
    last: Option<ShuffleServerHeartBeatRequest>,
}

impl CoordinatorDouble {
    pub async fn start(response: HeartbeatReply) -> Self {
        let listener = TcpListener::bind(("127.0.0.1", 0)).await.unwrap();
        let address = listener.local_addr().unwrap();
        let (response, current) = watch::channel(response);
        let (seen_by_rpc, seen) = watch::channel(SeenHeartbeats::default());
        let tasks = Tasks::new();
        let service = CoordinatorServerServer::new(DoubleService { response: current, seen: seen_by_rpc });
        let stop = tasks.cancelled();
        tasks.spawn("coordinator double", async move {
            let server = Server::builder().add_service(service);
            let ended = server.serve_with_incoming_shutdown(TcpListenerStream::new(listener), stop).await;
            ended.unwrap();
        });
        Self { address, response, seen, tasks }
    }

    /// Changes the response, starting with the next heartbeat.
    pub fn behave(&self, response: HeartbeatReply) {
        self.response.send_replace(response);
    }

    /// Waits for `count` more heartbeats.
    pub async fn beats(&mut self, count: u64) {
        let wanted = self.seen.borrow().count + count;
        self.until(|_, total| total >= wanted).await;
    }

    /// Returns a heartbeat for which `holds` returns true: the last one, or the next that arrives.
    pub async fn heartbeat(
        &mut self,
        holds: impl Fn(&ShuffleServerHeartBeatRequest) -> bool,
    ) -> ShuffleServerHeartBeatRequest {
        self.until(|last, _| holds(last)).await
    }

    async fn until(
        &mut self,
        holds: impl Fn(&ShuffleServerHeartBeatRequest, u64) -> bool,
    ) -> ShuffleServerHeartBeatRequest {
        let reached = self.seen.wait_for(|seen| seen.last.as_ref().is_some_and(|it| holds(it, seen.count)));
        let reached = timeout(WAIT_MAX, reached)
            .await
            .map(|seen| seen.expect("the coordinator has ended").last.clone());
        let Ok(heartbeat) = reached else {
            panic!("the expected heartbeat did not arrive; the last state is {:?}", self.seen.borrow())
        };
        heartbeat.expect("the condition was true, so there is a heartbeat")
    }

    pub async fn stop(self) {
        self.tasks.cancel();
        timeout(WAIT_MAX, self.tasks.drained()).await.expect("the coordinator did not end after its clients");
    }
}

struct DoubleService {
    response: watch::Receiver<HeartbeatReply>,
    seen: watch::Sender<SeenHeartbeats>,
}

type RpcFuture<'a, T> = Pin<Box<dyn Future<Output = Result<Response<T>, Status>> + Send + 'a>>;

/// Expands to the methods that `async_trait` would create, all of which fail.
macro_rules! unimplemented {
    ($($name:ident($request:ty) -> $response:ty;)*) => {$(
        fn $name<'life0, 'async_trait>(&'life0 self, _: Request<$request>) -> RpcFuture<'async_trait, $response>
        where
            'life0: 'async_trait,
            Self: 'async_trait,
        {
            Box::pin(std::future::ready(Err(Status::unimplemented(stringify!($name)))))
        }
    )*};
}

impl CoordinatorServer for DoubleService {
    fn heartbeat<'life0, 'async_trait>(
        &'life0 self,
        request: Request<ShuffleServerHeartBeatRequest>,
    ) -> RpcFuture<'async_trait, proto::ShuffleServerHeartBeatResponse>
    where
        'life0: 'async_trait,
        Self: 'async_trait,
    {
        let response = *self.response.borrow();
        self.seen.send_modify(|seen| {
            seen.count += 1;
            seen.last = Some(request.into_inner());
        });
        Box::pin(async move {
            let mut answer = proto::ShuffleServerHeartBeatResponse::default();
            match response {
                HeartbeatReply::Succeed => {}
                HeartbeatReply::Refuse(status) => answer.set_status(status),
                HeartbeatReply::Fail => return Err(Status::internal("injected by the test")),
                HeartbeatReply::Delay(time) => sleep(time).await,
            }
            Ok(Response::new(answer))
        })
    }

    unimplemented! {
        get_shuffle_server_list(()) -> proto::GetShuffleServerListResponse;
        get_shuffle_server_num(()) -> proto::GetShuffleServerNumResponse;
        get_shuffle_assignments(proto::GetShuffleServerRequest) -> proto::GetShuffleAssignmentsResponse;
        get_shuffle_data_storage_info(()) -> proto::GetShuffleDataStorageInfoResponse;
        check_service_available(()) -> proto::CheckServiceAvailableResponse;
        app_heartbeat(proto::AppHeartBeatRequest) -> proto::AppHeartBeatResponse;
        report_client_operation(proto::ReportShuffleClientOpRequest) -> proto::ReportShuffleClientOpResponse;
        register_application_info(proto::ApplicationInfoRequest) -> proto::ApplicationInfoResponse;
        access_cluster(proto::AccessClusterRequest) -> proto::AccessClusterResponse;
        fetch_client_conf(()) -> proto::FetchClientConfResponse;
        fetch_client_conf_v2(proto::FetchClientConfRequest) -> proto::FetchClientConfResponse;
        fetch_remote_storage(proto::FetchRemoteStorageRequest) -> proto::FetchRemoteStorageResponse;
    }
}
