//! Names of the tier in metrics, logs and the API.

use crate::tiers::TierNames;

pub(in crate::tiers) const NAMES: TierNames = TierNames {
    name: "object",
    title: "the object store",
    label: "OBJECT",
    spill: "object",
    events: "object",
    queue: "object",
};
