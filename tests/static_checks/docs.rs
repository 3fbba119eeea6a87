//! Links and citations in documents and sources resolve: pages, anchors and section numbers. The
//! README is short.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Component, Path, PathBuf};

/// Bound on the lines of the README.
const README_LINES_MAX: usize = 200;

/// Headings of a page, as anchors and as section numbers.
#[derive(Debug, Default)]
struct Page {
    anchors: BTreeSet<String>,
    sections: BTreeSet<String>,
}

#[test]
fn links_and_citations_resolve() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let mut files = BTreeMap::new();
    read_tree(root, root, &mut files);
    let is_page = |path: &Path| path.extension().is_some_and(|extension| extension == "md");
    let pages: BTreeMap<&Path, Page> = files
        .iter()
        .filter(|(path, _)| is_page(path))
        .map(|(path, text)| (path.as_path(), page(text)))
        .collect();
    assert!(
        pages.len() > 10 && files.len() > 100,
        "found only {} pages and {} files: the search is broken",
        pages.len(),
        files.len()
    );

    let mut broken = Vec::new();
    for (path, text) in &files {
        for (number, line) in text.lines().enumerate() {
            let mut say = |what: String| broken.push(format!("{}:{}: {what}", path.display(), number + 1));
            if is_page(path) {
                links(line)
                    .filter(|link| !resolves(root, &pages, path, link))
                    .for_each(|link| say(format!("link {link}")));
            }
            for (cited, sections) in citations(line) {
                match pages.get(Path::new(cited)) {
                    None => say(format!("{cited} does not exist")),
                    Some(page) => sections
                        .iter()
                        .filter(|section| !page.sections.contains(**section))
                        .for_each(|section| say(format!("{cited} has no §{section}"))),
                }
            }
        }
    }
    assert!(broken.is_empty(), "broken links:\n{}\n", broken.join("\n"));
}

#[test]
fn readme_is_short() {
    let lines =
        std::fs::read_to_string(concat!(env!("CARGO_MANIFEST_DIR"), "/README.md")).unwrap().lines().count();
    assert!(lines <= README_LINES_MAX, "README.md has {lines} lines, {README_LINES_MAX} are allowed");
}

/// Reads text files, without build output and the files of Git, by path below the root.
pub(super) fn read_tree(root: &Path, dir: &Path, files: &mut BTreeMap<PathBuf, String>) {
    for entry in std::fs::read_dir(dir).unwrap() {
        let entry = entry.unwrap();
        let (path, name) = (entry.path(), entry.file_name());
        if name == "target" || name == ".git" {
            continue;
        }
        if entry.file_type().unwrap().is_dir() {
            read_tree(root, &path, files);
        } else if let Ok(text) = std::fs::read_to_string(&path) {
            files.insert(path.strip_prefix(root).expect("the file is below the root").to_owned(), text);
        }
    }
}

fn page(text: &str) -> Page {
    let mut page = Page::default();
    let mut in_code = false;
    for line in text.lines() {
        in_code ^= line.starts_with("```");
        let title = line.trim_start_matches('#');
        if in_code || title.len() == line.len() || !title.starts_with(' ') {
            continue;
        }
        page.anchors.insert(anchor(title.trim()));
        let first = title.trim().split(' ').next().unwrap_or_default();
        page.sections.insert(first.trim_end_matches('.').to_owned());
    }
    page
}

/// Returns the anchors of a page.
pub(super) fn anchors(text: &str) -> BTreeSet<String> {
    page(text).anchors
}

/// Returns a heading's anchor, as GitHub generates it.
fn anchor(title: &str) -> String {
    let kept = title
        .to_lowercase()
        .chars()
        .filter(|c| c.is_alphanumeric() || matches!(c, ' ' | '-' | '_'))
        .collect::<String>();
    kept.replace(' ', "-")
}

/// Returns the targets of a line's relative Markdown links.
fn links(line: &str) -> impl Iterator<Item = &str> {
    let targets = line.split("](").skip(1).filter_map(|rest| rest.split_once(')')).map(|(target, _)| target);
    targets.filter(|target| !target.contains("://") && !target.contains(' ') && !target.is_empty())
}

fn resolves(root: &Path, pages: &BTreeMap<&Path, Page>, from: &Path, link: &str) -> bool {
    let (file, anchor) = link.split_once('#').map_or((link, None), |(file, anchor)| (file, Some(anchor)));
    let mut path = PathBuf::new();
    let joined =
        if file.is_empty() { from.to_owned() } else { from.parent().unwrap_or(Path::new("")).join(file) };
    for part in joined.components() {
        match part {
            Component::ParentDir => drop(path.pop()),
            part => path.push(part),
        }
    }
    match anchor {
        None => root.join(&path).exists(),
        Some(anchor) => pages.get(path.as_path()).is_some_and(|page| page.anchors.contains(anchor)),
    }
}

/// Returns each page cited in a line with its sections, as in ` §1.2, §3`.
fn citations(line: &str) -> impl Iterator<Item = (&str, Vec<&str>)> {
    line.match_indices("docs/").filter_map(|(start, _)| {
        let rest = &line[start..];
        let end = rest.find(|c: char| !(c.is_ascii_alphanumeric() || matches!(c, '/' | '-' | '_' | '.')))?;
        let name = rest[..end].strip_suffix('.').unwrap_or(&rest[..end]);
        let is_ours = name.ends_with(".md") && !name.contains("..");
        let is_whole = !line[..start].ends_with(|c: char| c.is_ascii_alphanumeric() || c == '/');
        (is_ours && is_whole).then(|| (name, sections(&rest[end..])))
    })
}

/// Returns the sections directly after a page: ` §4.5, §4.7` and ` §10.2 and §10.6`.
fn sections(mut rest: &str) -> Vec<&str> {
    let mut sections = Vec::new();
    while let Some(start) = [" §", ", §", " and §", "–§"].iter().find_map(|lead| rest.strip_prefix(lead))
    {
        let end = start.find(|c: char| !(c.is_ascii_alphanumeric() || c == '.')).unwrap_or(start.len());
        sections.push(start[..end].trim_end_matches('.'));
        rest = &start[end..];
    }
    sections
}
