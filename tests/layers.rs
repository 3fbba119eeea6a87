//! The direction of imports: every path of `src/` that leads into another top-level module must point down the table
//! of `src/lib.rs`, and siblings do not know each other.
//!
//! This reads source text as tokens (comments and literals dropped) and resolves `crate::…` and `super::…` paths, in
//! `use` and anywhere else, groups included. It does not see through re-exports or macros that build paths; it need
//! not, since whoever re-exports must import first.

#![allow(clippy::panic, reason = "to panic is how a test fails")]

use std::path::{Path, PathBuf};

/// From the top to the bottom. A module may import any that stands in a line below its own.
const LAYERS: &[&[&str]] = &[
    &["server"],
    &["config"],
    &["listeners", "coordinator"],
    &["service"],
    &["flush"],
    &["app", "memory", "tiers", "journal"],
    &["profile"],
    &["runtime", "telemetry", "tls"],
    &["metrics", "proto"],
];

#[test]
fn imports_point_down_only() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let mut files = Vec::new();
    rust_files(&root.join("src"), &mut files);
    assert!(files.len() > LAYERS.len(), "only {} files found: the search is broken", files.len());

    let mut broken = Vec::new();
    for file in &files {
        let text = std::fs::read_to_string(file).expect("a readable source file");
        let name = file.strip_prefix(root).expect("found below it").display().to_string();
        broken.extend(violations(&name, &text));
    }
    assert!(broken.is_empty(), "\n{}\n", broken.join("\n"));
}

#[test]
fn every_module_has_a_layer() {
    let lib = concat!(env!("CARGO_MANIFEST_DIR"), "/src/lib.rs");
    let tokens = tokens(&std::fs::read_to_string(lib).expect("a readable source file"));
    let modules: Vec<&str> = tokens
        .windows(2)
        .filter(|pair| pair[0].text == "mod")
        .map(|pair| pair[1].text.as_str())
        .filter(|name| layer(name).is_none())
        .collect();
    assert!(modules.is_empty(), "modules that LAYERS of tests/layers.rs does not know: {modules:?}");
}

/// What is wrong with one file, a line each.
fn violations(file: &str, text: &str) -> Vec<String> {
    let Some(own) = module_path(file) else {
        return library_in_binary(file, text);
    };
    let mut broken = Vec::new();
    for import in imports(&own, &tokens(text), is_test_file(file)) {
        let Some(from) = own.first() else { continue }; // lib.rs imports nothing that matters
        if let Err(why) = may_import(from, &import) {
            broken.push(format!("{file}:{}: {why}", import.line));
        }
    }
    broken
}

/// Binaries take the library by its name; a `crate::` path there would mean that they compile its files once more.
fn library_in_binary(file: &str, text: &str) -> Vec<String> {
    imports(&[], &tokens(text), false)
        .into_iter()
        .filter(|import| layer(&import.target).is_some())
        .map(|import| format!("{file}:{}: a binary says `uniffle_worker::{}`", import.line, import.target))
        .collect()
}

fn may_import(from: &str, import: &Import) -> Result<(), String> {
    let to = import.target.as_str();
    if from == to {
        return Ok(());
    }
    let from_layer = layer(from).ok_or_else(|| format!("`{from}` is not in LAYERS of tests/layers.rs"))?;
    let to_layer = layer(to)
        .ok_or_else(|| format!("`{from}` imports `crate::{to}`, which is no module that LAYERS knows"))?;
    if to_layer > from_layer {
        return Ok(());
    }
    let relation = if to_layer == from_layer { "its sibling" } else { "which is above it" };
    let above = LAYERS[..to_layer].concat().join(", ");
    Err(format!("`{from}` imports `{to}`, {relation}: only {above} may import `{to}`"))
}

fn layer(module: &str) -> Option<usize> {
    LAYERS.iter().position(|layer| layer.contains(&module))
}

/// `src/a/b.rs` and `src/a/b/mod.rs` are `[a, b]`; `src/lib.rs` is the root; binaries are none of the library.
fn module_path(file: &str) -> Option<Vec<String>> {
    let inner = file.strip_prefix("src/")?.strip_suffix(".rs")?;
    if inner == "main" || inner.starts_with("bin/") {
        return None;
    }
    let inner = inner.strip_suffix("/mod").unwrap_or(inner);
    if inner == "lib" {
        return Some(Vec::new());
    }
    Some(inner.split('/').map(str::to_owned).collect())
}

/// Files that only a `#[cfg(test)] mod tests;` brings in, by their name.
fn is_test_file(file: &str) -> bool {
    file.ends_with("/tests.rs") || file.contains("/tests/")
}

/// A path that leads to a module of the crate's root.
struct Import {
    target: String,
    line: usize,
    in_test: bool,
}

/// An inline module, or the file itself.
struct Scope {
    /// How many braces were open when it began.
    depth: usize,
    in_test: bool,
}

fn imports(own: &[String], tokens: &[Token], test_file: bool) -> Vec<Import> {
    let mut found = Vec::new();
    let mut module = own.to_vec();
    let mut scopes: Vec<Scope> = Vec::new();
    let mut depth = 0;
    let mut at = 0;
    while let Some(token) = tokens.get(at) {
        let in_test = test_file || scopes.last().is_some_and(|scope| scope.in_test);
        let next = |offset: usize| tokens.get(at + offset).map_or("", |token| token.text.as_str());
        match token.text.as_str() {
            "mod" if next(2) == "{" => {
                module.push(next(1).to_owned());
                scopes.push(Scope { depth, in_test: in_test || has_cfg_test(&tokens[..at]) });
                depth += 1;
                at += 3;
            }
            "{" => {
                depth += 1;
                at += 1;
            }
            "}" => {
                depth = depth.saturating_sub(1);
                if scopes.last().is_some_and(|scope| scope.depth == depth) {
                    scopes.pop();
                    module.pop();
                }
                at += 1;
            }
            "crate" | "super" if next(1) == "::" => {
                let (targets, end) = paths(&module, tokens, at);
                found.extend(targets.into_iter().map(|(target, line)| Import { target, line, in_test }));
                at = end;
            }
            _ => at += 1,
        }
    }
    found
}

/// Whether `#[cfg(test)]` is among the attributes of the item that begins behind these tokens.
fn has_cfg_test(before: &[Token]) -> bool {
    let item_start = before
        .iter()
        .rposition(|token| matches!(token.text.as_str(), ";" | "}" | "{"))
        .map_or(0, |at| at + 1);
    before[item_start..]
        .windows(3)
        .any(|three| three[0].text == "cfg" && three[1].text == "(" && three[2].text == "test")
}

/// Reads the path, or the tree of paths, that begins at `at`. Gives the modules of the root that it leads to, each
/// with its line, and where it ends.
fn paths(module: &[String], tokens: &[Token], at: usize) -> (Vec<(String, usize)>, usize) {
    let mut targets = Vec::new();
    let end = tree(module.to_vec(), tokens, at, &mut targets);
    (targets, end)
}

fn tree(mut base: Vec<String>, tokens: &[Token], mut at: usize, targets: &mut Vec<(String, usize)>) -> usize {
    let mut line = 0;
    while let Some(token) = tokens.get(at) {
        line = token.line;
        match token.text.as_str() {
            "crate" => base.clear(),
            "super" => drop(base.pop()),
            "self" => {}
            "{" => {
                at += 1;
                while let Some(token) = tokens.get(at) {
                    match token.text.as_str() {
                        "}" => return at + 1,
                        "," => at += 1,
                        _ => at = tree(base.clone(), tokens, at, targets),
                    }
                }
                return at;
            }
            name => base.push(name.to_owned()),
        }
        at += 1;
        // `as name` ends an element; the comma or brace behind it is for the caller.
        if tokens.get(at).is_some_and(|token| token.text == "as") {
            at += 2;
        }
        if tokens.get(at).is_none_or(|token| token.text != "::") {
            break;
        }
        at += 1;
    }
    if let Some(target) = base.into_iter().next() {
        targets.push((target, line));
    }
    at
}

/// An identifier, `::`, or one character of anything else that is neither comment nor literal.
struct Token {
    text: String,
    line: usize,
}

fn tokens(text: &str) -> Vec<Token> {
    let chars: Vec<char> = text.chars().collect();
    let mut found = Vec::new();
    let (mut at, mut line) = (0, 1);
    while at < chars.len() {
        let end = token_end(&chars, at);
        let piece: String = chars[at..end].iter().collect();
        let is_name = chars[at].is_alphabetic() || chars[at] == '_';
        let is_literal = piece.ends_with(['"', '#', '\'']) && piece.len() > 1;
        let is_comment = piece.starts_with("//") || piece.starts_with("/*");
        let newlines = piece.matches('\n').count();
        if !is_literal && !is_comment && (is_name || !piece.trim().is_empty()) {
            found.push(Token { text: piece, line });
        }
        line += newlines;
        at = end;
    }
    found
}

/// Where the token that begins at `at` ends.
fn token_end(chars: &[char], at: usize) -> usize {
    let next = |offset: usize| chars.get(at + offset).copied().unwrap_or('\0');
    match chars[at] {
        '/' if next(1) == '/' => (at..chars.len()).find(|at| chars[*at] == '\n').unwrap_or(chars.len()),
        '/' if next(1) == '*' => block_comment_end(chars, at),
        ':' if next(1) == ':' => at + 2,
        '"' => string_end(chars, at),
        '\'' => char_end(chars, at),
        first if first.is_alphanumeric() || first == '_' => {
            let end = (at..chars.len())
                .find(|at| !chars[*at].is_alphanumeric() && chars[*at] != '_')
                .unwrap_or(chars.len());
            let prefix: String = chars[at..end].iter().collect();
            match (prefix.as_str(), chars.get(end)) {
                ("b" | "c", Some('"')) => string_end(chars, end),
                ("b", Some('\'')) => char_end(chars, end),
                ("r" | "br" | "cr", Some('"' | '#')) => raw_string_end(chars, end).unwrap_or(end),
                _ => end,
            }
        }
        _ => at + 1,
    }
}

fn block_comment_end(chars: &[char], start: usize) -> usize {
    let (mut at, mut depth) = (start, 0);
    while at < chars.len() {
        match (chars[at], chars.get(at + 1)) {
            ('/', Some('*')) => {
                depth += 1;
                at += 2;
            }
            ('*', Some('/')) => {
                depth -= 1;
                at += 2;
                if depth == 0 {
                    return at;
                }
            }
            _ => at += 1,
        }
    }
    at
}

fn string_end(chars: &[char], quote: usize) -> usize {
    let mut at = quote + 1;
    while at < chars.len() && chars[at] != '"' {
        at += if chars[at] == '\\' { 2 } else { 1 };
    }
    (at + 1).min(chars.len())
}

/// `None` for a raw identifier such as `r#type`.
fn raw_string_end(chars: &[char], start: usize) -> Option<usize> {
    let hashes = chars[start..].iter().take_while(|c| **c == '#').count();
    if chars.get(start + hashes) != Some(&'"') {
        return None;
    }
    let mut at = start + hashes + 1;
    while at < chars.len() {
        let closes = chars[at] == '"' && chars[at + 1..].iter().take_while(|c| **c == '#').count() >= hashes;
        if closes {
            return Some(at + 1 + hashes);
        }
        at += 1;
    }
    Some(at)
}

/// A character literal, or the tick of a lifetime alone.
fn char_end(chars: &[char], tick: usize) -> usize {
    if chars.get(tick + 1) == Some(&'\\') {
        let closing = (tick + 3..chars.len()).find(|at| chars[*at] == '\'');
        return closing.map_or(chars.len(), |at| at + 1);
    }
    if chars.get(tick + 2) == Some(&'\'') { tick + 3 } else { tick + 1 }
}

fn rust_files(dir: &Path, found: &mut Vec<PathBuf>) {
    let mut entries: Vec<PathBuf> =
        std::fs::read_dir(dir).expect("a readable directory").flatten().map(|entry| entry.path()).collect();
    entries.sort();
    for path in entries {
        if path.is_dir() {
            rust_files(&path, found);
        } else if path.extension().is_some_and(|extension| extension == "rs") {
            found.push(path);
        }
    }
}

/// The rules themselves: what this test must see, and what it must not take for an import.
mod rules {
    use super::violations;

    #[track_caller]
    fn broken(file: &str, text: &str, expected: &[&str]) {
        let found = violations(file, text);
        assert_eq!(found.len(), expected.len(), "{found:#?}");
        for (found, expected) in found.iter().zip(expected) {
            assert!(found.starts_with(expected), "{found}\nshould begin with\n{expected}");
        }
    }

    #[test]
    fn an_import_from_above_is_found() {
        let text = "//! Doc.\n\nuse crate::service::Service;\n";
        broken(
            "src/memory/buffer.rs",
            text,
            &["src/memory/buffer.rs:3: `memory` imports `service`, which is above"],
        );
        let who = "only server, config, grpc, tcp, http, coordinator may import `service`";
        assert!(violations("src/memory/buffer.rs", text)[0].ends_with(who));
    }

    #[test]
    fn an_import_of_a_sibling_is_found() {
        broken(
            "src/memory/mod.rs",
            "use crate::store::X;",
            &["src/memory/mod.rs:1: `memory` imports `store`, its"],
        );
        broken(
            "src/http/mod.rs",
            "use crate::grpc;",
            &["src/http/mod.rs:1: `http` imports `grpc`, its sibling"],
        );
        broken(
            "src/types.rs",
            "use crate::proto::X;",
            &["src/types.rs:1: `types` imports `proto`, its sibling"],
        );
    }

    #[test]
    fn imports_downwards_and_within_are_fine() {
        broken("src/server.rs", "use crate::{config, grpc::Router, types::{AppId, X as Y}};", &[]);
        broken(
            "src/flush/worker.rs",
            "use crate::{memory::M, store::S, flush::policy, io, runtime::Tasks};",
            &[],
        );
        broken("src/client/mod.rs", "use crate::{wire, proto, types};", &[]);
    }

    #[test]
    fn groups_paths_in_code_and_ways_through_super_are_found() {
        let group =
            "use crate::{\n  types::AppId,\n  wire::{a, b::{c, d}},\n  flush::Flusher as F,\n  io,\n};";
        broken("src/store/x.rs", group, &["src/store/x.rs:4: `store` imports `flush`"]);
        broken(
            "src/io/mod.rs",
            "fn f() -> crate::store::X { crate::app::y() }",
            &["src/io/mod.rs:1: `io` imports `store`", "src/io/mod.rs:1: `io` imports `app`"],
        );
        broken(
            "src/io/disk.rs",
            "use super::super::memory::X;",
            &["src/io/disk.rs:1: `io` imports `memory`"],
        );
        broken(
            "src/io/disk.rs",
            "use super::{file, super::{wire, memory}};",
            &["src/io/disk.rs:1: `io` imports"],
        );
        let inline = "mod a { use super::super::config::C; }\nuse super::types::T;\nuse super::server::S;";
        broken(
            "src/io.rs",
            inline,
            &["src/io.rs:1: `io` imports `config`", "src/io.rs:3: `io` imports `server`"],
        );
        broken("src/io.rs", "use crate::*;", &["src/io.rs:1: `io` imports `crate::*`, which is no module"]);
    }

    #[test]
    fn submodules_named_like_a_layer_are_not_that_layer() {
        broken("src/memory/buffer.rs", "use super::store::X;", &[]);
        broken(
            "src/memory/mod.rs",
            "mod tests { use super::app::X; mod inner { use super::super::http; } }",
            &[],
        );
    }

    #[test]
    fn comments_and_literals_are_not_imports() {
        let text = r##"
            // use crate::server::X;
            /* crate::server /* crate::server */ crate::server */
            /// [`crate::server::X`]
            fn f<'a>(x: &'a str) -> char {
                g("crate::server \" crate::server", r#"crate::server " crate::server"#, b"crate::server", '"', '\'');
                let r#type = b'"';
                '}'
            }
        "##;
        broken("src/types.rs", text, &[]);
        let after = format!("{text}\nuse crate::io;");
        broken("src/types.rs", &after, &["src/types.rs:11: `types` imports `io`, which is above it"]);
    }

    #[test]
    fn the_client_is_for_tests() {
        let text = "use crate::client::Client;";
        broken("src/grpc/mod.rs", text, &["src/grpc/mod.rs:1: `grpc` imports `client`"]);
        broken("src/grpc/mod.rs", &format!("#[cfg(test)]\nmod tests {{ {text} }}"), &[]);
        broken(
            "src/grpc/mod.rs",
            &format!("#[cfg(test)]\nmod tests {{ }}\nmod other {{ {text} }}"),
            &["src/grpc"],
        );
        broken("src/grpc/tests.rs", text, &[]);
        broken(
            "src/client/mod.rs",
            "use crate::service::X;",
            &["src/client/mod.rs:1: `client` imports `service`"],
        );
    }

    #[test]
    fn binaries_use_the_library() {
        broken("src/main.rs", "use uniffle_worker::server;", &[]);
        broken(
            "src/bin/bench.rs",
            "use crate::memory::X;",
            &["src/bin/bench.rs:1: a binary says `uniffle_worker::"],
        );
        broken("src/bin/bench.rs", "mod options;\nuse crate::options::X;", &[]);
    }
}
