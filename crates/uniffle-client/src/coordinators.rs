//! The coordinators of a cluster, of which any may answer. Uniffle calls their list a quorum.
//!
//! Queries (assignments, configuration, remote storage) go to one member after another until one
//! answers, starting with the member that answered last. Announcements (registration and heartbeats
//! of an application) go to all members.

use std::sync::atomic::{AtomicUsize, Ordering};

use tokio::task::JoinSet;
use tokio::time::sleep;
use tonic::transport::Channel;

use crate::assignment::{Assignment, ServerAddress};
use crate::error::{Error, within};
use crate::grpc::{ClientError, check, failed};
use crate::options::ClientOptions;
use crate::proto;
use crate::proto::coordinator_server_client::CoordinatorServerClient;
use crate::remote::RemoteDirectory;
use crate::tls;
use uniffle_wire::types::{AppId, ShuffleKey};

/// Largest response: an assignment of 2^20 ranges has about 60 MB.
const ANSWER_BYTES_MAX: usize = 512 << 20;

type Stub = CoordinatorServerClient<Channel>;

#[derive(Debug, Clone)]
struct QuorumMember {
    address: String,
    stub: Stub,
}

/// The quorum. Connects lazily, and reconnects after a connection breaks.
#[derive(Debug)]
pub struct Coordinators {
    members: Vec<QuorumMember>,
    /// Index of the member that answered last.
    preferred: AtomicUsize,
    options: ClientOptions,
}

impl Coordinators {
    /// Creates the quorum of the coordinators at `addresses`, each `host:port`. An address
    /// `http://host:port` uses plaintext even if the options have TLS. Must be called in a tokio
    /// runtime.
    ///
    /// # Errors
    /// [`Error::Invalid`] without an address, or for an invalid address or option.
    pub fn new(
        addresses: impl IntoIterator<Item = impl AsRef<str>>,
        options: ClientOptions,
    ) -> Result<Self, Error> {
        options.validate()?;
        let members = addresses.into_iter().map(|address| QuorumMember::new(address.as_ref(), &options));
        let members = members.collect::<Result<Vec<_>, _>>()?;
        if members.is_empty() {
            return Err(Error::Invalid("no coordinator is given".to_owned()));
        }
        Ok(Self { members, preferred: AtomicUsize::new(0), options })
    }

    /// Calls `registerApplicationInfo` on all coordinators.
    ///
    /// # Errors
    /// Fails if no coordinator accepted it.
    pub async fn register_application(&self, app: &AppId) -> Result<(), Error> {
        const RPC: &str = "registerApplicationInfo";
        let request = proto::ApplicationInfoRequest {
            app_id: app.as_str().to_owned(),
            user: self.options.user.clone(),
            version: Some(env!("CARGO_PKG_VERSION").to_owned()),
            git_commit_id: None,
        };
        self.all(RPC, self.options.rpc_timeout, |mut stub| {
            let request = request.clone();
            async move {
                let answer = stub.register_application_info(request).await.map_err(failed(RPC))?.into_inner();
                check(RPC, answer.status, answer.ret_msg)
            }
        })
        .await
    }

    /// Calls `appHeartbeat` on all coordinators.
    ///
    /// # Errors
    /// Fails if no coordinator accepted it.
    pub async fn heartbeat(&self, app: &AppId) -> Result<(), Error> {
        const RPC: &str = "appHeartbeat";
        let request = proto::AppHeartBeatRequest { app_id: app.as_str().to_owned() };
        self.all(RPC, self.options.heartbeat_interval / 2, |mut stub| {
            let request = request.clone();
            async move {
                let answer = stub.app_heartbeat(request).await.map_err(failed(RPC))?.into_inner();
                check(RPC, answer.status, answer.ret_msg)
            }
        })
        .await
    }

    /// Calls `getShuffleAssignments` for a shuffle of `partitions` partitions. Excludes the servers
    /// with the ids `faulty`.
    ///
    /// # Errors
    /// Fails if every coordinator is unreachable or refuses the call, or if the response is
    /// unusable.
    pub async fn assignment(
        &self,
        key: &ShuffleKey,
        partitions: i32,
        faulty: &[String],
    ) -> Result<Assignment, Error> {
        const RPC: &str = "getShuffleAssignments";
        let servers = self.options.servers_per_shuffle.and_then(|servers| i32::try_from(servers).ok());
        let request = proto::GetShuffleServerRequest {
            application_id: key.app.as_str().to_owned(),
            shuffle_id: key.shuffle.0,
            partition_num: partitions,
            partition_num_per_range: 1,
            data_replica: i32::try_from(self.options.replicas.total).unwrap_or(i32::MAX),
            require_tags: self.options.required_tags(),
            assignment_shuffle_server_number: servers.unwrap_or(-1),
            faulty_server_ids: faulty.to_vec(),
            ..Default::default()
        };
        let answer = self
            .first(RPC, |mut stub| {
                let request = request.clone();
                async move {
                    let answer =
                        stub.get_shuffle_assignments(request).await.map_err(failed(RPC))?.into_inner();
                    check(RPC, answer.status, answer.ret_msg)?;
                    Ok(answer.assignments)
                }
            })
            .await?;
        Assignment::new(partitions, self.options.replicas.total, &answer)
    }

    /// Calls `getShuffleServerList`. Returns all servers with recent heartbeats, also
    /// unhealthy and excluded ones.
    ///
    /// # Errors
    /// Fails if every coordinator is unreachable or refuses the call, or if the response is
    /// unusable.
    pub async fn servers(&self) -> Result<Vec<ServerAddress>, Error> {
        const RPC: &str = "getShuffleServerList";
        let list = self
            .first(RPC, |mut stub| async move {
                Ok(stub.get_shuffle_server_list(()).await.map_err(failed(RPC))?.into_inner().servers)
            })
            .await?;
        list.iter().map(ServerAddress::from_message).collect()
    }

    /// Calls `fetchRemoteStorage`. Returns the remote storage of this application, if the
    /// coordinator has one.
    ///
    /// # Errors
    /// Fails if every coordinator is unreachable or refuses the call.
    pub async fn remote_storage(&self, app: &AppId) -> Result<Option<RemoteDirectory>, Error> {
        const RPC: &str = "fetchRemoteStorage";
        let request = proto::FetchRemoteStorageRequest { app_id: app.as_str().to_owned() };
        let answer = self
            .first(RPC, |mut stub| {
                let request = request.clone();
                async move {
                    let answer = stub.fetch_remote_storage(request).await.map_err(failed(RPC))?.into_inner();
                    check(RPC, answer.status, String::new())?;
                    Ok(answer.remote_storage)
                }
            })
            .await?;
        Ok(answer.map(RemoteDirectory::from_message).filter(|storage| !storage.path.is_empty()))
    }

    /// Returns the settings that the cluster prescribes to its clients, such as `rss.storage.type`.
    /// Calls `fetchClientConfV2`, or `fetchClientConf` for a coordinator before 0.10.
    ///
    /// # Errors
    /// Fails if every coordinator is unreachable or refuses the call.
    pub async fn client_conf(&self) -> Result<Vec<(String, String)>, Error> {
        const RPC: &str = "fetchClientConfV2";
        let request = proto::FetchClientConfRequest {
            user: self.options.user.clone(),
            properties: self.options.properties.clone().into_iter().collect(),
        };
        let items = self
            .first(RPC, |mut stub| {
                let request = request.clone();
                async move {
                    let answer = match stub.fetch_client_conf_v2(request).await {
                        Err(status) if status.code() == tonic::Code::Unimplemented => {
                            stub.fetch_client_conf(()).await.map_err(failed("fetchClientConf"))
                        }
                        answer => answer.map_err(failed(RPC)),
                    };
                    let answer = answer?.into_inner();
                    check(RPC, answer.status, answer.ret_msg)?;
                    Ok(answer.client_conf)
                }
            })
            .await?;
        Ok(items.into_iter().map(|item| (item.key, item.value)).collect())
    }

    /// Asks one member after another, for up to `failures.attempts` rounds.
    async fn first<T, F>(&self, rpc: &'static str, call: impl Fn(Stub) -> F) -> Result<T, Error>
    where
        F: Future<Output = Result<T, ClientError>>,
    {
        let mut round = 0;
        loop {
            let mut failure = None;
            let preferred = self.preferred.load(Ordering::Relaxed);
            for offset in 0..self.members.len() {
                let at = (preferred + offset) % self.members.len();
                let member = &self.members[at];
                match within(rpc, self.options.rpc_timeout, call(member.stub.clone())).await {
                    Ok(answer) => {
                        self.preferred.store(at, Ordering::Relaxed);
                        return Ok(answer);
                    }
                    Err(source) => failure = Some((&member.address, source)),
                }
            }
            round += 1;
            if round >= self.options.failures.attempts
                && let Some((address, source)) = failure
            {
                return Err(Error::call(address)(source));
            }
            sleep(self.options.failures.pause(round - 1)).await;
        }
    }

    /// Calls all members at once. One success is enough.
    async fn all<F>(
        &self,
        rpc: &'static str,
        deadline: std::time::Duration,
        call: impl Fn(Stub) -> F,
    ) -> Result<(), Error>
    where
        F: Future<Output = Result<(), ClientError>> + Send + 'static,
    {
        let mut calls = JoinSet::new();
        for member in &self.members {
            let (address, call) = (member.address.clone(), call(member.stub.clone()));
            calls.spawn(async move { within(rpc, deadline, call).await.map_err(Error::call(&address)) });
        }
        let mut failure = Error::Invalid(format!("{rpc}: no coordinator was called"));
        while let Some(ended) = calls.join_next().await {
            match ended {
                Ok(Ok(())) => {
                    // The other calls continue in the background, each up to its deadline, so an
                    // unresponsive member delays nobody.
                    calls.detach_all();
                    return Ok(());
                }
                Ok(Err(error)) => failure = error,
                Err(error) => failure = Error::unfinished(&error),
            }
        }
        Err(failure)
    }
}

impl QuorumMember {
    fn new(address: &str, options: &ClientOptions) -> Result<Self, Error> {
        let invalid = |error| Error::Invalid(format!("coordinator {address:?}: {error}"));
        let endpoint = tls::endpoint(address, options.tls.as_ref()).map_err(invalid)?;
        let channel = endpoint.connect_timeout(options.connect_timeout).tcp_nodelay(true).connect_lazy();
        let stub = Stub::new(channel).max_decoding_message_size(ANSWER_BYTES_MAX);
        Ok(Self { address: address.to_owned(), stub })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn panicked_call_is_named_in_the_error() {
        let options = ClientOptions::default();
        let coordinators = Coordinators::new(["127.0.0.1:1"], options).unwrap();
        let call = |_stub| async { panic!("boom") };
        let error = coordinators.all("call", std::time::Duration::from_secs(10), call).await.unwrap_err();
        assert!(error.to_string().contains("boom"), "{error}");
    }
}
