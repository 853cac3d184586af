//! Requires standard terms in place of private ones, and limits the width of comments.
//!
//! A reader who knows the InfiniBand specification, TCP or the kernel's `rdma_rxe` searches for their terms. The table
//! lists private words that this project once used, each with the standard term. Product identifiers and comments are
//! checked.

use std::collections::HashSet;

use proc_macro2::{Spacing, TokenStream, TokenTree};
use quote::ToTokens;

use crate::Problem;
use crate::comments::{self, Comment};
use crate::workspace::{Part, SourceFile, Workspace};

/// Text in which a word is searched.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Place {
    /// The whole identifier, case-sensitive.
    Identifier,
    /// Words in comments; may be several.
    Comment,
    /// A word in comments, or a part of an identifier between underscores or capital letters.
    Everywhere,
}

/// A word that must not be used.
#[derive(Clone, Copy, Debug)]
pub struct Word {
    /// The word; in lower case unless it is a whole identifier.
    pub wrong: &'static str,
    /// Text in which it is searched.
    pub place: Place,
    /// Term to use instead.
    pub instead: &'static str,
}

const fn identifier(wrong: &'static str, instead: &'static str) -> Word {
    Word { wrong, place: Place::Identifier, instead }
}

const fn comment(wrong: &'static str, instead: &'static str) -> Word {
    Word { wrong, place: Place::Comment, instead }
}

const fn everywhere(wrong: &'static str, instead: &'static str) -> Word {
    Word { wrong, place: Place::Everywhere, instead }
}

/// Table of refused words.
pub const WORDS: &[Word] = &[
    everywhere("octet", "byte"),
    everywhere("octets", "bytes"),
    everywhere("ghost", "selective NAK"),
    everywhere("ghosts", "selective NAKs"),
    everywhere("unconfirmed", "unacked, snd_una"),
    everywhere("rung", "pending doorbell"),
    comment("under way", "in flight, outstanding, in progress"),
    comment("sent again", "retransmitted"),
    comment("send again", "retransmit"),
    comment("sends again", "retransmits"),
    comment("resend", "retransmit"),
    comment("resent", "retransmitted"),
    identifier("Ahead", "ReorderBuffer"),
    identifier("Repairs", "RetransmitQueue"),
    identifier("Flight", "PeerWindow, or the InFlight of a queue"),
    identifier("Unread", "TimeoutGrace"),
    identifier("News", "PendingCompletions"),
    identifier("Lane", "TxQueue"),
    identifier("Brake", "RateLimiter"),
    identifier("Held", "MemoryGuard"),
    identifier("Scatter", "SgList"),
    identifier("Transcript", "SyntheticTrace"),
    identifier("Marks", "EgressMarking"),
    identifier("Refusal", "NakReason"),
    identifier("Damage", "CrcError"),
    identifier("RequesterHost", "RequesterOps"),
    identifier("ResponderHost", "ResponderOps"),
    identifier("SendWork", "SendWr"),
    identifier("RecvWork", "RecvWr"),
    identifier("show_region", "load_dsr"),
];

/// Returns words of the table in product files, and comments that are too wide in any file.
#[must_use]
pub fn check(workspace: &Workspace) -> Vec<Problem> {
    let mut problems = Vec::new();
    for file in &workspace.files {
        let unchecked = workspace.config.words_unchecked.contains(&file.path.as_str());
        let comments = comments::comments(&file.text);
        check_width(workspace, file, &comments, &mut problems);
        if file.part == Part::Product && !unchecked {
            for comment in comments.iter().filter(|comment| file.is_product_line(comment.line)) {
                check_comment(file, comment, &mut problems);
            }
            let mut identifiers = HashSet::new();
            collect(file.product.to_token_stream(), &mut identifiers);
            check_identifiers(file, &identifiers, &mut problems);
        }
    }
    problems.sort();
    problems
}

fn check_width(workspace: &Workspace, file: &SourceFile, comments: &[Comment], problems: &mut Vec<Problem>) {
    let limit = workspace.config.comment_columns;
    let wide: HashSet<_> = (1..).zip(file.text.lines()).filter(|(_, line)| line.chars().count() > limit).collect();
    let wide: HashSet<_> = wide.into_iter().map(|(line, _)| line).collect();
    for comment in comments.iter().filter(|comment| wide.contains(&comment.line)) {
        let message = format!("a comment beyond column {limit}");
        problems.push(Problem { file: file.path.clone(), line: comment.line, message });
    }
}

fn check_comment(file: &SourceFile, comment: &Comment, problems: &mut Vec<Problem>) {
    let words = comment.text.split(|c: char| !c.is_alphanumeric()).filter(|word| !word.is_empty());
    let text = format!(" {} ", words.collect::<Vec<_>>().join(" ").to_lowercase());
    for word in WORDS.iter().filter(|word| word.place != Place::Identifier) {
        if text.contains(&format!(" {} ", word.wrong)) {
            problems.push(problem(file, comment.line, word, word.wrong));
        }
    }
}

fn check_identifiers(file: &SourceFile, identifiers: &HashSet<(String, usize)>, problems: &mut Vec<Problem>) {
    for (name, line) in identifiers {
        let parts = parts(name);
        let is_wrong = |word: &&Word| match word.place {
            Place::Identifier => word.wrong == name,
            Place::Comment => false,
            Place::Everywhere => parts.iter().any(|part| part == word.wrong),
        };
        for word in WORDS.iter().filter(is_wrong) {
            problems.push(problem(file, *line, word, name));
        }
    }
}

fn problem(file: &SourceFile, line: usize, word: &Word, found: &str) -> Problem {
    Problem { file: file.path.clone(), line, message: format!("`{found}`: say {}", word.instead) }
}

/// Collects all identifiers with their lines, except those after `.` and `::`. Those are defined elsewhere, possibly in
/// a foreign crate whose names are not checked (`Ipv4Addr::octets`).
fn collect(tokens: TokenStream, found: &mut HashSet<(String, usize)>) {
    let mut behind = false;
    for token in tokens {
        match &token {
            TokenTree::Ident(ident) if !behind => {
                found.insert((ident.to_string(), ident.span().start().line));
            }
            TokenTree::Group(group) => collect(group.stream(), found),
            TokenTree::Ident(_) | TokenTree::Punct(_) | TokenTree::Literal(_) => {}
        }
        behind = match &token {
            // The first colon of `::` is joint; the single one of `name: Type` is not.
            TokenTree::Punct(punct) => match punct.as_char() {
                '.' => true,
                ':' => behind || punct.spacing() == Spacing::Joint,
                _ => false,
            },
            _ => false,
        };
    }
}

/// Splits an identifier into its words, in lower case.
fn parts(identifier: &str) -> Vec<String> {
    let mut parts = vec![String::new()];
    let mut before = '_';
    for c in identifier.chars() {
        if c == '_' || (c.is_uppercase() && before.is_lowercase()) {
            parts.push(String::new());
        }
        if let Some(part) = parts.last_mut().filter(|_| c != '_') {
            part.extend(c.to_lowercase());
        }
        before = c;
    }
    parts
}
