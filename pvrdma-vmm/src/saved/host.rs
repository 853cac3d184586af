//! Checks before a machine continues here: the same machine, on the same model of processor.

use anyhow::{Result, ensure};
use kvm_bindings::kvm_cpuid_entry2;

use super::messages::{Disk, Hello};
use super::processor;
use crate::cpu::Shape;
use crate::disk::Disk as Attached;
use crate::options::VmOptions;

/// Register of a CPUID leaf of which each bit is a feature: leaf, name and value.
type FeatureRegister = (u32, &'static str, fn([u32; 4]) -> u32);

/// Registers with the features that a guest continues to use once it has found them.
const FEATURES: [FeatureRegister; 8] = [
    (1, "ecx", |[_, _, ecx, _]| ecx),
    (1, "edx", |[_, _, _, edx]| edx),
    (7, "ebx", |[_, ebx, _, _]| ebx),
    (7, "ecx", |[_, _, ecx, _]| ecx),
    (7, "edx", |[_, _, _, edx]| edx),
    (0x8000_0001, "ecx", |[_, _, ecx, _]| ecx),
    (0x8000_0001, "edx", |[_, _, _, edx]| edx),
    (0x8000_0008, "ebx", |[_, ebx, _, _]| ebx),
];

/// Describes a machine and its host.
pub(crate) fn hello(vm: &VmOptions, mtu: u32, shape: &Shape, disks: &[std::sync::Arc<Attached>]) -> Hello {
    Hello {
        program: env!("CARGO_PKG_VERSION").to_owned(),
        name: vm.name.clone(),
        mac: vm.mac.0.to_vec(),
        memory: vm.memory,
        cpus: vm.cpus.into(),
        disks: disks.iter().map(|disk| Disk { bytes: disk.bytes(), writable: disk.is_writable() }).collect(),
        cpuid: shape.features().iter().map(processor::encode).collect(),
        mtu,
    }
}

/// Compares the machine of a stream with the one of the command line, by the names of the options.
pub(crate) fn check_machine(found: &Hello, own: &Hello) -> Result<()> {
    let Hello { program, name: _, mac, memory, cpus, disks, cpuid: _, mtu } = found;
    let differ = |option: &str, theirs: &dyn std::fmt::Debug, ours: &dyn std::fmt::Debug| {
        format!("the state has {option} {theirs:?}, this machine {ours:?} (the state is of version {program})")
    };
    ensure!(*mac == own.mac, differ("mac", mac, &own.mac));
    ensure!(*memory == own.memory, differ("memory", memory, &own.memory));
    ensure!(*cpus == own.cpus, differ("cpus", cpus, &own.cpus));
    ensure!(*mtu == own.mtu, differ("--mtu", mtu, &own.mtu));
    let sizes = |disks: &[Disk]| disks.iter().map(|disk| (disk.bytes, disk.writable)).collect::<Vec<_>>();
    ensure!(*disks == own.disks, differ("disks (bytes, writable)", &sizes(disks), &sizes(&own.disks)));
    Ok(())
}

/// Compares the model of the processor and its features. `here` has the features that KVM offers on this host. Returns
/// the features of the guest.
pub(crate) fn check_processor(found: &Hello, here: &[kvm_cpuid_entry2]) -> Result<Vec<kvm_cpuid_entry2>> {
    ensure!(found.cpuid.len() <= kvm_bindings::KVM_MAX_CPUID_ENTRIES, "the state has {} leaves", found.cpuid.len());
    let theirs = found.cpuid.iter().map(|bytes| processor::decode::<kvm_cpuid_entry2>("CPUID", bytes));
    let theirs = theirs.collect::<Result<Vec<_>>>()?;
    let (was, is) = (model(&theirs), model(here));
    ensure!(was == is, "the state is of another model of processor: {was}, this host has {is}");
    for (function, register, value) in FEATURES {
        let missing = value(registers(&theirs, function)) & !value(registers(here, function));
        ensure!(
            missing == 0,
            "the guest uses features that KVM lacks here: {missing:#x} of {register} in CPUID {function:#x}"
        );
    }
    Ok(theirs)
}

fn registers(entries: &[kvm_cpuid_entry2], function: u32) -> [u32; 4] {
    let entry = entries.iter().find(|entry| entry.function == function && entry.index == 0);
    entry.map_or([0; 4], |entry| [entry.eax, entry.ebx, entry.ecx, entry.edx])
}

/// Returns the model as people read it: vendor, family, model and stepping.
fn model(entries: &[kvm_cpuid_entry2]) -> String {
    let [_, b, c, d] = registers(entries, 0);
    let vendor: Vec<u8> = [b, d, c].iter().flat_map(|word| word.to_le_bytes()).collect();
    let [signature, ..] = registers(entries, 1);
    let family = (signature >> 8 & 0xf) + (signature >> 20 & 0xff);
    let model = signature >> 4 & 0xf | signature >> 12 & 0xf0;
    let vendor: String =
        vendor.iter().filter(|byte| byte.is_ascii_alphanumeric()).map(|byte| char::from(*byte)).collect();
    format!("{vendor} family {family} model {model} stepping {}", signature & 0xf)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn entry(function: u32, [eax, ebx, ecx, edx]: [u32; 4]) -> kvm_cpuid_entry2 {
        kvm_cpuid_entry2 { function, eax, ebx, ecx, edx, ..Default::default() }
    }

    fn word(text: &[u8; 4]) -> u32 {
        u32::from_le_bytes(*text)
    }

    fn intel(signature: u32, features: u32) -> Vec<kvm_cpuid_entry2> {
        vec![entry(0, [0x16, word(b"Genu"), word(b"ntel"), word(b"ineI")]), entry(1, [signature, 0xffff, 1, features])]
    }

    fn hello(cpuid: &[kvm_cpuid_entry2]) -> Hello {
        Hello { cpuid: cpuid.iter().map(processor::encode).collect(), ..Hello::default() }
    }

    #[test]
    fn another_model_or_fewer_features_are_refused_by_name() {
        let guest = hello(&intel(0x5_0657, 5));
        assert_eq!(check_processor(&guest, &intel(0x5_0657, 7)).unwrap(), intel(0x5_0657, 5));
        let error = |guest: &Hello, here: &[kvm_cpuid_entry2]| check_processor(guest, here).unwrap_err().to_string();
        let stepping = error(&guest, &intel(0x5_0656, 7));
        assert!(stepping.contains("GenuineIntel family 6 model 85 stepping 7, this host has"), "{stepping}");
        assert!(error(&guest, &[]).contains("another model"));
        assert!(error(&guest, &intel(0x5_0657, 3)).contains("0x4 of edx in CPUID 0x1"));
        let short = Hello { cpuid: vec![vec![0; 39]], ..Hello::default() };
        assert!(error(&short, &[]).contains("39 bytes of CPUID"));
        let many = Hello { cpuid: vec![vec![]; 1000], ..Hello::default() };
        assert!(error(&many, &[]).contains("1000 leaves"));
    }

    #[test]
    fn another_machine_is_refused_by_option() {
        let own =
            Hello { mac: vec![1], memory: 2, cpus: 3, mtu: 1500, disks: vec![Disk::default()], ..Hello::default() };
        check_machine(&Hello { name: "other".to_owned(), ..own.clone() }, &own).unwrap();
        for (other, option) in [
            (Hello { mac: vec![], ..own.clone() }, "mac"),
            (Hello { memory: 3, ..own.clone() }, "memory"),
            (Hello { cpus: 4, ..own.clone() }, "cpus"),
            (Hello { mtu: 9000, ..own.clone() }, "--mtu"),
            (Hello { disks: vec![], ..own.clone() }, "disks"),
            (Hello { disks: vec![Disk { bytes: 0, writable: true }], ..own.clone() }, "disks"),
        ] {
            let error = check_machine(&other, &own).unwrap_err().to_string();
            assert!(error.contains(&format!("the state has {option} ")), "{error}");
        }
    }
}
