//! Finds the comments of a source file, which a parser drops.

/// The part of a comment on one line.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Comment {
    /// Line, from 1.
    pub line: usize,
    /// Text, including the comment markers.
    pub text: String,
}

/// Returns all comments of a file line by line, including doc comments. String literals are skipped.
#[must_use]
pub fn comments(source: &str) -> Vec<Comment> {
    let mut found = Vec::new();
    let mut at = 0;
    while at < source.len() {
        let rest = &source[at..];
        let (length, comment) = token(rest, source[..at].chars().next_back());
        if comment {
            let first = source[..at].matches('\n').count() + 1;
            let lines = rest[..length].lines().enumerate();
            found.extend(lines.map(|(index, text)| Comment { line: first + index, text: text.to_owned() }));
        }
        at += length;
    }
    found
}

/// Returns the length of the first token, and whether it is a comment. `before` is the preceding character.
fn token(rest: &str, before: Option<char>) -> (usize, bool) {
    let in_word = before.is_some_and(|c| c.is_alphanumeric() || c == '_');
    let first = rest.chars().next().map_or(1, char::len_utf8);
    if rest.starts_with("//") {
        (rest.find('\n').unwrap_or(rest.len()), true)
    } else if rest.starts_with("/*") {
        (block_comment(rest), true)
    } else if let Some(string) = rest.strip_prefix('"') {
        (1 + quoted(string, '"'), false)
    } else if rest.starts_with('\'') {
        (character(rest), false)
    } else if !in_word && let Some(length) = raw_string(rest) {
        (length, false)
    } else {
        (first, false)
    }
}

/// Returns the length of a block comment; these may be nested.
fn block_comment(rest: &str) -> usize {
    let mut depth = 0_usize;
    let mut at = 0;
    while at < rest.len() {
        if rest[at..].starts_with("/*") {
            depth += 1;
            at += 2;
        } else if rest[at..].starts_with("*/") {
            depth -= 1;
            at += 2;
            if depth == 0 {
                return at;
            }
        } else {
            at += rest[at..].chars().next().map_or(1, char::len_utf8);
        }
    }
    rest.len()
}

/// Returns the length up to and including the closing quote.
fn quoted(rest: &str, quote: char) -> usize {
    let mut escaped = false;
    for (at, c) in rest.char_indices() {
        if escaped {
            escaped = false;
        } else if c == '\\' {
            escaped = true;
        } else if c == quote {
            return at + c.len_utf8();
        }
    }
    rest.len()
}

/// Returns the length of a character literal, or of the quote of a lifetime.
fn character(rest: &str) -> usize {
    let mut inside = rest[1..].chars();
    match (inside.next(), inside.next()) {
        (Some('\\'), _) => 1 + quoted(&rest[1..], '\''),
        (Some(c), Some('\'')) => 2 + c.len_utf8(),
        _ => 1,
    }
}

/// Returns the length of `r".."`, `r#".."#`, `br".."` and similar literals.
fn raw_string(rest: &str) -> Option<usize> {
    let prefix = ["r", "br", "cr"]
        .into_iter()
        .find(|prefix| rest.strip_prefix(prefix).is_some_and(|after| after.trim_start_matches('#').starts_with('"')))?;
    let after = &rest[prefix.len()..];
    let hashes = after.len() - after.trim_start_matches('#').len();
    let end = format!("\"{}", "#".repeat(hashes));
    let body = prefix.len() + hashes + 1;
    Some(rest[body..].find(&end).map_or(rest.len(), |at| body + at + end.len()))
}

#[cfg(test)]
mod tests {
    use super::comments;

    /// Returns the comments of a text as `line:text`.
    fn found(source: &str) -> Vec<String> {
        comments(source).into_iter().map(|comment| format!("{}:{}", comment.line, comment.text)).collect()
    }

    #[test]
    fn comments_of_all_kinds() {
        assert_eq!(found("a // b\n/// c\nd"), ["1:// b", "2:/// c"]);
        assert_eq!(found("/* a /* b */\n c */ d // e"), ["1:/* a /* b */", "2: c */", "2:// e"]);
    }

    #[test]
    fn literals_hold_no_comments() {
        for text in [r#""// \" //""#, r##"r#"" // "#"##, r#"'"' '\'' b'/'"#, r#"br"//""#, "&'a str", "for"] {
            assert_eq!(found(&format!("{text} // yes")), ["1:// yes"], "{text}");
        }
    }
}
