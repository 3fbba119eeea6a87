//! Values out of a file and the environment, collecting every problem instead of stopping at the first.
//!
//! Absent gives nothing, unusable gives nothing *and* a problem, so that the caller goes on and finds the next one. Why
//! not serde: a derived `Deserialize` ends at the first error.

use std::collections::{BTreeMap, BTreeSet, HashMap};

use toml::{Table, Value};

use super::key::{Problem, Schema};
use super::kind::Kind;
use super::names;

/// The values not yet taken, and the problems met so far.
#[derive(Debug, Default)]
pub struct Reader {
    values: BTreeMap<&'static str, Value>,
    env: HashMap<String, String>,
    /// Keys that the file has, usable or not.
    pub given: BTreeSet<&'static str>,
    /// Everything that may not stand.
    pub problems: Vec<Problem>,
    /// What may stand and does nothing.
    pub warnings: Vec<String>,
}

impl Reader {
    /// Sorts the entries of `table` into keys of `schema` and problems.
    pub fn new(schema: &Schema, table: Table, env: HashMap<String, String>) -> Self {
        let (values, problems, warnings) = names::sort(schema, table);
        Self { given: values.keys().copied().collect(), values, env, problems, warnings }
    }

    /// The value of `path`, or of the first of `variables` that is set.
    pub fn take<T: 'static>(&mut self, path: &'static str, variables: &[&str], kind: Kind<T>) -> Option<T> {
        let value = self.values.remove(path);
        if let Some(set) = variables.iter().find(|name| self.text_of(name).is_some()) {
            return self.variable(set, kind);
        }
        let value = value?;
        let read = kind.read(&value);
        read.map_err(|allowed| self.problems.push(Problem::new(path, &value, allowed))).ok()
    }

    /// The value of a variable of the environment; an empty one is none.
    pub fn variable<T: 'static>(&mut self, name: &str, kind: Kind<T>) -> Option<T> {
        let text = self.text_of(name)?.to_owned();
        let shown = if kind.is_secret() { "(hidden)" } else { text.as_str() };
        let read = kind.read(&Value::from(text.as_str()));
        read.map_err(|allowed| self.problems.push(Problem::new(name, shown, allowed))).ok()
    }

    fn text_of(&self, name: &str) -> Option<&str> {
        self.env.get(name).map(String::as_str).filter(|text| !text.trim().is_empty())
    }
}
