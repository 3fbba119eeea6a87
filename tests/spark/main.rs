//! Unmodified Spark with the published Uniffle client and worker processes, compared with vanilla
//! Spark. A scenario runs once in vanilla mode, and its digest must equal that of every successful
//! run through workers. Most tests share a few JVMs, and each has its own workers.
//!
//! `driver` uses the Java client without Spark. `speed` and `fairness` are measurements.
//!
//! By hand, against a running worker (`uniffle.Main` documents the arguments):
//! ```text
//! mvn -q -f tests/spark package
//! java @tests/spark/jvm.options \
//!     -cp 'target/tmp/spark/classes:target/tmp/spark/jars/*' uniffle.Main \
//!     modes=vanilla,uniffle quorum=127.0.0.1:21100 scenarios=sort_small,join
//! ```

#![allow(clippy::unwrap_used, clippy::panic, reason = "tests fail by panicking")]

mod clusters;
mod driver;
mod fairness;
mod hdfs;
mod kept_memory;
mod losses;
mod object;
mod one_worker;
mod restarts;
mod share;
mod speed;
mod tcp;
mod traces;

use std::collections::HashMap;
use std::sync::LazyLock;

use parking_lot::{Mutex, MutexGuard};
use serde_json::Value;
use uniffle_testkit::spark::{Jvm, JvmKind};
use uniffle_testkit::worker::WorkerProcess;

/// State shared by all tests. The lock serializes them: two cores are not enough for two.
static SPARK: LazyLock<Mutex<Spark>> = LazyLock::new(Mutex::default);

/// JVMs, started on first use, and the results of vanilla Spark.
#[derive(Debug, Default)]
struct Spark {
    jvms: HashMap<JvmKind, Jvm>,
    /// Results by Spark version and scenario.
    vanilla: HashMap<(&'static str, String), Value>,
}

/// An application to run.
#[derive(Debug, Clone, Copy)]
struct Application<'a> {
    jvm: JvmKind,
    /// Comma-separated scenarios.
    scenarios: &'a str,
    /// Further words of the command, separated by spaces.
    words: &'a str,
}

impl<'a> Application<'a> {
    fn of(scenarios: &'a str) -> Self {
        Self { jvm: JvmKind::Main, scenarios, words: "" }
    }
}

/// Waits for the shared state. Returns `None` without Java or Maven.
fn spark() -> Option<MutexGuard<'static, Spark>> {
    uniffle_testkit::maven::is_available().then(|| SPARK.lock())
}

impl Spark {
    /// Runs `application` and compares; see [`Spark::run_all`].
    fn run(&mut self, workers: &[&WorkerProcess], application: Application<'_>) -> Vec<Value> {
        self.run_all(workers, &[application]).remove(0)
    }

    /// Runs several applications concurrently, and asserts that they overlapped.
    fn run_all_at_once(&mut self, workers: &[&WorkerProcess], applications: &[Application<'_>]) {
        for application in applications {
            self.warm_up(application.jvm);
        }
        let intervals: Vec<_> = self.run_all(workers, applications).iter().map(|all| interval(all)).collect();
        let last_begin = intervals.iter().map(|(begin, _)| begin).max();
        let first_end = intervals.iter().map(|(_, end)| end).min();
        assert!(last_begin < first_end, "the applications did not overlap: {intervals:?}");
    }

    /// Runs applications concurrently through `workers`, with the settings that the first one, the
    /// coordinator, printed, and the applications' own `words`. Asserts that results equal those of
    /// vanilla Spark, and that every worker was used and is clean afterwards.
    fn run_all(&mut self, workers: &[&WorkerProcess], applications: &[Application<'_>]) -> Vec<Vec<Value>> {
        for application in applications {
            self.run_vanilla(application);
        }
        let counted = ["total_received_data", "total_unregister"];
        let before: Vec<_> = workers.iter().map(|worker| worker.metrics()).collect();
        let printed = workers[0].printed_settings();
        for Application { jvm, scenarios, words } in applications {
            self.begin(*jvm, "printed", &format!("scenarios={scenarios} {printed} {words}"));
        }
        let answers: Vec<_> = applications.iter().map(|application| self.finish(application)).collect();
        for (application, answers) in applications.iter().zip(&answers) {
            for answer in answers {
                let name = answer["scenario"].as_str().expect("every line has the scenario").to_owned();
                let vanilla = &self.vanilla[&(application.jvm.spark_version(), name)];
                assert_eq!(answer["digest"], vanilla["digest"], "{answer}");
            }
        }
        for (worker, before) in workers.iter().zip(&before) {
            worker.assert_clean();
            let after = worker.metrics();
            for name in counted {
                let (before, after) = (before.expect(name), after.expect(name));
                assert!(after > before, "{worker:?} was not used: {name} is {after}, as before");
            }
        }
        answers
    }

    /// Runs `application` and calls `meanwhile` while it runs. Asserts that results equal those of
    /// vanilla Spark, and that every remaining worker is clean afterwards.
    fn run_while(
        &mut self,
        workers: Vec<WorkerProcess>,
        application: Application<'_>,
        meanwhile: impl FnOnce(&mut [WorkerProcess]),
    ) -> (Vec<WorkerProcess>, Vec<Value>) {
        let (mut workers, answers) = self.run_unchecked(workers, application, meanwhile);
        for answer in &answers {
            let log = || self.log_tail(application.jvm);
            assert_eq!(answer["ok"], true, "{answer}\n--- end of the JVM's log\n{}", log());
            let name = answer["scenario"].as_str().expect("every line has the scenario");
            assert_eq!(answer["digest"], self.vanilla_of(application.jvm, name)["digest"], "{answer}");
        }
        for worker in &mut workers {
            if worker.is_running() {
                worker.assert_clean();
            }
        }
        (workers, answers)
    }

    /// Like [`Spark::run_while`], without checks of the results and workers.
    fn run_unchecked(
        &mut self,
        mut workers: Vec<WorkerProcess>,
        application: Application<'_>,
        meanwhile: impl FnOnce(&mut [WorkerProcess]),
    ) -> (Vec<WorkerProcess>, Vec<Value>) {
        self.run_vanilla(&application);
        self.warm_up(application.jvm);
        let Application { jvm, scenarios, words } = application;
        let printed = workers[0].printed_settings();
        self.begin(jvm, "printed", &format!("scenarios={scenarios} {printed} {words}"));
        meanwhile(&mut workers);
        let answers = self.answers(jvm);
        (workers, answers)
    }

    fn vanilla_of(&self, jvm: JvmKind, scenario: &str) -> Value {
        self.vanilla[&(jvm.spark_version(), scenario.to_owned())].clone()
    }

    fn log_tail(&self, jvm: JvmKind) -> String {
        self.jvms.get(&jvm).map(Jvm::log_tail).unwrap_or_default()
    }

    /// Computes missing results with vanilla Spark.
    fn run_vanilla(&mut self, application: &Application<'_>) {
        // JVM flags do not affect results.
        let jvm = if application.jvm == JvmKind::NoUnsafe { JvmKind::Main } else { application.jvm };
        let version = jvm.spark_version();
        let unknown: Vec<_> = application
            .scenarios
            .split(',')
            .filter(|name| !self.vanilla.contains_key(&(version, (*name).to_owned())))
            .collect();
        if unknown.is_empty() {
            return;
        }
        let scenarios = unknown.join(",");
        self.begin(jvm, "vanilla", &format!("scenarios={scenarios}"));
        for answer in self.finish(&Application { jvm, scenarios: &scenarios, words: "" }) {
            let name = answer["scenario"].as_str().expect("every line has the scenario").to_owned();
            self.vanilla.insert((version, name), answer);
        }
    }

    fn jvm(&mut self, kind: JvmKind) -> &mut Jvm {
        self.jvms.entry(kind).or_insert_with(|| Jvm::start(kind))
    }

    /// The first application of a new JVM takes ten seconds longer.
    fn warm_up(&mut self, kind: JvmKind) {
        if !self.jvms.contains_key(&kind) {
            let (jvm, scenarios, words) = (kind, "recorded_pairs", "");
            self.begin(jvm, "vanilla", &format!("scenarios={scenarios}"));
            self.finish(&Application { jvm, scenarios, words });
        }
    }

    fn begin(&mut self, kind: JvmKind, mode: &str, words: &str) {
        if let Err(lost) = self.jvm(kind).begin(mode, words) {
            self.jvms.remove(&kind);
            panic!("{lost}")
        }
    }

    /// Waits for a started application. Returns its output.
    fn answers(&mut self, kind: JvmKind) -> Vec<Value> {
        let jvm = self.jvms.get_mut(&kind).expect("the JVM was started");
        match jvm.finish() {
            Ok(answers) => answers,
            Err(lost) => {
                self.jvms.remove(&kind);
                panic!("{lost}")
            }
        }
    }

    /// Waits for a started application. Asserts that every scenario passed its own checks.
    fn finish(&mut self, application: &Application<'_>) -> Vec<Value> {
        let answers = self.answers(application.jvm);
        let bad: Vec<String> =
            answers.iter().filter(|answer| answer["ok"] != true).map(ToString::to_string).collect();
        assert!(
            bad.is_empty(),
            "{}\n--- end of the JVM's log\n{}",
            bad.join("\n"),
            self.log_tail(application.jvm)
        );
        let asked = application.scenarios.split(',').count();
        assert_eq!(answers.len(), asked, "not every scenario of {application:?} was answered");
        answers
    }
}

/// Returns the start of the first and the end of the last scenario, in ms of the system clock.
fn interval(answers: &[Value]) -> (u64, u64) {
    let time = |answer: Option<&Value>, name: &str| {
        answer
            .and_then(|answer| answer[name].as_u64())
            .unwrap_or_else(|| panic!("{name} is missing: {answer:?}"))
    };
    (time(answers.first(), "began_ms"), time(answers.last(), "ended_ms"))
}

/// Run first by `.ci/run`, so that downloads and Maven do not count as test time.
#[test]
fn applications_build() {
    if spark().is_some() {
        uniffle_testkit::spark::build(JvmKind::Main);
        uniffle_testkit::spark::build(JvmKind::Spark33);
        uniffle_testkit::hdfs::build();
    }
}
