//! Queue-pair transition table: the allowed transitions, with their required and optional attributes.
//!
//! Source: InfiniBand Architecture 10.3.1 as `ib_modify_qp_is_ok` applies it; interface specification 11.3.

use crate::attrs::{QpAttrMask as M, QpAttrs};
use crate::error::{InvalidAttribute, QpTransitionError};
use crate::types::{QpState, QpType};

/// One transition of the table.
struct Edge {
    from: QpState,
    to: QpState,
    required: M,
    optional: M,
}

const fn edge(from: QpState, to: QpState, required: M, optional: M) -> Edge {
    Edge { from, to, required, optional }
}

const NONE: M = M::empty();
const RTS_OPTIONAL_RC: M = M::CUR_STATE.union(M::ACCESS_FLAGS).union(M::MIN_RNR_TIMER).union(M::PATH_MIG_STATE);
const UD_KEYS: M = M::PKEY_INDEX.union(M::QKEY);
const UD_RTS_OPTIONAL: M = M::CUR_STATE.union(M::QKEY);

const RC: &[Edge] = {
    use QpState::{Init, Reset, Rtr, Rts, Sqd};
    &[
        edge(Reset, Init, M::PKEY_INDEX.union(M::PORT).union(M::ACCESS_FLAGS), NONE),
        edge(Init, Init, NONE, M::PKEY_INDEX.union(M::PORT).union(M::ACCESS_FLAGS)),
        edge(
            Init,
            Rtr,
            M::AV
                .union(M::PATH_MTU)
                .union(M::DEST_QPN)
                .union(M::RQ_PSN)
                .union(M::MAX_DEST_RD_ATOMIC)
                .union(M::MIN_RNR_TIMER),
            M::ACCESS_FLAGS.union(M::PKEY_INDEX),
        ),
        edge(
            Rtr,
            Rts,
            M::TIMEOUT.union(M::RETRY_CNT).union(M::RNR_RETRY).union(M::SQ_PSN).union(M::MAX_QP_RD_ATOMIC),
            RTS_OPTIONAL_RC,
        ),
        edge(Rts, Rts, NONE, RTS_OPTIONAL_RC),
        edge(Rts, Sqd, NONE, M::EN_SQD_ASYNC_NOTIFY),
        edge(Sqd, Rts, NONE, RTS_OPTIONAL_RC),
        edge(
            Sqd,
            Sqd,
            NONE,
            M::PORT
                .union(M::AV)
                .union(M::TIMEOUT)
                .union(M::RETRY_CNT)
                .union(M::RNR_RETRY)
                .union(M::MAX_QP_RD_ATOMIC)
                .union(M::MAX_DEST_RD_ATOMIC)
                .union(M::ACCESS_FLAGS)
                .union(M::PKEY_INDEX)
                .union(M::MIN_RNR_TIMER)
                .union(M::PATH_MIG_STATE),
        ),
    ]
};

const UD: &[Edge] = &datagram(M::PORT);

/// Transitions of the GSI QP. The connection manager sets no port.
const GSI: &[Edge] = &datagram(NONE);

/// Returns the transitions of a datagram QP. `port` is the attribute that sets its port.
const fn datagram(port: M) -> [Edge; 9] {
    use QpState::{Init, Reset, Rtr, Rts, Sqd, Sqe};
    let keys_and_port = UD_KEYS.union(port);
    [
        edge(Reset, Init, keys_and_port, NONE),
        edge(Init, Init, NONE, keys_and_port),
        edge(Init, Rtr, NONE, UD_KEYS),
        edge(Rtr, Rts, M::SQ_PSN, UD_RTS_OPTIONAL),
        edge(Rts, Rts, NONE, UD_RTS_OPTIONAL),
        edge(Rts, Sqd, NONE, M::EN_SQD_ASYNC_NOTIFY),
        edge(Sqd, Rts, NONE, UD_RTS_OPTIONAL),
        edge(Sqd, Sqd, NONE, UD_KEYS),
        edge(Sqe, Rts, NONE, UD_RTS_OPTIONAL),
    ]
}

/// Checks a modify request. `to` is the requested state, or the current state if the request names none; the mask's
/// `STATE` bit is ignored.
///
/// A change to RESET or ERROR is always allowed, whatever attributes the mask names: the guest's driver may already
/// assume that the QP is in that state.
///
/// # Errors
/// The attributes that are missing or not allowed.
pub fn check(qp_type: QpType, from: QpState, to: QpState, mask: M) -> Result<(), QpTransitionError> {
    if matches!(to, QpState::Reset | QpState::Error) {
        return Ok(());
    }
    let table = match qp_type {
        QpType::Rc => RC,
        QpType::Ud => UD,
        QpType::Gsi => GSI,
    };
    let edge =
        table.iter().find(|e| e.from == from && e.to == to).ok_or(QpTransitionError::NoEdge { qp_type, from, to })?;
    let mask = mask - M::STATE;
    let missing = edge.required - mask;
    if !missing.is_empty() {
        return Err(QpTransitionError::Missing { from, to, missing });
    }
    let extra = mask - edge.required - edge.optional;
    if !extra.is_empty() {
        return Err(QpTransitionError::Forbidden { from, to, extra });
    }
    Ok(())
}

impl QpAttrs {
    /// Checks the ranges of the attributes that `mask` names.
    ///
    /// # Errors
    /// The first attribute that is out of range.
    pub fn check(&self, mask: M, max_rd_atomic: u8) -> Result<(), InvalidAttribute> {
        let limits = [
            (M::PKEY_INDEX, self.pkey_index > 0, "P_Key index"),
            (M::PORT, self.port_num != 1, "port number"),
            (M::TIMEOUT, self.timeout > 31, "timeout"),
            (M::RETRY_CNT, self.retry_cnt > 7, "retry count"),
            (M::RNR_RETRY, self.rnr_retry > 7, "RNR retry count"),
            (M::MIN_RNR_TIMER, self.min_rnr_timer > 31, "RNR timer"),
            (M::MAX_QP_RD_ATOMIC, self.max_rd_atomic > max_rd_atomic, "initiator depth"),
            (M::MAX_DEST_RD_ATOMIC, self.max_dest_rd_atomic > max_rd_atomic, "responder resources"),
            (M::ALT_PATH, true, "alternate path"),
        ];
        match limits.into_iter().find(|&(bit, wrong, _)| mask.contains(bit) && wrong) {
            Some((_, _, what)) => Err(InvalidAttribute(what)),
            None => Ok(()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const STATES: [QpState; 7] =
        [QpState::Reset, QpState::Init, QpState::Rtr, QpState::Rts, QpState::Sqd, QpState::Sqe, QpState::Error];

    /// Lists the transitions with the smallest mask that each allows, one line per state.
    fn edges(qp_type: QpType) -> Vec<String> {
        let full = M::all();
        STATES
            .iter()
            .map(|&from| {
                let to: Vec<String> = STATES
                    .iter()
                    .filter(|&&to| !matches!(check(qp_type, from, to, full), Err(QpTransitionError::NoEdge { .. })))
                    .map(|to| format!("{to:?}"))
                    .collect();
                format!("{from:?}: {}", to.join(" "))
            })
            .collect()
    }

    #[test]
    fn edges_of_rc() {
        assert_eq!(
            edges(QpType::Rc),
            [
                "Reset: Reset Init Error",
                "Init: Reset Init Rtr Error",
                "Rtr: Reset Rts Error",
                "Rts: Reset Rts Sqd Error",
                "Sqd: Reset Rts Sqd Error",
                "Sqe: Reset Error",
                "Error: Reset Error",
            ]
        );
    }

    #[test]
    fn edges_of_datagram_qps() {
        for qp_type in [QpType::Ud, QpType::Gsi] {
            assert_eq!(edges(qp_type)[5], "Sqe: Reset Rts Error", "{qp_type:?}");
            assert_eq!(edges(qp_type)[..5], edges(QpType::Rc)[..5], "{qp_type:?}");
        }
    }

    /// Masks that the connection manager and ib_mad send in practice (interface specification 11.5).
    #[test]
    fn masks_of_the_kernel() {
        use QpState::{Init, Reset, Rtr, Rts};
        let bits = |b| M::from_bits(b).unwrap();
        for (qp_type, from, to, mask) in [
            (QpType::Rc, Reset, Init, 0x39),
            (QpType::Rc, Init, Rtr, 0x0012_9181),
            (QpType::Rc, Rtr, Rts, 0x0001_2e01),
            (QpType::Gsi, Reset, Init, 0x51),
            (QpType::Gsi, Init, Rtr, 0x1),
            (QpType::Gsi, Rtr, Rts, 0x0001_0001),
        ] {
            check(qp_type, from, to, bits(mask)).unwrap();
        }
    }

    #[test]
    fn each_required_attribute_is_required_and_each_foreign_one_refused() {
        for (qp_type, table) in [(QpType::Rc, RC), (QpType::Ud, UD), (QpType::Gsi, GSI)] {
            for e in table {
                check(qp_type, e.from, e.to, e.required).unwrap();
                check(qp_type, e.from, e.to, e.required | e.optional).unwrap();
                for bit in M::all() - M::STATE {
                    if e.required.contains(bit) {
                        assert_eq!(
                            check(qp_type, e.from, e.to, e.required - bit),
                            Err(QpTransitionError::Missing { from: e.from, to: e.to, missing: bit })
                        );
                    } else if !e.optional.contains(bit) {
                        assert_eq!(
                            check(qp_type, e.from, e.to, e.required | bit),
                            Err(QpTransitionError::Forbidden { from: e.from, to: e.to, extra: bit })
                        );
                    }
                }
            }
        }
    }
}
