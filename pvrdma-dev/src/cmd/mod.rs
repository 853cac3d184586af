//! The command channel (section 4): one command per REQUEST write, executed inside it.
//!
//! The slot is copied once and parsed; a handler answers or refuses. A refusal is seen in ERR (channel E1 of section 4.2),
//! except that MODIFY_QP answers with an error number in its response (E3), the only command whose driver looks there.

mod bind;
mod cq;
mod mr;
mod pd;
mod qp;
mod qp_attr;
mod query;
mod srq;
mod uc;

use std::fmt::Debug;

use pvrdma_guest_memory::DmaError;
use pvrdma_verbs::Hca;

use crate::abi::cmd::{self as abi, Opcode, REQUEST_SIZE, RESPONSE_SIZE, RequestHeader, ResponseHeader};
use crate::abi::layout::GuestLayout;
use crate::adapter::Adapter;
use crate::dsr::Session;
use crate::error::{CmdError, RegisterError};
use crate::intr::Vector;

/// A command as the guest means it.
#[derive(Clone, Copy, Debug)]
enum Command {
    QueryPort(abi::QueryPort),
    QueryPkey(abi::QueryPkey),
    CreatePd(abi::CreatePd),
    DestroyPd(abi::DestroyPd),
    CreateMr(abi::CreateMr),
    DestroyMr(abi::DestroyMr),
    CreateCq(abi::CreateCq),
    DestroyCq(abi::DestroyCq),
    CreateQp(abi::CreateQp),
    ModifyQp(abi::ModifyQp),
    QueryQp(abi::QueryQp),
    DestroyQp(abi::DestroyQp),
    CreateUc(abi::CreateUc),
    DestroyUc(abi::DestroyUc),
    CreateBind(abi::CreateBind),
    DestroyBind(abi::DestroyBind),
    CreateSrq(abi::CreateSrq),
    ModifySrq(abi::ModifySrq),
    QuerySrq(abi::QuerySrq),
    DestroySrq(abi::DestroySrq),
}

impl Command {
    /// Bytes behind a command's own structure are stack garbage of the driver and are not looked at. RESIZE_CQ counts as
    /// unknown: no driver sends it.
    fn parse(opcode: Opcode, bytes: &[u8]) -> Option<Self> {
        Some(match opcode {
            Opcode::QUERY_PORT => Self::QueryPort(GuestLayout::decode(bytes)),
            Opcode::QUERY_PKEY => Self::QueryPkey(GuestLayout::decode(bytes)),
            Opcode::CREATE_PD => Self::CreatePd(GuestLayout::decode(bytes)),
            Opcode::DESTROY_PD => Self::DestroyPd(GuestLayout::decode(bytes)),
            Opcode::CREATE_MR => Self::CreateMr(GuestLayout::decode(bytes)),
            Opcode::DESTROY_MR => Self::DestroyMr(GuestLayout::decode(bytes)),
            Opcode::CREATE_CQ => Self::CreateCq(GuestLayout::decode(bytes)),
            Opcode::DESTROY_CQ => Self::DestroyCq(GuestLayout::decode(bytes)),
            Opcode::CREATE_QP => Self::CreateQp(GuestLayout::decode(bytes)),
            Opcode::MODIFY_QP => Self::ModifyQp(GuestLayout::decode(bytes)),
            Opcode::QUERY_QP => Self::QueryQp(GuestLayout::decode(bytes)),
            Opcode::DESTROY_QP => Self::DestroyQp(GuestLayout::decode(bytes)),
            Opcode::CREATE_UC => Self::CreateUc(GuestLayout::decode(bytes)),
            Opcode::DESTROY_UC => Self::DestroyUc(GuestLayout::decode(bytes)),
            Opcode::CREATE_BIND => Self::CreateBind(GuestLayout::decode(bytes)),
            Opcode::DESTROY_BIND => Self::DestroyBind(GuestLayout::decode(bytes)),
            Opcode::CREATE_SRQ => Self::CreateSrq(GuestLayout::decode(bytes)),
            Opcode::MODIFY_SRQ => Self::ModifySrq(GuestLayout::decode(bytes)),
            Opcode::QUERY_SRQ => Self::QuerySrq(GuestLayout::decode(bytes)),
            Opcode::DESTROY_SRQ => Self::DestroySrq(GuestLayout::decode(bytes)),
            _ => return None,
        })
    }

    fn run<H: Hca>(&self, adapter: &Adapter<H>, session: &Session) -> Result<Answer, CmdError> {
        match self {
            Self::QueryPort(request) => query::port(adapter, request),
            Self::QueryPkey(request) => query::pkey(request),
            Self::CreatePd(request) => pd::create(adapter, request),
            Self::DestroyPd(request) => adapter.end_pd(request.pd_handle).map(Answer::from),
            Self::CreateMr(request) => mr::create(adapter, request),
            Self::DestroyMr(request) => adapter.end_mr(request.mr_handle).map(Answer::from),
            Self::CreateCq(request) => cq::create(adapter, request),
            Self::DestroyCq(request) => adapter.end_cq(request.cq_handle).map(Answer::from),
            Self::CreateQp(request) => qp::create(adapter, session, request),
            Self::ModifyQp(request) => qp::modify(adapter, request),
            Self::QueryQp(request) => qp::query(adapter, request),
            Self::DestroyQp(request) => adapter.end_qp(request.qp_handle).map(Answer::from),
            Self::CreateUc(request) => uc::create(adapter, session, request),
            Self::DestroyUc(request) => adapter.end_context(request.ctx_handle).map(Answer::from),
            Self::CreateBind(request) => bind::create(adapter, request),
            Self::DestroyBind(request) => bind::destroy(adapter, request),
            Self::CreateSrq(request) => srq::create(adapter, request),
            Self::ModifySrq(request) => srq::modify(adapter, request),
            Self::QuerySrq(request) => srq::query(adapter, request),
            Self::DestroySrq(request) => adapter.end_srq(request.srq_handle).map(Answer::from),
        }
    }
}

/// An object that a command has made, in case its driver never learns of it.
#[derive(Clone, Copy, Debug)]
enum Created {
    Context(u32),
    Pd(u32),
    Mr(u32),
    Cq(u32),
    Srq(u32),
    Qp(u32),
}

/// What a command answers.
#[derive(Debug)]
struct Answer {
    bytes: [u8; RESPONSE_SIZE],
    size: usize,
    err: u8,
    created: Option<Created>,
}

impl Answer {
    /// A response with a body.
    fn new<T: GuestLayout>(body: &T) -> Self {
        let mut answer = Self::header();
        body.encode(&mut answer.bytes);
        answer.size = T::SIZE.min(RESPONSE_SIZE);
        answer
    }

    /// A response that is only a header; also for commands without a response.
    const fn header() -> Self {
        Self { bytes: [0; RESPONSE_SIZE], size: ResponseHeader::SIZE, err: 0, created: None }
    }

    /// Says what was made.
    const fn of(self, created: Created) -> Self {
        Self { created: Some(created), ..self }
    }

    /// Says what went wrong (MODIFY_QP only).
    fn failure(error: &CmdError) -> Self {
        Self { err: error.code(), ..Self::header() }
    }
}

impl From<()> for Answer {
    fn from((): ()) -> Self {
        Self::header()
    }
}

/// Executes what is in the command slot. When this returns, everything about the command is over: the effect, the response
/// and, for commands that the driver waits for, the interrupt (sections 3.4 S5, S6 and 4.5).
pub(crate) fn execute<H: Hca>(adapter: &Adapter<H>, session: &Session) -> Result<(), RegisterError> {
    let mut slot = [0; REQUEST_SIZE];
    {
        let view = adapter.memory.view();
        view.read(session.command_slot, &mut slot).map_err(RegisterError::Slot)?;
    }
    adapter.retry_events();
    let header = RequestHeader::decode(&slot);
    let opcode = Opcode(header.cmd);
    let result = run(adapter, session, header, &slot);
    adapter.stats.command(opcode, result.is_err());
    result.map_err(|error| RegisterError::Command(opcode, error))
}

fn run<H: Hca>(adapter: &Adapter<H>, session: &Session, header: RequestHeader, slot: &[u8]) -> Result<(), CmdError> {
    let opcode = Opcode(header.cmd);
    let command = Command::parse(opcode, slot).ok_or(CmdError::Unknown(opcode))?;
    let mut answer = command.run(adapter, session)?;
    log::trace!("{}: {command:?} done", adapter.config.name);
    if !opcode.is_waited() {
        return Ok(());
    }
    let ack = ResponseHeader { response: header.response, ack: abi::ACK | opcode.0, err: answer.err };
    ack.encode(&mut answer.bytes);
    if let Err(error) = respond(adapter, session, &answer) {
        // The driver takes this for a failure and frees the memory it passed.
        undo(adapter, answer.created);
        return Err(error.into());
    }
    adapter.interrupts.raise(Vector::Response);
    Ok(())
}

fn respond<H: Hca>(adapter: &Adapter<H>, session: &Session, answer: &Answer) -> Result<(), DmaError> {
    let bytes = answer.bytes.get(..answer.size).unwrap_or(&answer.bytes);
    adapter.memory.view().write(session.response_slot, bytes)
}

/// Takes back what a command made.
fn undo<H: Hca>(adapter: &Adapter<H>, created: Option<Created>) {
    // It was made a moment ago, so it is there.
    let _ = match created {
        None => Ok(()),
        Some(Created::Context(handle)) => adapter.end_context(handle),
        Some(Created::Pd(handle)) => adapter.end_pd(handle),
        Some(Created::Mr(handle)) => adapter.end_mr(handle),
        Some(Created::Cq(handle)) => adapter.end_cq(handle),
        Some(Created::Srq(handle)) => adapter.end_srq(handle),
        Some(Created::Qp(handle)) => adapter.end_qp(handle),
    };
}

#[cfg(test)]
mod qp_tests;
#[cfg(test)]
mod tests;
