//! CREATE_BIND and DESTROY_BIND: the GID table (sections 4.6 and 12.2).

use pvrdma_verbs::{Gid, GidType, Hca};

use super::Answer;
use crate::abi::cmd::{CreateBind, DestroyBind};
use crate::abi::dsr::gid_type;
use crate::adapter::Adapter;
use crate::error::CmdError;

/// What the driver's `vlan` holds when there is none.
const NO_VLAN: u16 = 0xfff;

/// Replaces what is at the index, whatever that is.
pub(super) fn create<H: Hca>(adapter: &Adapter<H>, request: &CreateBind) -> Result<Answer, CmdError> {
    let index = index(adapter, request.index)?;
    let kind = match request.gid_type {
        gid_type::ROCE_V1 => GidType::RoceV1,
        gid_type::ROCE_V2 => GidType::RoceV2,
        other => return Err(CmdError::Invalid("GID type", other.into())),
    };
    // Only the advertised encapsulation is ever bound.
    if kind != adapter.config.roce {
        return Err(CmdError::Invalid("GID type", request.gid_type.into()));
    }
    let vlan = match u16::try_from(request.vlan) {
        // A priority tag belongs to no VLAN.
        Ok(0 | NO_VLAN) => None,
        Ok(vlan @ 1..NO_VLAN) => Some(vlan),
        _ => return Err(CmdError::Invalid("VLAN", request.vlan.into())),
    };
    adapter.hca.bind_gid_in_vlan(index, Gid(request.new_gid), kind, vlan)?;
    adapter.objects.gids.lock().insert(index);
    Ok(Answer::header())
}

/// An index that is not bound is no failure: the driver does not look, and the slot is as it wants it.
pub(super) fn destroy<H: Hca>(adapter: &Adapter<H>, request: &DestroyBind) -> Result<Answer, CmdError> {
    let index = index(adapter, request.index)?;
    let was_bound = adapter.objects.gids.lock().remove(index);
    if was_bound {
        adapter.hca.unbind_gid(index);
    }
    Ok(Answer::header())
}

fn index<H: Hca>(adapter: &Adapter<H>, index: u32) -> Result<u8, CmdError> {
    if index >= adapter.limits.gid_table {
        return Err(CmdError::Invalid("GID index", index.into()));
    }
    u8::try_from(index).map_err(|_| CmdError::Invalid("GID index", index.into()))
}
