//! Lists as CSV (RFC 4180), for programs.
//!
//! Invariant: column names are stable. Most are names of fields in the JSON answer, with the names
//! of enclosing objects that are needed to tell them apart. docs/ctl.md lists them.

use csv::{Terminator, WriterBuilder};
use serde_json::{Value, json};

use crate::answers::{WorkerAnswer, state};
use crate::arguments::CtlCommand;
use crate::workers::WorkerTarget;

/// Source of a cell in an item of a list.
#[derive(Debug, Clone, Copy)]
enum CellSource {
    /// Value at this JSON pointer.
    At(&'static str),
    /// Sum of this field over the disks.
    OfDisks(&'static str),
    /// Number of disks.
    Disks,
    /// Number of disks that are not healthy.
    DisksOut,
}

use CellSource::{At, Disks, DisksOut, OfDisks};

/// Column name and source.
type Column = (&'static str, CellSource);

/// The list of a command.
struct List {
    columns: &'static [Column],
    /// JSON pointers to the arrays of items, with the state of items that are only ids. Without
    /// pointers, the whole answer is the only item.
    items: &'static [(&'static str, &'static str)],
}

const STATUS: &[Column] = &[
    ("state", At("/node/state")),
    ("not_ready", At("/node/not_ready")),
    ("version", At("/node/version")),
    ("commit", At("/node/commit")),
    ("started_ms", At("/node/started_ms")),
    ("uptime_seconds", At("/node/uptime_seconds")),
    ("memory_capacity_bytes", At("/memory/capacity_bytes")),
    ("memory_used_bytes", At("/memory/used_bytes")),
    ("memory_reserved_bytes", At("/memory/reserved_bytes")),
    ("memory_in_flight_bytes", At("/memory/in_flight_bytes")),
    ("disks", Disks),
    ("disks_not_healthy", DisksOut),
    ("disks_used_bytes", OfDisks("used_bytes")),
    ("disks_free_bytes", OfDisks("free_bytes")),
    ("flush_queued_batches", At("/flush/queued_batches")),
    ("flush_unfinished_batches", At("/flush/unfinished_batches")),
    ("flush_failed_writes", At("/flush/failed_writes")),
    ("apps", At("/apps/count")),
    ("partitions", At("/apps/partitions")),
    ("lost_blocks", At("/apps/lost_blocks")),
    ("received_bytes", At("/totals/received_bytes")),
    ("read_bytes", At("/totals/read_bytes")),
    ("flushed_bytes", At("/totals/flushed_bytes")),
    ("resident_bytes", At("/process/resident_bytes")),
    ("received_bytes_per_second", At("/received_bytes_per_second")),
    ("read_bytes_per_second", At("/read_bytes_per_second")),
    ("error", At("/error")),
];

const APPS: &[Column] = &[
    ("app", At("/app")),
    ("user", At("/user")),
    ("age_seconds", At("/age_seconds")),
    ("idle_seconds", At("/idle_seconds")),
    ("shuffles", At("/shuffles")),
    ("partitions", At("/partitions")),
    ("huge_partitions", At("/huge_partitions")),
    ("received_bytes", At("/received_bytes")),
    ("in_memory_bytes", At("/in_memory_bytes")),
    ("local_bytes", At("/local_bytes")),
    ("object_bytes", At("/object_bytes")),
    ("remote_bytes", At("/remote_bytes")),
    ("largest_partition_bytes", At("/largest_partition_bytes")),
    ("skew", At("/skew")),
    ("lost_blocks", At("/lost_blocks")),
];

const PARTITIONS: &[Column] = &[
    ("shuffle", At("/shuffle")),
    ("partition", At("/partition")),
    ("received_bytes", At("/received_bytes")),
    ("in_memory_bytes", At("/in_memory_bytes")),
];

const DISKS: &[Column] = &[
    ("path", At("/path")),
    ("mount", At("/mount")),
    ("media", At("/media")),
    ("condition", At("/condition")),
    ("fault", At("/fault")),
    ("failures", At("/failures")),
    ("total_bytes", At("/total_bytes")),
    ("free_bytes", At("/free_bytes")),
    ("used_bytes", At("/used_bytes")),
    ("in_flight_bytes", At("/in_flight_bytes")),
];

const LOSSES: &[Column] = &[
    ("app", At("/app")),
    ("shuffle", At("/shuffle")),
    ("partition", At("/partition")),
    ("blocks", At("/blocks")),
    ("reason", At("/reason")),
];

const CLUSTER: &[Column] = &[
    ("id", At("/id")),
    ("ip", At("/ip")),
    ("grpc_port", At("/grpc_port")),
    ("http_port", At("/http_port")),
    ("state", At("/state")),
    ("version", At("/version")),
    ("silent_seconds", At("/silent_seconds")),
    ("used_bytes", At("/used_bytes")),
    ("reserved_bytes", At("/reserved_bytes")),
    ("available_bytes", At("/available_bytes")),
    ("received_bytes", At("/received_bytes")),
    ("unfinished_batches", At("/unfinished_batches")),
    ("apps", At("/apps")),
    ("disks_used_bytes", At("/disks_used_bytes")),
];

const ORPHANS: &[Column] = &[
    ("state", At("/state")),
    ("objects", At("/objects")),
    ("bytes", At("/bytes")),
    ("shuffles", At("/shuffles")),
    ("newest_age_seconds", At("/newest_age_seconds")),
];

const UPGRADE: &[Column] = &[
    ("state", At("/state")),
    ("from", At("/from")),
    ("to", At("/to")),
    ("seconds", At("/seconds")),
    ("error", At("/error")),
];

/// Returns the list that a command prints, or `None` if it prints none.
fn list(call: &CtlCommand) -> Option<List> {
    let (columns, items): (_, &[_]) = match call {
        CtlCommand::Status { .. } | CtlCommand::Top { .. } => (STATUS, &[]),
        CtlCommand::Apps { .. } => (APPS, &[("/apps", "")]),
        CtlCommand::App { .. } => (PARTITIONS, &[("/top_partitions", "")]),
        CtlCommand::Disks => (DISKS, &[("", "")]),
        CtlCommand::Losses => (LOSSES, &[("/losses", "")]),
        CtlCommand::Cluster => (CLUSTER, &[("/nodes", ""), ("/lost", "lost")]),
        CtlCommand::Orphans { .. } => (ORPHANS, &[("/workers", ""), ("/removed", "")]),
        CtlCommand::Upgrade { .. } => (UPGRADE, &[("", "")]),
        CtlCommand::Decommission { .. }
        | CtlCommand::Drain { .. }
        | CtlCommand::Tags { .. }
        | CtlCommand::Purge { .. }
        | CtlCommand::Forget { .. }
        | CtlCommand::Reload
        | CtlCommand::Profile { .. } => return None,
    };
    Some(List { columns, items })
}

/// Returns true if the command prints a list.
pub(crate) fn is_list(call: &CtlCommand) -> bool {
    list(call).is_some()
}

/// Formats the answers of workers as CSV. A worker without an answer has a row only if every worker
/// has one row.
pub(crate) fn csv(call: &CtlCommand, answers: &[(&WorkerTarget, WorkerAnswer)]) -> String {
    let Some(List { columns, items }) = list(call) else { return String::new() };
    let mut rows = Vec::new();
    for (target, answer) in answers {
        match answer {
            Ok(answer) if items.is_empty() => {
                // `top` adds rates to the status.
                let mut status = answer.get("status").unwrap_or(answer).clone();
                for rate in ["received_bytes_per_second", "read_bytes_per_second"] {
                    if let Some(value) = answer.get(rate) {
                        status[rate] = value.clone();
                    }
                }
                rows.push(row(columns, &target.name, &status));
            }
            Ok(answer) => {
                for (pointer, state) in items {
                    let list = answer.pointer(pointer).and_then(Value::as_array);
                    rows.extend(list.into_iter().flatten().map(|item| match item {
                        Value::String(id) => row(columns, &target.name, &json!({ "id": id, "state": state })),
                        item => row(columns, &target.name, item),
                    }));
                }
            }
            Err(failure) if items.is_empty() => {
                let item =
                    json!({ "node": { "state": state(target, failure) }, "error": failure.to_string() });
                rows.push(row(columns, &target.name, &item));
            }
            Err(_) => {}
        }
    }
    write(columns, &rows)
}

/// Formats the one answer of a command that merges or replaces the answers of workers, such as
/// `upgrade`.
pub(crate) fn csv_of(call: &CtlCommand, answer: &Value) -> String {
    let Some(List { columns, items }) = list(call) else { return String::new() };
    let lists = items.iter().filter_map(|(pointer, _)| answer.pointer(pointer)?.as_array());
    let rows: Vec<_> = lists.flatten().map(|item| row(columns, "", item)).collect();
    write(columns, &rows)
}

/// Returns the cells of an item. The first is the item's own worker, or else the queried one.
fn row(columns: &[Column], worker: &str, item: &Value) -> Vec<String> {
    let disks = || item["disks"].as_array().map(|disks| disks.iter());
    let count = |disks: usize| disks.to_string();
    let cell = |source: CellSource| match source {
        At(pointer) => item.pointer(pointer).map(text).unwrap_or_default(),
        OfDisks(field) => disks().map_or_else(String::new, |disks| {
            disks.filter_map(|disk| disk[field].as_u64()).sum::<u64>().to_string()
        }),
        Disks => disks().map(Iterator::count).map(count).unwrap_or_default(),
        DisksOut => disks()
            .map(|disks| count(disks.filter(|disk| disk["condition"] != "healthy").count()))
            .unwrap_or_default(),
    };
    let worker = item["worker"].as_str().unwrap_or(worker).to_owned();
    std::iter::once(worker).chain(columns.iter().map(|(_, source)| cell(*source))).collect()
}

fn text(value: &Value) -> String {
    match value {
        Value::Null => String::new(),
        Value::String(text) => text.clone(),
        other => other.to_string(),
    }
}

fn write(columns: &[Column], rows: &[Vec<String>]) -> String {
    let mut writer = WriterBuilder::new().terminator(Terminator::CRLF).from_writer(Vec::new());
    let header = std::iter::once("worker").chain(columns.iter().map(|(name, _)| *name));
    // Writing to memory does not fail, and all records have the same length.
    let mut written = writer.write_record(header);
    for row in rows {
        written = written.and_then(|()| writer.write_record(row));
    }
    let bytes = writer.into_inner().unwrap_or_default();
    String::from_utf8(bytes).unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::arguments::Arguments;
    use crate::http::{CommandFailure, ListenerAddress};

    const DOCUMENT: &str = include_str!("../../../docs/ctl.md");

    #[derive(clap::Parser)]
    struct Line {
        #[command(flatten)]
        arguments: Arguments,
    }

    fn call(line: &str) -> CtlCommand {
        let line = std::iter::once("ctl").chain(line.split(' '));
        let parsed = <Line as clap::Parser>::try_parse_from(line);
        parsed.unwrap_or_else(|error| panic!("{error}")).arguments.call
    }

    fn target(name: &str, is_lost: bool) -> WorkerTarget {
        let base = ListenerAddress { is_tls: false, host: name.to_owned(), port: 1 };
        WorkerTarget { name: name.to_owned(), http: base.clone(), admin: base, is_lost }
    }

    /// Programs read these names: a change breaks them.
    #[test]
    fn column_names_are_stable() {
        let status = "worker,state,not_ready,version,commit,started_ms,uptime_seconds,memory_capacity_bytes,\
             memory_used_bytes,memory_reserved_bytes,memory_in_flight_bytes,disks,disks_not_healthy,\
             disks_used_bytes,disks_free_bytes,flush_queued_batches,flush_unfinished_batches,\
             flush_failed_writes,apps,partitions,lost_blocks,received_bytes,read_bytes,flushed_bytes,\
             resident_bytes,received_bytes_per_second,read_bytes_per_second,error\r\n";
        let apps = "worker,app,user,age_seconds,idle_seconds,shuffles,partitions,huge_partitions,received_bytes,\
             in_memory_bytes,local_bytes,object_bytes,remote_bytes,largest_partition_bytes,skew,lost_blocks\r\n";
        let cluster = "worker,id,ip,grpc_port,http_port,state,version,silent_seconds,used_bytes,reserved_bytes,\
             available_bytes,received_bytes,unfinished_batches,apps,disks_used_bytes\r\n";
        for (line, names) in [
            ("status", status),
            ("top", status),
            ("apps", apps),
            ("cluster", cluster),
            ("app x", "worker,shuffle,partition,received_bytes,in_memory_bytes\r\n"),
            (
                "disks",
                "worker,path,mount,media,condition,fault,failures,total_bytes,free_bytes,used_bytes,in_flight_bytes\r\n",
            ),
            ("losses", "worker,app,shuffle,partition,blocks,reason\r\n"),
            ("orphans", "worker,state,objects,bytes,shuffles,newest_age_seconds\r\n"),
            ("upgrade", "worker,state,from,to,seconds,error\r\n"),
        ] {
            assert_eq!(csv(&call(line), &[]), names, "{line}");
            let listed = |name: &&str| {
                DOCUMENT.contains(&format!("`{name},")) || DOCUMENT.contains(&format!(",{name}"))
            };
            let missing: Vec<_> = names.trim_end().split(',').skip(1).filter(|name| !listed(name)).collect();
            assert!(missing.is_empty(), "docs/ctl.md does not list {missing:?} of {line}");
        }
        for line in ["drain", "decommission", "tags", "purge x", "forget x", "reload", "profile cpu -f x"] {
            assert!(!is_list(&call(line)), "{line}");
        }
    }

    #[test]
    fn cells_with_separators_are_quoted() {
        let target = target("w-1", false);
        let losses = json!({ "losses": [{ "app": "a,\"b\"", "shuffle": 1, "partition": 2, "blocks": 3, "reason": "x\ny" }] });
        let text = csv(&call("losses"), &[(&target, Ok(losses))]);
        assert_eq!(
            text.split_once("\r\n").map(|(_, rows)| rows),
            Some("w-1,\"a,\"\"b\"\"\",1,2,3,\"x\ny\"\r\n")
        );
    }

    #[test]
    fn lost_and_silent_workers_have_a_status_row() {
        let targets = [target("w-1", false), target("w-2", true), target("w-3", false)];
        let disk = |condition: &str| json!({ "condition": condition, "used_bytes": 5, "free_bytes": 7 });
        let status = json!({ "node": { "state": "active" }, "disks": [disk("healthy"), disk("full")] });
        let failed = || Err(CommandFailure::Unreachable("refused".to_owned()));
        let answers: Vec<_> = targets.iter().zip([Ok(status), failed(), failed()]).collect();
        let text = csv(&call("status"), &answers);
        let rows: Vec<Vec<_>> = text.lines().map(|line| line.split(',').collect()).collect();
        let column = |name: &str| rows[0].iter().position(|column| *column == name).unwrap();
        let cells = |name: &str| rows[1..].iter().map(|row| row[column(name)]).collect::<Vec<_>>();
        assert_eq!(cells("worker"), ["w-1", "w-2", "w-3"]);
        assert_eq!(cells("state"), ["active", "lost", "no answer"]);
        assert_eq!(cells("error"), ["", "refused", "refused"]);
        let disks = ["disks", "disks_not_healthy", "disks_used_bytes", "disks_free_bytes"].map(cells);
        assert_eq!(disks.map(|cells| cells.join("|")), ["2||", "1||", "10||", "14||"]);
        let cluster = json!({ "nodes": [{ "id": "w-1", "state": "active" }], "lost": ["w-2"] });
        let text = csv(&call("cluster"), &[(&targets[0], Ok(cluster))]);
        assert!(text.contains("w-1,w-2,,,,lost,") && text.contains("w-1,w-1,,,,active,"), "{text}");
    }
}
