//! Conversion between the library's values and those of `pvrdma-verbs-types`.

use pvrdma_verbs_types::{Access, Gid, QpAttrMask, QpAttrs, QpState, WcStatus};

use crate::sys::{AhAttr, AlignedGid, GlobalRoute, QpAttr};

/// Returns a completion status of the host (`enum ibv_wc_status`, IBA 11.6.2). Statuses that the guest's interface does
/// not have become a general error.
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

/// Returns a state of the host's QP (`enum ibv_qp_state`, the numbers of the guest's interface). An unknown state
/// becomes the error state.
pub(crate) fn state(host: i32) -> QpState {
    u32::try_from(host).ok().and_then(|value| QpState::try_from(value).ok()).unwrap_or(QpState::Error)
}

/// Returns the path to a peer, with the host's GIDs instead of the guest's.
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

/// Properties of a path that do not depend on addresses.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub(crate) struct Route {
    pub(crate) flow_label: u32,
    pub(crate) hop_limit: u8,
    pub(crate) traffic_class: u8,
    pub(crate) service_level: u8,
}

/// Returns attributes for the host with their mask. The caller fills in the path. The path migration state has no
/// meaning without an alternate path and is not passed on.
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
        // The guest has one port, regardless of the host's port number.
        port_num: port,
        timeout: attrs.timeout,
        retry_cnt: attrs.retry_cnt,
        rnr_retry: attrs.rnr_retry,
        ..QpAttr::default()
    };
    let dropped = QpAttrMask::PATH_MIG_STATE | QpAttrMask::ALT_PATH | QpAttrMask::CAP;
    (host, (mask - dropped).bits().cast_signed())
}

/// Converts access rights, which have the same bits in both interfaces.
pub(crate) const fn access(access: Access) -> u32 {
    access.bits()
}

#[cfg(test)]
mod tests {
    use pvrdma_verbs_types::{Mtu, Psn, Qpn};

    use super::*;

    /// Both interfaces use the numbers of the kernel; statuses that only the host has become a general error.
    #[test]
    fn statuses_are_the_same_numbers() {
        let without_name = [3, 14, 15, 17, 18, 22, 23, 24, i32::MAX, -1];
        for host in (0..=21).filter(|host| !without_name.contains(host)) {
            assert_eq!(i32::try_from(status(host) as u32), Ok(host));
        }
        for host in without_name {
            assert_eq!(status(host), WcStatus::General, "{host}");
        }
    }

    #[test]
    fn states_go_there_and_back_and_unknown_ones_are_errors() {
        for number in 0..=6 {
            let attrs = QpAttrs { state: state(number), ..QpAttrs::default() };
            assert_eq!(attributes(&attrs, QpAttrMask::STATE, 1).0.qp_state, number);
        }
        for number in [7, 99, -1, i32::MAX, i32::MIN] {
            assert_eq!(state(number), QpState::Error, "{number}");
        }
    }

    #[test]
    fn attributes_that_the_host_does_not_use_are_left_out() {
        let mask = QpAttrMask::STATE | QpAttrMask::PATH_MIG_STATE | QpAttrMask::PORT;
        let (attr, mask) = attributes(&QpAttrs { port_num: 1, ..QpAttrs::default() }, mask, 2);
        assert_eq!((attr.port_num, mask), (2, 0x21));
        let (_, everything) = attributes(&QpAttrs::default(), QpAttrMask::all(), 1);
        let dropped = QpAttrMask::PATH_MIG_STATE | QpAttrMask::ALT_PATH | QpAttrMask::CAP;
        assert_eq!(everything.cast_unsigned(), (QpAttrMask::all() - dropped).bits());
    }

    #[test]
    fn every_attribute_finds_its_place() {
        let attrs = QpAttrs {
            state: QpState::Rtr,
            cur_state: QpState::Init,
            path_mtu: Mtu::M4096,
            qkey: 0x8001_0000,
            rq_psn: Psn::new(0xff_ffff),
            sq_psn: Psn::new(5),
            dest_qpn: Qpn::new(0xab_cdef),
            access: Access::all(),
            pkey_index: 9,
            en_sqd_async_notify: true,
            max_rd_atomic: 16,
            max_dest_rd_atomic: 8,
            min_rnr_timer: 31,
            timeout: 14,
            retry_cnt: 7,
            rnr_retry: 6,
            ..QpAttrs::default()
        };
        let (host, _) = attributes(&attrs, QpAttrMask::all(), 1);
        assert_eq!((host.qp_state, host.cur_qp_state, host.path_mtu), (2, 1, 5));
        assert_eq!((host.qkey, host.rq_psn, host.sq_psn, host.dest_qp_num), (0x8001_0000, 0xff_ffff, 5, 0xab_cdef));
        assert_eq!((host.qp_access_flags, host.pkey_index, host.en_sqd_async_notify), (15, 9, 1));
        assert_eq!((host.max_rd_atomic, host.max_dest_rd_atomic, host.min_rnr_timer), (16, 8, 31));
        assert_eq!((host.timeout, host.retry_cnt, host.rnr_retry), (14, 7, 6));
    }

    #[test]
    fn a_route_has_the_hosts_index_and_twenty_bits_of_flow_label() {
        let like = Route { flow_label: 0xfff1_2345, hop_limit: 64, traffic_class: 8, service_level: 3 };
        let attr = route(Gid([9; 16]), 5, 2, &like);
        assert_eq!((attr.grh.dgid.0, attr.grh.sgid_index, attr.grh.flow_label), ([9; 16], 5, 0x1_2345));
        assert_eq!((attr.grh.hop_limit, attr.grh.traffic_class, attr.sl), (64, 8, 3));
        assert_eq!((attr.is_global, attr.port_num), (1, 2));
    }
}
