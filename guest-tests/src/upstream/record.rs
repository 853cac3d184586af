//! Results of suites, as stored.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

use anyhow::{Context, Result};
use serde::{Deserialize, Serialize};

use super::formats::{Outcome, Outcomes};
use super::reasons;

/// Results of all suites, as stored.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Stored {
    /// In the order of their names.
    pub(crate) suites: Vec<Record>,
}

/// Results of one suite.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Record {
    /// Name of the suite, and of its script in `guest-tests/suites`.
    pub(crate) name: String,
    /// Version of the suite and of the library that it tests.
    pub(crate) version: String,
    /// Commit of this project.
    pub(crate) commit: String,
    /// Day of the run.
    pub(crate) date: String,
    /// Cases that ran without an error.
    pub(crate) passed: BTreeSet<String>,
    /// Cases that ran and failed, with the suite's message.
    pub(crate) failed: BTreeMap<String, String>,
    /// Cases that did not run, with the reason.
    pub(crate) skipped: BTreeMap<String, String>,
}

impl Record {
    /// Sorts outcomes.
    pub(crate) fn new(name: &str, version: &str, commit: &str, date: &str, outcomes: Outcomes) -> Self {
        let own = str::to_owned;
        let mut record = Self {
            name: own(name),
            version: own(version),
            commit: own(commit),
            date: own(date),
            passed: BTreeSet::new(),
            failed: BTreeMap::new(),
            skipped: BTreeMap::new(),
        };
        for (case, outcome) in outcomes {
            match outcome {
                Outcome::Passed => {
                    record.passed.insert(case);
                }
                Outcome::Failed(message) => {
                    record.failed.insert(case, message);
                }
                Outcome::Skipped(reason) => {
                    record.skipped.insert(case, reason);
                }
            }
        }
        record
    }

    /// Number of cases that ran.
    pub(crate) fn executed(&self) -> usize {
        self.passed.len() + self.failed.len()
    }

    /// Failures without an attribution.
    pub(crate) fn unexplained(&self) -> Vec<&str> {
        self.failed.keys().filter(|case| reasons::of(&self.name, case).is_none()).map(String::as_str).collect()
    }

    /// Cases that have passed before and do not pass now.
    pub(crate) fn lost_since<'a>(&'a self, before: &'a Self) -> Vec<&'a str> {
        before.passed.difference(&self.passed).map(String::as_str).collect()
    }
}

impl Stored {
    /// Reads the file in the folder of the documents.
    pub(crate) fn read(documents: &Path) -> Result<Self> {
        let path = documents.join("suites.json");
        let text = std::fs::read_to_string(&path).with_context(|| format!("cannot read {}", path.display()))?;
        serde_json::from_str(&text).with_context(|| format!("{}", path.display()))
    }

    /// Returns the results of a suite.
    pub(crate) fn suite(&self, name: &str) -> Option<&Record> {
        self.suites.iter().find(|record| record.name == name)
    }

    /// Replaces the results of a suite.
    pub(super) fn put(&mut self, record: Record) {
        self.suites.retain(|other| other.name != record.name);
        self.suites.push(record);
        self.suites.sort_by(|one, other| one.name.cmp(&other.name));
    }
}
