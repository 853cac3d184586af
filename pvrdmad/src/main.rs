//! `pvrdmad`: see the library.

use std::collections::BTreeMap;
use std::fs::File;
use std::io::{self, Read, Write};
use std::path::Path;
use std::process::ExitCode;
use std::sync::Arc;
use std::thread;
use std::time::Duration;

use anyhow::{Context, Result, anyhow, ensure};
use clap::{Parser, ValueEnum};
use log::{error, info};
use pvrdma_base::threads::{self, ThreadKind};
use pvrdmad::{
    capture,
    check::{
        self, Findings,
        vms::{self, Host},
    },
    cli::{
        CaptureArgs, CheckArgs, Cli, Command, DaemonArgs, FaultArgs, FromVmxArgs, LimitsArgs, ServeArgs, ShareArgs,
        ShowArgs, Shown, StandInArgs, StatusArgs, StatusFormat, UpgradeArgs, WorkerArgs, XmlArgs,
    },
    complete,
    config::{Config, ConfigError, ConfigSpec, FaultArg, FaultFile, Inherited, STANDARD_INPUT, SandboxMode, reference},
    control, control_path,
    daemon::Daemon,
    doorbells, history, keeper,
    logging::{self, LogFilter, LogFormat},
    package,
    protocol::{Request, checked_lines, upgraded_lines},
    saved_file,
    service::{self, Watchdog},
    status::{render_failures, render_limits, render_objects},
    top,
    vmx::{self, Vmx},
    worker::process,
    xml,
};
use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM, SIGUSR1, SIGUSR2};
use signal_hook::iterator::Signals;

fn main() -> ExitCode {
    // A keeper is recognized before the command line is parsed, because parsing takes more memory than a keeper needs.
    if let Some(code) = keeper() {
        return code;
    }
    let cli = Cli::parse();
    let result = match cli.command {
        Some(Command::Status(args)) => status(&args),
        Some(Command::Show(args)) => show(&args),
        Some(Command::Top(args)) => top::run(&args),
        Some(Command::Capture(args)) => capture(&args),
        Some(Command::Add(args)) => {
            change(&args.daemon, &Request::AddDevice { device: args.device, network: args.network })
        }
        Some(Command::Remove(args)) => change(&args.daemon, &Request::RemoveDevice { device: args.device }),
        Some(Command::Link(args)) => {
            change(&args.of.daemon, &Request::Link { device: args.of.device, state: args.state })
        }
        Some(Command::Limits(args)) => limits(args),
        Some(Command::Share(args)) => share(args),
        Some(Command::Fault(args)) => fault(args),
        Some(Command::Upgrade(args)) => upgrade(&args),
        Some(Command::LogLevel(args)) => change(&args.daemon, &Request::LogLevel { level: args.level }),
        Some(Command::Events(args)) => history::events(&args, |line| print(&line)),
        Some(Command::Check(args)) => check(args),
        Some(Command::Xml(args)) => xml(&args),
        Some(Command::FromVmx(args)) => from_vmx(&args),
        Some(Command::PackageFiles(args)) => package::write(&args.directory),
        Some(Command::Complete(args)) => print(&complete::complete(&args.words).join("\n")),
        Some(Command::Reference) => print(&reference::markdown()),
        Some(Command::Worker(args)) => worker(&args),
        Some(Command::StandIn(args)) => stand_in(&args),
        None => serve(cli.serve),
    };
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            // If standard error is closed, the caller wants no messages.
            let _ = writeln!(io::stderr(), "pvrdmad: {error:#}");
            // The exit status is that of a wrong command line, because restarting the daemon would not help.
            if error.is::<ConfigError>() { ExitCode::from(2) } else { ExitCode::FAILURE }
        }
    }
}

/// Maximum duration of the daemon's shutdown. All workers together have three seconds to exit, and one more after they
/// were killed.
const LONGEST_END: Duration = Duration::from_secs(5);

fn serve(args: ServeArgs) -> Result<()> {
    // This comes before there is another thread, or another process that would inherit these descriptors.
    let inherited = Inherited::from_environment()?;
    start_log(args.log_format, args.log_level.as_ref())?;
    let take_over = args.take_over;
    let (file, command_line) = args.into_parts();
    let config = Config::load(file.as_deref(), command_line.clone())?;
    // Handlers are registered before the first socket exists, so that no signal leaves a socket behind.
    let mut signals = Signals::new([SIGTERM, SIGINT, SIGHUP, SIGUSR1, SIGUSR2]).context("signal handlers")?;
    let mut daemon = if take_over {
        let control = config.control.map(|control| control.path);
        Daemon::take_over(&control_path::for_client(control)?, &mut io::stdout(), &mut io::stderr())?
    } else {
        Daemon::supervise(&config, inherited, &mut io::stdout())?
    };
    let watchdog = Watchdog::start(&daemon).context("watchdog")?;
    service::ready(&daemon.summary());
    daemon.is_ready();
    let (replaced, wake) = (daemon.replaced(), signals.handle());
    threads::spawn(ThreadKind::Supervisor, "replacement", move || {
        if replaced.recv().is_ok() {
            wake.close();
        }
    })?;
    wait_for_end(&mut signals, || reload(&mut daemon, file.as_deref(), &command_line));
    if daemon.is_replaced() {
        end_within(LONGEST_END, 0)?;
        daemon.leave();
    }
    service::stopping();
    // Log: the operator sends signals.
    info!("stopping");
    end_within(LONGEST_END, 1)?;
    // A second signal ends the daemon at once.
    threads::spawn(ThreadKind::Supervisor, "signals", move || {
        wait_for_end(&mut signals, || ());
        std::process::exit(1);
    })?;
    drop(watchdog);
    drop(daemon);
    Ok(())
}

/// Ends the process with a status, if it has not ended by itself within this time.
fn end_within(time: Duration, status: i32) -> io::Result<()> {
    threads::spawn(ThreadKind::Supervisor, "end", move || {
        thread::sleep(time);
        // Log: once, at the end.
        error!("the daemon has not ended within {} s, and exits", time.as_secs());
        std::process::exit(status);
    })
    .map(|_| ())
}

/// Starts logging, and warns about a log filter that probably means something else.
fn start_log(format: LogFormat, filter: Option<&LogFilter>) -> Result<()> {
    logging::start(format, filter).context("journal")?;
    if let Some(doubt) = logging::doubt().filter(|_| filter.is_none()) {
        // The filter may suppress this warning, so it is printed directly.
        let _ = writeln!(io::stderr(), "pvrdmad: {doubt}");
    }
    Ok(())
}

/// Reads the configuration again.
fn reload(daemon: &mut Daemon, file: Option<&Path>, command_line: &ConfigSpec) {
    service::reloading();
    let read = match file {
        Some(file) if file == Path::new(STANDARD_INPUT) => {
            Err("the configuration came from standard input, which cannot be read again".to_owned())
        }
        file => Config::load(file, command_line.clone()).map_err(|error| format!("{:#}", anyhow::Error::from(error))),
    };
    let state = match read.and_then(|config| daemon.reload(config)) {
        Ok(changes) => {
            // Log: the operator sends signals.
            info!("SIGHUP: {changes}");
            daemon.summary()
        }
        Err(problem) => {
            // Log: likewise.
            error!("SIGHUP: nothing is changed: {problem}");
            format!("{}; the last reload failed: {problem}", daemon.summary())
        }
    };
    service::ready(&state);
}

/// Prints the libvirt XML of a device.
fn xml(args: &XmlArgs) -> Result<()> {
    let XmlArgs { device: args, into } = args;
    let status = control::ask_status(&args.daemon.control()?, false)?;
    let device = status.devices.iter().find(|device| device.name() == args.device);
    let device = device.with_context(|| format!("there is no device '{}'", args.device))?;
    let Some(into) = into else { return print(&xml::domain(device)) };
    let domain = std::fs::read_to_string(into).with_context(|| into.display().to_string())?;
    print(&xml::merge(&domain, device).map_err(|problem| anyhow!("{}: {problem}", into.display()))?)
}

/// Prints a configuration for VMs that leave ESXi.
fn from_vmx(args: &FromVmxArgs) -> Result<()> {
    let machines = args.files.iter().map(|file| Vmx::read(file)).collect::<Result<Vec<_>>>()?;
    print(&vmx::configuration(&machines, args.adapter.as_deref(), &args.folder)?)
}

/// Prints the files and sockets that the daemon would open with this configuration, and the problems.
fn check(args: CheckArgs) -> Result<()> {
    start_log(args.serve.log_format, args.serve.log_level.as_ref())?;
    let (file, command_line) = args.serve.into_parts();
    let config = match Config::load(file.as_deref(), command_line) {
        Ok(config) => config,
        Err(error) => {
            if args.json {
                print(&Findings::of_error(&error).json()?)?;
            }
            return Err(error.into());
        }
    };
    let report = check::report(&config);
    let vms = if args.vms { vms::judge(&Host::look(&args.qemu), &config) } else { Findings::default() };
    if args.json {
        let mut all = report.findings().clone();
        all.extend(vms.clone());
        print(&all.json()?)?;
    } else {
        print(&report.text())?;
        if args.vms {
            print(&vms::text(&vms))?;
        }
    }
    report.result().and_then(|()| vms.result())
}

/// Serves one network, for the supervisor that started this process.
fn worker(args: &WorkerArgs) -> Result<()> {
    logging::start(LogFormat::default(), None)?;
    process::run(args.sandbox, args.profile)
}

/// Serves doorbell pages in place of a worker that has ended. This process outlives the supervisor as long as VMMs need
/// it.
fn stand_in(args: &StandInArgs) -> Result<()> {
    logging::start(LogFormat::default(), None)?;
    // Signals that end the daemon must not end the VMs.
    for signal in [SIGHUP, SIGINT, SIGTERM, SIGUSR1, SIGUSR2] {
        signal_hook::flag::register(signal, Arc::default()).context("signal handlers")?;
    }
    doorbells::stand_in::run(args.sandbox)
}

/// Runs as a keeper, which receives the descriptors of a device's clients, if the supervisor started this process as
/// one.
fn keeper() -> Option<ExitCode> {
    let mut arguments = std::env::args_os().skip(1);
    if arguments.next()? != keeper::ARGUMENT {
        return None;
    }
    let mode = arguments.next().and_then(|mode| SandboxMode::from_str(mode.to_str()?, false).ok());
    let Some(mode) = mode else { return Some(ExitCode::from(2)) };
    Some(match keeper::run(mode) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            let _ = writeln!(io::stderr(), "pvrdmad: keeper: {error}");
            ExitCode::FAILURE
        }
    })
}

/// Waits for a signal that ends the daemon. The other signals are handled because they would kill it otherwise: SIGHUP
/// reloads the configuration, the rest are ignored.
fn wait_for_end(signals: &mut Signals, mut reload: impl FnMut()) {
    for signal in signals.forever() {
        match signal {
            SIGHUP => reload(),
            SIGTERM | SIGINT => return,
            _ => {}
        }
    }
}

fn status(args: &StatusArgs) -> Result<()> {
    if args.check {
        let problems = control::ask_status(&args.daemon.control()?, false)?.problems();
        print(&problems.iter().map(|problem| format!("{problem}\n")).collect::<String>())?;
        ensure!(problems.is_empty(), "{} problems", problems.len());
        return Ok(());
    }
    let format = args.format.unwrap_or(if args.json { StatusFormat::Json } else { StatusFormat::Table });
    let status = control::ask_status(&args.daemon.control()?, format != StatusFormat::Table)?;
    print(&match format {
        StatusFormat::Table => status.render(),
        StatusFormat::Json => serde_json::to_string_pretty(&status)? + "\n",
        StatusFormat::Openmetrics => status.openmetrics()?,
        StatusFormat::Prometheus => status.prometheus()?,
    })
}

fn show(args: &ShowArgs) -> Result<()> {
    ensure!((args.object == Shown::Saved) == args.file.is_some(), "only `show saved` takes a file");
    if let Some(file) = &args.file {
        ensure!(args.device.is_none() && args.since.is_none(), "--device and --since are for a running daemon");
        return saved_file::show(file, args.json, args.secrets, &mut io::stdout());
    }
    ensure!(!args.secrets, "--secrets is for a saved state");
    let (path, device) = (args.daemon.control()?, args.device.as_deref());
    match args.object {
        Shown::Failures => {
            let failures = history::ask_failures(&path, device, args.since)?;
            let json = || serde_json::to_string_pretty(&failures);
            print(&if args.json { json()? + "\n" } else { render_failures(&failures) })
        }
        Shown::Saved => Ok(()),
        Shown::Objects(kind) => {
            ensure!(args.since.is_none(), "--since is for failures");
            let objects = control::ask_objects(&path, device.unwrap_or_default(), kind)?;
            let json = || serde_json::to_string_pretty(&objects);
            print(&if args.json { json()? + "\n" } else { render_objects(kind, &objects) })
        }
    }
}

fn limits(args: LimitsArgs) -> Result<()> {
    let limits = control::limits(&args.of.daemon.control()?, &args.of.device, args.set.into_iter().collect())?;
    match args.json {
        true => print(&(serde_json::to_string_pretty(&limits)? + "\n")),
        false => print(&render_limits(&limits)),
    }
}

fn share(args: ShareArgs) -> Result<()> {
    let share = control::share(&args.of.daemon.control()?, &args.of.device, args.set.into_iter().collect())?;
    let lines = || share.iter().map(|(key, value)| format!("{key}={value}\n")).collect();
    print(&if args.json { serde_json::to_string_pretty(&share)? + "\n" } else { lines() })
}

/// Sets faults of an uplink, of a device, or of the devices in a file.
fn fault(args: FaultArgs) -> Result<()> {
    let FaultArgs { daemon, network, device, file, faults } = args;
    let Some(path) = file else {
        let request = match device {
            Some(device) => FaultArg::of_device(&faults)
                .map(|faults| Request::DeviceFaults { faults: BTreeMap::from([(device, faults)]) }),
            None => FaultArg::of_uplink(&faults).map(|fault| Request::Fault { network, fault }),
        };
        return change(&daemon, &request.map_err(anyhow::Error::msg)?);
    };
    let mut text = String::new();
    let read = File::open(&path).and_then(|file| file.take(FaultFile::MAX_LEN + 1).read_to_string(&mut text));
    let FaultFile(faults) = read
        .map_err(anyhow::Error::from)
        .and_then(|_| text.parse().map_err(anyhow::Error::msg))
        .with_context(|| path.display().to_string())?;
    change(&daemon, &Request::DeviceFaults { faults })
}

/// Upgrades networks, or checks that they can be upgraded, and prints the result for each. Fails if one of them failed.
fn upgrade(args: &UpgradeArgs) -> Result<()> {
    let upgraded = control::upgrade(&args.daemon.control()?, args.network.as_deref(), args.whole, args.check)?;
    let lines = || if args.check { checked_lines(&upgraded) } else { upgraded_lines(&upgraded) };
    print(&if args.json { serde_json::to_string_pretty(&upgraded)? + "\n" } else { lines() })?;
    let failed = upgraded.iter().filter(|upgraded| upgraded.problem.is_some()).count();
    let what = if args.check { "cannot be upgraded" } else { "were not upgraded" };
    ensure!(failed == 0, "{failed} of {} networks {what}", upgraded.len());
    Ok(())
}

fn change(daemon: &DaemonArgs, request: &Request) -> Result<()> {
    control::change(&daemon.control()?, request)
}

fn print(text: &str) -> Result<()> {
    io::stdout().write_all(text.as_bytes()).context("standard output")
}

fn capture(args: &CaptureArgs) -> Result<()> {
    let frames = capture::client::run(args)?;
    // Printed to standard error, because standard output may be the capture.
    let _ = writeln!(io::stderr(), "{frames} frames");
    Ok(())
}
