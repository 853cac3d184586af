//! Names that a file uses, and the items that they refer to: the arrows between files.
//!
//! Names are found in `use` items, in paths of expressions, types, patterns, bounds and attributes, in macro calls and
//! in macro bodies. An inherent or trait `impl` names its type. **Method calls and field accesses are left out**: to
//! resolve them takes type information.

use std::collections::HashSet;

use syn::ext::IdentExt;
use syn::spanned::Spanned;
use syn::visit::{self, Visit};

use crate::modules::{self, ModuleId, Modules, Target};
use crate::tokens::{self, TokenPath};
use crate::workspace::Workspace;

/// A name in a file and the items that it may refer to.
#[derive(Clone, Debug)]
pub struct Reference {
    /// Index of the file.
    pub file: usize,
    /// Line, from 1.
    pub line: usize,
    /// Name as written, without generic arguments.
    pub name: String,
    /// Kind of use.
    pub usage: Usage,
    /// All items that it may refer to; empty if unknown.
    pub targets: Vec<Target>,
}

/// Kind of use of a name.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Usage {
    /// A private `use`.
    Import,
    /// A `use` that other modules can import from.
    Reexport,
    /// A path anywhere else.
    Path,
    /// The type of an inherent `impl`, which is also a [`Self::Path`].
    Impl,
    /// A method of this name; its definition is unknown.
    Method,
    /// A macro call.
    MacroCall,
}

/// Returns all names that product files use.
#[must_use]
pub fn references(workspace: &Workspace, modules: &Modules<'_>) -> Vec<Reference> {
    let mut found = Vec::new();
    for &root in modules.roots() {
        visit_module_file(workspace, modules, root, &mut found);
    }
    found
}

/// Visits the file of a module and then the files of its children.
fn visit_module_file(workspace: &Workspace, modules: &Modules<'_>, module: ModuleId, found: &mut Vec<Reference>) {
    let file = modules.file(module);
    let (scopes, children) = Default::default();
    let mut visitor = Visitor { modules, module, file, scopes, children, found };
    visitor.visit_file(&workspace.files[file].product);
    for child in visitor.children {
        visit_module_file(workspace, modules, child, found);
    }
}

/// Names that are known only inside a block or a function.
#[derive(Default)]
struct Scope {
    /// Local variables, type parameters and items of a block, which are not visible outside.
    locals: HashSet<String>,
    imports: Vec<modules::Import>,
}

struct Visitor<'a, 'w> {
    modules: &'a Modules<'w>,
    module: ModuleId,
    file: usize,
    scopes: Vec<Scope>,
    /// Modules in files of their own, which are visited later.
    children: Vec<ModuleId>,
    found: &'a mut Vec<Reference>,
}

impl Visitor<'_, '_> {
    fn resolve(&self, path: &[String]) -> Vec<Target> {
        let Some((first, rest)) = path.split_first() else { return Vec::new() };
        for scope in self.scopes.iter().rev() {
            if let Some(import) = scope.imports.iter().find(|import| import.name.as_ref() == Some(first)) {
                let path: Vec<_> = import.path.iter().chain(rest).cloned().collect();
                return self.modules.resolve(self.module, &path);
            }
            // A local variable is never followed by `::`.
            if rest.is_empty() && scope.locals.contains(first) {
                return Vec::new();
            }
        }
        self.modules.resolve(self.module, path)
    }

    fn add(&mut self, path: &[String], line: usize, usage: Usage, targets: Vec<Target>) {
        self.found.push(Reference { file: self.file, line, name: path.join("::"), usage, targets });
    }

    fn add_path(&mut self, path: &[String], line: usize) {
        let targets = self.resolve(path);
        // A name without a target is local, unless its path says where it should be found.
        if !targets.is_empty() || path.first().is_some_and(|first| matches!(first.as_str(), "crate" | "super")) {
            self.add(path, line, Usage::Path, targets);
        }
    }

    fn add_macro(&mut self, path: &[String], line: usize) {
        let targets = match path {
            [name] => self.modules.resolve_macro(self.module, name),
            path => self.resolve(path),
        };
        self.add(path, line, Usage::MacroCall, targets);
    }

    /// Adds names in a macro body: those with a path, and types or constants, recognised by their capital letter.
    fn add_tokens(&mut self, tokens: &proc_macro2::TokenStream) {
        let mut paths = Vec::new();
        tokens::paths(tokens, &mut paths);
        for TokenPath { segments, line, call, member } in paths {
            match segments.as_slice() {
                _ if call => self.add_macro(&segments, line),
                [name] if member => self.add(std::slice::from_ref(name), line, Usage::Method, Vec::new()),
                [name] if !name.starts_with(char::is_uppercase) => {}
                path => self.add_path(path, line),
            }
        }
    }

    fn in_scope(&mut self, scope: Scope, visit: impl FnOnce(&mut Self)) {
        self.scopes.push(scope);
        visit(self);
        self.scopes.pop();
    }
}

impl<'ast> Visit<'ast> for Visitor<'_, '_> {
    fn visit_item_mod(&mut self, item: &'ast syn::ItemMod) {
        let Some(child) = self.modules.child(self.module, &item.ident.unraw().to_string()) else { return };
        if let Some((_, items)) = &item.content {
            let parent = std::mem::replace(&mut self.module, child);
            let scopes = std::mem::take(&mut self.scopes);
            items.iter().for_each(|item| self.visit_item(item));
            self.module = parent;
            self.scopes = scopes;
        } else {
            self.children.push(child);
        }
    }

    fn visit_item_use(&mut self, item: &'ast syn::ItemUse) {
        for import in modules::imports(item) {
            let usage = if import.reexport { Usage::Reexport } else { Usage::Import };
            let mut targets = self.modules.resolve(self.module, &import.path);
            if import.glob {
                // Items that are used through the glob are found where they are used. Only a glob over an external
                // module counts itself.
                targets.retain(|target| matches!(target, Target::External(_)));
                let mut path = import.path;
                path.push("*".to_owned());
                if !targets.is_empty() {
                    self.add(&path, import.line, usage, targets);
                }
            } else {
                self.add(&import.path, import.line, usage, targets);
            }
        }
    }

    fn visit_item_impl(&mut self, item: &'ast syn::ItemImpl) {
        if let (None, syn::Type::Path(of)) = (&item.trait_, &*item.self_ty) {
            let name = modules::segments(&of.path);
            let targets = self.resolve(&name);
            self.add(&name, of.span().start().line, Usage::Impl, targets);
        }
        visit::visit_item_impl(self, item);
    }

    fn visit_path(&mut self, path: &'ast syn::Path) {
        self.add_path(&modules::segments(path), path.span().start().line);
        visit::visit_path(self, path);
    }

    fn visit_expr_path(&mut self, path: &'ast syn::ExprPath) {
        // `<Type>::function` is `Type::function`.
        if let Some(syn::QSelf { ty, position: 0, .. }) = &path.qself
            && let syn::Type::Path(of) = &**ty
        {
            let mut whole = modules::segments(&of.path);
            whole.extend(modules::segments(&path.path).into_iter().filter(|segment| !segment.is_empty()));
            self.add_path(&whole, path.span().start().line);
            self.visit_type(ty);
            return;
        }
        visit::visit_expr_path(self, path);
    }

    fn visit_expr_method_call(&mut self, call: &'ast syn::ExprMethodCall) {
        self.add(&[call.method.to_string()], call.method.span().start().line, Usage::Method, Vec::new());
        visit::visit_expr_method_call(self, call);
    }

    fn visit_pat_ident(&mut self, pattern: &'ast syn::PatIdent) {
        // A constant or a variant without a path, or a new variable.
        if pattern.ident.to_string().starts_with(char::is_uppercase) {
            self.add_path(&[pattern.ident.to_string()], pattern.span().start().line);
        }
        visit::visit_pat_ident(self, pattern);
    }

    fn visit_macro(&mut self, call: &'ast syn::Macro) {
        let path = modules::segments(&call.path);
        if path != ["macro_rules"] {
            self.add_macro(&path, call.path.span().start().line);
        }
        self.add_tokens(&call.tokens);
    }

    fn visit_attribute(&mut self, attribute: &'ast syn::Attribute) {
        if attribute.path().is_ident("doc") {
            return;
        }
        if let syn::Meta::List(list) = &attribute.meta {
            self.add_tokens(&list.tokens);
            if list.path.is_ident("serde") {
                self.add_serde_paths(&list.tokens);
            }
        }
    }

    fn visit_visibility(&mut self, _: &'ast syn::Visibility) {}

    fn visit_item_fn(&mut self, item: &'ast syn::ItemFn) {
        let scope = Scope { locals: Locals::of(|locals| locals.visit_item_fn(item)), imports: Vec::new() };
        self.in_scope(scope, |visitor| visit::visit_item_fn(visitor, item));
    }

    fn visit_impl_item_fn(&mut self, item: &'ast syn::ImplItemFn) {
        let scope = Scope { locals: Locals::of(|locals| locals.visit_impl_item_fn(item)), imports: Vec::new() };
        self.in_scope(scope, |visitor| visit::visit_impl_item_fn(visitor, item));
    }

    fn visit_trait_item_fn(&mut self, item: &'ast syn::TraitItemFn) {
        let scope = Scope { locals: Locals::of(|locals| locals.visit_trait_item_fn(item)), imports: Vec::new() };
        self.in_scope(scope, |visitor| visit::visit_trait_item_fn(visitor, item));
    }

    fn visit_block(&mut self, block: &'ast syn::Block) {
        let imports = block.stmts.iter().filter_map(|statement| match statement {
            syn::Stmt::Item(syn::Item::Use(item)) => Some(modules::imports(item)),
            _ => None,
        });
        let scope = Scope { locals: HashSet::new(), imports: imports.flatten().collect() };
        self.in_scope(scope, |visitor| visit::visit_block(visitor, block));
    }
}

impl Visitor<'_, '_> {
    /// Adds the paths of `#[serde(with = "path")]` and similar attributes, which name functions and modules in strings.
    fn add_serde_paths(&mut self, tokens: &proc_macro2::TokenStream) {
        for token in tokens.clone() {
            if let proc_macro2::TokenTree::Literal(literal) = token
                && let Ok(text) = syn::parse_str::<syn::LitStr>(&literal.to_string())
                && let Ok(path) = text.parse::<syn::Path>()
            {
                self.add_path(&modules::segments(&path), literal.span().start().line);
            }
        }
    }
}

/// Collects the names that patterns and type parameters bind.
#[derive(Default)]
struct Locals(HashSet<String>);

impl Locals {
    fn of(visit: impl FnOnce(&mut Self)) -> HashSet<String> {
        let mut locals = Self::default();
        visit(&mut locals);
        locals.0
    }
}

impl<'ast> Visit<'ast> for Locals {
    fn visit_pat_ident(&mut self, pattern: &'ast syn::PatIdent) {
        let name = pattern.ident.to_string();
        if !name.starts_with(char::is_uppercase) {
            self.0.insert(name);
        }
        visit::visit_pat_ident(self, pattern);
    }

    fn visit_type_param(&mut self, parameter: &'ast syn::TypeParam) {
        self.0.insert(parameter.ident.to_string());
        visit::visit_type_param(self, parameter);
    }

    fn visit_stmt(&mut self, statement: &'ast syn::Stmt) {
        if let syn::Stmt::Item(syn::Item::Fn(item)) = statement {
            self.0.insert(item.sig.ident.to_string());
        }
        visit::visit_stmt(self, statement);
    }
}
