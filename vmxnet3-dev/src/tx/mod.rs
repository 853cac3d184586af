//! Transmit queues: read frames from the command ring.

use pvrdma_guest_memory::{Direction, DmaError, DmaView};
use pvrdma_saved_state::vmxnet3 as saved;

use crate::abi::completion::tx_completion;
use crate::abi::queue_desc::{MAX_RING, TxQueueConfig, check_vector};
use crate::abi::tx_desc::{MAX_PER_FRAME, MAX_PER_SUPER_FRAME, OffloadMode, TxDesc};
use crate::error::{CommandError, QueueError};
use crate::frame::{Frame, MAX_SUPER_FRAME};
use crate::offload::headers::{self, ETHERNET_LEN, Headers, TAG_LEN};
use crate::offload::{checksum, segment};
use crate::ring::{CompletionRing, Position, RingShape, load_tx};
use crate::saved_state::error::RestoreError;

/// A packet in the command ring.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Packet {
    /// Length in bytes, including the tag. `None` if the packet is longer than any frame.
    pub(crate) len: Option<usize>,
    /// Index of its last descriptor.
    last: u32,
    /// Position after the packet.
    next: Position,
    /// The driver requests a completion.
    completion: bool,
    offload: OffloadMode,
    tag: Option<u16>,
}

impl Packet {
    /// Returns the packet that [`TxQueue::copy`] has copied, as a frame. Returns `None` if it is not a valid one.
    pub(crate) fn frame<'b>(&self, bytes: &'b mut [u8]) -> Option<Frame<'b>> {
        let mut shift = 0;
        if let Some(tag) = self.tag {
            if bytes.len() < ETHERNET_LEN + TAG_LEN {
                // The space for the tag would keep its old contents and leak them.
                return None;
            }
            headers::insert_tag(bytes, tag);
            shift = 4;
        }
        let frame = match self.offload {
            OffloadMode::None | OffloadMode::Encapsulated => Frame::new(bytes, false),
            OffloadMode::Checksum { start, at } => {
                let (headers, place) = (Headers::parse(bytes), (start + shift, at + shift));
                // Links do not support this checksum, so it is calculated before any port inspects the frame.
                if checksum::complete_gre(bytes, &headers, place) {
                    Frame::new(bytes, false)
                } else {
                    Frame::partial(bytes, &headers, place)
                }
            }
            OffloadMode::Segment { mss, .. } => {
                if !segment::prepare(bytes) {
                    return None;
                }
                Frame::to_be_segmented(bytes, mss)
            }
        };
        frame.ok()
    }
}

/// A transmit queue.
#[derive(Debug)]
pub(crate) struct TxQueue {
    shape: RingShape,
    next: Position,
    completions: CompletionRing,
    vector: u8,
    descs: Vec<TxDesc>,
    /// Buffer for a packet, for a port that takes frames one by one. It keeps the length of the longest packet so far,
    /// because growing it writes zeros.
    pub(crate) bytes: Vec<u8>,
    /// Buffer for segments.
    pub(crate) room: Vec<u8>,
    /// Number of completions since the last interrupt.
    pub(crate) completed: u32,
    /// Number of descriptors that were completed since the last interrupt.
    completed_descs: u32,
}

impl TxQueue {
    /// Creates a queue at the start of its rings.
    ///
    /// # Errors
    /// The device cannot access the rings.
    pub(crate) fn new(config: &TxQueueConfig, view: &DmaView<'_>) -> Result<Self, CommandError> {
        let completions = CompletionRing::new(config.completions);
        let queue = Self::at(config.ring, Position::START, completions, config.vector);
        queue.check(view).map_err(|error| CommandError::Memory("transmit ring", error))?;
        Ok(queue)
    }

    const fn at(shape: RingShape, next: Position, completions: CompletionRing, vector: u8) -> Self {
        Self {
            shape,
            next,
            completions,
            vector,
            descs: Vec::new(),
            bytes: Vec::new(),
            room: Vec::new(),
            completed: 0,
            completed_descs: 0,
        }
    }

    /// Checks that the device can access the rings.
    ///
    /// # Errors
    /// Part of a ring cannot be accessed.
    pub(crate) fn check(&self, view: &DmaView<'_>) -> Result<(), DmaError> {
        self.shape.check(view, Direction::Read)?;
        self.completions.check(view)
    }

    /// Returns the saved form of the queue. `error`: the code for which it has stopped, 0 if it runs.
    pub(crate) fn save(&self, error: u32) -> saved::TransmitQueue {
        let Self {
            shape,
            next,
            completions,
            vector,
            // Buffers.
            descs: _,
            bytes: _,
            room: _,
            // The end of a pause interrupts the driver for all completions.
            completed: _,
            completed_descs: _,
        } = self;
        let (ring, completions) = (Some(shape.save(*next)), Some(completions.save()));
        saved::TransmitQueue { ring, completions, vector: (*vector).into(), error }
    }

    /// Restores a queue of a function with `vectors` vectors, without its error.
    ///
    /// # Errors
    /// A ring or the vector is invalid.
    pub(crate) fn restore(queue: saved::TransmitQueue, vectors: u16) -> Result<Self, RestoreError> {
        let saved::TransmitQueue { ring, completions, vector, error: _ } = queue;
        let (shape, next) = RingShape::restore("transmit ring", ring, MAX_RING)?;
        let completions = CompletionRing::restore(completions, MAX_RING)?;
        Ok(Self::at(shape, next, completions, check_vector(vector, vectors)?))
    }

    /// Returns the interrupt vector.
    pub(crate) const fn vector(&self) -> u8 {
        self.vector
    }

    /// Returns the number of descriptors in the ring, which bounds the number of packets to look for in one call.
    pub(crate) const fn entries(&self) -> u32 {
        self.shape.entries()
    }

    /// Returns the next packet, if there is one. It stays in the ring until [`Self::complete`] is called.
    ///
    /// # Errors
    /// The ring is invalid.
    pub(crate) fn peek(&mut self, view: &DmaView<'_>) -> Result<Option<Packet>, QueueError> {
        // The driver flips the generation of the first descriptor last, so this bit alone shows that a packet is
        // complete.
        let Some(first) = load_tx(view, self.shape, self.next)? else { return Ok(None) };
        let most = match first.offload {
            OffloadMode::Encapsulated => return Err(QueueError::Unsupported),
            OffloadMode::Segment { .. } => MAX_PER_SUPER_FRAME,
            OffloadMode::None | OffloadMode::Checksum { .. } => MAX_PER_FRAME,
        };
        let last = self.walk(view, first, most)?;
        let completion = self.descs.last().is_some_and(|desc| desc.completion);
        let (offload, tag) = (first.offload, first.tag);
        let len = self.descs.iter().fold(0, |sum: usize, desc| sum.saturating_add(desc.len as usize));
        let len = Some(if tag.is_some() { len.saturating_add(TAG_LEN) } else { len })
            .filter(|_| len <= MAX_SUPER_FRAME - TAG_LEN);
        Ok(Some(Packet { len, last: last.index(), next: last.next(self.shape), completion, offload, tag }))
    }

    /// Collects the descriptors of a packet and returns the position of the last.
    fn walk(&mut self, view: &DmaView<'_>, first: TxDesc, most: u32) -> Result<Position, QueueError> {
        self.descs.clear();
        let (mut desc, mut at) = (first, self.next);
        for count in 1..=self.shape.entries() {
            if count <= most {
                self.descs.push(desc);
            }
            if desc.end {
                return if count <= most { Ok(at) } else { Err(QueueError::TooMany) };
            }
            at = at.next(self.shape);
            desc = load_tx(view, self.shape, at)?.ok_or(QueueError::NoEnd)?;
        }
        Err(QueueError::NoEnd)
    }

    /// Copies the bytes of the packet that was peeked last, after space for its tag. `bytes` has the length of the
    /// packet.
    ///
    /// # Errors
    /// Part of the packet cannot be read.
    pub(crate) fn copy(&self, view: &DmaView<'_>, packet: &Packet, bytes: &mut [u8]) -> Result<(), QueueError> {
        let behind_tag = if packet.tag.is_some() { TAG_LEN } else { 0 };
        let mut rest = bytes.get_mut(behind_tag..).unwrap_or_default();
        for desc in &self.descs {
            let Some((part, behind)) = rest.split_at_mut_checked(desc.len as usize) else { break };
            view.read(desc.address, part)?;
            rest = behind;
        }
        Ok(())
    }

    /// Returns the packet to the driver, in order: one completion, which names its last descriptor.
    ///
    /// # Errors
    /// The completion ring cannot be written.
    pub(crate) fn complete(&mut self, view: &DmaView<'_>, packet: &Packet) -> Result<(), QueueError> {
        if packet.completion {
            self.completions.push(view, tx_completion(packet.last))?;
            self.completed = self.completed.saturating_add(1);
        }
        let descs = u32::try_from(self.descs.len()).unwrap_or(u32::MAX);
        self.completed_descs = self.completed_descs.saturating_add(descs);
        self.next = packet.next;
        Ok(())
    }

    /// Resets the count of completions and returns its previous value.
    pub(crate) fn forget_completed(&mut self) -> u32 {
        self.completed_descs = 0;
        std::mem::take(&mut self.completed)
    }

    /// Returns `true` if the interrupt for the completed descriptors may be delayed: most of the ring is still
    /// available to the driver, and there are fewer than `most` completions.
    #[cfg(feature = "link")]
    pub(crate) const fn may_wait(&self, most: u32) -> bool {
        self.completed < most && self.completed_descs < self.entries() / 4
    }
}
