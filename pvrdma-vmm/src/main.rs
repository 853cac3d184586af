//! A small VMM built from rust-vmm crates. It boots Linux with a vmxnet3 and a PVRDMA function in each VM, and runs
//! several VMs in one process on one software adapter and one switch. See `docs/vmm.md` for its use and
//! `docs/embedding.md` for the parts to reuse.
//!
//! | module | content |
//! | --- | --- |
//! | `options` | the command line |
//! | `fabric` | adapter and switch, and how a VM's two functions are plugged in |
//! | `machine` | a VM: its parts and its life |
//! | `parts` | the parts of a VM that are saved with it |
//! | `memory` | guest memory, also as KVM maps it: the only unsafe code |
//! | `boot` | kernel, page tables, MP table: the initial state of the guest |
//! | `cpu` | processors |
//! | `doorbells` | doorbell pages that are memory while programs poll |
//! | `serial` | serial ports and the reset line |
//! | `disk` | virtio block devices |
//! | `power` | power-off for a guest without ACPI |
//! | `saved` | a machine in a file, or on its way to another process |

mod boot;
mod cpu;
mod disk;
mod doorbells;
mod fabric;
mod machine;
mod memory;
mod options;
mod parts;
mod power;
mod saved;
mod serial;

use std::process::ExitCode;
use std::sync::Arc;
use std::sync::mpsc;
use std::thread;

use anyhow::{Context, Result};
use clap::Parser;

use fabric::Fabric;
use kvm_ioctls::Kvm;
use machine::{Ended, Machine, Prepared};
use options::{Options, VmOptions};
use saved::departure::Left;
use saved::origin::{Here, Origin};
use saved::requests::{self, Request};

fn main() -> ExitCode {
    // Warnings about a guest or the system are shown by default.
    env_logger::Builder::from_env(env_logger::Env::default().default_filter_or("warn")).init();
    match run(&Options::parse()) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("pvrdma-vmm: {error:#}");
            ExitCode::FAILURE
        }
    }
}

/// Checks all options before the first VM starts.
fn run(options: &Options) -> Result<()> {
    let vms = options.vms()?;
    let origin = Origin::open(options)?;
    let fabric = Arc::new(Fabric::new(options.mtu, options.uplink()?)?);
    let prepare = |vm: &VmOptions| {
        let prepared = if origin.is_some() { Prepared::empty(vm, &fabric) } else { Prepared::new(vm, &fabric) };
        prepared.with_context(|| vm.name.clone())
    };
    let mut prepared = vms.iter().map(prepare).collect::<Result<Vec<_>>>()?;
    let kvm = cpu::open_kvm(&options.kvm)?;
    // A request that comes while a machine is on its way to this process waits until the machine runs here.
    let request = options.target().map(requests::on_signal).transpose()?.map(Arc::new);
    let machines = match (origin, &vms[..], prepared.pop()) {
        (Some(origin), [vm], Some(empty)) => {
            let here = Here { kvm: &kvm, vm, mtu: fabric.mtu() };
            vec![origin.machine(&here, empty).with_context(|| vm.name.clone())?]
        }
        (_, _, last) => {
            let start =
                |(vm, prepared): (&VmOptions, _)| Machine::new(&kvm, vm, prepared).with_context(|| vm.name.clone());
            vms.iter().zip(prepared.into_iter().chain(last)).map(start).collect::<Result<Vec<_>>>()?
        }
    };
    cpu::prepare_kick()?;

    let kvm = Arc::new(kvm);
    let (ended, ends) = mpsc::channel();
    for (vm, machine) in vms.into_iter().zip(machines) {
        let (kvm, fabric, ended, request) = (Arc::clone(&kvm), Arc::clone(&fabric), ended.clone(), request.clone());
        let live = move || {
            let result = live(&kvm, &fabric, &vm, machine, request.as_deref()).with_context(|| vm.name.clone());
            // The send fails only when the process ends.
            let _ = ended.send(result);
        };
        thread::Builder::new().spawn(live).context("cannot start a thread")?;
    }
    drop(ended);
    ends.into_iter().collect()
}

/// Runs a VM from boot to boot until it is powered off or has left. On reset the machine is created anew, with zeroed
/// memory.
fn live(
    kvm: &Kvm,
    fabric: &Arc<Fabric>,
    vm: &VmOptions,
    mut machine: Machine,
    request: Option<&Request>,
) -> Result<()> {
    loop {
        let ended = machine.run(kvm, request)?;
        let end = match ended {
            Ended::Reset => "reset",
            Ended::Off => "powered off",
            Ended::Left(Left::Saved) => "saved",
            Ended::Left(Left::Moved) => "moved",
        };
        println!("{}: {end}", vm.name);
        if ended != Ended::Reset {
            return Ok(());
        }
        machine = Machine::new(kvm, vm, Prepared::new(vm, fabric)?)?;
    }
}
