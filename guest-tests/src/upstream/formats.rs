//! The forms in which the suites print their results, one function each.

use std::collections::BTreeMap;

/// Result of a case.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Outcome {
    /// It ran and found no error.
    Passed,
    /// It ran and failed, with the suite's message.
    Failed(String),
    /// It did not run, for this reason.
    Skipped(String),
}

/// Outcomes by the names of cases.
pub(crate) type Outcomes = BTreeMap<String, Outcome>;

/// Reads what Python's `unittest` prints with `--verbose`: `test_x (module.Class.test_x) ... ok`, with the first line
/// of the documentation and of warnings between the two halves, then a traceback for each failure.
pub(crate) fn unittest(text: &str) -> Outcomes {
    let mut outcomes = Outcomes::new();
    let mut current: Option<String> = None;
    for line in text.lines() {
        if line.starts_with("=====") {
            break;
        }
        if let Some(name) = unittest_name(line) {
            current = Some(name);
        }
        let Some((_, end)) = line.rsplit_once(" ... ").or_else(|| current.as_ref().map(|_| ("", line))) else {
            continue;
        };
        let outcome = match end.trim() {
            "ok" => Outcome::Passed,
            "FAIL" | "ERROR" => Outcome::Failed(String::new()),
            end => match end.strip_prefix("skipped ") {
                Some(reason) => Outcome::Skipped(reason.trim_matches(['\'', '"']).to_owned()),
                None => continue,
            },
        };
        outcomes.extend(current.take().map(|name| (name, outcome)));
    }
    for (name, message) in tracebacks(text) {
        outcomes.insert(name, Outcome::Failed(message));
    }
    // A program that ended too early has a last case without an outcome.
    outcomes.extend(current.map(|name| (name, Outcome::Failed("the program ended".to_owned()))));
    outcomes
}

/// Returns `module.Class.test` if the line begins a case.
fn unittest_name(line: &str) -> Option<String> {
    let (method, rest) = line.split_once(" (")?;
    let (path, _) = rest.split_once(')')?;
    let is_method = method.starts_with("test") && method.chars().all(|c| c.is_ascii_alphanumeric() || c == '_');
    (is_method && path.ends_with(&format!(".{method}"))).then(|| path.trim_start_matches("tests.").to_owned())
}

/// Returns the last line of each traceback.
fn tracebacks(text: &str) -> impl Iterator<Item = (String, String)> {
    text.split("\n=====").skip(1).filter_map(|block| {
        let mut lines = block.lines().skip(1);
        let name = unittest_name(lines.next()?.split_once(": ")?.1)?;
        let message = lines.take_while(|line| !line.starts_with("Ran ")).filter(|line| !line.starts_with([' ', '-']));
        Some((name, message.filter(|line| !line.is_empty()).last()?.to_owned()))
    })
}

/// Reads what GoogleTest prints.
pub(crate) fn gtest(text: &str) -> Outcomes {
    let mut outcomes = Outcomes::new();
    let mut current: Option<(String, Vec<&str>)> = None;
    for line in text.lines() {
        let marked = line.split_once("] ").filter(|(mark, _)| mark.starts_with('['));
        let name = |rest: &str| rest.split([' ', ',']).next().unwrap_or_default().to_owned();
        match marked.map(|(mark, rest)| (mark.trim_matches(['[', ' ']), name(rest))) {
            Some(("RUN", name)) => {
                outcomes.extend(current.take().map(|(name, said)| (name, Outcome::Failed(reason(&said)))));
                current = Some((name, Vec::new()));
            }
            // UCX prints this line with a reason, and then `OK`.
            Some(("SKIP" | "SKIPPED", _)) => {
                outcomes.extend(current.take().map(|(name, said)| (name, Outcome::Skipped(skip_reason(line, &said)))));
            }
            Some((mark @ ("OK" | "FAILED"), name)) => {
                let Some((begun, said)) = current.take_if(|(begun, _)| *begun == name) else { continue };
                let outcome = if mark == "OK" { Outcome::Passed } else { Outcome::Failed(reason(&said)) };
                outcomes.insert(begun, outcome);
            }
            _ => {
                if let Some((_, said)) = &mut current {
                    said.push(line);
                }
            }
        }
    }
    outcomes.extend(current.map(|(name, said)| (name, Outcome::Failed(reason(&said)))));
    outcomes
}

/// UCX prints the reason in parentheses, GoogleTest before this line.
fn skip_reason(line: &str, said: &[&str]) -> String {
    match line.split_once("] (").and_then(|(_, reason)| reason.strip_suffix(')')) {
        Some(reason) => reason.to_owned(),
        None => reason(said),
    }
}

/// The first line that names an error, or else the last one.
fn reason(said: &[&str]) -> String {
    let is_error =
        |line: &&&str| ["Assertion", "rror", "ailure", "xpected", "ctual"].iter().any(|word| line.contains(word));
    let line = said.iter().find(is_error).or_else(|| said.iter().rev().find(|line| !line.trim().is_empty()));
    line.map_or_else(String::new, |line| line.trim().to_owned())
}

/// Reads what the client of `fi_ubertest` prints: a line `[…]` with the properties of a test, messages, then
/// `Ending test N / ALL, result: …`. The script prints `List NAME` before each list of tests.
pub(crate) fn ubertest(text: &str) -> Outcomes {
    let mut outcomes = Outcomes::new();
    let mut said = Vec::new();
    let (mut list, mut properties) = ("", String::new());
    for line in text.lines() {
        if let Some(name) = line.strip_prefix("List ") {
            list = name;
        } else if line.starts_with("Starting test ") {
            said.clear();
        } else if let Some(rest) = line.strip_prefix('[') {
            properties = rest.split(", ").take(3).collect::<Vec<_>>().join(" ");
        }
        let ended = line.strip_prefix("Ending test ").and_then(|rest| rest.split_once(", result: "));
        let Some((number, result)) = ended else {
            said.push(line);
            continue;
        };
        let outcome = match result.trim() {
            "Success" => Outcome::Passed,
            "No data available" | "Function not implemented" => Outcome::Skipped(result.trim().to_owned()),
            result => Outcome::Failed(format!("{result}: {}", reason(&said))),
        };
        let number = number.split(' ').next().unwrap_or_default();
        outcomes.insert(format!("{list} {number:0>3} {properties}"), outcome);
    }
    outcomes
}

/// Reads what `runfabtests.sh -vv` prints: for each test `- name: …`, `timestamp: …`, `result: …`, `time: …`, and the
/// output of its programs unless it has passed.
pub(crate) fn fabtests(text: &str) -> Outcomes {
    let mut outcomes = Outcomes::new();
    for block in text.split("- name:   ").skip(1) {
        let mut lines = block.lines();
        let name = lines.next().unwrap_or_default().trim().replace('"', "");
        let result = lines.find_map(|line| line.trim().strip_prefix("result:")).unwrap_or_default().trim();
        let outcome = match result {
            "Pass" => Outcome::Passed,
            "Excluded" => Outcome::Skipped("excluded by the suite's list for the provider".to_owned()),
            "Notrun" => Outcome::Skipped("not supported by the provider".to_owned()),
            _ => {
                let said: Vec<_> = lines.filter_map(|line| line.strip_prefix("    ")).collect();
                Outcome::Failed(reason(&said))
            }
        };
        outcomes.insert(name, outcome);
    }
    outcomes
}

/// Reads the Test Anything Protocol: `ok N - name # SKIP reason`, with a message in comments after a failure.
pub(crate) fn tap(text: &str) -> Outcomes {
    let mut outcomes = Outcomes::new();
    let mut failed: Option<String> = None;
    for line in text.lines() {
        let (is_ok, rest) = match (line.strip_prefix("ok "), line.strip_prefix("not ok ")) {
            (Some(rest), _) => (true, rest),
            (_, Some(rest)) => (false, rest),
            _ => {
                let message = line.strip_prefix("# ").map(str::trim).filter(|line| !line.is_empty());
                if let (Some(message), Some(name)) = (message, &failed)
                    && outcomes.get(name) == Some(&Outcome::Failed(String::new()))
                {
                    outcomes.insert(name.clone(), Outcome::Failed(message.to_owned()));
                }
                continue;
            }
        };
        let (name, directive) = rest.split_once(" # ").unwrap_or((rest, ""));
        let name = name.split_once(" - ").map_or(name, |(_, name)| name).trim().to_owned();
        let outcome = match directive.strip_prefix("SKIP") {
            Some(reason) => Outcome::Skipped(reason.trim().to_owned()),
            None if is_ok => Outcome::Passed,
            None => Outcome::Failed(String::new()),
        };
        failed = (!is_ok).then(|| name.clone());
        outcomes.insert(name, outcome);
    }
    outcomes
}

/// Reads what `iscsi-test-cu` prints: CUnit's `Suite: …` and `Test: … …passed`, with `[SKIPPED]` and the reason
/// between the two halves.
pub(crate) fn cunit(text: &str) -> Outcomes {
    let mut outcomes = Outcomes::new();
    let mut suite = "";
    let mut current: Option<(String, String)> = None;
    for line in text.lines() {
        if let Some(name) = line.trim().strip_prefix("Suite: ") {
            suite = name.trim();
        }
        let mut line = line;
        if let Some(rest) = line.trim_start().strip_prefix("Test: ") {
            outcomes.extend(current.take().map(|(name, said)| (name, cunit_outcome(&said, false))));
            let (name, rest) = rest.split_once(" ...").unwrap_or((rest, ""));
            current = Some((format!("{suite}.{}", name.trim()), String::new()));
            line = rest;
        }
        let Some((name, said)) = &mut current else { continue };
        said.push_str(line);
        said.push('\n');
        if let Some(passed) = ["passed", "FAILED"].iter().position(|end| line.trim_end().ends_with(end)) {
            outcomes.insert(name.clone(), cunit_outcome(said, passed == 0));
            current = None;
        }
    }
    outcomes.extend(current.map(|(name, said)| (name, cunit_outcome(&said, false))));
    outcomes
}

fn cunit_outcome(said: &str, passed: bool) -> Outcome {
    let skipped = said.lines().find_map(|line| line.trim().strip_prefix("[SKIPPED]"));
    match skipped {
        Some(reason) => Outcome::Skipped(reason.trim().to_owned()),
        None if passed => Outcome::Passed,
        None => {
            let failure = said.lines().find_map(|line| line.trim().strip_prefix("[FAILED]"));
            Outcome::Failed(failure.unwrap_or_default().trim().to_owned())
        }
    }
}
