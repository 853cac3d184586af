//! Parser for the parts of Markdown that the checks need: fenced blocks, headings, links.

use std::path::{Path, PathBuf};

use anyhow::{Context, Result};

/// A Markdown file.
#[derive(Clone, Debug)]
pub(super) struct Document {
    pub(super) path: PathBuf,
    pub(super) text: String,
}

/// A fenced block.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Block {
    /// The line of its first fence, counted from 1.
    pub(super) line: usize,
    /// The first word after the fence.
    pub(super) language: String,
    pub(super) text: String,
}

/// A line outside of fenced blocks.
type Line<'a> = (usize, &'a str);

impl Document {
    pub(super) fn read(path: &Path) -> Result<Self> {
        let text = std::fs::read_to_string(path).with_context(|| format!("cannot read {}", path.display()))?;
        Ok(Self { path: path.to_owned(), text })
    }

    /// Returns the fenced blocks.
    pub(super) fn blocks(&self) -> Vec<Block> {
        self.split().0
    }

    /// Returns the lines outside fenced blocks.
    pub(super) fn prose(&self) -> Vec<Line<'_>> {
        self.split().1
    }

    fn split(&self) -> (Vec<Block>, Vec<Line<'_>>) {
        let (mut blocks, mut prose) = (Vec::new(), Vec::new());
        let mut open: Option<(Block, &str)> = None;
        for (number, line) in (1..).zip(self.text.lines()) {
            let trimmed = line.trim_start();
            match &mut open {
                Some((block, fence)) => {
                    if trimmed.starts_with(*fence) && trimmed.trim_end().chars().all(|mark| fence.starts_with(mark)) {
                        blocks.extend(open.take().map(|(block, _)| block));
                    } else {
                        block.text.push_str(line);
                        block.text.push('\n');
                    }
                }
                None => match ["```", "~~~"].into_iter().find(|fence| trimmed.starts_with(fence)) {
                    Some(fence) => {
                        let info = trimmed.trim_start_matches(['`', '~']);
                        let language = info.split([' ', ',']).next().unwrap_or_default().to_owned();
                        open = Some((Block { line: number, language, text: String::new() }, fence));
                    }
                    None => prose.push((number, line)),
                },
            }
        }
        blocks.extend(open.map(|(block, _)| block));
        (blocks, prose)
    }

    /// Returns the anchors of its headings, as forges generate them, and explicit anchors.
    pub(super) fn anchors(&self) -> Vec<String> {
        let mut anchors: Vec<String> = Vec::new();
        for (_, line) in self.prose() {
            let heading = line.trim_start_matches('#');
            if line.starts_with('#') && heading.starts_with(' ') {
                let anchor = slug(heading.trim());
                let again = anchors
                    .iter()
                    .filter(|known| known.trim_end_matches(|c: char| c.is_ascii_digit() || c == '-') == anchor);
                let again = if anchors.contains(&anchor) { again.count() } else { 0 };
                anchors.push(if again == 0 { anchor } else { format!("{anchor}-{again}") });
            }
            for attribute in ["id=\"", "name=\""] {
                anchors
                    .extend(line.split(attribute).skip(1).filter_map(|rest| rest.split('"').next()).map(str::to_owned));
            }
        }
        anchors
    }

    /// Returns the targets of links and pictures, with their lines.
    pub(super) fn links(&self) -> Vec<(usize, String)> {
        let mut links = Vec::new();
        for (number, line) in self.prose() {
            let line = without_code(line);
            let mut ends: Vec<&str> = Vec::new();
            ends.extend(line.split("](").skip(1).filter_map(|rest| rest.split([')', ' ']).next()));
            for attribute in ["src=\"", "href=\""] {
                ends.extend(line.split(attribute).skip(1).filter_map(|rest| rest.split('"').next()));
            }
            // `[name]: target` defines the target of `[text][name]`.
            if line.starts_with('[')
                && let Some((_, target)) = line.split_once("]: ")
            {
                ends.extend(target.split_whitespace().next());
            }
            links.extend(ends.into_iter().map(|target| (number, target.trim_matches(['<', '>']).to_owned())));
        }
        links
    }
}

/// Returns a line with its inline code blanked out.
fn without_code(line: &str) -> String {
    line.split('`').enumerate().map(|(index, part)| if index % 2 == 0 { part } else { "" }).collect()
}

/// Returns the anchor of a heading: lower case, spaces to dashes, no punctuation.
fn slug(heading: &str) -> String {
    heading
        .chars()
        .filter_map(|c| match c {
            ' ' | '-' => Some('-'),
            '_' => Some('_'),
            c if c.is_alphanumeric() => Some(c),
            _ => None,
        })
        .flat_map(char::to_lowercase)
        .collect()
}
