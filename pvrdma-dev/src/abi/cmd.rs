//! Commands and responses (section 4).
//!
//! Request structures omit their header, which is decoded first; their sizes include it. Fields that are always zero or
//! have no meaning are omitted.

use std::fmt;

pub(crate) use super::attr::*;
use super::layout::guest_struct;

/// Number of bytes that the driver copies to the command slot.
pub(crate) const REQUEST_SIZE: usize = 184;
/// Number of bytes that the driver copies from the response slot.
pub(crate) const RESPONSE_SIZE: usize = 176;
/// Added to a command id to acknowledge it.
pub(crate) const ACK: u32 = 0x8000_0000;

/// Command id as written by the guest (section 4.1).
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) struct Opcode(pub(crate) u32);

/// Event for which the driver waits after a command (section 3.5).
#[derive(Clone, Copy, PartialEq, Eq)]
enum Reply {
    /// A response and vector 0.
    Response,
    /// None: the driver only reads the ERR register.
    Nothing,
}

/// Table of the commands, with one row for each: id, name, request structure, reply, and the handler in [`crate::cmd`].
/// Macros that get these rows as arguments generate the code for all commands.
macro_rules! with_commands {
    ($make:ident) => {
        $make! {
            0 QUERY_PORT(QueryPort) -> Response: query::port;
            1 QUERY_PKEY(QueryPkey) -> Response: query::pkey;
            2 CREATE_PD(CreatePd) -> Response: pd::create;
            3 DESTROY_PD(DestroyPd) -> Nothing: pd::destroy;
            4 CREATE_MR(CreateMr) -> Response: mr::create;
            5 DESTROY_MR(DestroyMr) -> Nothing: mr::destroy;
            6 CREATE_CQ(CreateCq) -> Response: cq::create;
            7 RESIZE_CQ(ResizeCq) -> Response: cq::resize;
            8 DESTROY_CQ(DestroyCq) -> Nothing: cq::destroy;
            9 CREATE_QP(CreateQp) -> Response: qp::create;
            10 MODIFY_QP(ModifyQp) -> Response: qp::modify;
            11 QUERY_QP(QueryQp) -> Response: qp::query;
            12 DESTROY_QP(DestroyQp) -> Nothing: qp::destroy;
            13 CREATE_UC(CreateUc) -> Response: uc::create;
            14 DESTROY_UC(DestroyUc) -> Nothing: uc::destroy;
            15 CREATE_BIND(CreateBind) -> Nothing: bind::create;
            16 DESTROY_BIND(DestroyBind) -> Nothing: bind::destroy;
            17 CREATE_SRQ(CreateSrq) -> Response: srq::create;
            18 MODIFY_SRQ(ModifySrq) -> Nothing: srq::modify;
            19 QUERY_SRQ(QuerySrq) -> Response: srq::query;
            20 DESTROY_SRQ(DestroySrq) -> Nothing: srq::destroy;
        }
    };
}

pub(crate) use with_commands;

macro_rules! opcodes {
    ($($id:literal $name:ident($request:ident) -> $reply:ident: $module:ident::$handler:ident;)*) => {
        impl Opcode {
            $(pub(crate) const $name: Self = Self($id);)*
        }

        /// Names and replies; the index is the id.
        const TABLE: [(&str, Reply); COMMANDS] = [$((stringify!($name), Reply::$reply)),*];

        /// Number of commands that have an id.
        pub(crate) const COMMANDS: usize = [$($id),*].len();

        const _: () = {
            let (ids, mut index) = ([$($id),*], 0);
            while index < ids.len() {
                assert!(ids[index] == index, "rows are in the order of their ids");
                index += 1;
            }
        };
    };
}

with_commands!(opcodes);

impl Opcode {
    fn entry(self) -> Option<&'static (&'static str, Reply)> {
        TABLE.get(self.index()?)
    }

    /// Returns the position in tables of [`COMMANDS`] entries.
    pub(crate) fn index(self) -> Option<usize> {
        usize::try_from(self.0).ok().filter(|&i| i < COMMANDS)
    }

    /// Returns its name, if it has one.
    pub(crate) fn name(self) -> Option<&'static str> {
        self.entry().map(|(name, _)| *name)
    }

    /// Returns `true` if the driver waits for a response and vector 0 (section 3.5).
    pub(crate) fn is_waited(self) -> bool {
        self.entry().is_some_and(|(_, reply)| *reply == Reply::Response)
    }

    /// Returns all names in order of the ids.
    pub(crate) fn names() -> impl Iterator<Item = &'static str> {
        TABLE.iter().map(|(name, _)| *name)
    }
}

impl fmt::Display for Opcode {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.name() {
            Some(name) => f.write_str(name),
            None => write!(f, "command {:#x}", self.0),
        }
    }
}

impl fmt::Debug for Opcode {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

guest_struct! {
    /// In front of every request.
    RequestHeader, "cmd_hdr", 16 {
        /// Correlation key, echoed.
        0 response: u64,
        8 cmd: u32,
    }
}

impl RequestHeader {
    /// Returns the command id.
    pub(crate) const fn opcode(self) -> Opcode {
        Opcode(self.cmd)
    }
}

guest_struct! {
    /// In front of every response.
    ResponseHeader, "cmd_resp_hdr", 16 {
        0 response: u64,
        8 ack: u32,
        /// Looked at for MODIFY_QP only (section 4.2).
        12 err: u8,
    }
}

guest_struct! {
    QueryPort, "cmd_query_port", 24 {
        16 port_num: u8,
    }
}

guest_struct! {
    QueryPortResp, "cmd_query_port_resp", 64 {
        16 attrs: PortAttr,
    }
}

guest_struct! {
    QueryPkey, "cmd_query_pkey", 24 {
        16 port_num: u8,
        17 index: u8,
    }
}

guest_struct! {
    QueryPkeyResp, "cmd_query_pkey_resp", 24 {
        16 pkey: u16,
    }
}

guest_struct! {
    CreateUc, "cmd_create_uc", 24 {
        16 pfn64: u64,
    }
}

guest_struct! {
    CreateUcResp, "cmd_create_uc_resp", 24 {
        16 ctx_handle: u32,
    }
}

guest_struct! {
    DestroyUc, "cmd_destroy_uc", 24 {
        16 ctx_handle: u32,
    }
}

guest_struct! {
    CreatePd, "cmd_create_pd", 24 {
        /// Owner, 0 for the kernel.
        16 ctx_handle: u32,
    }
}

guest_struct! {
    CreatePdResp, "cmd_create_pd_resp", 24 {
        16 pd_handle: u32,
    }
}

guest_struct! {
    DestroyPd, "cmd_destroy_pd", 24 {
        16 pd_handle: u32,
    }
}

/// Bits of [`CreateMr::flags`].
pub(crate) mod mr_flags {
    /// The kernel's key for bus addresses.
    pub(crate) const DMA: u32 = 1;
    /// Filled in by work requests.
    pub(crate) const FAST_REGISTER: u32 = 2;
}

guest_struct! {
    CreateMr, "cmd_create_mr", 56 {
        16 start: u64,
        24 length: u64,
        32 pdir_dma: u64,
        40 pd_handle: u32,
        44 access_flags: u32,
        48 flags: u32,
        52 nchunks: u32,
    }
}

guest_struct! {
    CreateMrResp, "cmd_create_mr_resp", 32 {
        16 mr_handle: u32,
        20 lkey: u32,
        24 rkey: u32,
    }
}

guest_struct! {
    DestroyMr, "cmd_destroy_mr", 24 {
        16 mr_handle: u32,
    }
}

guest_struct! {
    CreateCq, "cmd_create_cq", 40 {
        16 pdir_dma: u64,
        /// Owner, 0 for the kernel.
        24 ctx_handle: u32,
        28 cqe: u32,
        /// Pages, ring state included.
        32 nchunks: u32,
    }
}

guest_struct! {
    CreateCqResp, "cmd_create_cq_resp", 24 {
        16 cq_handle: u32,
        20 cqe: u32,
    }
}

guest_struct! {
    ResizeCq, "cmd_resize_cq", 24 {
        16 cq_handle: u32,
        20 cqe: u32,
    }
}

guest_struct! {
    DestroyCq, "cmd_destroy_cq", 24 {
        16 cq_handle: u32,
    }
}

/// Values of [`CreateQp::qp_type`].
pub(crate) mod qp_type {
    /// General services.
    pub(crate) const GSI: u8 = 1;
    /// Reliable connection.
    pub(crate) const RC: u8 = 2;
    /// Unreliable datagram.
    pub(crate) const UD: u8 = 4;
}

guest_struct! {
    CreateQp, "cmd_create_qp", 80 {
        16 pdir_dma: u64,
        24 pd_handle: u32,
        28 send_cq_handle: u32,
        32 recv_cq_handle: u32,
        36 srq_handle: u32,
        40 max_send_wr: u32,
        44 max_recv_wr: u32,
        48 max_send_sge: u32,
        52 max_recv_sge: u32,
        /// All pages, ring state included.
        68 total_chunks: u16,
        /// Pages of the send ring.
        70 send_chunks: u16,
        74 sq_sig_all: u8,
        75 qp_type: u8,
        76 is_srq: u8,
    }
}

guest_struct! {
    /// Response of versions before 20: the handle is the number.
    CreateQpResp, "cmd_create_qp_resp", 40 {
        16 qpn: u32,
        20 max_send_wr: u32,
        24 max_recv_wr: u32,
        28 max_send_sge: u32,
        32 max_recv_sge: u32,
    }
}

guest_struct! {
    /// Response of version 20.
    CreateQpRespV2, "cmd_create_qp_resp_v2", 48 {
        16 qpn: u32,
        20 qp_handle: u32,
        24 max_send_wr: u32,
        28 max_recv_wr: u32,
        32 max_send_sge: u32,
        36 max_recv_sge: u32,
    }
}

guest_struct! {
    ModifyQp, "cmd_modify_qp", 184 {
        16 qp_handle: u32,
        /// Fields whose bit is clear are garbage.
        20 attr_mask: u32,
        24 attrs: QpAttr,
    }
}

guest_struct! {
    QueryQp, "cmd_query_qp", 24 {
        16 qp_handle: u32,
    }
}

guest_struct! {
    QueryQpResp, "cmd_query_qp_resp", 176 {
        16 attrs: QpAttr,
    }
}

guest_struct! {
    DestroyQp, "cmd_destroy_qp", 24 {
        16 qp_handle: u32,
    }
}

guest_struct! {
    CreateBind, "cmd_create_bind", 48 {
        /// 0xFFF for none, which is all that the driver sends.
        20 vlan: u32,
        24 index: u32,
        28 new_gid: [u8; 16],
        44 gid_type: u8,
    }
}

guest_struct! {
    DestroyBind, "cmd_destroy_bind", 40 {
        16 index: u32,
    }
}

guest_struct! {
    CreateSrq, "cmd_create_srq", 56 {
        16 pdir_dma: u64,
        24 pd_handle: u32,
        /// Pages, ring state included.
        28 nchunks: u32,
        32 attrs: SrqAttr,
        48 srq_type: u8,
    }
}

guest_struct! {
    CreateSrqResp, "cmd_create_srq_resp", 24 {
        16 srqn: u32,
    }
}

/// Bit of [`ModifySrq::attr_mask`] that sets the limit.
pub(crate) const SRQ_LIMIT: u32 = 0x2;

guest_struct! {
    ModifySrq, "cmd_modify_srq", 40 {
        16 srq_handle: u32,
        20 attr_mask: u32,
        24 attrs: SrqAttr,
    }
}

guest_struct! {
    QuerySrq, "cmd_query_srq", 24 {
        16 srq_handle: u32,
    }
}

guest_struct! {
    QuerySrqResp, "cmd_query_srq_resp", 32 {
        16 attrs: SrqAttr,
    }
}

guest_struct! {
    DestroySrq, "cmd_destroy_srq", 24 {
        16 srq_handle: u32,
    }
}
