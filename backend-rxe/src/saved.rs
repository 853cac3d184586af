//! Saving and restoring the objects of an adapter.
//!
//! Each owner takes its struct apart with a pattern that names all fields (`mr/saved.rs`, `qp/saved.rs`,
//! `path/wire/saved.rs`, and `save` in `srq.rs` and `path/datagram.rs`), so a new field does not compile until it is
//! saved or dropped explicitly. Timers, waits, rates, windows, route caches, captures, waiting packets and counters of
//! the adapter are dropped.
//!
//! A queue pair keeps its path: a peer on the wire stays there. A local delivery in progress starts its message again,
//! in the receive that it has taken.

use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use pvrdma_guest_memory::{Charge, Kept};
use pvrdma_saved_state::{Message, Part, decoded_bytes, rxe as saved};
use pvrdma_verbs::{MrRequest, QpInit, SaveHca, SavedMr, SavedQp, SavedRing, SavedSrq, SrqInit, VerbsError};
use pvrdma_verbs_types::{Gid, GidType, QpAttrMask, QpAttrs, QpState};

use crate::adapter::Adapter;
use crate::drive::{Endpoint, Parts};
use crate::hca::{RxeHca, RxeMr, RxePd, RxeQp};
use crate::mr::Mr;
use crate::path::Route;
use crate::path::datagram::DatagramRoute;
use crate::path::local::LocalRoute;
use crate::path::wire::rc::WireRequester;
use crate::qp::contact::Connection;
use crate::qp::saved::{restore_address, restore_attrs, save_attrs};
use crate::srq::RxeSrq;

/// Decodes a part, whose memory is charged until the result is dropped. The charge comes first, because a few bytes may
/// be the encoding of many.
fn decode<P: Part>(adapter: &Adapter, bytes: &[u8]) -> Result<(P, Charge), VerbsError> {
    let malformed = VerbsError::Invalid("encoding of a saved object");
    let Some(heap) = decoded_bytes::<P>(bytes) else { return Err(malformed) };
    let charge = adapter.budget.charge(Kept::Migration, heap)?;
    Ok((P::decode(bytes).map_err(|_| malformed)?, charge))
}

impl SaveHca for RxeHca {
    const FORMAT: &'static str = "rxe";

    fn save_tables(&self) -> Result<Vec<u8>, VerbsError> {
        let (taken_gids, unasked_gids) = self.bindings().save();
        Ok(saved::AdapterTables { taken_gids, unasked_gids, ..self.adapter().mrs.save() }.encode_to_vec())
    }

    fn restore_tables(&self, saved: &[u8]) -> Result<(), VerbsError> {
        let adapter = self.adapter();
        let (table, _charge) = decode::<saved::AdapterTables>(adapter, saved)?;
        self.bindings().expect(&table.taken_gids, &table.unasked_gids)?;
        adapter.mrs.restore(table)
    }

    fn restore_gid(&self, index: u8, gid: Gid, kind: GidType, vlan: Option<u16>) -> Result<(), VerbsError> {
        self.restore_bound_gid(index, gid, kind, vlan)
    }

    fn move_connections(&self) -> Result<(), VerbsError> {
        self.move_restored()
    }

    fn end_connections(&self) -> usize {
        self.end_restored()
    }

    fn announce(&self) {
        self.fabric.port.iter().for_each(|port| port.announce());
    }

    fn twins(&self) -> u64 {
        self.count_twins()
    }

    fn leave(&self) {
        self.leave_process();
    }

    fn blockers(&self) -> Vec<String> {
        self.bound_connections()
    }

    fn save_mr(&self, mr: &RxeMr) -> Result<SavedMr, VerbsError> {
        let (request, region) = mr.adapter.mrs.read().save(mr.key).ok_or(VerbsError::Gone)?;
        Ok(SavedMr { request, adapter: region.encode_to_vec() })
    }

    fn restore_mr(&self, pd: &RxePd, saved: SavedMr) -> Result<RxeMr, VerbsError> {
        let SavedMr { request, adapter: state } = saved;
        if let MrRequest::User { access, .. } = &request {
            Self::check_access(*access)?;
        }
        let adapter = self.adapter();
        let (region, _charge) = decode(adapter, &state)?;
        let key = adapter.mrs.insert_restored(Mr::restore(pd.id, request, region)?)?;
        Ok(RxeMr { adapter: Arc::clone(adapter), key, destroyed: AtomicBool::new(false) })
    }

    fn map_mr(&self, mr: &RxeMr) -> Result<(), VerbsError> {
        let adapter = self.adapter();
        adapter.mrs.read().pin(mr.key, |pages| adapter.pin_alone(pages))
    }

    fn save_srq(&self, srq: &RxeSrq) -> Result<SavedSrq, VerbsError> {
        let (ring, limit, broken) = srq.0.save().ok_or(VerbsError::Gone)?;
        Ok(SavedSrq { ring, limit, adapter: saved::SharedReceiveQueue { broken }.encode_to_vec() })
    }

    fn restore_srq(&self, init: SrqInit<'_, Self>, adapter: &[u8]) -> Result<RxeSrq, VerbsError> {
        let (saved::SharedReceiveQueue { broken }, _charge) = decode(self.adapter(), adapter)?;
        let srq = pvrdma_verbs::Hca::create_srq(self, init)?;
        if broken {
            srq.0.set_broken();
        }
        Ok(srq)
    }

    fn save_qp(&self, qp: &RxeQp) -> Result<SavedQp, VerbsError> {
        qp.endpoint.with_parts(save_qp)
    }

    fn restore_qp(&self, init: QpInit<'_, Self>, adapter: &[u8]) -> Result<RxeQp, VerbsError> {
        let (state, _charge): (saved::QueuePair, _) = decode(self.adapter(), adapter)?;
        let ring = init.send_queue.save().ok_or(VerbsError::Unsupported("a ring that cannot be saved"))?;
        let taken = taken(&ring, init.caps.max_send_wr);
        if held(&state) != Some(taken) {
            return Err(VerbsError::Invalid("number of send requests"));
        }
        // If the state is refused, the queue pair is destroyed here.
        let qp = pvrdma_verbs::Hca::create_qp(self, init)?;
        restore_qp(&qp.endpoint, state)?;
        Ok(qp)
    }
}

/// Returns the number of requests that were taken from a ring and whose slots were not returned.
fn taken(ring: &SavedRing, size: u32) -> u64 {
    let (next, head, turn) = (u64::from(ring.position.next), u64::from(ring.position.head), 2 * u64::from(size));
    if next >= head { next - head } else { (next + turn).saturating_sub(head) }
}

/// Returns the number of requests that a saved queue pair has taken from its send ring.
fn held(state: &saved::QueuePair) -> Option<u64> {
    let requester = state.requester.as_ref()?;
    let wire = match &requester.route {
        Some(saved::Route::Wire(wire)) => wire.transport.as_ref()?.requests.len() as u64,
        _ => 0,
    };
    Some(wire + u64::from(requester.current.is_some()))
}

fn save_qp(parts: Parts<'_>) -> Result<SavedQp, VerbsError> {
    let Parts { qp, fabric: _, requester, route, more_reads: _, elsewhere, responder, wire } = parts;
    if elsewhere {
        // The peer may have executed the request, or may do so now; the restored queue pair would repeat it.
        return Err(VerbsError::NotAllowed("a peer whose memory stalls has not answered a request"));
    }
    let route = match route {
        Route::Unresolved(local) => saved::Route::Unresolved(local.connection.save()),
        Route::Local(local) => saved::Route::Local(local.connection.save()),
        Route::Wire(wire) => saved::Route::Wire(Box::new(wire.save(qp.adapter.engine.now()))),
        Route::Stream(_) => return Err(VerbsError::NotAllowed("a connection by iWARP has a socket of this host")),
        Route::Datagram(route) => saved::Route::Datagram(route.save()),
    };
    let (state, draining, source) = qp.save();
    let state = saved::QueuePair {
        state: state as u32,
        draining,
        attrs: Some(save_attrs(&responder.attrs)),
        source,
        requester: Some(requester.save(route)),
        responder: Some(responder.save(wire.save())),
    };
    let send = requester.save_ring().ok_or(VerbsError::Gone)?;
    let recv = responder.save_ring().ok_or(VerbsError::Gone)?;
    Ok(SavedQp { send, recv, signal_all: qp.signal_all(), adapter: state.encode_to_vec() })
}

/// Restores the state of a new queue pair.
fn restore_qp(endpoint: &Endpoint, state: saved::QueuePair) -> Result<(), VerbsError> {
    let saved::QueuePair { state, draining, attrs, source, requester, responder } = state;
    let missing = || VerbsError::Invalid("saved queue pair without a part");
    let attrs = restore_attrs(&attrs.ok_or_else(missing)?)?;
    let (requester, responder) = (requester.ok_or_else(missing)?, responder.ok_or_else(missing)?);
    let state = QpState::try_from(state).map_err(|_| VerbsError::Invalid("QP state"))?;
    let source = source.as_ref().map(restore_address).transpose()?;
    let port_mtu = endpoint.port_mtu();
    endpoint.with_parts(|parts| {
        let Parts { qp, fabric, requester: own, route, more_reads, elsewhere: _, responder: peers, wire } = parts;
        let datagrams = qp.qp_type.is_datagram();
        if state == QpState::Sqe && !datagrams {
            return Err(VerbsError::Invalid("QP state"));
        }
        endpoint.pay_for_reads(more_reads, &QpAttrs::default(), &attrs, QpAttrMask::all())?;
        qp.restore(state, draining, source);
        let saved_route = own.restore(&attrs, qp.max_send_sge, requester)?;
        let saved_wire = peers.restore(&attrs, responder)?;
        let local = |number| LocalRoute::restore(Connection::restore(number));
        let on_wire = matches!(saved_route, Some(saved::Route::Wire(_))) || saved_wire.is_some();
        if on_wire && attrs.path_mtu.bytes() > port_mtu.bytes() {
            return Err(VerbsError::Invalid("a path MTU above that of the port"));
        }
        let port = || fabric.port.as_deref().ok_or(VerbsError::Invalid("a peer on the network without an uplink"));
        *route = match saved_route {
            Some(saved::Route::Unresolved(number)) if !datagrams => Route::Unresolved(local(number)),
            Some(saved::Route::Local(number)) if !datagrams => Route::Local(local(number)),
            Some(saved::Route::Wire(wire)) if !datagrams => {
                Route::Wire(WireRequester::restore(port()?, qp, &attrs, &fabric.windows, *wire)?)
            }
            Some(saved::Route::Datagram(state)) if datagrams => {
                let restored = DatagramRoute::restore(qp.qpn, attrs.qkey, state);
                Route::Datagram(Box::new(restored.ok_or(VerbsError::Invalid("PSN"))?))
            }
            _ => return Err(VerbsError::Invalid("path of requests")),
        };
        match saved_wire {
            None => Ok(()),
            Some(_) if datagrams => Err(VerbsError::Invalid("connection of a datagram QP")),
            // This is the last step: a queue pair that is refused must not owe its peer anything.
            Some(state) => wire.restore(port()?, qp, peers, state),
        }
    })
}
