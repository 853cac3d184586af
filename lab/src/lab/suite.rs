//! The programs that a run executes: the command, or each program of a suite.

use std::os::unix::fs::PermissionsExt;
use std::path::Path;

use anyhow::{Context, Result, bail};

use super::cli::RunArgs;

/// Exit status by which a program of a suite says that it was skipped, as in Automake.
pub(super) const SKIPPED: u8 = 77;

/// A program and its arguments.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Case {
    /// Name in reports, and of the log unless it is the only program.
    pub name: String,
    pub command: Vec<String>,
    /// It belongs to a suite.
    pub is_of_suite: bool,
}

impl Case {
    /// Returns the name of the log of its output in a guest.
    pub(super) fn log_name(&self, guest: &str) -> String {
        if self.is_of_suite { format!("{}.{guest}.output", self.name) } else { format!("{guest}.output") }
    }
}

/// Returns the programs of a run. A suite is a folder in the shared folder; its programs are its executable files, in
/// the order of their names.
///
/// # Errors
/// The suite is not there, not in the folder, or empty.
pub(super) fn cases(args: &RunArgs, folder: &Path) -> Result<Vec<Case>> {
    let Some(suite) = &args.suite else {
        return Ok(vec![Case { name: args.shown(), command: args.command.clone(), is_of_suite: false }]);
    };
    let path = suite.canonicalize().with_context(|| format!("--suite {}", suite.display()))?;
    if !path.starts_with(folder) {
        bail!("--suite {}: guests see only {}; name another folder with --folder", path.display(), folder.display());
    }
    let mut cases = Vec::new();
    for entry in std::fs::read_dir(&path).with_context(|| format!("--suite {}", path.display()))? {
        let file = entry.with_context(|| format!("--suite {}", path.display()))?.path();
        let data = std::fs::metadata(&file).with_context(|| format!("--suite: {}", file.display()))?;
        let name = file.file_name().unwrap_or_default().to_string_lossy().into_owned();
        if data.is_file() && data.permissions().mode() & 0o111 != 0 && !name.starts_with('.') {
            cases.push(Case { name, command: vec![file.to_string_lossy().into_owned()], is_of_suite: true });
        }
    }
    cases.sort_by(|one, other| one.name.cmp(&other.name));
    if cases.is_empty() {
        bail!("--suite {}: there is no executable file", path.display());
    }
    Ok(cases)
}

#[cfg(test)]
mod tests {
    use std::fs::{self, Permissions};

    use clap::Parser;

    use super::super::cli::{LabCli, LabCommand};
    use super::*;

    fn args(suite: &Path) -> RunArgs {
        let suite = suite.to_str().unwrap();
        match LabCli::parse_from(["pvrdma-lab", "run", "--suite", suite]).command {
            LabCommand::Run(args) => *args,
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn a_suite_is_the_executable_files_of_a_folder() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().canonicalize().unwrap();
        let suite = path.join("suite");
        fs::create_dir_all(suite.join("folder")).unwrap();
        assert!(cases(&args(&suite), &path).unwrap_err().to_string().contains("no executable file"));
        for (name, mode) in [("b", 0o755), ("a", 0o700), ("data", 0o644), (".hidden", 0o755)] {
            fs::write(suite.join(name), "").unwrap();
            fs::set_permissions(suite.join(name), Permissions::from_mode(mode)).unwrap();
        }
        let found = cases(&args(&suite), &path).unwrap();
        assert_eq!(found.iter().map(|case| case.name.as_str()).collect::<Vec<_>>(), ["a", "b"]);
        assert_eq!(found[0].command, [suite.join("a").to_str().unwrap()]);
        assert_eq!(found[0].log_name("vm1"), "a.vm1.output");
        let other = tempfile::tempdir().unwrap();
        assert!(cases(&args(other.path()), &path).unwrap_err().to_string().contains("guests see only"));
    }
}
