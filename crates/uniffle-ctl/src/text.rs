//! Text output: lines and tables for the JSON answers. Missing values are shown as "-" or 0, and
//! missing lists as empty.

use bytesize::ByteSize;
use serde_json::Value;

use crate::answers::{WorkerAnswer, pretty};
use crate::arguments::CtlCommand;
use crate::lists;
use crate::table::{TextTable, Width, word};
use crate::workers::WorkerTarget;

/// Formats the answer of one worker.
pub(crate) fn answer(call: &CtlCommand, answer: &Value) -> String {
    match call {
        CtlCommand::Status { .. } => status(answer, Width::of_stdout()),
        CtlCommand::Apps { .. } => lists::apps(std::iter::once(answer), usize::MAX, Width::of_stdout()),
        CtlCommand::App { .. } => explanation(answer),
        CtlCommand::Disks => disks(&[("", answer)]),
        CtlCommand::Losses => losses(answer),
        CtlCommand::Cluster => cluster(answer),
        CtlCommand::Tags { .. } => list(&answer["tags"], "\n"),
        CtlCommand::Orphans { .. } => orphans(answer),
        CtlCommand::Decommission { .. }
        | CtlCommand::Drain { .. }
        | CtlCommand::Purge { .. }
        | CtlCommand::Forget { .. }
        | CtlCommand::Reload
        | CtlCommand::Upgrade { .. }
        | CtlCommand::Profile { .. }
        | CtlCommand::Top { .. } => fields(answer),
    }
}

/// Formats the answers of a coordinator's workers. Reasons of failures are printed separately.
pub(crate) fn answers(call: &CtlCommand, answers: &[(&WorkerTarget, WorkerAnswer)]) -> String {
    let answered: Vec<(&str, &Value)> = answers
        .iter()
        .filter_map(|(target, answer)| Some((target.name.as_str(), answer.as_ref().ok()?)))
        .collect();
    match call {
        CtlCommand::Status { .. } => lists::workers(answers, |status| status, None, Width::of_stdout()),
        CtlCommand::Apps { limit } => {
            lists::apps(answered.iter().map(|(_, answer)| *answer), *limit, Width::of_stdout())
        }
        CtlCommand::Disks => disks(&answered),
        _ => {
            let one = |(name, value): &(&str, &Value)| format!("== {name}\n{}\n", answer(call, value));
            answered.iter().map(one).collect()
        }
    }
}

fn table(header: &[&'static str], rows: Vec<Vec<String>>) -> String {
    TextTable::new(header, rows).text()
}

/// Formats how many objects each worker has in the object store, or how many were removed.
fn orphans(answer: &Value) -> String {
    let rows_of = |field: &str| answer[field].as_array().cloned().unwrap_or_default();
    if answer["removed"].is_array() {
        let row =
            |worker: &Value| vec![word(&worker["worker"]), word(&worker["objects"]), size(&worker["bytes"])];
        let rows: Vec<_> = rows_of("removed").iter().map(row).collect();
        return match rows.is_empty() {
            true => "nothing was removed\n".to_owned(),
            false => table(&["removed", "objects", "bytes"], rows),
        };
    }
    let row = |worker: &Value| {
        let sizes = [word(&worker["objects"]), size(&worker["bytes"]), word(&worker["shuffles"])];
        let age = format!("{} s", word(&worker["newest_age_seconds"]));
        let names = [word(&worker["worker"]), word(&worker["state"])];
        names.into_iter().chain(sizes).chain([age]).collect()
    };
    let rows: Vec<_> = rows_of("workers").iter().map(row).collect();
    table(&["worker", "state", "objects", "bytes", "shuffles", "newest"], rows)
}

fn disks(answered: &[(&str, &Value)]) -> String {
    let rows: Vec<_> = answered
        .iter()
        .flat_map(|(name, answer)| answer.as_array().into_iter().flatten().map(move |disk| (*name, disk)))
        .map(|(name, disk)| {
            let fault = disk["fault"].as_str().unwrap_or_default();
            let condition = word(&disk["condition"]);
            let sizes = ["used_bytes", "in_flight_bytes", "free_bytes", "total_bytes"];
            let first = [name.to_owned(), word(&disk["path"]), word(&disk["media"]), condition];
            let last = [word(&disk["failures"]), fault.to_owned()];
            first.into_iter().chain(sizes.map(|field| size(&disk[field]))).chain(last).collect::<Vec<_>>()
        })
        .collect();
    let header =
        ["worker", "path", "media", "condition", "used", "in flight", "free", "total", "failures", "fault"];
    let from = usize::from(answered.iter().all(|(name, _)| name.is_empty()));
    table(&header[from..], rows.into_iter().map(|row| row[from..].to_vec()).collect())
}

fn status(status: &Value, width: Width) -> String {
    let (node, memory, flush) = (&status["node"], &status["memory"], &status["flush"]);
    let ready = node["not_ready"].as_str().map_or("ready".to_owned(), |why| format!("not ready: {why}"));
    let items = |list: &'static str| status[list].as_array().into_iter().flatten();
    let disks = items("disks").count();
    let out: Vec<String> = items("disks")
        .filter(|disk| disk["condition"] != "healthy")
        .map(|disk| format!("{} {}", word(&disk["path"]), word(&disk["condition"])))
        .collect();
    let coordinators: Vec<String> =
        items("coordinators").map(|it| format!("{} {}", word(&it["address"]), word(&it["link"]))).collect();
    let lines = [
        ("worker", format!("{} {} ({})", word(&node["id"]), word(&node["version"]), word(&node["commit"]))),
        ("state", format!("{}, {ready}", word(&node["state"]))),
        ("tags", list(&node["tags"], ", ")),
        ("up", format!("{:.0} s", node["uptime_seconds"].as_f64().unwrap_or(0.0))),
        (
            "memory",
            format!(
                "{} of {}, {} reserved, {} being written",
                size(&memory["used_bytes"]),
                size(&memory["capacity_bytes"]),
                size(&memory["reserved_bytes"]),
                size(&memory["in_flight_bytes"])
            ),
        ),
        (
            "disks",
            match (disks, out.is_empty()) {
                (0, _) => "none".to_owned(),
                (_, true) => format!("{disks}, all healthy"),
                (_, false) => format!("{disks}, {}", out.join(", ")),
            },
        ),
        (
            "flush",
            format!(
                "{} batches queued, {} unfinished, {} writes failed",
                word(&flush["queued_batches"]),
                word(&flush["unfinished_batches"]),
                word(&flush["failed_writes"])
            ),
        ),
        (
            "applications",
            format!(
                "{}, {} partitions, {} blocks lost",
                word(&status["apps"]["count"]),
                word(&status["apps"]["partitions"]),
                word(&status["apps"]["lost_blocks"])
            ),
        ),
        ("coordinators", coordinators.join(", ")),
        (
            "process",
            format!(
                "{} resident, {} threads, {} descriptors, {} panics",
                size(&status["process"]["resident_bytes"]),
                word(&status["process"]["threads"]),
                word(&status["process"]["open_files"]),
                word(&status["process"]["panics"])
            ),
        ),
    ];
    let line = |(name, text): &(&str, String)| width.wrap(&format!("{name:<13}{text}"), 13) + "\n";
    lines.iter().map(line).collect()
}

fn explanation(it: &Value) -> String {
    let bytes = &it["bytes"];
    let mut text = format!(
        "{} of {}, {}, {:.0} s old, {} shuffles, {} partitions, skew {:.1}\n",
        word(&it["app"]),
        word(&it["user"]),
        word(&it["presence"]),
        it["age_seconds"].as_f64().unwrap_or(0.0),
        word(&it["shuffles"]),
        word(&it["partitions"]),
        it["skew"].as_f64().unwrap_or(0.0)
    );
    let peak = size(&bytes["in_memory_peak"]);
    let here = match is_gone(it) {
        true => format!("no data left here (peak in memory {peak})"),
        false => {
            let [memory, disks] = ["in_memory", "on_local_disks"].map(|field| size(&bytes[field]));
            let store = match bytes["in_object_store"].as_u64() {
                None | Some(0) => String::new(),
                Some(_) => format!(", in the object store {}", size(&bytes["in_object_store"])),
            };
            format!("in memory {memory} (at most {peak}), on disks {disks}{store}")
        }
    };
    text.push_str(&format!(
        "received {}, {here}, read {} from memory and {} from disks\n",
        size(&bytes["received"]),
        size(&bytes["read_from_memory"]),
        size(&bytes["read_from_disks"])
    ));
    for finding in it["findings"].as_array().into_iter().flatten() {
        text.push_str(&format!("* {}\n", word(finding)));
    }
    let time = |value: &Value| format!("{:.3} s", value.as_f64().unwrap_or(0.0));
    let stages: Vec<_> = it["stages"]
        .as_array()
        .into_iter()
        .flatten()
        .map(|stage| {
            let times = ["total_seconds", "median_seconds", "p99_seconds", "longest_seconds"]
                .map(|field| time(&stage[field]));
            [word(&stage["stage"]), word(&stage["count"]), size(&stage["bytes"])]
                .into_iter()
                .chain(times)
                .collect()
        })
        .collect();
    text.push('\n');
    text.push_str(&table(&["stage", "count", "bytes", "total", "median", "99 %", "longest"], stages));
    // The worker is only shown in a merged explanation.
    let from = usize::from(!it["workers"].is_array());
    let top: Vec<_> = it["top_partitions"]
        .as_array()
        .into_iter()
        .flatten()
        .map(|top| {
            let names = ["worker", "shuffle", "partition"].map(|field| word(&top[field]));
            let sizes = [size(&top["received_bytes"]), held(it, &top["in_memory_bytes"])];
            names.into_iter().chain(sizes).skip(from).collect()
        })
        .collect();
    if !top.is_empty() {
        text.push('\n');
        text.push_str(&table(&["worker", "shuffle", "partition", "received", "memory"][from..], top));
    }
    if it["losses"].as_array().is_some_and(|losses| !losses.is_empty()) {
        text.push('\n');
        text.push_str(&losses(it));
    }
    text.push_str(&by_worker(it));
    text
}

/// Returns true if the worker no longer has the application and its data. The figures are from the
/// moment before its removal.
pub(crate) fn is_gone(it: &Value) -> bool {
    it["presence"].as_str().is_some_and(|presence| presence != "known")
}

/// Formats a size of data that is gone if the application is.
fn held(it: &Value, bytes: &Value) -> String {
    if is_gone(it) { "gone".to_owned() } else { size(bytes) }
}

/// Formats the share of each worker in an application, and the workers that did not answer.
fn by_worker(it: &Value) -> String {
    let rows = |list: &Value, row: &dyn Fn(&Value) -> Vec<String>| -> Vec<_> {
        list.as_array().into_iter().flatten().map(row).collect()
    };
    let table_rows = rows(&it["workers"], &|worker| {
        let [memory, disks] = ["in_memory", "on_local_disks"].map(|field| held(worker, &worker[field]));
        let sizes = [size(&worker["received"]), memory, disks];
        let times = ["flush_write_seconds", "disk_read_seconds"]
            .map(|field| format!("{:.1} s", worker[field].as_f64().unwrap_or(0.0)));
        let first = [word(&worker["worker"]), word(&worker["presence"])];
        let refused = [word(&worker["tickets_refused_memory"])];
        first.into_iter().chain(sizes).chain(refused).chain(times).collect()
    });
    let mut text = String::new();
    if !table_rows.is_empty() {
        let header = ["worker", "presence", "received", "memory", "disks", "refused", "flushing", "reading"];
        text.push('\n');
        text.push_str(&table(&header, table_rows));
    }
    for silent in it["unanswered"].as_array().into_iter().flatten() {
        text.push_str(&format!("no answer: {}: {}\n", word(&silent["worker"]), word(&silent["reason"])));
    }
    text
}

fn losses(it: &Value) -> String {
    let rows: Vec<_> = it["losses"]
        .as_array()
        .into_iter()
        .flatten()
        .map(|loss| {
            ["app", "shuffle", "partition", "blocks", "reason"].map(|field| word(&loss[field])).to_vec()
        })
        .collect();
    let mut text = match rows.is_empty() {
        true => "no block is lost\n".to_owned(),
        false => table(&["application", "shuffle", "partition", "blocks", "reason"], rows),
    };
    if let Some(blocks) = it["unlisted_blocks"].as_u64().filter(|blocks| *blocks > 0) {
        text.push_str(&format!("and {blocks} blocks that are not listed\n"));
    }
    for shuffle in it["incomplete"].as_array().into_iter().flatten() {
        let [app, number, reason] = ["app", "shuffle", "reason"].map(|field| word(&shuffle[field]));
        text.push_str(&format!("incomplete: {app} shuffle {number}: {reason}\n"));
    }
    text
}

fn cluster(it: &Value) -> String {
    let rows = |list: &Value, row: &dyn Fn(&Value) -> Vec<String>| -> Vec<_> {
        list.as_array().into_iter().flatten().map(row).collect()
    };
    let nodes = rows(&it["nodes"], &|node| {
        let disks = || node["disks"].as_array().into_iter().flatten();
        // A coordinator reports conditions as StorageStatus: normal, unhealthy, overused, unknown.
        let out = disks().filter(|disk| disk["condition"] != "normal").count();
        vec![
            word(&node["id"]),
            word(&node["state"]),
            size(&node["used_bytes"]),
            size(&node["available_bytes"]),
            size(&node["disks_used_bytes"]),
            out.to_string(),
            word(&node["apps"]),
            format!("{:.0} s", node["silent_seconds"].as_f64().unwrap_or(0.0)),
        ]
    });
    let mut text = table(&["node", "state", "memory", "free", "disks used", "out", "apps", "silent"], nodes);
    let lost = list(&it["lost"], ", ");
    if !lost.is_empty() {
        text.push_str(&format!("lost: {lost}\n"));
    }
    let apps = rows(&it["apps"], &|app| {
        let nodes = app["nodes"].as_array().map_or(0, Vec::len).to_string();
        let sizes =
            ["total_bytes", "in_memory_bytes", "local_bytes", "remote_bytes"].map(|field| size(&app[field]));
        [word(&app["app"]), nodes].into_iter().chain(sizes).collect()
    });
    if !apps.is_empty() {
        text.push('\n');
        text.push_str(&table(&["application", "nodes", "received", "memory", "disks", "remote"], apps));
    }
    text
}

/// Formats a short answer, one line per field.
fn fields(answer: &Value) -> String {
    let Some(fields) = answer.as_object() else { return pretty(answer) };
    let field_text = |value: &Value| match value {
        Value::Array(_) => list(value, ", "),
        Value::Number(number) if number.is_f64() => format!("{:.1}", value.as_f64().unwrap_or(0.0)),
        other => word(other),
    };
    fields.iter().map(|(name, value)| format!("{name}: {}\n", field_text(value))).collect()
}

fn list(values: &Value, between: &str) -> String {
    values.as_array().into_iter().flatten().map(word).collect::<Vec<_>>().join(between)
}

fn size(value: &Value) -> String {
    value.as_u64().map_or("-".to_owned(), iec)
}

fn iec(bytes: u64) -> String {
    ByteSize(bytes).display().iec().to_string()
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn ended_application_is_shown_as_ended() {
        let mib = |n: u64| n << 20;
        let of = |presence: &str| {
            json!({ "app": "app-1", "user": "etl", "presence": presence,
                "bytes": { "received": mib(9), "in_memory": mib(3), "in_memory_peak": mib(7), "on_local_disks": mib(5) },
                "top_partitions": [{ "shuffle": 0, "partition": 1, "received_bytes": mib(9), "in_memory_bytes": mib(3) }] })
        };
        let known = explanation(&of("known"));
        assert!(known.contains("in memory 3.0 MiB (at most 7.0 MiB), on disks 5.0 MiB"), "{known}");
        for presence in ["expired", "unregistered"] {
            let gone = explanation(&of(presence));
            assert!(gone.contains("no data left here (peak in memory 7.0 MiB)"), "{gone}");
            assert!(!gone.contains("3.0 MiB") && !gone.contains("5.0 MiB"), "{gone}");
            assert!(gone.lines().any(|line| line.ends_with("gone") && line.contains("9.0 MiB")), "{gone}");
        }
        let worker = |presence: &str| json!({ "worker": presence, "presence": presence, "received": mib(9), "in_memory": mib(3) });
        let several =
            explanation(&json!({ "presence": "known", "workers": [worker("known"), worker("expired")] }));
        let line = |name: &str| several.lines().find(|line| line.starts_with(name)).unwrap_or_default();
        assert!(line("known").contains("3.0 MiB") && line("expired").contains("gone"), "{several}");
    }

    /// Regression test: a worker without disks was shown as "0, all healthy".
    #[test]
    fn worker_without_disks_is_shown_without() {
        let text = status(&json!({ "disks": [] }), Width { columns: 80, is_strict: false });
        assert!(text.lines().any(|line| line.split_whitespace().eq(["disks", "none"])), "{text}");
    }

    #[test]
    fn status_of_one_worker_fits_80_columns() {
        let disk = |path: &str| json!({ "path": path, "condition": "read_only" });
        let coordinator =
            |at: u8| json!({ "address": format!("coordinator-{at}.example:21000"), "link": "up" });
        let long = json!({
            "node": { "state": "active", "not_ready": "too few disks accept data: 0 of 3, localfile_store.healthy_check_min_disks is 1" },
            "disks": [disk("/data1/uniffle"), disk("/data2/uniffle"), disk("/data3/uniffle")],
            "coordinators": [coordinator(1), coordinator(2), coordinator(3)],
        });
        let text = status(&long, Width { columns: 80, is_strict: true });
        assert!(text.lines().all(|line| line.chars().count() <= 80), "{text}");
        let words = |text: &str| text.split_whitespace().collect::<Vec<_>>().join(" ");
        assert!(words(&text).contains("/data2/uniffle read_only, /data3/uniffle read_only"), "{text}");
        let piped = status(&long, Width { columns: 80, is_strict: false });
        assert!(piped.lines().any(|line| line.contains("coordinator-3.example:21000 up")), "{piped}");
        assert_eq!(words(&piped), words(&text));
    }

    #[test]
    fn disks_used_of_a_node_is_its_own_data() {
        let disk = json!({ "condition": "normal", "capacity_bytes": 9_u64 << 40, "used_bytes": 8_u64 << 40 });
        let node = |used: Value| json!({ "id": "w-1", "disks": [disk], "disks_used_bytes": used });
        let row = |used| cluster(&json!({ "nodes": [node(used)] }));
        assert!(row(json!(3 << 20)).contains("3.0 MiB"), "{}", row(json!(3 << 20)));
        assert!(
            !row(Value::Null).contains("TiB"),
            "a server without this figure must not show one: {}",
            row(Value::Null)
        );
    }

    #[test]
    fn control_characters_and_missing_values_are_not_shown() {
        assert_eq!(word(&json!("a\u{1b}[2Jb\n")), "a\u{fffd}[2Jb\u{fffd}");
        assert!(status(&json!({}), Width { columns: 80, is_strict: true }).contains("memory       - of -"));
        assert!(explanation(&json!({ "app": "x" })).starts_with("x of -"));
        assert_eq!(losses(&json!({ "losses": [] })), "no block is lost\n");
        assert!(!orphans(&json!({ "workers": [{ "worker": "w-1" }] })).contains("null"));
        assert_eq!(fields(&json!({ "changed": ["a", "b"] })), "changed: a, b\n");
    }
}
