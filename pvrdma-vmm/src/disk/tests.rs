use std::io::Write as _;

use vm_memory::{Bytes, GuestAddress};

use super::*;

const DESCRIPTORS: u64 = 0x1000;
const AVAILABLE: u64 = 0x2000;
const USED: u64 = 0x3000;
const DATA: u64 = 0x1_0000;

/// Counts interrupts.
#[derive(Default)]
struct Interrupts(Mutex<Vec<u16>>);

impl InterruptSink for Interrupts {
    fn msix(&self, vector: u16) {
        self.0.lock().push(vector);
    }

    fn intx(&self, _asserted: bool) {}
}

/// Driver of a disk with eight sectors, each of which is filled with its number.
struct Driver {
    disk: Disk,
    memory: GuestMemoryMmap,
    interrupts: Arc<Interrupts>,
    file: tempfile::NamedTempFile,
    posted: u16,
}

impl Driver {
    fn up(writable: bool) -> Self {
        let mut file = tempfile::NamedTempFile::new().unwrap();
        (0..8).for_each(|sector| file.write_all(&[sector; 512]).unwrap());
        let memory = crate::memory::allocate(1 << 20).unwrap();
        let image = Image::open(&DiskOptions { path: file.path().to_owned(), writable }).unwrap();
        let interrupts = Arc::new(Interrupts::default());
        let disk = Disk::new(image, memory.clone(), Arc::clone(&interrupts) as _).unwrap();
        let driver = Self { disk, memory, interrupts, file, posted: 0 };
        driver.disk.config_write(4, &[6, 0]);
        driver.set_up();
        driver
    }

    fn set_up(&self) {
        self.write(0x14, &[3]);
        self.write(0x08, &1_u32.to_le_bytes());
        self.write(0x0c, &1_u32.to_le_bytes());
        self.write(0x14, &[11]);
        self.write(0x16, &[0, 0]);
        self.write(0x18, &16_u16.to_le_bytes());
        self.write(0x1a, &1_u16.to_le_bytes());
        for (offset, address) in [(0x20, DESCRIPTORS), (0x28, AVAILABLE), (0x30, USED)] {
            self.write(offset, &address.to_le_bytes());
        }
        self.write(0x1c, &1_u16.to_le_bytes());
        self.write(0x14, &[15]);
    }

    fn write(&self, offset: u64, data: &[u8]) {
        let _ = self.disk.bar_write(REGISTERS, offset, data);
    }

    fn read(&self, offset: u64, len: usize) -> u64 {
        let mut data = [0; 8];
        self.disk.bar_read(REGISTERS, offset, &mut data[..len]);
        u64::from_le_bytes(data)
    }

    /// Posts a chain of buffers (address, length, whether the device writes) and notifies the device.
    fn post(&mut self, pieces: &[(u64, u32, bool)]) {
        for (index, (address, len, written)) in (0_u16..).zip(pieces) {
            let more = usize::from(index) + 1 < pieces.len();
            let flags = u16::from(more) | u16::from(*written) << 1;
            let at = GuestAddress(DESCRIPTORS + u64::from(index) * 16);
            self.memory.write_obj(*address, at).unwrap();
            self.memory.write_obj(*len, GuestAddress(at.0 + 8)).unwrap();
            self.memory.write_obj([flags, index + 1], GuestAddress(at.0 + 12)).unwrap();
        }
        let slot = AVAILABLE + 4 + u64::from(self.posted % 16) * 2;
        self.memory.write_obj(0_u16, GuestAddress(slot)).unwrap();
        self.posted += 1;
        self.memory.write_obj(self.posted, GuestAddress(AVAILABLE + 2)).unwrap();
        self.disk.bar_write(REGISTERS, NOTIFY, &[0, 0]).run(&self.disk);
    }

    /// Sends a request with header and status; returns the status and the number of bytes written.
    fn request(&mut self, kind: u32, sector: u64, data: &[(u64, u32, bool)]) -> (u8, u32) {
        self.memory.write_obj(kind, GuestAddress(DATA)).unwrap();
        self.memory.write_obj(sector, GuestAddress(DATA + 8)).unwrap();
        self.memory.write_obj(0xff_u8, GuestAddress(DATA + 16)).unwrap();
        let pieces = [&[(DATA, 16, false)], data, &[(DATA + 16, 1, true)]].concat();
        self.post(&pieces);
        let used: u16 = self.memory.read_obj(GuestAddress(USED + 2)).unwrap();
        assert_eq!(used, self.posted, "the request is answered");
        let at = USED + 4 + u64::from((self.posted - 1) % 16) * 8;
        let written = self.memory.read_obj(GuestAddress(at + 4)).unwrap();
        (self.memory.read_obj(GuestAddress(DATA + 16)).unwrap(), written)
    }

    fn data(&self, address: u64, len: usize) -> Vec<u8> {
        let mut data = vec![0; len];
        self.memory.read_slice(&mut data, GuestAddress(address)).unwrap();
        data
    }
}

const PAGE_A: u64 = 0x2_0000;
const PAGE_B: u64 = 0x3_0000;

#[test]
fn a_driver_reads_and_writes_sectors() {
    let mut driver = Driver::up(true);
    assert_eq!(driver.request(0, 2, &[(PAGE_A, 512, true), (PAGE_B, 1024, true)]), (0, 1537));
    assert_eq!(driver.data(PAGE_A, 512), [2; 512]);
    assert_eq!(driver.data(PAGE_B, 1024), [[3; 512], [4; 512]].concat());
    assert_eq!(*driver.interrupts.0.lock(), [1], "the queue's vector");
    driver.memory.write_slice(&[9; 512], GuestAddress(PAGE_A)).unwrap();
    assert_eq!(driver.request(1, 7, &[(PAGE_A, 512, false)]), (0, 1));
    assert_eq!(driver.request(4, 0, &[]), (0, 1));
    let file = std::fs::read(driver.file.path()).unwrap();
    assert_eq!((file.len(), &file[7 * 512..], &file[6 * 512..7 * 512]), (4096, &[9; 512][..], &[6; 512][..]));
}

#[test]
fn written_memory_is_logged() {
    let mut driver = Driver::up(true);
    let take = |driver: &Driver| {
        let mut written = Dirty::none_of(&driver.memory);
        driver.disk.take_written(&mut written);
        written.runs(1000)
    };
    let request = |driver: &mut Driver| driver.request(0, 2, &[(PAGE_A + 4000, 512, true)]);
    request(&mut driver);
    driver.disk.log_writes(true);
    assert_eq!(take(&driver), []);
    request(&mut driver);
    driver.request(1, 7, &[(PAGE_B, 512, false)]);
    // The ring of completions, the status, and the data, which is on two pages.
    assert_eq!(take(&driver), [(USED, 1), (DATA, 1), (PAGE_A, 2)]);
    assert_eq!(take(&driver), []);
    request(&mut driver);
    driver.disk.log_writes(false);
    assert_eq!(take(&driver), []);
}

#[test]
fn accesses_outside_of_the_disk_are_errors() {
    let mut driver = Driver::up(false);
    for (kind, sector, data, status) in [
        (0, 8, (PAGE_A, 512, true), 1),
        (0, 7, (PAGE_A, 1024, true), 1),
        (0, u64::MAX, (PAGE_A, 512, true), 1),
        (0, u64::MAX / 512, (PAGE_A, 512, true), 1),
        (1, 0, (PAGE_A, 512, false), 1),
        (77, 0, (PAGE_A, 512, false), 2),
    ] {
        assert_eq!(driver.request(kind, sector, &[data]).0, status, "{kind} {sector}");
    }
    assert_eq!(driver.request(0, 0, &[(PAGE_A, 512, true)]).0, 0, "and the disk goes on");
}

/// Malformed requests complete with zero bytes written and have no other effect.
#[test]
fn hostile_requests_are_survived() {
    let mut driver = Driver::up(true);
    for pieces in [
        &[(DATA, 16, false)][..],
        &[(DATA, 16, true)],
        &[(DATA, 3, false), (PAGE_A, 1, true)],
        &[(DATA, 16, false), (1 << 40, 512, true), (PAGE_A, 1, true)],
        &[(u64::MAX - 4, 16, false), (PAGE_A, 1, true)],
        &[(DATA, 0, false), (PAGE_A, 0, true)],
    ] {
        driver.memory.write_obj(1_u32, GuestAddress(DATA)).unwrap();
        driver.post(pieces);
    }
    // A descriptor chain that loops.
    driver.memory.write_obj([DATA, 16 | 1 << 32], GuestAddress(DESCRIPTORS)).unwrap();
    driver.posted += 1;
    driver.memory.write_obj(driver.posted, GuestAddress(AVAILABLE + 2)).unwrap();
    driver.disk.run_deferred();
    assert_eq!(driver.request(0, 1, &[(PAGE_A, 512, true)]), (0, 513));
    let file = std::fs::read(driver.file.path()).unwrap();
    assert!(file.chunks(512).zip(0..).all(|(sector, number)| sector == [number; 512]), "nothing was written");
    // Rings at addresses without memory.
    driver.write(0x14, &[0]);
    driver.set_up();
    driver.write(0x28, &(1_u64 << 40).to_le_bytes());
    driver.disk.run_deferred();
}

#[test]
fn nothing_moves_before_the_driver_is_ready_or_without_bus_mastering() {
    let mut driver = Driver::up(true);
    driver.disk.config_write(4, &[2, 0]);
    driver.post(&[(DATA, 16, false), (PAGE_A, 512, true), (DATA + 16, 1, true)]);
    assert_eq!(driver.memory.read_obj::<u16>(GuestAddress(USED + 2)).unwrap(), 0);
    driver.disk.config_write(4, &[6, 0]);
    driver.disk.run_deferred();
    assert_eq!(driver.memory.read_obj::<u16>(GuestAddress(USED + 2)).unwrap(), 1);
    driver.write(0x14, &[0]);
    assert_eq!((driver.read(0x14, 1), driver.read(0x1c, 2), driver.read(0x20, 8)), (0, 0, 0), "reset");
    driver.disk.run_deferred();
}

#[test]
fn registers_are_those_of_the_specification() {
    let driver = Driver::up(false);
    assert_eq!((driver.read(0x12, 2), driver.read(0x18, 2), driver.read(0x1a, 2)), (1, 16, 1));
    assert_eq!((driver.read(0x20, 8), driver.read(0x28, 4), driver.read(0x2c, 4)), (DESCRIPTORS, AVAILABLE, 0));
    driver.write(0x00, &[0, 0, 0, 0]);
    assert_eq!(driver.read(0x04, 4), 1 << 2 | 1 << 5 | 1 << 9);
    driver.write(0x00, &[1, 0, 0, 0]);
    assert_eq!(driver.read(0x04, 4), 1);
    driver.write(0x00, &[2, 0, 0, 0]);
    assert_eq!(driver.read(0x04, 4), 0);
    // There is no second queue.
    driver.write(0x16, &[1, 0]);
    assert_eq!((driver.read(0x18, 2), driver.read(0x1a, 2)), (0, 0xffff));
    driver.write(0x18, &[4, 0]);
    driver.write(0x16, &[0, 0]);
    assert_eq!(driver.read(0x18, 2), 16);
    assert_eq!((driver.read(DEVICE, 8), driver.read(DEVICE + 12, 4), driver.read(DEVICE + 64, 4)), (8, 128, 0));
    // The capabilities point to the structures.
    let config = |at: usize, len: usize| {
        let mut data = vec![0; len];
        driver.disk.config_read(at, &mut data);
        data
    };
    let (mut at, mut found) = (usize::from(config(0x34, 1)[0]), Vec::new());
    while at != 0 {
        let head = config(at, 20);
        if head[0] == VENDOR_CAPABILITY {
            found.push((head[3], head[4], u32::from_le_bytes(head[8..12].try_into().unwrap())));
        }
        at = head[1].into();
    }
    assert_eq!(found, [(1, 0, 0), (2, 0, 0x3000), (3, 0, 0x1000), (4, 0, 0x2000)]);
}

#[test]
fn a_file_that_is_no_disk_is_named() {
    let refused = |path: &std::path::Path| {
        let options = DiskOptions { path: path.to_owned(), writable: false };
        format!("{:#}", Image::open(&options).unwrap_err())
    };
    assert!(refused(std::path::Path::new("/nowhere.ext4")).contains("/nowhere.ext4"));
    let mut odd = tempfile::NamedTempFile::new().unwrap();
    assert!(refused(odd.path()).contains("no disk"));
    odd.write_all(&[0; 700]).unwrap();
    assert!(refused(odd.path()).contains("no disk"));
}
