//! Transmit queues: from the ring of commands to a frame.

use pvrdma_guest_memory::{Direction, DmaView};

use crate::abi::completion::tx_completion;
use crate::abi::queue_desc::TxQueueConfig;
use crate::abi::tx_desc::{MAX_PER_FRAME, MAX_PER_SUPER_FRAME, OffloadMode, TxDesc};
use crate::error::{CommandError, QueueError};
use crate::frame::{Frame, MAX_SUPER_FRAME};
use crate::offload::headers::{self, TAG_LEN};
use crate::offload::segment;
use crate::ring::{CompletionRing, Position, RingShape, load_tx};

/// A packet that was taken from the ring. Its bytes are in the queue.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Packet {
    /// Index of its last descriptor.
    last: u32,
    /// Behind it.
    next: Position,
    /// A completion is wanted.
    completion: bool,
    offload: OffloadMode,
    tag: Option<u16>,
    /// It is longer than any frame; its bytes were not copied.
    too_long: bool,
}

/// A transmit queue.
#[derive(Debug)]
pub(crate) struct TxQueue {
    shape: RingShape,
    next: Position,
    completions: CompletionRing,
    vector: u8,
    descs: Vec<TxDesc>,
    /// Room for a tag, then the bytes of the packet. Longer than that, from packets before: growing writes zeros.
    bytes: Vec<u8>,
    /// How much of it is in use.
    used: usize,
    /// Where segments are put together.
    pub(crate) room: Vec<u8>,
    /// Completions since the last interrupt.
    pub(crate) completed: u32,
}

impl TxQueue {
    /// A queue at the start of its rings.
    ///
    /// # Errors
    /// The device does not reach them.
    pub(crate) fn new(config: &TxQueueConfig, view: &DmaView<'_>) -> Result<Self, CommandError> {
        let memory = |error| CommandError::Memory("transmit ring", error);
        config.ring.check(view, Direction::Read).map_err(memory)?;
        config.completions.check(view, Direction::Write).map_err(memory)?;
        Ok(Self {
            shape: config.ring,
            next: Position::START,
            completions: CompletionRing::new(config.completions),
            vector: config.vector,
            descs: Vec::new(),
            bytes: Vec::new(),
            used: 0,
            room: Vec::new(),
            completed: 0,
        })
    }

    /// Its interrupt.
    pub(crate) const fn vector(&self) -> u8 {
        self.vector
    }

    /// Descriptors in its ring: no more packets are worth looking for in one go.
    pub(crate) const fn entries(&self) -> u32 {
        self.shape.entries()
    }

    /// Copies the next packet, if there is one. It stays in the ring until [`Self::complete`].
    ///
    /// # Errors
    /// The ring makes no sense.
    pub(crate) fn take(&mut self, view: &DmaView<'_>) -> Result<Option<Packet>, QueueError> {
        // The generation of the first descriptor is flipped last, so it alone says that there is a packet.
        let Some(first) = load_tx(view, self.shape, self.next)? else { return Ok(None) };
        let most = match first.offload {
            OffloadMode::Encapsulated => return Err(QueueError::Unsupported),
            OffloadMode::Segment { .. } => MAX_PER_SUPER_FRAME,
            OffloadMode::None | OffloadMode::Checksum { .. } => MAX_PER_FRAME,
        };
        let last = self.walk(view, first, most)?;
        let completion = self.descs.last().is_some_and(|desc| desc.completion);
        let too_long = !self.copy(view)?;
        let (offload, tag) = (first.offload, first.tag);
        Ok(Some(Packet { last: last.index(), next: last.next(self.shape), completion, offload, tag, too_long }))
    }

    /// Collects the descriptors of a packet and returns where the last is.
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

    /// Copies the bytes of the descriptors. Returns `false` if they are too many.
    fn copy(&mut self, view: &DmaView<'_>) -> Result<bool, QueueError> {
        let len = self.descs.iter().fold(TAG_LEN, |sum, desc| sum.saturating_add(desc.len as usize));
        if len > MAX_SUPER_FRAME {
            return Ok(false);
        }
        if self.bytes.len() < len {
            self.bytes.resize(len, 0);
        }
        self.used = len;
        let mut rest = self.bytes.get_mut(TAG_LEN..len).unwrap_or_default();
        for desc in &self.descs {
            let Some((part, behind)) = rest.split_at_mut_checked(desc.len as usize) else { break };
            view.read(desc.address, part)?;
            rest = behind;
        }
        Ok(true)
    }

    /// The packet as a frame, and the room for segments. `None` if it is none.
    pub(crate) fn frame(&mut self, packet: &Packet) -> Option<(Frame<'_>, &mut Vec<u8>)> {
        if packet.too_long {
            return None;
        }
        let mut shift = 0;
        let bytes = self.bytes.get_mut(..self.used)?;
        let bytes = if let Some(tag) = packet.tag {
            headers::insert_tag(bytes, tag);
            shift = 4;
            bytes
        } else {
            bytes.get_mut(TAG_LEN..)?
        };
        let frame = match packet.offload {
            OffloadMode::None | OffloadMode::Encapsulated => Frame::new(bytes, false),
            OffloadMode::Checksum { start, at } => Frame::with_partial_checksum(bytes, start + shift, at + shift),
            OffloadMode::Segment { mss, .. } => {
                if !segment::prepare(bytes) {
                    return None;
                }
                Frame::to_be_segmented(bytes, mss)
            }
        };
        frame.ok().map(|frame| (frame, &mut self.room))
    }

    /// Gives the packet back to the driver, in order: one completion, which names its last descriptor.
    ///
    /// # Errors
    /// The completion ring cannot be written.
    pub(crate) fn complete(&mut self, view: &DmaView<'_>, packet: &Packet) -> Result<(), QueueError> {
        if packet.completion {
            self.completions.push(view, tx_completion(packet.last))?;
            self.completed = self.completed.saturating_add(1);
        }
        self.next = packet.next;
        Ok(())
    }
}
