//! Forbids unused dependencies and dependencies that are declared twice.
//!
//! * A dependency occurs as the beginning of a path (`name::`, `use name`) in the part that it is declared for: a
//!   normal one in the product or behind the feature `testing`, a development one in tests, benches or examples, a
//!   build one in `build.rs`. Optional and renamed ones count under the name they are used by.
//! * A development dependency that repeats a normal one adds features; else it is declared twice.
//! * A dependency of several members is declared in `[workspace.dependencies]`, which contains no dependency that no
//!   member uses.

use std::collections::{BTreeMap, BTreeSet, HashSet};

use proc_macro2::{TokenStream, TokenTree};
use quote::ToTokens;

use crate::Problem;
use crate::conditions::{self, Build};
use crate::workspace::{Package, Part, SourceFile, Workspace};

/// Section of a manifest that declares a dependency.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Section {
    /// `[dependencies]`
    Normal,
    /// `[dev-dependencies]`
    Dev,
    /// `[build-dependencies]`
    Build,
}

impl Section {
    const ALL: [(Self, &'static str); 3] =
        [(Self::Normal, "dependencies"), (Self::Dev, "dev-dependencies"), (Self::Build, "build-dependencies")];

    const fn name(self) -> &'static str {
        match self {
            Self::Normal => "dependencies",
            Self::Dev => "dev-dependencies",
            Self::Build => "build-dependencies",
        }
    }
}

/// A dependency as a manifest declares it.
#[derive(Clone, Debug)]
pub struct Dependency {
    /// Key: the name of the package or the name that it is renamed to.
    pub name: String,
    /// Section that declares it.
    pub section: Section,
    /// It is inherited from `[workspace.dependencies]`.
    pub inherited: bool,
    /// Folder, if it is a path dependency.
    pub path: Option<String>,
    /// Features that it enables.
    pub features: BTreeSet<String>,
}

/// Returns all dependencies of a manifest, including target-specific ones.
#[must_use]
pub fn declared(manifest: &toml::Table) -> Vec<Dependency> {
    let targets = manifest.get("target").and_then(toml::Value::as_table);
    let tables = targets.into_iter().flatten().filter_map(|(_, target)| target.as_table());
    let mut found = Vec::new();
    for table in tables.chain([manifest]) {
        for (section, name) in Section::ALL {
            let entries = table.get(name).and_then(toml::Value::as_table);
            found.extend(entries.into_iter().flatten().map(|(name, value)| Dependency {
                name: name.clone(),
                section,
                inherited: value.get("workspace").and_then(toml::Value::as_bool) == Some(true),
                path: value.get("path").and_then(toml::Value::as_str).map(str::to_owned),
                features: features(value),
            }));
        }
    }
    found
}

fn features(value: &toml::Value) -> BTreeSet<String> {
    let list = value.get("features").and_then(toml::Value::as_array);
    list.into_iter().flatten().filter_map(toml::Value::as_str).map(str::to_owned).collect()
}

/// Returns dependencies that are unused, declared twice, or not inherited from the workspace.
#[must_use]
pub fn check(workspace: &Workspace) -> Vec<Problem> {
    let mut problems = Vec::new();
    for (id, package) in workspace.packages.iter().enumerate() {
        let used = Used::by(workspace, id);
        let declared = declared(&package.manifest);
        for dependency in &declared {
            let other = package.name != dependency.name;
            let doubled = doubled(workspace, dependency, &declared);
            if doubled {
                let name = &dependency.name;
                problems
                    .push(problem(package, format!("`{name}` is declared twice: its [dev-dependencies] add nothing")));
            } else if other && !used.contains(workspace, dependency, package) {
                let message = format!("`{}` of [{}] is not used there", dependency.name, dependency.section.name());
                problems.push(problem(package, message + used.hint(workspace, dependency)));
            }
        }
    }
    problems.extend(check_shared(workspace));
    problems
}

fn problem(package: &Package, message: String) -> Problem {
    Problem { file: package.manifest_path(), line: 1, message }
}

/// Returns `true` if a development dependency repeats a normal one without a feature that neither the normal one nor
/// the workspace asks for.
fn doubled(workspace: &Workspace, dependency: &Dependency, declared: &[Dependency]) -> bool {
    let mut normal = declared.iter().filter(|other| other.section == Section::Normal && other.name == dependency.name);
    let shared = workspace_dependencies(workspace).and_then(|table| table.get(&dependency.name)).map(features);
    let shared = shared.filter(|_| dependency.inherited).unwrap_or_default();
    dependency.section == Section::Dev
        && normal.any(|normal| {
            dependency.features.iter().all(|feature| normal.features.contains(feature) || shared.contains(feature))
        })
}

fn workspace_dependencies(workspace: &Workspace) -> Option<&toml::Table> {
    workspace.manifest.get("workspace")?.get("dependencies")?.as_table()
}

/// Checks that dependencies of several members are declared once.
fn check_shared(workspace: &Workspace) -> Vec<Problem> {
    let mut users: BTreeMap<String, Vec<(&Package, Dependency)>> = BTreeMap::new();
    for package in workspace.packages.iter().filter(|package| package.member) {
        for dependency in declared(&package.manifest) {
            // A package that enables a feature of its own for its tests has to name its own folder.
            if dependency.path.as_deref() != Some(".") {
                users.entry(dependency.name.clone()).or_default().push((package, dependency));
            }
        }
    }
    let mut problems = Vec::new();
    for (name, uses) in &users {
        let packages: BTreeSet<_> = uses.iter().map(|(package, _)| &package.name).collect();
        for (package, _) in uses.iter().filter(|(_, dependency)| packages.len() > 1 && !dependency.inherited) {
            let message = format!("`{name}` is used by several members: take it from [workspace.dependencies]");
            problems.push(problem(package, message));
        }
    }
    for name in workspace_dependencies(workspace).into_iter().flatten().map(|(name, _)| name) {
        if !users.get(name).is_some_and(|uses| uses.iter().any(|(_, dependency)| dependency.inherited)) {
            let message = format!("`{name}` of [workspace.dependencies] is used by no member");
            problems.push(Problem { file: "Cargo.toml".to_owned(), line: 1, message });
        }
    }
    problems
}

/// Names at the beginning of paths, by part of a package.
#[derive(Default)]
struct Used {
    library: HashSet<String>,
    tests: HashSet<String>,
    build: HashSet<String>,
    /// `false` for packages outside the workspace, which have one kind of dependency for everything.
    member: bool,
}

impl Used {
    fn by(workspace: &Workspace, package: usize) -> Self {
        let mut used = Self { member: workspace.packages[package].member, ..Self::default() };
        for file in workspace.files.iter().filter(|file| file.package == package) {
            let whole = file.whole.to_token_stream();
            if file.path.ends_with("/build.rs") {
                roots(whole, &mut used.build);
            } else if file.part == Part::Test || !used.member {
                roots(whole, &mut used.tests);
            } else {
                used.add_library(file);
            }
        }
        used
    }

    fn add_library(&mut self, file: &SourceFile) {
        let mut library = file.whole.clone();
        conditions::prune(&mut library, Build::Library);
        roots(library.to_token_stream(), &mut self.library);
        // Tests may also use everything in the whole file and in the library. Names that only the product uses are in
        // the normal dependencies anyway.
        roots(file.whole.to_token_stream(), &mut self.tests);
        for word in example_words(&file.text) {
            self.tests.insert(word);
        }
    }

    fn contains(&self, workspace: &Workspace, dependency: &Dependency, package: &Package) -> bool {
        let names = imported_names(workspace, &dependency.name);
        let part = match dependency.section {
            _ if !package.member => &self.tests,
            Section::Normal => &self.library,
            Section::Dev => &self.tests,
            Section::Build => &self.build,
        };
        names.iter().any(|name| part.contains(name))
    }

    fn hint(&self, workspace: &Workspace, dependency: &Dependency) -> &'static str {
        let in_tests = imported_names(workspace, &dependency.name).iter().any(|name| self.tests.contains(name));
        if self.member && dependency.section == Section::Normal && in_tests {
            ", but in tests: it belongs to [dev-dependencies]"
        } else {
            ""
        }
    }
}

/// Returns the names by which sources import a dependency: its key, or the library name for a member of the workspace.
fn imported_names(workspace: &Workspace, dependency: &str) -> Vec<String> {
    let library = workspace.packages.iter().find(|package| package.name == dependency).map(Package::library);
    library.into_iter().chain([dependency.replace('-', "_")]).collect()
}

/// Collects the identifiers that begin a path: `name::`, `use name`, `use {name, ..}`, `extern crate name`.
fn roots(tokens: TokenStream, found: &mut HashSet<String>) {
    let tokens: Vec<_> = tokens.into_iter().collect();
    let punct =
        |index: usize, wanted: char| matches!(tokens.get(index), Some(TokenTree::Punct(p)) if p.as_char() == wanted);
    let word = |index: usize, wanted: &str| matches!(tokens.get(index), Some(TokenTree::Ident(word)) if word == wanted);
    for (at, token) in tokens.iter().enumerate() {
        match token {
            TokenTree::Group(group) => {
                if at > 0 && word(at - 1, "use") {
                    found.extend(group.stream().into_iter().filter_map(|token| match token {
                        TokenTree::Ident(ident) => Some(ident.to_string()),
                        _ => None,
                    }));
                }
                roots(group.stream(), found);
            }
            TokenTree::Ident(ident) => {
                let begins =
                    at < 2 || !(punct(at - 1, ':') && punct(at - 2, ':')) || at == 2 || !is_name(&tokens[at - 3]);
                let path = punct(at + 1, ':') && punct(at + 2, ':');
                let imported = at > 0 && (word(at - 1, "use") || word(at - 1, "crate"));
                if begins && (path || imported) {
                    found.insert(ident.to_string());
                }
            }
            TokenTree::Punct(_) | TokenTree::Literal(_) => {}
        }
    }
}

fn is_name(token: &TokenTree) -> bool {
    matches!(token, TokenTree::Ident(ident) if ident != "use")
}

/// Returns the beginnings of paths in the examples of doc comments, which are compiled as tests.
fn example_words(text: &str) -> Vec<String> {
    let docs = text.lines().filter_map(|line| {
        let line = line.trim_start();
        line.strip_prefix("///").or_else(|| line.strip_prefix("//!"))
    });
    let code = docs
        .filter(|line| line.contains("::"))
        .flat_map(|line| line.split(|c: char| !(c.is_alphanumeric() || c == '_' || c == ':')));
    code.filter_map(|word| word.split_once("::")).map(|(first, _)| first.to_owned()).collect()
}
