//! The device shared region and the capabilities in it (sections 2.2 and 2.4).

use super::layout::guest_struct;

/// Offset of the capabilities in the shared region; the only part the device writes.
pub(crate) const CAPS_OFFSET: u64 = 72;

guest_struct! {
    /// Location of an event ring (section 2.2).
    RingPages, "ring_page_info", 16 {
        /// Pages, ring state included.
        0 num_pages: u32,
        /// Their directory.
        8 pdir_dma: u64,
    }
}

guest_struct! {
    /// The region as filled in by the driver (section 2.2). The device does not need `gos_info`.
    SharedRegion, "device_shared_region", 280 {
        /// 17..=20.
        0 driver_version: u32,
        /// Command slot.
        16 cmd_slot_dma: u64,
        /// Response slot.
        24 resp_slot_dma: u64,
        /// Asynchronous event ring.
        32 async_ring_pages: RingPages,
        /// CQ notification ring.
        48 cq_ring_pages: RingPages,
        /// Page number of BAR 2 in the guest's physical memory.
        64 uar_pfn64: u64,
        /// Capabilities of the device.
        72 caps: Caps,
    }
}

guest_struct! {
    /// Device capabilities (section 2.4). Fields that no driver uses and that are zero are left out.
    Caps, "device_caps", 208 {
        0 fw_ver: u64,
        8 node_guid: [u8; 8],
        16 sys_image_guid: [u8; 8],
        24 max_mr_size: u64,
        32 page_size_cap: u64,
        64 vendor_id: u32,
        68 vendor_part_id: u32,
        72 hw_ver: u32,
        76 max_qp: u32,
        80 max_qp_wr: u32,
        84 device_cap_flags: u32,
        88 max_sge: u32,
        92 max_sge_rd: u32,
        96 max_cq: u32,
        100 max_cqe: u32,
        104 max_mr: u32,
        108 max_pd: u32,
        112 max_qp_rd_atom: u32,
        120 max_res_rd_atom: u32,
        124 max_qp_init_rd_atom: u32,
        164 max_ah: u32,
        176 max_srq: u32,
        180 max_srq_wr: u32,
        184 max_srq_sge: u32,
        188 max_uar: u32,
        192 gid_tbl_len: u32,
        196 max_pkeys: u16,
        198 local_ca_ack_delay: u8,
        199 phys_port_cnt: u8,
        200 mode: u8,
        201 atomic_ops: u8,
        202 bmme_flags: u8,
        203 gid_types: u8,
        204 max_fast_reg_page_list_len: u32,
    }
}

/// Bits of [`Caps::gid_types`]; exactly one is set.
pub(crate) mod gid_type {
    /// RoCE v1.
    pub(crate) const ROCE_V1: u8 = 1;
    /// RoCE v2.
    pub(crate) const ROCE_V2: u8 = 2;
}

/// Plain compare-and-swap and fetch-and-add.
pub(crate) const ATOMIC_OPS: u8 = 0x3;
/// Local invalidate, remote invalidate and fast registration.
pub(crate) const BMME_FLAGS: u8 = 0x7;
