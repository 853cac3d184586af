//! The host's side of the guest's connections: identifiers of `librdmacm`.

use std::collections::HashMap;
use std::io;
use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;
use std::time::Duration;

use pvrdma_base::Random;
use pvrdma_ib_cm::terminated::{Accepted, Counted, HostSide, QpBinding, of_rep};
use pvrdma_ib_cm::{MAD_LEN, RejectReason, Rep, Req};
use pvrdma_verbs_types::{Gid, Qpn, UdDestination};

use crate::adapter::Adapter;
use crate::cm_paths::PathAttributes;
use crate::counters::bump;
use crate::datagram::Datagram;
use crate::gid::{Bound, is_confined};
use crate::rdmacm::{CmId, EventChannel};

/// States of the host's QPs, as the library's numbers.
const RTR: i32 = 2;
const RTS: i32 = 3;

/// The host's part of a connection.
#[derive(Debug)]
pub(super) struct HostPart {
    pub(super) id: CmId,
    /// The host has asked the peer. Before that, the peer's address and path are resolved.
    pub(super) asked: bool,
}

/// Identifiers of a device, and the means to make more.
pub(super) struct Side {
    pub(super) adapter: Arc<Adapter>,
    pub(super) channel: Arc<EventChannel>,
    /// Keys of connections by the address of the host's identifier.
    pub(super) by_host: HashMap<usize, u32>,
    random: Random,
}

impl Side {
    pub(super) fn new(adapter: &Arc<Adapter>, channel: Arc<EventChannel>) -> Self {
        Self { adapter: Arc::clone(adapter), channel, by_host: HashMap::new(), random: Random::System }
    }

    /// Returns the number of READs and atomics in flight that the adapter supports.
    pub(super) fn max_rd_atomic(&self) -> u8 {
        self.adapter.limits.max_rd_atomic
    }
}

impl HostSide for Side {
    type Own = Bound;
    type Part = HostPart;
    type Permit = ();
    type Error = io::Error;

    fn gid(own: &Bound) -> Gid {
        own.gid
    }

    fn random(&mut self) -> Option<u32> {
        self.random.draw().ok()
    }

    fn count(&self, event: Counted) {
        let counters = &self.adapter.counters;
        bump(match event {
            Counted::Established => &counters.cm_connections,
            Counted::Refused => &counters.cm_refused,
            Counted::Overflow => &counters.cm_overflow,
        });
    }

    fn permit(&mut self) -> Option<()> {
        Some(())
    }

    fn reaches(&self, peer: IpAddr) -> bool {
        !is_confined(peer)
    }

    fn deliver(&mut self, own: &Bound, peer: Gid, mad: &[u8; MAD_LEN]) {
        let to = UdDestination { qpn: Qpn::GSI, dgid: own.gid, hop_limit: 64, ..UdDestination::default() };
        let payload = mad.to_vec();
        let datagram = Datagram { from: peer, to, kind: own.kind, immediate: None, solicited: false, payload };
        let counters = &self.adapter.counters;
        let delivered = self.adapter.member.receive(&datagram);
        bump(if delivered { &counters.cm_received } else { &counters.gsi_dropped });
    }

    fn claim(&mut self, qpn: Qpn, key: u32) -> bool {
        self.adapter.cm_paths.claim(qpn.get(), key)
    }

    fn claim_prepared(&mut self, qpn: Qpn, key: u32) -> bool {
        self.adapter.cm_paths.claim_prepared(qpn.get(), key)
    }

    fn connect(&mut self, _: Duration, key: u32, own: &Bound, to: SocketAddr, _: &Req) -> io::Result<HostPart> {
        let from = self.adapter.gids.host_source(own).filter(|from| from.is_ipv4() == to.is_ipv4());
        let from = from.map(|from| (from, 0).into());
        let id = CmId::create(&self.channel)?;
        id.resolve_address(from, to)?;
        self.by_host.insert(id.address(), key);
        Ok(HostPart { id, asked: false })
    }

    fn prepare(&mut self, key: u32, part: &mut HostPart, binding: QpBinding) -> io::Result<u8> {
        let QpBinding { own, peer_qpn, peer } = binding;
        let attributes = PathAttributes { rtr: part.id.attributes(RTR)?, rts: part.id.attributes(RTS)? };
        let path_mtu = u8::try_from(attributes.rtr.0.path_mtu).ok().filter(|mtu| (1..=5).contains(mtu));
        let paths = &self.adapter.cm_paths;
        paths.prepare(key, own.map(Qpn::get), peer_qpn.get(), peer, attributes);
        // An iWARP peer that has accepted takes messages at once.
        if part.asked && self.adapter.shared.transport.is_iwarp() {
            paths.established(key);
        }
        self.by_host.insert(part.id.address(), key);
        // iWARP has none. The guest only passes the value on to its queue pair.
        Ok(path_mtu.unwrap_or_else(|| self.adapter.port().active_mtu as u8))
    }

    fn confirm(&mut self, _: u32, part: &mut HostPart) -> io::Result<()> {
        // An iWARP connection is established already.
        if self.adapter.shared.transport.is_iwarp() { Ok(()) } else { part.id.establish() }
    }

    fn accept(&mut self, _: Duration, _: u32, part: &mut HostPart, rep: &Rep) -> io::Result<Accepted> {
        part.id.accept(&of_rep(rep, self.max_rd_atomic()))?;
        Ok(Accepted::Pending)
    }

    fn established(&mut self, key: u32) {
        self.adapter.cm_paths.established(key);
    }

    /// Dropping the identifier would reject the peer as well, but with another reason.
    fn reject(&mut self, part: &mut HostPart, private_data: &[u8]) {
        if let Err(error) = part.id.reject(private_data) {
            log::debug!("{}: a connection cannot be rejected: {error}", self.adapter.name);
        }
    }

    /// The identifier stays until the host reports the end, because the kernel repeats its request until then.
    fn disconnect(&mut self, key: u32, part: &mut HostPart) -> bool {
        self.adapter.cm_paths.forget(key);
        part.id.disconnect().is_ok()
    }

    /// Drops the identifier. The kernel tells the peer.
    fn release(&mut self, key: u32, part: Option<HostPart>) {
        self.adapter.cm_paths.forget(key);
        if let Some(part) = part {
            self.by_host.remove(&part.id.address());
        }
    }

    fn failed(&mut self, peer: Gid, error: &io::Error) -> RejectReason {
        if error.kind() == io::ErrorKind::ConnectionRefused {
            // A TCP reset: no program listens on the port.
            return RejectReason::INVALID_SERVICE_ID;
        }
        bump(&self.adapter.counters.cm_failed);
        let log = &self.adapter.log;
        log.warn(module_path!(), format_args!("the host cannot connect the guest with {peer}: {error}"));
        RejectReason::TIMEOUT
    }
}
