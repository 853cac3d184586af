//! The command line.

use std::path::PathBuf;

use clap::{Args, Parser, Subcommand};

use crate::config::{BackendSpec, ConfigSpec, DeviceSpec};

/// Serves PVRDMA devices to virtual machines over vfio-user.
#[derive(Parser, Debug)]
#[command(name = "pvrdmad", version, args_conflicts_with_subcommands = true)]
pub struct Cli {
    /// Something else than serving.
    #[command(subcommand)]
    pub command: Option<Command>,
    /// What to serve.
    #[command(flatten)]
    pub serve: ServeArgs,
}

/// Something else than serving.
#[derive(Subcommand, Debug)]
pub enum Command {
    /// Shows what a running daemon does.
    Status(StatusArgs),
    /// Writes what goes over a device's uplink, and what is delivered within the host, to a pcapng file until interrupted.
    Capture(CaptureArgs),
}

/// What to serve.
#[derive(Args, Debug, Default)]
pub struct ServeArgs {
    /// A device: name=NAME,socket=PATH,mac=MAC and optionally roce=v1|v2, pin=all|registered|off, version=17..20, intx.
    /// uplink=LINK connects it to the network, nic=LINK the network function that shares its MAC (QEMU's netdev), whose other
    /// frames are passed on; mtu=BYTES is what the network carries [default: 1500, less what a tunnel needs]. A LINK is
    /// af_packet:INTERFACE (an interface of this host), tap:NAME (one that ends here), vxlan:ADDRESS[:PORT] (a tunnel over UDP, from this address of ours to each
    /// remote=ADDRESS[:PORT], which may come several times; vni=N [default: 0]; learn=stations|remotes [default: stations]:
    /// remotes listens to everybody), unix:PATH (listens for QEMU's `-netdev stream,server=off`), unix-connect:PATH (connects
    /// to `server=on`, again and again) or unix-dgram:LOCAL:REMOTE (`-netdev dgram`).
    /// frames are passed on; mtu=BYTES is what the network carries [default: 1500]. A LINK is unix:PATH (listens for QEMU's
    /// vlan=1..4094 puts both functions into a VLAN; pcp=always tags packets of no VLAN for their priority; forged=allow lets the
    /// network function send from other addresses than its own; congestion=off ignores congestion.
    /// For tests, fault=loss:RATE/duplicate:RATE/reorder:RATE/corrupt:RATE/delay:RATE/seed:NUMBER makes a bad cable of the
    /// uplink, in both directions: a RATE is a share of all frames (0.01), what is left out does not happen.
    /// A device of the same name in the configuration file gets these values in place of its own.
    #[arg(long = "device", value_name = "KEY=VALUE,...")]
    pub devices: Vec<DeviceSpec>,
    /// What carries the traffic: rxe, the software adapter [default], or ibverbs,device=NAME: the host's RDMA adapter, with
    /// port=NUMBER [1], gid-index=auto|NUMBER [auto], max-pinned=BYTES a device may register [64 GiB], cm=auto|umad|local:
    /// whether rdma_cm reaches beyond this daemon [auto], and poll=MICROSECONDS of polling after a completion [50].
    #[arg(long, value_name = "BACKEND")]
    pub backend: Option<BackendSpec>,
    /// Socket that answers questions about the daemon.
    #[arg(long, value_name = "PATH")]
    pub control: Option<PathBuf>,
    /// Configuration file.
    #[arg(long, value_name = "FILE.toml")]
    pub config: Option<PathBuf>,
}

impl ServeArgs {
    /// The configuration file, and what to put over it.
    pub fn into_parts(self) -> (Option<PathBuf>, ConfigSpec) {
        let Self { devices, backend, control, config } = self;
        (config, ConfigSpec { backend, control, devices, ..ConfigSpec::default() })
    }
}

/// Arguments of `status`.
#[derive(Args, Debug)]
pub struct StatusArgs {
    /// Control socket of the daemon.
    #[arg(long, value_name = "PATH")]
    pub control: PathBuf,
    /// JSON instead of a table.
    #[arg(long)]
    pub json: bool,
}

/// Arguments of `capture`.
#[derive(Args, Debug)]
pub struct CaptureArgs {
    /// Control socket of the daemon.
    #[arg(long, value_name = "PATH")]
    pub control: PathBuf,
    /// Which device.
    #[arg(long, value_name = "NAME")]
    pub device: String,
    /// Where to write; - is standard output.
    #[arg(short, long, value_name = "FILE")]
    pub write: PathBuf,
    /// Bytes of a frame that are kept [default: all].
    #[arg(long, value_name = "BYTES", value_parser = clap::value_parser!(u32).range(1..))]
    pub snaplen: Option<u32>,
    /// End after so many frames.
    #[arg(long, value_name = "FRAMES", value_parser = clap::value_parser!(u64).range(1..))]
    pub count: Option<u64>,
    /// End after so many seconds.
    #[arg(long)]
    pub seconds: Option<u64>,
}

#[cfg(test)]
mod tests {
    use clap::CommandFactory;

    use super::*;

    #[test]
    fn the_command_line_that_scripts_use() {
        Cli::command().debug_assert();
        let cli = Cli::try_parse_from(
            "pvrdmad --device name=vm0,socket=/a,mac=52:54:00:00:00:01,roce=v1,pin=off \
             --device name=vm1,socket=/b,mac=52:54:00:00:00:02 --backend rxe --control /c --config f.toml"
                .split(' ')
                .filter(|word| !word.is_empty()),
        )
        .unwrap();
        assert_eq!(cli.serve.devices.len(), 2);
        assert!(cli.command.is_none());
        let cli = Cli::try_parse_from(["pvrdmad", "status", "--control", "/c", "--json"]).unwrap();
        assert!(matches!(cli.command, Some(Command::Status(StatusArgs { json: true, .. }))));
        let words = ["pvrdmad", "capture", "--control", "/c", "--device", "vm0", "-w", "-", "--snaplen", "96"];
        let cli = Cli::try_parse_from(words).unwrap();
        assert!(matches!(cli.command, Some(Command::Capture(CaptureArgs { snaplen: Some(96), count: None, .. }))));
    }

    #[test]
    fn mistakes_are_named() {
        for (arguments, word) in [
            ("--device name=a,speed=9", "speed"),
            ("--device name=a,pin=maybe", "registered"),
            ("--backend verbs", "rxe"),
            ("--frobnicate", "frobnicate"),
            ("status", "--control"),
            ("capture --control /c --device vm0", "--write"),
            ("capture --control /c --device vm0 -w f --snaplen 0", "snaplen"),
        ] {
            let error = Cli::try_parse_from(["pvrdmad"].into_iter().chain(arguments.split(' '))).unwrap_err();
            assert!(error.to_string().contains(word), "{error}");
        }
    }
}
