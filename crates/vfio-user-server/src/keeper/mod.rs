//! The keeper: the process of a device that receives the descriptors of its clients.
//!
//! To refuse a descriptor is to close it, and `close` of a file on a FUSE file system waits until the server of that
//! file system answers, even in a process that was killed. The process of a network must not be made to wait like
//! that. So it never receives a client's descriptor: it looks at each message before it takes it
//! ([`MSG_PEEK`](rustix::net::RecvFlags::PEEK) without room for descriptors installs none), and leaves those that carry
//! some to the keeper. The keeper has a duplicate of the client's socket. It takes such a message, examines what came
//! with it, closes what is refused, and passes on the bytes and the descriptors that are taken. If it does not answer
//! in time, the client's connection ends, and the supervisor kills the keeper and starts another one.
//!
//! [`process`] is the keeper's loop, [`client`] the end of the process that serves the device, which is called the
//! worker here. Both take a message's bytes and descriptors from a socket with the same code (`receive`); `wire` has
//! the messages between the two.

pub mod client;
pub mod process;
pub(crate) mod receive;
mod wire;
