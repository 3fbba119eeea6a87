//! Baselines: the CPU seconds per GB of bare loops that move bytes like a server, but do nothing
//! else. No server that moves bytes like a loop can need less.
//!
//! The loops use plain threads and blocking calls. Both ends run here, and each thread measures its
//! own CPU time. Sockets are read into memory that exceeds the caches, like a server's, unless the
//! bytes are discarded. Memory is touched before the CPU time is measured. GB/s include that time,
//! except for `memcpy`.

use std::fs::{File, OpenOptions};
use std::io::{Read as _, Write as _};
use std::net::{TcpListener, TcpStream};
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::{Path, PathBuf};
use std::thread::{Scope, scope};

use anyhow::{Context as _, anyhow};
use tokio::time::Instant;

use crate::options::BaselineArgs;
use crate::process::thread_cpu_seconds;
use crate::report::{BaselineResult, GB};

/// A small send of the presets and of Spark with many partitions.
const REQUEST_BYTES: usize = 16 << 10;
/// Bytes of a request or response without blocks.
const HEADER_BYTES: usize = 64;
/// Bytes per call.
const CHUNK_BYTES: usize = 1 << 20;
/// Buffer that stays in a core's cache.
const HOT_BYTES: usize = 256 << 10;
/// Typical length of a Spark block.
const BLOCK_BYTES: usize = 14 << 10;
/// Memory of one connection.
const RING_BYTES: usize = 128 << 20;
/// Size of the file for `sendfile`.
const FILE_BYTES: usize = 256 << 20;
// Names of results that `compare` looks up.
pub(crate) const RECEIVE: &str = "socket to warm memory";
pub(crate) const SEND: &str = "memory to socket";
pub(crate) const DIRECT_WRITE: &str = "O_DIRECT write, aligned 1 MiB";
pub(crate) const DIRECT_READ: &str = "O_DIRECT read, aligned 1 MiB";
/// Alignment that satisfies O_DIRECT on common devices.
const ALIGNMENT: usize = 4096;

/// Measures all baselines, one after another.
pub(crate) fn measure(args: &BaselineArgs) -> anyhow::Result<Vec<BaselineResult>> {
    args.check()?;
    let bytes = usize::try_from(args.bytes.as_u64())?;
    let connections = usize::try_from(args.connections)?;
    let mut results = network(bytes, connections)?;
    results.push(sendfile(bytes, connections, &args.dir)?);
    // A file system without O_DIRECT (tmpfs) has no such baselines.
    results.extend(direct_io(bytes, connections, &args.dir, Direction::Write)?);
    results.extend(direct_io(bytes, connections, &args.dir, Direction::Read)?);
    results.push(memcpy(bytes));
    Ok(results)
}

/// Receives `bytes` bytes from a socket into memory.
type ReceiveFn = fn(&mut TcpStream, &mut [u8], usize) -> anyhow::Result<()>;

/// Measures the baselines of the network.
pub(crate) fn network(bytes: usize, connections: usize) -> anyhow::Result<Vec<BaselineResult>> {
    let measure_receive = |name: &str, memory_bytes: usize, receive: ReceiveFn| {
        run_receivers(name, bytes, connections, |mut stream, connection_bytes| {
            let mut memory = warm(memory_bytes);
            let cpu = thread_cpu_seconds();
            receive(&mut stream, &mut memory, connection_bytes)?;
            Ok(thread_cpu_seconds() - cpu)
        })
    };
    let into_memory = measure_receive(RECEIVE, RING_BYTES, receive)?;
    let discarded = measure_receive("socket, discarded", CHUNK_BYTES, receive)?;
    let checked = measure_receive("socket, checked, to warm memory", RING_BYTES, check_and_place)?;
    let requests = request_response(bytes, connections)?;
    let from_memory = run_senders(SEND, bytes, connections, |stream, connection_bytes| {
        let ring = warm(RING_BYTES);
        let cpu = thread_cpu_seconds();
        send(stream, &ring, connection_bytes)?;
        Ok(thread_cpu_seconds() - cpu)
    })?;
    Ok(vec![into_memory, discarded, checked, requests, from_memory])
}

/// Measures small sends: a request without blocks, which stands for a ticket, and one with 16 KiB,
/// each answered before the next.
fn request_response(bytes: usize, connections: usize) -> anyhow::Result<BaselineResult> {
    let rounds = |connection_bytes: usize| connection_bytes / REQUEST_BYTES;
    run_pairs(
        "ticket and send of 16 KiB, answered",
        bytes,
        connections,
        |stream, connection_bytes| {
            let (mut hot, mut memory) = (warm(REQUEST_BYTES), warm(RING_BYTES));
            let cpu = thread_cpu_seconds();
            for slot in (0..RING_BYTES / REQUEST_BYTES).cycle().take(rounds(connection_bytes)) {
                for length in [HEADER_BYTES, REQUEST_BYTES] {
                    stream.read_exact(&mut hot[..length])?;
                    stream.write_all(&hot[..HEADER_BYTES])?;
                }
                std::hint::black_box(crc32fast::hash(&hot));
                memory[slot * REQUEST_BYTES..][..REQUEST_BYTES].copy_from_slice(&hot);
            }
            Ok(thread_cpu_seconds() - cpu)
        },
        |stream, connection_bytes| {
            let mut hot = warm(REQUEST_BYTES);
            let cpu = thread_cpu_seconds();
            for _ in 0..rounds(connection_bytes) {
                for length in [HEADER_BYTES, REQUEST_BYTES] {
                    stream.write_all(&hot[..length])?;
                    stream.read_exact(&mut hot[..HEADER_BYTES])?;
                }
            }
            Ok(thread_cpu_seconds() - cpu)
        },
    )
}

fn warm(bytes: usize) -> Vec<u8> {
    vec![0x5a; bytes]
}

fn receive(stream: &mut TcpStream, ring: &mut [u8], bytes: usize) -> anyhow::Result<()> {
    let (mut remaining, mut position) = (bytes, 0);
    while remaining > 0 {
        let end = (position + CHUNK_BYTES).min(ring.len());
        let limit = (end - position).min(remaining);
        let count = stream.read(&mut ring[position..position + limit])?;
        anyhow::ensure!(count > 0, "the connection of the measurement was closed");
        remaining -= count;
        position = if position + count >= ring.len() { 0 } else { position + count };
    }
    Ok(())
}

/// Models a server that checks each block and places it in its partition's memory: small reads, a
/// checksum per block, and a copy.
fn check_and_place(stream: &mut TcpStream, ring: &mut [u8], bytes: usize) -> anyhow::Result<()> {
    let mut hot = warm(HOT_BYTES);
    let (mut remaining, mut position) = (bytes, 0);
    while remaining > 0 {
        let limit = remaining.min(HOT_BYTES);
        let count = stream.read(&mut hot[..limit])?;
        anyhow::ensure!(count > 0, "the connection of the measurement was closed");
        remaining -= count;
        for block in hot[..count].chunks(BLOCK_BYTES) {
            std::hint::black_box(crc32fast::hash(block));
            if ring.len() - position < block.len() {
                position = 0;
            }
            ring[position..position + block.len()].copy_from_slice(block);
            position += block.len();
        }
    }
    Ok(())
}

fn send(stream: &mut TcpStream, ring: &[u8], bytes: usize) -> anyhow::Result<()> {
    let mut remaining = bytes;
    for chunk in ring.chunks(CHUNK_BYTES).cycle() {
        if remaining == 0 {
            break;
        }
        let chunk = &chunk[..chunk.len().min(remaining)];
        stream.write_all(chunk)?;
        remaining -= chunk.len();
    }
    Ok(())
}

/// Measures a `server` that receives on each connection from a client that sends one cached buffer
/// repeatedly. `server` returns its CPU seconds.
fn run_receivers(
    name: &str,
    bytes: usize,
    connections: usize,
    server: impl Fn(TcpStream, usize) -> anyhow::Result<f64> + Sync,
) -> anyhow::Result<BaselineResult> {
    let client = |stream: &mut TcpStream, connection_bytes: usize| {
        let hot = warm(CHUNK_BYTES);
        let cpu = thread_cpu_seconds();
        send(stream, &hot, connection_bytes)?;
        Ok(thread_cpu_seconds() - cpu)
    };
    run_pairs(
        name,
        bytes,
        connections,
        |stream, connection_bytes| server(stream.try_clone()?, connection_bytes),
        client,
    )
}

/// Measures a `server` that sends on each connection to a client that discards the bytes.
fn run_senders(
    name: &str,
    bytes: usize,
    connections: usize,
    server: impl Fn(&mut TcpStream, usize) -> anyhow::Result<f64> + Sync,
) -> anyhow::Result<BaselineResult> {
    let client = |stream: &mut TcpStream, connection_bytes: usize| {
        let mut hot = warm(CHUNK_BYTES);
        let cpu = thread_cpu_seconds();
        receive(stream, &mut hot, connection_bytes)?;
        Ok(thread_cpu_seconds() - cpu)
    };
    run_pairs(name, bytes, connections, server, client)
}

/// Runs `server` and `client` at the ends of `connections` connections, each in a thread. Both
/// return their CPU seconds, which are summed.
fn run_pairs(
    name: &str,
    bytes: usize,
    connections: usize,
    server: impl Fn(&mut TcpStream, usize) -> anyhow::Result<f64> + Sync,
    client: impl Fn(&mut TcpStream, usize) -> anyhow::Result<f64> + Sync,
) -> anyhow::Result<BaselineResult> {
    let connection_bytes = bytes / connections;
    let listener = TcpListener::bind("127.0.0.1:0")?;
    let address = listener.local_addr()?;
    let begin = Instant::now();
    let (server_cpu, client_cpu) = scope(|scope| {
        let (server, client) = (&server, &client);
        let mut ends = Vec::new();
        for _ in 0..connections {
            let mut client_stream = TcpStream::connect(address)?;
            let (mut server_stream, _) = listener.accept()?;
            client_stream.set_nodelay(true)?;
            server_stream.set_nodelay(true)?;
            ends.push((
                scope.spawn(move || server(&mut server_stream, connection_bytes)),
                scope.spawn(move || client(&mut client_stream, connection_bytes)),
            ));
        }
        let mut sums = (0.0, 0.0);
        for (server, client) in ends {
            sums.0 += server.join().map_err(|_| anyhow!("a thread of the measurement failed"))??;
            sums.1 += client.join().map_err(|_| anyhow!("a thread of the measurement failed"))??;
        }
        anyhow::Ok(sums)
    })?;
    Ok(result(name, connection_bytes * connections, begin, server_cpu, client_cpu))
}

fn result(name: &str, bytes: usize, begin: Instant, server_cpu: f64, client_cpu: f64) -> BaselineResult {
    let gb = bytes as f64 / GB;
    BaselineResult {
        name: name.to_owned(),
        gb_per_second: gb / begin.elapsed().as_secs_f64().max(1e-9),
        server_cpu_per_gb: server_cpu / gb,
        client_cpu_per_gb: client_cpu / gb,
    }
}

/// A temporary file, which is removed on drop.
struct TempFile(PathBuf);

impl TempFile {
    fn new(dir: &Path, number: usize) -> Self {
        Self(dir.join(format!(".uniffle-bench-{}-{number}", std::process::id())))
    }

    fn open(&self, flags: i32) -> std::io::Result<File> {
        OpenOptions::new()
            .read(true)
            .write(true)
            .create(true)
            .truncate(false)
            .custom_flags(flags)
            .open(&self.0)
    }
}

impl Drop for TempFile {
    fn drop(&mut self) {
        let _ = std::fs::remove_file(&self.0);
    }
}

fn sendfile(bytes: usize, connections: usize, dir: &Path) -> anyhow::Result<BaselineResult> {
    let scratch = TempFile::new(dir, 0);
    let mut file = scratch.open(0).with_context(|| format!("cannot write in {}", dir.display()))?;
    let chunk = warm(CHUNK_BYTES);
    for _ in 0..FILE_BYTES / CHUNK_BYTES {
        file.write_all(&chunk)?;
    }
    run_senders("sendfile from page cache", bytes, connections, |stream, connection_bytes| {
        let file = scratch.open(0)?;
        let cpu = thread_cpu_seconds();
        let mut remaining = connection_bytes;
        while remaining > 0 {
            let position = (connection_bytes - remaining) % FILE_BYTES;
            let count = CHUNK_BYTES.min(remaining).min(FILE_BYTES - position);
            let mut offset = position as u64;
            let sent = rustix::fs::sendfile(&*stream, &file, Some(&mut offset), count)?;
            anyhow::ensure!(sent > 0, "the file of the measurement is too short");
            remaining -= sent;
        }
        Ok(thread_cpu_seconds() - cpu)
    })
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Direction {
    Write,
    Read,
}

/// Measures O_DIRECT transfers with aligned memory, one file per thread. For reads, the files are
/// written first.
fn direct_io(
    bytes: usize,
    threads: usize,
    dir: &Path,
    direction: Direction,
) -> anyhow::Result<Option<BaselineResult>> {
    let flags = i32::try_from(rustix::fs::OFlags::DIRECT.bits())?;
    let thread_bytes = (bytes / threads / CHUNK_BYTES).max(1) * CHUNK_BYTES;
    let files: Vec<TempFile> = (0..threads).map(|number| TempFile::new(dir, number)).collect();
    if files[0].open(flags).is_err() {
        return Ok(None);
    }
    if direction == Direction::Read {
        for file in &files {
            transfer(&file.open(flags)?, thread_bytes, Direction::Write)?;
        }
    }
    let begin = Instant::now();
    let cpu = scope(|scope| {
        let start = |file: &'_ TempFile| -> anyhow::Result<_> {
            let file = file.open(flags)?;
            Ok(spawn(scope, move || transfer(&file, thread_bytes, direction)))
        };
        let threads: Vec<_> = files.iter().map(start).collect::<anyhow::Result<_>>()?;
        let mut sum = 0.0;
        for thread in threads {
            sum += thread.join().map_err(|_| anyhow!("a thread of the measurement failed"))??;
        }
        anyhow::Ok(sum)
    })?;
    let name = match direction {
        Direction::Write => DIRECT_WRITE,
        Direction::Read => DIRECT_READ,
    };
    Ok(Some(result(name, thread_bytes * threads, begin, cpu, 0.0)))
}

/// Calls `scope.spawn`. The signature gives the closures of [`direct_io`] the lifetime of `scope`.
fn spawn<'scope, T: Send + 'scope>(
    scope: &'scope Scope<'scope, '_>,
    work: impl FnOnce() -> T + Send + 'scope,
) -> std::thread::ScopedJoinHandle<'scope, T> {
    scope.spawn(work)
}

fn transfer(file: &File, bytes: usize, direction: Direction) -> anyhow::Result<f64> {
    let mut memory = warm(CHUNK_BYTES + ALIGNMENT);
    let skip = memory.as_ptr().align_offset(ALIGNMENT);
    let chunk = &mut memory[skip..skip + CHUNK_BYTES];
    let cpu = thread_cpu_seconds();
    for offset in (0..bytes as u64).step_by(CHUNK_BYTES) {
        let count = match direction {
            Direction::Write => rustix::io::pwrite(file, chunk, offset)?,
            Direction::Read => rustix::io::pread(file, &mut *chunk, offset)?,
        };
        anyhow::ensure!(count == CHUNK_BYTES, "short transfer of {count} bytes");
    }
    Ok(thread_cpu_seconds() - cpu)
}

fn memcpy(bytes: usize) -> BaselineResult {
    let (from, mut to) = (warm(RING_BYTES), warm(RING_BYTES));
    let begin = Instant::now();
    let cpu = thread_cpu_seconds();
    let chunks = bytes.div_ceil(CHUNK_BYTES);
    let positions = RING_BYTES / CHUNK_BYTES;
    for number in 0..chunks {
        let position = number % positions * CHUNK_BYTES;
        to[position..position + CHUNK_BYTES].copy_from_slice(&from[position..position + CHUNK_BYTES]);
        std::hint::black_box(&mut to);
    }
    let cpu = thread_cpu_seconds() - cpu;
    result("memcpy", chunks * CHUNK_BYTES, begin, cpu, 0.0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn baselines_are_measured_and_leave_no_files() {
        let dir = tempfile::tempdir().unwrap();
        let args = BaselineArgs {
            bytes: bytesize::ByteSize::mib(8),
            dir: dir.path().to_owned(),
            connections: 2,
            report: crate::options::ReportArgs { json: None, html: None },
        };
        let results = measure(&args).unwrap();
        assert!(results.len() >= 5, "{results:?}");
        assert!(results.iter().all(|result| result.gb_per_second > 0.0 && result.server_cpu_per_gb >= 0.0));
        assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 0);
    }
}
