//! Results of a run, and their file in the format of JUnit.

use std::fmt::{self, Write};
use std::fs::File;
use std::io::{Read, Seek, SeekFrom};
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context, Result};

/// Longest output of a program in the file, in bytes from its end.
const LONGEST_OUTPUT: u64 = 64 << 10;

/// End of a program in a guest.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum End {
    Passed,
    /// It says that it was skipped.
    Skipped,
    /// It was ended because of another guest, or because the time was up.
    Stopped,
    /// It failed with this status.
    Failed(u8),
    /// Its guest or the lab failed, with the reason.
    Lost(String),
}

impl fmt::Display for End {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Passed => f.write_str("passed"),
            Self::Skipped => f.write_str("skipped"),
            Self::Stopped => f.write_str("was ended"),
            Self::Failed(status) => write!(f, "ended with status {status}"),
            Self::Lost(reason) => f.write_str(reason),
        }
    }
}

/// Result of a program in a guest.
#[derive(Clone, Debug)]
pub(super) struct GuestResult {
    pub guest: String,
    pub case: String,
    pub end: End,
    pub time: Duration,
    /// Log with its output, which may be temporary.
    pub output: PathBuf,
    /// End of its output.
    tail: String,
}

/// Results of a run.
#[derive(Debug, Default)]
pub(super) struct Report {
    pub results: Vec<GuestResult>,
    /// Failure outside of all programs.
    pub problem: Option<String>,
}

impl Report {
    /// Writes the file.
    ///
    /// # Errors
    /// It cannot be written.
    pub(super) fn write_junit(&self, path: &Path) -> Result<()> {
        std::fs::write(path, self.junit()).with_context(|| format!("--junit {}", path.display()))
    }

    /// Returns the text of the file: a suite for each guest.
    fn junit(&self) -> String {
        let mut guests: Vec<&str> = Vec::new();
        for result in &self.results {
            if !guests.contains(&result.guest.as_str()) {
                guests.push(&result.guest);
            }
        }
        let all: Vec<_> = self.results.iter().collect();
        let lost = usize::from(self.problem.is_some());
        let mut text = String::from("<?xml version=\"1.0\" encoding=\"UTF-8\"?>\n");
        text.push_str(&format!("<testsuites name=\"pvrdma-lab\" {}>\n", counts(&all, lost)));
        for guest in guests {
            let of_guest: Vec<_> = self.results.iter().filter(|result| result.guest == guest).collect();
            text.push_str(&format!("  <testsuite name=\"{}\" {}>\n", escaped(guest), counts(&of_guest, 0)));
            for result in of_guest {
                text.push_str(&result.junit());
            }
            text.push_str("  </testsuite>\n");
        }
        if let Some(problem) = &self.problem {
            text.push_str(&format!(
                "  <testsuite name=\"lab\" {}>\n    <testcase classname=\"lab\" name=\"guests\" time=\"0\">\n      \
                 <error message=\"{}\"/>\n    </testcase>\n  </testsuite>\n",
                counts(&[], 1),
                escaped(problem)
            ));
        }
        text.push_str("</testsuites>\n");
        text
    }
}

/// Returns the attributes that count results, with this many more failures of the lab.
fn counts(results: &[&GuestResult], lost: usize) -> String {
    let count = |kind: fn(&End) -> bool| results.iter().filter(|result| kind(&result.end)).count();
    let time: Duration = results.iter().map(|result| result.time).sum();
    format!(
        "tests=\"{}\" failures=\"{}\" errors=\"{}\" skipped=\"{}\" time=\"{:.3}\"",
        results.len() + lost,
        count(|end| matches!(end, End::Failed(_))),
        count(|end| matches!(end, End::Lost(_))) + lost,
        count(|end| matches!(end, End::Skipped | End::Stopped)),
        time.as_secs_f64()
    )
}

impl GuestResult {
    /// Creates the result of a program that has ended, with the end of its log.
    pub(super) fn new(guest: &str, case: &str, end: End, time: Duration, output: &Path) -> Self {
        // A log that cannot be read is as good as empty here.
        let tail = end_of(output).unwrap_or_default();
        Self { guest: guest.to_owned(), case: case.to_owned(), end, time, output: output.to_owned(), tail }
    }

    fn junit(&self) -> String {
        let (guest, case, time) = (escaped(&self.guest), escaped(&self.case), self.time.as_secs_f64());
        let end = escaped(&self.end.to_string());
        let end = match &self.end {
            End::Passed => String::new(),
            End::Skipped | End::Stopped => format!("      <skipped message=\"{end}\"/>\n"),
            End::Failed(_) => format!("      <failure message=\"{end}\"/>\n"),
            End::Lost(_) => format!("      <error message=\"{end}\"/>\n"),
        };
        format!(
            "    <testcase classname=\"{guest}\" name=\"{case}\" time=\"{time:.3}\">\n{end}      <system-out>{}\
             </system-out>\n    </testcase>\n",
            escaped(&self.tail)
        )
    }
}

/// Returns the end of a log.
fn end_of(path: &Path) -> std::io::Result<String> {
    let mut file = File::open(path)?;
    let length = file.metadata()?.len();
    file.seek(SeekFrom::Start(length.saturating_sub(LONGEST_OUTPUT)))?;
    let mut bytes = Vec::new();
    file.take(LONGEST_OUTPUT).read_to_end(&mut bytes)?;
    Ok(String::from_utf8_lossy(&bytes).into_owned())
}

/// Replaces characters that have a meaning in XML, and those that it cannot contain.
fn escaped(text: &str) -> String {
    let mut escaped = String::with_capacity(text.len());
    for c in text.chars() {
        match c {
            '&' => escaped.push_str("&amp;"),
            '<' => escaped.push_str("&lt;"),
            '>' => escaped.push_str("&gt;"),
            '"' => escaped.push_str("&quot;"),
            '\n' | '\t' => escaped.push(c),
            '\0'..='\u{1f}' | '\u{fffe}' | '\u{ffff}' => escaped.push('\u{fffd}'),
            c => escaped.push(c),
        }
    }
    escaped
}

/// Text of GitHub's workflow commands.
#[derive(Debug)]
pub(super) struct Annotations;

impl Annotations {
    /// Returns the lines before and after the output of a program.
    pub(super) fn group(result: &GuestResult) -> (String, &'static str) {
        (
            format!("::group::{}\n", message(&format!("{}: {} {}", result.guest, result.case, result.end))),
            "::endgroup::\n",
        )
    }

    /// Returns the annotation of a result that is no success.
    pub(super) fn of(result: &GuestResult) -> Option<String> {
        let kind = match result.end {
            End::Passed | End::Stopped => return None,
            End::Skipped => "notice",
            End::Failed(_) | End::Lost(_) => "error",
        };
        let mut text = String::new();
        let title = property(&format!("pvrdma-lab: {}", result.guest));
        let said = message(&format!("{} {}", result.case, result.end));
        // Writing to a string cannot fail.
        let _ = writeln!(text, "::{kind} title={title}::{said}");
        Some(text)
    }

    /// Returns the annotation of a failure outside of all programs.
    pub(super) fn of_problem(problem: &str) -> String {
        format!("::error title=pvrdma-lab::{}\n", message(problem))
    }
}

fn message(text: &str) -> String {
    text.replace('%', "%25").replace('\r', "%0D").replace('\n', "%0A")
}

fn property(text: &str) -> String {
    message(text).replace(':', "%3A").replace(',', "%2C")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn result(guest: &str, case: &str, end: End, output: &Path) -> GuestResult {
        GuestResult::new(guest, case, end, Duration::from_millis(1500), output)
    }

    #[test]
    fn the_file_is_xml_with_a_suite_for_each_guest() {
        let folder = tempfile::tempdir().unwrap();
        let output = folder.path().join("output");
        std::fs::write(&output, b"<&>\"]]>\x1b[0m\xff\nlast").unwrap();
        let results = vec![
            result("vm0", "a<b", End::Passed, &output),
            result("vm1", "a<b", End::Failed(3), &output),
            result("vm0", "c", End::Skipped, Path::new("/nonexistent")),
            result("vm1", "c", End::Lost("QEMU has \"ended\"".to_owned()), &output),
        ];
        let report = Report { results, problem: Some("no <daemon>\nbecause: x".to_owned()) };
        // Temporary logs are gone by then.
        std::fs::remove_file(&output).unwrap();
        let path = folder.path().join("junit.xml");
        report.write_junit(&path).unwrap();
        let text = std::fs::read_to_string(path).unwrap();
        let document = roxmltree::Document::parse(&text).unwrap();
        let root = document.root_element();
        let counts = ["tests", "failures", "errors", "skipped", "time"].map(|name| root.attribute(name).unwrap());
        assert_eq!(counts, ["5", "1", "2", "1", "6.000"]);
        let suites: Vec<_> = root.children().filter(|node| node.has_tag_name("testsuite")).collect();
        let names: Vec<_> = suites.iter().map(|suite| suite.attribute("name").unwrap()).collect();
        assert_eq!(names, ["vm0", "vm1", "lab"]);
        let find = |name: &str| document.descendants().find(|node| node.has_tag_name(name)).unwrap();
        assert_eq!(find("testcase").attribute("name"), Some("a<b"));
        assert_eq!(find("failure").attribute("message"), Some("ended with status 3"));
        assert_eq!(find("error").attribute("message"), Some("QEMU has \"ended\""));
        assert_eq!(find("system-out").text(), Some("<&>\"]]>\u{fffd}[0m\u{fffd}\nlast"));
    }

    #[test]
    fn a_long_output_is_cut_at_its_beginning() {
        let folder = tempfile::tempdir().unwrap();
        let output = folder.path().join("output");
        std::fs::write(&output, "x".repeat(100_000) + "end").unwrap();
        let text = end_of(&output).unwrap();
        assert!(text.len() == 65_536 && text.ends_with("xend"));
    }

    #[test]
    fn annotations_are_single_lines() {
        let found = result("vm0", "a 100%\nb", End::Failed(1), Path::new(""));
        let text = Annotations::of(&found).unwrap();
        assert_eq!(text, "::error title=pvrdma-lab%3A vm0::a 100%25%0Ab ended with status 1\n");
        assert_eq!(Annotations::group(&found).0, "::group::vm0: a 100%25%0Ab ended with status 1\n");
        assert_eq!(Annotations::of_problem("x\ny"), "::error title=pvrdma-lab::x%0Ay\n");
        assert!(Annotations::of(&result("vm0", "a", End::Passed, Path::new(""))).is_none());
    }
}
