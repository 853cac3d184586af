//! A device with a few pages of guest memory, driven register by register: for unit tests of the control plane.

use std::sync::Arc;

use pvrdma_guest_memory::{DmaSpace, PAGE_SIZE, PinPolicy};
use pvrdma_verbs::{GidType, MacAddr};
use vm_memory::{GuestAddress, GuestMemoryMmap};

use crate::abi::cmd::{self as abi, Opcode, RESPONSE_SIZE, RequestHeader, ResponseHeader};
use crate::abi::dsr::{RingPages, SharedRegion};
use crate::abi::layout::GuestLayout;
use crate::abi::regs::{ctl, offset};
use crate::config::DeviceConfig;
use crate::device::PvrdmaDevice;
use crate::pci_function::{InterruptSink, PciFunction};
use crate::test_hca::{Books, NullBackend, RecordingSink};

/// First address of guest memory.
pub(crate) const BASE: u64 = 0x10_0000;
/// Pages of guest memory.
pub(crate) const PAGES: u64 = 1024;

/// Where things lie, in pages from [`BASE`].
const DSR: u64 = 0;
const COMMAND: u64 = 1;
const RESPONSE: u64 = 2;
const ASYNC_DIR: u64 = 3;
const CQ_DIR: u64 = 5;
const ASYNC_RING: u64 = 16;
const CQ_RING: u64 = 20;
/// First page that tests may use.
pub(crate) const FREE: u64 = 32;

/// Guest page number of BAR 2.
pub(crate) const UAR_PFN: u64 = 0xfeb00;

/// The correlation key of all commands.
const KEY: u64 = 0x1122_3344_5566_7788;

/// A device and its surroundings.
pub(crate) struct Rig {
    pub(crate) device: Arc<PvrdmaDevice<NullBackend>>,
    pub(crate) memory: Arc<DmaSpace>,
    pub(crate) sink: Arc<RecordingSink>,
    pub(crate) books: Arc<Books>,
}

/// Bus address of a page.
pub(crate) const fn page(index: u64) -> u64 {
    BASE + index * PAGE_SIZE
}

/// A configuration for tests.
pub(crate) fn config() -> DeviceConfig {
    DeviceConfig::new("test", MacAddr([0x52, 0x54, 0, 0, 0, 1]))
}

impl Rig {
    /// Powered on and not touched yet.
    pub(crate) fn new(config: DeviceConfig) -> Self {
        Self::with_policy(config, PinPolicy::Off)
    }

    pub(crate) fn with_policy(config: DeviceConfig, policy: PinPolicy) -> Self {
        let guest =
            GuestMemoryMmap::<()>::from_ranges(&[(GuestAddress(BASE), usize::try_from(PAGES * PAGE_SIZE).unwrap())])
                .unwrap();
        let memory = DmaSpace::from_guest_memory(&guest, policy).unwrap();
        let sink = Arc::new(RecordingSink::default());
        let backend = NullBackend::default();
        let books = Arc::clone(&backend.0);
        let interrupts = Arc::<RecordingSink>::clone(&sink) as Arc<dyn InterruptSink>;
        let device = PvrdmaDevice::new(config, Arc::clone(&memory), interrupts, &backend).unwrap();
        Self { device, memory, sink, books }
    }

    /// Bus mastering and MSI-X on.
    pub(crate) fn enabled(config: DeviceConfig) -> Self {
        let rig = Self::new(config);
        rig.set_bus_master(true);
        rig.device.config_write(0x42, &0x8002_u16.to_le_bytes());
        rig
    }

    /// As a driver leaves it at the end of its probe.
    pub(crate) fn active(config: DeviceConfig) -> Self {
        let rig = Self::enabled(config);
        rig.bring_up();
        rig
    }

    /// A version 20 device that is active.
    pub(crate) fn up() -> Self {
        Self::active(config())
    }

    /// A device of an older version that is active.
    pub(crate) fn version(version: u32) -> Self {
        let roce = if version == 17 { GidType::RoceV1 } else { GidType::RoceV2 };
        Self::active(DeviceConfig { version, roce, ..config() })
    }

    pub(crate) fn set_bus_master(&self, on: bool) {
        self.device.config_write(4, &if on { 6_u16 } else { 2 }.to_le_bytes());
    }

    pub(crate) fn write(&self, register: u64, value: u32) {
        self.device.bar_write(1, register, &value.to_le_bytes());
    }

    pub(crate) fn read(&self, register: u64) -> u32 {
        let mut data = [0; 4];
        self.device.bar_read(1, register, &mut data);
        u32::from_le_bytes(data)
    }

    pub(crate) fn ctl(&self, value: u32) -> u32 {
        self.write(offset::CTL, value);
        self.read(offset::ERR)
    }

    pub(crate) fn poke(&self, addr: u64, bytes: &[u8]) {
        let was = self.memory.is_enabled();
        self.memory.set_enabled(true);
        self.memory.view().write(addr, bytes).unwrap();
        self.memory.set_enabled(was);
    }

    pub(crate) fn peek(&self, addr: u64, len: usize) -> Vec<u8> {
        let was = self.memory.is_enabled();
        self.memory.set_enabled(true);
        let mut bytes = vec![0; len];
        self.memory.view().read(addr, &mut bytes).unwrap();
        self.memory.set_enabled(was);
        bytes
    }

    /// Writes a page directory at page `dir` and its tables behind it that name `count` pages from `first` on, over and
    /// over if there are not enough. Returns its address.
    pub(crate) fn directory(&self, dir: u64, first: u64, count: u64) -> u64 {
        let tables = count.div_ceil(512);
        for table in 0..tables {
            self.poke(page(dir) + table * 8, &page(dir + 1 + table).to_le_bytes());
        }
        let room = PAGES - first;
        let entries: Vec<u8> = (0..count).flat_map(|i| page(first + i % room).to_le_bytes()).collect();
        self.poke(page(dir + 1), &entries);
        page(dir)
    }

    /// The shared region of a good driver.
    pub(crate) fn region(&self) -> SharedRegion {
        SharedRegion {
            driver_version: 20,
            cmd_slot_dma: page(COMMAND),
            resp_slot_dma: page(RESPONSE),
            async_ring_pages: RingPages { num_pages: 4, pdir_dma: self.directory(ASYNC_DIR, ASYNC_RING, 4) },
            cq_ring_pages: RingPages { num_pages: 4, pdir_dma: self.directory(CQ_DIR, CQ_RING, 4) },
            uar_pfn64: UAR_PFN,
            caps: Default::default(),
        }
    }

    /// Shows a shared region.
    pub(crate) fn show(&self, region: &SharedRegion) {
        let mut bytes = [0; SharedRegion::SIZE];
        region.encode(&mut bytes);
        self.poke(page(DSR), &bytes);
        self.show_at(page(DSR));
    }

    pub(crate) fn show_at(&self, address: u64) {
        self.write(offset::DSR_LOW, u32::try_from(address & 0xffff_ffff).unwrap());
        self.write(offset::DSR_HIGH, u32::try_from(address >> 32).unwrap());
    }

    /// The shared region as it is in memory.
    pub(crate) fn shown(&self) -> SharedRegion {
        SharedRegion::decode(&self.peek(page(DSR), SharedRegion::SIZE))
    }

    /// Handshake, unmask, activate.
    pub(crate) fn bring_up(&self) {
        self.show(&self.region());
        self.write(offset::IMR, 0);
        assert_eq!(self.ctl(ctl::ACTIVATE), 0);
        self.sink.take();
        self.books.take();
    }

    /// Puts a command into the slot, with garbage behind it.
    pub(crate) fn place<T: GuestLayout>(&self, opcode: Opcode, body: &T) {
        let mut bytes = [0xa5; abi::REQUEST_SIZE];
        let (used, _) = bytes.split_at_mut(T::SIZE);
        used.fill(0);
        body.encode(used);
        RequestHeader { response: KEY, cmd: opcode.0 }.encode(&mut bytes);
        self.poke(page(COMMAND), &bytes);
        self.poke(page(RESPONSE), &[0xcc; RESPONSE_SIZE]);
    }

    /// Runs what is in the slot. The value of ERR.
    pub(crate) fn request(&self) -> u32 {
        self.write(offset::REQUEST, 0);
        self.read(offset::ERR)
    }

    /// Runs a command. Its response, or ERR. Checks the rules that hold for all commands: conformance 17 to 19 and 24.
    pub(crate) fn run<T: GuestLayout>(&self, opcode: Opcode, body: &T) -> Result<Vec<u8>, u32> {
        self.sink.take();
        self.place(opcode, body);
        let err = self.request();
        let response = self.peek(page(RESPONSE), RESPONSE_SIZE);
        let interrupts = self.sink.take();
        if err != 0 || !opcode.is_waited() {
            assert!(interrupts.is_empty(), "{opcode}: {interrupts:?}");
            assert!(response.iter().all(|&byte| byte == 0xcc), "{opcode} wrote a response");
            return if err == 0 { Ok(Vec::new()) } else { Err(err) };
        }
        assert_eq!(interrupts, ["msix 0"], "{opcode}");
        let header = ResponseHeader::decode(&response);
        assert_eq!((header.response, header.ack), (KEY, 0x8000_0000 | opcode.0));
        if opcode != Opcode::MODIFY_QP {
            assert_eq!(header.err, 0, "{opcode}");
        }
        Ok(response)
    }

    /// Runs a command that must succeed and decodes its response.
    pub(crate) fn ok<T: GuestLayout, R: GuestLayout>(&self, opcode: Opcode, body: &T) -> R {
        R::decode(&self.run(opcode, body).unwrap_or_else(|err| panic!("{opcode}: ERR {err}")))
    }

    /// Rings a doorbell and lets the device act on it.
    pub(crate) fn ring(&self, uar_page: u64, register: u64, value: u32) {
        self.device.bar_write(2, uar_page * PAGE_SIZE + register, &value.to_le_bytes());
    }

    pub(crate) fn open(&self, uar_page: u64) -> u32 {
        let request = abi::CreateUc { pfn64: UAR_PFN + uar_page };
        self.ok::<_, abi::CreateUcResp>(Opcode::CREATE_UC, &request).ctx_handle
    }

    pub(crate) fn create_pd(&self, ctx_handle: u32) -> u32 {
        self.ok::<_, abi::CreatePdResp>(Opcode::CREATE_PD, &abi::CreatePd { ctx_handle }).pd_handle
    }

    /// A CQ of 64 entries.
    pub(crate) fn create_cq(&self, ctx_handle: u32) -> u32 {
        let request = self.cq_request(ctx_handle);
        self.ok::<_, abi::CreateCqResp>(Opcode::CREATE_CQ, &request).cq_handle
    }

    pub(crate) fn cq_request(&self, ctx_handle: u32) -> abi::CreateCq {
        abi::CreateCq { pdir_dma: self.directory(FREE, FREE + 8, 2), ctx_handle, cqe: 64, nchunks: 2 }
    }

    /// The library's QP of 100 requests and one SGE each (section 5.3).
    pub(crate) fn qp_request(&self, qp_type: u8, pd_handle: u32, cq: u32) -> abi::CreateQp {
        abi::CreateQp {
            pdir_dma: self.directory(FREE, FREE + 8, 6),
            pd_handle,
            send_cq_handle: cq,
            recv_cq_handle: cq,
            max_send_wr: 128,
            max_recv_wr: 128,
            max_send_sge: 1,
            max_recv_sge: 1,
            total_chunks: 6,
            send_chunks: 4,
            qp_type,
            ..Default::default()
        }
    }

    /// An RC QP's handle and number, on a version 20 device.
    pub(crate) fn create_qp(&self, pd_handle: u32, cq: u32) -> (u32, u32) {
        let request = self.qp_request(abi::qp_type::RC, pd_handle, cq);
        let response: abi::CreateQpRespV2 = self.ok(Opcode::CREATE_QP, &request);
        (response.qp_handle, response.qpn)
    }

    pub(crate) fn srq_request(&self, pd_handle: u32) -> abi::CreateSrq {
        abi::CreateSrq {
            pdir_dma: self.directory(FREE, FREE + 8, 3),
            pd_handle,
            nchunks: 3,
            attrs: abi::SrqAttr { max_wr: 64, max_sge: 3, srq_limit: 0 },
            srq_type: 0,
        }
    }

    pub(crate) fn create_srq(&self, pd_handle: u32) -> u32 {
        let request = self.srq_request(pd_handle);
        self.ok::<_, abi::CreateSrqResp>(Opcode::CREATE_SRQ, &request).srqn
    }

    pub(crate) fn create_mr(&self, pd_handle: u32) -> u32 {
        let request = self.mr_request(pd_handle);
        self.ok::<_, abi::CreateMrResp>(Opcode::CREATE_MR, &request).mr_handle
    }

    /// Two pages, starting in the middle of the first.
    pub(crate) fn mr_request(&self, pd_handle: u32) -> abi::CreateMr {
        abi::CreateMr {
            start: 0x7f00_0000_0800,
            length: 0x1000,
            pdir_dma: self.directory(FREE, FREE + 8, 2),
            pd_handle,
            access_flags: 0x10_0007,
            flags: 0,
            nchunks: 2,
        }
    }
}
