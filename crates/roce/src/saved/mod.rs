//! Saving and restoring the halves of a connection, and the work requests that they hold.
//!
//! [`Requester::save`](crate::Requester::save) and its like return messages of `pvrdma-saved-state`. Each takes its
//! struct apart with a pattern that names all fields, so a new field does not compile until it is saved or dropped
//! explicitly.
//!
//! The `restore` functions take messages from untrusted sources. They check each value that later code relies on, and
//! the relations between values. A state that passes these checks can still be wrong, as a peer can be; it then harms
//! only its own connection.

mod fields;
mod work;

pub use fields::RestoreError;
pub(crate) use fields::{agreement, ensure, failure, invalid, message_length, msn, narrow, port, psn};
pub use work::{restore_pages, restore_receive, restore_send, save_pages, save_receive, save_send};
