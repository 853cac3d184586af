//! QUERY_PORT and QUERY_PKEY (sections 4.6 and 12).

use pvrdma_verbs::Hca;
use pvrdma_verbs_types::PortState;

use super::response::Response;
use crate::abi::cmd::{PortAttr, QueryPkey, QueryPkeyResp, QueryPort, QueryPortResp};
use crate::config::PKEYS;
use crate::core::Core;
use crate::dsr::Session;
use crate::error::CmdError;

/// The only port.
pub(super) const PORT: u8 = 1;

/// The default partition.
const DEFAULT_PKEY: u16 = 0xffff;

/// Connection manager supported, IP-based GIDs.
const PORT_CAP_FLAGS: u32 = 0x0401_0000;
const STATE_DOWN: u32 = 1;
const STATE_ACTIVE: u32 = 4;
const PHYS_DISABLED: u8 = 3;
const PHYS_LINK_UP: u8 = 5;
const WIDTH_4X: u8 = 2;
const SPEED_QDR: u8 = 4;

pub(super) fn port<H: Hca>(core: &Core<H>, _session: &Session, request: &QueryPort) -> Result<Response, CmdError> {
    if request.port_num != PORT {
        return Err(CmdError::Invalid("port", request.port_num.into()));
    }
    let port = core.hca.port();
    let (state, phys_state) = match port.state {
        PortState::Down => (STATE_DOWN, PHYS_DISABLED),
        PortState::Active => (STATE_ACTIVE, PHYS_LINK_UP),
    };
    Ok(Response::new(&QueryPortResp {
        attrs: PortAttr {
            state,
            max_mtu: port.max_mtu as u32,
            active_mtu: port.active_mtu as u32,
            gid_tbl_len: core.limits().gid_table,
            port_cap_flags: PORT_CAP_FLAGS,
            max_msg_sz: port.max_message,
            pkey_tbl_len: PKEYS,
            max_vl_num: 1,
            active_width: WIDTH_4X,
            active_speed: SPEED_QDR,
            phys_state,
        },
    }))
}

pub(super) fn pkey<H: Hca>(_core: &Core<H>, _session: &Session, request: &QueryPkey) -> Result<Response, CmdError> {
    if request.port_num != PORT {
        return Err(CmdError::Invalid("port", request.port_num.into()));
    }
    if u16::from(request.index) >= PKEYS {
        return Err(CmdError::Invalid("P_Key index", request.index.into()));
    }
    Ok(Response::new(&QueryPkeyResp { pkey: DEFAULT_PKEY }))
}
