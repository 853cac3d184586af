//! Saving and restoring a responder.

use pvrdma_saved_state::roce as saved;
use pvrdma_verbs_types::{Mtu, QpAttrs, RemoteAddress};

use super::responses::Response;
use super::{Message, NakSent, Resource, Responder, ResponderStats, Sack};
use crate::path::{Path, packets};
use crate::saved::{RestoreError, agreement, ensure, invalid, message_length, msn, port, psn};
use crate::wire::Reth;

/// Largest number of responder resources. A QP has at most 255; the attribute has eight bits.
const MAX_RESOURCES: usize = 255;
/// Largest number of saved responses: a new and a repeated one for each resource, and an ACK or NAK between each two.
const MAX_RESPONSES: usize = 4 * MAX_RESOURCES + 1;

impl Responder {
    /// Saves the responder. Attributes and path are the caller's to save, and so is the receive in use. Packets that
    /// the caller keeps after [`Self::expected_psn`] are not saved: the peer sends them once more.
    pub fn save(&self) -> saved::Responder {
        let Self {
            path: _,
            remote: _,
            attrs: _,
            expected,
            msn,
            message,
            nak_sent,
            ack_psn,
            ack_msn,
            has_sent_nak,
            unacked_duplicate,
            peer_goes_back,
            responses,
            resources,
            sack,
            icrc: _,
            follows,
            peer_port,
            entropy: _,
            received: _,
            has_forgotten: _,
            ended,
            ident: _,
            stats,
        } = self;
        saved::Responder {
            expected: expected.get(),
            msn: *msn,
            message: message.map(save_message),
            nak_sent: save_nak_sent(*nak_sent).into(),
            ack_psn: ack_psn.get(),
            ack_msn: *ack_msn,
            has_sent_nak: *has_sent_nak,
            unacked_duplicate: unacked_duplicate.map(|psn| psn.get()),
            peer_goes_back: *peer_goes_back,
            responses: responses.iter().map(Response::save).collect(),
            resources: resources.iter().map(save_resource).collect(),
            sack: save_sack(*sack).into(),
            follows: *follows,
            peer_port: peer_port.map(u32::from),
            ended: *ended,
            stats: Some(save_stats(stats)),
        }
    }

    /// Restores a responder in a connection with these attributes, which the caller has checked. Call
    /// [`Self::poll_transmit`] then. A peer that agreed on selective acknowledgements is told that no packets are kept,
    /// and goes back without waiting for its ACK timeout.
    ///
    /// # Errors
    /// The state is not one that a responder can be in.
    pub fn restore(attrs: &QpAttrs, path: Path, state: saved::Responder) -> Result<Self, RestoreError> {
        let saved::Responder {
            expected,
            msn: messages,
            message,
            nak_sent,
            ack_psn,
            ack_msn,
            has_sent_nak,
            unacked_duplicate,
            peer_goes_back,
            responses,
            resources,
            sack,
            follows,
            peer_port,
            ended,
            stats,
        } = state;
        if responses.len() > MAX_RESPONSES {
            return Err(RestoreError::TooMany { elements: "responses", most: MAX_RESPONSES });
        }
        if resources.len() > MAX_RESOURCES {
            return Err(RestoreError::TooMany { elements: "responder resources", most: MAX_RESOURCES });
        }
        let mut this = Self {
            expected: psn("expected PSN", expected)?,
            msn: msn(messages)?,
            message: message.map(restore_message).transpose()?,
            nak_sent: restore_nak_sent(nak_sent)?,
            ack_psn: psn("acknowledged PSN", ack_psn)?,
            ack_msn: msn(ack_msn)?,
            has_sent_nak,
            unacked_duplicate: unacked_duplicate.map(|duplicate| psn("PSN of a duplicate", duplicate)).transpose()?,
            peer_goes_back,
            responses: responses.into_iter().map(Response::restore).collect::<Result<_, _>>()?,
            resources: resources
                .into_iter()
                .map(|resource| restore_resource(resource, attrs.path_mtu))
                .collect::<Result<_, _>>()?,
            sack: restore_sack(sack)?,
            follows,
            peer_port: port(peer_port)?,
            ended,
            stats: stats.map(restore_stats).unwrap_or_default(),
            ..Self::new(attrs, path)
        };
        ensure(!ended || this.message.is_none(), "a responder has ended inside a message")?;
        this.forget_received();
        Ok(this)
    }

    /// Bytes of the SEND in progress that are in the receive in use. `None`: no SEND is in progress, and the next one
    /// takes a receive. A caller that restores a responder checks that the receive exists and is long enough.
    pub const fn bytes_in_receive(&self) -> Option<u32> {
        match self.message {
            Some(Message::Send { done }) => Some(done),
            Some(Message::Write { .. }) | None => None,
        }
    }
}

const fn save_message(message: Message) -> saved::Message {
    match message {
        Message::Send { done } => saved::Message::Send(done),
        Message::Write { next: RemoteAddress { addr, rkey }, left, length } => {
            saved::Message::Write(saved::WriteInProgress { addr, rkey, left, length })
        }
    }
}

fn restore_message(message: saved::Message) -> Result<Message, RestoreError> {
    match message {
        saved::Message::Send(done) => Ok(Message::Send { done: message_length(done)? }),
        saved::Message::Write(saved::WriteInProgress { addr, rkey, left, length }) => {
            let length = message_length(length)?;
            ensure(left > 0 && left < length, "the rest of a WRITE is not a part of it")?;
            Ok(Message::Write { next: RemoteAddress { addr, rkey }, left, length })
        }
    }
}

const fn save_nak_sent(sent: NakSent) -> saved::NakSent {
    match sent {
        NakSent::None => saved::NakSent::None,
        NakSent::Sequence => saved::NakSent::Sequence,
        NakSent::Rnr => saved::NakSent::Rnr,
    }
}

fn restore_nak_sent(sent: i32) -> Result<NakSent, RestoreError> {
    match saved::NakSent::try_from(sent) {
        Ok(saved::NakSent::None) => Ok(NakSent::None),
        Ok(saved::NakSent::Sequence) => Ok(NakSent::Sequence),
        Ok(saved::NakSent::Rnr) => Ok(NakSent::Rnr),
        Err(_) => Err(invalid("kind of NAK", sent.cast_unsigned())),
    }
}

const fn save_sack(sack: Sack) -> saved::Agreement {
    match sack {
        Sack::Off => saved::Agreement::Off,
        Sack::Ready => saved::Agreement::Open,
        Sack::On => saved::Agreement::On,
    }
}

fn restore_sack(sack: i32) -> Result<Sack, RestoreError> {
    Ok(match agreement(sack)? {
        saved::Agreement::Off => Sack::Off,
        saved::Agreement::Open => Sack::Ready,
        saved::Agreement::On => Sack::On,
    })
}

fn save_resource(resource: &Resource) -> saved::Resource {
    let (psn, executed) = match *resource {
        // The number of PSNs follows from the length.
        Resource::Read { first, count: _, reth: Reth { address: addr, rkey, length } } => {
            (first, saved::Executed::Read(saved::ReadRange { addr, rkey, length }))
        }
        Resource::Atomic { psn, original } => (psn, saved::Executed::Atomic(original)),
    };
    saved::Resource { psn: psn.get(), executed: Some(executed) }
}

fn restore_resource(resource: saved::Resource, mtu: Mtu) -> Result<Resource, RestoreError> {
    let saved::Resource { psn: first, executed } = resource;
    let first = psn("PSN of a responder resource", first)?;
    Ok(match executed.ok_or(RestoreError::Missing { field: "operation of a responder resource" })? {
        saved::Executed::Read(saved::ReadRange { addr: address, rkey, length }) => {
            let length = message_length(length)?;
            Resource::Read { first, count: packets(length, mtu), reth: Reth { address, rkey, length } }
        }
        saved::Executed::Atomic(original) => Resource::Atomic { psn: first, original },
    })
}

const fn save_stats(stats: &ResponderStats) -> saved::ResponderStats {
    let ResponderStats { executed, duplicates, out_of_sequence, not_ready, refused, responses, without_icrc: _ } =
        *stats;
    saved::ResponderStats { executed, duplicates, out_of_sequence, not_ready, refused, responses }
}

const fn restore_stats(stats: saved::ResponderStats) -> ResponderStats {
    let saved::ResponderStats { executed, duplicates, out_of_sequence, not_ready, refused, responses } = stats;
    ResponderStats { executed, duplicates, out_of_sequence, not_ready, refused, responses, without_icrc: 0 }
}
