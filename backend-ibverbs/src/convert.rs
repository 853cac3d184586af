//! Numbers of the library in our types and back.

use pvrdma_verbs::{Access, Gid, QpAttrMask, QpAttrs, QpState, WcStatus};

use crate::sys::{AhAttr, AlignedGid, GlobalRoute, QpAttr};

/// A completion status of the host. What has no name in the guest's interface is a general error.
pub(crate) const fn status(host: i32) -> WcStatus {
    match host {
        0 => WcStatus::Success,
        1 => WcStatus::LocalLength,
        2 => WcStatus::LocalQpOperation,
        4 => WcStatus::LocalProtection,
        5 => WcStatus::Flushed,
        6 => WcStatus::MwBind,
        7 => WcStatus::BadResponse,
        8 => WcStatus::LocalAccess,
        9 => WcStatus::RemoteInvalidRequest,
        10 => WcStatus::RemoteAccess,
        11 => WcStatus::RemoteOperation,
        12 => WcStatus::RetryExceeded,
        13 => WcStatus::RnrRetryExceeded,
        16 => WcStatus::RemoteAborted,
        19 => WcStatus::Fatal,
        20 => WcStatus::ResponseTimeout,
        _ => WcStatus::General,
    }
}

/// A state of the host's QP.
pub(crate) fn state(host: i32) -> QpState {
    u32::try_from(host).ok().and_then(|value| QpState::try_from(value).ok()).unwrap_or(QpState::Error)
}

/// The way to a peer: the host's GIDs instead of the guest's.
pub(crate) const fn route(dgid: Gid, sgid_index: u8, port: u8, like: &Route) -> AhAttr {
    AhAttr {
        grh: GlobalRoute {
            dgid: AlignedGid(dgid.0),
            flow_label: like.flow_label & 0x000f_ffff,
            sgid_index,
            hop_limit: like.hop_limit,
            traffic_class: like.traffic_class,
        },
        dlid: 0,
        sl: like.service_level,
        src_path_bits: 0,
        static_rate: 0,
        is_global: 1,
        port_num: port,
    }
}

/// What of a path does not depend on addresses.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub(crate) struct Route {
    pub(crate) flow_label: u32,
    pub(crate) hop_limit: u8,
    pub(crate) traffic_class: u8,
    pub(crate) service_level: u8,
}

/// Attributes that the host sets, with their mask. The path is filled in by the caller. The path migration state means
/// nothing without an alternate path and stays here.
pub(crate) fn attributes(attrs: &QpAttrs, mask: QpAttrMask, port: u8) -> (QpAttr, i32) {
    let host = QpAttr {
        qp_state: i32::from(attrs.state as u8),
        cur_qp_state: i32::from(attrs.cur_state as u8),
        path_mtu: i32::from(attrs.path_mtu as u8),
        qkey: attrs.qkey,
        rq_psn: attrs.rq_psn.get(),
        sq_psn: attrs.sq_psn.get(),
        dest_qp_num: attrs.dest_qpn.get(),
        qp_access_flags: access(attrs.access),
        pkey_index: attrs.pkey_index,
        en_sqd_async_notify: attrs.en_sqd_async_notify.into(),
        max_rd_atomic: attrs.max_rd_atomic,
        max_dest_rd_atomic: attrs.max_dest_rd_atomic,
        min_rnr_timer: attrs.min_rnr_timer,
        // The guest has one port, whichever of the host's it is.
        port_num: port,
        timeout: attrs.timeout,
        retry_cnt: attrs.retry_cnt,
        rnr_retry: attrs.rnr_retry,
        ..QpAttr::default()
    };
    let dropped = QpAttrMask::PATH_MIG_STATE | QpAttrMask::ALT_PATH | QpAttrMask::CAP;
    (host, (mask - dropped).bits().cast_signed())
}

/// Access rights have the same bits.
pub(crate) const fn access(access: Access) -> u32 {
    access.bits()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn statuses_are_the_same_numbers() {
        for host in 0..40 {
            let status = status(host);
            assert!(status == WcStatus::General || i32::try_from(status as u32).unwrap() == host, "{host}");
        }
    }

    #[test]
    fn what_the_host_has_no_use_for_is_left_out() {
        let mask = QpAttrMask::STATE | QpAttrMask::PATH_MIG_STATE | QpAttrMask::PORT;
        let (attr, mask) = attributes(&QpAttrs { port_num: 1, ..QpAttrs::default() }, mask, 2);
        assert_eq!((attr.port_num, mask), (2, 0x21));
        assert_eq!((state(3), state(99), state(-1)), (QpState::Rts, QpState::Error, QpState::Error));
    }
}
