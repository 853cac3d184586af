//! Validation of received packets. Invalid packets are dropped silently (IBA 9.6.1, annex A17.4.5).

use pvrdma_verbs_types::{QpType, Qpn};
use thiserror::Error;

use crate::path::Path;
use crate::wire::{CrcError, DEFAULT_PKEY, OpcodeInfo, Packet, Service, pkey_matches};

/// Reason why a packet is dropped. Each has a counter.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Error)]
pub enum DropReason {
    /// The packet was damaged in transit.
    #[error(transparent)]
    Damaged(#[from] CrcError),
    /// The transport version is not 0.
    #[error("unknown transport version")]
    Version,
    /// The opcode is undefined, or belongs to another transport service.
    #[error("opcode of another service")]
    Opcode,
    /// The P_Key does not match that of the QP (IBA 10.9.3).
    #[error("P_Key mismatch")]
    Pkey,
    /// The state of the QP does not permit reception (IBA 10.3.1): it is being set up or torn down.
    #[error("QP is not ready")]
    State,
    /// The packet does not come from the address of the peer.
    #[error("not from the peer")]
    Address,
}

/// Validates a packet as far as the type of the destination QP allows, and returns the information about its opcode.
///
/// # Errors
/// The reason to drop the packet.
#[inline]
pub fn admit(packet: &Packet<'_>, qp_type: QpType) -> Result<&'static OpcodeInfo, DropReason> {
    match qp_type {
        QpType::Rc => admit_service(packet, packet.verify(), Service::Rc),
        QpType::Ud | QpType::Gsi => admit_service(packet, packet.verify(), Service::Ud),
    }
}

/// Does the same as [`admit`] for a congestion notification.
///
/// # Errors
/// The reason to drop the packet.
#[inline]
pub fn admit_notification(packet: &Packet<'_>) -> Result<&'static OpcodeInfo, DropReason> {
    admit_service(packet, packet.verify(), Service::Congestion)
}

/// Validates a packet of this service with these results of its checksums.
fn admit_service(
    packet: &Packet<'_>,
    verified: Result<(), CrcError>,
    service: Service,
) -> Result<&'static OpcodeInfo, DropReason> {
    verified?;
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

/// Does the same as [`admit`] for the connected QP `local`, whose packets must come from its peer's address. The rule
/// of the path decides if a packet without an ICRC is accepted ([`Path::verify`]).
///
/// # Errors
/// The reason to drop the packet.
#[inline]
pub fn admit_connected(packet: &Packet<'_>, local: Qpn, path: &Path) -> Result<&'static OpcodeInfo, DropReason> {
    let info = admit_service(packet, path.verify(packet), Service::Rc)?;
    if packet.header.bth.destination != local || !path.leads_back(packet) {
        return Err(DropReason::Address);
    }
    Ok(info)
}
