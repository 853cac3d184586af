//! Validation of received packets: those that fail are dropped silently (IBA 9.6.1, annex A17.4.5).

use pvrdma_verbs::{QpType, Qpn};
use thiserror::Error;

use crate::path::Path;
use crate::wire::{CrcError, DEFAULT_PKEY, OpcodeInfo, Packet, Service, pkey_matches};

/// Why a packet is dropped. Each is worth a counter.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Error)]
pub enum DropReason {
    /// It was damaged on its way.
    #[error(transparent)]
    Damaged(#[from] CrcError),
    /// The transport version is not 0.
    #[error("unknown transport version")]
    Version,
    /// The opcode is not defined, or belongs to another transport service.
    #[error("opcode of another service")]
    Opcode,
    /// The partition is not ours (IBA 10.9.3).
    #[error("P_Key mismatch")]
    Pkey,
    /// The QP is in no state to take it (IBA 10.3.1): it is being set up or taken down.
    #[error("QP is not ready")]
    State,
    /// It does not come from the address of the peer.
    #[error("not from the peer")]
    Address,
}

/// Checks a packet as far as the kind of QP that it is addressed to tells, and returns what its opcode means.
///
/// # Errors
/// The packet is to be dropped.
#[inline]
pub fn admit(packet: &Packet<'_>, qp_type: QpType) -> Result<&'static OpcodeInfo, DropReason> {
    match qp_type {
        QpType::Rc => admit_service(packet, Service::Rc),
        QpType::Ud | QpType::Gsi => admit_service(packet, Service::Ud),
    }
}

/// The same as [`admit`] for a congestion notification.
///
/// # Errors
/// The packet is to be dropped.
#[inline]
pub fn admit_notification(packet: &Packet<'_>) -> Result<&'static OpcodeInfo, DropReason> {
    admit_service(packet, Service::Congestion)
}

fn admit_service(packet: &Packet<'_>, service: Service) -> Result<&'static OpcodeInfo, DropReason> {
    packet.verify()?;
    let bth = &packet.header.bth;
    if bth.version != 0 {
        return Err(DropReason::Version);
    }
    let info = bth.opcode.info().filter(|info| info.service == service).ok_or(DropReason::Opcode)?;
    if !pkey_matches(DEFAULT_PKEY, bth.pkey) {
        return Err(DropReason::Pkey);
    }
    Ok(info)
}

/// The same as [`admit`] for the connected QP `local`, whose packets must come from its peer's address.
///
/// # Errors
/// The packet is to be dropped.
#[inline]
pub fn admit_connected(packet: &Packet<'_>, local: Qpn, path: &Path) -> Result<&'static OpcodeInfo, DropReason> {
    let info = admit(packet, QpType::Rc)?;
    if packet.header.bth.destination != local || !path.leads_back(packet) {
        return Err(DropReason::Address);
    }
    Ok(info)
}
