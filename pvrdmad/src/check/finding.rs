//! Findings of a check: problems with their remedies, as text and as JSON.

use std::fmt::Write;

use anyhow::{Result, bail};
use serde::Serialize;

use crate::config::ConfigError;

/// Effect of a finding.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Severity {
    /// The daemon would not start, or a VM cannot use its device.
    Error,
    /// A possible problem.
    Warning,
}

impl Severity {
    fn word(self) -> &'static str {
        match self {
            Self::Error => "error",
            Self::Warning => "warning",
        }
    }
}

/// An actual or possible problem.
#[derive(Clone, PartialEq, Eq, Debug, Serialize)]
pub struct Finding {
    /// Its effect.
    pub severity: Severity,
    /// The device, the network, or the part of the daemon or of this host.
    pub subject: String,
    /// The configuration key of the subject, if the finding is about one.
    pub key: Option<String>,
    /// Description of the problem.
    pub message: String,
    /// The suggested fix, unless the message implies it.
    pub remedy: Option<String>,
}

impl Finding {
    /// A finding about the subject as a whole, without a remedy.
    pub(super) fn new(severity: Severity, subject: &str, message: impl Into<String>) -> Self {
        Self { severity, subject: subject.to_owned(), key: None, message: message.into(), remedy: None }
    }

    /// The same finding, about this key.
    pub(super) fn about(self, key: &str) -> Self {
        Self { key: Some(key.to_owned()), ..self }
    }

    /// The same finding, with this remedy.
    pub(super) fn remedy(self, remedy: impl Into<String>) -> Self {
        Self { remedy: Some(remedy.into()), ..self }
    }
}

/// Subject of findings about keys outside of devices and networks.
pub(super) const DAEMON: &str = "daemon";
/// Subject of findings about the configuration file as a whole.
const FILE: &str = "configuration file";

/// Findings in the order of the checks.
#[derive(Clone, Debug, Default, Serialize)]
pub struct Findings {
    findings: Vec<Finding>,
}

impl Findings {
    /// The reason why a configuration cannot be used, as the only finding.
    pub fn of_error(error: &ConfigError) -> Self {
        let (subject, message) = match error {
            ConfigError::Device { name, problem } => (format!("device {name}"), problem.clone()),
            ConfigError::Network { name, problem } => (format!("network {name}"), problem.clone()),
            ConfigError::Read { path, source } => (FILE.to_owned(), format!("{}: {source}", path.display())),
            ConfigError::Parse { .. } => (FILE.to_owned(), error.to_string()),
            ConfigError::Congestion(problem) => ("congestion".to_owned(), problem.clone()),
            ConfigError::Metrics(_) | ConfigError::Nothing => (DAEMON.to_owned(), error.to_string()),
        };
        Self { findings: vec![Finding::new(Severity::Error, &subject, message)] }
    }

    /// Returns the findings.
    pub fn all(&self) -> &[Finding] {
        &self.findings
    }

    /// Returns the number of errors.
    pub fn errors(&self) -> usize {
        self.findings.iter().filter(|finding| finding.severity == Severity::Error).count()
    }

    /// Renders a line for each finding, and an indented one for its remedy.
    pub fn text(&self) -> String {
        let mut text = String::new();
        for Finding { severity, subject, key, message, remedy } in &self.findings {
            let key = key.as_ref().map_or_else(String::new, |key| format!("{key}: "));
            // Writing to a string does not fail.
            let _ = writeln!(text, "{}: {subject}: {key}{message}", severity.word());
            if let Some(remedy) = remedy {
                let _ = writeln!(text, "    {remedy}");
            }
        }
        text
    }

    /// Renders an object with the member `findings`.
    ///
    /// # Errors
    /// None, because the members are text.
    pub fn json(&self) -> Result<String> {
        Ok(serde_json::to_string_pretty(self)? + "\n")
    }

    /// # Errors
    /// There is an error among the findings.
    pub fn result(&self) -> Result<()> {
        match self.errors() {
            0 => Ok(()),
            1 => bail!("1 error"),
            errors => bail!("{errors} errors"),
        }
    }

    /// Adds a finding about the subject as a whole.
    pub(super) fn note(&mut self, severity: Severity, subject: &str, message: impl Into<String>, remedy: &str) {
        self.push(Finding::new(severity, subject, message).remedy(remedy));
    }

    pub(super) fn push(&mut self, finding: Finding) {
        self.findings.push(finding);
    }

    /// Appends the findings of another check.
    pub fn extend(&mut self, others: Self) {
        self.findings.extend(others.findings);
    }
}
