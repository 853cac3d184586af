//! Conversion of QP attributes between the guest's structure and [`QpAttrs`] (sections 11.1 and 11.2).

use pvrdma_packet::MacAddr;
use pvrdma_verbs_types::{Access, AddressVector, Gid, Mtu, Psn, QpAttrMask, QpAttrs, QpCaps, QpState, Qpn};

use super::query::PORT;
use crate::abi::cmd::{AhAttr, Gid as GuestGid, Grh, QpAttr, QpCap};
use crate::config::PKEYS;
use crate::error::CmdError;

/// Bit of `ah_flags`: the path has a global route.
const AH_GRH: u8 = 1;

/// Mask of the flow label: 20 bits.
const FLOW_LABEL: u32 = 0x000f_ffff;

/// Decodes the attributes that the mask names. The others are garbage from the driver's stack and are ignored.
///
/// A change to RESET or ERROR needs no other attribute, and no attribute may make it fail, because the driver already
/// assumes the new state (section 13 B4).
pub(super) fn parse(
    guest: &QpAttr,
    mask: u32,
    max_rd_atomic: u32,
    gid_table: u32,
) -> Result<(QpAttrs, QpAttrMask), CmdError> {
    let mut attrs = QpAttrs::default();
    let known = QpAttrMask::from_bits_truncate(mask);
    let has = |bit| known.contains(bit);
    if has(QpAttrMask::STATE) {
        attrs.state = state(guest.qp_state)?;
        if matches!(attrs.state, QpState::Reset | QpState::Error) {
            return Ok((attrs, QpAttrMask::STATE));
        }
    }
    if known.bits() != mask {
        return Err(CmdError::Invalid("QP attribute mask", mask.into()));
    }
    if has(QpAttrMask::CUR_STATE) {
        attrs.cur_state = state(guest.cur_qp_state)?;
    }
    if has(QpAttrMask::PATH_MTU) {
        attrs.path_mtu =
            Mtu::try_from(guest.path_mtu).map_err(|_| CmdError::Invalid("path MTU", guest.path_mtu.into()))?;
    }
    if has(QpAttrMask::PKEY_INDEX) {
        attrs.pkey_index = below("P_Key index", guest.pkey_index, PKEYS)?;
    }
    if has(QpAttrMask::PORT) {
        if guest.port_num != PORT {
            return Err(CmdError::Invalid("port", guest.port_num.into()));
        }
        attrs.port_num = guest.port_num;
    }
    parse_connection(&mut attrs, guest, known, max_rd_atomic)?;
    if has(QpAttrMask::AV) {
        attrs.av = address_vector(&guest.ah_attr, gid_table)?;
    }
    // Every value of these fields is valid, and they are unused unless the mask names them.
    attrs.qkey = guest.qkey;
    attrs.rq_psn = Psn::new(guest.rq_psn);
    attrs.sq_psn = Psn::new(guest.sq_psn);
    attrs.dest_qpn = Qpn::new(guest.dest_qp_num);
    attrs.access = Access::from_bits_truncate(guest.qp_access_flags);
    attrs.en_sqd_async_notify = guest.en_sqd_async_notify != 0;
    attrs.path_mig_state = guest.path_mig_state;
    Ok((attrs, known))
}

/// Decodes the attributes of connections that the mask names: depths, timers and retries.
fn parse_connection(attrs: &mut QpAttrs, guest: &QpAttr, mask: QpAttrMask, max_rd_atomic: u32) -> Result<(), CmdError> {
    let has = |bit| mask.contains(bit);
    if has(QpAttrMask::MAX_QP_RD_ATOMIC) {
        attrs.max_rd_atomic = depth(guest.max_rd_atomic, max_rd_atomic)?;
    }
    if has(QpAttrMask::MAX_DEST_RD_ATOMIC) {
        attrs.max_dest_rd_atomic = depth(guest.max_dest_rd_atomic, max_rd_atomic)?;
    }
    if has(QpAttrMask::MIN_RNR_TIMER) {
        attrs.min_rnr_timer = below("RNR timer", guest.min_rnr_timer, 32)?;
    }
    if has(QpAttrMask::TIMEOUT) {
        attrs.timeout = below("timeout", guest.timeout, 32)?;
    }
    if has(QpAttrMask::RETRY_CNT) {
        attrs.retry_cnt = below("retry count", guest.retry_cnt, 8)?;
    }
    if has(QpAttrMask::RNR_RETRY) {
        attrs.rnr_retry = below("RNR retry count", guest.rnr_retry, 8)?;
    }
    Ok(())
}

fn state(value: u32) -> Result<QpState, CmdError> {
    QpState::try_from(value).map_err(|_| CmdError::Invalid("QP state", value.into()))
}

fn below<T: Copy + PartialOrd + Into<u64>>(what: &'static str, value: T, limit: T) -> Result<T, CmdError> {
    if value < limit { Ok(value) } else { Err(CmdError::Invalid(what, value.into())) }
}

fn depth(value: u8, limit: u32) -> Result<u8, CmdError> {
    if u32::from(value) <= limit {
        Ok(value)
    } else {
        Err(CmdError::Invalid("depth of reads and atomics", value.into()))
    }
}

/// Decodes a path. RoCE requires a global route; VLAN, LID and static rate are ignored.
fn address_vector(guest: &AhAttr, gid_table: u32) -> Result<AddressVector, CmdError> {
    if guest.ah_flags & AH_GRH == 0 {
        return Err(CmdError::Invalid("address vector flags", guest.ah_flags.into()));
    }
    if u32::from(guest.grh.sgid_index) >= gid_table {
        return Err(CmdError::Invalid("source GID index", guest.grh.sgid_index.into()));
    }
    Ok(AddressVector {
        dgid: Gid(guest.grh.dgid.raw),
        sgid_index: guest.grh.sgid_index,
        flow_label: guest.grh.flow_label & FLOW_LABEL,
        hop_limit: guest.grh.hop_limit,
        traffic_class: guest.grh.traffic_class,
        service_level: guest.sl,
        dmac: MacAddr(guest.dmac),
    })
}

/// Encodes all attributes for the guest.
pub(super) fn encode(attrs: &QpAttrs, caps: &QpCaps) -> QpAttr {
    let &QpCaps { max_send_wr, max_recv_wr, max_send_sge, max_recv_sge } = caps;
    let av = &attrs.av;
    QpAttr {
        qp_state: attrs.state as u32,
        // The driver replaces this field by the state anyway.
        cur_qp_state: attrs.state as u32,
        path_mtu: attrs.path_mtu as u32,
        path_mig_state: attrs.path_mig_state,
        qkey: attrs.qkey,
        rq_psn: attrs.rq_psn.get(),
        sq_psn: attrs.sq_psn.get(),
        dest_qp_num: attrs.dest_qpn.get(),
        qp_access_flags: attrs.access.bits(),
        pkey_index: attrs.pkey_index,
        en_sqd_async_notify: attrs.en_sqd_async_notify.into(),
        sq_draining: attrs.sq_draining.into(),
        max_rd_atomic: attrs.max_rd_atomic,
        max_dest_rd_atomic: attrs.max_dest_rd_atomic,
        min_rnr_timer: attrs.min_rnr_timer,
        port_num: attrs.port_num,
        timeout: attrs.timeout,
        retry_cnt: attrs.retry_cnt,
        rnr_retry: attrs.rnr_retry,
        cap: QpCap { max_send_wr, max_recv_wr, max_send_sge, max_recv_sge },
        ah_attr: AhAttr {
            grh: Grh {
                dgid: GuestGid { raw: av.dgid.0 },
                flow_label: av.flow_label,
                sgid_index: av.sgid_index,
                hop_limit: av.hop_limit,
                traffic_class: av.traffic_class,
            },
            sl: av.service_level,
            ah_flags: if av.dgid.is_zero() { 0 } else { AH_GRH },
            port_num: PORT,
            dmac: av.dmac.0,
        },
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const POISON: u32 = 0xdead_beef;

    fn poisoned() -> QpAttr {
        QpAttr {
            qp_state: POISON,
            cur_qp_state: POISON,
            path_mtu: POISON,
            pkey_index: 0xdead,
            port_num: 0xff,
            max_rd_atomic: 0xff,
            max_dest_rd_atomic: 0xff,
            min_rnr_timer: 0xff,
            timeout: 0xff,
            retry_cnt: 0xff,
            rnr_retry: 0xff,
            ..QpAttr::default()
        }
    }

    fn parse_mask(guest: &QpAttr, mask: QpAttrMask) -> Result<(QpAttrs, QpAttrMask), CmdError> {
        parse(guest, mask.bits(), 16, 256)
    }

    /// Conformance 23.
    #[test]
    fn unmasked_attributes_are_not_looked_at() {
        let mut guest = poisoned();
        assert!(parse_mask(&guest, QpAttrMask::empty()).is_ok());
        guest.qp_state = 1;
        guest.pkey_index = 0;
        let mask = QpAttrMask::STATE | QpAttrMask::PKEY_INDEX | QpAttrMask::QKEY;
        assert_eq!(parse_mask(&guest, mask).unwrap().1, mask);
        for bit in [
            QpAttrMask::CUR_STATE,
            QpAttrMask::PATH_MTU,
            QpAttrMask::PORT,
            QpAttrMask::MAX_QP_RD_ATOMIC,
            QpAttrMask::MAX_DEST_RD_ATOMIC,
            QpAttrMask::MIN_RNR_TIMER,
            QpAttrMask::TIMEOUT,
            QpAttrMask::RETRY_CNT,
            QpAttrMask::RNR_RETRY,
            QpAttrMask::AV,
        ] {
            assert!(parse_mask(&guest, mask | bit).is_err(), "{bit:?}");
        }
        assert!(parse(&guest, mask.bits() | 1 << 21, 16, 256).is_err());
    }

    #[test]
    fn nothing_stands_in_the_way_of_reset_and_error() {
        for (code, state) in [(0, QpState::Reset), (6, QpState::Error)] {
            let guest = QpAttr { qp_state: code, ..poisoned() };
            let (attrs, mask) = parse(&guest, u32::MAX, 16, 256).unwrap();
            assert_eq!((attrs.state, mask), (state, QpAttrMask::STATE));
        }
        assert!(parse(&QpAttr { qp_state: 7, ..poisoned() }, 1, 16, 256).is_err());
    }

    #[test]
    fn attributes_survive_the_round_trip() {
        let guest = QpAttr {
            qp_state: 2,
            cur_qp_state: 2,
            path_mtu: 5,
            qkey: 0x8001_0000,
            rq_psn: 0x00ab_cdef,
            sq_psn: 0x0012_3456,
            dest_qp_num: 0x11,
            qp_access_flags: 0xe,
            port_num: 1,
            max_rd_atomic: 16,
            max_dest_rd_atomic: 1,
            min_rnr_timer: 12,
            timeout: 14,
            retry_cnt: 7,
            rnr_retry: 7,
            ah_attr: AhAttr {
                grh: Grh {
                    dgid: GuestGid { raw: [9; 16] },
                    flow_label: 0xf_ffff,
                    sgid_index: 3,
                    hop_limit: 64,
                    traffic_class: 8,
                },
                sl: 2,
                ah_flags: 1,
                port_num: 1,
                dmac: [1, 2, 3, 4, 5, 6],
            },
            ..QpAttr::default()
        };
        let (attrs, _) = parse(&guest, 0x001f_ffff, 16, 256).unwrap();
        assert_eq!(encode(&attrs, &QpCaps::default()), guest);
    }
}
