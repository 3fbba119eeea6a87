//! A recorded client session as a file; README.md beside this describes it. Pure: bytes in, values out.
//!
//! Integers are big-endian. A file that is cut, or has bytes behind its end, is an error.

use bytes::{Buf, BufMut, Bytes};

const MAGIC: &[u8] = b"uniffle session 1\n";

/// Everything that one client said and was told.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct Session {
    /// One line for people: client, Spark, job, server.
    pub(crate) title: String,
    /// By time of their begin.
    pub(crate) exchanges: Vec<Exchange>,
}

/// One request and its answer.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Exchange {
    /// Time since the start of the recording at which the request was complete.
    pub(crate) began_us: u64,
    /// The same of the answer.
    pub(crate) ended_us: u64,
    /// Number of the client's connection, counted per plane.
    pub(crate) connection: u32,
    pub(crate) plane: Plane,
    /// gRPC: the message without its prefix. TCP: the frame.
    pub(crate) request: Bytes,
    /// The same of the answer.
    pub(crate) answer: Bytes,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Plane {
    Grpc {
        /// `/rss.common.ShuffleServer/requireBuffer`
        path: String,
        /// `grpc-status` of the answer.
        status: u32,
    },
    Tcp,
}

impl Session {
    pub(crate) fn encode(&self) -> Vec<u8> {
        let mut out = MAGIC.to_vec();
        put_bytes(&mut out, self.title.as_bytes());
        out.put_u32(u32::try_from(self.exchanges.len()).expect("a recording is small"));
        for exchange in &self.exchanges {
            out.put_u64(exchange.began_us);
            out.put_u64(exchange.ended_us);
            out.put_u32(exchange.connection);
            match &exchange.plane {
                Plane::Grpc { path, status } => {
                    put_bytes(&mut out, path.as_bytes());
                    out.put_u32(*status);
                }
                Plane::Tcp => {
                    put_bytes(&mut out, b"");
                    out.put_u32(0);
                }
            }
            put_bytes(&mut out, &exchange.request);
            put_bytes(&mut out, &exchange.answer);
        }
        out
    }

    pub(crate) fn decode(file: impl Into<Bytes>) -> Result<Self, String> {
        let mut file = file.into();
        if take(&mut file, MAGIC.len())? != MAGIC {
            return Err("this is no recorded session".to_owned());
        }
        let title = take_text(&mut file)?;
        let count = take_u32(&mut file)?;
        let exchanges = (0..count)
            .map(|number| Exchange::decode(&mut file).map_err(|error| format!("exchange {number}: {error}")))
            .collect::<Result<_, _>>()?;
        if file.has_remaining() {
            return Err(format!("{} bytes behind the last exchange", file.remaining()));
        }
        Ok(Self { title, exchanges })
    }
}

impl Exchange {
    fn decode(file: &mut Bytes) -> Result<Self, String> {
        let (began_us, ended_us) = (take_u64(file)?, take_u64(file)?);
        let connection = take_u32(file)?;
        let (path, status) = (take_text(file)?, take_u32(file)?);
        let plane = if path.is_empty() { Plane::Tcp } else { Plane::Grpc { path, status } };
        Ok(Self {
            began_us,
            ended_us,
            connection,
            plane,
            request: take_bytes(file)?,
            answer: take_bytes(file)?,
        })
    }
}

fn put_bytes(out: &mut Vec<u8>, bytes: &[u8]) {
    out.put_u32(u32::try_from(bytes.len()).expect("a recording is small"));
    out.put_slice(bytes);
}

fn take(file: &mut Bytes, length: usize) -> Result<Bytes, String> {
    if file.remaining() < length {
        return Err(format!("the file ends {} bytes early", length - file.remaining()));
    }
    Ok(file.split_to(length))
}

fn take_u32(file: &mut Bytes) -> Result<u32, String> {
    Ok(take(file, 4)?.get_u32())
}

fn take_u64(file: &mut Bytes) -> Result<u64, String> {
    Ok(take(file, 8)?.get_u64())
}

fn take_bytes(file: &mut Bytes) -> Result<Bytes, String> {
    let length = take_u32(file)?;
    take(file, length as usize)
}

fn take_text(file: &mut Bytes) -> Result<String, String> {
    String::from_utf8(take_bytes(file)?.to_vec()).map_err(|error| error.to_string())
}

#[test]
fn a_session_is_written_and_read_and_a_cut_one_is_an_error() {
    let exchange = Exchange {
        began_us: 1,
        ended_us: u64::MAX,
        connection: 3,
        plane: Plane::Grpc { path: "/a/b".to_owned(), status: 12 },
        request: Bytes::from_static(b"request"),
        answer: Bytes::new(),
    };
    let tcp = Exchange { plane: Plane::Tcp, ..exchange.clone() };
    let session = Session { title: "title".to_owned(), exchanges: vec![exchange, tcp] };
    let file = session.encode();
    assert_eq!(Session::decode(file.clone()), Ok(session));
    for length in 0..file.len() {
        assert!(Session::decode(file[..length].to_vec()).is_err(), "{length} of {} bytes", file.len());
    }
    assert!(Session::decode([file, vec![0]].concat()).is_err());
}
