//! Initial guest state for the kernel's 64-bit entry point (Documentation/arch/x86/boot.rst, "64-bit Boot Protocol").

mod mp_table;

use std::fs::File;
use std::path::Path;

use anyhow::{Context, Result, ensure};
use kvm_bindings::{kvm_dtable, kvm_regs, kvm_segment, kvm_sregs};
use linux_loader::loader::bootparam::{boot_e820_entry, boot_params, setup_header};
use linux_loader::loader::{BzImage, Cmdline, KernelLoader, load_cmdline};
use vm_memory::{Bytes, GuestAddress, GuestMemoryMmap};

use crate::memory::layout;

// Layout of low memory. Each address leaves enough space for its structure.
const GDT: u64 = 0x500;
const ZERO_PAGE: u64 = 0x7000;
const STACK: u64 = 0x8ff0;
const PAGE_TABLES: u64 = 0x9000;
const COMMAND_LINE: u64 = 0x2_0000;
const COMMAND_LINE_SIZE: usize = 2048;
/// End of conventional memory of a PC. Memory continues at 1 MiB.
const LOW_MEMORY_END: u64 = 0x9_fc00;
const HIGH_MEMORY: u64 = 0x10_0000;

const E820_RAM: u32 = 1;
const E820_RESERVED: u32 = 2;
/// Offset of the 64-bit entry point in the loaded kernel.
const ENTRY_64: u64 = 0x200;
const XLF_KERNEL_64: u16 = 1;
const LOADER_UNDEFINED: u8 = 0xff;

const CODE: u16 = 0x10;
const DATA: u16 = 0x18;
const TASK: u16 = 0x20;
/// GDT entries: null, unused, flat code, flat data, TSS.
const DESCRIPTORS: [u64; 5] = [0, 0, 0x00af_9b00_0000_ffff, 0x00cf_9300_0000_ffff, 0x008f_8b00_0000_ffff];

/// Entry point of a guest.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Entry {
    address: u64,
}

/// Kernel, initramfs and command line that a guest boots.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Payload<'a> {
    pub(crate) kernel: &'a Path,
    pub(crate) initramfs: Option<&'a Path>,
    pub(crate) command_line: &'a str,
}

/// Loads the payload and all tables into guest memory of `bytes` bytes.
pub(crate) fn load(memory: &GuestMemoryMmap, bytes: u64, cpus: u8, payload: Payload<'_>) -> Result<Entry> {
    let Payload { kernel, initramfs, command_line } = payload;
    let (load, mut header) = load_kernel(memory, kernel)?;
    let low_end = layout(bytes).first().map_or(0, |(_, len)| *len);
    // The kernel decompresses itself to its preferred address.
    let unpacked = load.max(header.pref_address).saturating_add(header.init_size.into());
    ensure!(unpacked < low_end, "{}: the kernel takes {} MiB of memory", kernel.display(), (unpacked >> 20) + 1);
    if let Some(path) = initramfs {
        let end = low_end.min(u64::from(header.initrd_addr_max).saturating_add(1));
        let (start, len) = load_initramfs(memory, path, unpacked..end)?;
        (header.ramdisk_image, header.ramdisk_size) = (start, len);
    }
    let mut line = Cmdline::new(COMMAND_LINE_SIZE)?;
    line.insert_str(command_line).context("the kernel's command line")?;
    load_cmdline(memory, GuestAddress(COMMAND_LINE), &line).context("the kernel's command line")?;
    header.cmd_line_ptr = u32::try_from(COMMAND_LINE)?;
    header.type_of_loader = LOADER_UNDEFINED;
    let mut params = boot_params { hdr: header, ..Default::default() };
    describe_memory(&mut params, bytes)?;
    memory.write_obj(params, GuestAddress(ZERO_PAGE))?;
    memory.write_slice(&mp_table::bytes(LOW_MEMORY_END, cpus), GuestAddress(LOW_MEMORY_END))?;
    write_tables(memory)?;
    Ok(Entry { address: load + ENTRY_64 })
}

fn load_kernel(memory: &GuestMemoryMmap, path: &Path) -> Result<(u64, setup_header)> {
    let name = path.display();
    let mut file = File::open(path).with_context(|| format!("cannot open the kernel {name}"))?;
    let high = Some(GuestAddress(HIGH_MEMORY));
    let loaded = BzImage::load(memory, None, &mut file, high)
        .with_context(|| format!("{name} is no Linux kernel in bzImage format"))?;
    let header = loaded.setup_header.context("a kernel without a header")?;
    let is_64bit = header.xloadflags & XLF_KERNEL_64 != 0;
    ensure!(is_64bit, "{name} is no kernel for 64 bits");
    Ok((loaded.kernel_load.0, header))
}

/// Loads the initramfs at the highest address that `room` allows.
fn load_initramfs(memory: &GuestMemoryMmap, path: &Path, room: std::ops::Range<u64>) -> Result<(u32, u32)> {
    let name = path.display();
    let mut file = File::open(path).with_context(|| format!("cannot open the initramfs {name}"))?;
    let len = file.metadata().with_context(|| format!("cannot look at the initramfs {name}"))?.len();
    let start = room.end.checked_sub(len).map(|start| start & !0xfff).filter(|start| *start >= room.start);
    let start = start.with_context(|| format!("no room in memory for the initramfs {name}"))?;
    memory
        .read_exact_volatile_from(GuestAddress(start), &mut file, usize::try_from(len)?)
        .with_context(|| format!("cannot read the initramfs {name}"))?;
    Ok((u32::try_from(start)?, u32::try_from(len)?))
}

fn describe_memory(params: &mut boot_params, bytes: u64) -> Result<()> {
    let mut entries =
        vec![(0, LOW_MEMORY_END, E820_RAM), (LOW_MEMORY_END, HIGH_MEMORY - LOW_MEMORY_END, E820_RESERVED)];
    for (start, len) in layout(bytes) {
        let from = start.0.max(HIGH_MEMORY);
        entries.push((from, start.0 + len - from, E820_RAM));
    }
    params.e820_entries = u8::try_from(entries.len())?;
    // Entries are copied one at a time: the structure is packed, so references to its fields are not allowed.
    let mut table = params.e820_table;
    for (entry, (addr, size, kind)) in table.iter_mut().zip(entries) {
        *entry = boot_e820_entry { addr, size, r#type: kind };
    }
    params.e820_table = table;
    Ok(())
}

/// Writes the segment descriptors and the page tables, which identity-map the first GiB with 2 MiB pages.
fn write_tables(memory: &GuestMemoryMmap) -> Result<()> {
    for (at, descriptor) in (GDT..).step_by(8).zip(DESCRIPTORS) {
        memory.write_obj(descriptor, GuestAddress(at))?;
    }
    const PRESENT_WRITABLE: u64 = 3;
    const LARGE: u64 = 1 << 7;
    let (directories, pages) = (PAGE_TABLES + 0x1000, PAGE_TABLES + 0x2000);
    memory.write_obj(directories | PRESENT_WRITABLE, GuestAddress(PAGE_TABLES))?;
    memory.write_obj(pages | PRESENT_WRITABLE, GuestAddress(directories))?;
    for page in 0..512 {
        memory.write_obj(page << 21 | LARGE | PRESENT_WRITABLE, GuestAddress(pages + page * 8))?;
    }
    Ok(())
}

impl Entry {
    /// Returns the general registers of the boot processor.
    pub(crate) fn registers(self) -> kvm_regs {
        kvm_regs { rip: self.address, rsi: ZERO_PAGE, rsp: STACK, rbp: STACK, rflags: 2, ..Default::default() }
    }

    /// Returns the special registers: 64-bit mode with paging on and flat segments.
    pub(crate) fn special_registers(self, at_reset: kvm_sregs) -> kvm_sregs {
        const PROTECTED_PAGED: u64 = 1 | 1 << 4 | 1 << 31;
        const PHYSICAL_ADDRESS_EXTENSION: u64 = 1 << 5;
        const LONG_MODE: u64 = 1 << 8 | 1 << 10;
        let data = segment(DATA, 0x3, false);
        kvm_sregs {
            cs: segment(CODE, 0xb, true),
            ds: data,
            es: data,
            fs: data,
            gs: data,
            ss: data,
            tr: kvm_segment { s: 0, db: 0, limit: 0xf_ffff, ..segment(TASK, 0xb, false) },
            gdt: kvm_dtable { base: GDT, limit: 5 * 8 - 1, ..Default::default() },
            cr0: PROTECTED_PAGED,
            cr3: PAGE_TABLES,
            cr4: PHYSICAL_ADDRESS_EXTENSION,
            efer: LONG_MODE,
            ..at_reset
        }
    }
}

fn segment(selector: u16, kind: u8, code: bool) -> kvm_segment {
    kvm_segment {
        base: 0,
        limit: u32::MAX,
        selector,
        type_: kind,
        present: 1,
        s: 1,
        g: 1,
        db: u8::from(!code),
        l: u8::from(code),
        ..Default::default()
    }
}

#[cfg(test)]
mod tests;
