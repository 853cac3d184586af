//! Messages of the RoCE engine: the two halves of a connected queue pair. Kinds `0x03xx`.

use crate::record::records;

records! {}
