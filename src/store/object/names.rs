//! Names of the tier in metrics, logs and the API.

use crate::store::TierNames;

pub(crate) const NAMES: TierNames = TierNames {
    name: "object",
    title: "the object store",
    label: "OBJECT",
    spill: "object",
    events: "object",
    queue: "object",
};
