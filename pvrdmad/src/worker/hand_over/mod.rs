//! Hand-over of a network from one worker to the next one, under running VMs.
//!
//! The supervisor starts the next worker, describes the network and its devices to it, and connects the two workers by
//! a socket pair. The first worker is the giver, the next one the taker.
//!
//! | step | giver | taker |
//! | --- | --- | --- |
//! | 1 | holds its clients, whose messages wait in their sockets, and pauses its functions | |
//! | 2 | sends for each function the client's connection and the saved state | restores the function, maps the memory |
//! | 3 | | answers that it is ready, or the reason why not |
//! | 4 | gives its clients away, permits the taker to start, and ends | |
//! | 5 | | resumes the functions and serves the clients |
//!
//! Until step 4 the giver can resume its functions and serve its clients again. It does so after every error and after
//! a timeout, and then nothing has changed for the guests. From step 4 on, only the taker can.
//!
//! The taker treats everything that it receives as hostile, because a guest may have taken control of the giver: it
//! checks states like commands of a guest, and connections like messages of a client. A giver can therefore harm only
//! its own network.

mod give;
mod take;
mod wire;

pub(super) use self::give::{GivenFunction, give};
pub(super) use self::take::{Arrivals, Expected};
