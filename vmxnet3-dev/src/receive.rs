//! Receive path: from the port to the guest.

use std::sync::atomic::Ordering;

use pvrdma_guest_memory::DmaView;

use crate::abi::completion::FrameReport;
use crate::core::Core;
use crate::error::QueueError;
use crate::frame::{Checksum, Frame};
use crate::offload::checksum;
use crate::offload::headers::{self, ETHERNET_LEN, Headers, TAG_LEN};
use crate::offload::segment;
use crate::rx::{Delivery, Payload, RxQueue};
use crate::session::{Session, Settings, Which};
use crate::transmit::on_wire;

/// Result of passing a frame to a device.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Received {
    /// The frame was delivered. The guest is interrupted at the end of the batch ([`crate::Vmxnet3Device::flush`]).
    Delivered,
    /// The guest does not accept the frame: another address or VLAN, or longer than its MTU.
    Filtered,
    /// No buffer is available. The frame may be passed again after [`crate::FramePort::receive_ready`]; a port that
    /// keeps it must handle that this call never comes.
    NoBuffers,
    /// No driver is active, or the link is down, or the queue has stopped, or the device is paused.
    Inactive,
}

/// Context of one frame's delivery.
struct Context<'a> {
    core: &'a Core,
    session: &'a Session,
    settings: &'a Settings,
    view: &'a DmaView<'a>,
    index: usize,
    report: FrameReport,
}

/// Delivers a frame to the guest.
pub(crate) fn receive(core: &Core, frame: &Frame<'_>) -> Received {
    if !core.link_up.load(Ordering::Acquire) || !core.is_bus_master() {
        return Received::Inactive;
    }
    let active = core.session();
    let Some(session) = active.as_ref() else { return Received::Inactive };
    let settings = session.settings.read();
    if !settings.filter.accepts(frame.bytes(), core.mac()) {
        core.counters.vmxnet3_receive_filtered.increment();
        return Received::Filtered;
    }
    let headers = Headers::parse(frame.bytes());
    let (index, hash_type, hash) = settings.queue_of(frame.bytes(), &headers);
    let Some(queue) = session.rx(index) else { return Received::Inactive };
    let mut queue = queue.lock();
    queue.begin(core.batches.load(Ordering::Acquire));
    let before = queue.completed;
    let view = &core.memory.view();
    let report = FrameReport { hash_type, hash, ..FrameReport::default() };
    let context = Context { core, session, settings: &settings, view, index, report };
    let result = context.deliver(&mut queue, frame, &headers);
    let received = context.finish(frame, result);
    if queue.completed >= core.depths.rx.load(Ordering::Relaxed) {
        queue.completed = 0;
        core.raise(queue.vector());
    } else if queue.completed != before {
        core.rx_vectors.fetch_or(1 << queue.vector(), Ordering::AcqRel);
    }
    received
}

/// Ends a batch: interrupts the guest for the frames delivered.
pub(crate) fn flush(core: &Core) {
    core.batches.fetch_add(1, Ordering::AcqRel);
    // The guard is held until the guest has been interrupted. A thread that ends the session waits for this guard, so
    // no interrupt follows the end.
    let active = core.session();
    if active.is_none() {
        return;
    }
    let vectors = core.rx_vectors.swap(0, Ordering::AcqRel);
    for vector in (0..32).filter(|vector| vectors >> vector & 1 == 1) {
        core.raise(vector);
    }
}

/// Notifies the port, if it waits for buffers, that the driver may have posted some. `rang`: the driver has written a
/// doorbell.
pub(crate) fn buffers_may_be_there(core: &Core, rang: bool) {
    if !rang && !core.starved.is_set() {
        return;
    }
    // The doorbell requests are withdrawn before the port is notified: a thread that finds no buffer from here on sets
    // both the request and the flag again.
    forgo_doorbells(core, |vector| !core.interrupts.round(vector).now);
    if core.starved.take() {
        core.port.receive_ready();
    }
}

/// Withdraws the doorbell requests of a vector that the driver is about to unmask.
///
/// This must not happen earlier. While doorbells are requested, Linux's driver passes packets to GRO, which may hold
/// them back; otherwise it bypasses GRO. Withdrawing the request in the middle of a round would let later packets
/// overtake earlier ones.
pub(crate) fn end_round(core: &Core, vector: u8) {
    forgo_doorbells(core, |its| its == vector);
}

fn forgo_doorbells(core: &Core, which: impl Fn(u8) -> bool) {
    let active = core.session();
    if let Some(session) = active.as_ref().filter(|_| core.is_bus_master()) {
        session.forgo_doorbells(&core.memory, which);
    }
}

impl Context<'_> {
    /// Delivers a frame in the form that the guest accepts.
    fn deliver(&self, queue: &mut RxQueue, frame: &Frame<'_>, headers: &Headers) -> Result<Delivery, QueueError> {
        if frame.mss().is_none() {
            return self.deliver_plain(queue, frame, headers);
        }
        if let Some(segments) = self.whole(frame).filter(|_| headers.are_where_drivers_look()) {
            let report = FrameReport { segments: Some(segments), ..self.report };
            let delivery = self.place(queue, frame, headers, &report)?;
            if delivery == Delivery::Done || delivery == Delivery::NoBuffers && self.pays_to_wait(queue) {
                return Ok(delivery);
            }
        }
        // All segments are delivered or none: if only some were delivered, the frame could not be passed again.
        if !self.has_room(queue, frame, headers)? {
            return Ok(Delivery::NoBuffers);
        }
        let mut room = std::mem::take(&mut queue.room);
        let mut last = Ok(Delivery::Done);
        let taken = frame.for_each_wire_frame(&mut room, |part| {
            last = self.deliver_plain(queue, part, &Headers::parse(part.bytes()));
            last == Ok(Delivery::Done)
        });
        queue.room = room;
        match last {
            Ok(Delivery::NoBuffers) if taken > 0 => {
                // The rings are too small for all segments: the rest is lost, as on a wire.
                self.count_no_buffers();
                Ok(Delivery::Done)
            }
            other => other,
        }
    }

    /// Returns `true` unless it is better to wait for buffers for all segments.
    fn has_room(&self, queue: &mut RxQueue, frame: &Frame<'_>, headers: &Headers) -> Result<bool, QueueError> {
        let ((count, _), Some((header, _)), Some(mss)) = (on_wire(frame), segment::split(headers), frame.mss()) else {
            return Ok(true);
        };
        let len = header.saturating_add(mss.get().into());
        if queue.has_room(self.view, count, len)? {
            return Ok(true);
        }
        self.await_buffers(queue);
        queue.has_room(self.view, count, len)
    }

    /// Arranges a notification when buffers become available: at the end of the driver's round, or by a requested
    /// doorbell if there is no round. The caller must look for buffers again afterwards, because the driver may have
    /// posted some before.
    fn await_buffers(&self, queue: &RxQueue) {
        self.core.starved.set();
        let round = self.core.interrupts.round(queue.vector());
        if !(round.now || round.next && self.will_interrupt(queue)) {
            self.session.ask_for_doorbell(self.view, self.index);
        }
        std::sync::atomic::fence(Ordering::SeqCst);
    }

    /// Returns `true` if the driver is interrupted at the end of the batch.
    fn will_interrupt(&self, queue: &RxQueue) -> bool {
        self.core.rx_vectors.load(Ordering::Acquire) >> queue.vector() & 1 == 1
    }

    /// Returns `true` if a long frame should wait for buffers instead of being segmented: once, while the driver is in
    /// a round or about to begin one.
    fn pays_to_wait(&self, queue: &mut RxQueue) -> bool {
        let round = self.core.interrupts.round(queue.vector());
        (round.now || self.will_interrupt(queue)) && *queue.waits_since.get_or_insert(round.ended) == round.ended
    }

    /// Returns the number and size of the segments, if the guest accepts the frame unsegmented.
    fn whole(&self, frame: &Frame<'_>) -> Option<(u8, u16)> {
        let (count, _) = on_wire(frame);
        let count = u8::try_from(count).ok().filter(|&count| count > 1)?;
        // Only completions of revision 2 and later report the number of segments.
        let wanted = self.settings.features.lro && self.settings.features.rx_checksum && self.session.revision >= 2;
        frame.mss().filter(|_| wanted).map(|mss| (count, mss.get()))
    }

    /// Delivers a frame in its wire form.
    fn deliver_plain(&self, queue: &mut RxQueue, frame: &Frame<'_>, headers: &Headers) -> Result<Delivery, QueueError> {
        let bytes = frame.bytes();
        if bytes.len().saturating_sub(headers.link_len) > self.session.mtu {
            return Ok(Delivery::TooLong);
        }
        self.place(queue, frame, headers, &self.report)
    }

    /// Stores a frame, without its tag if the guest enabled stripping, and fills in a missing checksum, because the
    /// guest may forward the frame or pass it to a raw socket.
    fn place(
        &self,
        queue: &mut RxQueue,
        frame: &Frame<'_>,
        headers: &Headers,
        report: &FrameReport,
    ) -> Result<Delivery, QueueError> {
        let bytes = frame.bytes();
        let verify = self.settings.features.rx_checksum;
        let missing = frame.missing_checksum(headers);
        let mut checksums = checksum::report(bytes, headers, frame.checksum() != Checksum::Unknown || !verify);
        checksums.verified &= verify && missing.as_ref().is_none_or(|missing| missing.is_correct);
        let tag = headers::tag(bytes).filter(|_| self.settings.features.vlan_strip);
        let (end, behind) = if tag.is_some() { (ETHERNET_LEN - 2, ETHERNET_LEN - 2 + TAG_LEN) } else { (0, 0) };
        let (head, rest) = (bytes.get(..end).unwrap_or_default(), bytes.get(behind..).unwrap_or_default());
        let payload = Payload { head, rest, missing: missing.map(|missing| missing.moved_back(behind - end)) };
        let report = FrameReport { tag, checksums, ..*report };
        let delivery = queue.deliver(self.view, &payload, &report)?;
        if delivery != Delivery::NoBuffers {
            return Ok(delivery);
        }
        self.await_buffers(queue);
        queue.deliver(self.view, &payload, &report)
    }

    fn count_no_buffers(&self) {
        self.core.counters.vmxnet3_receive_no_buffers.increment();
        if let Some(stats) = self.core.rx_stats.get(self.index) {
            stats.out_of_buffers.increment();
        }
    }

    /// Updates statistics and counters.
    fn finish(&self, frame: &Frame<'_>, result: Result<Delivery, QueueError>) -> Received {
        let Some(stats) = self.core.rx_stats.get(self.index) else { return Received::Inactive };
        match result {
            Ok(Delivery::Done) => {
                let (frames, bytes) = on_wire(frame);
                stats.received(frame.destination(), frame.mss().is_some(), frames, bytes);
                self.core.counters.vmxnet3_received_frames.add(frames);
                self.core.counters.vmxnet3_received_bytes.add(bytes);
                Received::Delivered
            }
            Ok(Delivery::NoBuffers) => {
                self.count_no_buffers();
                Received::NoBuffers
            }
            Ok(Delivery::TooLong) => {
                stats.errors.increment();
                self.core.counters.vmxnet3_receive_filtered.increment();
                Received::Filtered
            }
            Err(error) => {
                self.core.fail(self.session, self.view, Which::Rx(self.index), &error);
                Received::Inactive
            }
        }
    }
}
