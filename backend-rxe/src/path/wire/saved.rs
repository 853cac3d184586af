//! Saving and restoring the state of a queue pair whose peer is on the wire.

use std::time::Duration;

use pvrdma_pacing::PeerWindows;
use pvrdma_roce::Path;
use pvrdma_saved_state::{
    roce::{self, Stage},
    rxe as saved,
    work::Operation,
};
use pvrdma_verbs::VerbsError;
use pvrdma_verbs_types::{QpAttrs, QpState};

use super::rc::WireRequester;
use super::responder::{WireResponder, WireSide};
use super::room;
use crate::gid::BoundGid;
use crate::port::Port;
use crate::qp::Qp;
use crate::qp::responder::Responder;
use crate::qp::saved::{is_short, restore_address, save_address};
use crate::task::Task;

impl WireRequester {
    /// Saves the state of the route. Windows, rates and path choices are dropped.
    pub(crate) fn save(&self, now: Duration) -> saved::WireRequester {
        let Self { transport, path: _, source, remote: _, pacer: _, grace: _, pauses: _, room: _, counted: _ } = self;
        saved::WireRequester { source: source.map(save_address), transport: Some(transport.save(now)) }
    }

    /// Restores the state of the route of a queue pair. `now` is on the clock of the engine.
    ///
    /// # Errors
    /// The state is not one that the route can be in, or the budget does not cover its requests.
    pub(crate) fn restore(
        port: &Port,
        qp: &Qp,
        attrs: &QpAttrs,
        windows: &PeerWindows<Task>,
        state: saved::WireRequester,
    ) -> Result<Box<Self>, VerbsError> {
        let saved::WireRequester { source, transport } = state;
        let transport = transport.ok_or(VerbsError::Invalid("requester without its transport"))?;
        let held = held(&transport, qp.max_send_sge)?;
        let (path, source) = path(qp, attrs, source.as_ref())?;
        let mut this = Self::new(port, qp, attrs, path, windows);
        let tuning = room::tuning(port.negotiates(), port.takes_paths());
        let now = qp.adapter.engine.now();
        let restored = pvrdma_roce::Requester::restore(attrs, path.0, tuning, now, transport);
        this.transport = restored.map_err(|error| refuse(qp, &error))?;
        this.transport.set_draining(qp.state() == QpState::Sqd);
        this.room.cover(&qp.adapter.budget, &mut this.transport, held)?;
        this.source = source;
        Ok(this)
    }
}

impl WireSide {
    /// Saves the state of the responder, if the peer has sent a packet. Packets that wait are dropped.
    pub(crate) fn save(&self) -> Option<saved::WireResponder> {
        let wire = &*self.responder.lock();
        let WireResponder {
            transport,
            path: _,
            source,
            remote: _,
            deferred: _,
            receive_wait: _,
            reorder: _,
            refused,
            timer: _,
        } = &**wire.as_ref()?;
        let source = source.map(save_address);
        Some(saved::WireResponder { source, refused: *refused, transport: Some(transport.save()) })
    }

    /// Restores the state of the responder.
    ///
    /// # Errors
    /// The state is not one that the responder can be in.
    pub(crate) fn restore(
        &self,
        port: &Port,
        qp: &Qp,
        responder: &Responder,
        state: saved::WireResponder,
    ) -> Result<(), VerbsError> {
        let saved::WireResponder { source, refused, transport } = state;
        let transport = transport.ok_or(VerbsError::Invalid("responder without its transport"))?;
        let attrs = &responder.attrs;
        let (path, source) = path(qp, attrs, source.as_ref())?;
        let restored = pvrdma_roce::Responder::restore(attrs, path.0, transport);
        let transport = restored.map_err(|error| refuse(qp, &error))?;
        // A SEND in progress fills the receive in use.
        let room = responder.receive_length();
        if transport.bytes_in_receive().is_some_and(|done| room.is_none_or(|room| u64::from(done) > room)) {
            return Err(VerbsError::Invalid("message in progress"));
        }
        let mut wire = WireResponder::new(port, attrs, path);
        (wire.transport, wire.source, wire.refused) = (transport, source, refused);
        *self.responder.lock() = Some(wire);
        Ok(())
    }
}

fn refuse(qp: &Qp, error: &pvrdma_roce::saved::RestoreError) -> VerbsError {
    qp.adapter.log.warn(module_path!(), format_args!("saved state of QP {}: {error}", qp.qpn));
    VerbsError::Invalid("state of a connection")
}

/// Returns the path of a connection and its source, as saved.
fn path(
    qp: &Qp,
    attrs: &QpAttrs,
    source: Option<&saved::Address>,
) -> Result<((Path, BoundGid), Option<BoundGid>), VerbsError> {
    if !qp.adapter.rules.allow_peer(attrs.av.dgid) {
        return Err(VerbsError::NotAllowed("the address of a peer"));
    }
    let source = source.map(restore_address).transpose()?;
    // No packet is sent without a source, so the peer's address may be of any kind.
    let any = qp.adapter.any_address(attrs.av.dgid);
    let from = source.unwrap_or(any);
    let path = Path::connected(&qp.adapter.origin(from), &attrs.av, qp.qpn, attrs.dest_qpn);
    Ok(((path.ok_or(VerbsError::Invalid("address of a peer"))?, from), source))
}

/// Returns the number of requests of a saved requester, and of fast registrations that were not started.
///
/// # Errors
/// A request has more SGEs, or registers more pages, than the queue pair allows.
fn held(transport: &roce::Requester, max_sge: u8) -> Result<[usize; 2], VerbsError> {
    let work = || transport.requests.iter().filter_map(|request| request.work.as_ref());
    if !work().all(|work| is_short(work, max_sge)) {
        return Err(VerbsError::Invalid("send request"));
    }
    let holds_pages = |request: &&roce::Request| {
        let operation = request.work.as_ref().and_then(|work| work.operation.as_ref());
        request.stage() == Stage::Posted && matches!(operation, Some(Operation::FastRegister(_)))
    };
    Ok([transport.requests.len(), transport.requests.iter().filter(holds_pages).count()])
}
