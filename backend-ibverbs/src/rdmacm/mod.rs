//! Objects of `librdmacm` as owning types. Dropping one destroys it; each keeps the objects that it was created from
//! alive.
//!
//! All unsafe calls of the library are in the files of this folder. They are sound for the same reason everywhere: a
//! pointer that the library returned is valid until its object is destroyed, objects are destroyed only by `drop`, and
//! the library's functions may be called from any thread (`man 7 rdma_cm`). An event is acknowledged before
//! [`EventChannel::next_event`] returns, so destroying an identifier does not wait for one.

mod address;
mod channel;
mod event;
mod id;
mod libraries;

pub(crate) use channel::EventChannel;
pub(crate) use event::{HostEvent, HostEventKind};
pub(crate) use id::CmId;
pub(crate) use libraries::Libraries;
