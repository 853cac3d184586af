//! Captures: the daemon streams what it sees of a device through the control socket ([`stream`]), the other side writes
//! it to a file ([`client`]). So the daemon opens no file for anybody, and who may open the control socket may capture.

pub mod client;
mod pcapng;
pub(crate) mod stream;
