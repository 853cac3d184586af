//! Conversion between messages and the device's types.

use pvrdma_saved_state::pvrdma as saved;
use pvrdma_verbs::{HcaLimits, IndexError, RingPosition};
use pvrdma_verbs_types::{GidType, QpType};

use super::error::RestoreError;
use crate::datapath::{Armed, Unheard};
use crate::limits::Limits;

/// Returns the message of a position.
pub(super) const fn save_position(position: RingPosition) -> saved::RingPosition {
    let RingPosition { next, head, broken } = position;
    let (broken, broken_index) = match broken {
        None => (saved::BrokenBy::Nothing, 0),
        Some(IndexError::OutOfRange { index, capacity: _ }) => (saved::BrokenBy::OutOfRange, index),
        Some(IndexError::TooFarAhead { index, capacity: _ }) => (saved::BrokenBy::TooFarAhead, index),
        Some(IndexError::BehindTaken { index, capacity: _ }) => (saved::BrokenBy::BehindTaken, index),
    };
    saved::RingPosition { next, head, broken: broken as i32, broken_index }
}

/// Returns the position in a ring of `capacity` elements. A missing message is a ring that was never used.
pub(super) fn restore_position(
    message: Option<saved::RingPosition>,
    capacity: u32,
) -> Result<RingPosition, RestoreError> {
    let saved::RingPosition { next, head, broken, broken_index: index } = message.unwrap_or_default();
    let broken = match number::<saved::BrokenBy>("reason of a broken ring", broken)? {
        saved::BrokenBy::Nothing => None,
        saved::BrokenBy::OutOfRange => Some(IndexError::OutOfRange { index, capacity }),
        saved::BrokenBy::TooFarAhead => Some(IndexError::TooFarAhead { index, capacity }),
        saved::BrokenBy::BehindTaken => Some(IndexError::BehindTaken { index, capacity }),
    };
    if broken.is_none() && index != 0 {
        return Err(RestoreError::Invalid { what: "index of a ring", value: index.into() });
    }
    Ok(RingPosition { next, head, broken })
}

/// Returns the value of an enumeration.
pub(super) fn number<E: TryFrom<i32>>(what: &'static str, value: i32) -> Result<E, RestoreError> {
    E::try_from(value).map_err(|_| RestoreError::Invalid { what, value: u64::from(value.cast_unsigned()) })
}

pub(super) const fn save_armed(armed: Armed) -> saved::Armed {
    match armed {
        Armed::Not => saved::Armed::Not,
        Armed::Solicited => saved::Armed::Solicited,
        Armed::Any => saved::Armed::Any,
    }
}

pub(super) const fn restore_armed(armed: saved::Armed) -> Armed {
    match armed {
        saved::Armed::Not => Armed::Not,
        saved::Armed::Solicited => Armed::Solicited,
        saved::Armed::Any => Armed::Any,
    }
}

pub(super) const fn save_unheard(unheard: Unheard) -> saved::Unheard {
    let Unheard { announced, delay } = unheard;
    saved::Unheard { announced, delay }
}

pub(super) fn restore_unheard(message: saved::Unheard) -> Result<Unheard, RestoreError> {
    let saved::Unheard { announced, delay } = message;
    if delay > Unheard::LONGEST {
        return Err(RestoreError::Invalid { what: "delay of notifications", value: delay });
    }
    Ok(Unheard { announced, delay })
}

pub(super) const fn save_qp_type(qp_type: QpType) -> saved::QpType {
    match qp_type {
        QpType::Rc => saved::QpType::Rc,
        QpType::Ud => saved::QpType::Ud,
        QpType::Gsi => saved::QpType::Gsi,
    }
}

pub(super) const fn save_encapsulation(kind: GidType) -> saved::Encapsulation {
    match kind {
        GidType::RoceV1 => saved::Encapsulation::RoceV1,
        GidType::RoceV2 => saved::Encapsulation::RoceV2,
    }
}

pub(super) fn save_limits(limits: &Limits) -> saved::Limits {
    let Limits { verbs, max_srq_wr, max_uar, max_ah, gid_table, max_memory: _ } = *limits;
    let HcaLimits {
        max_qp,
        max_qp_wr,
        max_sge,
        max_cq,
        max_cqe,
        max_mr,
        max_mr_size,
        max_pd,
        max_srq,
        max_rd_atomic,
        atomics,
        memory_management,
        ..
    } = verbs;
    saved::Limits {
        max_qp,
        max_qp_wr,
        max_sge,
        max_cq,
        max_cqe,
        max_mr,
        max_mr_size,
        max_pd,
        max_srq,
        max_rd_atomic: max_rd_atomic.into(),
        atomics,
        memory_management,
        max_srq_wr,
        max_uar,
        max_ah,
        gid_table,
    }
}

/// Returns the limits of a message, with this limit of memory.
pub(super) fn restore_limits(message: &saved::Limits, max_memory: u64) -> Result<Limits, RestoreError> {
    let &saved::Limits {
        max_qp,
        max_qp_wr,
        max_sge,
        max_cq,
        max_cqe,
        max_mr,
        max_mr_size,
        max_pd,
        max_srq,
        max_rd_atomic,
        atomics,
        memory_management,
        max_srq_wr,
        max_uar,
        max_ah,
        gid_table,
    } = message;
    let what = "limit of outstanding READs";
    let max_rd_atomic =
        u8::try_from(max_rd_atomic).map_err(|_| RestoreError::Invalid { what, value: max_rd_atomic.into() })?;
    let verbs = HcaLimits::NONE
        .with_max_qp(max_qp)
        .with_max_qp_wr(max_qp_wr)
        .with_max_sge(max_sge)
        .with_max_cq(max_cq)
        .with_max_cqe(max_cqe)
        .with_max_mr(max_mr)
        .with_max_mr_size(max_mr_size)
        .with_max_pd(max_pd)
        .with_max_srq(max_srq)
        .with_max_rd_atomic(max_rd_atomic)
        .with_atomics(atomics)
        .with_memory_management(memory_management);
    Ok(Limits { verbs, max_srq_wr, max_uar, max_ah, gid_table, max_memory })
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The compiler does not notice a limit of adapters that is not saved.
    #[test]
    fn all_limits_of_an_adapter_are_saved() {
        let mut values = serde_json::to_value(HcaLimits::NONE).unwrap();
        for (value, number) in values.as_object_mut().unwrap().values_mut().zip(1_u8..) {
            *value = if value.is_boolean() { true.into() } else { number.into() };
        }
        let limits = Limits::default().with_verbs(serde_json::from_value(values).unwrap());
        assert_eq!(restore_limits(&save_limits(&limits), limits.max_memory).unwrap(), limits);
    }
}
