//! Asynchronous events of the host become those of the guest.

use std::sync::Arc;

use pvrdma_guest_memory::MemoryWatcher;
use pvrdma_verbs::{AsyncEvent, PortEvent, QpEvent, SrqEvent};

use crate::counters::bump;
use crate::cq::Cq;
use crate::objects::Objects;
use crate::qp::Qp;
use crate::srq::Srq;
use crate::verbs::HostEvent;

/// An event of the host, with the object that it is about.
pub(crate) enum Event {
    CqError(Arc<Cq>),
    Qp(QpEvent, Arc<Qp>),
    Srq(SrqEvent, Arc<Srq>),
    Port(PortEvent),
    DeviceFatal,
    /// It means nothing to guests, or to nobody any more.
    Nothing,
}

/// Finds the object that an event is about.
pub(crate) fn look_up(objects: &Objects, event: HostEvent) -> Event {
    let adapter = &objects.adapter;
    bump(&adapter.counters.async_events);
    match event {
        HostEvent::CqError { cq } => objects.cqs.get(cq).map_or(Event::Nothing, Event::CqError),
        HostEvent::Qp { event, qp } => {
            let found = objects.qps.all().into_iter().find(|known| known.address() == qp);
            found.map_or(Event::Nothing, |qp| Event::Qp(event, qp))
        }
        HostEvent::Srq { event, srq } => objects.srqs.get(srq).map_or(Event::Nothing, |srq| Event::Srq(event, srq)),
        HostEvent::Port(event) => Event::Port(event),
        HostEvent::DeviceFatal => Event::DeviceFatal,
        HostEvent::Other(number) => {
            log::debug!("{}: event {number} of the host means nothing to guests", adapter.name);
            Event::Nothing
        }
    }
}

/// Brings an event of the host to the object that it is about.
pub(crate) fn dispatch(objects: &Objects, event: Event) {
    match event {
        Event::CqError(cq) => cq_overran(objects, &cq),
        Event::Qp(event, qp) => qp.host_event(event),
        Event::Srq(event, srq) => srq.host_event(event),
        Event::Port(event) => objects.adapter.event(AsyncEvent::Port(event)),
        Event::DeviceFatal => device_lost(objects),
        Event::Nothing => {}
    }
}

/// The host's queue overran: the host's QPs of it are in the error state, and so are the guest's.
fn cq_overran(objects: &Objects, cq: &Cq) {
    objects.adapter.log.error(module_path!(), format_args!("the host's completion queue overran"));
    cq.end();
    for qp in objects.qps.all().iter().filter(|qp| qp.uses(cq)) {
        qp.host_event(QpEvent::Fatal);
    }
}

/// The host's device is gone: everything ends with an error, and nothing stays registered.
fn device_lost(objects: &Objects) {
    let adapter = &objects.adapter;
    adapter.log.error(module_path!(), format_args!("the host's device {} is lost", adapter.device.name()));
    adapter.event(AsyncEvent::Port(PortEvent::Error));
    for qp in objects.qps.all() {
        qp.host_event(QpEvent::Fatal);
        qp.abandon();
    }
    objects.mrs.disabled();
}
