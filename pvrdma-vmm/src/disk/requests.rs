//! Block requests and the backing file (section 5.2.6).

use std::fs::File;
use std::io::{self, Read, Seek, SeekFrom, Write};
use std::os::unix::fs::FileExt;

use anyhow::{Context, Result, ensure};
use virtio_queue::{DescriptorChain, Reader, Writer};
use vm_memory::GuestMemoryMmap;

use crate::options::DiskOptions;

const SECTOR: u64 = 512;
/// Maximum number of data segments of a request.
const MAX_SEGMENTS: u32 = 128;
/// Bytes that are copied at a time.
const PIECE: usize = 64 << 10;
const HEADER: usize = 16;

const FEATURE_SEGMENTS: u64 = 1 << 2;
const FEATURE_READ_ONLY: u64 = 1 << 5;
const FEATURE_FLUSH: u64 = 1 << 9;

const READ: u32 = 0;
const WRITE: u32 = 1;
const FLUSH: u32 = 4;

const OK: u8 = 0;
const ERROR: u8 = 1;
const UNSUPPORTED: u8 = 2;

/// Content of a disk.
#[derive(Debug)]
pub(super) struct Image {
    file: File,
    bytes: u64,
    writable: bool,
}

impl Image {
    /// Opens a file or a block device.
    pub(super) fn open(options: &DiskOptions) -> Result<Self> {
        let DiskOptions { path, writable } = options;
        let name = path.display();
        let open = File::options().read(true).write(*writable).open(path);
        let mut file = open.with_context(|| format!("cannot open the disk {name}"))?;
        // The metadata of a block device do not contain its length, so seek to the end.
        let bytes = file.seek(SeekFrom::End(0)).with_context(|| format!("cannot look at the disk {name}"))?;
        ensure!(
            bytes > 0 && bytes.is_multiple_of(SECTOR),
            "{name} is no disk: {bytes} bytes are no sectors of {SECTOR}"
        );
        Ok(Self { file, bytes, writable: *writable })
    }

    pub(super) const fn bytes(&self) -> u64 {
        self.bytes
    }

    pub(super) const fn is_writable(&self) -> bool {
        self.writable
    }

    pub(super) const fn features(&self) -> u64 {
        FEATURE_SEGMENTS | FEATURE_FLUSH | if self.writable { 0 } else { FEATURE_READ_ONLY }
    }

    /// Writes everything to the medium.
    pub(super) fn flush(&self) -> io::Result<()> {
        if self.writable { self.file.sync_data() } else { Ok(()) }
    }

    /// Returns the device configuration: capacity in sectors, and the maximum number of segments of a request.
    pub(super) fn config(&self) -> [u8; 16] {
        let mut config = [0; 16];
        let fields = (self.bytes / SECTOR).to_le_bytes().into_iter().chain([0; 4]).chain(MAX_SEGMENTS.to_le_bytes());
        config.iter_mut().zip(fields).for_each(|(to, from)| *to = from);
        config
    }

    /// Serves a request and returns the number of bytes written to guest memory. For a malformed request nothing is
    /// written.
    pub(super) fn serve(&self, memory: &GuestMemoryMmap, chain: DescriptorChain<&GuestMemoryMmap>) -> u32 {
        let (Ok(mut reader), Ok(mut writer)) = (chain.clone().reader(memory), chain.writer(memory)) else { return 0 };
        let mut header = [0; HEADER];
        let Some(room) = writer.available_bytes().checked_sub(1) else { return 0 };
        let Ok(mut status) = writer.split_at(room) else { return 0 };
        let code = match reader.read_exact(&mut header) {
            Ok(()) => self.carry_out(header, &mut reader, &mut writer),
            Err(_) => ERROR,
        };
        let written = status.write_all(&[code]).map_or(0, |()| writer.bytes_written() + 1);
        u32::try_from(written).unwrap_or(u32::MAX)
    }

    fn carry_out(&self, header: [u8; HEADER], reader: &mut Reader<'_>, writer: &mut Writer<'_>) -> u8 {
        let [a, b, c, d, _, _, _, _, sector @ ..] = header;
        let sector = u64::from_le_bytes(sector);
        let result = match u32::from_le_bytes([a, b, c, d]) {
            READ => self.read(sector, writer),
            WRITE if self.writable => self.write(sector, reader),
            FLUSH => self.file.sync_data(),
            WRITE => return ERROR,
            _ => return UNSUPPORTED,
        };
        if result.is_ok() { OK } else { ERROR }
    }

    /// Returns the file offset of `len` bytes from a sector on, if they are within the disk.
    fn place(&self, sector: u64, len: usize) -> io::Result<u64> {
        let start = sector.checked_mul(SECTOR);
        let inside = start.filter(|start| start.checked_add(len as u64).is_some_and(|end| end <= self.bytes));
        inside.ok_or_else(|| io::ErrorKind::InvalidInput.into())
    }

    fn read(&self, sector: u64, to: &mut Writer<'_>) -> io::Result<()> {
        let mut at = self.place(sector, to.available_bytes())?;
        let mut piece = vec![0; to.available_bytes().min(PIECE)];
        while to.available_bytes() > 0 {
            let len = to.available_bytes().min(PIECE);
            let bytes = piece.get_mut(..len).ok_or(io::ErrorKind::InvalidInput)?;
            self.file.read_exact_at(bytes, at)?;
            to.write_all(bytes)?;
            at += len as u64;
        }
        Ok(())
    }

    fn write(&self, sector: u64, from: &mut Reader<'_>) -> io::Result<()> {
        let mut at = self.place(sector, from.available_bytes())?;
        let mut piece = vec![0; from.available_bytes().min(PIECE)];
        while from.available_bytes() > 0 {
            let len = from.available_bytes().min(PIECE);
            let bytes = piece.get_mut(..len).ok_or(io::ErrorKind::InvalidInput)?;
            from.read_exact(bytes)?;
            self.file.write_all_at(bytes, at)?;
            at += len as u64;
        }
        Ok(())
    }
}
