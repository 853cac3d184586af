//! Messages of the network function: registers, session, rings and filters. Kinds `0x04xx`.

use crate::record::records;

records! {}
