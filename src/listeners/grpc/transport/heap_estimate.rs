//! Estimates the heap size of a message from its encoded bytes, before decoding.
//!
//! A message of a few bytes per field takes several times as much once it is decoded. The estimate
//! is charged to the heap before that, so it should be an upper bound. Pure functions.

/// Estimates the decoded size of an encoded message.
pub(super) type EstimateHeap = fn(&[u8]) -> u64;

/// Maximum nesting depth of the protocol's messages.
const DEPTH_MAX: u32 = 3;

/// Estimates a request with a few fields, one of which may be a bitmap to decode.
pub(in crate::listeners::grpc) fn flat(bytes: &[u8]) -> u64 {
    4 * bytes.len() as u64
}

/// Estimates a request whose lists have only numbers.
pub(in crate::listeners::grpc) fn numbers(bytes: &[u8]) -> u64 {
    2 * size_of::<i64>() as u64 * values_in(bytes)
}

/// Estimates any request: lists of messages with nested lists, each of which grows by doubling.
pub(in crate::listeners::grpc) fn nested(bytes: &[u8]) -> u64 {
    estimate(bytes, 1).unwrap_or(48 * bytes.len() as u64)
}

/// Returns how many numbers `bytes` has if it is a packed list.
fn values_in(bytes: &[u8]) -> u64 {
    bytes.iter().filter(|byte| **byte < 0x80).count() as u64
}

/// Estimates the fields of a message. Returns `None` if `bytes` are not message fields.
fn estimate(mut bytes: &[u8], depth: u32) -> Option<u64> {
    /// Size of a number, alone or in a list.
    const VALUE_BYTES: u64 = 16;
    /// Size of a string or message in a list, without its content.
    const ITEM_BYTES: u64 = 96;
    let mut sum = 0;
    while !bytes.is_empty() {
        let key = varint(&mut bytes)?;
        match key & 7 {
            0 => drop(varint(&mut bytes)?),
            1 => bytes = bytes.get(8..)?,
            5 => bytes = bytes.get(4..)?,
            2 => {
                let length = usize::try_from(varint(&mut bytes)?).ok()?;
                let (content, rest) = bytes.split_at_checked(length)?;
                bytes = rest;
                let packed = VALUE_BYTES * values_in(content);
                let inner = if depth < DEPTH_MAX { estimate(content, depth + 1) } else { None };
                sum += ITEM_BYTES + content.len() as u64 + packed.max(inner.unwrap_or(0));
                continue;
            }
            _ => return None,
        }
        sum += VALUE_BYTES;
    }
    Some(sum)
}

/// Takes a varint off the front of `bytes`.
pub(super) fn varint(bytes: &mut &[u8]) -> Option<u64> {
    let mut value = 0_u64;
    for shift in (0..64).step_by(7) {
        let (byte, rest) = bytes.split_first()?;
        *bytes = rest;
        value |= u64::from(byte & 0x7F) << shift;
        if *byte < 0x80 {
            return Some(value);
        }
    }
    None
}

#[cfg(test)]
mod tests {
    use prost::Message as _;

    use super::*;
    use crate::proto;

    /// Decoded lists of empty messages take thirty times their encoded size.
    #[test]
    fn heap_of_a_message_is_known_before_decoding() {
        let partition = |ids: Vec<i64>| proto::PartitionToBlockIds { partition_id: 0, block_ids: ids };
        let weight_of = |partitions: Vec<proto::PartitionToBlockIds>| {
            let request = proto::ReportShuffleResultRequest {
                partition_to_block_ids: partitions,
                ..Default::default()
            };
            nested(&request.encode_to_vec())
        };
        let item = size_of::<proto::PartitionToBlockIds>() as u64;
        assert!(weight_of(vec![partition(Vec::new()); 1000]) >= 2 * 1000 * item);
        assert!(weight_of(vec![partition(vec![1; 1000])]) >= 2 * 8 * 1000);
        let spark = weight_of(vec![partition((0..1000).map(|id| id << 45).collect())]);
        assert!(spark < 40 * 1000, "the estimate of a request from Spark is too high: {spark}");
        assert_eq!(nested(&[0xFF; 11]), 48 * 11);
        assert_eq!(nested(&[0x0A, 0x7F, 1]), 48 * 3);
    }
}
