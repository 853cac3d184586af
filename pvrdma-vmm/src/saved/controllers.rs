//! Interrupt controllers, timer and clock, which KVM provides.

use anyhow::{Context, Result, ensure};
use kvm_bindings::{KVM_IRQCHIP_IOAPIC, KVM_IRQCHIP_PIC_MASTER, KVM_IRQCHIP_PIC_SLAVE, kvm_clock_data, kvm_irqchip};
use kvm_ioctls::VmFd;

use super::messages::Controllers;
use super::processor::{decode, encode};

/// Interrupt controllers in the order of a stream.
const CHIPS: [u32; 3] = [KVM_IRQCHIP_PIC_MASTER, KVM_IRQCHIP_PIC_SLAVE, KVM_IRQCHIP_IOAPIC];

/// Reads the state of a machine whose processors have stopped.
pub(crate) fn save(vm: &VmFd) -> Result<Controllers> {
    let chip = |chip_id| {
        let mut chip = kvm_irqchip { chip_id, ..Default::default() };
        vm.get_irqchip(&mut chip).context("interrupt controller")?;
        Ok(encode(&chip))
    };
    Ok(Controllers {
        chips: CHIPS.into_iter().map(chip).collect::<Result<_>>()?,
        timer: encode(&vm.get_pit2().context("timer")?),
        clock: vm.get_clock().context("clock")?.clock,
    })
}

/// Sets the state. The guest's clock continues from the time of the save.
///
/// # Errors
/// KVM does not take a part of it.
pub(crate) fn restore(vm: &VmFd, saved: &Controllers) -> Result<()> {
    let Controllers { chips, timer, clock } = saved;
    ensure!(chips.len() == CHIPS.len(), "the state has {} interrupt controllers", chips.len());
    for (chip_id, bytes) in CHIPS.into_iter().zip(chips) {
        let chip: kvm_irqchip = decode("interrupt controller", bytes)?;
        ensure!(chip.chip_id == chip_id, "the state has interrupt controller {} twice", chip.chip_id);
        vm.set_irqchip(&chip).context("interrupt controller")?;
    }
    vm.set_pit2(&decode("timer", timer)?).context("timer")?;
    vm.set_clock(&kvm_clock_data { clock: *clock, ..Default::default() }).context("clock")
}
