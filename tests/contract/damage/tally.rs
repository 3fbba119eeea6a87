//! Results of the corruptions, by corruption and kind of file.

use std::collections::BTreeMap;
use std::fmt;

use uniffle_testkit::oracle::{ShuffleVerification, WorkerRefusal};
use uniffle_wire::types::ShuffleKey;

use super::corruption::{Corruption, Damage};

/// Number of failed seeds above which the table ends with their number.
const SHOWN_MAX: usize = 40;

#[derive(Debug, Default, Clone, Copy)]
struct Counts {
    seeds: u64,
    /// Seeds with a failure.
    failed: u64,
    shuffles: u64,
    refused_results: u64,
    unknown: u64,
    /// Directories that were omitted after a refused start.
    skipped: u64,
    refused_starts: u64,
    /// Claims that were restored from the error of a refused start.
    claims: u64,
    intact: u64,
    missing: u64,
    lost: u64,
}

impl Counts {
    fn add(&mut self, other: &Self) {
        self.seeds += other.seeds;
        self.failed += other.failed;
        self.shuffles += other.shuffles;
        self.refused_results += other.refused_results;
        self.unknown += other.unknown;
        self.skipped += other.skipped;
        self.refused_starts += other.refused_starts;
        self.claims += other.claims;
        self.intact += other.intact;
        self.missing += other.missing;
        self.lost += other.lost;
    }
}

/// Result of one seed.
#[derive(Debug)]
pub(crate) struct Report {
    corruption: Option<Corruption>,
    kind: String,
    what: String,
    disks: usize,
    spares_metadata: bool,
    counts: Counts,
    failures: Vec<String>,
}

impl Report {
    pub(crate) fn new(damage: &Damage, disks: usize, damages_more: bool) -> Self {
        Self {
            corruption: Some(damage.corruption),
            kind: damage.kind.clone(),
            what: damage.what.clone(),
            disks,
            spares_metadata: damage.spares_metadata(disks) && !damages_more,
            counts: Counts { seeds: 1, ..Counts::default() },
            failures: Vec::new(),
        }
    }

    /// Returns the report of the known gap, which is not checked.
    pub(crate) fn known_gap(corruption: Corruption) -> Self {
        let counts = Counts { seeds: 1, ..Counts::default() };
        Self {
            corruption: Some(corruption),
            kind: "known gap".to_owned(),
            what: String::new(),
            disks: 0,
            spares_metadata: false,
            counts,
            failures: Vec::new(),
        }
    }

    pub(crate) fn panicked(text: String) -> Self {
        Self {
            corruption: None,
            kind: "panic".to_owned(),
            what: String::new(),
            disks: 0,
            spares_metadata: false,
            counts: Counts { seeds: 1, ..Counts::default() },
            failures: vec![text],
        }
    }

    /// Returns the reasons why this seed alone fails: failures, or too few served blocks.
    pub(crate) fn breaches(&self) -> Vec<String> {
        let served = (self.counts.intact - self.counts.missing) * 10_000;
        let too_little = served < self.counts.intact * super::SERVED_OF_10_000;
        let too_little = too_little.then(|| format!("TooLittle: {:?}", self.counts));
        self.failures.iter().cloned().chain(too_little).collect()
    }

    pub(crate) fn fail(&mut self, text: String) {
        self.failures.push(text);
    }

    pub(crate) fn refused_start(&mut self) {
        self.counts.refused_starts += 1;
    }

    pub(crate) fn wrote_claim(&mut self) {
        self.counts.claims += 1;
    }

    pub(crate) fn skipped(&mut self) {
        self.counts.skipped += 1;
    }

    /// Adds the findings for a shuffle after a start.
    pub(crate) fn take(&mut self, key: &ShuffleKey, findings: ShuffleVerification) {
        self.counts.shuffles += 1;
        self.counts.intact += findings.intact;
        self.counts.missing += findings.missing.len() as u64;
        self.counts.lost += findings.lost.len() as u64;
        self.failures.extend(findings.violations.iter().map(ToString::to_string));
        match &findings.results_refused {
            Some(WorkerRefusal::Failed(_)) => self.counts.refused_results += 1,
            Some(WorkerRefusal::Unknown(_)) => self.counts.unknown += 1,
            None => {}
        }
        if let Some(refusal) =
            findings.results_refused.filter(|_| self.spares_metadata && self.counts.skipped == 0)
        {
            self.fail(format!("NeedlessRefusal of {key}: {}", refusal.text()));
        }
        // With damage, only the share of served blocks is checked, elsewhere.
        if let Some(first) = findings.missing.first().filter(|_| self.corruption == Some(Corruption::Nothing))
        {
            let (count, partition, block) = (findings.missing.len(), first.partition, first.block);
            self.fail(format!(
                "{count} blocks of {key} are not served, {block} of {partition}: {}",
                first.why
            ));
        }
    }
}

/// Result of all seeds.
#[derive(Debug, Default)]
pub(crate) struct Total {
    rows: BTreeMap<(Option<Corruption>, String), Counts>,
    /// Number of failures by their first word.
    failures_by_word: BTreeMap<String, u64>,
    failures: Vec<(u64, String)>,
}

impl Total {
    pub(crate) fn add(&mut self, seed: u64, mut report: Report) {
        report.counts.failed = u64::from(!report.failures.is_empty());
        self.rows.entry((report.corruption, report.kind)).or_default().add(&report.counts);
        for failure in &report.failures {
            let word = failure.split_once([':', ' ']).map_or(failure.as_str(), |(first, _)| first);
            *self.failures_by_word.entry(word.to_owned()).or_default() += 1;
        }
        if let Some(first) = report.failures.first() {
            let (corruption, disks) = (report.corruption, report.disks);
            let more = report.failures.len() - 1;
            self.failures.push((
                seed,
                format!("{corruption:?} of {} on {disks} disks: {first} (and {more} more)", report.what),
            ));
        }
    }

    /// Returns the first failure of each seed.
    pub(crate) fn failures(&self) -> Vec<String> {
        let mut failures = self.failures.clone();
        failures.sort();
        failures.iter().map(|(seed, text)| format!("{seed}: {text}")).collect()
    }

    pub(crate) fn intact_and_served(&self) -> (u64, u64) {
        let sum = |count: fn(&Counts) -> u64| self.rows.values().map(count).sum::<u64>();
        (sum(|row| row.intact), sum(|row| row.intact - row.missing))
    }

    /// Returns the corruptions that no seed chose.
    pub(crate) fn unchosen(&self) -> Vec<Corruption> {
        let chosen = |corruption: &Corruption| self.rows.keys().any(|(seen, _)| *seen == Some(*corruption));
        super::corruption::CORRUPTIONS.into_iter().filter(|corruption| !chosen(corruption)).collect()
    }
}

impl fmt::Display for Total {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut sum = Counts::default();
        writeln!(
            f,
            "{:<42} {:>6} {:>6} {:>8} {:>7} {:>7} {:>8} {:>8} {:>6} {:>9} {:>8} {:>7}",
            "damage",
            "seeds",
            "failed",
            "shuffles",
            "refused",
            "unknown",
            "left out",
            "no start",
            "claims",
            "untouched",
            "missing",
            "lost"
        )?;
        let line = |f: &mut fmt::Formatter<'_>, name: &str, row: &Counts| {
            let Counts {
                seeds,
                failed,
                shuffles,
                refused_results,
                unknown,
                skipped,
                refused_starts,
                claims,
                intact,
                missing,
                lost,
            } = row;
            writeln!(
                f,
                "{name:<42} {seeds:>6} {failed:>6} {shuffles:>8} {refused_results:>7} {unknown:>7} {skipped:>8} \
                 {refused_starts:>8} {claims:>6} {intact:>9} {missing:>8} {lost:>7}"
            )
        };
        for ((corruption, kind), row) in &self.rows {
            let corruption = corruption.map_or_else(String::new, |corruption| format!("{corruption:?} "));
            line(f, &format!("{corruption}{kind}"), row)?;
            sum.add(row);
        }
        line(f, "all", &sum)?;
        for (word, count) in &self.failures_by_word {
            writeln!(f, "{word}: {count}")?;
        }
        if self.failures.len() > SHOWN_MAX {
            writeln!(f, "{} seeds failed", self.failures.len())?;
        }
        Ok(())
    }
}
