//! Reader of Debian's control files: paragraphs of fields, separated by empty lines.

/// One paragraph.
#[derive(Clone, Copy, Debug)]
pub(super) struct Paragraph<'a>(&'a str);

/// Returns the paragraphs of a file, without those that have no text.
pub(super) fn paragraphs(text: &str) -> impl Iterator<Item = Paragraph<'_>> {
    let mut rest = text;
    std::iter::from_fn(move || {
        rest = rest.trim_start_matches('\n');
        let (paragraph, after) = rest.split_once("\n\n").unwrap_or((rest, ""));
        rest = after;
        (!paragraph.trim().is_empty()).then_some(Paragraph(paragraph))
    })
}

impl<'a> Paragraph<'a> {
    /// Returns the first line of a field's value. Names of fields are compared without regard to case.
    pub(super) fn line(self, name: &str) -> Option<&'a str> {
        self.0.lines().filter(|line| !line.starts_with(['#', ' ', '\t'])).find_map(|line| {
            let (key, value) = line.split_once(':')?;
            key.eq_ignore_ascii_case(name).then_some(value.trim())
        })
    }

    /// Returns the words of a field's value, including those on its continuation lines.
    pub(super) fn words(self, name: &str) -> Vec<&'a str> {
        let (mut words, mut inside) = (Vec::new(), false);
        for line in self.0.lines().filter(|line| !line.starts_with('#')) {
            let value = match line.split_once(':') {
                _ if line.starts_with([' ', '\t']) => line,
                Some((key, value)) => {
                    inside = key.eq_ignore_ascii_case(name);
                    value
                }
                None => continue,
            };
            if inside {
                words.extend(value.split_whitespace());
            }
        }
        words
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn fields_of_paragraphs() {
        let text = "\nPackage: a\n# Package: c\nDepends: x,\n y\nDescription: one: two\n\n\nPackage: b\n";
        let [a, b] = paragraphs(text).collect::<Vec<_>>()[..] else { panic!("not two paragraphs") };
        assert_eq!(a.line("package"), Some("a"));
        assert_eq!(a.words("Depends"), ["x,", "y"]);
        assert_eq!(a.line("Description"), Some("one: two"));
        assert_eq!((b.line("Package"), b.line("Depends"), b.words("Depends")), (Some("b"), None, Vec::new()));
    }
}
