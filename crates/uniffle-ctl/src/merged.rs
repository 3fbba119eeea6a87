//! Merges the explanations of an application by several workers (`/api/v1/apps/ID/explain`) into
//! one with the same sums and lists, and with a list of the workers.
//!
//! Partitions, bytes, retries and total times are added up. Medians, 99 %, the longest time, age,
//! skew and the number of shuffles are the largest of any worker. Findings name their worker. The
//! merge works on JSON, because workers may have different versions: missing fields count as zero.
//! Invariant: lists and texts are bounded, whatever a worker sends.

use std::cmp::Reverse;
use std::fmt;

use serde_json::{Map, Value, json};

use crate::text::is_gone;

/// Maximum length of most lists, and maximum number of fields of each object.
const LISTED_MAX: usize = 100;

/// Maximum number of listed workers with an answer, and of those without.
const WORKERS_MAX: usize = 1_000;

/// Number of listed partitions, the largest first.
const TOP_PARTITIONS: usize = 10;

/// Largest length of a text, in bytes.
const TEXT_BYTES_MAX: usize = 500;

/// Prefix of the placeholder that a worker without findings sends.
const NOTHING: &str = "no findings";

/// Fields of `bytes` that are only valid while the worker has the application.
const HELD: [&str; 4] = ["in_memory", "on_local_disks", "in_object_store", "local_files"];

/// Fields of a stage that are added up.
const STAGE_SUMS: [&str; 3] = ["count", "bytes", "total_seconds"];
/// Fields of a stage of which the largest value is kept.
const STAGE_MAXIMA: [&str; 3] = ["median_seconds", "p99_seconds", "longest_seconds"];

/// No answering worker knows the application.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Unknown {
    /// Number of workers that did not answer, and may know it.
    pub unanswered: usize,
}

impl fmt::Display for Unknown {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.unanswered {
            0 => f.write_str("no worker knows this application (any more)"),
            unanswered => {
                write!(f, "no answering worker knows this application; {unanswered} did not answer")
            }
        }
    }
}

impl std::error::Error for Unknown {}

/// Explanations merged so far.
#[derive(Debug, Default)]
pub(crate) struct Merged {
    workers: Vec<Value>,
    worker_count: usize,
    unanswered: Vec<Value>,
    unanswered_count: usize,
    sums: Map<String, Value>,
    maxima: Map<String, Value>,
    /// Received bytes times the mean seconds that a byte was in memory.
    byte_seconds: f64,
    stages: Vec<Map<String, Value>>,
    findings: Vec<Value>,
    lists: Map<String, Value>,
    top_partitions: Vec<Value>,
    user: String,
    presence: String,
}

impl Merged {
    /// Returns an error if no worker has explained the application.
    pub(crate) fn unknown(&self) -> Option<Unknown> {
        (self.worker_count == 0).then_some(Unknown { unanswered: self.unanswered_count })
    }

    /// Adds a worker that did not answer.
    pub(crate) fn add_unanswered(&mut self, worker: &str, reason: &str) {
        self.unanswered_count += 1;
        if self.unanswered.len() < WORKERS_MAX {
            self.unanswered.push(json!({ "worker": worker, "reason": cut(reason) }));
        }
    }

    /// Adds a worker's explanation.
    pub(crate) fn add(&mut self, worker: &str, it: &Value) {
        let text = |field: &str| cut(it[field].as_str().unwrap_or_default());
        let is_gone = is_gone(it);
        if self.user.is_empty() {
            self.user = text("user");
        }
        if self.presence.is_empty() || it["presence"] == "known" {
            self.presence = text("presence");
        }
        let received = it["bytes"]["received"].as_f64().unwrap_or(0.0);
        self.byte_seconds += received * it["bytes"]["mean_seconds_in_memory"].as_f64().unwrap_or(0.0);
        for object in ["bytes", "retries"] {
            let sums = self.sums.entry(object).or_insert_with(|| json!({}));
            for (name, part) in it[object].as_object().into_iter().flatten() {
                let part = if is_gone && HELD.contains(&name.as_str()) { &Value::from(0) } else { part };
                let fields = sums.as_object();
                if fields.is_some_and(|sums| sums.len() < LISTED_MAX || sums.contains_key(name)) {
                    add(sums, &cut(name), part);
                }
            }
        }
        let mut sums = Value::Object(std::mem::take(&mut self.sums));
        add(&mut sums, "partitions", &it["partitions"]);
        self.sums = into_map(sums);
        for field in ["age_seconds", "shuffles", "skew"] {
            raise(&mut self.maxima, field, &it[field]);
        }
        self.add_stages(it);
        self.add_lists(worker, it);
        self.worker_count += 1;
        if self.workers.len() == WORKERS_MAX {
            return;
        }
        let held = |field: &str| if is_gone { 0.into() } else { number(&it["bytes"][field]) };
        self.workers.push(json!({
            "worker": worker,
            "presence": text("presence"),
            "age_seconds": number(&it["age_seconds"]),
            "received": number(&it["bytes"]["received"]),
            "in_memory": held("in_memory"),
            "on_local_disks": held("on_local_disks"),
            "tickets_refused_memory": number(&it["retries"]["tickets_refused_memory"]),
            "flush_write_seconds": number(&stage(it, "flush_write")["total_seconds"]),
            "disk_read_seconds": number(&stage(it, "disk_read")["total_seconds"]),
        }));
    }

    fn add_stages(&mut self, it: &Value) {
        for part in items(it, "stages") {
            let Some(name) = part["stage"].as_str().map(cut) else { continue };
            let at = self.stages.iter().position(|stage| stage["stage"] == *name).unwrap_or_else(|| {
                self.stages.push(Map::from_iter([("stage".to_owned(), name.into())]));
                self.stages.len() - 1
            });
            let Some(stage) = self.stages.get_mut(at) else { continue };
            let mut sums = Value::Object(std::mem::take(stage));
            STAGE_SUMS.iter().for_each(|field| add(&mut sums, field, &part[field]));
            *stage = into_map(sums);
            STAGE_MAXIMA.iter().for_each(|field| raise(stage, field, &part[field]));
        }
        self.stages.truncate(LISTED_MAX);
    }

    fn add_lists(&mut self, worker: &str, it: &Value) {
        let findings = items(it, "findings").filter_map(Value::as_str);
        let telling = findings.filter(|finding| !finding.starts_with(NOTHING));
        self.findings.extend(telling.map(|finding| format!("{worker}: {}", cut(finding)).into()));
        self.findings.truncate(LISTED_MAX);
        for list in ["losses", "incomplete", "quotas"] {
            let all = self.lists.entry(list).or_insert_with(|| json!([]));
            if let Some(all) = all.as_array_mut() {
                all.extend(items(it, list).map(|item| of_worker(worker, item)));
                all.truncate(LISTED_MAX);
            }
        }
        let is_gone = is_gone(it);
        self.top_partitions.extend(items(it, "top_partitions").map(|top| {
            let mut top = of_worker(worker, top);
            if is_gone {
                top["in_memory_bytes"] = 0.into();
            }
            top
        }));
        self.top_partitions.sort_by_key(|top| Reverse(top["received_bytes"].as_u64()));
        self.top_partitions.truncate(TOP_PARTITIONS);
    }

    /// Returns the merged explanation.
    pub(crate) fn explanation(mut self, app: &str) -> Value {
        let received = self.sums.get("bytes").and_then(|bytes| bytes["received"].as_f64()).unwrap_or(0.0);
        if let Some(bytes) = self.sums.get_mut("bytes") {
            bytes["mean_seconds_in_memory"] = (self.byte_seconds / received.max(1.0)).into();
        }
        if self.unanswered_count > 0 {
            let (unanswered, queried) = (self.unanswered_count, self.unanswered_count + self.worker_count);
            let text = format!("{unanswered} of {queried} workers did not answer; their part is missing");
            self.findings.insert(0, text.into());
        }
        if self.findings.is_empty() {
            self.findings.push("no findings on any worker".into());
        }
        let mut all = json!({
            "app": app,
            "user": self.user,
            "presence": self.presence,
            "worker_count": self.worker_count,
            "workers": self.workers,
            "unanswered_count": self.unanswered_count,
            "unanswered": self.unanswered,
            "findings": self.findings,
            "stages": self.stages,
            "top_partitions": self.top_partitions,
        });
        if let Some(all) = all.as_object_mut() {
            all.extend(self.sums.into_iter().chain(self.maxima).chain(self.lists));
        }
        all
    }
}

fn items<'v>(it: &'v Value, list: &str) -> impl Iterator<Item = &'v Value> {
    it[list].as_array().into_iter().flatten().take(LISTED_MAX)
}

fn stage<'v>(it: &'v Value, name: &str) -> &'v Value {
    items(it, "stages").find(|stage| stage["stage"] == name).unwrap_or(&Value::Null)
}

/// Returns `value` if it is a number, and 0 otherwise.
fn number(value: &Value) -> Value {
    if value.is_number() { value.clone() } else { 0.into() }
}

/// Adds a number to a field.
fn add(sums: &mut Value, field: &str, part: &Value) {
    let sum = match (sums[field].as_u64().or(sums[field].is_null().then_some(0)), part.as_u64()) {
        (Some(sum), Some(part)) => sum.saturating_add(part).into(),
        _ => (sums[field].as_f64().unwrap_or(0.0) + part.as_f64().unwrap_or(0.0)).into(),
    };
    sums[field] = sum;
}

/// Keeps the larger number in a field.
fn raise(maxima: &mut Map<String, Value>, field: &str, part: &Value) {
    let larger = |old: &Value| part.as_f64() > old.as_f64();
    if maxima.get(field).is_none_or(larger) {
        maxima.insert(field.to_owned(), number(part));
    }
}

fn into_map(value: Value) -> Map<String, Value> {
    match value {
        Value::Object(map) => map,
        _ => Map::new(),
    }
}

/// Copies the plain fields of an object and adds the worker.
fn of_worker(worker: &str, item: &Value) -> Value {
    let short = |value: &Value| match value {
        Value::String(text) => cut(text).into(),
        Value::Array(_) | Value::Object(_) => Value::Null,
        plain => plain.clone(),
    };
    let fields = item.as_object().into_iter().flatten().take(LISTED_MAX);
    let mut fields: Map<_, _> = fields.map(|(name, value)| (cut(name), short(value))).collect();
    fields.insert("worker".to_owned(), worker.into());
    Value::Object(fields)
}

fn cut(text: &str) -> String {
    text.get(..text.floor_char_boundary(TEXT_BYTES_MAX)).unwrap_or_default().to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn explanation(received: u64, finding: &str, partition: i64) -> Value {
        json!({
            "app": "app-1", "user": "etl", "presence": "known", "age_seconds": 7.5, "findings": [finding],
            "stages": [{ "stage": "disk_read", "count": 2, "bytes": 5, "total_seconds": 1.5,
                "median_seconds": 0.5, "p99_seconds": 1.0, "longest_seconds": received as f64 }],
            "bytes": { "received": received, "in_memory": 1, "mean_seconds_in_memory": 2.0 },
            "retries": { "tickets_granted": 3 }, "quotas": [], "shuffles": 2, "partitions": 10, "skew": 1.5,
            "top_partitions": [{ "shuffle": 0, "partition": partition, "received_bytes": received, "in_memory_bytes": 0 }],
            "losses": [{ "shuffle": 0, "partition": 1, "blocks": 4, "ranges": [[1, 4]], "reason": "gone" }],
            "incomplete": [],
        })
    }

    #[test]
    fn merge_sums_figures_and_names_workers() {
        let mut merged = Merged::default();
        merged.add("a", &explanation(100, "reads wait up to 3.0 s for disks", 1));
        merged.add("b", &explanation(300, "no findings on this worker", 2));
        let it = merged.explanation("app-1");
        assert_eq!(
            (&it["user"], &it["presence"], &it["shuffles"]),
            (&"etl".into(), &"known".into(), &2.into())
        );
        assert_eq!((&it["bytes"]["received"], &it["bytes"]["in_memory"]), (&400.into(), &2.into()));
        assert_eq!((&it["bytes"]["mean_seconds_in_memory"], &it["partitions"]), (&2.0.into(), &20.into()));
        assert_eq!(it["findings"], json!(["a: reads wait up to 3.0 s for disks"]));
        let stage = json!({ "stage": "disk_read", "count": 4, "bytes": 10, "total_seconds": 3.0,
            "median_seconds": 0.5, "p99_seconds": 1.0, "longest_seconds": 300.0 });
        assert_eq!(it["stages"], json!([stage]));
        assert_eq!(
            (&it["top_partitions"][0]["worker"], &it["top_partitions"][1]["partition"]),
            (&"b".into(), &1.into())
        );
        assert_eq!(
            (it["losses"].as_array().map(Vec::len), &it["losses"][1]["worker"]),
            (Some(2), &"b".into())
        );
        assert_eq!(it["workers"][1]["received"], 300);
    }

    #[test]
    fn held_bytes_of_ended_apps_count_as_zero() {
        let mut merged = Merged::default();
        let mut gone = explanation(100, "no findings on this worker", 1);
        (gone["presence"], gone["bytes"]["in_memory"]) = ("expired".into(), 70.into());
        gone["top_partitions"][0]["in_memory_bytes"] = 70.into();
        merged.add("a", &gone);
        merged.add("b", &explanation(300, "no findings on this worker", 2));
        let it = merged.explanation("app-1");
        assert_eq!((&it["presence"], &it["bytes"]["received"]), (&"known".into(), &400.into()));
        assert_eq!((&it["bytes"]["in_memory"], &it["workers"][0]["in_memory"]), (&1.into(), &0.into()));
        assert!(!it.to_string().contains("70"), "{it}");
    }

    #[test]
    fn silent_workers_are_named_and_bad_answers_harmless() {
        let mut merged = Merged::default();
        for it in
            [json!(null), json!([1]), json!({ "stages": 7, "bytes": { "received": "x" }, "findings": [{}] })]
        {
            merged.add("odd", &it);
        }
        merged.add_unanswered("c", "no answer within 2s");
        assert_eq!(merged.unknown(), None);
        let it = merged.explanation("x");
        assert_eq!(it["unanswered"], json!([{ "worker": "c", "reason": "no answer within 2s" }]));
        assert_eq!(it["findings"], json!(["1 of 4 workers did not answer; their part is missing"]));

        let long = "é".repeat(1000);
        let many: Vec<_> = (0..1000).map(|n| json!({ "stage": n.to_string(), "reason": long })).collect();
        let mut hostile = json!({ "findings": vec![long.clone(); 1000], "stages": many, "losses": many });
        let mut merged = Merged::default();
        for n in 0..50 {
            hostile["bytes"] = (0..100).map(|at| (format!("{n} {at} {long}"), json!(1))).collect();
            merged.add("h", &hostile);
        }
        let it = merged.explanation("x");
        for list in ["findings", "stages", "losses"] {
            assert_eq!(it[list].as_array().map(Vec::len), Some(LISTED_MAX), "{list}");
        }
        assert_eq!(
            it["bytes"].as_object().map(Map::len),
            Some(LISTED_MAX + 1),
            "expected the listed fields and the mean"
        );
        assert!(it.to_string().len() < 300 << 10, "{}", it.to_string().len());
    }

    #[test]
    fn unknown_application_has_no_explanation() {
        let mut merged = Merged::default();
        assert!(merged.unknown().is_some_and(|it| it.to_string().starts_with("no worker knows")));
        merged.add_unanswered("a", "");
        assert!(merged.unknown().is_some_and(|it| it.to_string().ends_with("1 did not answer")));
    }

    #[test]
    fn merge_without_findings_states_so() {
        let mut merged = Merged::default();
        merged.add("a", &explanation(1, "no findings on this worker", 1));
        assert_eq!(merged.explanation("x")["findings"], json!(["no findings on any worker"]));
    }
}
