//! Interface to the guest: constants and layouts, without behaviour. Section numbers are those of the interface
//! specification.

mod attr;
pub(crate) mod cmd;
pub(crate) mod dsr;
pub(crate) mod layout;
pub(crate) mod regs;
pub(crate) mod ring;
pub(crate) mod wqe;
