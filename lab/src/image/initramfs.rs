//! The first stage: a cpio archive with busybox and the modules needed to mount the root file system.

use std::fs::File;
use std::io::{self, Write};
use std::path::Path;

use anyhow::{Context, Result};

use super::guest_image::GuestImage;
use super::log_command::StepLog;
use super::{modules, root_disk};

/// Dependencies of the archive besides the steps before it.
pub(crate) const KEY: &str = FIRST_STAGE;

/// Builds the archive. It is not compressed, because QEMU copies it in no time, but an emulated processor would unpack
/// it slowly.
pub(crate) fn build(image: &GuestImage, _log: &StepLog) -> Result<()> {
    let release = image.kernel_release()?;
    let module_directory = image.guest_root().join("usr/lib/modules").join(&release);
    write_first_stage(&image.initramfs(), &root_disk::busybox(image), &module_directory)
}

/// Writes the archive with this busybox and those of the modules that the root file system needs.
pub(super) fn write_first_stage(path: &Path, busybox: &Path, module_directory: &Path) -> Result<()> {
    let file = File::create(path).with_context(|| format!("cannot create {}", path.display()))?;
    let mut archive = CpioWriter::new(io::BufWriter::new(file));
    for directory in ["bin", "dev", "proc", "sys", "image", "rw", "root", "modules"] {
        archive.directory(directory)?;
    }
    archive.file("bin/busybox", 0o755, &read(busybox)?)?;
    archive.file("init", 0o755, FIRST_STAGE.as_bytes())?;
    let mut order = String::new();
    for module in modules::boot_order(module_directory)? {
        let name = module.file_name().context("a module without a name")?.to_string_lossy();
        archive.file(&format!("modules/{name}"), 0o644, &read(&module_directory.join(&module))?)?;
        order.push_str(&name);
        order.push('\n');
    }
    archive.file("modules/order", 0o644, order.as_bytes())?;
    archive.finish()
}

/// Appends a second archive with one executable to a copy of the first stage; the kernel unpacks both.
pub fn append_program(initramfs: &Path, name: &str, from: &Path) -> Result<()> {
    let program = loaded_part(read(from)?).with_context(|| format!("{} is no program", from.display()))?;
    let file =
        File::options().append(true).open(initramfs).with_context(|| format!("cannot open {}", initramfs.display()))?;
    let mut archive = CpioWriter::new(io::BufWriter::new(file));
    archive.file(name, 0o755, &program)?;
    archive.finish()
}

/// Returns the loaded part of a program (ELF, 64 bit, little-endian), without the symbols behind it. The symbols are
/// most of the file, and a guest would keep them in its memory, twice while it boots.
fn loaded_part(mut program: Vec<u8>) -> Option<Vec<u8>> {
    fn at<const N: usize>(bytes: &[u8], offset: usize) -> Option<[u8; N]> {
        bytes.get(offset..)?.first_chunk().copied()
    }
    let long = |offset| usize::try_from(u64::from_le_bytes(at(&program, offset)?)).ok();
    let short = |offset| Some(usize::from(u16::from_le_bytes(at(&program, offset)?)));
    if !program.starts_with(b"\x7fELF\x02\x01") {
        return None;
    }
    // Program header table: its offset, the size of an entry, and the number of entries.
    let (table, size, count) = (long(32)?, short(54)?, short(56)?);
    let mut end = table.checked_add(size.checked_mul(count)?)?;
    for index in 0..count {
        let entry = table + index * size;
        // Offset of a segment in the file plus its length there.
        end = end.max(long(entry + 8)?.checked_add(long(entry + 32)?)?);
    }
    program.get(..end)?;
    program.truncate(end);
    // Clears the reference to the removed section header table: offset, number, and the index of the names.
    program.get_mut(40..48)?.fill(0);
    program.get_mut(60..64)?.fill(0);
    Some(program)
}

fn read(path: &Path) -> Result<Vec<u8>> {
    std::fs::read(path).with_context(|| format!("cannot read {}", path.display()))
}

/// Writes the "new ASCII" cpio format, the one the kernel reads.
#[derive(Debug)]
struct CpioWriter<W: Write> {
    out: W,
    length: usize,
    inode: u32,
}

impl<W: Write> CpioWriter<W> {
    fn new(out: W) -> Self {
        Self { out, length: 0, inode: 0 }
    }

    fn directory(&mut self, name: &str) -> Result<()> {
        self.entry(name, 0o040_755, &[])
    }

    fn file(&mut self, name: &str, mode: u32, content: &[u8]) -> Result<()> {
        self.entry(name, 0o100_000 | mode, content)
    }

    fn finish(mut self) -> Result<()> {
        self.entry("TRAILER!!!", 0, &[])?;
        // The kernel skips zeros up to the next archive, which starts on a multiple of four.
        self.pad(512)?;
        self.out.flush().context("cannot write the initramfs")
    }

    fn entry(&mut self, name: &str, mode: u32, content: &[u8]) -> Result<()> {
        self.inode += 1;
        let size = u32::try_from(content.len()).context("a file too large for cpio")?;
        let name_size = u32::try_from(name.len() + 1).context("a name too long for cpio")?;
        let fields = [self.inode, mode, 0, 0, 1, 0, size, 0, 0, 0, 0, name_size, 0];
        let mut header = String::from("070701");
        for field in fields {
            header.push_str(&format!("{field:08x}"));
        }
        self.put(header.as_bytes())?;
        self.put(name.as_bytes())?;
        self.put(&[0])?;
        self.pad(4)?;
        self.put(content)?;
        self.pad(4)
    }

    fn put(&mut self, bytes: &[u8]) -> Result<()> {
        self.length += bytes.len();
        self.out.write_all(bytes).context("cannot write the initramfs")
    }

    fn pad(&mut self, to: usize) -> Result<()> {
        let missing = self.length.next_multiple_of(to) - self.length;
        self.put(&vec![0; missing])
    }
}

/// Loads the modules for the root file system, mounts a writable layer over it and switches to it.
const FIRST_STAGE: &str = "\
#!/bin/busybox sh
export PATH=/bin
/bin/busybox --install -s /bin
mount -t devtmpfs dev /dev
mount -t proc proc /proc
mount -t sysfs sys /sys
while read -r module; do
    insmod /modules/$module || echo \"first stage: cannot load $module\"
done < /modules/order
tries=0
until [ -b /dev/vda ]; do
    tries=$((tries + 1))
    [ $tries -gt 600 ] && echo 'first stage: no disk' && poweroff -f
    sleep 0.05
done
mount -t ext4 -o ro /dev/vda /image
mount -t tmpfs tmpfs /rw
mkdir /rw/upper /rw/work
mount -t overlay -o lowerdir=/image,upperdir=/rw/upper,workdir=/rw/work overlay /root
mount -t tmpfs tmpfs /root/run
cp /guest-tests /root/run/guest-tests
mount --move /dev /root/dev
mount --move /proc /root/proc
mount --move /sys /root/sys
exec switch_root /root /bed/init
";

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_program_runs_without_its_symbols() {
        let own = std::fs::read("/proc/self/exe").unwrap();
        let before = own.len();
        let loaded = loaded_part(own).unwrap();
        assert!(loaded.len() < before, "{before} bytes, and all are loaded");
        let directory = tempfile::tempdir().unwrap();
        let (bytes, path) = (directory.path().join("bytes"), directory.path().join("program"));
        std::fs::write(&bytes, &loaded).unwrap();
        // Another process creates the program: children that other tests start meanwhile inherit the descriptors of
        // this one, and a file that is open for writing cannot be executed.
        let install = std::process::Command::new("install").args([&bytes, &path]).status().unwrap();
        assert!(install.success());
        let output = std::process::Command::new(&path).args(["--list", "without_its_symbols"]).output().unwrap();
        assert!(output.status.success(), "{output:?}");
        assert!(String::from_utf8_lossy(&output.stdout).contains("a_program_runs_without_its_symbols"));
        for length in [0, 4, 60, 100] {
            assert_eq!(loaded_part(loaded[..length].to_vec()), None, "{length} bytes of a program");
        }
    }

    #[test]
    fn entries_are_aligned() {
        let mut bytes = Vec::new();
        let mut archive = CpioWriter::new(&mut bytes);
        archive.file("init", 0o755, b"hello").unwrap();
        archive.finish().unwrap();
        assert_eq!(bytes.len() % 512, 0);
        assert!(bytes.starts_with(b"070701"));
        // Header (110) and name with its zero (5) end at 115, padded to 116.
        assert_eq!(&bytes[116..121], b"hello");
        assert_eq!(&bytes[124..130], b"070701");
    }
}
