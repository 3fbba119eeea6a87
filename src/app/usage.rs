//! Quotas, and the usage of applications and users that they limit.
//!
//! All usage is held as a [`Charge`], so it is never decremented explicitly. An application's usage
//! also counts for its user. Lowering a quota frees nothing; it only refuses new requests. Usage
//! found at a restart must be counted before quotas are set, so that it is never refused. `service`
//! decides how to respond to a request over its quota.

use std::collections::HashMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Weak};

use uniffle_base::budget::{Budget, Charge};

/// Resource limited by quotas.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum QuotaResource {
    /// Bytes in the tier that is read through the worker (local disks and object store): payload,
    /// alignment, index groups, and on disks also metadata records and runs of reported ids.
    DiskBytes,
    /// Block ids of finished task attempts.
    ReportedIds,
    /// Registered partitions.
    Partitions,
    /// Reads whose responses are not yet consumed.
    OpenReads,
}

/// Subject of a quota.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum QuotaSubject {
    /// An application.
    App,
    /// A user: all applications that first registered with this name.
    User,
}

/// Identifies one quota.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct QuotaKind {
    /// Whose usage is limited.
    pub subject: QuotaSubject,
    /// The limited resource.
    pub resource: QuotaResource,
}

impl QuotaResource {
    /// All resources.
    pub const ALL: [Self; 4] = [Self::DiskBytes, Self::ReportedIds, Self::Partitions, Self::OpenReads];
}

impl QuotaSubject {
    /// Both subjects.
    pub const ALL: [Self; 2] = [Self::App, Self::User];
}

/// Returns the quota's configuration key.
#[must_use]
pub fn quota_key(kind: QuotaKind) -> &'static str {
    match (kind.subject, kind.resource) {
        (QuotaSubject::App, QuotaResource::DiskBytes) => "quota.app_disk",
        (QuotaSubject::App, QuotaResource::ReportedIds) => "quota.app_reported_ids",
        (QuotaSubject::App, QuotaResource::Partitions) => "quota.app_partitions",
        (QuotaSubject::App, QuotaResource::OpenReads) => "quota.app_open_reads",
        (QuotaSubject::User, QuotaResource::DiskBytes) => "quota.user_disk",
        (QuotaSubject::User, QuotaResource::ReportedIds) => "quota.user_reported_ids",
        (QuotaSubject::User, QuotaResource::Partitions) => "quota.user_partitions",
        (QuotaSubject::User, QuotaResource::OpenReads) => "quota.user_open_reads",
    }
}

/// Error: a request exceeds a quota; nothing was taken.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("{} is {max}: {used} in use, {requested} more requested", quota_key(*.kind))]
pub struct OverQuota {
    /// The exceeded quota.
    pub kind: QuotaKind,
    /// Limit of the quota.
    pub max: u64,
    /// Usage at the time of the request.
    pub used: u64,
    /// Requested amount.
    pub requested: u64,
}

/// A number for each quota.
#[derive(Debug, Default)]
struct EachQuota([[AtomicU64; QuotaResource::ALL.len()]; QuotaSubject::ALL.len()]);

impl EachQuota {
    fn of(&self, kind: QuotaKind) -> &AtomicU64 {
        &self.0[kind.subject as usize][kind.resource as usize]
    }
}

/// The current quotas, and how often each has refused a request.
#[derive(Debug, Default)]
pub struct Quotas {
    max: EachQuota,
    refused: EachQuota,
}

impl Quotas {
    /// Replaces a quota; 0 removes it.
    pub fn set(&self, kind: QuotaKind, max: u64) {
        self.max.of(kind).store(max, Ordering::Relaxed);
    }

    /// Returns a quota, if it is set.
    #[must_use]
    pub fn max(&self, kind: QuotaKind) -> Option<u64> {
        Some(self.max.of(kind).load(Ordering::Relaxed)).filter(|max| *max > 0)
    }

    /// Returns how often the quota has refused a request since the start.
    #[must_use]
    pub fn refused(&self, kind: QuotaKind) -> u64 {
        self.refused.of(kind).load(Ordering::Relaxed)
    }
}

type UsageCounts = [Budget; QuotaResource::ALL.len()];

/// Usage of one application.
#[derive(Debug)]
pub struct AppUsage {
    quotas: Arc<Quotas>,
    of_app: UsageCounts,
    of_user: Arc<UsageCounts>,
    refused: EachQuota,
}

impl AppUsage {
    fn new(quotas: Arc<Quotas>, of_user: Arc<UsageCounts>) -> Self {
        let of_app = of_user.each_ref().map(|user| user.child(u64::MAX));
        Self { quotas, of_app, of_user, refused: EachQuota::default() }
    }

    /// Returns the usage of the application or its user.
    #[must_use]
    pub fn used(&self, kind: QuotaKind) -> u64 {
        let counts = match kind.subject {
            QuotaSubject::App => &self.of_app,
            QuotaSubject::User => &*self.of_user,
        };
        counts[kind.resource as usize].used()
    }

    /// Returns how often a quota has refused a request of this application.
    #[must_use]
    pub fn refused(&self, kind: QuotaKind) -> u64 {
        self.refused.of(kind).load(Ordering::Relaxed)
    }

    /// Counts `count` more regardless of the quotas.
    pub fn count(&self, counted: QuotaResource, count: u64) -> Charge {
        self.of_app[counted as usize].charge_unchecked(count)
    }

    /// Counts `count` more if the quotas allow it.
    ///
    /// # Errors
    /// [`OverQuota`]. Two concurrent requests for the remaining amount may both be refused.
    pub fn take(&self, counted: QuotaResource, count: u64) -> Result<Charge, OverQuota> {
        let charge = self.count(counted, count);
        self.check_amount(counted, count, count)?;
        Ok(charge)
    }

    /// Checks whether the quotas allow `count` more.
    ///
    /// # Errors
    /// [`OverQuota`].
    pub fn check(&self, counted: QuotaResource, count: u64) -> Result<(), OverQuota> {
        self.check_amount(counted, count, 0)
    }

    /// Checks the quotas for `requested`, of which `counted_already` is included in the counts.
    fn check_amount(
        &self,
        counted: QuotaResource,
        requested: u64,
        counted_already: u64,
    ) -> Result<(), OverQuota> {
        for subject in QuotaSubject::ALL {
            let kind = QuotaKind { subject, resource: counted };
            let Some(max) = self.quotas.max(kind) else { continue };
            let used = self.used(kind).saturating_sub(counted_already);
            if used.saturating_add(requested) > max {
                self.refused.of(kind).fetch_add(1, Ordering::Relaxed);
                self.quotas.refused.of(kind).fetch_add(1, Ordering::Relaxed);
                return Err(OverQuota { kind, max, used, requested });
            }
        }
        Ok(())
    }
}

/// Usage of each user that has at least one application.
#[derive(Debug, Default)]
pub(super) struct Users {
    quotas: Arc<Quotas>,
    known: HashMap<String, Weak<UsageCounts>>,
    /// Number of entries at which those without an application are removed.
    sweep_at: usize,
}

impl Users {
    pub(super) fn of(quotas: Arc<Quotas>) -> Self {
        Self { quotas, ..Self::default() }
    }

    /// Returns the usage of a new application of `user`.
    pub(super) fn usage(&mut self, user: &str) -> AppUsage {
        let counts = self.known.get(user).and_then(Weak::upgrade).unwrap_or_else(|| {
            if self.known.len() >= self.sweep_at {
                self.known.retain(|_, counts| counts.strong_count() > 0);
                self.sweep_at = 2 * self.known.len() + 16;
            }
            let counts = Arc::new(QuotaResource::ALL.map(|_| Budget::new(u64::MAX)));
            self.known.insert(user.to_owned(), Arc::downgrade(&counts));
            counts
        });
        AppUsage::new(Arc::clone(&self.quotas), counts)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const APP: QuotaKind = QuotaKind { subject: QuotaSubject::App, resource: QuotaResource::Partitions };
    const USER: QuotaKind = QuotaKind { subject: QuotaSubject::User, resource: QuotaResource::Partitions };

    #[test]
    fn application_and_user_quotas_are_independent() {
        let quotas = Arc::new(Quotas::default());
        let mut users = Users::of(Arc::clone(&quotas));
        let (a, b, other) = (users.usage("etl"), users.usage("etl"), users.usage("anna"));
        let take = |usage: &AppUsage, count| usage.take(QuotaResource::Partitions, count);
        let before = take(&a, 50).unwrap();
        quotas.set(APP, 60);
        quotas.set(USER, 100);
        let refused = take(&a, 11).unwrap_err();
        assert_eq!(refused, OverQuota { kind: APP, max: 60, used: 50, requested: 11 });
        assert_eq!(refused.to_string(), "quota.app_partitions is 60: 50 in use, 11 more requested");
        let more = take(&b, 50).unwrap();
        assert_eq!(take(&a, 1).unwrap_err().kind, USER);
        assert_eq!((a.used(APP), a.used(USER), other.used(USER)), (50, 100, 0));
        assert_eq!((a.refused(APP), a.refused(USER), quotas.refused(USER)), (1, 1, 1));
        assert!(take(&other, 60).is_ok());
        // Lowering a quota frees nothing, and usage found at a start is counted all the same.
        quotas.set(APP, 10);
        let found = a.count(QuotaResource::Partitions, 7);
        assert_eq!(a.used(APP), 57);
        assert!(a.check(QuotaResource::Partitions, 0).is_err());
        drop((before, found));
        assert!(
            a.check(QuotaResource::Partitions, 10).is_ok()
                && a.check(QuotaResource::ReportedIds, u64::MAX).is_ok()
        );
        quotas.set(APP, 0);
        assert!(a.check(QuotaResource::Partitions, 50).is_ok(), "a quota of 0 is no limit");
        drop(more);
        assert_eq!((a.used(USER), b.used(APP)), (0, 0));
    }

    #[test]
    fn user_without_applications_is_forgotten() {
        let mut users = Users::of(Arc::default());
        for user in 0..1000 {
            drop(users.usage(&user.to_string()));
        }
        assert!(users.known.len() <= 16, "{}", users.known.len());
        let kept = users.usage("etl");
        let held = kept.count(QuotaResource::OpenReads, 1);
        let reads = QuotaKind { subject: QuotaSubject::User, resource: QuotaResource::OpenReads };
        assert_eq!(users.usage("etl").used(reads), 1);
        drop(held);
    }
}
