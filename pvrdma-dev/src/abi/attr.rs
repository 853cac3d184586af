//! Attributes of ports, queue pairs and shared receive queues, as commands carry them (sections 11.1 and 12.1).

use super::layout::guest_struct;

guest_struct! {
    /// Port attributes (section 12.1).
    PortAttr, "port_attr", 48 {
        0 state: u32,
        4 max_mtu: u32,
        8 active_mtu: u32,
        12 gid_tbl_len: u32,
        16 port_cap_flags: u32,
        20 max_msg_sz: u32,
        32 pkey_tbl_len: u16,
        39 max_vl_num: u8,
        43 active_width: u8,
        44 active_speed: u8,
        45 phys_state: u8,
    }
}

guest_struct! {
    /// Sizes of a QP (section 11.1).
    QpCap, "qp_cap", 24 {
        0 max_send_wr: u32,
        4 max_recv_wr: u32,
        8 max_send_sge: u32,
        12 max_recv_sge: u32,
    }
}

guest_struct! {
    /// Path of a QP (section 11.1), with the route header spread out.
    AhAttr, "ah_attr", 40 {
        0 grh: Grh,
        28 sl: u8,
        31 ah_flags: u8,
        32 port_num: u8,
        33 dmac: [u8; 6],
    }
}

guest_struct! {
    /// Global route of a path (section 11.1).
    Grh, "global_route", 24 {
        0 dgid: Gid,
        16 flow_label: u32,
        20 sgid_index: u8,
        21 hop_limit: u8,
        22 traffic_class: u8,
    }
}

guest_struct! {
    /// A GID in network order.
    Gid, "gid", 16 {
        0 raw: [u8; 16],
    }
}

guest_struct! {
    /// Attributes of a QP (section 11.1).
    QpAttr, "qp_attr", 160 {
        0 qp_state: u32,
        4 cur_qp_state: u32,
        8 path_mtu: u32,
        12 path_mig_state: u32,
        16 qkey: u32,
        20 rq_psn: u32,
        24 sq_psn: u32,
        28 dest_qp_num: u32,
        32 qp_access_flags: u32,
        36 pkey_index: u16,
        40 en_sqd_async_notify: u8,
        41 sq_draining: u8,
        42 max_rd_atomic: u8,
        43 max_dest_rd_atomic: u8,
        44 min_rnr_timer: u8,
        45 port_num: u8,
        46 timeout: u8,
        47 retry_cnt: u8,
        48 rnr_retry: u8,
        56 cap: QpCap,
        80 ah_attr: AhAttr,
    }
}

guest_struct! {
    /// Attributes of a shared receive queue (section 4.6).
    SrqAttr, "srq_attr", 16 {
        0 max_wr: u32,
        4 max_sge: u32,
        8 srq_limit: u32,
    }
}
