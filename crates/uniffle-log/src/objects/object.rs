//! Objects of the metadata log in an object store: their names, and the frames in them.
//!
//! An object has consecutive frames (`frame`) of one generation and is stored twice, under two
//! names. Its name states which frames it has, so a list has the objects in order, and damage of
//! one is noticed. An object is never replaced by different bytes: a repeated request writes the
//! same bytes under the same name. The objects of a generation are read as one file
//! (`object_file`). Requests are made by `store::object`.

use std::fmt;

use bytes::Bytes;
use futures::future::BoxFuture;

use crate::LogError;
use crate::format::frame;

/// Copies of each object.
pub const OBJECT_COPIES: usize = 2;

/// Name of an object of the log.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct LogObject {
    /// Generation of its frames: number of the worker's start, then number of the checkpoint within
    /// it.
    pub generation: u64,
    /// Random number of the process, for stores in which two can start at once.
    pub process: u32,
    /// Sequence of its first frame.
    pub first: u64,
    /// Number of frames.
    pub frames: u32,
}

/// A copy of an object in a list of the store.
#[derive(Debug, Clone, Copy)]
pub struct ListedObject {
    /// The object.
    pub object: LogObject,
    /// Number of the copy.
    pub copy: usize,
    /// Size in bytes.
    pub bytes: u64,
}

/// Objects of a worker's log in a store.
pub trait LogObjects: fmt::Debug + Send + Sync {
    /// Stores an object in all copies. When this returns `Ok`, no other process has taken over the
    /// log before.
    fn put(&self, object: LogObject, bytes: Bytes) -> BoxFuture<'_, Result<(), LogError>>;

    /// Returns a copy of an object, or `None` if it does not exist.
    fn get(&self, object: LogObject, copy: usize) -> BoxFuture<'_, Result<Option<Bytes>, LogError>>;

    /// Returns all copies of all objects.
    fn list(&self) -> BoxFuture<'_, Result<Vec<ListedObject>, LogError>>;

    /// Deletes copies of objects. One that does not exist is no error.
    fn delete(&self, objects: Vec<ListedObject>) -> BoxFuture<'_, Result<(), LogError>>;
}

impl LogObject {
    /// Returns the name of a copy.
    #[must_use]
    pub fn name(&self, copy: usize) -> String {
        let Self { generation, process, first, frames } = self;
        format!("{generation:016x}.{process:08x}.{first:012x}.{frames:08x}.{copy}")
    }

    /// Returns the object of a name, and the number of the copy.
    #[must_use]
    pub fn parse(name: &str) -> Option<(Self, usize)> {
        let mut parts = name.split('.');
        let mut number = || u64::from_str_radix(parts.next()?, 16).ok();
        let (generation, process, first, frames) = (number()?, number()?, number()?, number()?);
        let copy = usize::try_from(number()?).ok().filter(|copy| *copy < OBJECT_COPIES)?;
        let (process, frames) = (u32::try_from(process).ok()?, u32::try_from(frames).ok()?);
        first.checked_add(u64::from(frames))?;
        let object = Self { generation, process, first, frames };
        (object.name(copy) == name).then_some((object, copy))
    }

    /// Checks that `bytes` are exactly the frames announced by the name.
    ///
    /// # Errors
    /// A description of the difference.
    pub(crate) fn check(&self, bytes: &[u8]) -> Result<(), String> {
        let (mut frames, mut rest, mut previous) = (0, bytes, None);
        while !rest.is_empty() {
            if frames == u64::from(self.frames) {
                return Err(format!("it has more than {frames} records"));
            }
            let total = frame::total_bytes(rest)?;
            let frame = frame::decode(rest)?;
            let follows = previous.is_none_or(|crc| crc == frame.previous);
            if frame.generation != self.generation || frame.sequence != self.first + frames || !follows {
                return Err("a record belongs to another object".to_owned());
            }
            previous = Some(frame.crc);
            frames += 1;
            rest = &rest[total..];
        }
        match frames == u64::from(self.frames) {
            true => Ok(()),
            false => Err(format!("it has {frames} records instead of {}", self.frames)),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::format::frame::{Encoder, FrameContent};
    use bytes::BytesMut;

    /// Name of an object whose last sequence exceeds 64 bits.
    const FIRST_TOO_GREAT: &str = "0000000700000001.00000abc.ffffffffffffffff.0000000c.1";

    #[test]
    fn object_name_is_read_back() {
        let object = LogObject { generation: (7 << 32) | 1, process: 0xabc, first: 300, frames: 12 };
        let name = object.name(1);
        assert_eq!(name, "0000000700000001.00000abc.00000000012c.0000000c.1");
        assert_eq!(LogObject::parse(&name), Some((object, 1)));
        for other in [
            "",
            "0000000700000001",
            "7.abc.12c.c.1",
            &name.replace(".1", ".2"),
            &format!("{name}.0"),
            FIRST_TOO_GREAT,
        ] {
            assert_eq!(LogObject::parse(other), None, "{other}");
        }
    }

    #[test]
    fn object_cut_between_frames_is_damaged() {
        let (mut encoder, mut out) = (Encoder::after(9, 4, 77), BytesMut::new());
        assert!(encoder.encode(&FrameContent::Begun, 0, &mut out));
        let one = out.len();
        assert!(encoder.encode(&FrameContent::Begun, 0, &mut out));
        let object = LogObject { generation: 9, process: 1, first: 4, frames: 2 };
        let bytes = out.freeze();
        assert_eq!(object.check(&bytes), Ok(()));
        assert!(object.check(&bytes.slice(..one)).is_err());
        assert!(LogObject { frames: 1, ..object }.check(&bytes).is_err());
        assert!(LogObject { first: 5, ..object }.check(&bytes).is_err());
        assert!(LogObject { generation: 8, ..object }.check(&bytes).is_err());
    }
}
