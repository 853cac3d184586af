//! Commands as the device's own structures, for unit tests of the command channel. All other tests use a [`Driver`],
//! which writes bytes and shares nothing with the device.

use std::sync::Arc;

use super::{
    CommandError, Driver, GuestMemory, MockBackend, MockDevice, MockHca, Placement, ProbeOptions, Request, TestDevice,
};
use crate::abi::cmd::{self as abi, Opcode};
use crate::abi::layout::GuestLayout;
use crate::config::DeviceConfig;
use crate::device::PvrdmaDevice;
use crate::stats::ObjectCounts;

/// Size in bytes of the header of each request.
const HEADER: usize = 16;

/// A device with a mock adapter and a probed driver.
pub(crate) struct TypedDriver {
    pub(crate) device: Arc<PvrdmaDevice<MockHca>>,
    pub(crate) memory: Arc<GuestMemory>,
    pub(crate) hca: Arc<MockDevice>,
    pub(crate) driver: Driver,
}

impl TypedDriver {
    /// Creates a device of version 20.
    pub(crate) fn up() -> Self {
        Self::on(Self::config())
    }

    /// Returns the configuration of [`Self::up`].
    pub(crate) fn config() -> DeviceConfig {
        TestDevice::<MockBackend>::config(1)
    }

    /// Creates a device of any version.
    pub(crate) fn version(version: u32) -> Self {
        Self::on(TestDevice::<MockBackend>::config_of_version(version))
    }

    /// Creates a device with this configuration.
    pub(crate) fn on(config: DeviceConfig) -> Self {
        Self::probe_with(config, ProbeOptions::default())
    }

    /// Creates a device with this configuration, and a driver that may be older than the newest.
    pub(crate) fn probe_with(config: DeviceConfig, options: ProbeOptions) -> Self {
        let backend = MockBackend::new();
        let test = TestDevice::new(&backend, config, GuestMemory::new(16 << 20));
        let driver = Driver::probe_with(test.function(), &test.memory, &test.irqs, options).unwrap();
        Self { device: test.device, memory: test.memory, hca: backend.device(), driver }
    }

    /// Returns the numbers of existing objects.
    pub(crate) fn counts(&self) -> ObjectCounts {
        self.device.status().objects
    }

    /// Returns the request for a structure, with garbage behind it.
    pub(crate) fn request<T: GuestLayout>(opcode: Opcode, body: &T) -> Request {
        let mut bytes = vec![0; T::SIZE];
        body.encode(&mut bytes);
        Request::new(opcode.0).set(HEADER, &bytes[HEADER..])
    }

    /// Runs a command. [`Driver::execute`] checks the properties that hold for all commands.
    pub(crate) fn run<T: GuestLayout>(&self, opcode: Opcode, body: &T) -> Result<Vec<u8>, CommandError> {
        self.driver.execute(&Self::request(opcode, body)).map(|response| response.0.to_vec())
    }

    /// Runs a command that must succeed and decodes its response.
    pub(crate) fn ok<T: GuestLayout, R: GuestLayout>(&self, opcode: Opcode, body: &T) -> R {
        R::decode(&self.run(opcode, body).unwrap_or_else(|error| panic!("{opcode}: {error}")))
    }

    /// Returns the guest page number of BAR 2.
    pub(crate) fn uar_pfn(&self) -> u64 {
        self.driver.uar_base() >> 12
    }

    /// Returns the address of a new directory of `count` new pages.
    pub(crate) fn directory(&self, count: usize) -> u64 {
        self.memory.directory(&self.memory.alloc(count, Placement::Scattered)).addr
    }

    pub(crate) fn open(&self, uar_page: u64) -> u32 {
        let request = abi::CreateUc { pfn64: self.uar_pfn() + uar_page };
        self.ok::<_, abi::CreateUcResp>(Opcode::CREATE_UC, &request).ctx_handle
    }

    pub(crate) fn create_pd(&self, ctx_handle: u32) -> u32 {
        self.ok::<_, abi::CreatePdResp>(Opcode::CREATE_PD, &abi::CreatePd { ctx_handle }).pd_handle
    }

    pub(crate) fn create_cq(&self, ctx_handle: u32) -> u32 {
        let request = self.cq_request(ctx_handle);
        self.ok::<_, abi::CreateCqResp>(Opcode::CREATE_CQ, &request).cq_handle
    }

    /// Returns a request for a CQ of 64 entries.
    pub(crate) fn cq_request(&self, ctx_handle: u32) -> abi::CreateCq {
        abi::CreateCq { pdir_dma: self.directory(2), ctx_handle, cqe: 64, nchunks: 2 }
    }

    /// Returns a request for the user library's QP of 100 requests and one SGE each (section 5.3).
    pub(crate) fn qp_request(&self, qp_type: u8, pd_handle: u32, cq: u32) -> abi::CreateQp {
        abi::CreateQp {
            pdir_dma: self.directory(6),
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

    /// Creates an RC QP on a version 20 device. Returns its handle and QPN.
    pub(crate) fn create_qp(&self, pd_handle: u32, cq: u32) -> (u32, u32) {
        let request = self.qp_request(abi::qp_type::RC, pd_handle, cq);
        let response: abi::CreateQpRespV2 = self.ok(Opcode::CREATE_QP, &request);
        (response.qp_handle, response.qpn)
    }

    /// Returns a request for an SRQ of 64 receives of three SGEs.
    pub(crate) fn srq_request(&self, pd_handle: u32) -> abi::CreateSrq {
        let attrs = abi::SrqAttr { max_wr: 64, max_sge: 3, srq_limit: 0 };
        abi::CreateSrq { pdir_dma: self.directory(3), pd_handle, nchunks: 3, attrs, srq_type: 0 }
    }

    pub(crate) fn create_srq(&self, pd_handle: u32) -> u32 {
        let request = self.srq_request(pd_handle);
        self.ok::<_, abi::CreateSrqResp>(Opcode::CREATE_SRQ, &request).srqn
    }

    pub(crate) fn create_mr(&self, pd_handle: u32) -> u32 {
        let request = self.mr_request(pd_handle);
        self.ok::<_, abi::CreateMrResp>(Opcode::CREATE_MR, &request).mr_handle
    }

    /// Returns a request for two pages, starting in the middle of the first.
    pub(crate) fn mr_request(&self, pd_handle: u32) -> abi::CreateMr {
        abi::CreateMr {
            start: 0x7f00_0000_0800,
            length: 0x1000,
            pdir_dma: self.directory(2),
            pd_handle,
            access_flags: 0x10_0007,
            flags: 0,
            nchunks: 2,
        }
    }
}
