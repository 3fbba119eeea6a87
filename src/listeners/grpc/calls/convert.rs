//! Conversions between protobuf messages and types of the service. Decides nothing.

use std::net::IpAddr;

use tonic::{Code, Status};

use crate::listeners::grpc::transport::request_collector::is_client_fault;
use crate::proto::{DataDistribution, ShuffleRegisterRequest, StatusCode};
use crate::service::{self, IdWidths, Service, ServiceError};
use crate::store::RemoteStorage;
use uniffle_wire::types::Distribution;

/// Name of the listener in the log.
pub(in crate::listeners::grpc) const LISTENER: &str = "grpc";

/// Status and text of a response, as in the protocol.
pub(super) type StatusText = (i32, String);

/// Returns SUCCESS with the text that Java sends for this call (`OK` or nothing).
pub(super) fn success(text: &str) -> StatusText {
    (StatusCode::Success.into(), text.to_owned())
}

/// Converts a refusal of the service. Logs it if the client is at fault.
pub(in crate::listeners::grpc) fn refusal(service: &Service, error: &ServiceError) -> StatusText {
    service.note_refusal(LISTENER, error);
    (error.status().into(), error.to_string())
}

/// Logs a call as malformed if its gRPC status is Internal, `ResourceExhausted` or Unimplemented,
/// and its client is at fault.
pub(in crate::listeners::grpc) fn note_broken_call(service: &Service, status: &Status) {
    match status.code() {
        Code::Internal | Code::ResourceExhausted | Code::Unimplemented if is_client_fault(status) => {
            service.note_malformed(LISTENER, &status.message());
        }
        _ => {}
    }
}

/// Converts a result without a value.
pub(super) fn verdict(service: &Service, result: Result<(), ServiceError>, text: &str) -> StatusText {
    match result {
        Ok(()) => success(text),
        Err(error) => refusal(service, &error),
    }
}

/// Returns the status of a call that this worker does not offer: INTERNAL_ERROR, as Java without
/// remote merge.
pub(super) fn not_offered(text: &str) -> StatusText {
    (StatusCode::InternalError.into(), text.to_owned())
}

/// Converts a registration. An unknown distribution counts as NORMAL, which is correct for every
/// reader (docs/protocol.md §3.5).
pub(super) fn register_request(
    request: &mut ShuffleRegisterRequest,
    from: IpAddr,
) -> service::RegisterRequest<'_> {
    let distribution = match request.shuffle_data_distribution() {
        DataDistribution::Normal => Distribution::Normal,
        DataDistribution::LocalOrder => Distribution::LocalOrder,
    };
    let remote_storage = remote_storage(request);
    service::RegisterRequest {
        app: &request.app_id,
        shuffle: request.shuffle_id,
        ranges: request.partition_ranges.iter().map(|range| (range.start, range.end)).collect(),
        remote_storage,
        user: std::mem::take(&mut request.user),
        distribution,
        properties: std::mem::take(&mut request.properties),
        from: Some(from),
    }
}

/// Returns the remote storage, with the other fields of the registration that apply to it.
fn remote_storage(request: &mut ShuffleRegisterRequest) -> Option<RemoteStorage> {
    let storage = request.remote_storage.take().filter(|storage| !storage.path.is_empty())?;
    Some(RemoteStorage {
        path: storage.path,
        conf: storage.remote_storage_conf.into_iter().map(|item| (item.key, item.value)).collect(),
        user: request.user.clone(),
        writers: usize::try_from(request.max_concurrency_per_partition_to_write)
            .ok()
            .filter(|count| *count > 0),
    })
}

/// Returns the widths of sequence number, partition id and task attempt id. The service knows the
/// default.
pub(super) fn layout(layout: Option<crate::proto::BlockIdLayout>) -> Option<IdWidths> {
    layout.map(|layout| IdWidths {
        sequence: layout.sequence_no_bits,
        partition: layout.partition_id_bits,
        task: layout.task_attempt_id_bits,
    })
}

#[cfg(test)]
mod tests {
    use std::net::Ipv4Addr;

    use super::*;
    use crate::proto;

    const HERE: IpAddr = IpAddr::V4(Ipv4Addr::LOCALHOST);

    #[test]
    fn registration_keeps_the_fields_of_the_service() {
        let remote = proto::RemoteStorage {
            path: "hdfs://n/uniffle".into(),
            remote_storage_conf: vec![proto::RemoteStorageConfItem {
                key: "dfs.x".into(),
                value: "y".into(),
            }],
        };
        let mut request = ShuffleRegisterRequest {
            app_id: "app-1".into(),
            shuffle_id: 7,
            partition_ranges: vec![proto::ShufflePartitionRange { start: 1, end: 3 }],
            user: "spark".into(),
            shuffle_data_distribution: DataDistribution::LocalOrder.into(),
            properties: [("a.rss.b".to_owned(), "1".to_owned())].into(),
            remote_storage: Some(remote.clone()),
            max_concurrency_per_partition_to_write: 2,
            ..Default::default()
        };
        let converted = register_request(&mut request, HERE);
        assert_eq!((converted.app, converted.shuffle, converted.user.as_str()), ("app-1", 7, "spark"));
        assert_eq!(converted.ranges, [(1, 3)]);
        assert_eq!(converted.distribution, Distribution::LocalOrder);
        assert_eq!(converted.properties["a.rss.b"], "1");
        let storage = RemoteStorage {
            path: "hdfs://n/uniffle".into(),
            conf: vec![("dfs.x".into(), "y".into())],
            user: "spark".into(),
            writers: Some(2),
        };
        assert_eq!(converted.remote_storage, Some(storage));
        request.shuffle_data_distribution = 99;
        assert_eq!(register_request(&mut request, HERE).distribution, Distribution::Normal);
    }
}
