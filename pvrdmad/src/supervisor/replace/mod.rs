//! Replacement of this supervisor by the supervisor of another program, under running VMs.
//!
//! The new supervisor connects to the control socket ([`take`]). The old one sends it all sockets and plans ([`give`]),
//! and continues to serve all networks while the new one starts a worker for each. Then all networks are handed over at
//! once, or none of them:
//!
//! 1. Each old worker pauses its devices and sends them to its new worker, which answers that it is ready. A permit
//!    ([`Request::HandOver`](crate::protocol::Request::HandOver)) keeps the old worker from letting them go.
//! 2. When all are ready and the new supervisor confirms that it can proceed, the old one grants all permits.
//! 3. Otherwise it withdraws them, and each old worker resumes its devices.
//!
//! The old supervisor ends last, without running destructors: they would remove the files of sockets that belong to the
//! new one. No process of the new supervisor descends from a thread of the old one, so the parent-death signal of
//! workers follows their own supervisor.

mod give;
pub(super) mod outcome;
mod start;
mod take;
mod wire;

pub(crate) use self::take::{TakeOverError, Taken, take_over};
