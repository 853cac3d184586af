//! Requires standard terms in place of private ones, and limits the width of comments.
//!
//! A reader who knows the InfiniBand specification, TCP or the kernel's `rdma_rxe` searches for their terms. The table
//! lists private words that this project once used, each with the standard term. Identifiers and comments of the
//! product are checked, strings of all files, and the prose of Markdown documents.

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
    /// Words in comments and documents; may be several.
    Comment,
    /// Words in comments, documents and strings; may be several.
    Prose,
    /// The first word of a comment, with a capital letter.
    Start,
    /// A word in comments and documents, or a part of an identifier between underscores or capital letters.
    Everywhere,
}

/// A word that must not be used.
#[derive(Clone, Copy, Debug)]
pub struct Word {
    /// The word; in lower case unless it is a whole identifier or begins a comment.
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

const fn prose(wrong: &'static str, instead: &'static str) -> Word {
    Word { wrong, place: Place::Prose, instead }
}

const fn start(wrong: &'static str, instead: &'static str) -> Word {
    Word { wrong, place: Place::Start, instead }
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
    prose("whoever", "the holder, the caller, the peer"),
    prose("somebody", "a thread, a peer, another process"),
    prose("nobody", "no thread, no peer, no device"),
    prose("everybody", "all of them, by name"),
    prose("so many", "the number"),
    prose("there and then", "immediately"),
    prose("of ours", "our"),
    prose("not any more", "no longer"),
    prose("for ever", "forever"),
    prose("comes round", "is reused"),
    prose("network card", "network function"),
    prose("network cards", "network functions"),
    prose("mended", "fixed"),
    prose("postman", "forwarder"),
    prose("words that threads share", "atomics"),
    start("Whether", "the noun for the state, or `true` if"),
    start("Has", "the verb: makes, lets, calls"),
    start("Have", "the verb: makes, lets, calls"),
    start("What", "a noun"),
    start("Who", "a noun"),
    identifier("Postman", "Forwarder"),
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

/// Returns words of the table in product files and documents, and comments that are too wide in any file.
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
            let mut found = Found::default();
            found.collect(file.product.to_token_stream());
            check_identifiers(file, &found.identifiers, &mut problems);
        }
        if !unchecked {
            check_prose(file, &comments, &mut problems);
        }
    }
    for (path, text) in &workspace.documents {
        if !workspace.config.words_unchecked.contains(&path.as_str()) {
            check_document(path, text, &mut problems);
        }
    }
    problems.sort();
    // A doc comment is also a string, that of an attribute.
    problems.dedup();
    problems
}

/// Checks all strings and comments of a file, those of tests included, for words that are refused in any text.
fn check_prose(file: &SourceFile, comments: &[Comment], problems: &mut Vec<Problem>) {
    let mut found = Found::default();
    found.collect(file.whole.to_token_stream());
    let comments = comments.iter().map(|comment| (&comment.text, comment.line));
    for (text, line) in found.strings.iter().map(|(text, line)| (text, *line)).chain(comments) {
        check_text((&file.path, line), &prose_of(text), |place| place == Place::Prose, problems);
    }
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
    let in_comments = |place| matches!(place, Place::Comment | Place::Everywhere | Place::Prose);
    check_text((&file.path, comment.line), &prose_of(&comment.text), in_comments, problems);
    let first = comment.text.trim_start().trim_start_matches(['/', '!', '*']).split_whitespace().next();
    for word in WORDS.iter().filter(|word| word.place == Place::Start && first == Some(word.wrong)) {
        problems.push(problem(&file.path, comment.line, word, word.wrong));
    }
}

/// Returns a text without its spans of code.
fn prose_of(text: &str) -> String {
    text.split('`').step_by(2).collect::<Vec<_>>().join(" - ")
}

/// Checks the prose of a document, without blocks and spans of code.
fn check_document(path: &str, text: &str, problems: &mut Vec<Problem>) {
    let in_documents = |place| matches!(place, Place::Comment | Place::Everywhere | Place::Prose);
    let mut is_code = false;
    for (line, text) in (1..).zip(text.lines()) {
        let is_fence = text.trim_start().starts_with("```");
        is_code ^= is_fence;
        if !is_code && !is_fence {
            check_text((path, line), &prose_of(text), in_documents, problems);
        }
    }
}

/// Checks a text for words that are refused in places that `is_here` accepts.
fn check_text((path, line): (&str, usize), text: &str, is_here: impl Fn(Place) -> bool, problems: &mut Vec<Problem>) {
    let words = text.split(|c: char| !c.is_alphanumeric()).filter(|word| !word.is_empty());
    let text = format!(" {} ", words.collect::<Vec<_>>().join(" ").to_lowercase());
    for word in WORDS.iter().filter(|word| is_here(word.place)) {
        if text.contains(&format!(" {} ", word.wrong)) {
            problems.push(problem(path, line, word, word.wrong));
        }
    }
}

fn check_identifiers(file: &SourceFile, identifiers: &HashSet<(String, usize)>, problems: &mut Vec<Problem>) {
    for (name, line) in identifiers {
        let parts = parts(name);
        let is_wrong = |word: &&Word| match word.place {
            Place::Identifier => word.wrong == name,
            Place::Comment | Place::Prose | Place::Start => false,
            Place::Everywhere => parts.iter().any(|part| part == word.wrong),
        };
        for word in WORDS.iter().filter(is_wrong) {
            problems.push(problem(&file.path, *line, word, name));
        }
    }
}

fn problem(path: &str, line: usize, word: &Word, found: &str) -> Problem {
    Problem { file: path.to_owned(), line, message: format!("`{found}`: say {}", word.instead) }
}

/// Identifiers and strings of a file, with their lines.
#[derive(Default)]
struct Found {
    /// All identifiers except those after `.` and `::`. Those are defined elsewhere, possibly in a foreign crate whose
    /// names are not checked (`Ipv4Addr::octets`).
    identifiers: HashSet<(String, usize)>,
    strings: Vec<(String, usize)>,
}

impl Found {
    fn collect(&mut self, tokens: TokenStream) {
        let mut behind = false;
        for token in tokens {
            match &token {
                TokenTree::Ident(ident) if !behind => {
                    self.identifiers.insert((ident.to_string(), ident.span().start().line));
                }
                TokenTree::Group(group) => self.collect(group.stream()),
                TokenTree::Literal(literal) => {
                    self.strings.push((literal.to_string(), literal.span().start().line));
                }
                TokenTree::Ident(_) | TokenTree::Punct(_) => {}
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
