//! Transitions of a queue pair that the host's connection manager connects.

use std::sync::atomic::Ordering;

use pvrdma_verbs::VerbsError;
use pvrdma_verbs_types::{QpAttrMask, QpAttrs, QpState};

use super::host_state::STATE;
use super::queue_pair::Qp;
use crate::convert;
use crate::sys::QpAttr;
use crate::verbs::HostQp;

/// Attributes that are the guest's own, although the host's connection manager names them, too.
const OWN: QpAttrMask = QpAttrMask::MAX_DEST_RD_ATOMIC
    .union(QpAttrMask::MAX_QP_RD_ATOMIC)
    .union(QpAttrMask::MIN_RNR_TIMER)
    .union(QpAttrMask::ACCESS_FLAGS);

impl Qp {
    /// Changes the host's QP to RTR or RTS with the attributes of the host's connection manager. `None`: no connection
    /// of the host fits, and the guest's own attributes apply.
    pub(super) fn by_connection(
        &self,
        host: &HostQp,
        to: QpState,
        attrs: &QpAttrs,
        mask: QpAttrMask,
    ) -> Option<Result<(), VerbsError>> {
        let shared = &self.adapter.shared;
        if shared.host_cm.is_none() || !mask.contains(QpAttrMask::STATE) {
            return None;
        }
        let paths = &self.adapter.cm_paths;
        let found = match to {
            QpState::Rtr => {
                let dgid = attrs.av.dgid;
                let source = self.adapter.gids.get(attrs.av.sgid_index);
                if let Some(Err(refused)) = source.map(|source| self.check_peer(source.gid, dgid)) {
                    return Some(Err(refused));
                }
                paths.begin(self.qpn.get(), attrs.dest_qpn.get(), dgid).map(|attributes| attributes.rtr)
            }
            QpState::Rts if self.state() == QpState::Rtr => {
                // Set before the connection is looked at, and cleared by the thread that establishes it afterwards.
                self.unconnected.store(shared.transport.is_iwarp(), Ordering::Release);
                let found = paths.proceed(self.qpn.get());
                if found.is_none_or(|(_, established)| established) {
                    self.unconnected.store(false, Ordering::Release);
                }
                found.map(|(attributes, _)| attributes.rts)
            }
            _ => return None,
        };
        match found {
            // The kernel moves the queue pairs of an iWARP connection itself, although its attributes name the port.
            Some(_) if shared.transport.is_iwarp() => Some(Ok(())),
            Some((attr, bits)) => Some(self.apply(host, attr, bits, attrs, mask)),
            None if shared.transport.has_ip_gids() => None,
            None => {
                self.adapter.log.warn(
                    module_path!(),
                    format_args!(
                        "QP {} has no connection of rdma_cm, which this adapter needs: programs that exchange QP \
                         numbers themselves cannot use it",
                        self.qpn
                    ),
                );
                Some(Err(VerbsError::Unsupported("a connection without rdma_cm on an adapter that is not RoCE")))
            }
        }
    }

    fn apply(
        &self,
        host: &HostQp,
        attr: QpAttr,
        bits: i32,
        attrs: &QpAttrs,
        mask: QpAttrMask,
    ) -> Result<(), VerbsError> {
        let (own, own_bits) = convert::attributes(attrs, mask & OWN, self.adapter.shared.config.port);
        let mut attr = QpAttr { qp_state: i32::from(attrs.state as u8), ..attr };
        let named = |flag: QpAttrMask| mask.contains(flag);
        if named(QpAttrMask::MAX_DEST_RD_ATOMIC) {
            attr.max_dest_rd_atomic = own.max_dest_rd_atomic;
        }
        if named(QpAttrMask::MAX_QP_RD_ATOMIC) {
            attr.max_rd_atomic = own.max_rd_atomic;
        }
        if named(QpAttrMask::MIN_RNR_TIMER) {
            attr.min_rnr_timer = own.min_rnr_timer;
        }
        if named(QpAttrMask::ACCESS_FLAGS) {
            attr.qp_access_flags = own.qp_access_flags;
        }
        Ok(host.modify(&attr, bits | own_bits | STATE)?)
    }
}
