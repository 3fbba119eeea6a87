//! Finds the boundaries of HTTP/2 frames sent by a client, without decoding the frames.
//!
//! The acceptor learns from it that a connection has begun its protocol, and the gRPC listener
//! counts cancelled calls. Invariant: it stores no bytes except one frame header, whatever a peer
//! sends.

/// Length of a client's preface (RFC 9113 §3.4) before its first frame.
const PREFACE_BYTES: usize = 24;
const HEADER_BYTES: usize = 9;
/// Offset of the frame type in the header, after three bytes of length.
const TYPE_AT: usize = 3;

/// Frame type of RST_STREAM, by which a client cancels a call.
pub(super) const RST_STREAM: u8 = 3;

/// Follows the frames of one connection from its first byte on.
#[derive(Debug, Default)]
pub(super) struct FrameScanner {
    preface: usize,
    header: [u8; HEADER_BYTES],
    /// Bytes of the header received so far.
    have: usize,
    /// Bytes of the payload still to come.
    remaining: usize,
}

impl FrameScanner {
    /// Advances to the end of the current frame or of `bytes`. Returns how many bytes that takes,
    /// and the frame's type at its end.
    pub(super) fn advance(&mut self, bytes: &[u8]) -> (usize, Option<u8>) {
        let mut at = (PREFACE_BYTES - self.preface).min(bytes.len());
        self.preface += at;
        if self.have < HEADER_BYTES {
            let more = (HEADER_BYTES - self.have).min(bytes.len() - at);
            self.header[self.have..self.have + more].copy_from_slice(&bytes[at..at + more]);
            (self.have, at) = (self.have + more, at + more);
            if self.have < HEADER_BYTES {
                return (at, None);
            }
            self.remaining =
                self.header[..TYPE_AT].iter().fold(0, |length, byte| length << 8 | usize::from(*byte));
        }
        let more = self.remaining.min(bytes.len() - at);
        (self.remaining, at) = (self.remaining - more, at + more);
        if self.remaining > 0 {
            return (at, None);
        }
        self.have = 0;
        (at, Some(self.header[TYPE_AT]))
    }
}

#[cfg(test)]
pub(super) mod tests {
    use proptest::prelude::*;

    use super::*;

    pub(in crate::listeners) const PREFACE: &[u8] = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n";

    /// Builds a frame of type `kind` with `payload` bytes.
    pub(in crate::listeners) fn frame(kind: u8, payload: usize) -> Vec<u8> {
        let mut bytes = u32::try_from(payload).unwrap().to_be_bytes()[1..].to_vec();
        bytes.extend_from_slice(&[kind, 0, 0, 0, 0, 0]);
        bytes.resize(HEADER_BYTES + payload, 7);
        bytes
    }

    proptest! {
        #[test]
        fn frame_ends_are_found_in_any_pieces(
            frames in prop::collection::vec((0u8..10, 0usize..300), 1..20), cut in 1usize..400,
        ) {
            let (mut bytes, mut ends) = (PREFACE.to_vec(), Vec::new());
            for (kind, payload) in &frames {
                bytes.extend(frame(*kind, *payload));
                ends.push((bytes.len(), *kind));
            }
            let (mut scanner, mut at, mut found) = (FrameScanner::default(), 0, Vec::new());
            for mut piece in bytes.chunks(cut) {
                while !piece.is_empty() {
                    let (taken, ended) = scanner.advance(piece);
                    at += taken;
                    found.extend(ended.map(|kind| (at, kind)));
                    piece = &piece[taken..];
                }
            }
            prop_assert_eq!(found, ends);
        }
    }
}
