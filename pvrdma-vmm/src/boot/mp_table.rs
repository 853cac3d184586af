//! The MP table: processors and interrupts for a kernel without ACPI (Intel MultiProcessor Specification 1.4).

/// Register addresses of the local APIC and of the I/O APIC.
const LOCAL_APIC: u32 = 0xfee0_0000;
const IO_APIC: u32 = 0xfec0_0000;
const PCI_BUS: u8 = 0;
const ISA_BUS: u8 = 1;
const HEADER: usize = 44;

// Entry types.
const PROCESSOR: u8 = 0;
const BUS: u8 = 1;
const IO_CONTROLLER: u8 = 2;
const IO_INTERRUPT: u8 = 3;
const LOCAL_INTERRUPT: u8 = 4;

// Interrupt types.
const VECTORED: u8 = 0;
const NON_MASKABLE: u8 = 1;
const EXTERNAL: u8 = 3;

/// Returns the byte that makes the sum of all bytes zero.
fn checksum(bytes: &[u8]) -> u8 {
    bytes.iter().fold(0_u8, |sum, byte| sum.wrapping_sub(*byte))
}

fn processor(number: u8) -> [u8; 20] {
    let flags = if number == 0 { 0b11 } else { 0b01 };
    let mut entry = [0; 20];
    // Version of the local APIC; CPU family 6, with FPU and APIC.
    for (to, from) in entry.iter_mut().zip([PROCESSOR, number, 0x14, flags, 0, 6, 0, 0, 0x01, 0x02]) {
        *to = from;
    }
    entry
}

fn bus(number: u8, name: [u8; 6]) -> [u8; 8] {
    let [a, b, c, d, e, f] = name;
    [BUS, number, a, b, c, d, e, f]
}

fn io_interrupt(irq: u8, controller: u8) -> [u8; 8] {
    [IO_INTERRUPT, VECTORED, 0, 0, ISA_BUS, irq, controller, irq]
}

/// Returns the table for `cpus` processors, to be stored at `address`.
pub(super) fn bytes(address: u64, cpus: u8) -> Vec<u8> {
    let io_apic = cpus;
    let [a, b, c, d] = IO_APIC.to_le_bytes();
    let mut entries = Vec::new();
    let mut count: u16 = 0;
    let mut add = |entry: &[u8]| {
        entries.extend_from_slice(entry);
        count += 1;
    };
    (0..cpus).for_each(|number| add(&processor(number)));
    add(&bus(PCI_BUS, *b"PCI   "));
    add(&bus(ISA_BUS, *b"ISA   "));
    add(&[IO_CONTROLLER, io_apic, 0x11, 1, a, b, c, d]);
    // The ISA IRQs are routed as KVM routes them. IRQ 2 is the cascade of the 8259 controllers.
    (0..16).filter(|irq| *irq != 2).for_each(|irq| add(&io_interrupt(irq, io_apic)));
    add(&[LOCAL_INTERRUPT, EXTERNAL, 0, 0, ISA_BUS, 0, 0, 0]);
    add(&[LOCAL_INTERRUPT, NON_MASKABLE, 0, 0, ISA_BUS, 0, 0xff, 1]);

    let mut table = Vec::with_capacity(16 + HEADER + entries.len());
    let pointer = u32::try_from(address + 16).unwrap_or(0);
    table.extend_from_slice(b"_MP_");
    table.extend_from_slice(&pointer.to_le_bytes());
    // Length of one paragraph, version 1.4; no default configuration.
    table.extend_from_slice(&[1, 4, 0, 0, 0, 0, 0, 0]);
    seal(&mut table, 0, 10);
    let length = u16::try_from(HEADER + entries.len()).unwrap_or(0);
    table.extend_from_slice(b"PCMP");
    table.extend_from_slice(&length.to_le_bytes());
    table.extend_from_slice(&[4, 0]);
    table.extend_from_slice(b"PVRDMA  VMM         ");
    table.extend_from_slice(&[0; 6]);
    table.extend_from_slice(&count.to_le_bytes());
    table.extend_from_slice(&LOCAL_APIC.to_le_bytes());
    table.extend_from_slice(&[0; 4]);
    table.extend_from_slice(&entries);
    seal(&mut table, 16, 16 + 7);
    table
}

/// Stores at `at` the checksum of the structure that begins at `start`.
fn seal(table: &mut [u8], start: usize, at: usize) {
    let sum = checksum(table.get(start..).unwrap_or_default());
    if let Some(byte) = table.get_mut(at) {
        *byte = sum;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Walks the table as a kernel does.
    #[test]
    fn a_kernel_finds_everything() {
        for cpus in [1, 2, 16] {
            let table = bytes(0x9_fc00, cpus);
            assert!(table.len() <= 1024, "{}", table.len());
            let (pointer, config) = table.split_at(16);
            assert_eq!(&pointer[..4], b"_MP_");
            assert_eq!(u32::from_le_bytes(pointer[4..8].try_into().unwrap()), 0x9_fc10);
            assert_eq!((checksum(pointer), checksum(config)), (0, 0));
            assert_eq!(
                (&config[..4], usize::from(config[4]) | usize::from(config[5]) << 8),
                (&b"PCMP"[..], config.len())
            );
            assert_eq!(config[36..40], LOCAL_APIC.to_le_bytes());
            let (mut at, mut found) = (HEADER, [0; 5]);
            while at < config.len() {
                found[usize::from(config[at])] += 1;
                at += if config[at] == PROCESSOR { 20 } else { 8 };
            }
            assert_eq!((at, found), (config.len(), [i32::from(cpus), 2, 1, 15, 2]));
            assert_eq!(u16::from_le_bytes([config[34], config[35]]), u16::from(cpus) + 20);
            assert_eq!(config[HEADER + 1..HEADER + 4], [0, 0x14, 3]);
        }
    }
}
