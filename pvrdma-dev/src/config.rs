//! How a device is set up, and what it advertises.

use pvrdma_verbs::{GidType, HcaLimits, MacAddr, VerbsError};

use crate::abi::dsr::{ATOMIC_OPS, BMME_FLAGS, Caps, gid_type};
use crate::abi::regs::{DEVICE_ID, VENDOR_ID, VERSION_MIN, VERSION_QP_HANDLE, VERSION_ROCE_V2};
use crate::abi::ring::MAX_PAGES;

/// Most pages a fast registration may name: the driver refuses more.
pub(crate) const MAX_FAST_REGISTER_PAGES: u32 = 128;

/// Number of entries in the P_Key table.
pub(crate) const PKEYS: u16 = 1;

/// How a device is set up.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct DeviceConfig {
    /// Name in logs and status.
    pub name: String,
    /// Ethernet address of the paired network function.
    pub mac: MacAddr,
    /// Interface version, 17 to 20 (section 2.3).
    pub version: u32,
    /// Encapsulation of all GIDs. Version 17 knows RoCE v1 only.
    pub roce: GidType,
    /// Upper limits; the adapter's own may be lower.
    pub limits: Limits,
    /// Whether the function has a legacy interrupt pin. Leave it off for vfio-user clients.
    pub intx: bool,
    /// Whether writes to BAR 2 reach the device after the guest's store has retired. Arming a CQ then looks for completions
    /// that came in between (section 9.5).
    pub posted_doorbells: bool,
}

impl DeviceConfig {
    /// Version 20, RoCE v2, default limits, no interrupt pin.
    pub fn new(name: impl Into<String>, mac: MacAddr) -> Self {
        Self {
            name: name.into(),
            mac,
            version: VERSION_QP_HANDLE,
            roce: GidType::RoceV2,
            limits: Limits::default(),
            intx: false,
            posted_doorbells: false,
        }
    }

    /// What the device will advertise with this configuration and an adapter of these limits.
    pub(crate) fn effective(&self, hca: &HcaLimits) -> Result<(Limits, Caps), VerbsError> {
        if !(VERSION_MIN..=VERSION_QP_HANDLE).contains(&self.version) {
            return Err(VerbsError::Invalid("device version"));
        }
        if self.version < VERSION_ROCE_V2 && self.roce != GidType::RoceV1 {
            return Err(VerbsError::Invalid("device version for RoCE v2"));
        }
        let limits = self.limits.bounded(hca)?;
        let caps = limits.caps(self, hca);
        Ok((limits, caps))
    }
}

/// Upper limits of a device (section 2.4). Where a power of two is demanded, the next lower one is advertised.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Limits {
    /// Queue pairs, at most 65535. Handles 0 and 1 are reserved, so two fewer are for users.
    pub max_qp: u32,
    /// Requests per queue.
    pub max_qp_wr: u32,
    /// SGEs per request, at most 128.
    pub max_sge: u32,
    /// Completion queues.
    pub max_cq: u32,
    /// Entries per completion queue.
    pub max_cqe: u32,
    /// Memory regions.
    pub max_mr: u32,
    /// Bytes per memory region, at most 1 GiB.
    pub max_mr_size: u64,
    /// Protection domains, below 2^24.
    pub max_pd: u32,
    /// Shared receive queues.
    pub max_srq: u32,
    /// Requests per shared receive queue.
    pub max_srq_wr: u32,
    /// Doorbell pages, the driver's own included. BAR 2 has as many.
    pub max_uar: u32,
    /// Address handles of the guest's kernel.
    pub max_ah: u32,
    /// GID table entries, at most 256.
    pub gid_table: u32,
    /// Extents of page lists that all objects of the guest may hold together: 16 bytes of our memory each.
    pub max_extents: u64,
}

impl Default for Limits {
    fn default() -> Self {
        Self {
            max_qp: 16_384,
            max_qp_wr: 16_384,
            max_sge: 16,
            max_cq: 16_384,
            max_cqe: 131_072,
            max_mr: 65_536,
            max_mr_size: 1 << 30,
            max_pd: 16_384,
            max_srq: 1024,
            max_srq_wr: 16_384,
            max_uar: 1024,
            max_ah: 65_536,
            gid_table: 256,
            max_extents: 4 << 20,
        }
    }
}

/// The largest power of two that is not larger.
fn power_of_two(value: u32, what: &'static str) -> Result<u32, VerbsError> {
    value.checked_ilog2().map(|log| 1 << log).ok_or(VerbsError::Invalid(what))
}

impl Limits {
    /// The smaller of these and the adapter's, in the shape that drivers need.
    fn bounded(&self, hca: &HcaLimits) -> Result<Self, VerbsError> {
        let at_least = |value: u32, least: u32, what| {
            if value < least { Err(VerbsError::Invalid(what)) } else { Ok(value) }
        };
        let directory_bytes = u64::from(MAX_PAGES) * pvrdma_guest_memory::PAGE_SIZE;
        Ok(Self {
            max_qp: at_least(self.max_qp.min(hca.max_qp).min(0xffff), 3, "limit of queue pairs")?,
            max_qp_wr: power_of_two(self.max_qp_wr.min(hca.max_qp_wr), "limit of requests per queue")?,
            max_sge: power_of_two(self.max_sge.min(hca.max_sge).min(128), "limit of SGEs")?,
            max_cq: at_least(self.max_cq.min(hca.max_cq).min(1 << 24), 2, "limit of completion queues")?,
            max_cqe: power_of_two(self.max_cqe.min(hca.max_cqe).min(8_388_608), "limit of CQ entries")?,
            max_mr: at_least(self.max_mr.min(hca.max_mr), 1, "limit of memory regions")?,
            max_mr_size: self.max_mr_size.min(hca.max_mr_size).min(directory_bytes),
            max_pd: at_least(self.max_pd.min(hca.max_pd).min((1 << 24) - 1), 1, "limit of protection domains")?,
            max_srq: self.max_srq.min(hca.max_srq).min(1 << 24),
            max_srq_wr: power_of_two(self.max_srq_wr.min(hca.max_qp_wr), "limit of requests per SRQ")?,
            max_uar: at_least(
                power_of_two(self.max_uar.min(1 << 20), "number of doorbell pages")?,
                2,
                "doorbell pages",
            )?,
            max_ah: self.max_ah,
            gid_table: at_least(self.gid_table.min(256), 1, "size of the GID table")?,
            max_extents: self.max_extents,
        })
    }

    /// The capabilities that say so (section 2.4).
    fn caps(&self, config: &DeviceConfig, hca: &HcaLimits) -> Caps {
        let guid = config.mac.eui64();
        Caps {
            fw_ver: 1 << 32,
            node_guid: guid,
            sys_image_guid: guid,
            max_mr_size: self.max_mr_size,
            page_size_cap: pvrdma_guest_memory::PAGE_SIZE,
            vendor_id: VENDOR_ID.into(),
            vendor_part_id: DEVICE_ID.into(),
            hw_ver: 1,
            max_qp: self.max_qp,
            max_qp_wr: self.max_qp_wr,
            device_cap_flags: 0,
            max_sge: self.max_sge,
            max_sge_rd: self.max_sge,
            max_cq: self.max_cq,
            max_cqe: self.max_cqe,
            max_mr: self.max_mr,
            max_pd: self.max_pd,
            max_qp_rd_atom: hca.max_rd_atomic.into(),
            max_res_rd_atom: self.max_qp.saturating_mul(hca.max_rd_atomic.into()),
            max_qp_init_rd_atom: hca.max_rd_atomic.into(),
            max_ah: self.max_ah,
            max_srq: self.max_srq,
            max_srq_wr: self.max_srq_wr,
            max_srq_sge: self.max_sge,
            max_uar: self.max_uar,
            gid_tbl_len: self.gid_table,
            max_pkeys: PKEYS,
            local_ca_ack_delay: 15,
            phys_port_cnt: 1,
            mode: 0,
            atomic_ops: if hca.atomics { ATOMIC_OPS } else { 0 },
            bmme_flags: if hca.memory_management { BMME_FLAGS } else { 0 },
            gid_types: match config.roce {
                GidType::RoceV1 => gid_type::ROCE_V1,
                GidType::RoceV2 => gid_type::ROCE_V2,
            },
            max_fast_reg_page_list_len: MAX_FAST_REGISTER_PAGES,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::test_hca::LIMITS;

    fn config() -> DeviceConfig {
        DeviceConfig::new("test", MacAddr([0x52, 0x54, 0, 0, 0, 1]))
    }

    /// Conformance 6: the capabilities.
    #[test]
    fn defaults_are_what_drivers_accept() {
        let (_, caps) = config().effective(&LIMITS).unwrap();
        assert_eq!((caps.gid_types, caps.mode, caps.phys_port_cnt), (2, 0, 1));
        for value in [caps.max_uar, caps.max_qp_wr, caps.max_cqe, caps.max_srq_wr, caps.max_sge] {
            assert!(value.is_power_of_two());
        }
        assert!(caps.max_qp >= 16_384 && caps.max_qp <= 65_535);
        assert_eq!((caps.max_mr, caps.max_cq, caps.max_mr_size), (65_536, 16_384, 1 << 30));
        assert_eq!((caps.atomic_ops, caps.bmme_flags, caps.max_sge), (3, 7, 16));
        assert_eq!(caps.node_guid, [0x50, 0x54, 0, 0xff, 0xfe, 0, 0, 1]);
    }

    #[test]
    fn the_adapter_and_the_interface_bound_everything() {
        let mut config = config();
        config.limits =
            Limits { max_qp: u32::MAX, max_sge: 1000, max_mr_size: u64::MAX, gid_table: 999, ..config.limits };
        let hca = HcaLimits {
            max_qp: u32::MAX,
            max_qp_wr: 1000,
            max_sge: 1000,
            max_mr_size: u64::MAX,
            atomics: false,
            memory_management: false,
            ..LIMITS
        };
        let (limits, caps) = config.effective(&hca).unwrap();
        assert_eq!((caps.max_qp, caps.max_qp_wr, caps.max_sge, caps.gid_tbl_len), (65_535, 512, 128, 256));
        assert_eq!((limits.max_mr_size, caps.atomic_ops, caps.bmme_flags), (1 << 30, 0, 0));
        assert!(config.effective(&HcaLimits { max_qp_wr: 0, ..hca }).is_err());
    }

    #[test]
    fn versions() {
        for (version, roce, ok) in [
            (16, GidType::RoceV1, false),
            (17, GidType::RoceV1, true),
            (17, GidType::RoceV2, false),
            (18, GidType::RoceV2, true),
            (20, GidType::RoceV1, true),
            (21, GidType::RoceV2, false),
        ] {
            assert_eq!(DeviceConfig { version, roce, ..config() }.effective(&LIMITS).is_ok(), ok, "{version} {roce:?}");
        }
    }
}
