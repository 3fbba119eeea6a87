//! A headless Chromium, driven over WebDriver with plain HTTP.

use std::io::{BufRead as _, BufReader};
use std::os::unix::process::CommandExt as _;
use std::path::Path;
use std::process::{Child, Command, Stdio};

use reqwest::Method;
use serde_json::{Value, json};
use tempfile::TempDir;

use uniffle_testkit::tools::{available, find};

/// Flags for a browser that is offline, in a container, as root, without scroll bars in
/// screenshots.
const FLAGS: &[&str] = &[
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--disable-dev-shm-usage",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--hide-scrollbars",
];

/// A browser with one window, ended on drop.
pub(crate) struct Browser {
    driver: Child,
    session: String,
    http: reqwest::Client,
    _profile: TempDir,
}

impl Browser {
    /// Starts a browser. Prints a line and returns `None` if it is not installed; in CI that
    /// panics.
    pub(crate) async fn start() -> Option<Self> {
        if !available("the status page in a browser", &["chromium", "chromedriver"]) {
            return None;
        }
        let mut driver = Command::new("chromedriver")
            .arg("--port=0")
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::null())
            // Own process group, because a killed driver leaves its browser running.
            .process_group(0)
            .spawn()
            .unwrap();
        let stdout = BufReader::new(driver.stdout.take().unwrap());
        let port = tokio::task::spawn_blocking(move || {
            let mut lines = stdout.lines().map_while(Result::ok);
            let port = lines
                .find_map(|line| line.split_once("successfully on port ").map(|(_, rest)| rest.to_owned()));
            // Later output is not read: chromedriver prints little, and a pipe holds 64 KiB.
            port.unwrap().trim_end_matches('.').to_owned()
        });
        let port = port.await.unwrap();
        let profile = tempfile::tempdir().unwrap();
        let mut flags: Vec<String> = FLAGS.iter().map(|&flag| flag.to_owned()).collect();
        flags.push(format!("--user-data-dir={}", profile.path().display()));
        let capabilities = json!({ "capabilities": { "alwaysMatch": {
            "goog:chromeOptions": { "args": flags, "binary": find("chromium") },
            "goog:loggingPrefs": { "browser": "ALL" },
            "unhandledPromptBehavior": "ignore",
        } } });
        let mut browser = Self {
            driver,
            session: format!("http://127.0.0.1:{port}/session"),
            http: reqwest::Client::new(),
            _profile: profile,
        };
        let answer = browser.ask(Method::POST, "", &capabilities).await;
        let id = answer["sessionId"]
            .as_str()
            .unwrap_or_else(|| panic!("the browser opened no session: {answer}"))
            .to_owned();
        browser.session = format!("{}/{id}", browser.session);
        Some(browser)
    }

    /// Opens `url` and waits until it is loaded.
    pub(crate) async fn open(&self, url: &str) {
        self.ask(Method::POST, "/url", &json!({ "url": url })).await;
    }

    /// Runs `script` and returns its result. Fails while a dialog is open.
    pub(crate) async fn run(&self, script: &str) -> Value {
        self.ask(Method::POST, "/execute/sync", &json!({ "script": script, "args": [] })).await
    }

    /// Returns all console messages of the page and the browser.
    pub(crate) async fn console(&self) -> Vec<Value> {
        let log = self.ask(Method::POST, "/se/log", &json!({ "type": "browser" })).await;
        log.as_array().cloned().unwrap_or_default()
    }

    /// Sets the window size, the device type and the preferred color scheme.
    pub(crate) async fn set_appearance(&self, width: u32, height: u32, is_phone: bool, scheme: &str) {
        let size = json!({ "width": width, "height": height, "deviceScaleFactor": 1, "mobile": is_phone });
        self.devtools("Emulation.setDeviceMetricsOverride", &size).await;
        let media = json!({ "features": [{ "name": "prefers-color-scheme", "value": scheme }] });
        self.devtools("Emulation.setEmulatedMedia", &media).await;
    }

    /// Saves a screenshot of the whole page or of the visible part.
    pub(crate) async fn screenshot(&self, path: &Path, is_whole: bool) {
        let whole = json!({ "format": "png", "captureBeyondViewport": is_whole });
        let screenshot = self.devtools("Page.captureScreenshot", &whole).await;
        let bytes = from_base64(screenshot["data"].as_str().unwrap());
        assert!(
            bytes.starts_with(b"\x89PNG") && bytes.len() > 10_000,
            "the screenshot has {} bytes",
            bytes.len()
        );
        std::fs::write(path, bytes).unwrap();
    }

    async fn devtools(&self, command: &str, params: &Value) -> Value {
        self.ask(Method::POST, "/goog/cdp/execute", &json!({ "cmd": command, "params": params })).await
    }

    async fn ask(&self, method: Method, path: &str, body: &Value) -> Value {
        let url = format!("{}{path}", self.session);
        let answer = self.http.request(method, url).body(body.to_string()).send().await.unwrap();
        let status = answer.status();
        let mut answer: Value = serde_json::from_str(&answer.text().await.unwrap()).unwrap();
        assert!(status.is_success(), "{path}: {answer}");
        answer["value"].take()
    }

    /// Ends the browser regularly. A drop kills the driver's process group instead.
    pub(crate) async fn close(self) {
        self.ask(Method::DELETE, "", &json!({})).await;
    }
}

impl Drop for Browser {
    fn drop(&mut self) {
        let group = rustix::process::Pid::from_child(&self.driver);
        // It may have ended already.
        let _ = rustix::process::kill_process_group(group, rustix::process::Signal::KILL);
        drop(self.driver.wait());
    }
}

/// Decodes base64 as WebDriver encodes it: standard alphabet, padded, without whitespace.
fn from_base64(text: &str) -> Vec<u8> {
    const ALPHABET: &[u8; 64] = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
    let mut bytes = Vec::with_capacity(text.len() / 4 * 3);
    let (mut held, mut bits) = (0_u32, 0);
    for letter in text.bytes().take_while(|letter| *letter != b'=') {
        let value = ALPHABET.iter().position(|known| *known == letter).unwrap();
        held = held << 6 | u32::try_from(value).unwrap();
        bits += 6;
        if bits >= 8 {
            bits -= 8;
            bytes.push(u8::try_from(held >> bits & 0xff).unwrap());
        }
    }
    bytes
}
