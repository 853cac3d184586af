//! The README's instructions for two machines, run verbatim.

use std::fs;
use std::os::unix::fs::symlink;
use std::path::Path;
use std::process::Stdio;
use std::sync::{Arc, Mutex};

use anyhow::{Context, Result, bail};

use super::case::Case;
use super::exchange::{Programs, Ready};
use super::recipe::recipe;
use crate::daemon;
use crate::image::{GuestImage, executable};
use crate::process::BoundChild;
use crate::vm::{Prepared, SHORT, Vm, VmBuilder, processor};

/// Wrapper for QEMU: replaces the reader's disk by that of the image, and selects an available processor.
const QEMU: &str = r#"#!/bin/bash
set -eu
machine=()
while (($#)); do
    case "$1 $2" in
        '-drive file=vm0.qcow2,'*) number=0 ;;
        '-drive file=vm1.qcow2,'*) number=1 ;;
        '-accel '*) machine+=("$1" "$ACCELERATOR") ;;
        '-cpu '*) machine+=("$1" "$PROCESSOR") ;;
        *) machine+=("$1" "$2") ;;
    esac
    shift 2
done
mapfile -t qemu <"$BOOT/qemu"
mapfile -t boot <"$BOOT/$number"
exec "${qemu[@]}" "${machine[@]}" "${boot[@]}"
"#;

/// The only test.
pub(crate) fn cases() -> Vec<Case> {
    vec![Case::alone("readme/two-vms", two_vms)]
}

fn two_vms(image: &GuestImage) -> Result<String> {
    let (host, guest) = (recipe("README.md", "two-vms: host")?, recipe("README.md", "two-vms: guest")?);
    let directory = tempfile::tempdir().context("cannot create a directory")?;
    let vms = on_the_host(image, directory.path(), &host)?;
    let result = in_the_guests(&vms, &guest);
    result.with_context(|| {
        let log = fs::read_to_string(directory.path().join("log")).unwrap_or_default();
        format!("output of the host:\n{log}\n{}\n{}", vms[0].diagnosis(), vms[1].diagnosis())
    })
}

/// Runs the commands for the host.
fn on_the_host(image: &GuestImage, directory: &Path, lines: &str) -> Result<[Vm; 2]> {
    let write = |name: &str, content: &str| {
        let path = directory.join(name);
        fs::write(&path, content).with_context(|| format!("cannot write {}", path.display()))
    };
    let prepare = |name: &str| VmBuilder::new(image, directory).name(name).prepare();
    let prepared: [Prepared; 2] = [prepare("vm0")?, prepare("vm1")?];
    let (qemu, arguments) = image.qemu();
    for folder in ["bin", "boot", "target/release", "run"] {
        fs::create_dir_all(directory.join(folder)).with_context(|| format!("cannot create {folder}"))?;
    }
    write("boot/qemu", &format!("{qemu}\n{}\n", arguments.join("\n")))?;
    for (number, vm) in prepared.iter().enumerate() {
        write(&format!("boot/{number}"), &(vm.boot_arguments().join("\n") + "\n"))?;
    }
    // The daemon was built before the tests began.
    for (name, content) in [("cargo", "#!/bin/sh\n"), ("qemu-system-x86_64", QEMU)] {
        executable(&directory.join("bin").join(name), content)?;
    }
    symlink(daemon::program()?, directory.join("target/release/pvrdmad")).context("cannot name the daemon")?;
    let log = fs::File::create(directory.join("log")).context("cannot create a log")?;
    let path = format!("{}:{}", directory.join("bin").display(), std::env::var("PATH").unwrap_or_default());
    let (accelerator, cpu) = processor();
    let script = format!("{lines}\nwait\n");
    let process = BoundChild::spawn("README's lines", "bash", |command| {
        command.args(["-euc", &script]).current_dir(directory).stdin(Stdio::null());
        if let Ok(errors) = log.try_clone() {
            command.stderr(errors);
        }
        command
            .stdout(log)
            .env("PATH", path)
            .env("BOOT", directory.join("boot"))
            .env("ACCELERATOR", accelerator)
            .env("PROCESSOR", cpu)
            .env("QEMU_MODULE_DIR", image.qemu_module_directory())
            .env("XDG_RUNTIME_DIR", directory.join("run"));
    })?;
    let process = Arc::new(Mutex::new(process));
    let [a, b] = prepared;
    let vms = [a.accept(Arc::clone(&process))?, b.accept(process)?];
    for vm in &vms {
        vm.wait_boot()?;
    }
    Ok(vms)
}

/// Runs the commands for the guests: those marked "in the first" or "in the second" there, the others in both.
fn in_the_guests(vms: &[Vm; 2], lines: &str) -> Result<String> {
    let mut programs = [Vec::new(), Vec::new()];
    for line in lines.lines() {
        let command = line.split(" #").next().unwrap_or(line).trim();
        match line {
            _ if line.contains("# in the first") => programs[0].push(command),
            _ if line.contains("# in the second") => programs[1].push(command),
            _ => {
                for (vm, number) in vms.iter().zip(1..) {
                    vm.run(&command.replace("7.N/", &format!("7.{number}/")))?;
                }
            }
        }
    }
    let [[server], [client]] = [&programs[0][..], &programs[1][..]] else {
        bail!(
            "README names {} programs for the first guest and {} for the second",
            programs[0].len(),
            programs[1].len()
        );
    };
    let exchange = Programs {
        server_vm: &vms[0],
        server: (*server).to_owned(),
        ready: Ready::Tcp(18515),
        client_vm: &vms[1],
        client: (*client).to_owned(),
        timeout: SHORT,
    }
    .run()?;
    let result = exchange.client.lines().rfind(|line| line.contains("usec/iter"));
    result.map(|line| line.trim().to_owned()).context("the client printed no result")
}
