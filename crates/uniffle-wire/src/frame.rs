//! Frames of the raw TCP protocol (client type `GRPC_NETTY`, docs/protocol.md §7.2–§7.3) and their
//! primitive fields.
//!
//! The messages themselves are in `request`, `reply` and `send_frame`. [`FrameFields`] reads from a
//! whole message and never past its end. It allocates nothing: lengths and counts from the wire are
//! only compared.

use bytes::BufMut;

use super::DecodeError;

/// Bytes before the message: message length, type, body length.
pub const HEADER_BYTES: usize = 9;

/// Message and body together have fewer bytes than this. Java computes the sum as an i32.
pub const FRAME_BYTES_LIMIT: u32 = 0x7fff_ffff;

/// Frame type (`Message.Type` in Java). Types that are reserved but never sent are omitted.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[repr(u8)]
pub enum FrameType {
    /// `RPC_RESPONSE`, the reply to a send.
    RpcReply = 0,
    /// `SEND_SHUFFLE_DATA_REQUEST`
    Send = 3,
    /// `GET_LOCAL_SHUFFLE_INDEX_REQUEST`
    LocalIndex = 4,
    /// `GET_LOCAL_SHUFFLE_DATA_REQUEST`
    LocalData = 5,
    /// `GET_MEMORY_SHUFFLE_DATA_REQUEST`
    Memory = 6,
    /// `GET_LOCAL_SHUFFLE_INDEX_RESPONSE`
    LocalIndexReply = 14,
    /// `GET_LOCAL_SHUFFLE_DATA_RESPONSE`
    LocalDataReply = 15,
    /// `GET_MEMORY_SHUFFLE_DATA_RESPONSE`
    MemoryReply = 16,
    /// `GET_SORTED_SHUFFLE_DATA_REQUEST`
    Sorted = 21,
    /// `GET_SORTED_SHUFFLE_DATA_RESPONSE`
    SortedReply = 22,
    /// `GET_LOCAL_SHUFFLE_INDEX_V2_RESPONSE`
    LocalIndexV2Reply = 23,
    /// `GET_LOCAL_SHUFFLE_DATA_V2_REQUEST`
    LocalDataV2 = 24,
    /// `GET_LOCAL_SHUFFLE_DATA_V3_REQUEST`
    LocalDataV3 = 25,
    /// `GET_MEMORY_SHUFFLE_DATA_V2_RESPONSE`. Servers of Java's master branch send it. This worker
    /// does not, because older clients close the connection when they receive it.
    MemoryV2Reply = 26,
}

impl FrameType {
    /// Returns the type with number `id`.
    ///
    /// # Errors
    /// [`DecodeError::UnknownType`].
    pub fn from_id(id: u8) -> Result<Self, DecodeError> {
        Ok(match id {
            0 => Self::RpcReply,
            3 => Self::Send,
            4 => Self::LocalIndex,
            5 => Self::LocalData,
            6 => Self::Memory,
            14 => Self::LocalIndexReply,
            15 => Self::LocalDataReply,
            16 => Self::MemoryReply,
            21 => Self::Sorted,
            22 => Self::SortedReply,
            23 => Self::LocalIndexV2Reply,
            24 => Self::LocalDataV2,
            25 => Self::LocalDataV3,
            26 => Self::MemoryV2Reply,
            other => return Err(DecodeError::UnknownType(other)),
        })
    }

    /// Returns the number on the wire.
    #[must_use]
    pub fn id(self) -> u8 {
        self as u8
    }

    /// Returns true for the types that clients send.
    #[must_use]
    pub fn is_request(self) -> bool {
        match self {
            Self::Send
            | Self::LocalIndex
            | Self::LocalData
            | Self::Memory
            | Self::Sorted
            | Self::LocalDataV2
            | Self::LocalDataV3 => true,
            Self::RpcReply
            | Self::LocalIndexReply
            | Self::LocalDataReply
            | Self::MemoryReply
            | Self::MemoryV2Reply
            | Self::SortedReply
            | Self::LocalIndexV2Reply => false,
        }
    }
}

/// The first nine bytes of a frame, checked against each other.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct FrameHeader {
    /// Bytes of the message.
    pub message_bytes: u32,
    /// Type of the message.
    pub kind: FrameType,
    /// Bytes of raw payload after the message; 0 in every request.
    pub body_bytes: u32,
}

impl FrameHeader {
    /// Reads a header. Message and body together may have at most `bytes_max` bytes.
    ///
    /// # Errors
    /// Fails on a message length below 1, a negative body length, a sum over the limit or an
    /// unknown type. The connection must be closed after any of them.
    pub fn decode(bytes: &[u8; HEADER_BYTES], bytes_max: u32) -> Result<Self, DecodeError> {
        let [m0, m1, m2, m3, kind, b0, b1, b2, b3] = *bytes;
        let message = i32::from_be_bytes([m0, m1, m2, m3]);
        let body = i32::from_be_bytes([b0, b1, b2, b3]);
        let kind = FrameType::from_id(kind)?;
        // Every message begins with its request id, so an empty message is invalid.
        let message_bytes = u32::try_from(message)
            .ok()
            .filter(|&bytes| bytes > 0)
            .ok_or(DecodeError::Malformed { what: "message length is not positive", at: 0 })?;
        let body_bytes = u32::try_from(body)
            .map_err(|_| DecodeError::Malformed { what: "body length is negative", at: 5 })?;
        let sum = u64::from(message_bytes) + u64::from(body_bytes);
        let max = bytes_max.min(FRAME_BYTES_LIMIT - 1);
        if sum > u64::from(max) {
            return Err(DecodeError::TooLarge { what: "frame", len: sum, max: u64::from(max) });
        }
        Ok(Self { message_bytes, kind, body_bytes })
    }

    /// Reads a header like [`FrameHeader::decode`], for the side that receives requests only.
    ///
    /// # Errors
    /// Also fails on the type of a response, and on a body.
    pub fn decode_request(bytes: &[u8; HEADER_BYTES], bytes_max: u32) -> Result<Self, DecodeError> {
        let header = Self::decode(bytes, bytes_max)?;
        if !header.kind.is_request() {
            return Err(DecodeError::UnknownType(header.kind.id()));
        }
        if header.body_bytes != 0 {
            return Err(DecodeError::Malformed { what: "a request has a body", at: 5 });
        }
        Ok(header)
    }

    /// Writes the nine bytes.
    pub fn encode(&self, out: &mut impl BufMut) {
        out.put_u32(self.message_bytes);
        out.put_u8(self.kind.id());
        out.put_u32(self.body_bytes);
    }
}

/// Reads the fields of one whole message in order.
#[derive(Debug, Clone)]
pub struct FrameFields<'a> {
    bytes: &'a [u8],
    at: usize,
}

impl<'a> FrameFields<'a> {
    /// Starts at the first byte of `message`.
    pub fn new(message: &'a [u8]) -> Self {
        Self { bytes: message, at: 0 }
    }

    /// Returns the offset of the next field.
    pub fn at(&self) -> u64 {
        self.at as u64
    }

    /// Returns the number of unread bytes.
    pub fn remaining(&self) -> usize {
        self.bytes.len() - self.at
    }

    /// Returns an error at the current offset.
    pub fn malformed(&self, what: &'static str) -> DecodeError {
        DecodeError::Malformed { what, at: self.at() }
    }

    /// Returns the next `count` bytes.
    ///
    /// # Errors
    /// Fails if fewer bytes remain.
    pub fn take(&mut self, count: usize) -> Result<&'a [u8], DecodeError> {
        let rest = self.bytes.get(self.at..).unwrap_or_default();
        let taken = rest.get(..count).ok_or(DecodeError::Incomplete)?;
        self.at += count;
        Ok(taken)
    }

    fn array<const N: usize>(&mut self) -> Result<[u8; N], DecodeError> {
        let taken = self.take(N)?;
        <[u8; N]>::try_from(taken).map_err(|_| DecodeError::Incomplete)
    }

    /// Reads a 4-byte integer.
    ///
    /// # Errors
    /// Fails if fewer bytes remain.
    pub fn i32(&mut self) -> Result<i32, DecodeError> {
        Ok(i32::from_be_bytes(self.array()?))
    }

    /// Reads an 8-byte integer.
    ///
    /// # Errors
    /// Fails if fewer bytes remain.
    pub fn i64(&mut self) -> Result<i64, DecodeError> {
        Ok(i64::from_be_bytes(self.array()?))
    }

    /// Reads a byte array. Returns `None` for a negative length, which is Java's null.
    ///
    /// # Errors
    /// Fails if the length exceeds the remaining bytes.
    pub fn bytes(&mut self, what: &'static str) -> Result<Option<&'a [u8]>, DecodeError> {
        let Ok(length) = usize::try_from(self.i32()?) else {
            return Ok(None);
        };
        if length > self.remaining() {
            return Err(DecodeError::TooLarge { what, len: length as u64, max: self.remaining() as u64 });
        }
        self.take(length).map(Some)
    }

    /// Reads a string that must not be null.
    ///
    /// # Errors
    /// Fails if the string is null, longer than the remaining bytes, or not UTF-8.
    pub fn string(&mut self, what: &'static str) -> Result<&'a str, DecodeError> {
        let at = self.at();
        let null = DecodeError::Malformed { what: "a string is null", at };
        let not_utf8 = DecodeError::Malformed { what: "a string is not UTF-8", at };
        std::str::from_utf8(self.bytes(what)?.ok_or(null)?).map_err(|_| not_utf8)
    }

    /// Reads a count of entries of at least `entry_bytes` bytes each.
    ///
    /// # Errors
    /// Fails if the count is negative or the entries do not fit into the remaining bytes.
    pub fn count(&mut self, what: &'static str, entry_bytes: usize) -> Result<usize, DecodeError> {
        let at = self.at();
        let negative = DecodeError::Malformed { what: "a count is negative", at };
        let count = usize::try_from(self.i32()?).map_err(|_| negative)?;
        let max = self.remaining() / entry_bytes;
        if count > max {
            return Err(DecodeError::TooLarge { what, len: count as u64, max: max as u64 });
        }
        Ok(count)
    }

    /// Ends the message.
    ///
    /// # Errors
    /// Fails if unread bytes remain.
    pub fn finish(self) -> Result<(), DecodeError> {
        if self.remaining() == 0 {
            Ok(())
        } else {
            Err(self.malformed("unexpected bytes after the last field"))
        }
    }
}

/// Writes a string as Java does: i32 length, then UTF-8 bytes.
pub(super) fn put_string(out: &mut impl BufMut, text: &str) {
    out.put_i32(wire_length(text.len()));
    out.put_slice(text.as_bytes());
}

/// Encodes the length of data of our own, which is known to be small.
///
/// Replies are checked against [`FRAME_BYTES_LIMIT`] before they are encoded, requests are not. A
/// larger length saturates, so that the peer rejects the frame instead of misreading the stream.
pub(super) fn wire_length(length: usize) -> i32 {
    i32::try_from(length).unwrap_or(i32::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn header(message: i32, kind: u8, body: i32) -> [u8; HEADER_BYTES] {
        let mut bytes = Vec::new();
        bytes.put_i32(message);
        bytes.put_u8(kind);
        bytes.put_i32(body);
        bytes.try_into().unwrap()
    }

    #[test]
    fn every_known_type_has_its_number() {
        for id in 0..=u8::MAX {
            match FrameType::from_id(id) {
                Ok(kind) => assert_eq!(kind.id(), id),
                Err(error) => assert_eq!(error, DecodeError::UnknownType(id)),
            }
        }
        for id in [1, 2, 7, 13, 17, 20, 27, 255] {
            assert!(FrameType::from_id(id).is_err(), "{id}");
        }
    }

    #[test]
    fn impossible_headers_are_refused() {
        let decode = |message, kind, body| FrameHeader::decode_request(&header(message, kind, body), 1 << 20);
        assert!(decode(8, 3, 0).is_ok());
        assert!(matches!(decode(0, 3, 0), Err(DecodeError::Malformed { at: 0, .. })));
        assert!(matches!(decode(-1, 3, 0), Err(DecodeError::Malformed { at: 0, .. })));
        assert!(matches!(decode(i32::MIN, 3, 0), Err(DecodeError::Malformed { at: 0, .. })));
        assert!(matches!(decode(8, 3, -1), Err(DecodeError::Malformed { at: 5, .. })));
        assert!(matches!(decode(8, 3, 1), Err(DecodeError::Malformed { at: 5, .. })));
        assert!(matches!(decode((1 << 20) + 1, 3, 0), Err(DecodeError::TooLarge { .. })));
        assert_eq!(decode(8, 16, 0), Err(DecodeError::UnknownType(16)));
        assert_eq!(decode(8, 99, 0), Err(DecodeError::UnknownType(99)));
    }

    #[test]
    fn frame_lengths_must_sum_below_i32_max() {
        let sum = |message, body| FrameHeader::decode(&header(message, 16, body), FRAME_BYTES_LIMIT);
        assert!(sum(i32::MAX - 1, 0).is_ok());
        assert!(sum(i32::MAX, 0).is_err());
        assert!(sum(i32::MAX, i32::MAX).is_err());
        assert!(sum(1, i32::MAX - 1).is_err());
    }

    #[test]
    fn fields_never_read_past_the_end() {
        let message = [0, 0, 0, 5, b'a', b'b'];
        assert!(matches!(
            FrameFields::new(&message).string("x"),
            Err(DecodeError::TooLarge { len: 5, max: 2, .. })
        ));
        assert_eq!(FrameFields::new(&message).i64(), Err(DecodeError::Incomplete));
        assert_eq!(FrameFields::new(&[0xff; 4]).bytes("x"), Ok(None));
        assert!(FrameFields::new(&[0xff; 4]).string("x").is_err());
        assert!(FrameFields::new(&[0, 0, 0, 1, 0xff]).string("x").is_err());
        assert!(FrameFields::new(&[0x7f, 0xff, 0xff, 0xff, 1]).count("x", 1).is_err());
        assert!(FrameFields::new(&[0xff; 4]).count("x", 1).is_err());
        assert!(FrameFields::new(&[1]).finish().is_err());
    }
}
