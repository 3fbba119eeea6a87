//! Takes over what the store found at the start: registrations and reports, from their notes.
//!
//! A shuffle without a registration is nobody's and is removed.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use crate::app::{PartitionRanges, Registration};
use crate::journal::{self, Note};
use crate::store::{Recovered, RecoveredShuffle};
use crate::types::ShuffleKey;

use super::{Service, ServiceError};

/// What was taken over.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Restored {
    /// Applications.
    pub apps: usize,
    /// Shuffles.
    pub shuffles: usize,
    /// Shuffles found without a registration.
    pub unregistered: usize,
    /// Reported block ids.
    pub reported_blocks: u64,
}

impl Service {
    /// Makes known what was found on the disks. Every app counts as used now.
    pub fn restore(self: &Arc<Self>, recovered: Recovered) -> Restored {
        let mut restored = Restored::default();
        let (bytes, blocks, took) = (recovered.bytes, recovered.blocks, recovered.took);
        for shuffle in recovered.shuffles {
            let key = shuffle.key.clone();
            match self.restore_shuffle(shuffle) {
                Ok(true) => restored.shuffles += 1,
                Ok(false) => {
                    tracing::info!(shuffle = %key, "was never registered, removed");
                    restored.unregistered += 1;
                    self.discard(&key);
                }
                Err(error) => {
                    tracing::error!(shuffle = %key, %error, "can not be taken over, removed");
                    restored.unregistered += 1;
                    self.discard(&key);
                }
            }
        }
        self.apps.touch_all();
        restored.apps = self.apps.app_count();
        restored.reported_blocks = self.apps.block_id_count();
        if restored.shuffles + restored.unregistered > 0 {
            tracing::info!(
                apps = restored.apps,
                shuffles = restored.shuffles,
                bytes,
                blocks,
                reported_blocks = restored.reported_blocks,
                ?took,
                "took over what an earlier process left"
            );
        }
        restored
    }

    fn discard(self: &Arc<Self>, key: &ShuffleKey) {
        self.purge_state(&key.app, std::slice::from_ref(key));
    }

    /// False when it was never registered.
    fn restore_shuffle(&self, shuffle: RecoveredShuffle) -> Result<bool, ServiceError> {
        let key = shuffle.key;
        let mut registrations = Vec::new();
        let mut reports = Vec::new();
        for note in &shuffle.notes {
            match Note::decode(note) {
                Ok(Note::Registration(registration)) => registrations.push(registration),
                Ok(Note::Report(report)) => reports.push(report),
                Err(error) => return Err(ServiceError::Malformed(format!("journal: {error}"))),
            }
        }
        if registrations.is_empty() {
            return Ok(false);
        }
        for registration in registrations {
            let distribution = registration.distribution;
            let registration = registration_of(&key, registration)?;
            self.apps.register(registration, || self.memory.register(&key, distribution))?;
        }
        let state = self.apps.find(&key.app).and_then(|app| app.shuffle(key.shuffle));
        let Some(state) = state else { return Ok(false) };
        for report in reports {
            let taken = state.block_ids().lock().report(report.bitmap_count, &report.partitions);
            if let Err(error) = taken {
                tracing::error!(shuffle = %key, task_attempt = report.task_attempt, %error, "a report is not taken over");
            }
        }
        Ok(true)
    }
}

fn registration_of(key: &ShuffleKey, note: journal::Registration) -> Result<Registration, ServiceError> {
    Ok(Registration {
        key: key.clone(),
        ranges: PartitionRanges::parse(&note.ranges)?,
        distribution: note.distribution,
        user: note.user,
        properties: note.properties.into_iter().collect::<HashMap<_, _>>(),
        sent_properties: note.sent_properties,
        heartbeat_timeout: note.heartbeat_timeout_ms.map(Duration::from_millis),
    })
}
