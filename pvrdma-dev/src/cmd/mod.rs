//! The command channel (section 4): each REQUEST write executes one command before it returns.
//!
//! The slot is copied once and decoded, and a handler responds or refuses. A refusal is reported in ERR (channel E1 of
//! section 4.2). The exception is MODIFY_QP, which responds with an error number (E3), because it is the only command
//! for which the driver reads that field.
//!
//! To add a command, add a row and its request structure in `abi/cmd.rs`, and its handler here.

pub(crate) mod bind;
pub(crate) mod cq;
pub(crate) mod mr;
pub(crate) mod pd;
pub(crate) mod qp;
mod qp_attr;
mod query;
mod response;
pub(crate) mod srq;
mod uc;

use pvrdma_verbs::Hca;

use crate::abi::cmd::{self as abi, Opcode, REQUEST_SIZE, RequestHeader, with_commands};
use crate::abi::layout::GuestLayout;
use crate::core::Core;
use crate::dsr::Session;
use crate::error::{CmdError, RegisterError};
use crate::intr::Vector;
use response::{Created, Response};

/// Executes the command in the command slot. When this returns, the command is complete: its effect, the response and,
/// for commands that the driver waits for, the interrupt (sections 3.4 S5, S6 and 4.5).
///
/// # Errors
/// The slot cannot be read, or the command is refused. A refused command has no effect.
pub(crate) fn execute<H: Hca>(core: &Core<H>, session: &Session) -> Result<(), RegisterError> {
    let mut slot = [0; REQUEST_SIZE];
    {
        let view = core.memory.view();
        view.read(session.command_slot, &mut slot).map_err(RegisterError::Slot)?;
    }
    core.retry_events();
    let header = RequestHeader::decode(&slot);
    let opcode = header.opcode();
    let result = run(core, session, header, &slot);
    core.stats.command(opcode, result.is_err());
    result.map_err(|error| RegisterError::Command(opcode, error))
}

fn run<H: Hca>(core: &Core<H>, session: &Session, header: RequestHeader, slot: &[u8]) -> Result<(), CmdError> {
    let mut response = dispatch(core, session, header.opcode(), slot)?;
    if !header.opcode().is_waited() {
        return Ok(());
    }
    // The view must end here, because destroying an object waits for all views.
    let written = core.memory.view().write(session.response_slot, response.acknowledge(header));
    if let Err(error) = written {
        // The driver treats the missing response as a failure and frees the memory that it passed, so the object must
        // not survive.
        undo(core, response.object());
        return Err(error.into());
    }
    core.interrupts.raise(Vector::Response);
    Ok(())
}

macro_rules! handlers {
    ($($id:literal $name:ident($request:ident) -> $reply:ident: $module:ident::$handler:ident;)*) => {
        /// Decodes the request of a command and calls its handler. Bytes behind the request structure are garbage from
        /// the driver's stack and are ignored.
        fn dispatch<H: Hca>(
            core: &Core<H>,
            session: &Session,
            opcode: Opcode,
            slot: &[u8],
        ) -> Result<Response, CmdError> {
            match opcode {
                $(Opcode::$name => {
                    let request = abi::$request::decode(slot);
                    let response = $module::$handler(core, session, &request)?;
                    log::trace!("{}: {request:?} done", core.config.name);
                    Ok(response)
                })*
                _ => Err(CmdError::Unknown(opcode)),
            }
        }
    };
}

with_commands!(handlers);

/// Destroys the object that a command created.
fn undo<H: Hca>(core: &Core<H>, created: Option<Created>) {
    // This cannot fail: this thread has just created the object.
    let _ = match created {
        None => Ok(()),
        Some(Created::Context(handle)) => core.end_context(handle),
        Some(Created::Pd(handle)) => core.end_pd(handle),
        Some(Created::Mr(handle)) => core.end_mr(handle),
        Some(Created::Cq(handle)) => core.end_cq(handle),
        Some(Created::Srq(handle)) => core.end_srq(handle),
        Some(Created::Qp(handle)) => core.end_qp(handle),
    };
}

#[cfg(test)]
mod tests;
