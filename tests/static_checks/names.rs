//! The types of the worker and its crates have distinct names, so that a name says which type is
//! meant. Tests are not considered.
//!
//! A type is a name after `struct`, `enum`, `trait` or `union`, also in a macro. Types of one file
//! may have one name: they are alternatives by `cfg`.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

use proc_macro2::{TokenStream, TokenTree};

use super::docs::read_tree;

/// Names of which each module has its own.
const BY_MODULE: [&str; 5] = ["Config", "Error", "Metrics", "Settings", "State"];
/// `fastant` has the names of the published crate that it replaces, and `clock` those of tokio.
const GIVEN: [&str; 1] = ["Instant"];

/// Adds the names of the types in `code`.
fn add_types(code: TokenStream, types: &mut BTreeSet<String>) {
    let mut before = String::new();
    for token in code {
        before = match token {
            TokenTree::Ident(name) => {
                if ["struct", "enum", "trait", "union"].contains(&before.as_str()) {
                    types.insert(name.to_string());
                }
                name.to_string()
            }
            TokenTree::Group(group) if before != "tests" => {
                add_types(group.stream(), types);
                String::new()
            }
            _ => String::new(),
        };
    }
}

#[test]
fn types_have_distinct_names() {
    let (root, mut files) = (Path::new(env!("CARGO_MANIFEST_DIR")), BTreeMap::new());
    ["src", "crates"].iter().for_each(|dir| read_tree(root, &root.join(dir), &mut files));
    files.retain(|path, _| path.extension().is_some_and(|end| end == "rs"));
    files.retain(|path, _| !path.with_extension("").iter().any(|part| part == "tests"));
    let mut files_of: BTreeMap<String, Vec<String>> = BTreeMap::new();
    for (path, text) in files {
        let mut types = BTreeSet::new();
        add_types(text.parse().unwrap(), &mut types);
        types.into_iter().for_each(|name| files_of.entry(name).or_default().push(path.display().to_string()));
    }
    assert!(files_of.len() > 1000, "only {} types found: the search is broken", files_of.len());
    let is_allowed = |name: &str| BY_MODULE.contains(&name) || GIVEN.contains(&name);
    files_of.retain(|name, files| files.len() > 1 && !is_allowed(name));
    assert!(files_of.is_empty(), "several types have one name; rename all but one: {files_of:#?}");
}
