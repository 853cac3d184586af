//! Captures: the daemon streams a device's traffic through the control socket ([`stream`]), and the client writes it to
//! a file ([`client`]). The daemon therefore opens no file for a client, and access to the control socket is the
//! permission to capture.

pub mod client;
mod filter;
mod pcapng;
pub(crate) mod stream;
