//! The responder half of a queue pair.

mod requests;
mod state;

pub(crate) use requests::{ReceivedDatagram, check_remote, execute_atomic, is_revoked, remote_list, remote_sge};
pub(crate) use state::{Responder, ResponderInspect};
