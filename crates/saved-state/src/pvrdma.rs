//! Messages of the RDMA function: registers, session, rings and objects. Kinds `0x01xx`.

use crate::record::records;

records! {}
