//! CREATE_BIND and DESTROY_BIND: the GID table (sections 4.6 and 12.2).

use pvrdma_verbs::Hca;
use pvrdma_verbs_types::{Gid, GidType};

use super::response::Response;
use crate::abi::cmd::{CreateBind, DestroyBind};
use crate::abi::dsr::gid_type;
use crate::core::Core;
use crate::dsr::Session;
use crate::error::CmdError;
use crate::objects::GidInspect;

/// Value of the driver's `vlan` field without a VLAN.
pub(crate) const NO_VLAN: u16 = 0xfff;

/// Binds a GID, replacing the entry at the index if there is one.
pub(super) fn create<H: Hca>(core: &Core<H>, _session: &Session, request: &CreateBind) -> Result<Response, CmdError> {
    let index = index(core, request.index)?;
    let kind = match request.gid_type {
        gid_type::ROCE_V1 => GidType::RoceV1,
        gid_type::ROCE_V2 => GidType::RoceV2,
        other => return Err(CmdError::Invalid("GID type", other.into())),
    };
    // Only the advertised encapsulation may be bound.
    if kind != core.config.roce {
        return Err(CmdError::Invalid("GID type", request.gid_type.into()));
    }
    let vlan = match u16::try_from(request.vlan) {
        // A priority tag belongs to no VLAN.
        Ok(0 | NO_VLAN) => None,
        Ok(vlan @ 1..NO_VLAN) => Some(vlan),
        _ => return Err(CmdError::Invalid("VLAN", request.vlan.into())),
    };
    let gid = Gid(request.new_gid);
    core.hca.bind_gid_in_vlan(index, gid, kind, vlan)?;
    core.objects.gids.lock().insert(GidInspect { index, gid, kind, vlan });
    Ok(Response::header())
}

/// Unbinds a GID. An unbound index is not an error: the driver does not check it, and the slot is already empty.
pub(super) fn destroy<H: Hca>(core: &Core<H>, _session: &Session, request: &DestroyBind) -> Result<Response, CmdError> {
    let index = index(core, request.index)?;
    let was_bound = core.objects.gids.lock().remove(index);
    if was_bound {
        core.hca.unbind_gid(index);
    }
    Ok(Response::header())
}

/// Checks an index in the GID table.
pub(crate) fn index<H: Hca>(core: &Core<H>, index: u32) -> Result<u8, CmdError> {
    if index >= core.limits().gid_table {
        return Err(CmdError::Invalid("GID index", index.into()));
    }
    u8::try_from(index).map_err(|_| CmdError::Invalid("GID index", index.into()))
}
