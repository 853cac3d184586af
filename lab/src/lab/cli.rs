//! The command line of `pvrdma-lab`.

use std::path::PathBuf;

use clap::{Args, Parser, Subcommand, ValueEnum};

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
    /// Boot guests, run a command in them, and end with its exit status.
    #[command(after_long_help = STATUSES)]
    Run(RunArgs),
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
    /// The command and its arguments. No shell interprets them: for one, use `sh -c '…'`.
    #[arg(last = true, required = true, value_name = "COMMAND")]
    pub command: Vec<String>,
}

impl RunArgs {
    /// The command as a person reads it.
    pub fn shown(&self) -> String {
        self.command.join(" ")
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
The exit status is that of the command; if it fails in a guest, it is ended in the others. Else it is
    123  a guest failed: it did not boot, its kernel panicked, it rebooted, or QEMU ended
    124  the time was up
    125  the lab failed: wrong arguments, no guest bed, no daemon";

#[cfg(test)]
mod tests {
    use clap::CommandFactory;

    use super::*;

    fn run(line: &str) -> RunArgs {
        match LabCli::try_parse_from(line.split(' ')).unwrap().command {
            LabCommand::Run(args) => args,
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
    }

    #[test]
    fn mistakes_are_named() {
        for (line, word) in [
            ("run", "<COMMAND>"),
            ("run make", "make"),
            ("run --vms 0 -- true", "1..=16"),
            ("run --on second -- true", "each, first"),
            ("run --timeout 0 -- true", "1.."),
        ] {
            let error = LabCli::try_parse_from(std::iter::once("pvrdma-lab").chain(line.split(' '))).unwrap_err();
            assert!(error.to_string().contains(word), "{error}");
        }
    }
}
