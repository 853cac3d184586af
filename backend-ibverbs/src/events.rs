//! Asynchronous events of the host become those of the guest.

use pvrdma_guest_memory::MemoryWatcher;
use pvrdma_verbs::{AsyncEvent, PortEvent, QpEvent};

use crate::counters::bump;
use crate::objects::Objects;
use crate::verbs::HostEvent;

/// Brings an event of the host to the objects that it is about.
pub(crate) fn dispatch(objects: &Objects, event: HostEvent) {
    let adapter = &objects.adapter;
    bump(&adapter.counters.async_events);
    match event {
        HostEvent::CqError { cq } => cq_overran(objects, cq),
        HostEvent::Qp { event, qp } => {
            let found = objects.qps.all().into_iter().find(|known| known.address() == qp);
            if let Some(qp) = found {
                qp.host_event(event);
            }
        }
        HostEvent::Srq { event, srq } => {
            if let Some(srq) = objects.srqs.get(srq) {
                srq.host_event(event);
            }
        }
        HostEvent::Port(event) => adapter.event(AsyncEvent::Port(event)),
        HostEvent::DeviceFatal => device_lost(objects),
        HostEvent::Other(number) => log::debug!("{}: event {number} of the host means nothing to guests", adapter.name),
    }
}

/// The host's queue overran: the host's QPs of it are in the error state, and so are the guest's.
fn cq_overran(objects: &Objects, address: usize) {
    let Some(cq) = objects.cqs.get(address) else { return };
    objects.adapter.log.error(format_args!("the host's completion queue overran"));
    cq.end();
    for qp in objects.qps.all().iter().filter(|qp| qp.uses(&cq)) {
        qp.host_event(QpEvent::Fatal);
    }
}

/// The host's device is gone: everything ends with an error, and nothing stays registered.
fn device_lost(objects: &Objects) {
    let adapter = &objects.adapter;
    adapter.log.error(format_args!("the host's device {} is lost", adapter.device.name()));
    adapter.event(AsyncEvent::Port(PortEvent::Error));
    for qp in objects.qps.all() {
        qp.host_event(QpEvent::Fatal);
        qp.abandon();
    }
    objects.mrs.disabled();
}
