//! Floors: the speed of loops that no server can beat, in CPU seconds per GB of the server's
//! thread.
//!
//! The loops use plain threads and blocking calls. Both ends run here, and each thread measures its
//! own CPU time. The receiving memory is touched before the measurement and exceeds the caches,
//! like a server's.

use std::fs::{File, OpenOptions};
use std::io::{Read as _, Write as _};
use std::net::{TcpListener, TcpStream};
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::{Path, PathBuf};
use std::thread::{Scope, scope};

use anyhow::{Context as _, anyhow};
use tokio::time::Instant;

use crate::options::FloorArgs;
use crate::process::thread_cpu_seconds;
use crate::report::{FloorLine, GB};

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
pub(crate) const DIRECT_WRITE: &str = "O_DIRECT write, aligned 1 MiB";
pub(crate) const DIRECT_READ: &str = "O_DIRECT read, aligned 1 MiB";
/// Alignment that satisfies O_DIRECT on all devices.
const ALIGNMENT: usize = 4096;

/// Measures all floors, one after another.
pub(crate) fn measure(args: &FloorArgs) -> anyhow::Result<Vec<FloorLine>> {
    args.check()?;
    let bytes = usize::try_from(args.bytes.as_u64())?;
    let connections = usize::try_from(args.connections)?;
    let mut lines = network(bytes, connections)?;
    lines.push(sendfile(bytes, connections, &args.dir)?);
    // A file system without O_DIRECT (tmpfs) has no such floors.
    lines.extend(direct(bytes, connections, &args.dir, Direction::Write)?);
    lines.extend(direct(bytes, connections, &args.dir, Direction::Read)?);
    lines.push(memcpy(bytes));
    Ok(lines)
}

/// Receives `bytes` bytes from a socket into memory.
type Take = fn(&mut TcpStream, &mut [u8], usize) -> anyhow::Result<()>;

/// Measures the floors of the network.
pub(crate) fn network(bytes: usize, connections: usize) -> anyhow::Result<Vec<FloorLine>> {
    let into = |name: &str, memory_bytes: usize, take: Take| {
        pairs(name, bytes, connections, |mut stream, share| {
            let mut memory = warm(memory_bytes);
            let cpu = thread_cpu_seconds();
            take(&mut stream, &mut memory, share)?;
            Ok(thread_cpu_seconds() - cpu)
        })
    };
    let into_memory = into("socket to warm memory", RING_BYTES, receive)?;
    let discarded = into("socket, discarded", CHUNK_BYTES, receive)?;
    let checked = into("socket, checked, to warm memory", RING_BYTES, check_and_place)?;
    let from_memory = reversed("memory to socket", bytes, connections, |stream, share| {
        let ring = warm(RING_BYTES);
        let cpu = thread_cpu_seconds();
        send(stream, &ring, share)?;
        Ok(thread_cpu_seconds() - cpu)
    })?;
    Ok(vec![into_memory, discarded, checked, from_memory])
}

fn warm(bytes: usize) -> Vec<u8> {
    vec![0x5a; bytes]
}

fn receive(stream: &mut TcpStream, ring: &mut [u8], bytes: usize) -> anyhow::Result<()> {
    let (mut remaining, mut at) = (bytes, 0);
    while remaining > 0 {
        let end = (at + CHUNK_BYTES).min(ring.len());
        let room = (end - at).min(remaining);
        let count = stream.read(&mut ring[at..at + room])?;
        anyhow::ensure!(count > 0, "the floor's own connection broke");
        remaining -= count;
        at = if at + count >= ring.len() { 0 } else { at + count };
    }
    Ok(())
}

/// Models a server that checks each block and places it in its partition's memory: small reads, a
/// checksum per block, and a copy.
fn check_and_place(stream: &mut TcpStream, ring: &mut [u8], bytes: usize) -> anyhow::Result<()> {
    let mut hot = warm(HOT_BYTES);
    let (mut remaining, mut at) = (bytes, 0);
    while remaining > 0 {
        let room = remaining.min(HOT_BYTES);
        let count = stream.read(&mut hot[..room])?;
        anyhow::ensure!(count > 0, "the floor's own connection broke");
        remaining -= count;
        for block in hot[..count].chunks(BLOCK_BYTES) {
            std::hint::black_box(crc32fast::hash(block));
            if ring.len() - at < block.len() {
                at = 0;
            }
            ring[at..at + block.len()].copy_from_slice(block);
            at += block.len();
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

/// Measures a `server` that receives on each connection from a cheap client. `server` returns its
/// CPU seconds.
fn pairs(
    name: &str,
    bytes: usize,
    connections: usize,
    server: impl Fn(TcpStream, usize) -> anyhow::Result<f64> + Sync,
) -> anyhow::Result<FloorLine> {
    let client = |stream: &mut TcpStream, share: usize| {
        let hot = warm(CHUNK_BYTES);
        let cpu = thread_cpu_seconds();
        send(stream, &hot, share)?;
        Ok(thread_cpu_seconds() - cpu)
    };
    both(name, bytes, connections, |stream, share| server(stream.try_clone()?, share), client)
}

/// Measures a `server` that sends on each connection to a client that discards the bytes.
fn reversed(
    name: &str,
    bytes: usize,
    connections: usize,
    server: impl Fn(&mut TcpStream, usize) -> anyhow::Result<f64> + Sync,
) -> anyhow::Result<FloorLine> {
    let client = |stream: &mut TcpStream, share: usize| {
        let mut hot = warm(CHUNK_BYTES);
        let cpu = thread_cpu_seconds();
        receive(stream, &mut hot, share)?;
        Ok(thread_cpu_seconds() - cpu)
    };
    both(name, bytes, connections, server, client)
}

/// Runs `server` and `client` at the ends of `connections` connections, each in a thread. Both
/// return their CPU seconds, which are summed.
fn both(
    name: &str,
    bytes: usize,
    connections: usize,
    server: impl Fn(&mut TcpStream, usize) -> anyhow::Result<f64> + Sync,
    client: impl Fn(&mut TcpStream, usize) -> anyhow::Result<f64> + Sync,
) -> anyhow::Result<FloorLine> {
    let share = bytes / connections;
    let listener = TcpListener::bind("127.0.0.1:0")?;
    let address = listener.local_addr()?;
    let begin = Instant::now();
    let (server_cpu, client_cpu) = scope(|scope| {
        let (server, client) = (&server, &client);
        let mut ends = Vec::new();
        for _ in 0..connections {
            let mut near = TcpStream::connect(address)?;
            let (mut far, _) = listener.accept()?;
            near.set_nodelay(true)?;
            far.set_nodelay(true)?;
            ends.push((
                scope.spawn(move || server(&mut far, share)),
                scope.spawn(move || client(&mut near, share)),
            ));
        }
        let mut sums = (0.0, 0.0);
        for (server, client) in ends {
            sums.0 += server.join().map_err(|_| anyhow!("a thread of the floor failed"))??;
            sums.1 += client.join().map_err(|_| anyhow!("a thread of the floor failed"))??;
        }
        anyhow::Ok(sums)
    })?;
    Ok(line(name, share * connections, begin, server_cpu, client_cpu))
}

fn line(name: &str, bytes: usize, begin: Instant, server_cpu: f64, client_cpu: f64) -> FloorLine {
    let gb = bytes as f64 / GB;
    FloorLine {
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

fn sendfile(bytes: usize, connections: usize, dir: &Path) -> anyhow::Result<FloorLine> {
    let scratch = TempFile::new(dir, 0);
    let mut file = scratch.open(0).with_context(|| format!("cannot write in {}", dir.display()))?;
    let chunk = warm(CHUNK_BYTES);
    for _ in 0..FILE_BYTES / CHUNK_BYTES {
        file.write_all(&chunk)?;
    }
    reversed("sendfile from page cache", bytes, connections, |stream, share| {
        let file = scratch.open(0)?;
        let cpu = thread_cpu_seconds();
        let mut remaining = share;
        while remaining > 0 {
            let at = (share - remaining) % FILE_BYTES;
            let count = CHUNK_BYTES.min(remaining).min(FILE_BYTES - at);
            let mut offset = at as u64;
            let sent = rustix::fs::sendfile(&*stream, &file, Some(&mut offset), count)?;
            anyhow::ensure!(sent > 0, "the file of the floor is too short");
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
fn direct(
    bytes: usize,
    threads: usize,
    dir: &Path,
    direction: Direction,
) -> anyhow::Result<Option<FloorLine>> {
    let flags = i32::try_from(rustix::fs::OFlags::DIRECT.bits())?;
    let share = (bytes / threads / CHUNK_BYTES).max(1) * CHUNK_BYTES;
    let files: Vec<TempFile> = (0..threads).map(|number| TempFile::new(dir, number)).collect();
    if files[0].open(flags).is_err() {
        return Ok(None);
    }
    if direction == Direction::Read {
        for file in &files {
            transfer(&file.open(flags)?, share, Direction::Write)?;
        }
    }
    let begin = Instant::now();
    let cpu = scope(|scope| {
        let start = |file: &'_ TempFile| -> anyhow::Result<_> {
            let file = file.open(flags)?;
            Ok(spawn(scope, move || transfer(&file, share, direction)))
        };
        let threads: Vec<_> = files.iter().map(start).collect::<anyhow::Result<_>>()?;
        let mut sum = 0.0;
        for thread in threads {
            sum += thread.join().map_err(|_| anyhow!("a thread of the floor failed"))??;
        }
        anyhow::Ok(sum)
    })?;
    let name = match direction {
        Direction::Write => DIRECT_WRITE,
        Direction::Read => DIRECT_READ,
    };
    Ok(Some(line(name, share * threads, begin, cpu, 0.0)))
}

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
        anyhow::ensure!(count == CHUNK_BYTES, "a short transfer of {count} bytes");
    }
    Ok(thread_cpu_seconds() - cpu)
}

fn memcpy(bytes: usize) -> FloorLine {
    let (from, mut to) = (warm(RING_BYTES), warm(RING_BYTES));
    let begin = Instant::now();
    let cpu = thread_cpu_seconds();
    let chunks = bytes.div_ceil(CHUNK_BYTES);
    let places = RING_BYTES / CHUNK_BYTES;
    for number in 0..chunks {
        let at = number % places * CHUNK_BYTES;
        to[at..at + CHUNK_BYTES].copy_from_slice(&from[at..at + CHUNK_BYTES]);
        std::hint::black_box(&mut to);
    }
    let cpu = thread_cpu_seconds() - cpu;
    line("memcpy", chunks * CHUNK_BYTES, begin, cpu, 0.0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn floors_are_measured_and_leave_no_files() {
        let dir = tempfile::tempdir().unwrap();
        let args = FloorArgs {
            bytes: bytesize::ByteSize::mib(8),
            dir: dir.path().to_owned(),
            connections: 2,
            report: crate::options::ReportArgs { json: None, html: None },
        };
        let lines = measure(&args).unwrap();
        assert!(lines.len() >= 5, "{lines:?}");
        assert!(lines.iter().all(|line| line.gb_per_second > 0.0 && line.server_cpu_per_gb >= 0.0));
        assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 0);
    }
}
