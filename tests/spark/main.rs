//! Unmodified Spark with the published Uniffle client, through worker processes, against vanilla Spark.
//!
//! A few JVMs serve all tests of this file (they take turns), each test has workers of its own. A scenario runs in
//! vanilla mode once, and every run of it through workers must have the same digest.
//!
//! By hand, against a worker that runs (`uniffle.Main` has the other words; `spark.…=…` sets anything of Spark):
//! ```text
//! mvn -q -f tests/spark package
//! java @tests/spark/jvm.options -cp 'target/tmp/spark/classes:target/tmp/spark/jars/*' uniffle.Main \
//!     modes=vanilla,uniffle quorum=127.0.0.1:21100 scenarios=sort_small,join
//! ```

#![allow(clippy::unwrap_used, clippy::panic, reason = "to panic is how a test fails")]

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
use uniffle_testkit::spark::{Jvm, Kind};
use uniffle_testkit::worker::Worker;

/// What the tests share. Its holder has the machine: two cores are not enough for two jobs.
static SPARK: LazyLock<Mutex<Spark>> = LazyLock::new(Mutex::default);

/// The JVMs, each started by the first test that needs it, and what vanilla Spark said in them.
#[derive(Debug, Default)]
struct Spark {
    jvms: HashMap<Kind, Jvm>,
    /// By version of Spark and scenario.
    vanilla: HashMap<(&'static str, String), Value>,
}

/// One application.
#[derive(Debug, Clone, Copy)]
struct Application<'a> {
    jvm: Kind,
    /// Separated by commas.
    scenarios: &'a str,
    /// More words of the command, separated by blanks.
    words: &'a str,
}

impl<'a> Application<'a> {
    fn of(scenarios: &'a str) -> Self {
        Self { jvm: Kind::Main, scenarios, words: "" }
    }
}

/// The next turn. `None` when Java or Maven is missing.
fn spark() -> Option<MutexGuard<'static, Spark>> {
    uniffle_testkit::maven::is_available().then(|| SPARK.lock())
}

impl Spark {
    /// Runs `application` and compares; see [`Spark::run_all`].
    fn run(&mut self, workers: &[&Worker], application: Application<'_>) -> Vec<Value> {
        self.run_all(workers, &[application]).remove(0)
    }

    /// The same with applications of which each runs while the others do.
    fn run_all_at_once(&mut self, workers: &[&Worker], applications: &[Application<'_>]) {
        for application in applications {
            self.warm_up(application.jvm);
        }
        let intervals: Vec<_> = self.run_all(workers, applications).iter().map(|all| interval(all)).collect();
        let last_begin = intervals.iter().map(|(begin, _)| begin).max();
        let first_end = intervals.iter().map(|(_, end)| end).min();
        assert!(last_begin < first_end, "not at once: {intervals:?}");
    }

    /// Runs the applications through `workers`, the first of which is the coordinator, all at once, with the settings
    /// that it printed for its user and no others. All results are
    /// those of vanilla Spark, and afterwards every worker has been used and is clean.
    fn run_all(&mut self, workers: &[&Worker], applications: &[Application<'_>]) -> Vec<Vec<Value>> {
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
                let name = answer["scenario"].as_str().expect("every line has it").to_owned();
                let vanilla = &self.vanilla[&(application.jvm.spark_version(), name)];
                assert_eq!(answer["digest"], vanilla["digest"], "{answer}");
            }
        }
        for (worker, before) in workers.iter().zip(&before) {
            worker.assert_clean();
            let after = worker.metrics();
            for name in counted {
                let (before, after) = (before.expect(name), after.expect(name));
                assert!(after > before, "{name} is {after} as before: nothing was told to {worker:?}");
            }
        }
        answers
    }

    /// Runs `application` through `workers`, the first of which is the coordinator, and `meanwhile` beside it. All
    /// results are those of vanilla Spark, and afterwards every worker that lives is clean.
    fn run_while(
        &mut self,
        workers: Vec<Worker>,
        application: Application<'_>,
        meanwhile: impl FnOnce(&mut [Worker]),
    ) -> (Vec<Worker>, Vec<Value>) {
        let (mut workers, answers) = self.run_unchecked(workers, application, meanwhile);
        for answer in &answers {
            let log = || self.log_tail(application.jvm);
            assert_eq!(answer["ok"], true, "{answer}\n--- end of the JVM's log\n{}", log());
            let name = answer["scenario"].as_str().expect("every line has it");
            assert_eq!(answer["digest"], self.vanilla_of(application.jvm, name)["digest"], "{answer}");
        }
        for worker in &mut workers {
            if worker.is_running() {
                worker.assert_clean();
            }
        }
        (workers, answers)
    }

    /// The same, whatever the answers are.
    fn run_unchecked(
        &mut self,
        mut workers: Vec<Worker>,
        application: Application<'_>,
        meanwhile: impl FnOnce(&mut [Worker]),
    ) -> (Vec<Worker>, Vec<Value>) {
        self.run_vanilla(&application);
        self.warm_up(application.jvm);
        let Application { jvm, scenarios, words } = application;
        let printed = workers[0].printed_settings();
        self.begin(jvm, "printed", &format!("scenarios={scenarios} {printed} {words}"));
        meanwhile(&mut workers);
        let answers = self.answers(jvm);
        (workers, answers)
    }

    fn vanilla_of(&self, jvm: Kind, scenario: &str) -> Value {
        self.vanilla[&(jvm.spark_version(), scenario.to_owned())].clone()
    }

    fn log_tail(&self, jvm: Kind) -> String {
        self.jvms.get(&jvm).map(Jvm::log_tail).unwrap_or_default()
    }

    /// Fills in what vanilla Spark says, where that is not known yet.
    fn run_vanilla(&mut self, application: &Application<'_>) {
        // The flags of a JVM do not change results.
        let jvm = if application.jvm == Kind::NoUnsafe { Kind::Main } else { application.jvm };
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
            let name = answer["scenario"].as_str().expect("every line has it").to_owned();
            self.vanilla.insert((version, name), answer);
        }
    }

    fn jvm(&mut self, kind: Kind) -> &mut Jvm {
        self.jvms.entry(kind).or_insert_with(|| Jvm::start(kind))
    }

    /// A new JVM needs ten seconds for its first application.
    fn warm_up(&mut self, kind: Kind) {
        if !self.jvms.contains_key(&kind) {
            let (jvm, scenarios, words) = (kind, "recorded_pairs", "");
            self.begin(jvm, "vanilla", &format!("scenarios={scenarios}"));
            self.finish(&Application { jvm, scenarios, words });
        }
    }

    fn begin(&mut self, kind: Kind, mode: &str, words: &str) {
        if let Err(lost) = self.jvm(kind).begin(mode, words) {
            self.jvms.remove(&kind);
            panic!("{lost}")
        }
    }

    /// Waits for an application that was begun.
    fn answers(&mut self, kind: Kind) -> Vec<Value> {
        let jvm = self.jvms.get_mut(&kind).expect("it was begun");
        match jvm.finish() {
            Ok(answers) => answers,
            Err(lost) => {
                self.jvms.remove(&kind);
                panic!("{lost}")
            }
        }
    }

    /// Waits for an application that was begun; each of its scenarios was well in itself.
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

/// Start of the first and end of the last scenario, in ms of the machine's clock.
fn interval(answers: &[Value]) -> (u64, u64) {
    let time = |answer: Option<&Value>, name: &str| {
        answer.and_then(|answer| answer[name].as_u64()).unwrap_or_else(|| panic!("{name} in {answer:?}"))
    };
    (time(answers.first(), "began_ms"), time(answers.last(), "ended_ms"))
}

/// What `.ci/run` does first, so that downloads and Maven are no part of the time of a test.
#[test]
fn the_applications_build() {
    if spark().is_some() {
        uniffle_testkit::spark::build(Kind::Main);
        uniffle_testkit::spark::build(Kind::Spark33);
        uniffle_testkit::hdfs::build();
    }
}
