//! The command line.

use std::net::{IpAddr, Ipv4Addr};
use std::path::PathBuf;

use clap::{Args, Parser, Subcommand, ValueEnum};

use crate::bench::wire::PeerOptions;
use crate::bench::wire::dumbbell::{DumbbellOptions, HostsOptions};
use crate::demo_cli::DemoOptions;
use crate::doorbells::DoorbellOptions;
use crate::lab::LabCli;
use crate::net_peer::NetPeer;
use crate::pair::LinkKind;

/// Tests and measures the PVRDMA device in QEMU guests that run the unmodified Linux driver.
#[derive(Debug, Parser)]
#[command(name = "guest-tests", version = pvrdmad::VERSION)]
pub(crate) struct Cli {
    /// Command.
    #[command(subcommand)]
    pub(crate) command: Command,
}

/// Command.
#[derive(Debug, Subcommand)]
pub(crate) enum Command {
    /// Build the guest image (QEMU, kernel, driver, root file system) and do nothing more.
    #[command(visible_alias = "bed")]
    Image,
    /// Boot two guests, run the RDMA programs between them, and print the results.
    Demo(DemoOptions),
    /// Run everything: the workspace's tests, then those in guests.
    Test(TestOptions),
    /// Print the supported programs for each link, as a table of Markdown.
    Matrix,
    /// Print which systems have passed `test --only guests/` here, as a table of Markdown.
    Guests {
        /// Build these systems first, by the names of their cases.
        #[arg(value_name = "SYSTEM")]
        build: Vec<String>,
    },
    /// Measure, and write the results as JSON.
    Bench(BenchOptions),
    /// Generate the table of docs/figures.md and the pictures from docs/results.json.
    #[command(hide = true)]
    Published,
    /// Take records of other projects' suites into docs/suites.json, and generate the tables of docs/suites.md.
    #[command(hide = true)]
    Suites {
        /// Files in target/suites, which `test --only slow/suites` has written.
        records: Vec<PathBuf>,
    },
    /// Make the last frame of a recording stay, and write this frame as a picture of its own.
    #[command(hide = true)]
    HoldLastFrame {
        /// An SVG by svg-term.
        picture: PathBuf,
        /// File for the frame.
        result: PathBuf,
    },
    /// Boot two guests and keep them until Enter is pressed. Commands can be typed to either.
    Shell(ShellOptions),
    /// The other program, for tests of it.
    #[command(hide = true)]
    Lab(LabCli),
    /// The program's other half, started by the guest's init.
    #[command(hide = true)]
    Agent,
    /// One side of a measurement over the wire.
    #[command(hide = true)]
    WirePeer(PeerOptions),
    /// Both sides of a measurement over the wire, in a guest.
    #[command(hide = true)]
    WireInGuest {
        /// Frames that are lost, in hundredths of a percent.
        #[arg(long)]
        loss: u16,
    },
    /// Many hosts over a line that marks, in a guest.
    #[command(hide = true)]
    Dumbbell(DumbbellOptions),
    /// The hosts of one side of that.
    #[command(hide = true)]
    DumbbellHosts(HostsOptions),
    /// One side of checked traffic over network functions, in a guest.
    #[command(hide = true, subcommand)]
    NetPeer(NetPeer),
    /// Rings the doorbells of a device, in a guest.
    #[command(hide = true)]
    Doorbells(DoorbellOptions),
    /// Checks of the host's adapter as a backend, for a guest that acts as the host.
    #[command(name = "hca", hide = true, subcommand)]
    HostAdapter(HostAdapterCommand),
}

/// Task for the adapter.
#[derive(Clone, Debug, Subcommand)]
pub(crate) enum HostAdapterCommand {
    /// The conformance suite of the verbs traits.
    Conformance {
        /// Which adapter.
        #[arg(long)]
        device: String,
        /// Only cases whose name contains this.
        #[arg(long, default_value = "")]
        only: String,
    },
    /// Two devices of the in-process driver, with all operations, errors and integrity.
    Devices {
        /// Which adapter.
        #[arg(long)]
        device: String,
    },
    /// Two devices of which one wants more than it may have.
    Limits {
        /// Which adapter.
        #[arg(long)]
        device: String,
    },
    /// Two devices while the adapter's interface changes, goes down, and the adapter is lost.
    PortEvents {
        /// Which adapter.
        #[arg(long)]
        device: String,
    },
    /// Two devices of a daemon, over their sockets: the same operations, errors and integrity checks.
    Sockets {
        /// Sockets of the daemon.
        #[arg(num_args = 2)]
        sockets: Vec<PathBuf>,
        /// Traffic instead, until killed.
        #[arg(long)]
        hold: bool,
        /// The doorbell pages are mapped that the daemon lends.
        #[arg(long)]
        mapped: bool,
    },
    /// A guest of this machine with a device, against `ibv_rc_pingpong` on the adapter itself.
    Nested(NestedOptions),
    /// One device against `ibv_rc_pingpong -s 3000 -n 200`, whose server listens on this machine.
    Pingpong {
        /// Which adapter.
        #[arg(long)]
        device: String,
        /// TCP port of the server.
        #[arg(long, default_value_t = 18515)]
        port: u16,
    },
    /// The daemon, from its start to its end.
    Daemon {
        /// Which adapter.
        #[arg(long)]
        device: String,
        /// Requested connection manager: `auto`, `umad` or `local`.
        #[arg(long, default_value = "auto")]
        cm: String,
    },
    /// One end of `rping` in a guest, connected by the guest's connection manager.
    Rping(RpingOptions),
    /// Speed through a device, compared with a native program on the same adapter.
    Bench {
        /// Which adapter.
        #[arg(long)]
        device: String,
        /// Rounds of each measurement.
        #[arg(long, default_value_t = 3)]
        runs: usize,
    },
}

/// A guest's guest.
#[derive(Clone, Debug, Args)]
pub(crate) struct NestedOptions {
    /// Which adapter.
    #[arg(long)]
    pub(crate) device: String,
    /// This machine's own address.
    #[arg(long)]
    pub(crate) host: IpAddr,
    /// Index of its GID.
    #[arg(long)]
    pub(crate) gid_index: u32,
    /// Address of the guest, which is one of this machine's interface, too.
    #[arg(long)]
    pub(crate) guest: IpAddr,
    /// Directory with the parts of the image for a guest.
    #[arg(long)]
    pub(crate) image: PathBuf,
}

/// A guest that runs `rping`.
#[derive(Clone, Debug, Args)]
pub(crate) struct RpingOptions {
    /// Which adapter.
    #[arg(long)]
    pub(crate) device: String,
    /// The last number of its address, 10.0.0.x.
    #[arg(long, default_value_t = 1)]
    pub(crate) guest: u8,
    /// Makes connections by the host's own connection manager.
    #[arg(long)]
    pub(crate) by_host: bool,
    /// The guest's buffer has the address that this program has for it.
    #[arg(long)]
    pub(crate) in_place: bool,
    /// Rounds.
    #[arg(long, default_value_t = 10)]
    pub(crate) count: u32,
    /// Bytes of each message.
    #[arg(long, default_value_t = 4096)]
    pub(crate) size: usize,
    /// Role.
    #[command(subcommand)]
    pub(crate) role: RpingRole,
}

/// Role of an end of `rping`.
#[derive(Clone, Copy, Debug, Subcommand)]
pub(crate) enum RpingRole {
    /// Waits for a client.
    Serve,
    /// Asks a server.
    Ask {
        /// Its address.
        server: Ipv4Addr,
    },
    /// Asks a server that has no listener, which rejects.
    Rejected {
        /// Its address.
        server: Ipv4Addr,
    },
    /// Tries to send a request from an address that the host does not have.
    Refused {
        /// Its address.
        server: Ipv4Addr,
    },
}

/// Options of `test`.
#[derive(Clone, Debug, Args)]
pub(crate) struct TestOptions {
    /// Run only the guest tests whose name contains this, and not the workspace's tests. May be repeated.
    #[arg(long, value_name = "PATTERN")]
    pub(crate) only: Vec<String>,
    /// Run only the workspace's tests.
    #[arg(long)]
    pub(crate) no_vm: bool,
    /// Connection of the guests; `rxe` checks the image itself, without our device.
    #[arg(long, value_enum, default_value_t = LinkChoice::Pvrdma)]
    pub(crate) link: LinkChoice,
    /// Print the names of the guest tests and end.
    #[arg(long)]
    pub(crate) list: bool,
}

/// The parts of `bench`.
const PARTS: [&str; 15] = [
    "in-process",
    "daemon",
    "limits",
    "state",
    "sweep",
    "guest-sweep",
    "wire",
    "doorbells",
    "vm",
    "card",
    "lab",
    "kvm",
    "guest",
    "dumbbell",
    "hca",
];

/// Options of `bench`.
#[derive(Clone, Debug, Args)]
pub(crate) struct BenchOptions {
    /// File for the results.
    #[arg(long, value_name = "FILE", default_value = "target/bench/results.json")]
    pub(crate) output: PathBuf,
    /// Number of runs of each measurement; the median counts.
    #[arg(long, default_value_t = 5)]
    pub(crate) runs: usize,
    /// Leave out measurements that need virtual machines.
    #[arg(long)]
    pub(crate) no_vm: bool,
    /// Measure only this part. May be repeated.
    #[arg(long, value_name = "PART", value_parser = PARTS)]
    pub(crate) only: Vec<String>,
    /// Results of an earlier commit, which the page shows beside these. May be repeated, the oldest first.
    #[arg(long, value_name = "FILE", conflicts_with = "pair")]
    pub(crate) after: Vec<PathBuf>,
    /// Compare this program with an older build of it: each round runs both, one after the other. Measures what needs
    /// no virtual machine unless `--only` says otherwise.
    #[arg(long, value_name = "OLD_PROGRAM")]
    pub(crate) pair: Option<PathBuf>,
}

/// Options of `shell`.
#[derive(Clone, Debug, Args)]
pub(crate) struct ShellOptions {
    /// Connection of the guests.
    #[arg(long, value_enum, default_value_t = LinkChoice::Pvrdma)]
    pub(crate) link: LinkChoice,
}

/// Connection of the guests.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum LinkChoice {
    /// Our device.
    Pvrdma,
    /// `rdma_rxe` in the guests.
    Rxe,
}

impl LinkChoice {
    /// The kind of link.
    pub(crate) fn kind(self) -> LinkKind {
        match self {
            Self::Pvrdma => LinkKind::Pvrdma,
            Self::Rxe => LinkKind::Rxe,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_part_that_there_is_not_is_an_error_with_the_near_ones() {
        let parse = |part| Cli::try_parse_from(["guest-tests", "bench", "--only", part]).map_err(|e| e.to_string());
        for part in PARTS {
            assert!(parse(part).is_ok(), "{part}");
        }
        let error = parse("dumbel").unwrap_err();
        assert!(error.contains("'dumbel'") && error.contains("a similar value exists: 'dumbbell'"), "{error}");
        assert!(parse("nosuch").is_err());
    }

    /// Each part is measured: a name that `bench` never looks for would measure nothing.
    #[test]
    fn the_parts_are_those_that_are_measured() {
        let source = include_str!("bench/mod.rs");
        for part in PARTS {
            assert!(source.contains(&format!("wanted(\"{part}\")")), "{part}");
        }
        assert_eq!(source.matches("wanted(\"").count(), PARTS.len() + 1, "sweep is asked for twice");
    }
}
