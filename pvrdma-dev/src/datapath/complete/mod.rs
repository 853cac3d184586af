//! Completion queues (spec §9).

pub(crate) mod infer;
mod inferred;
mod unheard;

use std::sync::Arc;

use parking_lot::Mutex;
use pvrdma_guest_memory::DmaView;
use pvrdma_pages::{PageList, PageListBuilder};
use pvrdma_verbs::{CompletionSink, CqOverrun};
use pvrdma_verbs_types::{Completion, NetworkType, WcFlags, WcOpcode, WcStatus};

use crate::abi::layout::GuestLayout;
use crate::abi::ring::{Eqe, eqe};
use crate::abi::wqe::{CQE_SIZE, Cqe, wc_flag, wc_opcode};
use crate::due::DueLooks;
use crate::events::EventHub;
use crate::ring::{ProducerRing, RingShape, RingShapeError, RingWords, StateWords};

use inferred::Inferred;

pub(crate) use unheard::Unheard;

/// Completions for which the guest requested a notification (spec §9.5).
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Armed {
    Not,
    Solicited,
    Any,
}

/// State of a completion queue that is saved.
#[derive(Debug)]
pub(crate) struct SavedCqRing {
    /// Number of entries.
    pub(crate) entries: u32,
    /// All pages of the queue; of a dead one only the first, which holds the ring state.
    pub(crate) pages: PageList,
    /// Index that the device publishes. `None`: the queue is dead.
    pub(crate) tail: Option<u32>,
    /// Completions for which the guest requested a notification.
    pub(crate) armed: Armed,
    /// Set if the guest may have armed the queue unnoticed.
    pub(crate) unheard: Option<Unheard>,
}

impl Armed {
    #[inline]
    fn wants(self, completion: &Completion) -> bool {
        match self {
            Self::Not => false,
            Self::Any => true,
            Self::Solicited => {
                let receive = matches!(completion.opcode, WcOpcode::Recv | WcOpcode::RecvRdmaWithImmediate);
                completion.status != WcStatus::Success || (receive && completion.solicited)
            }
        }
    }
}

#[derive(Debug)]
struct State {
    /// `None` once the queue is dead: overrun, corrupted, or destroyed.
    ring: Option<ProducerRing>,
    armed: Armed,
    /// Set while the doorbells that arm the queue may not trap.
    inferred: Option<Box<Inferred>>,
    /// The queue was armed in a pause, by [`CqRing::listen`] or by a restore. The look at the ring that this implies
    /// was left out.
    unheard: Option<Unheard>,
}

/// Producer of a completion queue.
#[derive(Debug)]
pub(crate) struct CqRing {
    handle: u32,
    /// `true` if the queue belongs to a process, for which some opcodes and flags have another meaning (spec §9.2).
    user: bool,
    words: RingWords,
    state: Mutex<State>,
    hub: Arc<EventHub>,
}

impl CqRing {
    /// Creates the producer. `pages` is the whole object; page 0 holds the ring state.
    pub(crate) fn new(
        handle: u32,
        entries: u32,
        pages: PageList,
        user: bool,
        hub: Arc<EventHub>,
    ) -> Result<Arc<Self>, RingShapeError> {
        Self::restore(
            handle,
            SavedCqRing { entries, pages, tail: Some(0), armed: Armed::Not, unheard: None },
            user,
            hub,
        )
    }

    /// Restores the producer.
    ///
    /// # Errors
    /// The ring does not fit its pages, or the index is not one of such a ring.
    pub(crate) fn restore(
        handle: u32,
        saved: SavedCqRing,
        user: bool,
        hub: Arc<EventHub>,
    ) -> Result<Arc<Self>, RingShapeError> {
        let SavedCqRing { entries, pages, tail, armed, unheard } = saved;
        let (words, ring) = match tail {
            Some(tail) => {
                let stride = u32::try_from(CQE_SIZE).map_err(|_| RingShapeError::Elements(0))?;
                let page_count = pages.pages().saturating_sub(1);
                let shape = RingShape { pages, first_page: 1, page_count, entries, stride, words: StateWords::Rx };
                let ring = ProducerRing::new(shape)?.at(tail)?;
                (ring.words(), Some(ring))
            }
            None => {
                let no_page = RingShapeError::PageRange { first: 0, count: 1, pages: 0 };
                let (state_page, _) = pages.locate(0).ok_or(no_page)?;
                (RingWords::at(state_page, StateWords::Rx, entries), None)
            }
        };
        let state = Mutex::new(State { ring, armed, inferred: None, unheard });
        Ok(Arc::new(Self { handle, user, words, state, hub }))
    }

    /// Creates the producer of a queue that the guest has destroyed and a QP still uses.
    pub(crate) fn ended(hub: Arc<EventHub>) -> Arc<Self> {
        let state = Mutex::new(State { ring: None, armed: Armed::Not, inferred: None, unheard: None });
        Arc::new(Self { handle: u32::MAX, user: false, words: RingWords::at(0, StateWords::Rx, 1), state, hub })
    }

    /// Returns the state to be saved. `None`: the ring has more pages than a list can hold.
    ///
    /// `unheard`: the doorbells that arm the queue do not trap. The device does not know then if the guest has armed
    /// it, and saves it as [`Self::listen`] leaves it in a pause.
    pub(crate) fn save(&self, unheard: bool) -> Option<SavedCqRing> {
        let Self { handle: _, user: _, words, state, hub: _ } = self;
        let State { ring, armed, inferred, unheard: left_out } = &*state.lock();
        let (armed, unheard) = match inferred {
            Some(inferred) => (Armed::Any, Some(inferred.unheard())),
            None if unheard => (Armed::Any, Some(left_out.unwrap_or(Unheard::NEW))),
            None => (*armed, *left_out),
        };
        let mut pages = PageListBuilder::default();
        // The address was taken from a list, so a list accepts it.
        pages.push(words.state_page()).ok()?;
        let tail = match ring {
            Some(ring) => {
                let (elements, tail) = ring.save();
                pages.append(elements).ok()?;
                Some(tail)
            }
            None => None,
        };
        Some(SavedCqRing { entries: words.entries(), pages: pages.finish(), tail, armed, unheard })
    }

    /// Returns the queue's handle.
    pub(crate) const fn handle(&self) -> u32 {
        self.handle
    }

    /// Returns the location of the indices of its ring.
    pub(crate) const fn words(&self) -> RingWords {
        self.words
    }

    /// Describes the state in a word or two, without waiting for the queue's lock.
    pub(crate) fn state_word(&self) -> &'static str {
        match self.state.try_lock().as_deref() {
            None => "busy",
            Some(State { ring: None, .. }) => "dead",
            Some(State { inferred: Some(_), armed: Armed::Not, .. }) => "inferred",
            Some(State { armed: Armed::Not, .. }) => "not armed",
            Some(State { armed: Armed::Solicited, .. }) => "armed for solicited",
            Some(State { armed: Armed::Any, .. }) => "armed",
        }
    }

    /// Arms the queue. `check_not_empty` is for doorbells that are processed after the guest's write has completed: a
    /// completion may have arrived after the guest found the queue empty, so if there is one, the guest is notified at
    /// once.
    pub(crate) fn arm(&self, view: &DmaView<'_>, solicited_only: bool, check_not_empty: bool) {
        let mut state = self.state.lock();
        let State { ring, armed, .. } = &mut *state;
        if ring.is_none() {
            return;
        }
        if !solicited_only {
            *armed = Armed::Any;
        } else if *armed == Armed::Not {
            *armed = Armed::Solicited;
        }
        if check_not_empty {
            self.check(view, &mut state);
        }
    }

    /// Looks at the ring if that was left out when the queue was armed in a pause, and notifies the guest if the queue
    /// is not empty. `posted`: arming implies this look.
    ///
    /// Without `posted`, a guest that has armed the queue polls it before it waits. If it was paused before that poll,
    /// a notification now would be one for a completion that came before the queue was armed. Such a notification is
    /// permitted, but programs that count them hang: `ib_send_lat -e` takes each one for a message.
    pub(crate) fn check_after_pause(&self, view: &DmaView<'_>, posted: bool) {
        let mut state = self.state.lock();
        let left_out = state.unheard.take().is_some_and(|unheard| !unheard.announced) || posted;
        if left_out && state.armed != Armed::Not {
            self.check(view, &mut state);
        }
    }

    /// Notifies the guest if the armed queue is not empty.
    fn check(&self, view: &DmaView<'_>, state: &mut State) {
        let State { ring, armed, .. } = state;
        let Some(producer) = ring else { return };
        match producer.is_empty(view) {
            Ok(true) => {}
            Ok(false) => {
                *armed = Armed::Not;
                self.hub.notify_cq(view, self.handle);
            }
            Err(error) => self.die(view, ring, &error),
        }
    }

    /// Starts to infer notifications, because the doorbells that arm the queue may not trap from now on: the guest is
    /// notified of completions that it does not consume within a delay, at first `delay`. If notifications were
    /// inferred before the device moved, the inference continues from that state.
    pub(crate) fn infer(&self, view: &DmaView<'_>, looks: &Arc<DueLooks>, delay: u64) {
        let mut state = self.state.lock();
        let State { ring, inferred, armed, unheard } = &mut *state;
        let Some(producer) = ring.as_mut().filter(|_| inferred.is_none()) else { return };
        match producer.unconsumed(view) {
            Ok((head, count)) => {
                // The restore has armed the queue in place of inferring. Both together would notify the guest twice.
                let known = unheard.take().inspect(|_| *armed = Armed::Not);
                let known = known.unwrap_or(Unheard { delay, ..Unheard::NEW });
                *inferred = Some(Box::new(Inferred::new(self.handle, (head, count), known, Arc::clone(looks))));
            }
            Err(error) => self.die(view, ring, &error),
        }
    }

    /// Stops inferring notifications: doorbells trap from now on. An earlier one may have been missed. If the queue
    /// holds completions of which the guest was not notified, it is notified now. If it is empty, the queue is armed.
    /// If the guest was notified of all of them, nothing more is needed, because it arms the queue again after a
    /// notification. In a pause there is no `view`: the queue is armed, and [`Self::check_after_pause`] follows.
    pub(crate) fn listen(&self, view: Option<&DmaView<'_>>) {
        let mut state = self.state.lock();
        let State { ring, armed, inferred, unheard } = &mut *state;
        let (Some(producer), Some(inferred)) = (ring.as_mut(), inferred.take()) else { return };
        let Some(view) = view else {
            (*armed, *unheard) = (Armed::Any, Some(Unheard::NEW));
            return;
        };
        match producer.unconsumed(view) {
            Ok((_, count)) if count > 0 && !inferred.is_announced() => {
                *armed = Armed::Not;
                self.hub.notify_cq(view, self.handle);
            }
            Ok(_) => *armed = Armed::Any,
            Err(error) => self.die(view, ring, &error),
        }
    }

    /// Checks for unconsumed completions when a look is due.
    pub(crate) fn look(&self, view: &DmaView<'_>, now: u64) {
        let mut state = self.state.lock();
        let State { ring, armed, inferred, .. } = &mut *state;
        let (Some(producer), Some(inferred)) = (ring.as_mut(), inferred) else { return };
        match producer.unconsumed(view) {
            Ok((head, count)) => {
                if inferred.looked(head, count, now) {
                    *armed = Armed::Not;
                    self.hub.notify_cq(view, self.handle);
                }
            }
            Err(error) => self.die(view, ring, &error),
        }
    }

    /// Makes the queue inert: when this returns its pages are no longer accessed and no notification is sent for it.
    pub(crate) fn shut(&self) {
        let mut state = self.state.lock();
        (state.ring, state.inferred) = (None, None);
    }

    /// Ends the queue after an overrun or an invalid index (spec §9.6, §6.6).
    fn die(&self, view: &DmaView<'_>, ring: &mut Option<ProducerRing>, reason: &dyn std::fmt::Display) {
        self.hub.warn(module_path!(), format_args!("completion queue {:#x} is dead: {reason}", self.handle));
        *ring = None;
        self.hub.post(view, Eqe { kind: eqe::CQ_ERR, info: self.handle });
    }

    /// Encodes the entry as words, which can stay in registers until they are written.
    #[inline]
    fn entry(&self, completion: &Completion) -> [u64; CQE_SIZE / 8] {
        let Completion { wr_id, qp, opcode, status, byte_len, .. } = *completion;
        let mut cqe = Cqe {
            wr_id,
            qp: u64::from(qp & 0xffff),
            opcode: self.opcode(opcode),
            status: status as u32,
            byte_len,
            src_qp: completion.src_qpn.get(),
            sl: completion.service_level,
            port_num: 1,
            ..Cqe::default()
        };
        if completion.flags.contains(WcFlags::GRH) {
            cqe.wc_flags |= wc_flag::GRH;
        }
        if completion.flags.contains(WcFlags::IMMEDIATE) {
            cqe.wc_flags |= wc_flag::WITH_IMM;
            cqe.imm_data = completion.immediate;
        } else if completion.flags.contains(WcFlags::INVALIDATED) && !self.user {
            cqe.wc_flags |= wc_flag::WITH_INVALIDATE;
            cqe.imm_data = completion.invalidated_key.to_le_bytes();
        }
        if let (Some(network), false) = (completion.network, self.user) {
            cqe.wc_flags |= wc_flag::WITH_NETWORK_HDR_TYPE;
            cqe.network_hdr_type = match network {
                NetworkType::RoceV1 => 0,
                NetworkType::Ipv4 => 1,
                NetworkType::Ipv6 => 2,
            };
        }
        let mut out = [0; CQE_SIZE];
        cqe.encode(&mut out);
        let (words, []) = out.as_chunks() else { unreachable!("an entry consists of words") };
        std::array::from_fn(|i| u64::from_ne_bytes(words[i]))
    }

    const fn opcode(&self, opcode: WcOpcode) -> u32 {
        match opcode {
            WcOpcode::Send => wc_opcode::SEND,
            WcOpcode::RdmaWrite => wc_opcode::RDMA_WRITE,
            WcOpcode::RdmaRead => wc_opcode::RDMA_READ,
            WcOpcode::CompareSwap => wc_opcode::COMP_SWAP,
            WcOpcode::FetchAdd => wc_opcode::FETCH_ADD,
            // The user library has no such operations and uses these numbers for others.
            WcOpcode::LocalInvalidate | WcOpcode::FastRegister if self.user => wc_opcode::SEND,
            WcOpcode::LocalInvalidate => wc_opcode::LOCAL_INV,
            WcOpcode::FastRegister => wc_opcode::FAST_REG_MR,
            WcOpcode::Recv => wc_opcode::RECV,
            WcOpcode::RecvRdmaWithImmediate => wc_opcode::RECV_RDMA_WITH_IMM,
        }
    }
}

impl CompletionSink for CqRing {
    fn complete(&self, view: &DmaView<'_>, completion: &Completion) -> Result<(), CqOverrun> {
        match self.complete_all(view, std::slice::from_ref(completion)) {
            0 => Err(CqOverrun),
            _ => Ok(()),
        }
    }

    /// Publishes the entries, then the index, then the notification ring, then the interrupt (spec §6.5). The lock is
    /// held throughout, so that arming once leads to one notification and [`CqRing::shut`] waits for both.
    fn complete_all(&self, view: &DmaView<'_>, completions: &[Completion]) -> usize {
        let mut state = self.state.lock();
        let State { ring, armed, inferred, .. } = &mut *state;
        let Some(producer) = ring else { return 0 };
        let mut published = 0;
        let mut wanted = false;
        let end = loop {
            let Some(completion) = completions.get(published) else { break Ok(()) };
            match producer.write(view, &self.entry(completion)) {
                Ok(true) => published += 1,
                Ok(false) => break Err(None),
                Err(error) => break Err(Some(error)),
            }
            wanted |= armed.wants(completion);
        };
        if published > 0
            && let Err(error) = producer.publish(view)
        {
            self.die(view, ring, &error);
            return 0;
        }
        if published > 0
            && let Some(inferred) = inferred
        {
            // An invalid consumer index does not end the queue here, but where the index is needed: at the latest when
            // it is full.
            if let Ok((head, unconsumed)) = producer.unconsumed(view) {
                wanted |= inferred.published(head, u32::try_from(published).unwrap_or(u32::MAX), unconsumed);
            }
        }
        if wanted {
            *armed = Armed::Not;
            self.hub.notify_cq(view, self.handle);
        }
        match end {
            Ok(()) => {}
            Err(None) => self.die(view, ring, &CqOverrun),
            Err(Some(error)) => self.die(view, ring, &error),
        }
        published
    }

    fn overrun(&self, view: &DmaView<'_>) {
        let mut state = self.state.lock();
        if state.ring.is_some() {
            self.die(view, &mut state.ring, &CqOverrun);
        }
    }
}

#[cfg(test)]
mod tests;
