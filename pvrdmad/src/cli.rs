// Long: the whole command line, whose help is one text.
//! The command line.

use std::collections::BTreeMap;
use std::net::IpAddr;
use std::path::PathBuf;

use anyhow::Result;
use clap::builder::{PossibleValuesParser, TypedValueParser};
use clap::{Args, Parser, Subcommand};
use pvrdma_dev::{Limits, ObjectKind};
use pvrdma_rxe::ShareConfig;

use crate::config::{
    BackendSpec, ConfigSpec, ControlSpec, DEFAULT_NETWORK, DeviceSpec, FaultArg, Isolate, LinkState, MetricsSpec,
    NetworkSpec, SandboxMode, Switch, change_share, help,
};
use crate::control_path;
use crate::logging::{LogFilter, LogFormat};
use crate::sandbox::Profile;
use crate::since::Since;

/// Serves PVRDMA devices to virtual machines over vfio-user.
#[derive(Parser, Debug)]
#[command(
    name = "pvrdmad",
    version = crate::VERSION,
    args_conflicts_with_subcommands = true,
    after_help = "RUST_LOG sets the log level [default: info]. More about keys, signals and exit statuses: --help.",
    after_long_help = help::AFTER
)]
pub struct Cli {
    /// Command other than serving.
    #[command(subcommand)]
    pub command: Option<Command>,
    /// Devices and networks to serve.
    #[command(flatten)]
    pub serve: ServeArgs,
}

/// Command other than serving.
#[derive(Subcommand, Debug)]
pub enum Command {
    /// Shows the state of a running daemon.
    Status(StatusArgs),
    /// Shows a device or its objects, or the last failed queue pairs of all devices.
    Show(ShowArgs),
    /// Shows the throughput of devices, or of the queue pairs of one device, periodically.
    Top(TopArgs),
    /// Writes the packets of a device to a pcapng file.
    Capture(CaptureArgs),
    /// Adds a device to a running daemon until the daemon ends.
    Add(AddArgs),
    /// Removes a device from a running daemon and its VM.
    Remove(DeviceArgs),
    /// Takes the link of a device up or down.
    Link(LinkArgs),
    /// Shows or sets limits of a device.
    Limits(LimitsArgs),
    /// Shows or sets rates and weight of a device.
    Share(ShareArgs),
    /// Injects faults on an uplink or into connections of a device, for tests.
    Fault(FaultArgs),
    /// Replaces the processes of networks by the installed version while VMs continue to run.
    Upgrade(UpgradeArgs),
    /// Sets the log level of a running daemon.
    LogLevel(LogLevelArgs),
    /// Prints events of a running daemon as lines of JSON.
    Events(EventsArgs),
    /// Checks a configuration and its requirements on this host, without opening anything.
    Check(CheckArgs),
    /// Prints the libvirt XML of a device.
    Xml(XmlArgs),
    /// Prints a configuration for VMs that leave ESXi.
    FromVmx(FromVmxArgs),
    /// Prints the reference page of the configuration.
    #[command(hide = true)]
    Reference,
    /// Writes the manual pages and completions of a package.
    #[command(hide = true)]
    PackageFiles(PackageArgs),
    /// Prints completions of the last word of a command line, for shells.
    #[command(hide = true)]
    Complete(CompleteArgs),
    /// Serves one network; started by the daemon.
    #[command(hide = true)]
    Worker(WorkerArgs),
    /// Guards the doorbell pages of a network; started by the daemon.
    #[command(hide = true)]
    StandIn(StandInArgs),
}

/// Arguments of `stand-in`.
#[derive(Args, Debug)]
pub struct StandInArgs {
    /// Sandbox mode.
    pub sandbox: SandboxMode,
    /// Name of the network, for lists of processes.
    pub network: String,
}

/// Arguments of `worker`.
#[derive(Args, Debug)]
pub struct WorkerArgs {
    /// Sandbox mode.
    pub sandbox: SandboxMode,
    /// Needs of its adapter and links.
    pub profile: Profile,
    /// Name of the network, for lists of processes.
    pub network: String,
}

/// Devices and networks to serve.
#[derive(Args, Debug, Default)]
pub struct ServeArgs {
    /// A device: name=NAME,socket=PATH,mac=MAC and more keys; repeatable.
    #[arg(long = "device", value_name = "KEY=VALUE,...", long_help = help::device())]
    pub devices: Vec<DeviceSpec>,
    /// A network: name=NAME, its uplink and more keys; repeatable.
    #[arg(long = "network", value_name = "KEY=VALUE,...", long_help = help::network())]
    pub networks: Vec<NetworkSpec>,
    /// Data path: rxe, or ibverbs,device=NAME [default: rxe]
    #[arg(long, value_name = "BACKEND", long_help = help::backend())]
    pub backend: Option<BackendSpec>,
    /// Control socket for `status`, `show` and other commands.
    #[arg(long, value_name = "PATH", long_help = help::control())]
    pub control: Option<ControlSpec>,
    /// Address of metrics over HTTP: unix:PATH or ADDRESS:PORT
    #[arg(long, value_name = "ADDRESS", long_help = help::metrics())]
    pub metrics: Option<MetricsSpec>,
    /// Units that run in separate processes [default: network]
    #[arg(long, value_enum, value_name = "network|none", hide_possible_values = true)]
    pub isolate: Option<Isolate>,
    /// Confine these processes [default: on]
    #[arg(long, value_enum, value_name = "on|off|strict", hide_possible_values = true)]
    pub sandbox: Option<SandboxMode>,
    /// Allow captures of packets [default: on]
    #[arg(long, value_enum, value_name = "on|off", hide_possible_values = true)]
    pub captures: Option<Switch>,
    /// Format of log lines [default: text]
    #[arg(long, value_enum, value_name = "text|json|journald", hide_possible_values = true, default_value_t)]
    #[arg(hide_default_value = true)]
    pub log_format: LogFormat,
    /// Log level, or levels of modules: MODULE=LEVEL,... [default: RUST_LOG, or info]
    #[arg(long, value_name = "LEVEL")]
    pub log_level: Option<LogFilter>,
    /// Replace the daemon at the control socket, under its VMs; a service: upgrade --daemon.
    #[arg(long)]
    pub take_over: bool,
    /// Configuration file, or - for standard input; the command line takes precedence.
    #[arg(long, value_name = "FILE.toml")]
    pub config: Option<PathBuf>,
}

impl ServeArgs {
    /// The configuration file, and values that replace its own.
    pub fn into_parts(self) -> (Option<PathBuf>, ConfigSpec) {
        let Self { devices, networks, backend, control, metrics, isolate, sandbox, captures, config, .. } = self;
        let congestion = Default::default();
        (config, ConfigSpec { backend, control, metrics, isolate, sandbox, captures, congestion, networks, devices })
    }
}

/// Arguments of `check`: those of the daemon itself, and the QEMU program.
#[derive(Args, Debug)]
pub struct CheckArgs {
    /// Devices and networks to check.
    #[command(flatten)]
    pub serve: ServeArgs,
    /// Also looks for problems on this host that keep VMs of QEMU from using their devices.
    #[arg(long)]
    pub vms: bool,
    /// QEMU that VMs use.
    #[arg(long, value_name = "PROGRAM", default_value = "qemu-system-x86_64", requires = "vms")]
    pub qemu: PathBuf,
    /// Prints the findings as one JSON object instead of text.
    #[arg(long)]
    pub json: bool,
}

/// Arguments of `package-files`.
#[derive(Args, Debug)]
pub struct PackageArgs {
    /// Directory; created if it does not exist.
    pub directory: PathBuf,
}

/// Arguments of `complete`.
#[derive(Args, Debug)]
pub struct CompleteArgs {
    /// Words after the name of the program, up to the cursor.
    #[arg(allow_hyphen_values = true, trailing_var_arg = true)]
    pub words: Vec<String>,
}

/// Daemon to connect to.
#[derive(Args, Debug)]
pub struct DaemonArgs {
    /// Control socket of the daemon [default: the default socket of a daemon]
    #[arg(long, value_name = "PATH")]
    control: Option<PathBuf>,
}

impl DaemonArgs {
    /// Returns the path of the control socket.
    ///
    /// # Errors
    /// None is given, and there is none at the default places.
    pub fn control(&self) -> Result<PathBuf> {
        control_path::for_client(self.control.clone())
    }
}

/// Which device of which daemon.
#[derive(Args, Debug)]
pub struct DeviceArgs {
    /// Control socket of the daemon.
    #[command(flatten)]
    pub daemon: DaemonArgs,
    /// Name of the device.
    #[arg(long, value_name = "NAME")]
    pub device: String,
}

/// Arguments of `xml`.
#[derive(Args, Debug)]
pub struct XmlArgs {
    /// Which device.
    #[command(flatten)]
    pub device: DeviceArgs,
    /// Print this domain (a file of `virsh dumpxml`) with the device added or updated.
    #[arg(long, value_name = "DOMAIN")]
    pub into: Option<PathBuf>,
}

/// Arguments of `from-vmx`.
#[derive(Args, Debug)]
pub struct FromVmxArgs {
    /// VMX files of the VMs.
    #[arg(value_name = "FILE.vmx", required = true)]
    pub files: Vec<PathBuf>,
    /// Adapter that becomes the device [default: those of the type PVRDMA]
    #[arg(long, value_name = "ethernetN")]
    pub adapter: Option<String>,
    /// Folder for the sockets.
    #[arg(long, value_name = "FOLDER", default_value = "/run/pvrdmad")]
    pub folder: String,
}

/// Arguments of `status`.
#[derive(Args, Debug)]
pub struct StatusArgs {
    /// Which daemon.
    #[command(flatten)]
    pub daemon: DaemonArgs,
    /// Only print problems, and end with status 1 if there are any, for probes.
    #[arg(long, conflicts_with_all = ["format", "json"])]
    pub check: bool,
    /// Same as --format json.
    #[arg(long, conflicts_with = "format")]
    pub json: bool,
    /// Output format [default: table]
    #[arg(long, value_enum, value_name = "table|json|openmetrics|prometheus", hide_possible_values = true)]
    pub format: Option<StatusFormat>,
}

/// Output format of `status`.
#[derive(clap::ValueEnum, Clone, Copy, PartialEq, Eq, Debug)]
pub enum StatusFormat {
    /// Tables.
    Table,
    /// Complete, including the descriptions of counters.
    Json,
    /// Metrics as OpenMetrics.
    Openmetrics,
    /// Metrics in the older format of Prometheus, for the textfile collector of `node_exporter`.
    Prometheus,
}

/// Argument of `show`.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Shown {
    /// The last failed queue pairs.
    Failures,
    /// Objects of a device.
    Objects(ObjectKind),
    /// A file with the saved state of a device.
    Saved,
}

/// Argument of `show` for a saved state.
const SAVED: &str = "saved";

/// Argument of `show` for failed queue pairs.
const FAILURES: &str = "failures";

fn shown_names() -> impl Iterator<Item = &'static str> {
    ObjectKind::ALL.map(ObjectKind::name).into_iter().chain([FAILURES, SAVED])
}

fn shown(name: &str) -> Result<Shown, String> {
    match name {
        FAILURES => Ok(Shown::Failures),
        SAVED => Ok(Shown::Saved),
        name => name.parse().map(Shown::Objects),
    }
}

/// Arguments of `show`.
#[derive(Args, Debug)]
pub struct ShowArgs {
    /// Objects to show: device, context, pd, mr, cq, srq, qp, traffic, gid, ring, migratable,
    /// failures or saved.
    #[arg(value_name = "OBJECT", hide_possible_values = true, verbatim_doc_comment)]
    #[arg(value_parser = PossibleValuesParser::new(shown_names()).try_map(|name| shown(&name)))]
    pub object: Shown,
    /// File with a saved state, as a VMM reads it from the device; `-` is standard input.
    #[arg(value_name = "FILE", required_if_eq("object", SAVED))]
    pub file: Option<PathBuf>,
    /// Also prints the secrets of a saved state: memory keys and packet sequence numbers.
    #[arg(long)]
    pub secrets: bool,
    /// Which daemon.
    #[command(flatten)]
    pub daemon: DaemonArgs,
    /// Name of the device. Optional with `failures`, which then lists those of all devices.
    #[arg(long, value_name = "NAME")]
    #[arg(required_if_eq_any(ObjectKind::ALL.map(|kind| ("object", kind.name()))))]
    pub device: Option<String>,
    /// Failures from this time on: 10m before now, or 2027-01-31T08:00Z.
    #[arg(long, value_name = "TIME")]
    pub since: Option<Since>,
    /// Complete output as JSON.
    #[arg(long)]
    pub json: bool,
}

/// Arguments of `top`.
#[derive(Args, Debug)]
pub struct TopArgs {
    /// Which daemon.
    #[command(flatten)]
    pub daemon: DaemonArgs,
    /// Show this device and its queue pairs [default: all devices]
    #[arg(long, value_name = "NAME")]
    pub device: Option<String>,
    /// Interval of updates in seconds.
    #[arg(long, value_name = "SECONDS", default_value_t = 1, value_parser = clap::value_parser!(u64).range(1..))]
    pub interval: u64,
    /// End after this number of frames [default: at a signal]
    #[arg(long, value_name = "FRAMES", value_parser = clap::value_parser!(u64).range(1..))]
    pub count: Option<u64>,
}

/// Arguments of `capture`.
#[derive(Args, Debug)]
pub struct CaptureArgs {
    /// Which device.
    #[command(flatten)]
    pub of: DeviceArgs,
    /// File to write, or - for standard output.
    #[arg(short, long, value_name = "FILE")]
    pub write: PathBuf,
    /// Bytes to keep of each frame [default: all]
    #[arg(long, value_name = "BYTES", value_parser = clap::value_parser!(u32).range(1..))]
    pub snaplen: Option<u32>,
    /// Only frames to and from this queue pair of the device: a number, such as 18 or 0x12.
    #[arg(long, value_name = "QPN", value_parser = qpn)]
    pub qp: Option<u32>,
    /// Only frames to and from this address.
    #[arg(long, value_name = "ADDRESS")]
    pub peer: Option<IpAddr>,
    /// End after this number of frames [default: at a signal]
    #[arg(long, value_name = "FRAMES", value_parser = clap::value_parser!(u64).range(1..))]
    pub count: Option<u64>,
    /// End after this number of seconds [default: at a signal]
    #[arg(long, value_name = "SECONDS", value_parser = clap::value_parser!(u64).range(1..))]
    pub seconds: Option<u64>,
}

/// Number of a queue pair.
fn qpn(text: &str) -> Result<u32, String> {
    let number = text.strip_prefix("0x").map_or_else(|| text.parse(), |digits| u32::from_str_radix(digits, 16));
    let number = number.ok().filter(|number| *number < 1 << 24);
    number.ok_or_else(|| format!("'{text}' is no number of a queue pair, such as 18 or 0x12"))
}

/// Arguments of `events`.
#[derive(Args, Debug)]
pub struct EventsArgs {
    /// Which daemon.
    #[command(flatten)]
    pub daemon: DaemonArgs,
    /// End after this number of events [default: at a signal]
    #[arg(long, value_name = "EVENTS", value_parser = clap::value_parser!(u64).range(1..))]
    pub count: Option<u64>,
    /// Print past events from this time on, and end: 10m before now, or 2027-01-31T08:00Z.
    #[arg(long, value_name = "TIME")]
    pub since: Option<Since>,
    /// Print this number of past events, and end.
    #[arg(long, value_name = "EVENTS")]
    pub last: Option<u32>,
    /// Continue with new events after the past ones.
    #[arg(long)]
    pub follow: bool,
}

/// Arguments of `add`.
#[derive(Args, Debug)]
pub struct AddArgs {
    /// Which daemon.
    #[command(flatten)]
    pub daemon: DaemonArgs,
    /// A new network for the device, in the syntax of `pvrdmad --network`, with absolute paths.
    #[arg(long, value_name = "KEY=VALUE,...", value_parser = network)]
    pub network: Option<String>,
    /// The device, in the syntax of `pvrdmad --device`, with absolute paths.
    #[arg(value_name = "KEY=VALUE,...", value_parser = device)]
    pub device: String,
}

/// Checks a network before the daemon is asked.
fn network(text: &str) -> Result<String, String> {
    text.parse::<NetworkSpec>().map(|_| text.to_owned())
}

/// Checks a device before the daemon is asked.
fn device(text: &str) -> Result<String, String> {
    text.parse::<DeviceSpec>().map(|_| text.to_owned())
}

/// Arguments of `link`.
#[derive(Args, Debug)]
pub struct LinkArgs {
    /// New state of the link.
    #[arg(value_enum, hide_possible_values = true, value_name = "up|down")]
    pub state: LinkState,
    /// Which device.
    #[command(flatten)]
    pub of: DeviceArgs,
}

/// Arguments of `limits`.
#[derive(Args, Debug)]
pub struct LimitsArgs {
    /// Which device.
    #[command(flatten)]
    pub of: DeviceArgs,
    /// JSON instead of a table.
    #[arg(long)]
    pub json: bool,
    /// New values; without any, the limits are shown.
    #[arg(value_name = "LIMIT=NUMBER", value_parser = limit)]
    pub set: Vec<(String, u64)>,
}

/// Arguments of `share`.
#[derive(Args, Debug)]
pub struct ShareArgs {
    /// Which device.
    #[command(flatten)]
    pub of: DeviceArgs,
    /// JSON instead of lines of KEY=VALUE.
    #[arg(long)]
    pub json: bool,
    /// New values: weight=1..1000, max-rate, qp-max-rate, min-rate, burst; `off` removes one.
    #[arg(value_name = "KEY=VALUE", value_parser = pair)]
    pub set: Vec<(String, String)>,
}

/// A key of a share with its value.
fn pair(text: &str) -> Result<(String, String), String> {
    let (key, value) = text.split_once('=').ok_or("expected KEY=VALUE")?;
    let pair = (key.to_owned(), value.to_owned());
    // Only the daemon can check whether values fit together, because that depends on the current ones. Each value alone
    // is checked here.
    let any = ShareConfig::default().with_max_rate(Some(u64::MAX));
    change_share(any, &BTreeMap::from([pair.clone()]))?;
    Ok(pair)
}

/// Arguments of `fault`.
#[derive(Args, Debug)]
pub struct FaultArgs {
    /// Which daemon.
    #[command(flatten)]
    pub daemon: DaemonArgs,
    /// Network with the uplink.
    #[arg(long, value_name = "NAME", default_value = DEFAULT_NETWORK)]
    pub network: String,
    /// Device that fails, or whose connections fail, in place of the uplink.
    #[arg(long, value_name = "NAME", conflicts_with = "network")]
    pub device: Option<String>,
    /// File with faults of devices: a line for each, as vm0 loss/nth:5.
    #[arg(long, value_name = "FILE", conflicts_with_all = ["network", "device", "faults"])]
    pub file: Option<PathBuf>,
    /// Rates for an uplink, as loss:0.01/reorder:0.001; faults of a device, as loss/nth:5; or off.
    #[arg(value_name = "FAULT|off", required_unless_present = "file")]
    pub faults: Vec<FaultArg>,
}

/// Arguments of `upgrade`.
#[derive(Args, Debug)]
pub struct UpgradeArgs {
    /// Which daemon.
    #[command(flatten)]
    pub daemon: DaemonArgs,
    /// Network to upgrade [default: all, one after the other].
    #[arg(long, value_name = "NAME")]
    pub network: Option<String>,
    /// Replace the whole daemon, with all networks at once or none.
    #[arg(long = "daemon", conflicts_with = "network")]
    pub whole: bool,
    /// Only print the obstacles to an upgrade of each network.
    #[arg(long)]
    pub check: bool,
    /// Prints JSON.
    #[arg(long)]
    pub json: bool,
}

/// Arguments of `log-level`.
#[derive(Args, Debug)]
pub struct LogLevelArgs {
    /// Which daemon.
    #[command(flatten)]
    pub daemon: DaemonArgs,
    /// off, error, warn, info, debug or trace, or levels of modules: MODULE=LEVEL,...
    #[arg(value_name = "LEVEL")]
    pub level: LogFilter,
}

/// A limit with its value.
fn limit(text: &str) -> Result<(String, u64), String> {
    let (name, value) = text.split_once('=').ok_or("expected LIMIT=NUMBER")?;
    let value = value.parse().map_err(|_| format!("'{value}' is not a number from 0 to {}", u64::MAX))?;
    // The other process checks it as well.
    Limits::default().set(name, value).map_err(|error| error.to_string())?;
    Ok((name.to_owned(), value))
}

#[cfg(test)]
mod tests {
    use clap::CommandFactory;

    use super::*;
    use crate::config::{BACKENDS, ControlKeys, FaultKeys, Keys};
    use pvrdma_ether_link::link_spec::LINKS;

    #[test]
    fn the_command_line_that_scripts_use() {
        Cli::command().debug_assert();
        let cli = Cli::try_parse_from(
            "pvrdmad --device name=vm0,socket=/a,mac=52:54:00:00:00:01,roce=v1,pin=off \
             --device name=vm1,socket=/b,mac=52:54:00:00:00:02 --network name=a,uplink=tap:t --network name=b,vlan=trunk \
             --backend rxe --control /c,group=0,mode=660 --isolate none --sandbox strict --captures off --config f.toml"
                .split(' ')
                .filter(|word| !word.is_empty()),
        )
        .unwrap();
        assert_eq!((cli.serve.devices.len(), cli.serve.networks.len()), (2, 2));
        assert_eq!((cli.serve.isolate, cli.serve.sandbox), (Some(Isolate::None), Some(SandboxMode::Strict)));
        assert_eq!((cli.serve.captures, cli.serve.control.unwrap().access.mode), (Some(Switch::Off), Some(0o660)));
        assert!(cli.command.is_none());
        let cli = Cli::try_parse_from(["pvrdmad", "status", "--control", "/c", "--json"]).unwrap();
        assert!(matches!(cli.command, Some(Command::Status(StatusArgs { json: true, .. }))));
        let cli = Cli::try_parse_from(["pvrdmad", "show", "qp", "--device", "vm0", "--control", "/c"]).unwrap();
        assert!(matches!(
            cli.command,
            Some(Command::Show(ShowArgs { object: Shown::Objects(ObjectKind::Qp), json: false, .. }))
        ));
        let words = ["pvrdmad", "capture", "--control", "/c", "--device", "vm0", "-w", "-", "--snaplen", "96"];
        let cli = Cli::try_parse_from(words).unwrap();
        assert!(matches!(cli.command, Some(Command::Capture(CaptureArgs { snaplen: Some(96), count: None, .. }))));
    }

    #[test]
    fn a_check_takes_the_options_of_the_daemon() {
        let line = "pvrdmad check --config f.toml --device name=vm0,socket=/a,mac=52:54:00:00:00:01 --isolate none";
        let Some(Command::Check(args)) = Cli::try_parse_from(line.split(' ')).unwrap().command else { panic!() };
        assert_eq!((args.serve.devices.len(), args.serve.isolate), (1, Some(Isolate::None)));
        assert_eq!(args.serve.config, Some(PathBuf::from("f.toml")));
    }

    #[test]
    fn commands_that_change_a_daemon() {
        let parse = |line: &str| Cli::try_parse_from(line.split(' ')).unwrap().command.unwrap();
        let device = "name=vm9,socket=/s,mac=52:54:00:00:00:09,network=red";
        let Command::Add(add) = parse(&format!("pvrdmad add --control /c {device}")) else { panic!() };
        assert_eq!((add.device.as_str(), add.network), (device, None));
        let network = "name=red,uplink=tap:t";
        let Command::Add(add) = parse(&format!("pvrdmad add --network {network} {device}")) else { panic!() };
        assert_eq!((add.device.as_str(), add.network.as_deref()), (device, Some(network)));
        assert!(
            matches!(parse("pvrdmad remove --device vm9 --control /c"), Command::Remove(args) if args.device == "vm9")
        );
        let Command::Link(link) = parse("pvrdmad link down --control /c --device vm0") else { panic!() };
        assert_eq!((link.state, link.of.device.as_str()), (LinkState::Down, "vm0"));
        let Command::Share(share) = parse("pvrdmad share --device vm0 weight=7 max-rate=off burst=100000") else {
            panic!()
        };
        assert_eq!(share.set[1], ("max-rate".to_owned(), "off".to_owned()));
        let Command::Fault(fault) = parse("pvrdmad fault loss:0.01/seed:7") else { panic!() };
        assert_eq!((fault.network.as_str(), &fault.faults), ("default", &vec!["loss:0.01/seed:7".parse().unwrap()]));
        let Command::Fault(fault) = parse("pvrdmad fault --device vm0 loss/nth:5 rnr/qp:0x12") else { panic!() };
        assert_eq!((fault.device.as_deref(), fault.faults.len()), (Some("vm0"), 2));
        let Command::Fault(fault) = parse("pvrdmad fault --file faults.txt") else { panic!() };
        assert!(fault.file.is_some() && fault.faults.is_empty());
        for wrong in [
            "share --device vm0 weight=0",
            "share --device vm0 x=1",
            "fault loss:2",
            "fault",
            "fault --file f loss",
            "fault --device a --network b off",
            "log-level loud",
        ] {
            let words = ["pvrdmad"].into_iter().chain(wrong.split(' '));
            assert!(Cli::try_parse_from(words).is_err(), "{wrong}");
        }
        let Command::Limits(limits) = parse("pvrdmad limits --device vm0 max_qp=7 max_memory=0") else { panic!() };
        assert_eq!(limits.set, [("max_qp".to_owned(), 7), ("max_memory".to_owned(), 0)]);
    }

    /// Commands in the documents that talk to a daemon parse.
    #[test]
    fn the_documents_give_commands_that_there_are() {
        let root = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
        let pages = std::fs::read_dir(root.join("docs")).unwrap().map(|page| page.unwrap().path());
        let pages = pages.filter(|page| page.extension().is_some_and(|extension| extension == "md"));
        let text: String =
            pages.chain([root.join("README.md")]).map(|page| std::fs::read_to_string(page).unwrap() + "\n").collect();
        let names: Vec<_> = Cli::command().get_subcommands().map(|sub| sub.get_name().to_owned()).collect();
        let asks = |line: &&str| {
            let mut words = line.split_whitespace();
            words.next() == Some("pvrdmad") && words.next().is_some_and(|word| names.iter().any(|name| name == word))
        };
        let lines: Vec<_> = text.lines().filter(asks).filter(|line| !line.ends_with('\\')).collect();
        assert!(lines.len() >= 8, "{lines:?}");
        for line in lines {
            let parsed = Cli::try_parse_from(line.split(['#', '|', '>']).next().unwrap_or_default().split_whitespace());
            assert!(parsed.is_ok(), "{line}: {}", parsed.unwrap_err());
        }
    }

    /// Returns the text of `--help` for each user command, as shown in a terminal.
    fn helps() -> Vec<String> {
        let mut command = Cli::command();
        command.build();
        let shown = command.get_subcommands().filter(|sub| !sub.is_hide_set());
        let subcommands: Vec<_> = shown.map(|sub| sub.clone().render_long_help().to_string()).collect();
        [command.render_long_help().to_string(), command.render_help().to_string()]
            .into_iter()
            .chain(subcommands)
            .collect()
    }

    #[test]
    fn help_fits_the_terminal() {
        let helps = helps();
        let long: Vec<_> =
            helps.iter().flat_map(|help| help.lines()).filter(|line| line.chars().count() > 100).collect();
        assert!(long.is_empty(), "{long:#?}");
    }

    #[test]
    fn help_knows_every_key() {
        let help = Cli::command().render_long_help().to_string();
        let devices = DeviceSpec::KEYS.iter().filter(|key| !key.file_only);
        let control = ControlKeys::KEYS.iter().filter(|key| key.name != "path");
        let backends = BACKENDS.iter().flat_map(|kind| kind.about.keys);
        for key in devices.chain(NetworkSpec::KEYS).chain(backends).chain(control) {
            let row = format!("{}={} ", key.name, key.value);
            assert!(help.lines().any(|line| line.trim_start().starts_with(&row)), "{row}");
        }
        for key in FaultKeys::KEYS {
            assert!(help.contains(&format!("  {}:{} ", key.name, key.value)), "{}", key.name);
        }
        for word in LINKS.iter().map(|&(link, _)| link).chain(["RUST_LOG", "SIGHUP", "XDG_RUNTIME_DIR"]) {
            assert!(help.contains(word), "{word}");
        }
    }

    /// Each line of a help table is complete: it begins with a capital letter, and states its default once.
    #[test]
    fn help_is_made_of_whole_lines() {
        let keys = DeviceSpec::KEYS.iter().chain(NetworkSpec::KEYS).chain(ControlKeys::KEYS);
        let keys = keys.chain(BACKENDS.iter().flat_map(|kind| kind.about.keys)).chain(FaultKeys::KEYS);
        for key in keys {
            let line = key.summary();
            assert!(line.starts_with(char::is_uppercase) && line.ends_with('.'), "{line}");
            assert!(!line.contains("default"), "{line}");
            assert!(key.doc.len() == 1 || key.doc[1].is_empty(), "{line}");
        }
        for help in helps() {
            for line in help.lines() {
                assert!(line.matches("[default").count() <= 1, "{line}");
            }
        }
    }

    #[test]
    fn mistakes_are_named() {
        for (arguments, word) in [
            ("--device name=a,speed=9", "speed"),
            ("--device name=a,pin=maybe", "registered"),
            ("--network name=a,mac=52:54:00:00:00:01", "unknown key 'mac'"),
            ("--isolate vm", "[possible values: network, none]"),
            ("--sandbox maybe", "[possible values: on, off, strict]"),
            ("--captures maybe", "[possible values: on, off]"),
            ("--control /c,mode=rw", "octal"),
            ("--backend verbs", "rxe"),
            ("--frobnicate", "frobnicate"),
            ("capture --control /c --device vm0", "--write"),
            ("capture --control /c --device vm0 -w f --snaplen 0", "snaplen"),
            ("status --device vm0", "--device"),
            ("add --control /c", "KEY=VALUE"),
            ("add --control /c name=a,speed=9", "speed"),
            ("add --control /c name=a,uplink=tap:t", "write --network name=NAME,uplink=tap:t and"),
            ("add --control /c --network name=a,speed=9 name=a", "speed"),
            ("remove --control /c", "--device"),
            ("link sideways --device vm0", "[possible values: up, down]"),
            ("link up --control /c", "--device"),
            ("limits --device vm0 max_qp", "LIMIT=NUMBER"),
            ("limits --device vm0 max_qp=x", "not a number"),
            ("limits --device vm0 speed=9", "there is no limit 'speed'"),
            ("show qp --control /c", "--device"),
            (
                "show window --device vm0",
                "[possible values: device, context, pd, mr, cq, srq, qp, traffic, gid, ring, migratable, failures, saved]",
            ),
        ] {
            let error = Cli::try_parse_from(["pvrdmad"].into_iter().chain(arguments.split(' '))).unwrap_err();
            assert!(error.to_string().contains(word), "{error}");
        }
    }
}
