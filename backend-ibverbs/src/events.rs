//! Translation of the host's asynchronous events to the guest's.

use std::sync::Arc;

use pvrdma_guest_memory::MemoryWatcher;
use pvrdma_verbs::{AsyncEvent, PortEvent, QpEvent, SrqEvent};

use crate::counters::bump;
use crate::cq::Cq;
use crate::objects::Objects;
use crate::qp::Qp;
use crate::srq::Srq;
use crate::verbs::HostEvent;

/// An event of the host, with the object that it concerns.
pub(crate) enum Event {
    CqError(Arc<Cq>),
    Qp(QpEvent, Arc<Qp>),
    Srq(SrqEvent, Arc<Srq>),
    Port(PortEvent),
    DeviceFatal,
    /// An event without meaning for guests, or for an object that no longer exists.
    Nothing,
}

/// Finds the object that an event concerns.
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

/// Delivers an event of the host to its object.
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

/// Handles an overrun of the host's queue: the host's QPs that use it are in the error state, so the guest's QPs enter
/// it too.
fn cq_overran(objects: &Objects, cq: &Cq) {
    objects.adapter.log.error(module_path!(), format_args!("the host's completion queue overran"));
    cq.end();
    for qp in objects.qps.all().iter().filter(|qp| qp.uses(cq)) {
        qp.host_event(QpEvent::Fatal);
    }
}

/// Handles the loss of the host's device: everything ends with an error, and no memory stays registered.
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
