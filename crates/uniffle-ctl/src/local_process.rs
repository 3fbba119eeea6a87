//! Search for the process on this host that serves a listener.

use std::fs;
use std::net::UdpSocket;

use crate::http::ListenerAddress;

/// State of a listening socket in `/proc/net/tcp`.
const LISTENING: &str = "0A";

/// Returns the id of the process that listens on the port of `http`. The service manager may hold
/// the same socket and is not the worker.
///
/// # Errors
/// If the worker is on another host, or is not exactly one visible process.
pub(crate) fn find(http: &ListenerAddress) -> Result<i32, String> {
    let host = http.host.trim_start_matches('[').trim_end_matches(']');
    if UdpSocket::bind((host, 0)).is_err() {
        return Err(format!("{host} is not an address of this host"));
    }
    let sockets: Vec<String> = ["/proc/net/tcp", "/proc/net/tcp6"]
        .iter()
        .filter_map(|file| fs::read_to_string(file).ok())
        .flat_map(|table| inodes(&table, http.port))
        .map(|inode| format!("socket:[{inode}]"))
        .collect();
    let all = fs::read_dir("/proc").map_err(|error| format!("/proc: {error}"))?.flatten();
    let pids = all.filter_map(|entry| entry.file_name().to_str()?.parse::<i32>().ok());
    let holders: Vec<i32> = pids.filter(|pid| holds(*pid, &sockets) && !is_manager(*pid)).collect();
    match holders[..] {
        [pid] => Ok(pid),
        _ => Err(format!("{} visible processes listen on port {}", holders.len(), http.port)),
    }
}

/// Returns the inodes of sockets that listen on `port`.
fn inodes(table: &str, port: u16) -> Vec<String> {
    let suffix = format!(":{port:04X}");
    let rows = table.lines().skip(1).map(|line| line.split_whitespace().collect::<Vec<_>>());
    let listening = rows.filter(|row| {
        row.get(1).is_some_and(|local| local.ends_with(&suffix)) && row.get(3) == Some(&LISTENING)
    });
    listening.filter_map(|row| row.get(9).map(|inode| (*inode).to_owned())).collect()
}

fn holds(pid: i32, sockets: &[String]) -> bool {
    let Ok(descriptors) = fs::read_dir(format!("/proc/{pid}/fd")) else { return false };
    let mut targets = descriptors.flatten().filter_map(|entry| fs::read_link(entry.path()).ok());
    targets.any(|target| sockets.iter().any(|socket| target.as_os_str() == socket.as_str()))
}

fn is_manager(pid: i32) -> bool {
    fs::read_to_string(format!("/proc/{pid}/comm")).is_ok_and(|name| name.trim_end() == "systemd")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn listener_is_found_in_its_own_process() {
        let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        let port = listener.local_addr().unwrap().port();
        let base = |host: &str| ListenerAddress { is_tls: false, host: host.to_owned(), port };
        assert_eq!(find(&base("127.0.0.1")), Ok(i32::try_from(std::process::id()).unwrap()));
        assert!(find(&base("192.0.2.1")).unwrap_err().contains("not an address of this host"));
        drop(listener);
        assert!(find(&base("127.0.0.1")).unwrap_err().contains("0 visible processes"));
    }
}
