//! The host's handles for the destinations of a datagram QP.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use pvrdma_verbs::{UdDestination, WcStatus};

use super::queue_pair::Qp;
use crate::convert::{self, Route};
use crate::verbs::HostAh;

/// Destinations that are remembered.
const MAX_AHS: usize = 256;
/// For how long nobody is asked again for a destination that was not found.
const NOT_FOUND: Duration = Duration::from_secs(3);

/// A GID, the index of the source, and how packets get there.
pub(super) type Destination = ([u8; 16], u8, Route);

/// A destination that was looked up.
#[derive(Clone, Debug)]
enum Known {
    Found(Arc<HostAh>),
    /// Nobody has it, and nobody asks before then.
    Missing(Instant),
}

/// The destinations of a QP. The send side has it.
#[derive(Debug, Default)]
pub(super) struct AddressHandles(HashMap<Destination, Known>);

impl AddressHandles {
    /// Forgets all. Handles in use live on until their requests end.
    pub(super) fn clear(&mut self) {
        self.0.clear();
    }

    fn remember(&mut self, destination: Destination, known: Known) {
        if self.0.len() >= MAX_AHS {
            self.clear();
        }
        self.0.insert(destination, known);
    }

    /// `None` if somebody has to ask.
    fn find(&self, destination: &Destination) -> Option<Result<Arc<HostAh>, WcStatus>> {
        match self.0.get(destination)? {
            Known::Found(ah) => Some(Ok(Arc::clone(ah))),
            Known::Missing(until) => (Instant::now() < *until).then_some(Err(WcStatus::LocalQpOperation)),
        }
    }
}

/// What a QP has asked for. It stays over a reset, so that a QP never has asked twice.
#[derive(Debug, Default)]
pub(super) enum LookUp {
    #[default]
    None,
    Asked(Destination),
    Answered(Destination, Option<Arc<HostAh>>),
}

impl Qp {
    /// Returns the host's handle for a destination, or `None` if it is being looked up: then the queue is run again.
    pub(super) fn address_handle(
        &self,
        handles: &mut AddressHandles,
        to: &UdDestination,
    ) -> Result<Option<Arc<HostAh>>, WcStatus> {
        let shared = &self.adapter.shared;
        let source = self.adapter.gids.get(to.sgid_index).ok_or(WcStatus::LocalQpOperation)?;
        let dgid = shared.fabric.translate(to.dgid);
        let route = Route {
            flow_label: to.flow_label,
            hop_limit: to.hop_limit,
            traffic_class: to.traffic_class,
            service_level: to.service_level,
        };
        let destination = (dgid.0, source.host.index, route);
        let mut look_up = self.look_up.lock();
        match std::mem::take(&mut *look_up) {
            LookUp::None => {}
            LookUp::Answered(destination, ah) => {
                let missing = || Known::Missing(Instant::now() + NOT_FOUND);
                handles.remember(destination, ah.map_or_else(missing, Known::Found));
            }
            LookUp::Asked(other) => {
                *look_up = LookUp::Asked(other);
                // One at a time. What is known need not wait.
                return handles.find(&destination).transpose();
            }
        }
        if let Some(known) = handles.find(&destination) {
            return known.map(Some);
        }
        *look_up = LookUp::Asked(destination);
        drop(look_up);
        let attr = convert::route(dgid, source.host.index, shared.config.port, &route);
        let (pd, qps, number) = (Arc::clone(&self.pd), Arc::clone(&self.qps), self.qpn.get());
        let log = Arc::clone(&self.adapter.log);
        let asked = self.adapter.resolver.ask(move || {
            // Nobody waits for the answer of a QP that is gone.
            if qps.get(number).is_none() {
                return;
            }
            let found = HostAh::new(&pd, &attr);
            let found = found.inspect_err(|error| log.warn(format_args!("no way to {dgid}: {error}")));
            drop(pd);
            if let Some(qp) = qps.get(number) {
                qp.looked_up(destination, found.ok().map(Arc::new));
            }
        });
        if !asked {
            *self.look_up.lock() = LookUp::None;
            return Err(WcStatus::LocalQpOperation);
        }
        Ok(None)
    }

    /// A destination was looked up: the request that waits for it goes on.
    fn looked_up(&self, destination: Destination, found: Option<Arc<HostAh>>) {
        {
            let mut look_up = self.look_up.lock();
            if !matches!(&*look_up, LookUp::Asked(asked) if *asked == destination) {
                return;
            }
            *look_up = LookUp::Answered(destination, found);
        }
        self.run_send();
    }
}
