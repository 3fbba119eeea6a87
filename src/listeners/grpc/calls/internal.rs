//! `ShuffleServerInternal`, the calls made by coordinators.
//!
//! The protocol has no token, so the caller's address decides who may call ([`DecommissionBy`]).
//! Other callers are refused, and the audit log records the calls.

use std::collections::HashSet;
use std::net::IpAddr;
use std::sync::Arc;

use tokio::net::lookup_host;
use tokio::time::Duration;
use tonic::{Request, Response, Status};

use super::convert::verdict;
use crate::clock::Instant;
use crate::listeners::grpc::config::{DecommissionBy, GrpcConfig};
use crate::proto::shuffle_server_internal_server::ShuffleServerInternal;
use crate::proto::{
    CancelDecommissionRequest, CancelDecommissionResponse, DecommissionRequest, DecommissionResponse,
    StatusCode,
};
use crate::schema::network::Network;
use crate::service::{Lifecycle, Service, ServiceError};
use crate::telemetry::{AUDIT, LogLimiter};

/// Time for which resolved coordinator addresses are cached. Also bounds the load on the name
/// server.
const ADDRESSES_LAST: Duration = Duration::from_secs(10);

/// Minimum time between two log lines about refused callers. The others are counted.
const DENIED_LOG_INTERVAL: Duration = Duration::from_secs(10);

/// Serves coordinators that may decommission this worker, and refuses other callers.
#[derive(Debug)]
pub(in crate::listeners::grpc) struct InternalCalls {
    service: Arc<Service>,
    by: DecommissionBy,
    networks: Vec<Network>,
    /// Names or addresses of the machines that [`DecommissionBy::Coordinators`] allows.
    coordinators: Vec<String>,
    addresses: KnownAddresses,
    denials: LogLimiter,
}

impl InternalCalls {
    pub(in crate::listeners::grpc) fn new(service: Arc<Service>, config: &GrpcConfig) -> Self {
        Self {
            service,
            by: config.decommission_by,
            networks: config.decommission_networks.clone(),
            coordinators: config.coordinators.clone(),
            addresses: KnownAddresses::default(),
            denials: LogLimiter::new(1, DENIED_LOG_INTERVAL),
        }
    }

    /// Applies `change` for an allowed caller. Returns status and text of the response.
    async fn call<T>(
        &self,
        request: &Request<T>,
        action: &'static str,
        change: impl FnOnce(&Lifecycle) -> Result<(), ServiceError>,
    ) -> (i32, String) {
        let peer = request.remote_addr();
        let shown = peer.map_or_else(|| "unknown".to_owned(), |peer| peer.to_string());
        let is_allowed = match peer {
            Some(peer) => self.may_decommission(peer.ip().to_canonical()).await,
            None => self.by == DecommissionBy::Everybody,
        };
        if !is_allowed {
            if let Some(calls) = self.denials.pass() {
                tracing::warn!(target: AUDIT, action, peer = shown, result = "denied", calls, "grpc call");
            }
            let text = format!(
                "{action} over gRPC is refused for {shown}; see admin.grpc_decommission and \
                 admin.grpc_decommission_networks"
            );
            return (StatusCode::AccessDenied.into(), text);
        }
        let lifecycle = &self.service.lifecycle;
        let outcome = match change(lifecycle) {
            Ok(()) => lifecycle.save_settings().await,
            Err(error) => Err(error),
        };
        let result = if outcome.is_ok() { "ok" } else { "failed" };
        tracing::info!(target: AUDIT, action, peer = shown, result, "grpc call");
        verdict(&self.service, outcome, "")
    }

    async fn may_decommission(&self, peer: IpAddr) -> bool {
        if self.networks.iter().any(|network| network.contains(peer)) {
            return true;
        }
        match self.by {
            DecommissionBy::None => false,
            DecommissionBy::ThisMachine => peer.is_loopback(),
            DecommissionBy::Everybody => true,
            DecommissionBy::Coordinators => {
                self.addresses.contains(peer, addresses(&self.coordinators)).await
            }
        }
    }
}

/// Resolved addresses of the coordinators, with the end of the lookup. Locked during a lookup, so
/// that concurrent callers share it.
#[derive(Debug, Default)]
struct KnownAddresses(tokio::sync::Mutex<Option<(Instant, HashSet<IpAddr>)>>);

impl KnownAddresses {
    /// Returns whether `peer` is one of the addresses. Renews them by `lookup` if they are too old.
    async fn contains(&self, peer: IpAddr, lookup: impl Future<Output = HashSet<IpAddr>>) -> bool {
        let mut known = self.0.lock().await;
        match &*known {
            Some((since, addresses)) if since.elapsed() < ADDRESSES_LAST => addresses.contains(&peer),
            _ => {
                let addresses = lookup.await;
                let is_known = addresses.contains(&peer);
                *known = Some((Instant::now(), addresses));
                is_known
            }
        }
    }
}

/// Resolves `names`. A name that cannot be resolved has no addresses.
async fn addresses(names: &[String]) -> HashSet<IpAddr> {
    let mut addresses = HashSet::new();
    for name in names {
        match lookup_host((name.as_str(), 0)).await {
            Ok(found) => addresses.extend(found.map(|address| address.ip().to_canonical())),
            Err(error) => tracing::debug!(name, %error, "cannot resolve a coordinator"),
        }
    }
    addresses
}

#[tonic::async_trait]
impl ShuffleServerInternal for InternalCalls {
    async fn decommission(
        &self,
        request: Request<DecommissionRequest>,
    ) -> Result<Response<DecommissionResponse>, Status> {
        let (status, ret_msg) = self.call(&request, "decommission", Lifecycle::decommission_healthy).await;
        Ok(Response::new(DecommissionResponse { status, ret_msg }))
    }

    async fn cancel_decommission(
        &self,
        request: Request<CancelDecommissionRequest>,
    ) -> Result<Response<CancelDecommissionResponse>, Status> {
        let cancel = |lifecycle: &Lifecycle| {
            lifecycle.cancel_decommission();
            Ok(())
        };
        let (status, ret_msg) = self.call(&request, "cancelDecommission", cancel).await;
        Ok(Response::new(CancelDecommissionResponse { status, ret_msg }))
    }
}

#[cfg(test)]
mod tests {
    use std::cell::Cell;
    use std::net::Ipv4Addr;

    use super::*;

    #[tokio::test(start_paused = true)]
    async fn slow_lookup_is_shared_by_waiting_callers() {
        let (known, lookups, peer) =
            (KnownAddresses::default(), Cell::new(0), IpAddr::V4(Ipv4Addr::LOCALHOST));
        let call = || {
            known.contains(peer, async {
                lookups.set(lookups.get() + 1);
                crate::clock::sleep(2 * ADDRESSES_LAST).await;
                HashSet::from([peer])
            })
        };
        assert_eq!(futures::join!(call(), call()), (true, true));
        assert_eq!(lookups.get(), 1);
        crate::clock::sleep(ADDRESSES_LAST).await;
        assert!(call().await && lookups.get() == 2);
    }
}
