//! Accesses of any size to configuration space and BARs, between changes of the memory that the device reads: the
//! shared region, command slots, page directories, rings.
#![no_main]

use std::time::Duration;

use arbitrary::Arbitrary;
use libfuzzer_sys::fuzz_target;
use pvrdma_dev::testing::MEMORY_BASE;
use pvrdma_fuzz::{
    input::{Many, Steps},
    pvrdma_dev::{Address, PAGE, Word, World, poke},
};
use pvrdma_pci_function::PciFunction;

/// Number of memory pages. A probe needs almost all of them, so that random addresses often hit something.
const PAGES: u64 = 32;

#[derive(Arbitrary, Debug)]
enum Step {
    ConfigRead(u16, u8),
    ConfigWrite(u16, Many<u8>),
    BarRead(u8, Word, u8),
    BarWrite(u8, Word, Many<u8>),
    /// A register with its number.
    Register(u8, Word),
    /// Address of the shared region.
    Region(Address),
    /// A doorbell: page, register, bits, handle.
    Doorbell(u8, u8, u8, Word),
    Memory(Address, Many<u8>),
    /// Stores an address where the device may read one.
    Pointer(Address, Address),
    Words(Address, Many<Word>),
    Command,
    Deferred,
    Time,
    Probe,
    Reset,
}

fuzz_target!(|steps: Steps<Step>| {
    let world = World::default();
    let guest = world.guest(1, (PAGES * PAGE) as usize);
    let device = &guest.device;
    let mut driver = None;
    for step in &steps.0 {
        match step {
            Step::ConfigRead(at, len) => {
                device.config_read(usize::from(*at) % 260, &mut vec![0xa5; usize::from(*len)]);
            }
            Step::ConfigWrite(at, data) => device.config_write(usize::from(*at) % 260, &data.0),
            Step::BarRead(bar, at, len) => {
                device.bar_read(usize::from(*bar % 7), at.get().into(), &mut vec![0xa5; usize::from(*len)]);
            }
            Step::BarWrite(bar, at, data) => {
                let _ = device.bar_write(usize::from(*bar % 7), at.get().into(), &data.0);
            }
            Step::Register(register, value) => {
                let at = u64::from(register % 12) * 4;
                let _ = device.bar_write(1, at, &value.get().to_le_bytes());
                device.bar_read(1, at, &mut [0; 4]);
            }
            Step::Region(address) => {
                let [low @ .., _, _, _, _] = address.get(PAGES).to_le_bytes();
                let [_, _, _, _, high @ ..] = address.get(PAGES).to_le_bytes();
                let _ = device.bar_write(1, 4, &low);
                let _ = device.bar_write(1, 8, &high);
            }
            Step::Doorbell(page, register, bits, handle) => {
                let value = u32::from(*bits) << 24 | handle.get() & 0x00ff_ffff;
                let _ = device.bar_write(
                    2,
                    u64::from(page % 10) * PAGE + u64::from(register % 4) * 4,
                    &value.to_le_bytes(),
                );
            }
            Step::Memory(address, data) => poke(&guest.memory, address.get(PAGES), &data.0),
            Step::Pointer(at, address) => {
                poke(&guest.memory, at.get(PAGES) & !7, &address.get(PAGES).to_le_bytes());
            }
            Step::Words(at, words) => {
                let bytes: Vec<u8> = words.0.iter().flat_map(|word| word.get().to_le_bytes()).collect();
                poke(&guest.memory, at.get(PAGES) & !3, &bytes);
            }
            Step::Command => {
                let _ = device.bar_write(1, 0x10, &[0; 4]);
            }
            Step::Deferred => {
                device.run_deferred();
                world.settle();
            }
            Step::Time => world.pass(Duration::from_secs(10)),
            Step::Probe => {
                // The previous driver ends without telling the device.
                if let Some(driver) = driver.take() {
                    pvrdma_dev::testing::Driver::forget(&driver);
                }
                driver = Some(guest.probe());
            }
            Step::Reset => device.reset(),
        }
    }
    // A known word in every page, so that a later write of the device would be noticed.
    for page in 0..PAGES {
        guest.memory.write(MEMORY_BASE + page * PAGE + 8, &[0x5a; 8]);
    }
    guest.end(&world);
    drop(driver);
    guest.probe().query_port().expect("a port");
});
