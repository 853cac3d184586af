//! Registers of a processor, in the order in which KVM can take them.

use anyhow::{Context, Result, bail, ensure};
use kvm_bindings::{Msrs, kvm_msr_entry};
use kvm_ioctls::{Kvm, VcpuFd};
use zerocopy::{FromBytes, Immutable, IntoBytes};

use super::messages::{Msr, Processor};
use crate::memory::Vcpu;

/// MSR with the time of the next timer interrupt. It has an effect only after the local APIC and the counter are set.
const TSC_DEADLINE: u32 = 0x6e0;
/// Maximum number of MSRs that KVM takes at a time.
const MSRS: usize = 256;
/// Maximum number of MSRs of a processor in a stream.
const MAX_MSRS: usize = 4096;

/// Encodes a structure of KVM.
pub(crate) fn encode<T: IntoBytes + Immutable>(of: &T) -> Vec<u8> {
    of.as_bytes().to_vec()
}

/// Decodes a structure of KVM.
///
/// # Errors
/// The bytes have another length.
pub(crate) fn decode<T: FromBytes>(what: &str, bytes: &[u8]) -> Result<T> {
    let size = size_of::<T>();
    T::read_from_bytes(bytes).ok().with_context(|| format!("the state has {} bytes of {what}, not {size}", bytes.len()))
}

/// Reads the state of a processor that has stopped between two instructions.
pub(crate) fn save(kvm: &Kvm, cpu: &Vcpu) -> Result<Processor> {
    let fd = &cpu.fd;
    Ok(Processor {
        // First: KVM applies pending INIT and start-up signals when this is read.
        mp_state: encode(&fd.get_mp_state().context("processor state")?),
        regs: encode(&fd.get_regs().context("general registers")?),
        sregs: encode(&fd.get_sregs().context("special registers")?),
        xsave: encode(&cpu.xsave().context("extended registers")?),
        xcrs: encode(&fd.get_xcrs().context("extended control registers")?),
        debug_regs: encode(&fd.get_debug_regs().context("debug registers")?),
        lapic: encode(&fd.get_lapic().context("local APIC")?),
        msrs: msrs(kvm, fd)?,
        events: encode(&fd.get_vcpu_events().context("pending events")?),
        tsc_khz: fd.get_tsc_khz().context("time-stamp counter")?,
    })
}

/// Sets the state of a processor that has its features already.
///
/// # Errors
/// KVM does not take a part of it.
pub(crate) fn restore(cpu: &Vcpu, saved: &Processor) -> Result<()> {
    let Processor { mp_state, regs, sregs, xsave, xcrs, debug_regs, lapic, events, msrs, tsc_khz } = saved;
    ensure!(msrs.len() <= MAX_MSRS, "the state has {} MSRs", msrs.len());
    let fd = &cpu.fd;
    let khz = fd.get_tsc_khz().context("time-stamp counter")?;
    if *tsc_khz != khz {
        fd.set_tsc_khz(*tsc_khz)
            .with_context(|| format!("a time-stamp counter of {tsc_khz} kHz, here it has {khz}"))?;
    }
    fd.set_mp_state(decode("processor state", mp_state)?).context("processor state")?;
    fd.set_regs(&decode("general registers", regs)?).context("general registers")?;
    fd.set_sregs(&decode("special registers", sregs)?).context("special registers")?;
    cpu.set_xsave(&decode("extended registers", xsave)?).context("extended registers")?;
    fd.set_xcrs(&decode("extended control registers", xcrs)?).context("extended control registers")?;
    fd.set_debug_regs(&decode("debug registers", debug_regs)?).context("debug registers")?;
    fd.set_lapic(&decode("local APIC", lapic)?).context("local APIC")?;
    let (last, first): (Vec<Msr>, Vec<Msr>) = msrs.iter().partition(|msr| msr.index == TSC_DEADLINE);
    for msrs in [first, last] {
        set_msrs(fd, &msrs)?;
    }
    fd.set_vcpu_events(&decode("pending events", events)?).context("pending events")
}

/// Creates a list for KVM.
fn list(msrs: &[Msr]) -> Result<Msrs> {
    let entry = |&Msr { index, data }: &Msr| kvm_msr_entry { index, data, ..Default::default() };
    let entries: Vec<_> = msrs.iter().map(entry).collect();
    Msrs::from_entries(&entries).map_err(|error| anyhow::anyhow!("MSRs: {error:?}"))
}

/// Reads all MSRs that KVM saves. It lists some that the processor does not have.
fn msrs(kvm: &Kvm, fd: &VcpuFd) -> Result<Vec<Msr>> {
    let listed = kvm.get_msr_index_list().context("cannot ask KVM for MSRs")?;
    let listed: Vec<_> = listed.as_slice().iter().map(|index| Msr { index: *index, data: 0 }).collect();
    let (mut left, mut found) = (&listed[..], Vec::new());
    while !left.is_empty() {
        let (piece, _) = left.split_at(left.len().min(MSRS));
        let mut entries = list(piece)?;
        let count = fd.get_msrs(&mut entries).context("MSRs")?;
        found.extend(entries.as_slice().iter().take(count).map(|entry| Msr { index: entry.index, data: entry.data }));
        // KVM stops at the first one that it cannot read.
        let done = if count < piece.len() { count.saturating_add(1) } else { count };
        left = left.get(done..).unwrap_or_default();
    }
    Ok(found)
}

/// Writes MSRs. KVM refuses to write some that it lists, which is an error only if their value would have to change.
fn set_msrs(fd: &VcpuFd, msrs: &[Msr]) -> Result<()> {
    let mut left = msrs;
    while !left.is_empty() {
        let (piece, _) = left.split_at(left.len().min(MSRS));
        let count = fd.set_msrs(&list(piece)?).context("MSRs")?;
        if let Some(&Msr { index, data }) = piece.get(count) {
            let mut now = list(&[Msr { index, data: 0 }])?;
            let read = fd.get_msrs(&mut now).context("MSRs")?;
            let same = now.as_slice().first().filter(|_| read == 1).is_some_and(|entry| entry.data == data);
            if !same {
                bail!("KVM does not take the value {data:#x} of MSR {index:#x}");
            }
        }
        let done = if count < piece.len() { count.saturating_add(1) } else { count };
        left = left.get(done..).unwrap_or_default();
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use kvm_bindings::{kvm_regs, kvm_xsave};

    use super::*;

    #[test]
    fn structures_have_their_exact_length() {
        let regs = kvm_regs { rip: 0x1234, r15: 7, ..Default::default() };
        let bytes = encode(&regs);
        assert_eq!(decode::<kvm_regs>("registers", &bytes).unwrap(), regs);
        for wrong in [&bytes[1..], &[&bytes[..], &[0]].concat(), &[]] {
            let error = decode::<kvm_regs>("registers", wrong).unwrap_err();
            assert!(error.to_string().contains(&format!("{} bytes of registers, not 144", wrong.len())), "{error}");
        }
        assert_eq!(encode(&kvm_xsave::default()).len(), 4096);
    }
}
