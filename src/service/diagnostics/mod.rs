//! Diagnostics of the worker: applications, recent samples, losses, gauges.
//!
//! It reads the other parts of the service. It changes only metrics and, with the samples that a
//! task takes, the applications' memory statistics. All other figures are computed on request, some
//! of them by a walk over all partitions.

pub(super) mod explain;
pub(super) mod history;
pub(super) mod statistics;
pub(super) mod top_apps;

use std::sync::Arc;
use std::time::{SystemTime, UNIX_EPOCH};

use tokio::time::{MissedTickBehavior, interval};

use crate::app::App;
use crate::clock::Instant;
use crate::service::losses::{Incompleteness, LossReport, lost_blocks_of};
use crate::service::parts::{ServiceParts, run_own_blocking};
use crate::service::quota::{self, QuotaUse};
use crate::store::DiskCondition;
use uniffle_wire::types::AppId;

use explain::{Explanation, FinishedApps, Presence, StorageCondition, explanation};
use history::{History, PARTITIONS_PER_SAMPLE, SAMPLE_INTERVAL, Sample, sample_apps};
use statistics::{AppStatistics, statistics_of};

/// Diagnostics over the parts of the service.
#[derive(Debug)]
pub struct Diagnostics {
    parts: Arc<ServiceParts>,
    history: History,
    finished: FinishedApps,
}

impl Diagnostics {
    pub(super) fn new(parts: &Arc<ServiceParts>) -> Self {
        let parts = Arc::clone(parts);
        Self { parts, history: History::default(), finished: FinishedApps::default() }
    }

    /// Returns the statistics of all applications.
    pub fn app_statistics(&self) -> Vec<AppStatistics> {
        self.parts
            .apps
            .apps()
            .iter()
            .map(|app| statistics_of(app, &self.parts.memory, &self.parts.tiers))
            .collect()
    }

    /// Returns the explanation of `app`. A removed application is found while it is among the
    /// latest.
    pub fn explain(&self, app: &str) -> Option<Arc<Explanation>> {
        let known = AppId::parse(app).ok().and_then(|id| self.parts.apps.find(&id));
        match known {
            Some(app) => Some(Arc::new(self.explanation(&app, Presence::Known))),
            None => self.finished.find(app),
        }
    }

    /// Returns the explanations of removed applications, the latest first.
    pub fn finished_apps(&self) -> Vec<Arc<Explanation>> {
        self.finished.all()
    }

    /// Calls `remove` and keeps an explanation of the application if it was removed.
    pub(super) fn remove_explained(&self, id: &AppId, why: Presence, remove: impl FnOnce() -> bool) -> bool {
        let explanation = self.parts.apps.find(id).map(|app| self.explanation(&app, why));
        let removed = remove();
        if let Some(explanation) = explanation.filter(|_| removed) {
            self.finished.push(explanation);
        }
        removed
    }

    fn explanation(&self, app: &App, presence: Presence) -> Explanation {
        let (statistics, quotas) = (
            statistics_of(app, &self.parts.memory, &self.parts.tiers),
            quota::of_app(self.parts.apps.quotas(), app),
        );
        let states: Vec<_> = self.parts.tiers.iter().map(|tier| tier.state()).collect();
        let mut disks = states.iter().flat_map(|state| &state.disks).peekable();
        let storage = StorageCondition {
            object_store_is_failing: states
                .iter()
                .filter_map(|state| state.object_store)
                .any(|it| it.is_failing),
            all_disks_full: disks.peek().is_some() && disks.all(|disk| disk.condition == DiskCondition::Full),
        };
        explanation(app, presence, &statistics, quotas, &self.parts.memory, storage)
    }

    /// Returns the configured quotas, each with the application or user that uses most of it.
    #[must_use]
    pub fn quotas(&self) -> Vec<QuotaUse> {
        quota::in_force(&self.parts.apps)
    }

    /// Returns all current losses.
    pub fn losses(&self) -> LossReport {
        self.parts.losses.report()
    }

    /// Returns a summary of the shuffles that are not proven to be complete.
    pub fn incompleteness(&self) -> Incompleteness {
        let gap = self.parts.tiers.metadata().and_then(|tier| tier.metadata_gap());
        self.parts.losses.incompleteness(gap.map(|reason| reason.to_string()))
    }

    /// Returns the number of lost blocks of one application.
    pub fn lost_blocks(&self, app: &App) -> u64 {
        lost_blocks_of(app)
    }

    /// Returns the tickets refused since the start: for lack of memory, and because a huge
    /// partition fills its share.
    pub fn refused_tickets(&self) -> (u64, u64) {
        let metrics = &self.parts.metrics;
        (metrics.require_buffer_refused_regular.get(), metrics.require_buffer_refused_huge.get())
    }

    /// Updates the gauges of live values; called before metrics are gathered.
    pub fn refresh_metrics(&self, apps: &[AppStatistics]) {
        self.parts.metrics.set_inventory(apps, self.parts.apps.block_id_count());
        self.parts.metrics.set_state(self.parts.status.state());
        self.parts.losses.set_gauges();
        self.parts.metrics.quotas.set(&self.parts.apps);
    }

    /// Returns the samples later than `after_ms`, oldest first.
    pub fn history(&self, after_ms: u64) -> Vec<Sample> {
        self.history.after(after_ms)
    }

    /// Returns a sample of the worker.
    pub fn sample(&self) -> Sample {
        let since_epoch = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        Sample {
            at_ms: u64::try_from(since_epoch.as_millis()).unwrap_or(u64::MAX),
            received_bytes: self.parts.metrics.received_bytes.get(),
            read_bytes: self.parts.metrics.read_bytes.get(),
            flushed_bytes: self.parts.flusher.as_ref().map_or(0, |flusher| flusher.flushed_bytes()),
            memory_used_bytes: self.parts.memory.used_bytes(),
            memory_reserved_bytes: self.parts.memory.pre_allocated_bytes(),
            memory_in_flight_bytes: self.parts.memory.in_flight_bytes(),
        }
    }

    /// Takes samples until the worker stops.
    pub async fn run_sampling(self: Arc<Self>) {
        let stopped = self.parts.tasks.cancelled();
        tokio::pin!(stopped);
        let mut ticks = interval(SAMPLE_INTERVAL);
        ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
        let (mut walked, mut pause) = (Instant::now(), 0);
        loop {
            tokio::select! {
                biased;
                () = &mut stopped => return,
                _ = ticks.tick() => self.history.push(self.sample()),
            }
            if pause > 0 {
                pause -= 1;
                continue;
            }
            let (diagnostics, over) = (Arc::clone(&self), walked.elapsed());
            let is_quick = self.parts.memory.partitions() < PARTITIONS_PER_SAMPLE as u64;
            let sampled = match is_quick {
                true => Ok(sample_apps(&diagnostics.parts.apps, &diagnostics.parts.memory, over)),
                false => {
                    run_own_blocking(move || {
                        sample_apps(&diagnostics.parts.apps, &diagnostics.parts.memory, over)
                    })
                    .await
                }
            };
            pause = sampled.unwrap_or_default() / PARTITIONS_PER_SAMPLE;
            walked = Instant::now();
        }
    }
}
