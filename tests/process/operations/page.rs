//! The status page with data, in a real browser.

use std::time::Duration;

use serde_json::{Value, json};
use tokio::task::JoinSet;
use tokio::time::{Instant, sleep};
use uniffle_testkit::tools::kept_dir;

use super::browser::Browser;
use super::fixture::AdminFixture;

/// A name that would execute if inserted as markup.
const MARKUP_NAME: &str = "<img src=x onerror=alert(1)>";

const WAIT_MAX: Duration = Duration::from_secs(60);

/// Returns the number of points of the shortest curve of both charts, the number of curves, and the
/// names as the table shows them. Also returns the number of images, because an injected name would
/// create one. The other values are the state, the alarm, the width, and the requested origins.
const INSPECT: &str = "return {
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

/// Returns the text with the lowest contrast to its background per WCAG, and elements whose content
/// is wider than they are.
const LEGIBLE: &str = r"
const rgb = text => (text.match(/[\d.]+/g) || []).map(Number);
const light = colour => colour.slice(0, 3).map(v => v / 255)
  .map(v => v <= 0.03928 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4)
  .reduce((sum, v, n) => sum + v * [0.2126, 0.7152, 0.0722][n], 0);
const ground = it => {
  for (; it; it = it.parentElement) {
    const colour = rgb(getComputedStyle(it).backgroundColor);
    if (colour.length === 3 || colour[3] === 1) return colour;
  }
  return [255, 255, 255];
};
const contrast = it => {
  const style = getComputedStyle(it);
  const both = [light(rgb(it instanceof SVGElement ? style.fill : style.color)), light(ground(it))];
  return (Math.max(...both) + 0.05) / (Math.min(...both) + 0.05);
};
const hasText = it => [...it.childNodes].some(node => node.nodeType === 3 && node.textContent.trim());
const texts = [...document.querySelectorAll('body *')].filter(it => it.checkVisibility() && hasText(it));
const worst = texts.map(it => [contrast(it), it.textContent.slice(0, 40)]).sort((a, b) => a[0] - b[0])[0];
const boxes = [...document.querySelectorAll('.tile, .card, .disk, .pill, dialog[open], td, th, dd')];
const cut = boxes.filter(it => it.checkVisibility() && it.scrollWidth > it.clientWidth + 1).map(it => it.textContent.slice(0, 40));
return { contrast: worst[0], of: worst[1], texts: texts.length, cut };";

/// Returns what the page shows without applications, its links, the paths that it has requested,
/// and the units in the memory chart.
const EMPTY: &str = "return {
  options: document.getElementById('apps-empty').checkVisibility() ? document.getElementById('spark-options').textContent : '',
  storage: document.getElementById('disks-empty').textContent,
  links: [...document.querySelectorAll('footer a')].map(it => new URL(it.href).pathname),
  asked: [...new Set(performance.getEntriesByType('resource').map(it => new URL(it.name).pathname))],
  units: [...new Set([...document.querySelectorAll('#memory text')].map(it => it.textContent.split(' ')[1]).filter(it => /B$/.test(it)))],
};";

/// Returns the names, links and states of the cluster's nodes.
const NODE_LINKS: &str = "return [...document.querySelectorAll('#cluster-nodes tbody tr')]
  .map(row => [row.querySelector('td.app').firstChild.textContent, row.querySelector('a')?.href, row.querySelector('.pill').textContent]);";

/// Returns the number of rows of the cluster's nodes, with all applications expanded.
const NODES: &str = "document.getElementById('cluster-more').open = true;
return document.getElementById('cluster').checkVisibility()
  ? document.querySelectorAll('#cluster-nodes tbody tr').length : 0;";

/// Returns the use of disks in the rows of the cluster's nodes.
const DISKS_USED: &str =
    "return [...document.querySelectorAll('#cluster-nodes td[data-label=\"Disks used\"]')]
  .map(it => it.textContent);";

/// Asserts readable text. WCAG requires a contrast of 4.5 for small text.
async fn assert_legible(browser: &Browser, what: &str) {
    let seen = browser.run(LEGIBLE).await;
    assert!(seen["texts"].as_u64().unwrap() > 20, "{what}: {seen}");
    assert!(seen["contrast"].as_f64().unwrap() >= 4.5, "{what}: {seen}");
    assert_eq!(seen["cut"], json!([]), "{what}");
}

/// Asserts that `list` has entries, and that each satisfies `should`.
fn assert_each(list: &Value, should: impl Fn(&Value) -> bool) {
    let entries = list.as_array().unwrap();
    assert!(!entries.is_empty() && entries.iter().all(should), "{list}");
}

async fn until(browser: &Browser, what: &str, enough: impl Fn(&Value) -> bool) -> Value {
    let start = Instant::now();
    loop {
        let seen = browser.run(INSPECT).await;
        if enough(&seen) {
            return seen;
        }
        assert!(start.elapsed() < WAIT_MAX, "timed out: {what}: {seen}");
        sleep(Duration::from_millis(200)).await;
    }
}

/// Waits for both rows of the cluster, which show the use of disks.
async fn until_both_nodes_are_shown(browser: &Browser) {
    let start = Instant::now();
    while browser.run(NODES).await != json!(2) {
        assert!(start.elapsed() < WAIT_MAX, "the cluster is not shown with both nodes");
        sleep(Duration::from_millis(100)).await;
    }
    let used = browser.run(DISKS_USED).await;
    assert_each(&used, |text| text.as_str().unwrap().ends_with('B'));
    assert_eq!(used.as_array().unwrap().len(), 2, "{used}");
}

/// Waits until the page lists a lost node, and a live one with a link to `page`.
async fn until_lost_node_is_shown(browser: &Browser, page: &str) {
    let start = Instant::now();
    let wanted = |rows: &Value| {
        let rows = rows.as_array().unwrap();
        rows.iter().any(|row| row[1] == json!(page)) && rows.contains(&json!(["w-1", null, "lost"]))
    };
    loop {
        let rows = browser.run(NODE_LINKS).await;
        if wanted(&rows) {
            return;
        }
        assert!(start.elapsed() < WAIT_MAX, "the lost node is not shown: {rows}");
        sleep(Duration::from_millis(100)).await;
    }
}

/// Opens the cluster's first application and waits for the explanations of its workers.
async fn open_cluster_explanation(browser: &Browser) {
    let start = Instant::now();
    browser.run("document.getElementById('explain-close').click()").await;
    let seen = "document.querySelector('#cluster-apps tbody button')?.click();
      return document.querySelector('#explain[open] #explain-body h3')?.textContent;";
    while browser.run(seen).await != json!("At 1 worker") {
        assert!(start.elapsed() < WAIT_MAX, "the page shows no explanation of the cluster");
        sleep(Duration::from_millis(100)).await;
    }
}

/// Returns the address of a server that forwards everything below `/w1` to `origin`, as a reverse
/// proxy does.
async fn proxied(origin: String, tasks: &mut JoinSet<()>) -> String {
    let forward = move |request: axum::extract::Request| {
        let url = format!("{origin}{}", request.uri());
        async move {
            let answer = reqwest::get(url).await.unwrap();
            (answer.headers().clone(), answer.bytes().await.unwrap())
        }
    };
    let routes = axum::Router::new().nest_service("/w1", axum::Router::new().fallback(forward));
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    tasks.spawn(async move { axum::serve(listener, routes).await.unwrap() });
    format!("http://{address}/w1")
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn status_page_works_behind_a_path_prefix() {
    let Some(browser) = Browser::start().await else { return };
    let fixture = AdminFixture::with("[embedded_coordinator]\nnode_timeout_sec = 2\n").await;
    let mut tasks = JoinSet::new();
    let prefix = proxied(format!("http://{}", fixture.worker.addresses().http), &mut tasks).await;
    for page in [format!("{prefix}/"), prefix] {
        browser.open(&page).await;
        until(&browser, "the page has data", |seen| seen["state"] == json!("active")).await;
        let seen = browser.run(EMPTY).await;
        assert_eq!(seen["links"], json!(["/w1/metrics", "/w1/health/ready", "/w1/api/v1"]));
        assert_each(&seen["asked"], |path| path.as_str().unwrap().starts_with("/w1/api/v1/"));
        let options = seen["options"].as_str().unwrap();
        let quorum = format!("spark.rss.coordinator.quorum {}\n", fixture.worker.addresses().grpc);
        assert!(options.contains(&quorum) && options.contains("storage.type MEMORY_LOCALFILE"), "{options}");
        // Settings that the start output also lists.
        for setting in ["spark.shuffle.service.enabled", "spark.sql.adaptive.localShuffleReader.enabled"] {
            assert!(options.contains(&format!("\n{setting} false\n")), "{options}");
        }
        let has_tcp = fixture.worker.addresses().tcp.is_some();
        assert_eq!(options.contains("netty.noUnsafe=true"), has_tcp, "{options}");
        assert_eq!(seen["units"], json!(["MiB"]), "an axis must have one unit");
    }
    fixture.heartbeat_once("w-1").await;
    until_lost_node_is_shown(&browser, &format!("http://{}/", fixture.worker.addresses().http)).await;
    browser.close().await;
    fixture.finish().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn status_page_shows_worker_and_escapes_names() {
    let Some(browser) = Browser::start().await else { return };
    let fixture = AdminFixture::start().await;
    fixture.push(MARKUP_NAME, 4).await;
    let second = AdminFixture::in_cluster_of(&fixture).await;
    let origin = format!("http://{}", fixture.worker.addresses().http);
    browser.set_appearance(1280, 900, false, "light").await;
    browser.open(&format!("{origin}/")).await;
    until(&browser, "the charts have a curve of some points", |seen| {
        seen["points"].as_u64().is_some_and(|points| (4..1_000_000).contains(&points))
    })
    .await;
    fixture.push("application_1700000000000_0001_1700000000000", 30).await;
    let seen =
        until(&browser, "both applications are there", |seen| seen["apps"].as_array().unwrap().len() == 2)
            .await;
    assert_eq!(seen["curves"], json!(6));
    assert_eq!(seen["apps"], json!(["application_1700000000000_0001_1700000000000", MARKUP_NAME]));
    assert_eq!(
        (&seen["images"], &seen["state"], &seen["alarm"]),
        (&json!(0), &json!("active"), &json!(true))
    );
    assert_each(&seen["asked"], |it| *it == json!(origin));

    until_both_nodes_are_shown(&browser).await;
    let screenshots = kept_dir().join("status-page");
    std::fs::create_dir_all(&screenshots).unwrap();
    for (name, width, height, is_phone) in [("desktop", 1280, 900, false), ("phone", 390, 844, true)] {
        for scheme in ["light", "dark"] {
            browser.set_appearance(width, height, is_phone, scheme).await;
            let seen = until(&browser, "the page is drawn again", |seen| seen["curves"] == json!(6)).await;
            assert_eq!(seen["wide"], json!(false), "{name} must not be wider than the window");
            assert_legible(&browser, &format!("{name}, {scheme}")).await;
            browser.screenshot(&screenshots.join(format!("{name}-{scheme}.png")), true).await;
        }
    }
    browser.run("[...document.querySelectorAll('#apps button')].at(-1).click()").await;
    let title = "return document.getElementById('explain').open ? document.getElementById('explain-title').textContent : ''";
    let start = Instant::now();
    while browser.run(title).await != json!(MARKUP_NAME) {
        assert!(start.elapsed() < WAIT_MAX, "the application is not explained");
        sleep(Duration::from_millis(100)).await;
    }
    browser.screenshot(&screenshots.join("explain-phone-dark.png"), false).await;
    assert_legible(&browser, "an application on a phone").await;
    assert_eq!(browser.run("return document.images.length").await, json!(0));
    open_cluster_explanation(&browser).await;
    browser.screenshot(&screenshots.join("explain-cluster-phone-dark.png"), false).await;
    assert_legible(&browser, "an application of the cluster on a phone").await;
    // The page without applications, with an alarm.
    browser.run("document.getElementById('explain-close').click()").await;
    for app in fixture.worker.service().apps().apps() {
        fixture.worker.service().lifecycle.unregister_app(app.id().as_str()).unwrap();
    }
    fixture.call("/admin/decommission", "").await;
    for (name, width, height, is_phone, scheme) in
        [("empty-phone-light", 390, 844, true, "light"), ("empty-desktop-dark", 1280, 900, false, "dark")]
    {
        browser.set_appearance(width, height, is_phone, scheme).await;
        let seen = until(&browser, "the applications have ended, and refusals have a reason", |seen| {
            seen["apps"] == json!([]) && seen["alarm"] == json!(false) && seen["curves"] == json!(6)
        })
        .await;
        assert!(seen["state"].as_str().unwrap().starts_with("decommission"), "{seen}");
        assert_eq!(seen["wide"], json!(false), "{name} must not be wider than the window");
        assert_legible(&browser, name).await;
        browser.screenshot(&screenshots.join(format!("{name}.png")), true).await;
    }
    let console = browser.console().await;
    assert!(console.is_empty(), "{console:?}");
    browser.close().await;
    second.finish().await;
    fixture.finish().await;
}
