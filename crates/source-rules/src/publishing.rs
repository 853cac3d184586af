//! Requires that crates are ready for a registry.
//!
//! * A member says `publish = false`, or has the metadata for a registry and its pages: a description, the workspace's
//!   version, edition, licence, keywords, categories and oldest compiler, and the targets that its documentation is
//!   built for.
//! * The front page of a published library has an example.
//! * A published crate depends only on published crates, and by version: a path means nothing in a registry.

use toml::{Table, Value};

use crate::Problem;
use crate::dependencies::{Section, declared};
use crate::workspace::{Package, Workspace};

/// Keys that a published crate inherits from `[workspace.package]`.
const INHERITED: [&str; 6] = ["version", "edition", "license", "keywords", "categories", "rust-version"];
/// Maximum length of a description in bytes; lists show no more.
const MAX_DESCRIPTION: usize = 150;
/// Maximum number of keywords on crates.io, and their maximum length.
const MAX_KEYWORDS: usize = 5;
const MAX_KEYWORD: usize = 20;
/// Maximum number of lines of an example on the front page of a library.
const MAX_EXAMPLE: usize = 30;

/// Returns members that a registry would refuse, or whose pages would lack information.
#[must_use]
pub fn check(workspace: &Workspace) -> Vec<Problem> {
    let mut problems = shared(workspace);
    for package in workspace.packages.iter().filter(|package| package.member && is_published(package)) {
        let lacks = lacks(workspace, package);
        problems.extend(lacks.into_iter().map(|message| Problem { file: package.manifest_path(), line: 1, message }));
        problems.extend(front_page(workspace, package));
    }
    problems
}

/// Returns a problem if a library has no example on its front page, or only long ones.
fn front_page(workspace: &Workspace, package: &Package) -> Option<Problem> {
    let roots = package.roots.iter().filter_map(|&root| workspace.files.get(root));
    let library = roots.into_iter().find(|file| file.path.ends_with("src/lib.rs"))?;
    let short = examples(&library.text).iter().any(|lines| (1..=MAX_EXAMPLE).contains(lines));
    (!short).then(|| Problem {
        file: library.path.clone(),
        line: 1,
        message: format!("the front page has no example of at most {MAX_EXAMPLE} lines"),
    })
}

/// Returns the number of lines of each Rust example on the front page. Lines that rustdoc hides do not count.
fn examples(library: &str) -> Vec<usize> {
    let mut lengths = Vec::new();
    let mut example: Option<usize> = None;
    for line in library.lines().filter_map(|line| line.strip_prefix("//!")).map(str::trim) {
        let fence = line.strip_prefix("```");
        example = match (example, fence) {
            (None, Some(kind)) if !kind.contains("text") => Some(0),
            (None, _) => None,
            (Some(length), Some(_)) => {
                lengths.push(length);
                None
            }
            (Some(length), None) => Some(if line.starts_with("# ") { length } else { length + 1 }),
        };
    }
    lengths
}

fn is_published(package: &Package) -> bool {
    entry(&package.manifest, &["package", "publish"]).and_then(Value::as_bool) != Some(false)
}

fn entry<'a>(table: &'a Table, path: &[&str]) -> Option<&'a Value> {
    let (first, rest) = path.split_first()?;
    rest.iter().try_fold(table.get(*first)?, |value, key| value.get(key))
}

/// Returns problems of the keys that all members share.
fn shared(workspace: &Workspace) -> Vec<Problem> {
    let of = |key| entry(&workspace.manifest, &["workspace", "package", key]);
    let mut wrong: Vec<_> = INHERITED.into_iter().filter(|key| of(key).is_none()).map(str::to_owned).collect();
    let keywords: Vec<_> = of("keywords").and_then(Value::as_array).into_iter().flatten().collect();
    let short = |keyword: &&Value| keyword.as_str().is_some_and(|keyword| keyword.len() <= MAX_KEYWORD);
    if keywords.len() > MAX_KEYWORDS || !keywords.iter().all(short) {
        wrong.push(format!("at most {MAX_KEYWORDS} keywords of at most {MAX_KEYWORD} bytes as"));
    }
    let problem = |what| Problem {
        file: "Cargo.toml".to_owned(),
        line: 1,
        message: format!("[workspace.package] has no {what}"),
    };
    wrong.into_iter().map(problem).collect()
}

fn lacks(workspace: &Workspace, package: &Package) -> Vec<String> {
    let mut found = Vec::new();
    for key in INHERITED {
        if entry(&package.manifest, &["package", key, "workspace"]).and_then(Value::as_bool) != Some(true) {
            found.push(format!("`{key}.workspace = true` is missing, or `publish = false`"));
        }
    }
    let description = entry(&package.manifest, &["package", "description"]).and_then(Value::as_str);
    if !description.is_some_and(|text| (1..=MAX_DESCRIPTION).contains(&text.len())) {
        found.push(format!("a description of at most {MAX_DESCRIPTION} bytes is missing"));
    }
    let targets = entry(&package.manifest, &["package", "metadata", "docs", "rs", "targets"]);
    if targets.and_then(Value::as_array).is_none_or(Vec::is_empty) {
        found.push(
            "`[package.metadata.docs.rs] targets` is missing: docs.rs tries systems that it is not for".to_owned(),
        );
    }
    for dependency in declared(&package.manifest) {
        let other = workspace.packages.iter().find(|other| other.name == dependency.name);
        // A package that enables its own feature for tests names its own folder, which is omitted when it is published.
        let Some(other) = other.filter(|other| other.name != package.name) else { continue };
        let name = &dependency.name;
        let versions = &workspace.manifest;
        if !is_published(other) && dependency.section != Section::Dev {
            found.push(format!("`{name}` is not published"));
        }
        let version = entry(versions, &["workspace", "dependencies", name, "version"]);
        if version.is_none() || version != entry(versions, &["workspace", "package", "version"]) {
            found.push(format!(
                "`{name}` of [workspace.dependencies] needs the version of the workspace beside its path"
            ));
        }
    }
    found
}
