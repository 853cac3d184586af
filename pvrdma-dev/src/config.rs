//! Configuration of a device, and the capabilities that it advertises.

use pvrdma_base::Random;
use pvrdma_packet::MacAddr;
use pvrdma_verbs::{HcaLimits, Rules, VerbsError};
use pvrdma_verbs_types::GidType;
use serde::{Deserialize, Serialize};

use crate::abi::dsr::{ATOMIC_OPS, BMME_FLAGS, Caps, gid_type};
use crate::abi::regs::{DEVICE_ID, VENDOR_ID, VERSION_MIN, VERSION_QP_HANDLE, VERSION_ROCE_V2};
use crate::limits::Limits;

/// Maximum number of pages of a fast registration: the driver refuses more.
pub(crate) const MAX_FAST_REGISTER_PAGES: u32 = 128;

/// Number of entries in the P_Key table.
pub(crate) const PKEYS: u16 = 1;

/// Configuration of a device.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[non_exhaustive]
pub struct DeviceConfig {
    /// Name in logs and status.
    pub name: String,
    /// Interface version, 17 to 20 (section 2.3).
    pub version: u32,
    /// Encapsulation of all GIDs. Version 17 supports only RoCE v1.
    pub roce: GidType,
    /// Upper limits; those of the adapter may be lower.
    #[serde(with = "crate::limits::AllLimits")]
    pub limits: Limits,
    /// `true` if the function has a legacy interrupt pin. Leave it off for vfio-user clients.
    pub intx: bool,
    /// `true` if writes to BAR 2 reach the device after the guest's store has retired. In that case, arming a CQ also
    /// checks for completions that arrived in between (section 9.5).
    pub posted_doorbells: bool,
    /// Source of QPNs and keys.
    #[serde(default)]
    pub random: Random,
    /// Addresses that its guest may bind, and peers with which it may communicate.
    #[serde(default)]
    pub rules: Rules,
}

impl DeviceConfig {
    /// Creates a configuration with version 20, RoCE v2, default limits and no interrupt pin.
    pub fn new(name: impl Into<String>) -> Self {
        Self {
            name: name.into(),
            version: VERSION_QP_HANDLE,
            roce: GidType::RoceV2,
            limits: Limits::default(),
            intx: false,
            posted_doorbells: false,
            random: Random::System,
            rules: Rules::default(),
        }
    }

    /// Returns the limits and capabilities of a device with this configuration and an adapter with these limits.
    pub(crate) fn effective(&self, mac: MacAddr, hca: &HcaLimits) -> Result<(Limits, Caps), VerbsError> {
        if !(VERSION_MIN..=VERSION_QP_HANDLE).contains(&self.version) {
            return Err(VerbsError::Invalid("device version"));
        }
        if self.version < VERSION_ROCE_V2 && self.roce != GidType::RoceV1 {
            return Err(VerbsError::Invalid("device version for RoCE v2"));
        }
        let limits = self.limits.bounded_by(hca)?;
        let caps = limits.caps(self, mac);
        Ok((limits, caps))
    }
}

pvrdma_base::setters!(DeviceConfig {
    with_version => version: u32,
    with_roce => roce: GidType,
    with_limits => limits: Limits,
    with_intx => intx: bool,
    with_posted_doorbells => posted_doorbells: bool,
    with_random => random: Random,
    with_rules => rules: Rules,
});

impl Limits {
    /// Returns the capabilities that advertise these limits (section 2.4).
    pub(crate) fn caps(&self, config: &DeviceConfig, mac: MacAddr) -> Caps {
        let verbs = &self.verbs;
        let guid = mac.eui64();
        Caps {
            fw_ver: 1 << 32,
            node_guid: guid,
            sys_image_guid: guid,
            max_mr_size: verbs.max_mr_size,
            page_size_cap: pvrdma_pages::PAGE_SIZE,
            vendor_id: VENDOR_ID.into(),
            vendor_part_id: DEVICE_ID.into(),
            hw_ver: 1,
            max_qp: verbs.max_qp,
            max_qp_wr: verbs.max_qp_wr,
            device_cap_flags: 0,
            max_sge: verbs.max_sge,
            max_sge_rd: verbs.max_sge,
            max_cq: verbs.max_cq,
            max_cqe: verbs.max_cqe,
            max_mr: verbs.max_mr,
            max_pd: verbs.max_pd,
            max_qp_rd_atom: verbs.max_rd_atomic.into(),
            max_res_rd_atom: verbs.max_qp.saturating_mul(verbs.max_rd_atomic.into()),
            max_qp_init_rd_atom: verbs.max_rd_atomic.into(),
            max_ah: self.max_ah,
            max_srq: verbs.max_srq,
            max_srq_wr: self.max_srq_wr,
            max_srq_sge: verbs.max_sge,
            max_uar: self.max_uar,
            gid_tbl_len: self.gid_table,
            max_pkeys: PKEYS,
            local_ca_ack_delay: 15,
            phys_port_cnt: 1,
            mode: 0,
            atomic_ops: if verbs.atomics { ATOMIC_OPS } else { 0 },
            bmme_flags: if verbs.memory_management { BMME_FLAGS } else { 0 },
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
    use crate::testing::MOCK_LIMITS as LIMITS;

    const MAC: MacAddr = MacAddr([0x52, 0x54, 0, 0, 0, 1]);

    fn config() -> DeviceConfig {
        DeviceConfig::new("test")
    }

    /// Conformance 6: the capabilities.
    #[test]
    fn drivers_accept_the_defaults() {
        let (_, caps) = config().effective(MAC, &LIMITS).unwrap();
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
    fn the_adapter_bounds_the_capabilities() {
        let hca = LIMITS.with_max_qp_wr(1000).with_atomics(false).with_memory_management(false);
        let (limits, caps) = config().effective(MAC, &hca).unwrap();
        assert_eq!((caps.max_qp_wr, caps.atomic_ops, caps.bmme_flags), (512, 0, 0));
        assert_eq!(limits.verbs.max_qp_wr, 512);
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
            assert_eq!(
                DeviceConfig { version, roce, ..config() }.effective(MAC, &LIMITS).is_ok(),
                ok,
                "{version} {roce:?}"
            );
        }
    }
}
