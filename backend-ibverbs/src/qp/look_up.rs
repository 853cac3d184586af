//! Look-ups of the destinations of a datagram QP, on a thread that may wait for the network.

use std::sync::Arc;

use pvrdma_verbs_types::{UdDestination, WcStatus};

use super::address_handles::{AddressHandles, Destination, LookUp};
use super::queue_pair::Qp;
use crate::convert::{self, Route};
use crate::verbs::HostAh;

impl Qp {
    /// Returns the host's handle for a destination, or `None` if a look-up is pending: the queue then runs again
    /// afterwards.
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
                handles.remember(destination, ah);
            }
            LookUp::Asked(other) => {
                *look_up = LookUp::Asked(other);
                // Only one look-up is pending at a time. Cached destinations need not wait for it.
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
            // A QP that is gone does not need the answer.
            if qps.get(number).is_none() {
                return;
            }
            let found = HostAh::new(&pd, &attr);
            let found = found.inspect_err(|error| log.warn(module_path!(), format_args!("no way to {dgid}: {error}")));
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

    /// Stores the result of a look-up and continues the request that waits for it.
    fn looked_up(&self, destination: Destination, found: Option<Arc<HostAh>>) {
        {
            let mut look_up = self.look_up.lock();
            if !matches!(&*look_up, LookUp::Asked(asked) if *asked == destination) {
                return;
            }
            *look_up = LookUp::Answered(destination, found);
        }
        self.continue_sending();
    }
}
