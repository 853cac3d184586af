use std::io::Write;

use tempfile::NamedTempFile;

use super::*;
use crate::memory::allocate;

const BYTES: u64 = 128 << 20;

fn file(content: &[u8]) -> NamedTempFile {
    let mut file = NamedTempFile::new().unwrap();
    file.write_all(content).unwrap();
    file
}

/// Builds an image with one setup sector and 16 bytes of kernel.
fn image(change: impl Fn(&mut Vec<u8>)) -> NamedTempFile {
    let mut bytes = vec![0; 1024];
    let mut put = |at: usize, value: &[u8]| bytes[at..at + value.len()].copy_from_slice(value);
    put(0x1f1, &[1]);
    put(0x202, b"HdrS");
    put(0x206, &0x020f_u16.to_le_bytes());
    put(0x211, &[1]);
    put(0x214, &0x10_0000_u32.to_le_bytes());
    put(0x22c, &0x7fff_ffff_u32.to_le_bytes());
    put(0x236, &1_u16.to_le_bytes());
    put(0x258, &0x100_0000_u64.to_le_bytes());
    put(0x260, &0x200_0000_u32.to_le_bytes());
    bytes.extend_from_slice(b"0123456789abcdef");
    change(&mut bytes);
    file(&bytes)
}

fn try_load(kernel: &Path, initramfs: Option<&Path>, line: &str) -> Result<(GuestMemoryMmap, Entry)> {
    let memory = allocate(BYTES)?;
    let entry = load(&memory, BYTES, 2, Payload { kernel, initramfs, command_line: line })?;
    Ok((memory, entry))
}

#[test]
fn everything_is_where_the_kernel_looks() {
    let (kernel, initramfs) = (image(|_| {}), file(&[7; 5000]));
    let (memory, entry) = try_load(kernel.path(), Some(initramfs.path()), "console=ttyS0").unwrap();
    let registers = entry.registers();
    assert_eq!((registers.rip, registers.rsi), (0x10_0200, ZERO_PAGE));
    let params: boot_params = memory.read_obj(GuestAddress(ZERO_PAGE)).unwrap();
    let (start, len, line) = (params.hdr.ramdisk_image, params.hdr.ramdisk_size, params.hdr.cmd_line_ptr);
    assert_eq!((len, u64::from(start) % 4096), (5000, 0));
    let mut read = [0; 13];
    memory.read_slice(&mut read, GuestAddress(line.into())).unwrap();
    assert_eq!(&read, b"console=ttyS0");
    let mut code = [0; 16];
    memory.read_slice(&mut code, GuestAddress(0x10_0000)).unwrap();
    assert_eq!(&code, b"0123456789abcdef");
    let table = params.e820_table;
    let list: Vec<_> = table.iter().take(params.e820_entries.into()).map(|e| (e.addr, e.size, e.r#type)).collect();
    assert_eq!(list, [(0, 0x9_fc00, 1), (0x9_fc00, 0x6_0400, 2), (0x10_0000, BYTES - 0x10_0000, 1)]);
    // The page tables map an address in the last 2 MiB page of the first GiB to itself.
    let pages: u64 = memory.read_obj(GuestAddress(PAGE_TABLES + 0x2000 + 511 * 8)).unwrap();
    assert_eq!(pages, (511 << 21) | 0x83);
    let mut mp = [0; 4];
    memory.read_slice(&mut mp, GuestAddress(0x9_fc00)).unwrap();
    assert_eq!(&mp, b"_MP_");
}

#[test]
fn the_obstacle_to_a_boot_is_named() {
    let good = image(|_| {});
    let refused = |kernel: &Path, initramfs: Option<&Path>, line: &str| {
        format!("{:#}", try_load(kernel, initramfs, line).map(drop).unwrap_err())
    };
    for (kernel, what) in [
        (file(b""), "no Linux kernel"),
        (file(&[0x7f; 8192]), "no Linux kernel"),
        (image(|bytes| bytes.truncate(0x210)), "no Linux kernel"),
        (image(|bytes| bytes[0x236] = 0), "64 bits"),
        (image(|bytes| bytes[0x263] = 0x10), "MiB of memory"),
        (image(|bytes| bytes[0x263] = 0xff), "MiB of memory"),
    ] {
        let error = refused(kernel.path(), None, "x");
        assert!(error.contains(what), "{what}: {error}");
    }
    assert!(refused(Path::new("/nowhere"), None, "x").contains("cannot open the kernel /nowhere"));
    assert!(refused(good.path(), Some(Path::new("/nowhere")), "x").contains("initramfs /nowhere"));
    let large = NamedTempFile::new().unwrap();
    large.as_file().set_len(BYTES).unwrap();
    assert!(refused(good.path(), Some(large.path()), "x").contains("no room"));
    assert!(refused(good.path(), None, &"x".repeat(3000)).contains("command line"));
}
