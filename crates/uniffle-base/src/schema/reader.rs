//! Reads values from a file and the environment, and collects all problems.
//!
//! An absent value gives `None`. An invalid value gives `None` and adds a problem, so that the
//! caller continues. A value of the file that a variable overrides is not checked. A derived
//! `Deserialize` would stop at the first error.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::fmt::Display;

use toml::{Table, Value};

use super::key::{Problem, Schema};
use super::kind::Kind;
use super::names;

/// The values not taken yet, and the problems found so far.
#[derive(Debug, Default)]
pub struct ValueReader {
    values: BTreeMap<&'static str, Value>,
    env: HashMap<String, String>,
    /// Keys that the file contains, valid or not.
    pub given: BTreeSet<&'static str>,
    /// All problems found so far.
    pub problems: Vec<Problem>,
    /// Notes about valid entries that have no effect.
    pub warnings: Vec<String>,
}

impl ValueReader {
    /// Divides the entries of `table` into values of keys in `schema`, problems and warnings.
    pub fn new(schema: &Schema, table: Table, env: HashMap<String, String>) -> Self {
        let (values, problems, warnings) = names::classify(schema, table);
        Self { given: values.keys().copied().collect(), values, env, problems, warnings }
    }

    /// Takes the value of the first of `variables` that is set, read as text, or else of `path`.
    pub fn take<T: 'static>(&mut self, path: &'static str, variables: &[&str], kind: Kind<T>) -> Option<T> {
        let value = self.values.remove(path);
        if let Some(set) = variables.iter().find(|name| self.text_of(name).is_some()) {
            return self.variable(set, kind);
        }
        let value = value?;
        let read = kind.read(&value);
        read.map_err(|allowed| self.problems.push(invalid(path, &value, &allowed))).ok()
    }

    /// Returns the value of an environment variable. An empty variable counts as unset.
    pub fn variable<T: 'static>(&mut self, name: &str, kind: Kind<T>) -> Option<T> {
        let text = self.text_of(name)?.to_owned();
        let shown = if kind.is_secret() { "(hidden)" } else { text.as_str() };
        let read = kind.read(&Value::from(text.as_str()));
        read.map_err(|allowed| self.problems.push(invalid(name, shown, &allowed))).ok()
    }

    fn text_of(&self, name: &str) -> Option<&str> {
        self.env.get(name).map(String::as_str).filter(|text| !text.trim().is_empty())
    }
}

/// Creates the problem of a value that [`Kind::read`] rejected with the description `allowed`.
fn invalid(key: &str, value: impl Display, allowed: &str) -> Problem {
    Problem::new(key, value, format!("must be {allowed}"))
}
