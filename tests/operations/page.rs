//! The status page in a real browser, with data on it.

use std::path::PathBuf;
use std::time::Duration;

use serde_json::{Value, json};
use tokio::time::{Instant, sleep};

use super::browser::Browser;
use super::world::World;

/// A name that would run if any of it became markup.
const NASTY: &str = "<img src=x onerror=alert(1)>";

const PATIENCE: Duration = Duration::from_secs(60);

/// Points of the shortest curve of both charts; names as the table shows them; what would be there of a name that had
/// become markup.
const LOOK: &str = "return {
  points: Math.min(...['throughput', 'memory'].map(id => Math.min(...[...document.querySelectorAll(`#${id} path.series`)]
    .map(path => path.getAttribute('d').split('L').length), 1e9))),
  curves: document.querySelectorAll('path.series').length,
  apps: [...document.querySelectorAll('#apps tbody td.app button')].map(it => it.textContent),
  images: document.images.length,
  state: document.getElementById('state-text').textContent,
  alarm: document.getElementById('alarm').hidden,
  wide: document.documentElement.scrollWidth > document.documentElement.clientWidth,
  asked: performance.getEntriesByType('resource').map(it => new URL(it.name).origin),
};";

async fn until(browser: &Browser, what: &str, enough: impl Fn(&Value) -> bool) -> Value {
    let start = Instant::now();
    loop {
        let seen = browser.run(LOOK).await;
        if enough(&seen) {
            return seen;
        }
        assert!(start.elapsed() < PATIENCE, "{what}: not yet: {seen}");
        sleep(Duration::from_millis(200)).await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_status_page_shows_the_worker_and_runs_nothing_that_a_name_says() {
    let Some(browser) = Browser::start().await else { return };
    let world = World::start().await;
    world.push(NASTY, 4).await;
    let origin = format!("http://{}", world.worker.addresses().http);
    browser.look(1280, 900, false, "light").await;
    browser.open(&format!("{origin}/")).await;
    until(&browser, "the charts have a curve of some points", |seen| {
        seen["points"].as_u64().is_some_and(|points| (4..1_000_000).contains(&points))
    })
    .await;
    world.push("application_1700000000000_0001_1700000000000", 30).await;
    let seen =
        until(&browser, "both applications are there", |seen| seen["apps"].as_array().unwrap().len() == 2)
            .await;
    assert_eq!(seen["curves"], json!(6));
    assert_eq!(seen["apps"], json!(["application_1700000000000_0001_1700000000000", NASTY]));
    assert_eq!(
        (&seen["images"], &seen["state"], &seen["alarm"]),
        (&json!(0), &json!("active"), &json!(true))
    );
    assert!(seen["asked"].as_array().unwrap().iter().all(|it| *it == json!(origin)), "{}", seen["asked"]);

    let pictures = PathBuf::from(env!("CARGO_TARGET_TMPDIR")).join("status-page");
    std::fs::create_dir_all(&pictures).unwrap();
    for (name, width, height, is_phone) in [("desktop", 1280, 900, false), ("phone", 390, 844, true)] {
        for scheme in ["light", "dark"] {
            browser.look(width, height, is_phone, scheme).await;
            let seen = until(&browser, "it is drawn anew", |seen| seen["curves"] == json!(6)).await;
            assert_eq!(seen["wide"], json!(false), "{name} has to be scrolled sideways");
            browser.picture(&pictures.join(format!("{name}-{scheme}.png")), true).await;
        }
    }
    browser.run("[...document.querySelectorAll('#apps button')].at(-1).click()").await;
    let title = "return document.getElementById('explain').open ? document.getElementById('explain-title').textContent : ''";
    let start = Instant::now();
    while browser.run(title).await != json!(NASTY) {
        assert!(start.elapsed() < PATIENCE, "the application is not explained");
        sleep(Duration::from_millis(100)).await;
    }
    browser.picture(&pictures.join("explain-phone-dark.png"), false).await;
    assert_eq!(browser.run("return document.images.length").await, json!(0));
    let console = browser.console().await;
    assert!(console.is_empty(), "{console:?}");
    browser.close().await;
    world.finish().await;
}
