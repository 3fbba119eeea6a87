//! How a shuffle on the disks and one of the same name in the store belong together. Pure.

use crate::durability::{LostExtent, PresentIds};
use crate::tiers::RecoveredShuffle;
use crate::tiers::object::Bound;

/// What the one is to the other.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Relation {
    /// Both halves of one registration.
    Same,
    /// Both halves of one registration, which other disks continued in between.
    Continued,
    /// Both halves of one registration, as the disks lack blocks that the store has; the pages that would say so are lost.
    Torn,
    /// The store has an earlier registration, or the beginning of a copy, and the disks need nothing of it.
    Over,
    /// The store has a later registration, of which these disks know nothing.
    Disputed,
}

/// The relation of the registration `number` on the disks to the one in the store.
pub(super) fn relation(
    number: u64,
    bound: &Bound,
    of_disks: &RecoveredShuffle,
    of_store: &RecoveredShuffle,
) -> Relation {
    if !bound.is_whole {
        let is_needed = of_disks.lost.iter().any(|lost| is_found(lost, &of_store.present));
        return if is_needed { Relation::Torn } else { Relation::Over };
    }
    match bound.local {
        Some(last) if last == number => Relation::Same,
        Some(_) if bound.locals.contains(&number) => Relation::Continued,
        last if number > last.unwrap_or(bound.incarnation) => Relation::Over,
        _ => Relation::Disputed,
    }
}

/// Forgets losses of blocks that are `present` elsewhere.
pub(super) fn remove_found(lost: &mut Vec<LostExtent>, present: &PresentIds) {
    for extent in &mut *lost {
        let Some(ids) = present.held(extent.partition) else { continue };
        extent.blocks.retain(|(id, _)| !ids.contains(id.0.unsigned_abs()));
    }
    lost.retain(|extent| !extent.blocks.is_empty());
}

fn is_found(lost: &LostExtent, present: &PresentIds) -> bool {
    let ids = present.held(lost.partition);
    ids.is_some_and(|ids| lost.blocks.iter().any(|(id, _)| ids.contains(id.0.unsigned_abs())))
}

#[cfg(test)]
mod tests {
    use super::*;
    use uniffle_wire::types::{AppId, BlockId, PartitionId, ShuffleId, ShuffleKey};

    fn key() -> ShuffleKey {
        ShuffleKey::new(AppId::parse("app").unwrap(), ShuffleId(1))
    }

    fn bound(locals: &[u64], is_whole: bool) -> Bound {
        Bound {
            key: key(),
            local: locals.last().copied(),
            locals: locals.to_vec(),
            has_segments: true,
            has_lost_registration: false,
            is_whole,
            has_gap: false,
            is_called_incomplete: false,
            registrations: Vec::new(),
            incarnation: 50,
        }
    }

    fn shuffle(present: &[u64], lost: &[i64]) -> RecoveredShuffle {
        let mut ids = PresentIds::default();
        ids.add(PartitionId(0), present);
        let blocks: Vec<_> = lost.iter().map(|id| (BlockId(*id), 10)).collect();
        let lost = LostExtent { partition: PartitionId(0), blocks, reason: "gone".into() };
        RecoveredShuffle {
            key: key(),
            incomplete: None,
            present: ids,
            lost: vec![lost],
            reason: String::new(),
        }
    }

    #[test]
    fn relation_follows_the_store_numbers() {
        let of = |number, locals: &[u64]| {
            relation(number, &bound(locals, true), &shuffle(&[], &[]), &shuffle(&[], &[]))
        };
        assert_eq!(of(7, &[7]), Relation::Same);
        assert_eq!(of(7, &[7, 8]), Relation::Continued);
        assert_eq!(of(8, &[7, 8]), Relation::Same);
        assert_eq!(of(9, &[7, 8]), Relation::Over);
        assert_eq!(of(6, &[7, 8]), Relation::Disputed);
        assert_eq!([of(60, &[]), of(40, &[])], [Relation::Over, Relation::Disputed]);
    }

    #[test]
    fn torn_registration_is_detected_by_missing_blocks() {
        let of = |lost: &[i64]| relation(7, &bound(&[], false), &shuffle(&[], lost), &shuffle(&[1, 2], &[]));
        assert_eq!(of(&[2, 3]), Relation::Torn);
        assert_eq!([of(&[]), of(&[3])], [Relation::Over; 2]);
        let mut lost = shuffle(&[], &[2, 3]).lost;
        remove_found(&mut lost, &shuffle(&[1, 2], &[]).present);
        assert_eq!(lost[0].blocks, [(BlockId(3), 10)]);
        remove_found(&mut lost, &shuffle(&[3], &[]).present);
        assert!(lost.is_empty());
    }
}
