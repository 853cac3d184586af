//! Sanitizes untrusted text on its way to a terminal.

use serde_json::Value;

/// Replaces a character that is not shown.
const REPLACEMENT: char = '\u{fffd}';

/// Replaces characters that move the cursor or change colours or the writing direction.
pub fn printable_text(text: &str) -> String {
    text.chars().map(|c| if is_printable(c) { c } else { REPLACEMENT }).collect()
}

/// Applies [`printable_text`] to all strings in `value`, including names of members.
pub fn printable(value: Value) -> Value {
    match value {
        Value::String(text) => Value::String(printable_text(&text)),
        Value::Array(values) => Value::Array(values.into_iter().map(printable).collect()),
        Value::Object(members) => Value::Object(
            members.into_iter().map(|(name, member)| (printable_text(&name), printable(member))).collect(),
        ),
        plain => plain,
    }
}

/// Returns `true` if [`printable`] would leave all strings of a JSON text unchanged. A result of `false` may be wrong,
/// because escape sequences are not decoded.
pub fn is_printable_json(text: &str) -> bool {
    text.chars().all(|c| c != '\\' && is_printable(c))
}

/// Returns `true` if a character is shown as it is. Line breaks are not, because they would forge lines of a log.
const fn is_printable(c: char) -> bool {
    // C0, DEL and C1; line and paragraph separators; and marks, embeddings, overrides and isolates of the writing
    // direction.
    !matches!(c, '\0'..='\x1f' | '\x7f'..='\u{9f}' | '\u{200b}'..='\u{200f}' | '\u{2028}'..='\u{202e}' | '\u{2060}'..='\u{206f}' | '\u{feff}')
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn nothing_that_a_terminal_obeys() {
        assert_eq!(printable_text("vm0 – grün"), "vm0 – grün");
        assert_eq!(printable_text("a\x1b[31m\u{202e}b\r\n\u{9b}c"), "a\u{fffd}[31m\u{fffd}b\u{fffd}\u{fffd}\u{fffd}c");
        assert_eq!(printable(json!([{"a\x07": ["\x1b", 1, null]}])), json!([{"a\u{fffd}": ["\u{fffd}", 1, null]}]));
    }

    /// A text that passes the check is equal to the output of [`printable`].
    #[test]
    fn a_text_that_may_be_shown_as_it_is() {
        assert!(is_printable_json(r#"{"grün": [1, "vm0", null]}"#));
        for hidden in ["\u{1b}", "\u{9b}", "\u{202e}", "\n"] {
            let value = json!({"a": [hidden], hidden: 1});
            assert!(!is_printable_json(&value.to_string()), "{value}");
        }
        assert!(!is_printable_json("[\"\u{9b}\"]") && !is_printable_json(r#"["\u001b"]"#));
    }
}
