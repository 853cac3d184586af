//! Configuration space of the function (section 1): identity, BARs, MSI-X.

use pvrdma_pages::PAGE_SIZE;
use pvrdma_pci_function::{Bar, ConfigLayout, ConfigSpace, FIRST_CAPABILITY, Identity, MsixPlace};

use crate::abi::regs::{CLASS, DEVICE_ID, VENDOR_ID};
use crate::intr::VECTORS;
use crate::regs;

/// Size of BAR 0 in bytes: MSI-X table and pending bits, which the VMM emulates.
const MSIX_BAR_SIZE: u64 = 0x4000;
/// Offset of the pending bits.
const MSIX_PENDING: u32 = 0x2000;

/// Returns the power-on state. `intx` is `true` if the function has an interrupt pin. The VMM sets bit 7 of the header
/// type.
pub(crate) fn config_space(max_uar: u32, intx: bool) -> ConfigSpace {
    let bars = [
        Some(Bar { size: MSIX_BAR_SIZE, is_64bit: false }),
        Some(Bar { size: regs::BAR_SIZE, is_64bit: false }),
        Some(Bar { size: u64::from(max_uar).next_power_of_two() * PAGE_SIZE, is_64bit: true }),
        None,
        None,
        None,
    ];
    ConfigSpace::new(&ConfigLayout {
        identity: Identity { vendor: VENDOR_ID, device: DEVICE_ID, revision: 0, class: CLASS },
        bars,
        msix: Some(MsixPlace {
            capability: FIRST_CAPABILITY,
            vectors: VECTORS,
            bar: 0,
            table: 0,
            pending: MSIX_PENDING,
        }),
        interrupt_pin: intx,
        multifunction: false,
    })
}

#[cfg(test)]
mod tests {
    use pvrdma_pci_function::{CONFIG_SIZE, Switches};

    use super::*;

    fn read(config: &ConfigSpace, at: usize) -> u32 {
        let mut data = [0; 4];
        config.read(at, &mut data, false);
        u32::from_le_bytes(data)
    }

    /// Conformance 1, 2: the part that this function controls.
    #[test]
    fn identity_and_capabilities() {
        let config = config_space(1024, false);
        assert_eq!(read(&config, 0), 0x0820_15ad);
        assert_eq!(read(&config, 8) >> 8, 0x02_8000);
        assert_eq!(read(&config, 0x0c) >> 16, 0, "single header, set to multi-function by the VMM");
        assert_eq!(read(&config, 0x3c) >> 8, 0, "no pin");
        assert_eq!(read(&config_space(1024, true), 0x3c), 0x100);
        let mut at = usize::try_from(read(&config, 0x34)).unwrap();
        let mut found = Vec::new();
        while at != 0 {
            assert!(found.len() < 48, "the list of capabilities must end");
            let header = read(&config, at);
            found.push(header & 0xff);
            at = usize::try_from((header >> 8) & 0xfc).unwrap();
        }
        assert_eq!(found, [0x11]);
        assert_eq!(read(&config, 0x40) >> 16, 2, "three vectors");
        assert_eq!((read(&config, 0x44), read(&config, 0x48)), (0, 0x2000));
    }

    /// Conformance 2: BAR 2 has 4096 bytes for each of 1024 pages.
    #[test]
    fn bars_are_sized_by_writing_ones() {
        let mut config = config_space(1024, false);
        let sizes: Vec<u32> = (0..6)
            .map(|bar| {
                config.write(0x10 + bar * 4, &[0xff; 4]);
                read(&config, 0x10 + bar * 4)
            })
            .collect();
        assert_eq!(sizes, [0xffff_c000, 0xffff_f000, 0xffc0_0004, 0xffff_ffff, 0, 0]);
        config.write(0x30, &[0xff; 4]);
        assert_eq!(read(&config, 0x30), 0, "no ROM");
        config.write(0x14, &0xfebd_1234_u32.to_le_bytes());
        assert_eq!(read(&config, 0x14), 0xfebd_1000);
        config.reset();
        assert_eq!(read(&config, 0x14), 0);
    }

    #[test]
    fn writes_change_only_writable_bits() {
        let mut config = config_space(1024, false);
        config.write(0, &[0xff; CONFIG_SIZE + 8]);
        assert_eq!(read(&config, 0), 0x0820_15ad);
        assert_eq!(read(&config, 4), 0x0010_0546);
        assert_eq!(config.switches(), Switches { bus_master: true, msix: true, intx_disabled: true });
        assert_eq!(read(&config, 0x40), 0xc002_0011);
        config.write(usize::MAX, &[1, 2]);
        let mut beyond = [7; 4];
        config.read(254, &mut beyond, false);
        assert_eq!(beyond, [0; 4]);
        config.reset();
        assert_eq!(config.switches(), Switches::default());
        let mut status = [0; 4];
        config.read(4, &mut status, true);
        assert_eq!(status[2], 0x18);
    }
}
