//! Hostile input to the HTTP listener, alone and while data flows.

use std::io::{Read as _, Write as _};
use std::net::TcpStream;
use std::thread;

use super::tools::{Load, ask_text};
use uniffle_testkit::worker::{Setup, WorkerProcess};

#[test]
fn malformed_requests_get_a_specific_status() {
    let worker = WorkerProcess::start(&Setup { tables: "[http]\nprofiles = true", ..Setup::default() });
    let port = worker.ready().http_port;
    let long = format!("/debug/pprof/profile?{}", "x".repeat(100_000));
    for (path, status, text) in [
        (
            "/debug/pprof/profile?seconds=99999999999999999999",
            400,
            "seconds=99999999999999999999: must be an integer",
        ),
        ("/debug/pprof/profile?seconds=-1", 400, "seconds=-1:"),
        ("/debug/pprof/profile?frequency=1000000", 400, "frequency=1000000:"),
        ("/debug/pprof/profile?format=%00", 400, "format="),
        ("/debug/pprof/heap?seconds=1", 400, "unknown parameter \"seconds\""),
        (long.as_str(), 431, ""),
    ] {
        let (actual, answer) = ask_text(port, "GET", path);
        // hyper's response to an oversized head depends on its buffer boundaries.
        assert!(actual == status || (status == 431 && (400..500).contains(&actual)), "{actual}: {answer}");
        assert!(answer.starts_with(text) && answer.len() < 300, "{answer}");
    }
    worker.assert_no_error_logged();
    worker.stop();
}

#[test]
fn scrape_storms_and_slow_clients_do_not_affect_data() {
    // The head timeout disconnects senders of half a head. The response timeout is long: symbols of
    // a profile are resolved at the lowest priority, on a busy machine only after the load.
    let setup = Setup {
        tables: "[http]\nprofiles = true\nmax_connections = 16\nopening_timeout_sec = 10\nrequest_timeout_sec = 600",
        ..Setup::default()
    };
    let worker = WorkerProcess::start(&setup);
    let port = worker.ready().http_port;
    let load = Load::start(&worker, "200MB", 3);
    let mut slow: Vec<TcpStream> = (0..8)
        .map(|_| {
            let mut stream = TcpStream::connect(("127.0.0.1", port)).unwrap();
            stream.write_all(b"GET /metrics HTT").unwrap();
            stream
        })
        .collect();
    let storm: Vec<_> = (0..16)
        .map(|_| {
            thread::spawn(move || {
                (0..20).all(|_| {
                    let (status, text) = ask_text(port, "GET", "/metrics");
                    status == 200 && text.contains("\nmemory_capacity ")
                })
            })
        })
        .collect();
    let (status, profile) = ask_text(port, "GET", "/debug/pprof/profile?seconds=1&format=svg");
    assert!(status == 200 && profile.contains("</svg>"), "{status}: {profile:.300}");
    for scraper in storm {
        assert!(scraper.join().unwrap(), "a scrape was not answered");
    }
    for stream in &mut slow {
        let mut answer = Vec::new();
        let _ = stream.read_to_end(&mut answer); // cut after ten seconds, with or without a response
    }
    load.finish();
    worker.assert_clean();
    worker.assert_no_error_logged();
    worker.stop();
}
