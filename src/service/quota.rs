//! Quotas of one application and one user on this worker.
//!
//! A registration, report, ticket or send over its quota gets `INTERNAL_ERROR` with the key's name.
//! Clients try three times within half a minute, enough for a shuffle that is being removed, and
//! then fail with that text. With `NO_BUFFER` they would wait for minutes, and fail without a
//! reason. Reads end by themselves, so a read over the quota gets `NO_BUFFER`. An application over
//! its quota of disk bytes gets no tickets. Its acknowledged data is still flushed, so the quota
//! may be exceeded by the data in memory.

use prometheus::{IntCounterVec, IntGaugeVec};
use serde::Serialize;

use crate::app::{App, AppRegistry, QuotaKind, QuotaResource, QuotaSubject, Quotas, quota_key};
use crate::metrics::{self, clamped};
use crate::schema::kind::{TIB, count, size};
use crate::schema::section;

/// Upper bound of configurable counts, larger than any real one.
const COUNT_MAX: u64 = 1 << 40;

section! {
    /// Limits of one application and of one user.
    #[table(
        "quota",
        "Limits of one application and of one user on this worker; 0 = unlimited.\n\
         The user of an application is the one that it first registered with.\n\
         Requests above a limit are refused with an error that contains the key; existing data is \
         not deleted."
    )]
    pub struct QuotaConfig {
        /// Bytes of an application on local disks. Above it, tickets, sends and registrations are
        /// refused; blocks in memory are still flushed.
        #[key("quota.app_disk", size(0..=1024 * TIB), AtOnce)]
        pub app_disk: u64 = 0,
        /// Reported block ids of an application.
        #[key("quota.app_reported_ids", count(0..=COUNT_MAX), AtOnce)]
        pub app_reported_ids: u64 = 0,
        /// Registered partitions of an application.
        #[key("quota.app_partitions", count(0..=COUNT_MAX), AtOnce)]
        pub app_partitions: u64 = 0,
        /// Reads of an application whose responses are not fully consumed. Further reads get
        /// NO_BUFFER and are retried by the client.
        #[key("quota.app_open_reads", count(0..=COUNT_MAX), AtOnce)]
        pub app_open_reads: u64 = 0,
        /// Like app_disk, over all applications of a user.
        #[key("quota.user_disk", size(0..=1024 * TIB), AtOnce)]
        pub user_disk: u64 = 0,
        /// Like app_reported_ids, over all applications of a user.
        #[key("quota.user_reported_ids", count(0..=COUNT_MAX), AtOnce)]
        pub user_reported_ids: u64 = 0,
        /// Like app_partitions, over all applications of a user.
        #[key("quota.user_partitions", count(0..=COUNT_MAX), AtOnce)]
        pub user_partitions: u64 = 0,
        /// Like app_open_reads, over all applications of a user.
        #[key("quota.user_open_reads", count(0..=COUNT_MAX), AtOnce)]
        pub user_open_reads: u64 = 0,
    }
}

impl QuotaConfig {
    fn of(&self, kind: QuotaKind) -> u64 {
        match (kind.subject, kind.resource) {
            (QuotaSubject::App, QuotaResource::DiskBytes) => self.app_disk,
            (QuotaSubject::App, QuotaResource::ReportedIds) => self.app_reported_ids,
            (QuotaSubject::App, QuotaResource::Partitions) => self.app_partitions,
            (QuotaSubject::App, QuotaResource::OpenReads) => self.app_open_reads,
            (QuotaSubject::User, QuotaResource::DiskBytes) => self.user_disk,
            (QuotaSubject::User, QuotaResource::ReportedIds) => self.user_reported_ids,
            (QuotaSubject::User, QuotaResource::Partitions) => self.user_partitions,
            (QuotaSubject::User, QuotaResource::OpenReads) => self.user_open_reads,
        }
    }
}

/// A configured quota, and its use by the application or user with the largest usage, or by the
/// application that an explanation is about.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct QuotaUse {
    /// Configuration key.
    pub quota: &'static str,
    /// Limit of the quota.
    pub max: u64,
    /// Usage of that application or user.
    pub used: u64,
    /// Name of the application or user with the largest usage; `None` without an application, and
    /// in an explanation.
    pub by: Option<String>,
    /// Refusals since the start, of all applications or of the one described.
    pub refused: u64,
}

fn kinds() -> impl Iterator<Item = QuotaKind> {
    let of = |subject| QuotaResource::ALL.map(|resource| QuotaKind { subject, resource });
    QuotaSubject::ALL.into_iter().flat_map(of)
}

/// Replaces the quotas with immediate effect. Must not be called before recovered state is
/// restored, because that must not be refused.
pub(super) fn set(apps: &AppRegistry, config: &QuotaConfig) {
    kinds().for_each(|kind| apps.quotas().set(kind, config.of(kind)));
}

/// Returns the configured quotas, each with the application or user that uses most of it.
pub(super) fn in_force(registry: &AppRegistry) -> Vec<QuotaUse> {
    let quotas = registry.quotas();
    let set: Vec<(QuotaKind, u64)> = kinds().filter_map(|kind| Some((kind, quotas.max(kind)?))).collect();
    let apps = if set.is_empty() { Vec::new() } else { registry.apps() };
    let fullest = |(kind, max): (QuotaKind, u64)| {
        let most = apps.iter().max_by_key(|app| app.usage.used(kind));
        QuotaUse {
            quota: quota_key(kind),
            max,
            used: most.map_or(0, |app| app.usage.used(kind)),
            by: most.map(|app| match kind.subject {
                QuotaSubject::App => app.id().to_string(),
                QuotaSubject::User => app.client.user(),
            }),
            refused: quotas.refused(kind),
        }
    };
    set.into_iter().map(fullest).collect()
}

/// Returns the configured quotas with the usage of `app` and its user.
pub(super) fn of_app(quotas: &Quotas, app: &App) -> Vec<QuotaUse> {
    let usage = &app.usage;
    let of_app = |kind: QuotaKind| {
        let (used, refused) = (usage.used(kind), usage.refused(kind));
        Some(QuotaUse { quota: quota_key(kind), max: quotas.max(kind)?, used, by: None, refused })
    };
    kinds().filter_map(of_app).collect()
}

metrics::table! {
    /// The quotas, by their keys.
    pub(crate) struct QuotaMetrics {
        refused: IntCounterVec["quota"] = "quota_refused_total", "Requests refused by a quota, by key";
        used: IntGaugeVec["quota"] =
            "quota_used", "Usage of the largest application or user, by quota key";
        max: IntGaugeVec["quota"] = "quota_max", "Limit of a quota, by key; 0 = unlimited";
    }
}

impl QuotaMetrics {
    /// Updates the metrics.
    pub(super) fn set(&self, registry: &AppRegistry) {
        let (quotas, apps) = (registry.quotas(), registry.apps());
        for kind in kinds() {
            let label = [quota_key(kind)];
            let refused = self.refused.with_label_values(&label);
            refused.inc_by(quotas.refused(kind).saturating_sub(refused.get()));
            let used = apps.iter().map(|app| app.usage.used(kind)).max();
            self.used.with_label_values(&label).set(clamped(used.unwrap_or(0)));
            self.max.with_label_values(&label).set(clamped(quotas.max(kind).unwrap_or(0)));
        }
    }
}
