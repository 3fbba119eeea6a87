//! Direction of imports inside `src/` and `uniffle-base`: top-level modules import only lower ones
//! of the table in `src/lib.rs`, and the files of a module form no cycle. Nor do the files of the
//! crates in `crates/`.
//!
//! A file imports another if a path in its code, `use` or macro arguments names an item of the
//! other. A re-exported name (`pub use` of a submodule) counts as an import of its original file.
//! So a child that takes a type from `mod.rs` forms a cycle only if code in `mod.rs` names an item
//! of the child. Methods, fields, and (for cycles) test code are not considered.
//!
//! Also, in `src/` and five crates, only the `clock` module uses tokio's timers for deadlines.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

use petgraph::graphmap::DiGraphMap;
use proc_macro2::{TokenStream, TokenTree};
use quote::ToTokens as _;
use syn::spanned::Spanned as _;
use syn::visit::Visit;

/// Layers from top to bottom. A module may import modules of the lines below its own.
const LAYERS: &[&[&str]] = &[
    &["server"],
    &["config"],
    &["listeners"],
    &["service"],
    &["flush"],
    &["remote"],
    &["app", "memory", "store"],
    &["log"],
    &["telemetry"],
    &["build", "compat", "proto"],
    // `uniffle-base`.
    &["budget", "runtime"],
    &["sched"],
    &["allocator", "log_limiter"],
    &["clock", "damage", "metrics", "schema"],
];

/// Crates that `src/lib.rs` re-exports as a module of a layer. They cannot import the worker.
const CRATES_AS_MODULES: &[&str] = &["log", "memory", "telemetry"];

type Names = Vec<String>;

/// A path as written, with its position.
struct Import {
    within: Names,
    path: Names,
    line: usize,
    in_test: bool,
    /// True for `pub use`.
    is_reexport: bool,
}

/// Paths in a file, and the targets of its imported names.
#[derive(Default)]
struct Source {
    file: Names,
    within: Names,
    in_test: bool,
    imports: Vec<Import>,
    names: BTreeMap<String, Names>,
}

impl Source {
    fn parse(module: &[String], text: &str) -> Self {
        let in_test = module.iter().any(|name| name == "tests");
        let mut source = Self { file: module.to_vec(), within: module.to_vec(), in_test, ..Self::default() };
        source.visit_file(&syn::parse_file(text).unwrap());
        source
    }

    fn import(&mut self, path: Names, line: usize, is_reexport: bool) {
        let (within, in_test) = (self.within.clone(), self.in_test);
        self.imports.push(Import { within, path, line, in_test, is_reexport });
    }

    fn use_tree(&mut self, tree: &syn::UseTree, mut path: Names, is_reexport: bool) {
        let (name, line) = match tree {
            syn::UseTree::Path(part) => {
                path.push(part.ident.to_string());
                return self.use_tree(&part.tree, path, is_reexport);
            }
            syn::UseTree::Group(group) => {
                return group.items.iter().for_each(|tree| self.use_tree(tree, path.clone(), is_reexport));
            }
            syn::UseTree::Name(name) => (name.ident.to_string(), name.ident.span().start().line),
            syn::UseTree::Rename(to) => {
                path.push(to.ident.to_string());
                (to.rename.to_string(), to.rename.span().start().line)
            }
            syn::UseTree::Glob(glob) => return self.import(path, glob.span().start().line, is_reexport),
        };
        if matches!(tree, syn::UseTree::Name(_)) && name != "self" {
            path.push(name.clone());
        }
        let name = if name == "self" { path.last().cloned().unwrap_or_default() } else { name };
        if !self.in_test {
            self.names.insert(name, absolute(&self.within, &path));
        }
        self.import(path, line, is_reexport);
    }
}

impl<'ast> Visit<'ast> for Source {
    fn visit_item_mod(&mut self, item: &'ast syn::ItemMod) {
        let was_test = self.in_test;
        self.in_test |=
            item.attrs.iter().any(|attribute| attribute.meta.to_token_stream().to_string() == "cfg (test)");
        self.within.push(item.ident.to_string());
        syn::visit::visit_item_mod(self, item);
        self.within.pop();
        self.in_test = was_test;
    }

    fn visit_item_use(&mut self, item: &'ast syn::ItemUse) {
        self.use_tree(&item.tree, Names::new(), !matches!(item.vis, syn::Visibility::Inherited));
    }

    fn visit_path(&mut self, path: &'ast syn::Path) {
        let names = path.segments.iter().map(|segment| segment.ident.to_string()).collect();
        self.import(names, path.span().start().line, false);
        syn::visit::visit_path(self, path);
    }

    fn visit_macro(&mut self, call: &'ast syn::Macro) {
        for word in without_literals(call.tokens.clone()).replace(" : : ", "::").split_whitespace() {
            self.import(word.split("::").map(str::to_owned).collect(), call.span().start().line, false);
        }
    }

    /// `pub(in crate::…)` is no import.
    fn visit_vis_restricted(&mut self, _: &'ast syn::VisRestricted) {}
}

/// Joins names and punctuation with spaces. Here too `pub(super)` is no import.
fn without_literals(tokens: TokenStream) -> String {
    let mut text = String::new();
    for token in tokens {
        match token {
            TokenTree::Group(_) if text.ends_with("pub ") => {}
            TokenTree::Group(group) => text.push_str(&format!("( {})", without_literals(group.stream()))),
            TokenTree::Ident(name) => text.push_str(&name.to_string()),
            TokenTree::Punct(point) => text.push(point.as_char()),
            TokenTree::Literal(_) => text.push('0'),
        }
        text.push(' ');
    }
    text
}

/// Resolves a path from the crate root. Other paths are relative to the module itself.
fn absolute(within: &[String], path: &[String]) -> Names {
    let mut base = within.to_vec();
    for (at, name) in path.iter().enumerate() {
        match name.as_str() {
            "crate" => base.clear(),
            "super" => drop(base.pop()),
            "self" if at == 0 => {}
            _ => base.push(name.clone()),
        }
    }
    base
}

struct Tree(BTreeMap<Names, Source>);

impl Tree {
    /// Reads all modules below `src/`, including test files.
    fn read() -> Self {
        let tree = Self::of_crate(Path::new(env!("CARGO_MANIFEST_DIR")));
        assert!(tree.0.len() > 100, "only {} files found: the search is broken", tree.0.len());
        tree
    }

    /// Reads all modules of a crate in `crates/`.
    fn of_member(name: &str) -> Self {
        Self::of_crate(&Path::new(env!("CARGO_MANIFEST_DIR")).join("crates").join(name))
    }

    /// Reads all modules below `src/` of the crate in `dir`.
    fn of_crate(dir: &Path) -> Self {
        let mut tree = Self(BTreeMap::new());
        tree.add(&dir.join("src"), &[]);
        tree
    }

    fn add(&mut self, dir: &Path, module: &[String]) {
        for entry in std::fs::read_dir(dir).unwrap().flatten() {
            let (path, mut own) = (entry.path(), module.to_vec());
            let name = path.file_stem().unwrap().to_string_lossy().into_owned();
            if path.is_dir() {
                own.push(name);
                self.add(&path, &own);
            } else if path.extension().is_some_and(|end| end == "rs") && name != "main" {
                own.extend((name != "mod" && name != "lib").then_some(name));
                let text = std::fs::read_to_string(&path).unwrap();
                self.0.insert(own.clone(), Source::parse(&own, &text));
            }
        }
    }

    /// Returns the file that a path leads to, through re-exports; `None` outside of the crate.
    fn file_of(&self, import: &Import, names: &BTreeMap<String, Names>) -> Option<Names> {
        let first = import.path.first()?;
        let below = [&import.within[..], &import.path[..1]].concat();
        let path = match names.get(first) {
            _ if matches!(first.as_str(), "crate" | "super" | "self") => {
                absolute(&import.within, &import.path)
            }
            Some(whole) => [whole, &import.path[1..]].concat(),
            None if import.path.len() > 1 && self.0.contains_key(&below) => {
                absolute(&import.within, &import.path)
            }
            None => return None,
        };
        self.definition(path, 8)
    }

    fn definition(&self, path: Names, hops: usize) -> Option<Names> {
        let file = (1..=path.len()).rev().map(|end| &path[..end]).find(|file| self.0.contains_key(*file))?;
        let handed_on = path.get(file.len()).and_then(|name| self.0[file].names.get(name));
        match handed_on {
            Some(origin) if hops > 0 => self.definition(origin.clone(), hops - 1).or(Some(file.to_vec())),
            _ => Some(file.to_vec()),
        }
    }

    /// Returns the imports between files of a top-level module, without tests.
    fn imports_inside_modules(&self) -> BTreeSet<(String, String)> {
        let mut imports = self.imports();
        imports.retain(|(from, to)| from.split("::").next() == to.split("::").next());
        imports
    }

    /// Returns the imports between all files, without tests. `lib.rs` has the name "".
    fn imports(&self) -> BTreeSet<(String, String)> {
        let mut found = BTreeSet::new();
        for (file, source) in &self.0 {
            for import in source.imports.iter().filter(|import| !import.in_test) {
                let Some(to) = self.file_of(import, &source.names) else { continue };
                let only_hands_on = import.is_reexport && to.starts_with(file);
                if to != *file && !only_hands_on {
                    found.insert((file.join("::"), to.join("::")));
                }
            }
        }
        found
    }
}

/// Returns the module at the top of an import's path, for a crate its re-export.
fn target(import: &Import) -> Option<String> {
    match import.path[0].as_str() {
        "crate" | "super" => absolute(&import.within, &import.path).into_iter().next(),
        name => {
            let module = name.strip_prefix("uniffle_")?;
            CRATES_AS_MODULES.contains(&module).then(|| module.to_owned())
        }
    }
}

/// Returns the violations of the layering by a file.
fn against_the_layers(source: &Source) -> Vec<String> {
    let layer = |module: &String| LAYERS.iter().position(|layer| layer.contains(&module.as_str()));
    let Some(own) = source.file.first() else { return Vec::new() };
    let targets = source.imports.iter().filter_map(|import| Some((import.line, target(import)?)));
    let wrong = targets.filter(|(_, to)| to != own && (layer(to).is_none() || layer(to) <= layer(own)));
    wrong
        .map(|(line, to)| {
            format!("{}:{line} imports `{to}`, which is no layer below it", source.file.join("::"))
        })
        .collect()
}

/// Returns each group of files that import each other, one line per group.
fn cycles(imports: &BTreeSet<(String, String)>) -> BTreeSet<String> {
    let graph: DiGraphMap<&str, ()> = imports.iter().map(|(from, to)| (from.as_str(), to.as_str())).collect();
    let mut groups = petgraph::algo::tarjan_scc(&graph);
    groups.retain(|group| group.len() > 1);
    groups.iter_mut().for_each(|group| group.sort_unstable());
    groups.into_iter().map(|group| group.join(" ")).collect()
}

#[test]
fn modules_import_downwards() {
    let trees = [Tree::read(), Tree::of_member("uniffle-base")];
    let known: BTreeSet<&str> = LAYERS.concat().into_iter().collect();
    let files = trees.iter().flat_map(|tree| tree.0.keys());
    let modules = files.filter_map(|file| file.first()).map(String::as_str);
    let modules = modules.chain(CRATES_AS_MODULES.iter().copied()).collect();
    assert_eq!(known, modules, "LAYERS differs from the modules of src/lib.rs and uniffle-base");
    let sources = trees.iter().flat_map(|tree| tree.0.values());
    let wrong: Vec<String> = sources.flat_map(against_the_layers).collect();
    assert!(wrong.is_empty(), "imports that point up the layers:\n{}\n", wrong.join("\n"));
}

#[test]
fn files_of_a_module_form_no_cycle() {
    assert_no_cycle(&Tree::read().imports_inside_modules());
}

#[test]
fn files_of_other_crates_form_no_cycle() {
    let crates = Path::new(env!("CARGO_MANIFEST_DIR")).join("crates");
    let crates: Vec<_> = std::fs::read_dir(crates).unwrap().flatten().collect();
    assert!(crates.len() > 4, "only {} crates found: the search is broken", crates.len());
    for each in crates {
        assert_no_cycle(&Tree::of_crate(&each.path()).imports());
    }
}

fn assert_no_cycle(imports: &BTreeSet<(String, String)>) {
    let wrong: Vec<_> =
        cycles(imports).iter().map(|line| format!("{line}\n{}", inside(line, imports))).collect();
    assert!(wrong.is_empty(), "files that import each other:\n{}", wrong.join("\n"));
}

/// tokio timers that include pauses of the process. `clock` has equivalents without pauses.
const COUNT_PAUSES: &[&str] =
    &["Instant", "Sleep", "Timeout", "sleep", "sleep_until", "timeout", "timeout_at"];
/// `clock` is built on them. `uniffle-telemetry` is not checked: its deadlines affect no peer.
const MAY_COUNT_PAUSES: &[&str] = &["clock"];

#[test]
fn deadlines_are_measured_by_the_clock_module() {
    let members = ["uniffle-base", "uniffle-coordinator", "uniffle-log", "uniffle-memory", "uniffle-profile"]
        .map(Tree::of_member);
    let trees: Vec<_> = members.into_iter().chain([Tree::read()]).collect();
    let wrong: Vec<String> =
        trees.iter().flat_map(|tree| tree.0.values()).flat_map(counting_pauses).collect();
    assert!(wrong.is_empty(), "deadlines without the clock module:\n{}\n", wrong.join("\n"));
}

/// Returns the uses of such timers in a file.
fn counting_pauses(source: &Source) -> Vec<String> {
    if source.file.first().is_some_and(|module| MAY_COUNT_PAUSES.contains(&module.as_str())) {
        return Vec::new();
    }
    let counts = |path: &[String]| match path {
        [tokio, time, rest @ ..] if tokio == "tokio" && time == "time" => {
            rest.first().is_none_or(|name| COUNT_PAUSES.contains(&name.as_str()))
        }
        _ => false,
    };
    let wrong = source.imports.iter().filter(|import| !import.in_test && counts(&import.path));
    wrong
        .map(|import| {
            let (file, path) = (source.file.join("::"), import.path.join("::"));
            format!("{file}:{} uses {path}, which counts pauses: take it from crate::clock", import.line)
        })
        .collect()
}

fn inside(circle: &str, imports: &BTreeSet<(String, String)>) -> String {
    let files: BTreeSet<&str> = circle.split(' ').collect();
    let edges =
        imports.iter().filter(|(from, to)| files.contains(from.as_str()) && files.contains(to.as_str()));
    edges.fold(String::new(), |text, (from, to)| text + &format!("    {from} imports {to}\n"))
}

/// Tests of these rules.
mod rules {
    use super::{BTreeMap, Source, Tree, against_the_layers, counting_pauses, cycles};

    fn source(module: &str, text: &str) -> Source {
        Source::parse(&module.split("::").map(str::to_owned).collect::<Vec<_>>(), text)
    }

    #[test]
    fn imports_from_above_and_siblings_are_found() {
        let wrong = |module: &str, text: &str| against_the_layers(&source(module, text));
        assert_eq!(
            wrong("app::registry", "//! Doc.\n\nuse crate::service::Service;"),
            ["app::registry:3 imports `service`, which is no layer below it"]
        );
        assert_eq!(wrong("store", "use super::{metrics::X, memory::Y, app as z};").len(), 2);
        assert_eq!(wrong("store", "fn f() -> uniffle_memory::Memory { uniffle_log::f() }").len(), 1);
        assert_eq!(wrong("runtime", "fn f() -> crate::store::X { crate::app::y() }").len(), 2);
        assert_eq!(wrong("runtime", "fn f() { info!(x = %crate::server::Y, \"crate::app\"); }").len(), 1);
        assert_eq!(
            wrong(
                "runtime",
                "mod a { use super::super::config::C; } #[cfg(test)] mod tests { use crate::app; }"
            )
            .len(),
            2
        );
        assert!(
            wrong("runtime", "table! { pub(in crate::app) struct T { pub(super) a: b = 0; } }").is_empty(),
            "a visibility in a macro is no import"
        );
        assert!(
            wrong(
                "runtime",
                "// use crate::app;\npub(in crate::app) fn f() -> &'static str { \"crate::app\" }"
            )
            .is_empty()
        );
        assert!(
            wrong("store", "mod tests { use super::app::X; }").is_empty(),
            "a submodule with the name of a layer is no layer"
        );
    }

    #[test]
    fn tokio_timers_are_found_outside_of_tests() {
        let wrong = |module: &str, text: &str| counting_pauses(&source(module, text)).len();
        assert_eq!(wrong("app", "use tokio::time::{Duration, Instant, interval, sleep};"), 2);
        assert_eq!(wrong("app", "use tokio::time; async fn f() { tokio::time::timeout(d, f).await; }"), 2);
        assert_eq!(wrong("app", "use tokio::time::interval; use crate::clock::sleep;"), 0);
        assert_eq!(wrong("app", "#[cfg(test)] mod tests { use tokio::time::sleep; }"), 0);
        assert_eq!(wrong("clock", "use tokio::time;"), 0);
    }

    #[test]
    fn reexports_alone_form_no_cycle() {
        let cycles = |parent: &str, child: &str, sibling: &str| {
            let files = [("app", parent), ("app::child", child), ("app::sibling", sibling)];
            let sources =
                files.map(|(module, text)| source(module, text)).map(|source| (source.file.clone(), source));
            cycles(&Tree(BTreeMap::from(sources)).imports())
        };
        assert!(cycles("pub use child::C;", "use super::Limit;", "use super::C;").is_empty());
        assert_eq!(
            cycles("pub use child::C; fn f() { C::new() }", "use super::Limit;", "").first().unwrap(),
            "app app::child"
        );
        assert_eq!(cycles("use child::C;", "fn f() -> super::Limit {}", "").len(), 1);
        assert_eq!(cycles("fn f() { g!(child::h()) }", "use super::Limit;", "").len(), 1);
        assert_eq!(
            cycles("pub use child::C; pub use sibling::S;", "use super::S;", "use super::C;").len(),
            1
        );
        assert!(
            cycles("", "use super::sibling::S;", "#[cfg(test)] mod tests { use crate::app::child::C; }")
                .is_empty()
        );
    }
}
