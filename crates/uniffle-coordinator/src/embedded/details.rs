//! Details of a node for the cluster view: disks and applications from its heartbeat.
//!
//! Invariant: details of all nodes together take at most [`BYTES_MAX`], even with forged
//! heartbeats. Entries that do not fit are omitted, applications before disks, and the node is
//! marked.

use crate::proto::{ApplicationInfo, ShuffleServerHeartBeatRequest, StorageInfo};

/// Maximum size of the details of all nodes: 16,000 applications, as in a cluster of 1,000 nodes.
pub(super) const BYTES_MAX: usize = 4 << 20;

/// Maximum length of a version.
const VERSION_BYTES_MAX: usize = 255;

/// Size of an entry without its text.
const ENTRY_BYTES: usize = 160;

/// Figure of a heartbeat with the bytes of the worker's data on its disks. `storage_info` has the
/// use of whole file systems, as coordinators expect it.
pub const DISKS_USED: &str = "storage_used_bytes";

/// Details of a node from its last heartbeat.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Details {
    /// Memory reserved by tickets.
    pub reserved_bytes: u64,
    /// Batches being flushed.
    pub unfinished_batches: u64,
    /// Version of the server.
    pub version: String,
    /// Bytes of the worker's data on its disks, if reported.
    pub disks_used_bytes: Option<u64>,
    /// Disks by mount point.
    pub disks: Vec<StorageInfo>,
    /// The largest applications.
    pub apps: Vec<ApplicationInfo>,
    /// True if disks or applications were omitted.
    pub is_cut: bool,
}

impl Details {
    /// Moves the details out of `heartbeat`, up to `room` bytes.
    pub(super) fn take(heartbeat: &mut ShuffleServerHeartBeatRequest, room: usize) -> Self {
        let unsigned = |number: i64| u64::try_from(number).unwrap_or(0);
        let mut details = Self {
            reserved_bytes: unsigned(heartbeat.pre_allocated_memory),
            unfinished_batches: unsigned(heartbeat.event_num_in_flush.into()),
            disks_used_bytes: heartbeat.display_metrics.get(DISKS_USED).and_then(|text| text.parse().ok()),
            ..Self::default()
        };
        details.version = heartbeat
            .version
            .take()
            .filter(|text| text.len() <= room.min(VERSION_BYTES_MAX))
            .unwrap_or_default();
        let mut left = room.saturating_sub(details.version.len());
        let mut fits = |text: &str| {
            let bytes = ENTRY_BYTES + text.len();
            let has_room = left >= bytes;
            left -= if has_room { bytes } else { 0 };
            has_room
        };
        let disks = std::mem::take(&mut heartbeat.storage_info);
        let apps = std::mem::take(&mut heartbeat.application_info);
        let reported = disks.len() + apps.len();
        details.disks.extend(disks.into_values().filter(|disk| fits(&disk.mount_point)));
        details.apps.extend(apps.into_iter().filter(|app| fits(&app.app_id)));
        details.is_cut = details.disks.len() + details.apps.len() < reported;
        details.disks.sort_by(|left, right| left.mount_point.cmp(&right.mount_point));
        details
    }

    /// Returns the size that counts towards [`BYTES_MAX`].
    pub(super) fn bytes(&self) -> usize {
        let texts = self.disks.iter().map(|disk| &disk.mount_point);
        let texts = texts.chain(self.apps.iter().map(|app| &app.app_id));
        texts.map(|text| ENTRY_BYTES + text.len()).sum::<usize>() + self.version.len()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn heartbeat(apps: usize) -> ShuffleServerHeartBeatRequest {
        let app = |n: usize| ApplicationInfo { app_id: format!("app-{n:03}"), ..Default::default() };
        let disk = StorageInfo { mount_point: "/d".to_owned(), ..Default::default() };
        ShuffleServerHeartBeatRequest {
            pre_allocated_memory: -7,
            version: Some("1".to_owned()),
            storage_info: [("/d".to_owned(), disk)].into(),
            application_info: (0..apps).map(app).collect(),
            ..Default::default()
        }
    }

    #[test]
    fn details_without_room_are_marked_omitted() {
        let all = Details::take(&mut heartbeat(3), BYTES_MAX);
        assert_eq!((all.disks.len(), all.apps.len(), all.is_cut, all.reserved_bytes), (1, 3, false, 0));
        let room = all.bytes() - 1;
        let cut = Details::take(&mut heartbeat(3), room);
        assert_eq!((cut.disks.len(), cut.apps.len(), cut.is_cut), (1, 2, true));
        assert!(cut.bytes() <= room);
        let none = Details::take(&mut heartbeat(3), 0);
        assert_eq!((none.bytes(), none.is_cut), (0, true));
    }

    #[test]
    fn use_of_disks_is_optional() {
        let used = |text: &str| {
            let mut heartbeat = heartbeat(0);
            heartbeat.display_metrics = [(DISKS_USED.to_owned(), text.to_owned())].into();
            Details::take(&mut heartbeat, BYTES_MAX).disks_used_bytes
        };
        assert_eq!((used("7"), used("-7"), used("much")), (Some(7), None, None));
        assert_eq!(Details::take(&mut heartbeat(1), BYTES_MAX).disks_used_bytes, None);
    }

    #[test]
    fn hostile_entries_cost_at_most_their_charge() {
        let mut heartbeat = heartbeat(0);
        heartbeat.application_info = vec![ApplicationInfo::default(); 1 << 17];
        let details = Details::take(&mut heartbeat, BYTES_MAX);
        assert!(details.apps.len() * size_of::<ApplicationInfo>() <= BYTES_MAX, "{}", details.apps.len());
    }
}
