//! The modules of all crates with their declarations and imports, and the resolution of paths in them.
//!
//! This is a resolver for names, not for types. It follows `use` with groups, renames and globs, `self`, `super` and
//! `crate`, re-exports through any number of modules and crates, enum variants, type aliases, and macros. It does not
//! resolve methods and fields and ignores visibility. For a name with several meanings (a module and a function) it
//! returns all of them.

use std::collections::{HashMap, HashSet};

use proc_macro2::TokenStream;
use syn::ext::IdentExt;
use syn::{Item, UseTree, Visibility};

use crate::tokens;
use crate::workspace::{Part, Workspace};

/// Index of a module in [`Modules`].
pub type ModuleId = usize;

/// Possible meaning of a path.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Target {
    /// A module of the workspace.
    Module(ModuleId),
    /// An item of the workspace, or a part of one: a variant, an associated function.
    Item(ItemId),
    /// A path into a crate outside the workspace, starting with the name of the crate.
    External(Vec<String>),
}

/// An item of the workspace.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct ItemId {
    /// Index of the file that defines it.
    pub file: usize,
    /// Name at the definition.
    pub name: String,
    kind: Kind,
}

#[derive(Clone, PartialEq, Eq, Debug)]
enum Kind {
    Module(ModuleId),
    Enum(Vec<String>),
    Alias(ModuleId, Vec<String>),
    Type,
    Value,
    Macro,
}

/// One name that a `use` imports.
#[derive(Clone, Debug)]
pub struct Import {
    /// Complete path.
    pub path: Vec<String>,
    /// Name after renaming; `None` for `_` and globs.
    pub name: Option<String>,
    /// The path ends in `*`.
    pub glob: bool,
    /// Other modules can import it from here.
    pub reexport: bool,
    /// Line of the last name.
    pub line: usize,
}

#[derive(Debug)]
struct Module {
    package: usize,
    root: ModuleId,
    parent: Option<ModuleId>,
    file: usize,
    items: HashMap<String, Vec<ItemId>>,
    imports: Vec<Import>,
    /// Names in macro calls between the items: the macro may have defined an item of this name.
    from_macros: HashSet<String>,
}

/// All modules of the product.
#[derive(Debug)]
pub struct Modules<'w> {
    workspace: &'w Workspace,
    modules: Vec<Module>,
    /// Root modules, each with the file that it begins in.
    roots: Vec<ModuleId>,
    /// Root modules of libraries by the name under which other crates import them.
    libraries: HashMap<String, ModuleId>,
    /// Names that refer to a crate, by package.
    externals: Vec<HashSet<String>>,
    /// Macros by crate and name; after their definition they are visible without a path.
    macros: HashMap<(ModuleId, String), Vec<ItemId>>,
}

type Visited = HashSet<(ModuleId, String)>;

impl<'w> Modules<'w> {
    /// Collects the modules of all libraries and programs.
    #[must_use]
    pub fn of(workspace: &'w Workspace) -> Self {
        let externals = workspace.packages.iter().map(|package| external_crates(&package.manifest)).collect();
        let (roots, libraries, macros) = Default::default();
        let mut modules = Self { workspace, modules: Vec::new(), roots, libraries, externals, macros };
        for (id, package) in workspace.packages.iter().enumerate() {
            for &file in &package.roots {
                if workspace.files[file].part != Part::Product {
                    continue;
                }
                let root = modules.add(id, None, file);
                modules.roots.push(root);
                let path = &workspace.files[file].path;
                if !path.ends_with("/main.rs") && !path.contains("/bin/") && !path.ends_with("build.rs") {
                    modules.libraries.insert(package.library(), root);
                }
                modules.collect(root, &workspace.files[file].product.items, &mut Vec::new());
            }
        }
        modules
    }

    /// Returns the root modules of all libraries and programs.
    #[must_use]
    pub fn roots(&self) -> &[ModuleId] {
        &self.roots
    }

    /// Returns the file that contains a module.
    #[must_use]
    pub fn file(&self, module: ModuleId) -> usize {
        self.modules[module].file
    }

    /// Returns the child module of this name.
    #[must_use]
    pub fn child(&self, module: ModuleId, name: &str) -> Option<ModuleId> {
        self.modules[module].items.get(name)?.iter().find_map(|item| match item.kind {
            Kind::Module(child) => Some(child),
            _ => None,
        })
    }

    /// Resolves a path in a module. The result is empty for names that are not known here: local variables, type
    /// parameters, names of the prelude.
    #[must_use]
    pub fn resolve(&self, module: ModuleId, path: &[String]) -> Vec<Target> {
        self.resolve_from(module, path, &mut Visited::new())
    }

    /// Resolves a macro that is called without a path.
    #[must_use]
    pub fn resolve_macro(&self, module: ModuleId, name: &str) -> Vec<Target> {
        let is_macro = |target: &Target| match target {
            Target::Item(item) => item.kind == Kind::Macro,
            Target::External(_) => true,
            Target::Module(_) => false,
        };
        let by_path: Vec<_> = self.resolve(module, &[name.to_owned()]).into_iter().filter(is_macro).collect();
        if !by_path.is_empty() {
            return by_path;
        }
        let textual = self.macros.get(&(self.modules[module].root, name.to_owned()));
        let textual = textual.map_or(&[][..], Vec::as_slice);
        // The nearest definition counts, and a definition in the same file is the nearest.
        let here = textual.iter().find(|item| item.file == self.modules[module].file);
        here.or_else(|| textual.first()).cloned().map(Target::Item).into_iter().collect()
    }

    fn resolve_from(&self, module: ModuleId, path: &[String], visited: &mut Visited) -> Vec<Target> {
        let Some((first, mut rest)) = path.split_first() else { return Vec::new() };
        let mut targets = match first.as_str() {
            "crate" | "$crate" => vec![Target::Module(self.modules[module].root)],
            "self" => vec![Target::Module(module)],
            "super" => {
                let mut parent = self.modules[module].parent;
                while let Some((_, tail)) = rest.split_first().filter(|(next, _)| *next == "super") {
                    rest = tail;
                    parent = parent.and_then(|parent| self.modules[parent].parent);
                }
                parent.map(Target::Module).into_iter().collect()
            }
            // A path that begins with `::`.
            "" => {
                let Some((name, tail)) = rest.split_first() else { return Vec::new() };
                rest = tail;
                self.external(module, name)
            }
            name => match self.lookup(module, name, visited) {
                found if found.is_empty() => self.external(module, name),
                found => found,
            },
        };
        for name in rest {
            targets = targets.into_iter().flat_map(|target| self.step(target, name, visited)).collect();
        }
        targets
    }

    /// Resolves a name inside the target found so far.
    fn step(&self, target: Target, name: &str, visited: &mut Visited) -> Vec<Target> {
        match target {
            Target::Module(module) => self.lookup(module, name, visited),
            Target::External(mut path) => {
                path.push(name.to_owned());
                vec![Target::External(path)]
            }
            Target::Item(item) => match &item.kind {
                Kind::Value | Kind::Macro => Vec::new(),
                Kind::Alias(module, path) => {
                    let behind = self.resolve_from(*module, path, visited);
                    let behind = behind.into_iter().filter(|target| matches!(target, Target::External(_)));
                    let mut targets: Vec<_> = behind.flat_map(|target| self.step(target, name, visited)).collect();
                    targets.push(Target::Item(item));
                    targets
                }
                _ => vec![Target::Item(item)],
            },
        }
    }

    /// Resolves a name in a module: an item, else an import, else an item behind a glob.
    fn lookup(&self, module: ModuleId, name: &str, visited: &mut Visited) -> Vec<Target> {
        let own = &self.modules[module];
        let items = own.items.get(name).into_iter().flatten().cloned();
        let mut found: Vec<_> = items.map(Target::from).collect();
        if !visited.insert((module, name.to_owned())) {
            return found;
        }
        for import in own.imports.iter().filter(|import| import.name.as_deref() == Some(name)) {
            found.extend(self.resolve_from(module, &import.path, visited));
        }
        if found.is_empty() {
            for import in own.imports.iter().filter(|import| import.glob) {
                found.extend(self.behind_glob(module, &import.path, name, visited));
            }
        }
        if found.is_empty() && own.from_macros.contains(name) {
            found.push(Target::Item(ItemId { file: own.file, name: name.to_owned(), kind: Kind::Type }));
        }
        visited.remove(&(module, name.to_owned()));
        found.dedup();
        found
    }

    fn behind_glob(&self, module: ModuleId, path: &[String], name: &str, visited: &mut Visited) -> Vec<Target> {
        let key = (module, format!("{}::*", path.join("::")));
        if !visited.insert(key.clone()) {
            return Vec::new();
        }
        let mut found = Vec::new();
        for target in self.resolve_from(module, path, visited) {
            match target {
                Target::Module(module) => found.extend(self.lookup(module, name, visited)),
                Target::External(mut path) => {
                    path.push(name.to_owned());
                    found.push(Target::External(path));
                }
                Target::Item(item) => {
                    if matches!(&item.kind, Kind::Enum(variants) if variants.iter().any(|variant| variant == name)) {
                        found.push(Target::Item(item));
                    }
                }
            }
        }
        visited.remove(&key);
        found
    }

    /// Returns the crate of this name.
    fn external(&self, module: ModuleId, name: &str) -> Vec<Target> {
        let package = self.modules[module].package;
        let own = self.workspace.packages[package].library() == name;
        if !own && !self.externals[package].contains(name) {
            return Vec::new();
        }
        match self.libraries.get(name) {
            Some(root) => vec![Target::Module(*root)],
            None => vec![Target::External(vec![name.to_owned()])],
        }
    }

    fn add(&mut self, package: usize, parent: Option<ModuleId>, file: usize) -> ModuleId {
        let id = self.modules.len();
        let root = parent.map_or(id, |parent| self.modules[parent].root);
        let (items, imports, from_macros) = Default::default();
        self.modules.push(Module { package, root, parent, file, items, imports, from_macros });
        id
    }

    fn define(&mut self, module: ModuleId, name: &syn::Ident, kind: Kind) {
        let file = self.modules[module].file;
        let name = name.unraw().to_string();
        let items = self.modules[module].items.entry(name.clone()).or_default();
        items.push(ItemId { file, name, kind });
    }

    fn collect(&mut self, module: ModuleId, items: &[Item], inline: &mut Vec<String>) {
        for item in items {
            match item {
                Item::Const(item) => self.define(module, &item.ident, Kind::Value),
                Item::Enum(item) => {
                    let variants = item.variants.iter().map(|variant| variant.ident.to_string()).collect();
                    self.define(module, &item.ident, Kind::Enum(variants));
                }
                Item::ExternCrate(item) => {
                    let path = vec![String::new(), item.ident.to_string()];
                    let name = item.rename.as_ref().map_or(&item.ident, |(_, name)| name).to_string();
                    let line = item.ident.span().start().line;
                    let import = Import { path, name: Some(name), glob: false, reexport: false, line };
                    self.modules[module].imports.push(import);
                }
                Item::Fn(item) => self.define(module, &item.sig.ident, Kind::Value),
                Item::ForeignMod(block) => self.collect_foreign(module, block),
                Item::Macro(item) => self.collect_macro(module, item),
                Item::Mod(item) => self.collect_module(module, item, inline),
                Item::Static(item) => self.define(module, &item.ident, Kind::Value),
                Item::Struct(item) => self.define(module, &item.ident, Kind::Type),
                Item::Trait(item) => self.define(module, &item.ident, Kind::Type),
                Item::TraitAlias(item) => self.define(module, &item.ident, Kind::Type),
                Item::Type(item) => {
                    let kind = match &*item.ty {
                        syn::Type::Path(path) => Kind::Alias(module, segments(&path.path)),
                        _ => Kind::Type,
                    };
                    self.define(module, &item.ident, kind);
                }
                Item::Union(item) => self.define(module, &item.ident, Kind::Type),
                Item::Use(item) => self.modules[module].imports.extend(imports(item)),
                _ => {}
            }
        }
    }

    fn collect_foreign(&mut self, module: ModuleId, block: &syn::ItemForeignMod) {
        for item in &block.items {
            match item {
                syn::ForeignItem::Fn(item) => self.define(module, &item.sig.ident, Kind::Value),
                syn::ForeignItem::Static(item) => self.define(module, &item.ident, Kind::Value),
                syn::ForeignItem::Type(item) => self.define(module, &item.ident, Kind::Type),
                _ => {}
            }
        }
    }

    fn collect_macro(&mut self, module: ModuleId, item: &syn::ItemMacro) {
        let Some(name) = &item.ident else {
            // A macro call. The items that it defines are unknown; their names occur in the call or in the macro.
            let mut names = HashSet::new();
            tokens::identifiers(&item.mac.tokens, &mut names);
            self.modules[module].from_macros.extend(names);
            return;
        };
        self.define(module, name, Kind::Macro);
        self.modules[module].from_macros.extend(declared_names(item.mac.tokens.clone()));
        let root = self.modules[module].root;
        let id = ItemId { file: self.modules[module].file, name: name.to_string(), kind: Kind::Macro };
        if item.attrs.iter().any(|attribute| attribute.path().is_ident("macro_export")) && module != root {
            self.modules[root].items.entry(name.to_string()).or_default().push(id.clone());
        }
        self.macros.entry((root, name.to_string())).or_default().push(id);
    }

    fn collect_module(&mut self, module: ModuleId, item: &syn::ItemMod, inline: &mut Vec<String>) {
        let package = self.modules[module].package;
        let file = self.modules[module].file;
        if let Some((_, items)) = &item.content {
            let child = self.add(package, Some(module), file);
            self.define(module, &item.ident, Kind::Module(child));
            inline.push(item.ident.to_string());
            self.collect(child, items, inline);
            inline.pop();
        } else if let Some(child_file) = self.workspace.module_file(file, inline, item) {
            let source = &self.workspace.files[child_file];
            if source.part == Part::Product {
                let child = self.add(package, Some(module), child_file);
                self.define(module, &item.ident, Kind::Module(child));
                self.collect(child, &source.product.items, &mut Vec::new());
            }
        }
    }
}

impl From<ItemId> for Target {
    fn from(item: ItemId) -> Self {
        match item.kind {
            Kind::Module(module) => Self::Module(module),
            _ => Self::Item(item),
        }
    }
}

/// Returns the segments of a path without generic arguments. A leading `::` is an empty first segment.
#[must_use]
pub fn segments(path: &syn::Path) -> Vec<String> {
    let names = path.segments.iter().map(|segment| segment.ident.unraw().to_string());
    path.leading_colon.iter().map(|_| String::new()).chain(names).collect()
}

/// Returns the single names that a `use` imports.
#[must_use]
pub fn imports(item: &syn::ItemUse) -> Vec<Import> {
    let mut found = Vec::new();
    let mut path: Vec<_> = item.leading_colon.iter().map(|_| String::new()).collect();
    flatten(&item.tree, &mut path, !matches!(item.vis, Visibility::Inherited), &mut found);
    found
}

fn flatten(tree: &UseTree, path: &mut Vec<String>, reexport: bool, found: &mut Vec<Import>) {
    let mut leaf = |ident: &syn::Ident, name: Option<&syn::Ident>, glob: bool| {
        let mut path = path.clone();
        // `a::{self}` is `a`.
        if ident != "self" || path.is_empty() {
            path.push(ident.unraw().to_string());
        }
        let name = match name {
            Some(name) if name != "_" => Some(name.unraw().to_string()),
            Some(_) => None,
            None => path.last().cloned(),
        };
        found.push(Import { path, name, glob, reexport, line: ident.span().start().line });
    };
    match tree {
        UseTree::Name(tree) => leaf(&tree.ident, None, false),
        UseTree::Rename(tree) => leaf(&tree.ident, Some(&tree.rename), false),
        UseTree::Glob(tree) => {
            let line = tree.star_token.spans[0].start().line;
            found.push(Import { path: path.clone(), name: None, glob: true, reexport, line });
        }
        UseTree::Path(tree) => {
            path.push(tree.ident.unraw().to_string());
            flatten(&tree.tree, path, reexport, found);
            path.pop();
        }
        UseTree::Group(tree) => {
            for tree in &tree.items {
                flatten(tree, path, reexport, found);
            }
        }
    }
}

/// Returns the names of items in a macro body, except those that are macro parameters.
fn declared_names(body: TokenStream) -> HashSet<String> {
    let words = tokens::flat(body);
    let declares = |word: &str| matches!(word, "struct" | "enum" | "trait" | "type" | "fn" | "const" | "static");
    words.windows(2).filter(|pair| declares(&pair[0])).map(|pair| pair[1].clone()).filter(|name| name != "$").collect()
}

/// Returns the names that refer to a crate in a package: its dependencies and the standard library.
fn external_crates(manifest: &toml::Table) -> HashSet<String> {
    let mut names: HashSet<_> = ["std", "core", "alloc", "proc_macro"].map(str::to_owned).into();
    let tables = std::iter::once(manifest).chain(
        manifest
            .get("target")
            .and_then(toml::Value::as_table)
            .into_iter()
            .flatten()
            .filter_map(|(_, target)| target.as_table()),
    );
    for table in tables {
        for section in ["dependencies", "build-dependencies"] {
            let dependencies = table.get(section).and_then(toml::Value::as_table);
            names.extend(dependencies.into_iter().flatten().map(|(name, _)| name.replace('-', "_")));
        }
    }
    names
}
