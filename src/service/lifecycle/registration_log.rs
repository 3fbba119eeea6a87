//! Writes registrations to the metadata log before they are acknowledged.
//!
//! Registrations of one shuffle are written one after another, because a record that replaces
//! others must contain their data. A registration without new ranges whose other data is that of
//! the latest record is not written, whichever client sends it. A record is refused before its
//! registration takes effect. The mark of an incomplete shuffle must be written before its
//! registration.

use std::hash::{Hash, Hasher};
use std::sync::Arc;

use crate::app::{
    App, AppRegistry, LoggedRegistrations, NextRecord, PartitionRanges, QuotaResource, Registration,
    ShuffleState,
};
use crate::log::{self, Record};
use crate::store::{MetadataTier, RegistrationLog, RemoteStorage, StoreErrorKind, Tiers};
use uniffle_wire::types::ShuffleKey;

use crate::service::ServiceError;

/// Maximum number of ranges of remote directories of a shuffle.
const REMOTE_RANGES_MAX: usize = 1 << 18;

/// A registration to be written to the log.
pub(super) struct NewRegistration {
    /// The registration without ranges and remote storage.
    fields: log::RegistrationRecord,
    ranges: PartitionRanges,
    remote: Option<RemoteRegistration>,
}

/// The parts of a registration for the remote tier of its shuffle.
pub(super) struct RemoteRegistration {
    /// As sent by the client.
    storage: Option<RemoteStorage>,
    /// First and last partition of the ranges that name directories.
    ranges: Vec<(i32, i32)>,
}

impl RemoteRegistration {
    /// Selects the data from the storage and ranges as sent.
    pub(super) fn new(storage: Option<&RemoteStorage>, sent: &[(i32, i32)]) -> Self {
        let ranges = sent.iter().filter(|(start, end)| start < end).copied().collect();
        Self { storage: storage.cloned(), ranges }
    }
}

impl NewRegistration {
    /// Creates the record data of a registration.
    pub(super) fn of(registration: &Registration, remote: Option<RemoteRegistration>) -> Self {
        let properties = registration.properties.iter();
        let mut properties: Vec<_> = properties.map(|(key, value)| (key.clone(), value.clone())).collect();
        properties.sort();
        let timeout = registration.heartbeat_timeout;
        let fields = log::RegistrationRecord {
            ranges: Vec::new(),
            distribution: registration.distribution,
            user: registration.user.clone(),
            properties,
            sent_properties: registration.sent_properties,
            heartbeat_timeout_ms: timeout.map(|it| u64::try_from(it.as_millis()).unwrap_or(u64::MAX)),
            stage_attempt: 0,
            remote_storage: Vec::new(),
        };
        Self { fields, ranges: registration.ranges.clone(), remote }
    }

    /// Returns the next record with its encoding and the digest of its data besides ranges, or
    /// `None` if there is nothing to write.
    fn next(
        &self,
        shuffle: &ShuffleState,
        logged: &LoggedRegistrations,
    ) -> Option<(NextRecord, Vec<u8>, u64)> {
        let storage = self.remote.as_ref().map(|remote| &remote.storage);
        let storage = storage.and_then(|it| serde_json::to_vec(it).ok()).unwrap_or_default();
        let fields = Record::Registration(self.fields.clone()).encode();
        let digest = digest(&fields, &storage);
        let remote_ranges = self.remote.as_ref().map_or(&[][..], |remote| &remote.ranges);
        let bytes = (fields.len() + storage.len()) as u64;
        let mut ranges = shuffle.partitions.ranges();
        ranges.extend(&self.ranges);
        let next = logged.next(&ranges, remote_ranges, digest, bytes)?;
        let remote = self.remote.as_ref().map(|remote| (&remote.storage, &next.remote_ranges));
        let remote_storage = remote.and_then(|it| serde_json::to_vec(&it).ok()).unwrap_or_default();
        let registration =
            log::RegistrationRecord { ranges: next.ranges.to_vec(), remote_storage, ..self.fields.clone() };
        let record = match next.replaces {
            true => Record::encode_replacing(&registration),
            false => Record::Registration(registration).encode(),
        };
        Some((next, record, digest))
    }
}

/// Registers a shuffle with `register`, and writes the registration to the metadata log of `tier`.
///
/// # Errors
/// The record or `register` was refused; nothing was registered then. Or the log fails: the
/// registration is in effect, but a later start may not know it.
pub(super) async fn register_and_log(
    apps: &AppRegistry,
    key: &ShuffleKey,
    tier: &dyn MetadataTier,
    tiers: &Tiers,
    new: NewRegistration,
    register: impl FnOnce() -> Result<(), ServiceError>,
) -> Result<(), ServiceError> {
    let find = || apps.find(&key.app).and_then(|app| Some((app.shuffle(key.shuffle)?, app)));
    let known = find();
    let mut checked = None;
    if let Some((state, app)) = &known {
        let logged = state.logged.lock().await;
        let next = new.next(state, &logged);
        if let Some((next, record, _)) = &next {
            check(app, &logged, next, record.len())?;
        }
        checked = Some((logged, next));
    }
    register()?;
    // If the shuffle was unregistered meanwhile, there is nothing to make durable.
    let (Some(log), Some((state, _))) = (tier.metadata_log(key), find()) else { return Ok(()) };
    let is_same = known.as_ref().is_some_and(|(checked, _)| Arc::ptr_eq(checked, &state));
    let (mut logged, next) = match checked.filter(|_| is_same) {
        Some(checked) => checked,
        None => {
            let logged = state.logged.lock().await;
            let next = new.next(&state, &logged);
            (logged, next)
        }
    };
    let Some((next, record, digest)) = next else { return Ok(()) };
    let bytes = record.len() as u64;
    match write(&*log, &state, &mut logged, record).await {
        Err(error) if is_gone(&error) => return Ok(()),
        written => written?,
    }
    logged.written(next, digest, bytes);
    drop(logged);
    state.on_disk.set(|| tiers.occupied_bytes(key));
    Ok(())
}

/// Refuses a record of a shuffle with too many ranges of remote directories, and any but the first
/// record of a shuffle if the application's disk quota is exhausted.
fn check(
    app: &App,
    logged: &LoggedRegistrations,
    next: &NextRecord,
    bytes: usize,
) -> Result<(), ServiceError> {
    check_remote_ranges(logged, next)?;
    if !logged.is_empty() {
        app.usage.check(QuotaResource::DiskBytes, bytes as u64)?;
    }
    Ok(())
}

fn check_remote_ranges(logged: &LoggedRegistrations, next: &NextRecord) -> Result<(), ServiceError> {
    let size = logged.remote_range_count(next);
    if size > REMOTE_RANGES_MAX {
        let (field, unit) = ("partitionRanges", "ranges, earlier registrations included");
        return Err(ServiceError::FieldTooLarge { field, size, unit, max: REMOTE_RANGES_MAX });
    }
    Ok(())
}

async fn write(
    log: &dyn RegistrationLog,
    state: &ShuffleState,
    logged: &mut LoggedRegistrations,
    record: Vec<u8>,
) -> Result<(), ServiceError> {
    // The mark is written first: a start that finds the registration then also finds why its
    // results are refused.
    if let Some(reason) = state.ledger.incomplete()
        && logged.needs_incomplete_mark()
    {
        log.mark_incomplete(reason).await?;
        logged.incomplete_mark_written();
    }
    Ok(log.append(record.into()).await?)
}

fn is_gone(error: &ServiceError) -> bool {
    matches!(error, ServiceError::Store(error) if error.kind == StoreErrorKind::Purged)
}

/// Returns a digest of a registration without its ranges. It is never 0, which means no
/// registration.
fn digest(fields: &[u8], storage: &[u8]) -> u64 {
    let mut hasher = std::hash::DefaultHasher::new();
    (fields, storage).hash(&mut hasher);
    hasher.finish().max(1)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn remote_ranges_of_several_records_are_limited() {
        let mut logged = LoggedRegistrations::default();
        let next = |logged: &LoggedRegistrations, first| {
            let starts = (first..).step_by(3).take(REMOTE_RANGES_MAX / 2 + 1);
            let sent: Vec<_> = starts.map(|start| (start, start + 1)).collect();
            logged.next(&PartitionRanges::parse(&sent).unwrap(), &sent, 1, 0).unwrap()
        };
        let first = next(&logged, 0);
        check_remote_ranges(&logged, &first).unwrap();
        logged.written(first, 1, 0);
        let second = next(&logged, 1_000_000);
        assert!(!second.replaces);
        check_remote_ranges(&logged, &second).unwrap_err();
    }
}
