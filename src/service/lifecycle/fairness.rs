//! Fairness between applications: their weights, as the configuration sets them.
//!
//! This module divides nothing. By these weights, `memory::admission::fair` divides the memory,
//! `sched::FairQueue` the flush workers, and `sched::FairSemaphore` the memory of reads. A reload
//! changes the weights of running applications.

use std::sync::Arc;

use parking_lot::RwLock;
use toml::{Table, Value};

use crate::app::App;
use crate::memory::Memory;
use crate::schema::kind::{count, tables};
use crate::schema::section;

/// Largest weight: one application may count a thousand times as much as another.
const WEIGHT_MAX: u32 = 1000;

/// Maximum number of characters of a pattern; names are not longer.
const PATTERN_CHARS_MAX: usize = 1024;

const RULE: &str = "tables with `user`, `app` or both (texts with * as wildcard) and `weight` (1 to 1000)";

section! {
    /// Weights of applications.
    #[table(
        "fairness",
        "Division of memory, flush order and read memory among applications when there is not \
         enough for all."
    )]
    pub struct FairnessConfig {
        /// Weights of applications by user or id; the first matching rule applies. Scarce resources
        /// are divided by weight among the applications that need them.
        #[key("fairness.weights", tables(100, RULE, read_rule, print_rule), AtOnce,
            example "[{ user = \"etl\", weight = 4 }, { app = \"application_*_adhoc*\", weight = 1 }]")]
        pub weights: Vec<WeightRule> = Vec::new(),
        /// Weight of all other applications.
        #[key("fairness.default_weight", count(1..=WEIGHT_MAX), AtOnce)]
        pub default_weight: u32 = 1,
    }
}

/// The weight of matching applications.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct WeightRule {
    user: Option<String>,
    app: Option<String>,
    weight: u32,
}

impl FairnessConfig {
    /// Returns the weight of an application.
    pub fn weight_of(&self, user: &str, app: &str) -> u32 {
        let fits =
            |pattern: &Option<String>, name: &str| pattern.as_deref().is_none_or(|it| matches(it, name));
        let rule = self.weights.iter().find(|rule| fits(&rule.user, user) && fits(&rule.app, app));
        rule.map_or(self.default_weight, |rule| rule.weight)
    }
}

/// Parses a rule, or returns everything that is wrong with it.
fn read_rule(table: &Table) -> Result<WeightRule, Vec<String>> {
    let mut wrong = Vec::new();
    let unknown = table.keys().filter(|key| !["user", "app", "weight"].contains(&key.as_str()));
    wrong.extend(unknown.map(|key| format!("not {key:?}")));
    let mut pattern = |key: &str| match table.get(key)? {
        Value::String(text) if !text.is_empty() && text.chars().count() <= PATTERN_CHARS_MAX => {
            Some(text.clone())
        }
        _ => {
            wrong.push(format!("text of 1 to {PATTERN_CHARS_MAX} characters as `{key}`"));
            None
        }
    };
    let (user, app) = (pattern("user"), pattern("app"));
    if !table.contains_key("user") && !table.contains_key("app") {
        wrong.push("a rule needs `user` or `app`; for all others use fairness.default_weight".to_owned());
    }
    let weight =
        table.get("weight").and_then(Value::as_integer).and_then(|weight| u32::try_from(weight).ok());
    match weight.filter(|weight| (1..=WEIGHT_MAX).contains(weight)) {
        Some(weight) if wrong.is_empty() => return Ok(WeightRule { user, app, weight }),
        Some(_) => {}
        None => wrong.push(format!("1 to {WEIGHT_MAX} as `weight`")),
    }
    Err(wrong)
}

fn print_rule(rule: &WeightRule) -> Table {
    let text = |key: &str, text: &Option<String>| Some((key.to_owned(), Value::from(text.as_deref()?)));
    let patterns = [text("user", &rule.user), text("app", &rule.app)];
    let weight = ("weight".to_owned(), Value::from(i64::from(rule.weight)));
    patterns.into_iter().flatten().chain([weight]).collect()
}

/// Returns whether `name` matches `pattern`, in which each `*` matches any text.
fn matches(pattern: &str, name: &str) -> bool {
    let Some((start, rest)) = pattern.split_once('*') else { return pattern == name };
    let (middle, end) = rest.rsplit_once('*').map_or((None, rest), |(middle, end)| (Some(middle), end));
    let Some(inner) = name.strip_prefix(start).and_then(|remaining| remaining.strip_suffix(end)) else {
        return false;
    };
    let mut remaining = inner;
    for part in middle.iter().flat_map(|middle| middle.split('*')) {
        match remaining.find(part) {
            Some(at) => remaining = &remaining[at + part.len()..],
            None => return false,
        }
    }
    true
}

/// The current weights.
#[derive(Debug)]
pub(in crate::service) struct Weights {
    pub(in crate::service) config: RwLock<FairnessConfig>,
    pub(in crate::service) memory: Arc<Memory>,
}

impl Weights {
    /// Updates the weight of an application.
    pub(in crate::service) fn weigh(&self, app: &App) {
        let weight = self.config.read().weight_of(&app.client.user(), app.id().as_str());
        self.memory.tickets().set_weight(app.id(), weight);
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn rule(text: &str) -> Result<WeightRule, Vec<String>> {
        read_rule(&text.parse().unwrap())
    }

    #[test]
    fn first_rule_that_fits_counts() {
        let weights = ["user = \"etl\"\nweight = 4", "app = \"application_*_adhoc*\"\nweight = 2"];
        let config = FairnessConfig {
            weights: weights.iter().map(|text| rule(text).unwrap()).collect(),
            default_weight: 3,
        };
        assert_eq!(config.weight_of("etl", "application_1_adhoc"), 4);
        assert_eq!(config.weight_of("anna", "application_1_adhoc_7"), 2);
        assert_eq!(config.weight_of("anna", "application_1_7"), 3);
        assert_eq!(FairnessConfig::default().weight_of("", ""), 1);
        for rule in &config.weights {
            assert_eq!(&read_rule(&print_rule(rule)).unwrap(), rule);
        }
    }

    #[test]
    fn invalid_rule_is_explained() {
        for (text, expected) in [
            ("weight = 4", "fairness.default_weight"),
            ("user = \"a\"", "1 to 1000 as `weight`"),
            ("user = \"a\"\nweight = 0", "1 to 1000 as `weight`"),
            ("user = \"a\"\nweight = 1001", "1 to 1000 as `weight`"),
            ("user = 7\nweight = 1", "as `user`"),
            ("app = \"\"\nweight = 1", "as `app`"),
            ("queue = \"a\"\nweight = 1", "not \"queue\""),
        ] {
            let refused = rule(text).unwrap_err().join(", ");
            assert!(refused.contains(expected), "{text}: {refused}");
        }
        let all = rule("user = 7\napp = \"\"\nqueue = \"a\"\nweight = 0").unwrap_err();
        let expected = ["not \"queue\"", "as `user`", "as `app`", "1 to 1000 as `weight`"];
        assert_eq!(all.len(), expected.len(), "{all:?}");
        assert!(all.iter().zip(expected).all(|(problem, expected)| problem.contains(expected)), "{all:?}");
    }

    #[test]
    fn star_matches_anything() {
        for (pattern, name, fits) in [
            ("*", "", true),
            ("a*", "a", true),
            ("a*", "ba", false),
            ("*a", "ba", true),
            ("a", "a", true),
            ("a", "ab", false),
            ("a*a", "a", false),
            ("a*b*c", "a1b2c", true),
            ("a*b*c", "acb", false),
            ("**", "x", true),
            ("a**c", "abc", true),
            ("*ab*ab*", "abab", true),
            ("*ab*ab*", "aba", false),
            ("é*", "été", true),
        ] {
            assert_eq!(matches(pattern, name), fits, "{pattern} {name}");
        }
    }

    /// Reference implementation: a star matches nothing, or one character followed by the star
    /// again.
    fn plainly(pattern: &[u8], name: &[u8]) -> bool {
        match (pattern, name) {
            ([], []) => true,
            ([b'*', rest @ ..], _) => {
                plainly(rest, name) || (!name.is_empty() && plainly(pattern, &name[1..]))
            }
            ([a, pattern @ ..], [b, name @ ..]) => a == b && plainly(pattern, name),
            _ => false,
        }
    }

    proptest! {
        #[test]
        fn matching_follows_the_definition(pattern in "[ab*]{0,6}", name in "[ab]{0,8}") {
            prop_assert_eq!(matches(&pattern, &name), plainly(pattern.as_bytes(), name.as_bytes()));
        }
    }
}
