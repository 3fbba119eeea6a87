//! A misbehaving HTTP/2 client: frames as bytes, windows that never open, unfinished requests.

use std::io;
use std::time::Duration;

use bytes::{BufMut as _, BytesMut};
use prost::Message;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpStream;
use tokio::time::timeout;
use uniffle_testkit::clients::local;

const PREFACE: &[u8] = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n";
const DATA: u8 = 0;
const HEADERS: u8 = 1;
const SETTINGS: u8 = 4;
const PING: u8 = 6;
const ACK: u8 = 1;
const END_STREAM: u8 = 1;
const END_HEADERS: u8 = 4;
const INITIAL_WINDOW_SIZE: u16 = 4;
/// Largest frame payload that every peer accepts.
const FRAME_BYTES: usize = 16_384;

/// An HTTP/2 connection.
pub(super) struct Connection {
    stream: TcpStream,
    next_id: u32,
}

impl Connection {
    /// Connects with a receive window of `window` bytes; 0 accepts no response data.
    pub(super) async fn open(port: u16, window: u32) -> io::Result<Self> {
        let mut stream = TcpStream::connect(local(port)).await?;
        let mut settings = BytesMut::new();
        settings.put_u16(INITIAL_WINDOW_SIZE);
        settings.put_u32(window);
        let mut bytes = BytesMut::from(PREFACE);
        put_frame(&mut bytes, SETTINGS, 0, 0, &settings);
        put_frame(&mut bytes, SETTINGS, ACK, 0, &[]);
        stream.write_all(&bytes).await?;
        Ok(Self { stream, next_id: 1 })
    }

    /// Sends the headers of a call. Returns its stream id.
    pub(super) async fn begin(&mut self, method: &str) -> io::Result<u32> {
        let path = format!("/rss.common.{method}");
        // POST and http from the static table, then literals without indexing (RFC 7541 §6.2.2).
        let mut head = BytesMut::from(&[0x83, 0x86][..]);
        head.put_slice(&[0x04]);
        put_text(&mut head, &path);
        for (name, value) in [(":authority", "x"), ("content-type", "application/grpc"), ("te", "trailers")] {
            head.put_u8(0);
            put_text(&mut head, name);
            put_text(&mut head, value);
        }
        let id = self.next_id;
        self.next_id += 2;
        self.frame(HEADERS, END_HEADERS, id, &head).await?;
        Ok(id)
    }

    /// Sends a part of a request body.
    pub(super) async fn data(&mut self, id: u32, bytes: &[u8], end: bool) -> io::Result<()> {
        let mut chunks = bytes.chunks(FRAME_BYTES).peekable();
        while let Some(chunk) = chunks.next() {
            let flags = if end && chunks.peek().is_none() { END_STREAM } else { 0 };
            self.frame(DATA, flags, id, chunk).await?;
        }
        Ok(())
    }

    /// Sends a complete call without waiting for the response.
    pub(super) async fn ask(&mut self, method: &str, message: &impl Message) -> io::Result<u32> {
        let id = self.begin(method).await?;
        let bytes = message.encode_to_vec();
        let mut body = BytesMut::new();
        body.put_u8(0);
        body.put_u32(u32::try_from(bytes.len()).unwrap());
        body.put_slice(&bytes);
        self.data(id, &body, true).await?;
        Ok(id)
    }

    /// Sends a PING frame without waiting for the response.
    pub(super) async fn ping(&mut self) -> io::Result<()> {
        self.frame(PING, 0, 0, &[0; 8]).await
    }

    /// Reads frames for `time` and answers pings, so that the worker considers the peer alive.
    pub(super) async fn pong(&mut self, time: Duration) -> io::Result<()> {
        match timeout(time, self.answer_pings()).await {
            Ok(Err(error)) => Err(error),
            _ => Ok(()),
        }
    }

    async fn answer_pings(&mut self) -> io::Result<()> {
        loop {
            let mut header = [0; 9];
            self.stream.read_exact(&mut header).await?;
            let [high, middle, low, kind, flags, ..] = header;
            let length = usize::from(high) << 16 | usize::from(middle) << 8 | usize::from(low);
            let mut payload = vec![0; length];
            self.stream.read_exact(&mut payload).await?;
            if kind == PING && flags & ACK == 0 {
                self.frame(PING, ACK, 0, &payload).await?;
            }
        }
    }

    async fn frame(&mut self, kind: u8, flags: u8, id: u32, payload: &[u8]) -> io::Result<()> {
        let mut bytes = BytesMut::with_capacity(9 + payload.len());
        put_frame(&mut bytes, kind, flags, id, payload);
        self.stream.write_all(&bytes).await
    }
}

fn put_frame(bytes: &mut BytesMut, kind: u8, flags: u8, id: u32, payload: &[u8]) {
    bytes.put_uint(payload.len() as u64, 3);
    bytes.put_slice(&[kind, flags]);
    bytes.put_u32(id);
    bytes.put_slice(payload);
}

/// Encodes a short HPACK string without Huffman coding.
fn put_text(bytes: &mut BytesMut, text: &str) {
    bytes.put_u8(u8::try_from(text.len()).expect("the text has less than 127 bytes"));
    bytes.put_slice(text.as_bytes());
}
