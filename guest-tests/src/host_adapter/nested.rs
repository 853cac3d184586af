//! A guest with a device on this machine, which is a guest itself: the daemon, QEMU and the driver as in production, on
//! an adapter of the host.

use std::net::{IpAddr, Ipv4Addr};
use std::path::Path;
use std::process::{Command, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};

use crate::cli::NestedOptions;
use crate::daemon::{Daemon, DaemonDevice};
use crate::endpoints::{gid_index, listens, network_script};
use crate::image::GuestImage;
use crate::vm::{Vm, VmBuilder};

/// Slow-down factor of emulation within emulation.
const PATIENCE: u32 = 8;
const PROGRAM_TIME: Duration = Duration::from_secs(400);
const MEMORY_MIB: u32 = 512;
const MAC: &str = "52:54:00:00:03:02";
/// Addresses of the guest and of this machine in QEMU's user network.
const INNER: IpAddr = IpAddr::V4(Ipv4Addr::new(10, 0, 2, 15));
const OUTER: Ipv4Addr = Ipv4Addr::new(10, 0, 2, 2);

/// Boots the guest and runs programs in it against the same programs on the adapter.
pub(super) fn check(options: &NestedOptions) -> Result<()> {
    let folder = tempfile::tempdir().context("cannot create a directory")?;
    let directory = folder.path();
    let socket = directory.join("vm0");
    let device = DaemonDevice {
        name: "vm0".to_owned(),
        socket: socket.clone(),
        mac: MAC.to_owned(),
        // The host has the guest's address as well.
        options: format!(",pin=off,address=own,address={}", options.guest),
    };
    let mut daemon = Daemon::start_on(&format!("ibverbs,device={}", options.device), directory, &[device])?;
    let ran = in_guest(options, directory, &socket);
    ran.with_context(|| format!("--- pvrdmad\n{}", daemon.log_tail()))?;
    ensure!(daemon.terminate(), "the daemon does not end well\n{}", daemon.log_tail());
    Ok(())
}

fn in_guest(options: &NestedOptions, directory: &Path, socket: &Path) -> Result<()> {
    let started = Instant::now();
    let vm = VmBuilder::new(&GuestImage::at(&options.image), directory)
        .name("inner")
        .memory_mib(MEMORY_MIB)
        .patience(PATIENCE)
        .user_network(MAC)
        .pvrdma_socket(socket)
        .boot()?;
    println!("up after {:.0} s", started.elapsed().as_secs_f64());
    let run = || -> Result<()> {
        vm.run(&network_script("vmxnet3", &[INNER, options.guest], 1500))?;
        // The router only answers for itself, and the driver needs to know the MAC address of the adapter's address.
        vm.run(&format!(
            "ip neigh replace {} lladdr {} dev $(cat /run/nic-vmxnet3)",
            options.host,
            mac(&options.device)?
        ))?;
        vm.run("modprobe ib_uverbs && modprobe vmw_pvrdma")?;
        let index = gid_index(&vm, "vmw_pvrdma0", options.guest)?;
        println!("driver after {:.0} s", started.elapsed().as_secs_f64());
        PROGRAMS
            .into_iter()
            .try_for_each(|program| between(options, &vm, index, program).with_context(|| format!("{program:?}")))
    };
    run().with_context(|| vm.diagnosis())?;
    println!("all after {:.0} s", started.elapsed().as_secs_f64());
    Ok(())
}

/// Returns the Ethernet address of the adapter's network interface.
fn mac(device: &str) -> Result<String> {
    let read = |path: String| std::fs::read_to_string(&path).with_context(|| format!("cannot read {path}"));
    let interface = read(format!("/sys/class/infiniband/{device}/parent"))?;
    Ok(read(format!("/sys/class/net/{}/address", interface.trim()))?.trim().to_owned())
}

/// Programs between the guest and the adapter: a program, its options, and those that name device and GID. Few
/// iterations.
pub(crate) const PROGRAMS: [(&str, &str, [&str; 2]); 5] = [
    ("ibv_rc_pingpong", "-c -s 4096 -n 200", ["-d", "-g"]),
    ("ib_send_bw", "-F -m 1024 -s 16384 -n 20", ["-d", "-x"]),
    ("ib_write_bw", "-F -m 1024 -s 16384 -n 20", ["-d", "-x"]),
    ("ib_read_bw", "-F -m 1024 -s 16384 -n 20", ["-d", "-x"]),
    ("ib_atomic_bw", "-F -m 1024 -n 20", ["-d", "-x"]),
];
/// Port on which all of them listen.
const PORT: u16 = 18515;

/// Runs a program with its server on the adapter and its client in the guest. `ibv_rc_pingpong` checks the data on both
/// sides.
fn between(
    options: &NestedOptions,
    vm: &Vm,
    index: u32,
    (program, arguments, [device, gid]): (&str, &str, [&str; 2]),
) -> Result<()> {
    let mut server = Command::new(program)
        .args(arguments.split(' '))
        .args([device, &options.device, gid, &options.gid_index.to_string()])
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .with_context(|| format!("cannot run {program}"))?;
    // A server that ended without listening reports the reason, after the failure of its client.
    while !listening()? && server.try_wait()?.is_none() {
        thread::sleep(Duration::from_millis(20));
    }
    let client = vm.exec(&format!("{program} {arguments} {device} vmw_pvrdma0 {gid} {index} {OUTER}"), PROGRAM_TIME);
    let server = finish(server, client.as_ref().is_ok_and(|output| output.code == 0))?;
    let client = client?;
    ensure!(client.code == 0 && server.0, "the guest:\n{}\nthe adapter:\n{}", client.text, server.1);
    println!("{program}");
    Ok(())
}

/// Returns `true` if a program of this machine listens.
fn listening() -> Result<bool> {
    let status = Command::new("sh").args(["-c", &listens(PORT)]).status().context("cannot run sh")?;
    Ok(status.success())
}

/// Waits for the server if its client has succeeded. Returns `true` if the server has succeeded as well, and its
/// output.
fn finish(mut server: std::process::Child, wait: bool) -> Result<(bool, String)> {
    if !wait {
        server.kill().context("cannot end the server")?;
    }
    let output = server.wait_with_output().context("cannot wait for the server")?;
    let text = [output.stdout, output.stderr].concat();
    Ok((output.status.success(), String::from_utf8_lossy(&text).into_owned()))
}
