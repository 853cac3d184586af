//! Connections that peers ask for.

use std::net::SocketAddr;
use std::time::Duration;

use pvrdma_base::Count;
use pvrdma_ib_cm::{Connection, Rep};

use super::end::{End, Stage};
use super::manager::{Manager, NO_QP, path_attributes};
use super::messages::{self, Asked, REQ_PRIVATE};
use crate::counters::bump;
use crate::gid::Bound;
use crate::rdmacm::{CmId, ConnectionData};

impl Manager {
    /// Handles a peer's request for a connection to a port of the guest.
    pub(super) fn asked(&mut self, now: Duration, listener: usize, id: CmId, data: &ConnectionData) {
        match self.admit(listener, &id, data) {
            Ok((own, port, peer)) => self.ask_guest(now, own, port, peer, id, data),
            Err(counter) => {
                bump(counter);
                self.reject(&id);
            }
        }
    }

    /// Rejects the request of a peer. Dropping the identifier would reject it as well, but with another reason.
    fn reject(&self, id: &CmId) {
        if let Err(error) = id.reject(&[]) {
            log::debug!("{}: a request cannot be rejected: {error}", self.adapter.name);
        }
    }

    /// Returns the guest's address and port, and the peer's, or the counter of requests that are refused like this one.
    fn admit(&self, listener: usize, id: &CmId, data: &ConnectionData) -> Result<(Bound, u16, SocketAddr), &Count> {
        let counters = &self.adapter.counters;
        let (own, port) = self.listeners.find(listener).ok_or(&counters.cm_refused)?;
        let [_, peer] = id.addresses().filter(|_| self.is_ours(id)).ok_or(&counters.cm_refused)?;
        if !self.adapter.shared.fabric.may_meet(&self.adapter.member, own.gid, peer.ip().into()) {
            return Err(&counters.peers_refused);
        }
        if data.private_data.len() > REQ_PRIVATE {
            return Err(&counters.cm_refused);
        }
        if self.has_room() { Ok((own, port, peer)) } else { Err(&counters.cm_overflow) }
    }

    fn ask_guest(
        &mut self,
        now: Duration,
        own: Bound,
        own_port: u16,
        peer: SocketAddr,
        id: CmId,
        data: &ConnectionData,
    ) {
        let (invented, psn) = (self.invented_qpn(), self.number().unwrap_or(0));
        let (Some(key), Some(transaction)) = (self.new_key(), self.number()) else { return self.reject(&id) };
        let peer_qpn = if data.qpn == 0 { invented } else { data.qpn };
        let attributes = match path_attributes(&id) {
            Ok(attributes) => attributes,
            Err(error) => {
                bump(&self.adapter.counters.cm_failed);
                log::debug!("{}: a request of {peer} cannot be passed on: {error}", self.adapter.name);
                return self.reject(&id);
            }
        };
        let path_mtu = u8::try_from(attributes.rtr.0.path_mtu).ok().filter(|mtu| (1..=5).contains(mtu));
        // iWARP has none. The guest only passes the value on to its queue pair.
        let path_mtu = path_mtu.unwrap_or_else(|| self.adapter.port().active_mtu as u8);
        let asked = Asked { own: own.gid, own_port, peer, peer_qpn, path_mtu, psn };
        let Some(req) = messages::req(data, &asked, key) else { return self.reject(&id) };
        let gid = peer.ip().into();
        self.adapter.cm_paths.prepare(key, None, peer_qpn, gid, attributes);
        let guest = Connection::outgoing(now, transaction.into(), req);
        self.ends.insert(key, End { guest, host: None, stage: Stage::Asking, own, peer: gid, request: None });
        self.attach(key, id);
        self.flush(key);
    }

    /// Accepts the request of a peer, as the guest has done.
    pub(super) fn accept(&mut self, now: Duration, key: u32, rep: &Rep) {
        // The queue pair that the guest names must be its own, and the one that it has moved to RTR.
        if !self.adapter.cm_paths.claim_prepared(rep.qpn.get(), key) {
            bump(&self.adapter.counters.cm_refused);
            if let Some(id) = self.ends.get(&key).and_then(|end| end.host.as_ref()) {
                self.reject(id);
            }
            return self.close(now, key, NO_QP, &[]);
        }
        let most = self.max_rd_atomic();
        let Some(end) = self.ends.get_mut(&key) else { return };
        let Some(id) = &end.host else { return };
        end.stage = Stage::Accepting;
        if let Err(error) = id.accept(&messages::of_rep(rep, most)) {
            self.fail(now, key, &error);
        }
    }

    /// Handles the peer's confirmation, which establishes the connection.
    pub(super) fn accepted(&mut self, key: u32) {
        let Some(end) = self.ends.get_mut(&key) else { return };
        end.stage = Stage::Established;
        end.guest.confirm();
        bump(&self.adapter.counters.cm_connections);
        self.adapter.cm_paths.established(key);
    }
}
