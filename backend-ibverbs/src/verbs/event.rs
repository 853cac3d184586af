//! Asynchronous events of the host (`ibv_get_async_event(3)`, IBA 11.6.3).

use std::ffi::c_int;

use pvrdma_verbs::{PortEvent, QpEvent, SrqEvent};

use crate::sys::{
    EVENT_COMM_EST, EVENT_CQ_ERR, EVENT_DEVICE_FATAL, EVENT_PORT_ACTIVE, EVENT_PORT_ERR, EVENT_QP_ACCESS_ERR,
    EVENT_QP_FATAL, EVENT_QP_LAST_WQE_REACHED, EVENT_QP_REQ_ERR, EVENT_SQ_DRAINED, EVENT_SRQ_ERR,
    EVENT_SRQ_LIMIT_REACHED,
};

/// An event, with the address of the host's object that it concerns.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum HostEvent {
    /// A completion queue overran.
    CqError {
        /// Address of the queue.
        cq: usize,
    },
    /// An event of a queue pair.
    Qp {
        /// Type of the event.
        event: QpEvent,
        /// Address of the queue pair.
        qp: usize,
    },
    /// An event of a shared receive queue.
    Srq {
        /// Type of the event.
        event: SrqEvent,
        /// Address of the queue.
        srq: usize,
    },
    /// An event of a port.
    Port(PortEvent),
    /// The device is gone.
    DeviceFatal,
    /// Any other event, which has no meaning for guests: its number in `enum ibv_event_type`.
    Other(c_int),
}

impl HostEvent {
    /// Creates an event from the library's number and the address of its object.
    pub(super) const fn new(number: c_int, element: usize) -> Self {
        let event = match number {
            EVENT_CQ_ERR => return Self::CqError { cq: element },
            EVENT_DEVICE_FATAL => return Self::DeviceFatal,
            EVENT_PORT_ACTIVE => return Self::Port(PortEvent::Active),
            EVENT_PORT_ERR => return Self::Port(PortEvent::Error),
            EVENT_SRQ_ERR => return Self::Srq { event: SrqEvent::Error, srq: element },
            EVENT_SRQ_LIMIT_REACHED => return Self::Srq { event: SrqEvent::LimitReached, srq: element },
            EVENT_QP_FATAL => QpEvent::Fatal,
            EVENT_QP_REQ_ERR => QpEvent::RequestError,
            EVENT_QP_ACCESS_ERR => QpEvent::AccessError,
            EVENT_COMM_EST => QpEvent::CommunicationEstablished,
            EVENT_SQ_DRAINED => QpEvent::SendQueueDrained,
            EVENT_QP_LAST_WQE_REACHED => QpEvent::LastWqeReached,
            other => return Self::Other(other),
        };
        Self::Qp { event, qp: element }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The numbers are those of `enum ibv_event_type` in rdma-core's `verbs.h`.
    #[test]
    fn events_by_their_numbers() {
        let qp = |event| HostEvent::Qp { event, qp: 0x1000 };
        let expected = [
            HostEvent::CqError { cq: 0x1000 },
            qp(QpEvent::Fatal),
            qp(QpEvent::RequestError),
            qp(QpEvent::AccessError),
            qp(QpEvent::CommunicationEstablished),
            qp(QpEvent::SendQueueDrained),
            HostEvent::Other(6),
            HostEvent::Other(7),
            HostEvent::DeviceFatal,
            HostEvent::Port(PortEvent::Active),
            HostEvent::Port(PortEvent::Error),
            HostEvent::Other(11),
            HostEvent::Other(12),
            HostEvent::Other(13),
            HostEvent::Srq { event: SrqEvent::Error, srq: 0x1000 },
            HostEvent::Srq { event: SrqEvent::LimitReached, srq: 0x1000 },
            qp(QpEvent::LastWqeReached),
            HostEvent::Other(17),
            HostEvent::Other(18),
        ];
        for (number, expected) in (0..).zip(expected) {
            assert_eq!(HostEvent::new(number, 0x1000), expected, "{number}");
        }
        assert_eq!(HostEvent::new(-1, 0x1000), HostEvent::Other(-1));
    }
}
