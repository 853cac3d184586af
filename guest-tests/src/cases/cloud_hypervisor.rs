//! Two guests of an external Cloud Hypervisor. An unpatched one has no slots with several functions: then the guests'
//! view of the device, and the driver's reason to refuse it, are as documented.

use std::path::Path;
use std::time::Duration;

use anyhow::{Result, bail};

use super::case::{Case, skip};
use super::kernel_log;
use super::programs::EACH_OPERATION;
use crate::cloud_hypervisor::{CloudHypervisorPair, is_given};
use crate::kvm_bed::KvmBeds;
use crate::played_pair::PlayedPair;
use crate::vm::has_kvm;

/// One case: it takes a minute to boot two guests.
pub(crate) fn cases(beds: &KvmBeds) -> Vec<Case> {
    let beds = beds.clone();
    vec![Case::alone("kvm/cloud-hypervisor", move |image| {
        if !is_given() {
            return Err(skip("CLOUD_HYPERVISOR names no binary (docs/cloud-hypervisor.md)"));
        }
        if has_kvm() && !Path::new("/sys/module/kvm_amd").exists() {
            return Err(skip("the guest that plays the host has kvm_amd, and this machine's processor is another"));
        }
        match CloudHypervisorPair::boot(image, &beds)? {
            CloudHypervisorPair::BothFunctions(pair) => checked(&pair, both_functions),
            CloudHypervisorPair::OneFunction(pair) => checked(&pair, one_function),
        }
    })]
}

fn checked(pair: &PlayedPair, run: fn(&PlayedPair) -> Result<String>) -> Result<String> {
    let note = run(pair).and_then(|note| kernel_log::check(pair.host()).map(|()| note));
    note.map_err(|error| error.context(pair.diagnosis()))
}

/// RDMA works between the guests. Runs one program of each kind.
fn both_functions(pair: &PlayedPair) -> Result<String> {
    for program in EACH_OPERATION {
        program.run(&pair.endpoints()?, 1)?;
    }
    for vm in pair.vms() {
        kernel_log::check(vm)?;
    }
    Ok(format!("RDMA between the guests; {}", pair.description()))
}

/// The function is present, and its driver reports that the other one is missing.
fn one_function(pair: &PlayedPair) -> Result<String> {
    for vm in pair.vms() {
        vm.run("lspci -n | grep 15ad:0820")?;
        // modprobe itself succeeds: the module stays loaded without a device.
        vm.exec("modprobe ib_uverbs && modprobe vmw_pvrdma", Duration::from_secs(300))?;
        let log = vm.run("dmesg")?;
        if !log.contains("failed to find paired vmxnet3 device") {
            bail!("{}: the driver does not name the missing device:\n{log}", vm.name());
        }
        let devices = vm.run("ls /sys/class/infiniband")?;
        if !devices.trim().is_empty() {
            bail!("{}: the driver has bound: {devices}", vm.name());
        }
    }
    Ok("functions have a slot each: visible, and refused by the driver".to_owned())
}
