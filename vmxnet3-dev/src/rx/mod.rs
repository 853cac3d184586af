//! Receive queues: store frames in the guest's buffers.

mod plan;
mod rings;

use pvrdma_guest_memory::{Direction, DmaError, DmaView};
use pvrdma_packet::Checksum;
use pvrdma_saved_state::vmxnet3 as saved;

use crate::abi::completion::{FrameReport, Place, rx_completion};
use crate::abi::queue_desc::{DataRing, MAX_RX_COMPLETIONS, RxQueueConfig, check_vector};
use crate::error::{CommandError, QueueError};
use crate::offload::checksum::{self, Missing};
use crate::ring::{CompletionRing, check_range, load_rx};
use crate::saved_state::error::{RestoreError, narrow, require};
use plan::{After, Plan, Planned};
use rings::{BufferRing, RingIds, Rings};

/// Number of bytes that are copied and summed at a time, so that they are read from memory only once.
const BLOCK: usize = 4096;

/// Bytes of a frame, in two parts: a stripped tag was between them.
#[derive(Clone, Debug)]
pub(crate) struct Payload<'a> {
    pub(crate) head: &'a [u8],
    pub(crate) rest: &'a [u8],
    /// Checksum to be calculated and inserted.
    pub(crate) missing: Option<Missing>,
}

impl Payload<'_> {
    /// Returns the number of bytes.
    pub(crate) const fn len(&self) -> usize {
        self.head.len().saturating_add(self.rest.len())
    }

    /// Stores bytes `from..from+len` at a bus address, and adds the bytes that the missing checksum covers to `sum`.
    fn store(
        &self,
        view: &DmaView<'_>,
        address: u64,
        from: usize,
        len: usize,
        sum: &mut Checksum,
    ) -> Result<(), QueueError> {
        let end = from.saturating_add(len);
        let split = self.head.len();
        let head = self.head.get(from.min(split)..end.min(split)).unwrap_or_default();
        let rest = self.rest.get(from.max(split) - split..end.max(split) - split).unwrap_or_default();
        view.write(address, head)?;
        let address = address.wrapping_add(head.len() as u64);
        let Some(Missing { covered, .. }) = &self.missing else { return Ok(view.write(address, rest)?) };
        // The tag precedes all bytes that are summed, so `rest` needs no adjustment.
        let mut at = from.saturating_add(head.len());
        let mut to = address;
        for block in rest.chunks(BLOCK) {
            let here = |place: usize| place.clamp(at, at.saturating_add(block.len())) - at;
            sum.add(block.get(here(covered.start)..here(covered.end)).unwrap_or_default());
            view.write(to, block)?;
            at = at.saturating_add(block.len());
            to = to.wrapping_add(block.len() as u64);
        }
        Ok(())
    }

    /// Stores those bytes of the checksum that lie in the buffer with bytes `from..from+len`.
    fn put_in(
        &self,
        view: &DmaView<'_>,
        address: u64,
        from: usize,
        len: usize,
        checksum: [u8; 2],
    ) -> Result<(), QueueError> {
        let Some(Missing { at, .. }) = self.missing else { return Ok(()) };
        for (place, byte) in (at..).zip(checksum) {
            if let Some(into) = place.checked_sub(from).filter(|&into| into < len) {
                view.write(address.wrapping_add(into as u64), &[byte])?;
            }
        }
        Ok(())
    }
}

/// Result of storing a frame.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Delivery {
    /// The guest has the frame.
    Done,
    /// Too few buffers are available now. No buffer was used.
    NoBuffers,
    /// The frame needs more buffers than a frame may have. No buffer was used.
    TooLong,
}

/// A receive queue.
#[derive(Debug)]
pub(crate) struct RxQueue {
    rings: Rings,
    completions: CompletionRing,
    vector: u8,
    plan: Plan,
    /// Buffer for assembling frames.
    pub(crate) room: Vec<u8>,
    /// Number of the driver's rounds that had ended when a long frame began to wait for buffers.
    pub(crate) waits_since: Option<u32>,
    /// Number of completions of the batch since the last interrupt.
    pub(crate) completed: u32,
    batch: u32,
}

impl RxQueue {
    /// Creates queue `number` of `count`, at the start of its rings. `most`: maximum number of buffers per frame.
    ///
    /// # Errors
    /// The device cannot access the rings.
    pub(crate) fn new(
        config: &RxQueueConfig,
        number: u8,
        count: u8,
        most: usize,
        view: &DmaView<'_>,
    ) -> Result<Self, CommandError> {
        let queue = Self {
            rings: Rings {
                first: BufferRing::new(config.ring),
                second: config.second.map(BufferRing::new),
                data: config.data,
                ids: RingIds::new(number, count),
                most,
            },
            completions: CompletionRing::new(config.completions),
            vector: config.vector,
            plan: Plan::default(),
            room: Vec::new(),
            waits_since: None,
            completed: 0,
            batch: 0,
        };
        queue.check(view).map_err(|error| CommandError::Memory("receive ring", error))?;
        Ok(queue)
    }

    /// Checks that the device can access the rings.
    ///
    /// # Errors
    /// Part of a ring cannot be accessed.
    pub(crate) fn check(&self, view: &DmaView<'_>) -> Result<(), DmaError> {
        let Rings { first, second, data, .. } = &self.rings;
        first.shape.check(view, Direction::Read)?;
        if let Some(second) = second {
            second.shape.check(view, Direction::Read)?;
        }
        self.completions.check(view)?;
        match data {
            Some(data) => check_range(view, data.base, data.len(first.shape), Direction::Write),
            None => Ok(()),
        }
    }

    /// Returns the saved form of the queue. `doorbell_wanted`: the driver is asked for doorbells. `error`: the code for
    /// which the queue has stopped, 0 if it runs.
    pub(crate) fn save(&self, doorbell_wanted: bool, error: u32) -> saved::ReceiveQueue {
        let Self {
            // The identifiers follow from the number of the queue.
            rings: Rings { first, second, data, ids: RingIds { first: _, second: _, data: _ }, most },
            completions,
            vector,
            // Buffers.
            plan: _,
            room: _,
            waits_since,
            // The end of a pause interrupts the driver for all completions.
            completed: _,
            batch: _,
        } = self;
        saved::ReceiveQueue {
            first: Some(first.save()),
            second: second.map(BufferRing::save),
            completions: Some(completions.save()),
            data: data.map(|DataRing { base, slot }| saved::DataRing { base, slot: slot.into() }),
            vector: (*vector).into(),
            max_buffers: u32::try_from(*most).unwrap_or(u32::MAX),
            doorbell_wanted,
            error,
            waits_since: *waits_since,
        }
    }

    /// Restores queue `number` of `count`, of a function with `vectors` vectors and a driver of `revision`, without its
    /// error and its request for doorbells. `limit`: upper limit on the number of buffers per frame.
    ///
    /// # Errors
    /// A ring, the vector or the number of buffers is invalid.
    pub(crate) fn restore(
        queue: saved::ReceiveQueue,
        (number, count): (u8, u8),
        vectors: u16,
        revision: u8,
        limit: u16,
    ) -> Result<Self, RestoreError> {
        let saved::ReceiveQueue {
            first,
            second,
            completions,
            data,
            vector,
            max_buffers,
            doorbell_wanted: _,
            error: _,
            waits_since,
        } = queue;
        let first = BufferRing::restore("receive ring 1", first)?;
        let second = second.map(|ring| BufferRing::restore("receive ring 2", Some(ring))).transpose()?;
        let data = match data {
            None => None,
            Some(saved::DataRing { base, slot }) => {
                require("data ring in revision", revision, revision >= 3)?;
                let slot = narrow("slot of the data ring", slot)?;
                Some(DataRing { base, slot }.checked(first.shape)?)
            }
        };
        require("number of buffers per frame", max_buffers, (1..=u32::from(limit)).contains(&max_buffers))?;
        Ok(Self {
            rings: Rings {
                first,
                second,
                data,
                ids: RingIds::new(number, count),
                most: narrow("number of buffers per frame", max_buffers)?,
            },
            completions: CompletionRing::restore(completions, MAX_RX_COMPLETIONS)?,
            vector: check_vector(vector, vectors)?,
            plan: Plan::default(),
            room: Vec::new(),
            waits_since,
            completed: 0,
            batch: 0,
        })
    }

    /// Returns the interrupt vector.
    pub(crate) const fn vector(&self) -> u8 {
        self.vector
    }

    /// Starts batch `batch`, unless it is the current one.
    pub(crate) const fn begin(&mut self, batch: u32) {
        if self.batch != batch {
            (self.batch, self.completed) = (batch, 0);
        }
    }

    const fn here(&self) -> After {
        After {
            first: self.rings.first.next,
            second: match self.rings.second {
                Some(ring) => Some(ring.next),
                None => None,
            },
        }
    }

    /// Returns `true` if `count` frames of `len` bytes fit into buffers one after the other, or if waiting would not
    /// help: three quarters of ring 1 are available and do not suffice.
    ///
    /// # Errors
    /// The rings are invalid.
    pub(crate) fn has_room(&mut self, view: &DmaView<'_>, count: u64, len: usize) -> Result<bool, QueueError> {
        let mut plan = std::mem::take(&mut self.plan);
        let mut at = self.here();
        let mut fits = true;
        for _ in 0..count {
            match plan.make(&self.rings, view, at, len)? {
                Planned::Fits(after) => at = after,
                Planned::NoBuffers => {
                    fits = false;
                    break;
                }
                Planned::TooLong => break,
            }
        }
        self.plan = plan;
        let BufferRing { shape, next } = self.rings.first;
        Ok(fits || load_rx(view, shape, next.ahead(shape, shape.entries() / 4 * 3))?.is_some())
    }

    /// Stores a frame and writes its completions. All bytes are stored before the first completion.
    ///
    /// # Errors
    /// The rings are invalid.
    pub(crate) fn deliver(
        &mut self,
        view: &DmaView<'_>,
        payload: &Payload<'_>,
        report: &FrameReport,
    ) -> Result<Delivery, QueueError> {
        let mut plan = std::mem::take(&mut self.plan);
        let result = self.deliver_as(&mut plan, view, payload, report);
        self.plan = plan;
        result
    }

    fn deliver_as(
        &mut self,
        plan: &mut Plan,
        view: &DmaView<'_>,
        payload: &Payload<'_>,
        report: &FrameReport,
    ) -> Result<Delivery, QueueError> {
        let after = match plan.make(&self.rings, view, self.here(), payload.len())? {
            Planned::Fits(after) => after,
            Planned::NoBuffers => return Ok(Delivery::NoBuffers),
            Planned::TooLong => return Ok(Delivery::TooLong),
        };
        let (mut from, mut sum) = (0, Checksum::default());
        for buffer in plan.buffers() {
            payload.store(view, buffer.address, from, buffer.len.into(), &mut sum)?;
            from += usize::from(buffer.len);
        }
        let (mut from, checksum) = (0, checksum::finish(sum));
        for buffer in plan.buffers() {
            payload.put_in(view, buffer.address, from, buffer.len.into(), checksum)?;
            from += usize::from(buffer.len);
        }
        let count = plan.buffers().len();
        for (number, buffer) in plan.buffers().iter().enumerate() {
            let place = Place {
                index: buffer.index,
                ring_id: buffer.ring_id,
                len: buffer.len,
                first: number == 0,
                last: number + 1 == count,
            };
            self.completions.push(view, rx_completion(place, report))?;
        }
        self.rings.first.next = after.first;
        if let (Some(second), Some(next)) = (&mut self.rings.second, after.second) {
            second.next = next;
        }
        self.completed = self.completed.saturating_add(1);
        self.waits_since = None;
        Ok(Delivery::Done)
    }
}
