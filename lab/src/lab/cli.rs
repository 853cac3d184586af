//! The command line of `pvrdma-lab`.

use std::path::PathBuf;

use clap::builder::PossibleValuesParser;
use clap::{Args, Parser, Subcommand, ValueEnum};

use crate::image::{Package, SYSTEMS};

/// Runs a command in virtual machines that have RDMA with each other: no adapter, no kernel module on this machine, no
/// root.
#[derive(Debug, Parser)]
#[command(name = "pvrdma-lab", version, after_long_help = STATUSES)]
pub struct LabCli {
    /// Command.
    #[command(subcommand)]
    pub command: LabCommand,
}

/// Command.
#[derive(Debug, Subcommand)]
pub enum LabCommand {
    /// Boot guests, run a command or a suite in them, and end with its exit status.
    #[command(after_long_help = STATUSES)]
    Run(Box<RunArgs>),
    /// Build the guest image (QEMU, kernel, driver, Debian), as root, and do nothing more.
    Bed,
    /// Copy the guest image into a new folder, which can be moved; PVRDMA_BED_DIR then names it.
    Pack {
        /// Destination; must not exist.
        folder: PathBuf,
    },
    /// The program's other half, started by the guest's init.
    #[command(hide = true)]
    Agent,
}

/// Arguments of `run`.
#[derive(Clone, Debug, Args)]
pub struct RunArgs {
    /// Number of guests.
    #[arg(long, value_name = "NUMBER", default_value_t = 2, value_parser = clap::value_parser!(u8).range(1..=16))]
    pub vms: u8,
    /// Guests in which the command runs: each guest, or only the first.
    #[arg(long, value_enum, default_value_t = Place::Each, hide_possible_values = true, value_name = "each|first")]
    pub on: Place,
    /// Seconds for everything, from the start of the guests on.
    #[arg(long, value_name = "SECONDS", default_value_t = 1800, value_parser = clap::value_parser!(u64).range(1..))]
    pub timeout: u64,
    /// Folder that the guests see at the same path, in which the command runs [default: the current one].
    #[arg(long, value_name = "DIRECTORY")]
    pub folder: Option<PathBuf>,
    /// The guests cannot change the folder.
    #[arg(long)]
    pub read_only: bool,
    /// A variable for the command: NAME=VALUE, or NAME for its value here; repeatable.
    #[arg(long, value_name = "NAME[=VALUE]")]
    pub env: Vec<String>,
    /// The system of the guests: a folder, or an archive of a container image (OCI layout or `docker save`, also
    /// compressed by gzip). The kernel and its modules stay the lab's.
    #[arg(long, value_name = "DIRECTORY|ARCHIVE", conflicts_with = "package")]
    pub rootfs: Option<PathBuf>,
    /// Debian packages that the guests have in addition. The first run with them needs root and the Debian mirror.
    #[arg(long, value_name = "NAME[=VERSION]", num_args = 1.., conflicts_with = "kernel")]
    pub package: Vec<Package>,
    /// Kernel of the guests and, without --rootfs, their Debian release. The first run with it needs root and the
    /// Debian mirror [default: Debian 13 with Linux 6.12].
    #[arg(long, value_name = "NAME", value_parser = PossibleValuesParser::new(SYSTEMS.iter().map(|system| system.name)))]
    pub kernel: Option<String>,
    /// Memory of each guest in MiB.
    #[arg(long, value_name = "MIB", default_value_t = 1024, value_parser = clap::value_parser!(u32).range(256..))]
    pub memory: u32,
    /// Processors of each guest.
    #[arg(long, value_name = "NUMBER", default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..=64))]
    pub cpus: u32,
    /// Folder for logs: consoles, kernel logs, the command's output, the daemon's log and status [default: a temporary
    /// folder, kept if something fails].
    #[arg(long, value_name = "DIRECTORY")]
    pub logs: Option<PathBuf>,
    /// Run each executable file of this directory instead of a command, in the order of their names. A file whose
    /// status is 77 was skipped; the others run even if one fails.
    #[arg(long, value_name = "DIRECTORY", conflicts_with = "command")]
    pub suite: Option<PathBuf>,
    /// Make the guests' devices vm0, vm1, … or their connections fail: a line for each, as vm1 remote-access/nth:5.
    #[arg(long, value_name = "FILE")]
    pub faults: Option<PathBuf>,
    /// Write the results to a file in the format of JUnit.
    #[arg(long, value_name = "FILE")]
    pub junit: Option<PathBuf>,
    /// Print results as annotations of GitHub Actions, and the output in a group for each guest when it has ended
    /// [default: if GITHUB_ACTIONS is true].
    #[arg(long)]
    pub annotations: bool,
    /// The command and its arguments. No shell interprets them: for one, use `sh -c '…'`.
    #[arg(last = true, required_unless_present = "suite", value_name = "COMMAND")]
    pub command: Vec<String>,
}

impl RunArgs {
    /// The command, or the suite, as a person reads it.
    pub fn shown(&self) -> String {
        match &self.suite {
            Some(suite) => format!("--suite {}", suite.display()),
            None => self.command.join(" "),
        }
    }

    /// Returns `true` if results are printed as annotations.
    pub fn has_annotations(&self) -> bool {
        self.annotations || std::env::var_os("GITHUB_ACTIONS").is_some_and(|value| value == "true")
    }
}

/// In which guests a command runs.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Place {
    /// In all of them.
    Each,
    /// In guest 0.
    First,
}

const STATUSES: &str = "\
The exit status is that of the command; if it fails in a guest, it is ended in the others. That of a suite is of its
first program that failed. Else it is
    123  a guest failed: it did not boot, its kernel panicked, it rebooted, or QEMU ended
    124  the time was up
    125  the lab failed: wrong arguments, no guest bed, no daemon, a --rootfs that is refused
    126  a --rootfs cannot be entered, or the command cannot be executed
    130  Ctrl-C; 129 or 143 after SIGHUP or SIGTERM";

#[cfg(test)]
mod tests {
    use clap::CommandFactory;

    use super::*;

    fn run(line: &str) -> RunArgs {
        match LabCli::try_parse_from(line.split(' ')).unwrap().command {
            LabCommand::Run(args) => *args,
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn the_command_line_that_others_use() {
        LabCli::command().debug_assert();
        let args = run("pvrdma-lab run -- make check --jobs 2");
        assert_eq!((args.vms, args.on, args.timeout, args.read_only), (2, Place::Each, 1800, false));
        assert_eq!(args.command, ["make", "check", "--jobs", "2"]);
        let args = run("pvrdma-lab run --vms 3 --on first --env A=1 --env B --timeout 60 -- ./test");
        assert_eq!((args.vms, args.on, args.timeout), (3, Place::First, 60));
        assert_eq!(args.env, ["A=1", "B"]);
        let args = run("pvrdma-lab run --package gcc make --package ucx-utils --junit out.xml --suite tests");
        assert_eq!(args.package.iter().map(ToString::to_string).collect::<Vec<_>>(), ["gcc", "make", "ucx-utils"]);
        assert_eq!(args.shown(), "--suite tests");
        assert!(args.faults.is_none());
        let args = run("pvrdma-lab run --faults faults.txt -- true");
        assert_eq!(args.faults.as_deref(), Some("faults.txt".as_ref()));
        let args = run("pvrdma-lab run --rootfs image.tar --kernel debian-12-6.1 -- true");
        assert_eq!(args.kernel.as_deref(), Some("debian-12-6.1"));
    }

    #[test]
    fn mistakes_are_named() {
        for (line, word) in [
            ("run", "<COMMAND>"),
            ("run make", "make"),
            ("run --vms 0 -- true", "1..=16"),
            ("run --on second -- true", "each, first"),
            ("run --timeout 0 -- true", "1.."),
            ("run --package gcc --rootfs x -- true", "--rootfs"),
            ("run --package --reinstall -- true", "--reinstall"),
            ("run --package Gcc -- true", "no name of a Debian package"),
            ("run --kernel 6.12 -- true", "debian-13-6.12"),
            ("run --suite tests -- true", "COMMAND"),
        ] {
            let error = LabCli::try_parse_from(std::iter::once("pvrdma-lab").chain(line.split(' '))).unwrap_err();
            assert!(error.to_string().contains(word), "{error}");
        }
    }
}
