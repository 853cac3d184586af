//! Conditional compilation: the items that a build without tests contains.

use std::ops::RangeInclusive;

use syn::punctuated::Punctuated;
use syn::spanned::Spanned;
use syn::visit_mut::{self, VisitMut};
use syn::{Attribute, Expr, Item, Lit, Meta, Token};

/// Known properties of a build, by which its `cfg` attributes are evaluated. All other conditions may be true or false.
#[derive(Clone, Copy, Debug)]
pub enum Build {
    /// Neither tests nor the feature `testing`: the build that users run.
    Product,
    /// No tests; the feature `testing` may be on.
    Library,
}

impl Build {
    /// Returns `true` if an item with these attributes may be part of the build.
    #[must_use]
    pub fn contains(self, attributes: &[Attribute]) -> bool {
        attributes
            .iter()
            .filter(|attribute| attribute.path().is_ident("cfg"))
            .filter_map(|attribute| attribute.parse_args::<Meta>().ok())
            .all(|condition| self.judge(&condition) != Some(false))
    }

    /// Returns the value of a condition, or `None` if it depends on an unknown property.
    fn judge(self, condition: &Meta) -> Option<bool> {
        match condition {
            Meta::Path(path) => path.is_ident("test").then_some(false),
            Meta::NameValue(pair) => {
                let Expr::Lit(value) = &pair.value else { return None };
                let Lit::Str(value) = &value.lit else { return None };
                let testing = pair.path.is_ident("feature") && value.value() == "testing";
                (testing && matches!(self, Self::Product)).then_some(false)
            }
            Meta::List(list) => {
                let parts = list.parse_args_with(Punctuated::<Meta, Token![,]>::parse_terminated).ok()?;
                let values: Vec<_> = parts.iter().map(|part| self.judge(part)).collect();
                if list.path.is_ident("not") {
                    values.first().copied().flatten().map(|value| !value)
                } else if list.path.is_ident("all") {
                    fold(&values, false)
                } else if list.path.is_ident("any") {
                    fold(&values, true)
                } else {
                    None
                }
            }
        }
    }
}

/// Evaluates `any` if `decisive` is `true`, else `all`: one decisive value decides; otherwise an unknown value makes
/// the result unknown.
fn fold(values: &[Option<bool>], decisive: bool) -> Option<bool> {
    if values.contains(&Some(decisive)) {
        Some(decisive)
    } else if values.contains(&None) {
        None
    } else {
        Some(!decisive)
    }
}

/// Removes all items from a file that the build does not contain. Returns the removed lines.
pub fn prune(file: &mut syn::File, build: Build) -> Vec<RangeInclusive<usize>> {
    let mut pruner = Pruner { build, removed: Vec::new() };
    pruner.visit_file_mut(file);
    pruner.removed
}

struct Pruner {
    build: Build,
    removed: Vec<RangeInclusive<usize>>,
}

impl Pruner {
    fn keep(&mut self, attributes: &[Attribute], node: &impl Spanned) -> bool {
        let keep = self.build.contains(attributes);
        if !keep {
            let span = node.span();
            // The span of an item begins with its attributes.
            self.removed.push(span.start().line..=span.end().line);
        }
        keep
    }
}

impl VisitMut for Pruner {
    fn visit_file_mut(&mut self, file: &mut syn::File) {
        file.items.retain(|item| self.keep(item_attributes(item), item));
        visit_mut::visit_file_mut(self, file);
    }

    fn visit_item_mod_mut(&mut self, module: &mut syn::ItemMod) {
        if let Some((_, items)) = &mut module.content {
            items.retain(|item| self.keep(item_attributes(item), item));
        }
        visit_mut::visit_item_mod_mut(self, module);
    }

    fn visit_item_impl_mut(&mut self, block: &mut syn::ItemImpl) {
        block.items.retain(|item| match item {
            syn::ImplItem::Const(item) => self.keep(&item.attrs, item),
            syn::ImplItem::Fn(item) => self.keep(&item.attrs, item),
            syn::ImplItem::Type(item) => self.keep(&item.attrs, item),
            syn::ImplItem::Macro(item) => self.keep(&item.attrs, item),
            _ => true,
        });
        visit_mut::visit_item_impl_mut(self, block);
    }

    fn visit_item_trait_mut(&mut self, item: &mut syn::ItemTrait) {
        item.items.retain(|item| match item {
            syn::TraitItem::Const(item) => self.keep(&item.attrs, item),
            syn::TraitItem::Fn(item) => self.keep(&item.attrs, item),
            syn::TraitItem::Type(item) => self.keep(&item.attrs, item),
            syn::TraitItem::Macro(item) => self.keep(&item.attrs, item),
            _ => true,
        });
        visit_mut::visit_item_trait_mut(self, item);
    }

    fn visit_block_mut(&mut self, block: &mut syn::Block) {
        block.stmts.retain(|statement| match statement {
            syn::Stmt::Local(local) => self.keep(&local.attrs, local),
            syn::Stmt::Item(item) => self.keep(item_attributes(item), item),
            syn::Stmt::Macro(call) => self.keep(&call.attrs, call),
            syn::Stmt::Expr(..) => true,
        });
        visit_mut::visit_block_mut(self, block);
    }

    fn visit_expr_match_mut(&mut self, expression: &mut syn::ExprMatch) {
        expression.arms.retain(|arm| self.keep(&arm.attrs, arm));
        visit_mut::visit_expr_match_mut(self, expression);
    }

    fn visit_fields_named_mut(&mut self, fields: &mut syn::FieldsNamed) {
        let kept = std::mem::take(&mut fields.named).into_iter();
        fields.named = kept.filter(|field| self.keep(&field.attrs, field)).collect();
        visit_mut::visit_fields_named_mut(self, fields);
    }
}

/// Returns the attributes of an item of any kind.
#[must_use]
pub fn item_attributes(item: &Item) -> &[Attribute] {
    match item {
        Item::Const(item) => &item.attrs,
        Item::Enum(item) => &item.attrs,
        Item::ExternCrate(item) => &item.attrs,
        Item::Fn(item) => &item.attrs,
        Item::ForeignMod(item) => &item.attrs,
        Item::Impl(item) => &item.attrs,
        Item::Macro(item) => &item.attrs,
        Item::Mod(item) => &item.attrs,
        Item::Static(item) => &item.attrs,
        Item::Struct(item) => &item.attrs,
        Item::Trait(item) => &item.attrs,
        Item::TraitAlias(item) => &item.attrs,
        Item::Type(item) => &item.attrs,
        Item::Union(item) => &item.attrs,
        Item::Use(item) => &item.attrs,
        _ => &[],
    }
}
