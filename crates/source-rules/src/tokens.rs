//! Reads names from token streams: macro bodies have no syntax tree.

use std::collections::HashSet;

use proc_macro2::{Delimiter, TokenStream, TokenTree};

/// A path in a stream of tokens.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct TokenPath {
    /// Segments of the path; a leading `::` is an empty first segment.
    pub segments: Vec<String>,
    /// Line of the first segment.
    pub line: usize,
    /// `!` follows: a macro call.
    pub call: bool,
    /// A single `.` precedes it: a field or a method.
    pub member: bool,
}

/// Collects all identifiers, including those in groups.
pub fn identifiers(tokens: &TokenStream, found: &mut HashSet<String>) {
    for token in tokens.clone() {
        match token {
            TokenTree::Ident(ident) => {
                found.insert(ident.to_string());
            }
            TokenTree::Group(group) => identifiers(&group.stream(), found),
            TokenTree::Punct(_) | TokenTree::Literal(_) => {}
        }
    }
}

/// Returns all tokens as text, with groups flattened.
#[must_use]
pub fn flat(tokens: TokenStream) -> Vec<String> {
    tokens
        .into_iter()
        .flat_map(|token| match token {
            TokenTree::Group(group) => flat(group.stream()),
            token => vec![token.to_string()],
        })
        .collect()
}

/// Collects all paths, including those in groups. A generic argument in the middle (`a::<B>::c`) ends one path and
/// begins another.
pub fn paths(tokens: &TokenStream, found: &mut Vec<TokenPath>) {
    let tokens: Vec<_> = tokens.clone().into_iter().collect();
    let punct =
        |index: usize, wanted: char| matches!(tokens.get(index), Some(TokenTree::Punct(p)) if p.as_char() == wanted);
    let mut at = 0;
    while at < tokens.len() {
        if is_test_attribute(&tokens[at..]) {
            at += tokens[at..].iter().take_while(|token| !ends_item(token)).count() + 1;
            continue;
        }
        match &tokens[at] {
            TokenTree::Group(group) => paths(&group.stream(), found),
            TokenTree::Ident(first) => {
                // `$name` is a macro parameter, `$crate` is not.
                let dollar = at > 0 && punct(at - 1, '$');
                let leading = at > 1 && punct(at - 1, ':') && punct(at - 2, ':');
                let member = at > 0 && punct(at - 1, '.') && !(at > 1 && punct(at - 2, '.'));
                let mut segments = if leading { vec![String::new()] } else { Vec::new() };
                segments.push(plain(first));
                while punct(at + 1, ':') && punct(at + 2, ':') {
                    let Some(TokenTree::Ident(next)) = tokens.get(at + 3) else { break };
                    segments.push(plain(next));
                    at += 3;
                }
                // Segments after `Type::<..>::` belong to the type.
                let tail = leading && at > 2 && punct(at - 3, '>');
                if !tail && (!dollar || first == "crate") {
                    let call = punct(at + 1, '!') && !punct(at + 2, '=');
                    found.push(TokenPath { segments, line: first.span().start().line, call, member });
                }
            }
            TokenTree::Punct(_) | TokenTree::Literal(_) => {}
        }
        at += 1;
    }
}

/// Returns `true` for `#[cfg(test)]`: the item that follows it in a macro body is not product.
fn is_test_attribute(tokens: &[TokenTree]) -> bool {
    let [TokenTree::Punct(hash), TokenTree::Group(group), ..] = tokens else { return false };
    hash.as_char() == '#' && flat(group.stream()) == ["cfg", "test"]
}

fn ends_item(token: &TokenTree) -> bool {
    match token {
        TokenTree::Group(group) => group.delimiter() == Delimiter::Brace,
        TokenTree::Punct(punct) => punct.as_char() == ';',
        _ => false,
    }
}

fn plain(ident: &proc_macro2::Ident) -> String {
    let name = ident.to_string();
    name.strip_prefix("r#").map_or_else(|| name.clone(), str::to_owned)
}
