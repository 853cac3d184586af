//! Finds the packages of a tree and their source files, and determines which of those are product.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::fs;
use std::ops::RangeInclusive;
use std::path::Path;

use anyhow::{Context, Result};
use syn::{Expr, Item, Lit, Meta};

use crate::conditions::{self, Build};
use crate::config::Config;

/// Rust sources, manifests and documents: text by path from the root, with `/` between folders.
#[derive(Clone, Debug, Default)]
pub struct Tree(BTreeMap<String, String>);

impl Tree {
    /// Reads the tree of a repository.
    ///
    /// # Errors
    ///
    /// A folder or file cannot be read, or is not UTF-8.
    pub fn read(root: &Path, config: &Config) -> Result<Self> {
        let mut tree = Self::default();
        tree.read_folder(root, "", config)?;
        Ok(tree)
    }

    /// Creates a tree of these files, for tests.
    #[must_use]
    pub fn of(files: &[(&str, &str)]) -> Self {
        Self(files.iter().map(|(path, text)| ((*path).to_owned(), (*text).to_owned())).collect())
    }

    fn read_folder(&mut self, folder: &Path, prefix: &str, config: &Config) -> Result<()> {
        for entry in fs::read_dir(folder).with_context(|| folder.display().to_string())? {
            let entry = entry?;
            let name = entry.file_name().to_string_lossy().into_owned();
            let path = format!("{prefix}{name}");
            if entry.file_type()?.is_dir() {
                if !name.starts_with('.') && !config.skipped_folders.contains(&name.as_str()) {
                    self.read_folder(&entry.path(), &format!("{path}/"), config)?;
                }
            } else if name == "Cargo.toml" || name.ends_with(".rs") || name.ends_with(".md") {
                let text = fs::read_to_string(entry.path()).with_context(|| path.clone())?;
                self.0.insert(path, text);
            }
        }
        Ok(())
    }
}

/// Purpose of a file.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub enum Part {
    /// Part of the program or library that users run.
    Product,
    /// Test support for this and other crates.
    Testing,
    /// Part of the tests of its own package only.
    Test,
}

/// A parsed source file.
#[derive(Debug)]
pub struct SourceFile {
    /// Path from the root.
    pub path: String,
    /// Index of its package in [`Workspace::packages`].
    pub package: usize,
    /// Purpose of the file.
    pub part: Part,
    /// Source text.
    pub text: String,
    /// Complete syntax tree.
    pub whole: syn::File,
    /// Syntax tree of a build without tests and without the feature `testing`.
    pub product: syn::File,
    /// Lines that [`Self::product`] lacks.
    pub pruned: Vec<RangeInclusive<usize>>,
}

impl SourceFile {
    /// Returns `true` if the line, counted from 1, belongs to the product.
    #[must_use]
    pub fn is_product_line(&self, line: usize) -> bool {
        self.part == Part::Product && !self.pruned.iter().any(|range| range.contains(&line))
    }
}

/// A package: a folder with a manifest.
#[derive(Debug)]
pub struct Package {
    /// Name in the manifest.
    pub name: String,
    /// Folder from the root, without a slash at the end; empty for the root.
    pub folder: String,
    /// `false` for packages beside the workspace, such as those of fuzz targets.
    pub member: bool,
    /// Parsed manifest.
    pub manifest: toml::Table,
    /// Root files of its library and programs: indices of [`Workspace::files`].
    pub roots: Vec<usize>,
}

impl Package {
    /// Returns the name under which other crates import its library.
    #[must_use]
    pub fn library(&self) -> String {
        let named = self.manifest.get("lib").and_then(|lib| lib.get("name")).and_then(toml::Value::as_str);
        named.unwrap_or(&self.name).replace('-', "_")
    }

    /// Returns the path of its manifest from the root.
    #[must_use]
    pub fn manifest_path(&self) -> String {
        join(&self.folder, "Cargo.toml")
    }
}

/// A parsed repository.
#[derive(Debug)]
pub struct Workspace {
    /// Settings that the repository was parsed with.
    pub config: Config,
    /// Manifest at the root.
    pub manifest: toml::Table,
    /// All packages, sorted by folder.
    pub packages: Vec<Package>,
    /// All source files, sorted by path.
    pub files: Vec<SourceFile>,
    /// Text of all Markdown documents by path.
    pub documents: Vec<(String, String)>,
    by_path: HashMap<String, usize>,
}

impl Workspace {
    /// Parses all sources of a tree.
    ///
    /// # Errors
    ///
    /// A manifest or a source file cannot be parsed, or a member has no manifest.
    pub fn parse(tree: Tree, config: Config) -> Result<Self> {
        let manifest = tree.0.get("Cargo.toml").context("no Cargo.toml at the root")?.parse::<toml::Table>()?;
        let mut packages = find_packages(&tree, &manifest)?;
        let (mut files, mut documents) = (Vec::new(), Vec::new());
        for (path, text) in tree.0 {
            if path.ends_with(".md") {
                documents.push((path, text));
                continue;
            }
            let Some(package) = owner(&packages, &path) else { continue };
            if path.ends_with(".rs") {
                files.push(parse_file(path, text, package)?);
            }
        }
        let by_path: HashMap<_, _> = files.iter().enumerate().map(|(id, file)| (file.path.clone(), id)).collect();
        for package in &mut packages {
            package.roots = find_roots(package, &by_path);
        }
        let mut workspace = Self { config, manifest, packages, files, documents, by_path };
        workspace.assign_parts();
        Ok(workspace)
    }

    /// Reads and parses the repository in a folder.
    ///
    /// # Errors
    ///
    /// See [`Tree::read`] and [`Self::parse`].
    pub fn read(root: &Path, config: Config) -> Result<Self> {
        Self::parse(Tree::read(root, &config)?, config)
    }

    /// Returns the product files with their indices.
    pub fn product(&self) -> impl Iterator<Item = (usize, &SourceFile)> {
        self.files.iter().enumerate().filter(|(_, file)| file.part == Part::Product)
    }

    /// Returns the file of a module that `file` declares with `mod name;`, inside the inline modules `inline`.
    #[must_use]
    pub fn module_file(&self, file: usize, inline: &[String], module: &syn::ItemMod) -> Option<usize> {
        let path = &self.files[file].path;
        let (folder, name) = path.rsplit_once('/').unwrap_or(("", path));
        if let Some(explicit) = path_attribute(&module.attrs) {
            return self.by_path.get(&normalize(&join(folder, &explicit))).copied();
        }
        let owns_folder = name == "mod.rs" || self.packages.iter().any(|package| package.roots.contains(&file));
        let mut folder =
            if owns_folder { folder.to_owned() } else { join(folder, name.strip_suffix(".rs").unwrap_or(name)) };
        for part in inline {
            folder = join(&folder, part);
        }
        let name = module.ident.to_string();
        let name = name.strip_prefix("r#").unwrap_or(&name);
        let candidates = [join(&folder, &format!("{name}.rs")), join(&folder, &format!("{name}/mod.rs"))];
        candidates.iter().find_map(|path| self.by_path.get(path).copied())
    }

    /// Determines the purpose of each file by its path and by the `cfg` of the `mod` that declares it.
    fn assign_parts(&mut self) {
        let mut product = BTreeSet::new();
        let mut library = BTreeSet::new();
        for root in self.packages.iter().flat_map(|package| package.roots.clone()) {
            self.reach(root, Build::Product, &mut product);
            self.reach(root, Build::Library, &mut library);
        }
        for id in 0..self.files.len() {
            let by_module = if product.contains(&id) {
                Part::Product
            } else if library.contains(&id) {
                Part::Testing
            } else {
                Part::Test
            };
            let file = &self.files[id];
            let by_place = place(&file.path, &self.packages[file.package], &self.config);
            self.files[id].part = by_module.max(by_place);
        }
    }

    /// Collects the files that a build contains, starting at a root.
    fn reach(&self, file: usize, build: Build, reached: &mut BTreeSet<usize>) {
        if reached.insert(file) {
            self.reach_items(file, &self.files[file].whole.items, &mut Vec::new(), build, reached);
        }
    }

    fn reach_items(
        &self,
        file: usize,
        items: &[Item],
        inline: &mut Vec<String>,
        build: Build,
        reached: &mut BTreeSet<usize>,
    ) {
        for item in items {
            let Item::Mod(module) = item else { continue };
            if !build.contains(&module.attrs) {
                continue;
            }
            if let Some((_, items)) = &module.content {
                inline.push(module.ident.to_string());
                self.reach_items(file, items, inline, build, reached);
                inline.pop();
            } else if let Some(child) = self.module_file(file, inline, module) {
                self.reach(child, build, reached);
            }
        }
    }
}

/// Returns the value of `#[path = ".."]`.
#[must_use]
pub fn path_attribute(attributes: &[syn::Attribute]) -> Option<String> {
    attributes.iter().find_map(|attribute| {
        let Meta::NameValue(pair) = &attribute.meta else { return None };
        let Expr::Lit(value) = &pair.value else { return None };
        let Lit::Str(value) = &value.lit else { return None };
        pair.path.is_ident("path").then(|| value.value())
    })
}

/// Returns the purpose of a file as far as its path alone tells.
fn place(path: &str, package: &Package, config: &Config) -> Part {
    let inside = path.strip_prefix(package.folder.as_str()).unwrap_or(path).trim_start_matches('/');
    let (folders, name) = inside.rsplit_once('/').unwrap_or(("", inside));
    let mut folders = package.folder.split('/').chain(folders.split('/'));
    let stem = name.strip_suffix(".rs").unwrap_or(name);
    if stem == "tests" || stem.ends_with("_tests") || folders.clone().any(|part| config.test_folders.contains(&part)) {
        Part::Test
    } else if folders.any(|part| config.testing_folders.contains(&part)) || config.testing_folders.contains(&stem) {
        Part::Testing
    } else {
        Part::Product
    }
}

fn parse_file(path: String, text: String, package: usize) -> Result<SourceFile> {
    let whole = syn::parse_file(&text).with_context(|| path.clone())?;
    let mut product = whole.clone();
    let pruned = conditions::prune(&mut product, Build::Product);
    Ok(SourceFile { path, package, part: Part::Product, text, whole, product, pruned })
}

/// Returns the package that a file belongs to: the one in the innermost folder.
fn owner(packages: &[Package], path: &str) -> Option<usize> {
    let inside = |package: &&(usize, &Package)| {
        let folder = &package.1.folder;
        folder.is_empty() || path.strip_prefix(folder.as_str()).is_some_and(|rest| rest.starts_with('/'))
    };
    let all: Vec<_> = packages.iter().enumerate().collect();
    all.iter().filter(inside).max_by_key(|(_, package)| package.folder.len()).map(|(id, _)| *id)
}

fn find_packages(tree: &Tree, root: &toml::Table) -> Result<Vec<Package>> {
    let members = root.get("workspace").and_then(|table| table.get("members")).and_then(toml::Value::as_array);
    let members: Vec<_> = members.into_iter().flatten().filter_map(toml::Value::as_str).collect();
    let mut packages = Vec::new();
    for (path, text) in &tree.0 {
        let Some(folder) = path.strip_suffix("Cargo.toml") else { continue };
        let folder = folder.trim_end_matches('/').to_owned();
        let manifest = text.parse::<toml::Table>().with_context(|| path.clone())?;
        let name = manifest.get("package").and_then(|package| package.get("name")).and_then(toml::Value::as_str);
        let Some(name) = name.map(str::to_owned) else { continue };
        let member = folder.is_empty() || members.iter().any(|member| matches(member, &folder));
        packages.push(Package { name, folder, member, manifest, roots: Vec::new() });
    }
    for member in members {
        let found = packages.iter().any(|package| matches(member, &package.folder));
        anyhow::ensure!(found || member.contains('*'), "the member {member} has no manifest");
    }
    Ok(packages)
}

/// Returns `true` if an entry of `members` matches the folder; `*` stands for one folder name or the end of one.
fn matches(pattern: &str, folder: &str) -> bool {
    let (pattern, folder) = (pattern.trim_matches('/').split('/'), folder.split('/'));
    pattern.clone().count() == folder.clone().count()
        && pattern.zip(folder).all(|(pattern, name)| match pattern.split_once('*') {
            Some((start, end)) => name.starts_with(start) && name.ends_with(end),
            None => pattern == name,
        })
}

fn find_roots(package: &Package, by_path: &HashMap<String, usize>) -> Vec<usize> {
    let mut paths = vec!["src/lib.rs".to_owned(), "src/main.rs".to_owned(), "build.rs".to_owned()];
    let named = |target: &toml::Value| target.get("path").and_then(toml::Value::as_str).map(str::to_owned);
    paths.extend(package.manifest.get("lib").and_then(named));
    let programs = package.manifest.get("bin").and_then(toml::Value::as_array);
    paths.extend(programs.into_iter().flatten().filter_map(named));
    let mut roots: BTreeSet<_> =
        paths.iter().filter_map(|path| by_path.get(&join(&package.folder, path)).copied()).collect();
    let programs = join(&package.folder, "src/bin/");
    roots.extend(by_path.iter().filter_map(|(path, id)| {
        let program = path.strip_prefix(&programs)?;
        (!program.contains('/') || program.matches('/').count() == 1 && program.ends_with("/main.rs")).then_some(*id)
    }));
    roots.into_iter().collect()
}

fn join(folder: &str, name: &str) -> String {
    if folder.is_empty() { name.to_owned() } else { format!("{folder}/{name}") }
}

/// Returns the path without `.` and `..`.
fn normalize(path: &str) -> String {
    let mut parts = Vec::new();
    for part in path.split('/') {
        match part {
            "." | "" => {}
            ".." => {
                parts.pop();
            }
            part => parts.push(part),
        }
    }
    parts.join("/")
}
