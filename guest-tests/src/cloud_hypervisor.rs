//! Two guests of Cloud Hypervisor on one daemon, in a guest that acts as the host.

use anyhow::Result;

use crate::image::GuestImage;
use crate::kvm_bed::{CLOUD_HYPERVISOR, GUESTS, KvmBed, KvmBeds};
use crate::kvm_host::TOOLS;
use crate::played_pair::{FILES, Function, MEMORY_MIB, PlayedPair, socket};

/// Pair of guests, by the abilities of the given Cloud Hypervisor.
#[derive(Debug)]
pub(crate) enum CloudHypervisorPair {
    /// Slots with several functions: the drivers are loaded, as in any other guest.
    BothFunctions(Box<PlayedPair>),
    /// One function per slot: the guests have the RDMA function, and no driver is loaded.
    OneFunction(Box<PlayedPair>),
}

/// Returns `true` if the environment names a Cloud Hypervisor.
pub(crate) fn is_given() -> bool {
    std::env::var_os(CLOUD_HYPERVISOR).is_some()
}

impl CloudHypervisorPair {
    /// Boots both.
    pub(crate) fn boot(image: &GuestImage, beds: &KvmBeds) -> Result<Self> {
        beds.start(image, |bed| {
            // Cloud Hypervisor parses its options before it opens any file, so the paths need not exist.
            let refused = bed.vm().run(&format!(
                "{TOOLS}/cloud-hypervisor --kernel /none --user-device socket=/none,{} 2>&1 |
                     grep -c 'Unknown option' || true",
                place(1)
            ))?;
            Ok(match refused.trim() {
                "0" => Self::BothFunctions(Box::new(PlayedPair::boot(image, bed, both_functions)?)),
                _ => Self::OneFunction(Box::new(PlayedPair::boot_without_driver(image, bed, one_function)?)),
            })
        })
    }
}

/// Returns the address of a function in the slot in which drivers look for both.
fn place(function: u8) -> String {
    format!("pci_device_id=16,pci_function={function}")
}

fn both_functions(bed: &KvmBed, end: usize) -> Result<String> {
    let devices = [(Function::Network, 0), (Function::Rdma, 1)];
    let devices = devices.map(|(kind, number)| format!("socket={},{}", socket(GUESTS[end], kind), place(number)));
    command(bed, end, &devices.join(" "))
}

fn one_function(bed: &KvmBed, end: usize) -> Result<String> {
    command(bed, end, &format!("socket={}", socket(GUESTS[end], Function::Rdma)))
}

/// Returns the command that starts the VMM of a guest. The guest's agent uses the virtio console, which Cloud
/// Hypervisor connects to a terminal, and `script` connects that to the line. The serial port cannot be used: like that
/// of `vm-superio`, it reports no data to a driver that has read 256 bytes, even if more are pending.
fn command(bed: &KvmBed, end: usize, devices: &str) -> Result<String> {
    let (name, line) = (GUESTS[end], bed.line(GUESTS[end])?);
    let line = line.display();
    Ok(format!(
        "exec 3<> {line} && exec script --quiet --flush --echo never --return --log-out /dev/null --command \"
             exec {TOOLS}/cloud-hypervisor --kernel {TOOLS}/image/vmlinuz --initramfs {} \
             --cmdline 'console=ttyS0 panic=0 mitigations=off nokaslr net.ifnames=0 reboot=k agent=/dev/hvc0' \
             --cpus boot=1 --memory size={MEMORY_MIB}M,shared=on \
             --disk path=/dev/vda,readonly=on,image_type=raw \
             --serial file={FILES}/{name}.console --console tty --user-device {devices} 2> {FILES}/{name}.vmm\" \
         <&3 >&3",
        bed.initramfs().display()
    ))
}
