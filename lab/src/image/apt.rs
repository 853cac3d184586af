//! Finds the Debian mirror of this machine in its apt sources.

use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail};

use super::deb822::paragraphs;

/// Returns the URL of the Debian mirror of this machine, or the one in `PVRDMA_BED_MIRROR`.
pub(crate) fn mirror() -> Result<String> {
    if let Ok(named) = std::env::var("PVRDMA_BED_MIRROR") {
        return Ok(named);
    }
    let directory = Path::new("/etc/apt");
    let mut found = Vec::new();
    for path in source_files(directory)? {
        let text = std::fs::read_to_string(&path).with_context(|| format!("cannot read {}", path.display()))?;
        let deb822 = path.extension().is_some_and(|extension| extension == "sources");
        let entries = if deb822 { parse_deb822(&text) } else { parse_classic(&text) };
        found.extend(entries);
    }
    let Some(source) = found.into_iter().find(Source::is_debian_archive) else {
        bail!(
            "no Debian archive in {}/sources.list or {0}/sources.list.d: the image is built from the Debian mirror \
             that this machine uses, or from the one that PVRDMA_BED_MIRROR names",
            directory.display()
        );
    };
    Ok(source.url)
}

#[derive(Debug, PartialEq, Eq)]
struct Source {
    url: String,
    suite: String,
    components: Vec<String>,
}

impl Source {
    /// Returns `true` for the main archive, as opposed to security updates or a vendor's own repository.
    fn is_debian_archive(&self) -> bool {
        const SUITES: [&str; 8] = ["bullseye", "bookworm", "trixie", "forky", "sid", "oldstable", "stable", "testing"];
        SUITES.contains(&self.suite.as_str())
            && self.components.iter().any(|component| component == "main")
            && self.url.trim_end_matches('/').ends_with("/debian")
    }
}

fn source_files(directory: &Path) -> Result<Vec<PathBuf>> {
    let mut files = Vec::new();
    let list = directory.join("sources.list");
    if list.exists() {
        files.push(list);
    }
    if let Ok(entries) = std::fs::read_dir(directory.join("sources.list.d")) {
        for entry in entries {
            let path = entry?.path();
            if path.extension().is_some_and(|e| e == "sources" || e == "list") {
                files.push(path);
            }
        }
    }
    files.sort();
    Ok(files)
}

fn parse_deb822(text: &str) -> Vec<Source> {
    let mut sources = Vec::new();
    for paragraph in paragraphs(text) {
        let field = |name| paragraph.words(name).into_iter().map(str::to_owned).collect::<Vec<_>>();
        let enabled = field("Enabled").first().is_none_or(|word| word != "no");
        if !enabled || !field("Types").iter().any(|word| word == "deb") {
            continue;
        }
        for url in field("URIs") {
            for suite in field("Suites") {
                sources.push(Source { url: url.clone(), suite, components: field("Components") });
            }
        }
    }
    sources
}

fn parse_classic(text: &str) -> Vec<Source> {
    let mut sources = Vec::new();
    for line in text.lines() {
        let line = line.split('#').next().unwrap_or_default().trim();
        let Some(rest) = line.strip_prefix("deb ") else {
            continue;
        };
        let rest = rest.trim_start();
        let rest = match (rest.starts_with('['), rest.split_once(']')) {
            (true, Some((_, rest))) => rest,
            _ => rest,
        };
        let mut words = rest.split_whitespace().map(str::to_owned);
        if let (Some(url), Some(suite)) = (words.next(), words.next()) {
            sources.push(Source { url, suite, components: words.collect() });
        }
    }
    sources
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn deb822_main_archive_is_found() {
        let text = "Types: deb\n# a comment\nURIs: http://mirror.example/debian\nSuites: bookworm bookworm-updates\n\
                    Components: main\n\nTypes: deb\nURIs: http://mirror.example/debian-security\n\
                    Suites: bookworm-security\nComponents: main\n";
        let sources = parse_deb822(text);
        assert_eq!(sources.len(), 3);
        let main: Vec<_> = sources.iter().filter(|s| s.is_debian_archive()).collect();
        assert_eq!(main.len(), 1);
        assert_eq!(main[0].url, "http://mirror.example/debian");
    }

    #[test]
    fn disabled_paragraphs_are_ignored() {
        let text = "Enabled: no\nTypes: deb\nURIs: http://mirror.example/debian\nSuites: stable\nComponents: main\n";
        assert!(parse_deb822(text).is_empty());
    }

    #[test]
    fn classic_lines_with_options_are_read() {
        let text = "# deb http://old.example/debian stable main\n\
                    deb [signed-by=/k.gpg arch=amd64] http://mirror.example/debian stable main contrib\n";
        let sources = parse_classic(text);
        assert_eq!(sources.len(), 1);
        assert!(sources[0].is_debian_archive());
        assert_eq!(sources[0].components, ["main", "contrib"]);
    }
}
