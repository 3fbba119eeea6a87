//! Alert rules, their tests, dashboard, metrics page and runbook agree.
//!
//! Every expression names metrics that the worker has. Every alert has a severity, texts, a test
//! and an entry of the runbook. Every panel has a unit and a description, and its links, if any,
//! lead to entries of the runbook. `tests/process/observe` runs the expressions.

use std::collections::{BTreeMap, BTreeSet};

use serde_json::Value;

use super::docs::anchors;

const RULES: &str = include_str!("../../deploy/prometheus/uniffle-worker.rules.yml");
const RULE_TESTS: &str = include_str!("../../deploy/prometheus/uniffle-worker.tests.yml");
const DASHBOARD: &str = include_str!("../../deploy/grafana/uniffle-worker.json");
const METRICS: &str = include_str!("../../docs/metrics.md");
const RUNBOOK: &str = include_str!("../../docs/runbook.md");
/// Prefix of the runbook's address in alerts, and in links of the dashboard.
const RUNBOOK_OF_ALERTS: &str = "{{ $externalLabels.uniffle_docs }}docs/runbook.md#";
const RUNBOOK_OF_PANELS: &str = "${docs}docs/runbook.md#";
/// Series that Prometheus itself writes.
const OWN_SERIES: [&str; 2] = ["ALERTS", "up"];

/// Returns the fields of each alert of the rule file, such as `expr` and `summary`.
fn alerts() -> Vec<BTreeMap<&'static str, &'static str>> {
    let mut alerts: Vec<BTreeMap<_, _>> = Vec::new();
    for line in RULES.lines().map(str::trim).filter(|line| !line.starts_with('#')) {
        let Some((key, value)) = line.split_once(": ") else { continue };
        match (key, alerts.last_mut()) {
            ("- alert", _) => alerts.push(BTreeMap::from([("alert", value)])),
            (key, Some(alert)) => drop(alert.insert(key, value.trim_matches(['"', '\'']))),
            _ => {}
        }
    }
    assert!(alerts.len() > 20, "only {} alerts: the search is broken", alerts.len());
    alerts
}

/// Returns every panel of the dashboard that shows data.
fn panels() -> Vec<Value> {
    let dashboard: Value = serde_json::from_str(DASHBOARD).unwrap();
    let panels = dashboard["panels"].as_array().unwrap();
    let panels: Vec<Value> = panels.iter().filter(|panel| panel["type"] != "row").cloned().collect();
    assert!(panels.len() > 20, "only {} panels: the search is broken", panels.len());
    panels
}

/// Returns the names in the tables of docs/metrics.md, with the suffixes of histograms.
fn documented() -> BTreeSet<String> {
    let rows = METRICS.lines().filter_map(|line| line.strip_prefix("| `"));
    let mut names = BTreeSet::new();
    for row in rows {
        let (name, rest) = row.split_once('`').expect("a code span ends");
        names.insert(name.to_owned());
        if rest.contains("| histogram |") {
            for suffix in ["_bucket", "_sum", "_count"] {
                names.insert(format!("{name}{suffix}"));
            }
        }
    }
    assert!(names.len() > 100, "only {} metrics: the search is broken", names.len());
    names
}

/// Returns the metrics that an expression names: no labels, strings, functions or keywords.
fn metrics(expression: &str) -> Vec<String> {
    const KEYWORDS: [&str; 6] = ["and", "or", "unless", "bool", "offset", "inf"];
    const BEFORE_LABELS: [&str; 6] = ["by", "on", "without", "ignoring", "group_left", "group_right"];
    let mut found = Vec::new();
    let mut rest = expression;
    let is_word = |c: char| c.is_alphanumeric() || c == '_' || c == ':';
    while let Some(first) = rest.chars().next() {
        let end = rest.find(|c| !is_word(c)).unwrap_or(rest.len());
        let (word, after) = rest.split_at(end);
        let closing = match first {
            '{' => Some('}'),
            '[' => Some(']'),
            '"' => Some('"'),
            _ => None,
        };
        if let Some(closing) = closing {
            let end = rest[1..].find(closing).expect("brackets and quotes are closed");
            rest = &rest[end + 2..];
        } else if word.is_empty() {
            rest = &rest[first.len_utf8()..];
        } else if BEFORE_LABELS.contains(&word) {
            rest = after.split_once(')').expect("a list of labels ends").1;
        } else {
            let is_function = ["(", "by ", "without "].iter().any(|it| after.trim_start().starts_with(it));
            if !is_function && !KEYWORDS.contains(&word) && !first.is_ascii_digit() {
                found.push(word.to_owned());
            }
            rest = after;
        }
    }
    found
}

/// Asserts that `expression` names metrics, and only documented ones.
fn assert_names_metrics(owner: &str, expression: &str, documented: &BTreeSet<String>) {
    let metrics = metrics(expression);
    let unknown: Vec<_> = metrics
        .iter()
        .filter(|name| !documented.contains(*name) && !OWN_SERIES.contains(&name.as_str()))
        .collect();
    assert!(unknown.is_empty() && !metrics.is_empty(), "{owner}: {expression}: {unknown:?} do not exist");
}

#[test]
fn metrics_of_an_expression_are_extracted() {
    let query = "sum by (path) (rate(a_total{path=~\"x_y\"}[5m])) / on (instance, job) b > 1e_3 and c_d";
    assert_eq!(metrics(query), ["a_total", "b", "c_d"]);
}

#[test]
fn alerts_name_existing_metrics() {
    let documented = documented();
    for alert in alerts() {
        assert_names_metrics(alert["alert"], alert["expr"], &documented);
    }
}

#[test]
fn alerts_have_severity_texts_and_runbook_entry() {
    let anchors = anchors(RUNBOOK);
    let mut names = BTreeSet::new();
    for alert in alerts() {
        let name = alert["alert"];
        let field = |key: &str| *alert.get(key).unwrap_or_else(|| panic!("alert {name} has no {key}"));
        assert!(names.insert(name), "alert {name} exists twice");
        assert!(["critical", "warning"].contains(&field("severity")), "{name}: {}", field("severity"));
        assert!(field("summary").contains("{{ $") && field("description").ends_with('.'), "{name}");
        let anchor = field("runbook_url").strip_prefix(RUNBOOK_OF_ALERTS);
        let anchor = anchor.unwrap_or_else(|| panic!("{name}: {}", field("runbook_url")));
        assert!(anchors.contains(anchor), "{name}: docs/runbook.md has no #{anchor}");
    }
}

#[test]
fn each_alert_has_a_rule_test() {
    for alert in alerts() {
        let test = format!("  - name: {}\n", alert["alert"]);
        assert!(RULE_TESTS.contains(&test), "alert {} has no test", alert["alert"]);
    }
}

/// The runbook lists each alert in the entry that the alert links to, and no others.
#[test]
fn runbook_names_each_alert_in_its_entry() {
    let mut listed = BTreeSet::new();
    let mut entry = String::new();
    for line in RUNBOOK.lines() {
        if let Some(title) = line.strip_prefix("## ") {
            entry = title.to_lowercase().replace(' ', "-");
        } else if let Some((_, names)) = line.split_once("Alert: ").or_else(|| line.split_once("Alerts: ")) {
            let names = names.trim_end_matches('.').split(", ");
            listed.extend(names.map(|name| (name.to_owned(), entry.clone())));
        }
    }
    let linked = alerts().into_iter().map(|alert| {
        let anchor = alert["runbook_url"].rsplit('#').next().unwrap();
        (alert["alert"].to_owned(), anchor.to_owned())
    });
    assert_eq!(listed, linked.collect());
}

/// Each entry has the symptom, where to look, what to do and how to verify, in this order.
#[test]
fn runbook_entries_have_four_parts() {
    let mut entries = 0;
    for entry in RUNBOOK.split("\n## ").skip(1) {
        let title = entry.lines().next().unwrap();
        let places = ["**Symptom.**", "**Look.**", "**Do.**", "**Verify.**"].map(|part| entry.find(part));
        assert!(places.iter().all(Option::is_some) && places.is_sorted(), "{title}: {places:?}");
        entries += 1;
    }
    assert!(entries > 20, "only {entries} entries: the search is broken");
}

#[test]
fn panels_name_existing_metrics() {
    let documented = documented();
    for panel in panels() {
        let title = panel["title"].as_str().unwrap();
        let targets = panel["targets"].as_array().unwrap();
        assert!(!targets.is_empty(), "panel {title} shows nothing");
        for target in targets {
            let expression = target["expr"].as_str().unwrap();
            assert_names_metrics(title, &expression.replace("$__rate_interval", "1m"), &documented);
        }
    }
}

#[test]
fn panels_have_unit_description_and_valid_links() {
    let anchors = anchors(RUNBOOK);
    let mut titles = BTreeSet::new();
    let mut links = 0;
    for panel in panels() {
        let title = panel["title"].as_str().unwrap();
        assert!(titles.insert(title.to_owned()), "panel {title} exists twice");
        let texts = [&panel["description"], &panel["fieldConfig"]["defaults"]["unit"]];
        assert!(
            texts.iter().all(|text| text.as_str().is_some_and(|it| !it.is_empty())),
            "{title}: {texts:?}"
        );
        for link in panel["links"].as_array().unwrap() {
            let anchor = link["url"].as_str().unwrap().strip_prefix(RUNBOOK_OF_PANELS);
            let anchor = anchor.unwrap_or_else(|| panic!("{title}: {link}"));
            assert!(anchors.contains(anchor), "{title}: docs/runbook.md has no #{anchor}");
            links += 1;
        }
    }
    assert!(links > 20, "only {links} links: the search is broken");
}

/// Panels do not overlap and fit the 24 columns.
#[test]
fn panels_have_places_of_their_own() {
    let dashboard: Value = serde_json::from_str(DASHBOARD).unwrap();
    let mut taken = BTreeSet::new();
    for panel in dashboard["panels"].as_array().unwrap() {
        let [x, y, w, h] = ["x", "y", "w", "h"].map(|key| panel["gridPos"][key].as_u64().unwrap());
        assert!(x + w <= 24, "{}", panel["title"]);
        for cell in (x..x + w).flat_map(|x| (y..y + h).map(move |y| (x, y))) {
            assert!(taken.insert(cell), "panel {} overlaps another one", panel["title"]);
        }
    }
    assert!(!taken.is_empty(), "no panel: the search is broken");
}
