//! A small VMM built from rust-vmm crates. It boots Linux with a vmxnet3 and a PVRDMA function in each VM, and runs
//! several VMs in one process on one software adapter and one switch. See `docs/vmm.md` for its use and
//! `docs/embedding.md` for the parts to reuse.
//!
//! | module | content |
//! | --- | --- |
//! | `options` | the command line |
//! | `fabric` | adapter and switch, and how a VM's two functions are plugged in |
//! | `machine` | a VM: its parts and its life |
//! | `memory` | guest memory, also as KVM maps it: the only unsafe code |
//! | `boot` | kernel, page tables, MP table: the initial state of the guest |
//! | `cpu` | processors |
//! | `doorbells` | doorbell pages that are memory while programs poll |
//! | `serial` | serial ports and the reset line |
//! | `disk` | virtio block devices |
//! | `power` | power-off for a guest without ACPI |

mod boot;
mod cpu;
mod disk;
mod doorbells;
mod fabric;
mod machine;
mod memory;
mod options;
mod power;
mod serial;

use std::process::ExitCode;
use std::sync::Arc;
use std::sync::mpsc;
use std::thread;

use anyhow::{Context, Result};
use clap::Parser;

use fabric::Fabric;
use machine::{Ended, Machine, Prepared};
use options::{Options, VmOptions};

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
    let fabric = Arc::new(Fabric::new(options.mtu, options.uplink()?)?);
    let prepare = |vm: &VmOptions| Prepared::new(vm, &fabric).with_context(|| vm.name.clone());
    let prepared = vms.iter().map(prepare).collect::<Result<Vec<_>>>()?;
    let kvm = cpu::open_kvm(&options.kvm)?;
    let start = |(vm, prepared): (&VmOptions, _)| Machine::new(&kvm, vm, prepared).with_context(|| vm.name.clone());
    let machines = vms.iter().zip(prepared).map(start).collect::<Result<Vec<_>>>()?;
    cpu::prepare_kick()?;

    let kvm = Arc::new(kvm);
    let (ended, ends) = mpsc::channel();
    for (vm, machine) in vms.into_iter().zip(machines) {
        let (kvm, fabric, ended) = (Arc::clone(&kvm), Arc::clone(&fabric), ended.clone());
        let live = move || {
            let result = live(&kvm, &fabric, &vm, machine).with_context(|| vm.name.clone());
            // The send fails only when the process ends.
            let _ = ended.send(result);
        };
        thread::Builder::new().spawn(live).context("cannot start a thread")?;
    }
    drop(ended);
    ends.into_iter().collect()
}

/// Runs a VM from boot to boot until it is powered off. On reset the machine is created anew, with zeroed memory.
fn live(kvm: &kvm_ioctls::Kvm, fabric: &Arc<Fabric>, vm: &VmOptions, mut machine: Machine) -> Result<()> {
    loop {
        if machine.run()? == Ended::Off {
            println!("{}: powered off", vm.name);
            return Ok(());
        }
        println!("{}: reset", vm.name);
        machine = Machine::new(kvm, vm, Prepared::new(vm, fabric)?)?;
    }
}
