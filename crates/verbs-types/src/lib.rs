//! Values of RDMA verbs: work requests and completions, queue-pair attributes and states, and the numbers in them.
//!
//! Consumers, adapters and transport protocols share these types and the queue-pair transition table ([`qp_state`]).
//! The types hold no pointer into guest memory and no handle of the operating system; the crate is `no_std`, so that a
//! protocol implementation does not get I/O, threads or clocks through it. A transport protocol reaches memory, queues
//! and the consumer of a queue pair through [`RequesterOps`] and [`ResponderOps`].
//!
//! The traits that pass these values between a device and an adapter are in `pvrdma-verbs`.
//!
//! # Example
//!
//! An adapter checks a modify request before it applies it:
//!
//! ```
//! use pvrdma_verbs_types::{QpAttrMask, QpAttrs, QpState, QpTransitionError, QpType, qp_state};
//!
//! let mut current = QpAttrs::default();
//! let new = QpAttrs { state: QpState::Init, port_num: 1, ..QpAttrs::default() };
//! let mask = QpAttrMask::STATE | QpAttrMask::PKEY_INDEX | QpAttrMask::PORT | QpAttrMask::ACCESS_FLAGS;
//!
//! qp_state::check(QpType::Rc, current.state, new.state, mask)?;
//! new.check(mask, 16).unwrap();
//! current.merge(&new, mask);
//! current.state = new.state;
//!
//! // A connected QP needs a path before it can receive.
//! let refused = qp_state::check(QpType::Rc, current.state, QpState::Rtr, QpAttrMask::STATE);
//! assert!(matches!(refused, Err(QpTransitionError::Missing { .. })));
//! # Ok::<(), QpTransitionError>(())
//! ```

#![cfg_attr(not(test), no_std)]

extern crate alloc;

mod attrs;
mod error;
mod ops;
pub mod qp_state;
mod types;
mod work;

pub use attrs::{AddressVector, QpAttrMask, QpAttrs, QpCaps};
pub use error::{InvalidAttribute, QpTransitionError};
pub use ops::{AccessError, AtomicChange, NakReason, Received, RequesterOps, ResponderOps};
pub use types::{Access, Gid, GidType, InvalidValue, Mtu, NetworkType, PortState, Psn, QpState, QpType, Qpn};
pub use work::{
    Completion, FastRegister, Invalidate, MAX_MESSAGE, RecvWr, RemoteAddress, SendData, SendFlags, SendOp, SendWr, Sge,
    UdDestination, WcFlags, WcOpcode, WcStatus,
};
