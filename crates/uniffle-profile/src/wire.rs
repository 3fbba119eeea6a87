//! Messages between the worker and its child (`child`), each after magic bytes and its length.

use std::io::{self, Read, Write};

/// Magic bytes of a question.
pub(super) const QUESTION: MessageMagic = *b"uffname?";
/// Magic bytes of an answer.
pub(super) const ANSWER: MessageMagic = *b"uffname!";

/// Beginning of a message, which distinguishes it from other output.
pub(super) type MessageMagic = [u8; 8];

pub(super) fn write(to: &mut impl Write, magic: MessageMagic, message: &[u8]) -> io::Result<()> {
    to.write_all(&magic)?;
    to.write_all(&(message.len() as u64).to_le_bytes())?;
    to.write_all(message)?;
    to.flush()
}

/// Reads a message of at most `bytes_max` bytes, which must be the last data in `from`.
///
/// # Errors
/// If the data is no such message, is too large, ends early, or is followed by more data.
pub(super) fn read(from: &mut impl Read, magic: MessageMagic, bytes_max: u64) -> io::Result<Vec<u8>> {
    let invalid = |why: String| io::Error::new(io::ErrorKind::InvalidData, why);
    let mut head = [0; 16];
    from.read_exact(&mut head)?;
    let (found, length) = head.split_at(magic.len());
    if found != magic {
        return Err(invalid("not a message of this program".to_owned()));
    }
    let length = u64::from_le_bytes(length.try_into().unwrap_or_default());
    if length > bytes_max {
        return Err(invalid(format!("message has {length} bytes, the limit is {bytes_max}")));
    }
    let mut message = Vec::new();
    // Tries to read one byte more, to detect data after the message.
    from.take(length + 1).read_to_end(&mut message)?;
    match (message.len() as u64).cmp(&length) {
        std::cmp::Ordering::Less => Err(io::ErrorKind::UnexpectedEof.into()),
        std::cmp::Ordering::Equal => Ok(message),
        std::cmp::Ordering::Greater => Err(invalid(format!("more data after the message of {length} bytes"))),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn written(message: &[u8]) -> Vec<u8> {
        let mut bytes = Vec::new();
        write(&mut bytes, ANSWER, message).unwrap();
        bytes
    }

    fn refusal(bytes: &[u8], bytes_max: u64) -> (io::ErrorKind, String) {
        let error = read(&mut &*bytes, ANSWER, bytes_max).unwrap_err();
        (error.kind(), error.to_string())
    }

    #[test]
    fn message_round_trips() {
        for message in [&b""[..], b"x", &[7; 100_000]] {
            assert_eq!(read(&mut written(message).as_slice(), ANSWER, 100_000).unwrap(), message);
        }
    }

    #[test]
    fn truncated_message_is_refused() {
        let bytes = written(b"twelve bytes");
        for end in 0..bytes.len() {
            assert_eq!(refusal(&bytes[..end], 12).0, io::ErrorKind::UnexpectedEof, "{end}");
        }
    }

    #[test]
    fn oversized_message_is_refused_by_its_header() {
        let (kind, why) = refusal(&written(b"twelve bytes")[..16], 11);
        assert_eq!(
            (kind, why.as_str()),
            (io::ErrorKind::InvalidData, "message has 12 bytes, the limit is 11")
        );
        let mut huge = ANSWER.to_vec();
        huge.extend([0xff; 8]);
        assert!(refusal(&huge, 11).1.contains("18446744073709551615 bytes"));
    }

    #[test]
    fn anything_else_is_refused() {
        assert_eq!(refusal(b"usage: worker [OPTIONS]", 100).1, "not a message of this program");
        let mut question = Vec::new();
        write(&mut question, QUESTION, b"twelve bytes").unwrap();
        assert_eq!(
            refusal(&question, 100).1,
            "not a message of this program",
            "a request was accepted as a response"
        );
        let more = [written(b"x"), b"y".to_vec()].concat();
        assert_eq!(refusal(&more, 100).1, "more data after the message of 1 bytes");
    }
}
