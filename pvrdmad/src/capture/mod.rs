//! The command `capture`: a worker streams a device's traffic through the control socket, and the client writes it to a
//! file ([`client`]). The daemon therefore opens no file for a client, and access to the control socket is the
//! permission to capture.

pub mod client;
mod filter;
