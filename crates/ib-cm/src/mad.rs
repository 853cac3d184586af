//! Management datagrams of the connection manager's class (IBA 13.4.2).

use pvrdma_packet::field::{field, put};
use thiserror::Error;

use crate::message::Message;
use crate::req::BODY_LEN;

/// Length of a management datagram.
pub const MAD_LEN: usize = 256;
/// Length of its header.
const HEADER_LEN: usize = MAD_LEN - BODY_LEN;

const BASE_VERSION: u8 = 1;
/// Management class of the connection manager, which service ID resolution shares.
pub const CLASS: u8 = 7;
/// Version of the class.
pub const CLASS_VERSION: u8 = 2;
/// The only method of the class.
pub const METHOD_SEND: u8 = 3;

/// Returns `true` if bytes are a complete management datagram of the connection manager or of service ID resolution,
/// which have the same class. Checks length, base version, class, class version and method.
pub fn is_connection_manager(mad: &[u8]) -> bool {
    mad.len() == MAD_LEN && mad.starts_with(&[BASE_VERSION, CLASS, CLASS_VERSION, METHOD_SEND])
}

/// Reason why bytes are not a message of a connection.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Error)]
pub enum MadError {
    /// Another class, version or length.
    #[error("not a datagram of the connection manager")]
    Class,
    /// A message that connections do not use.
    #[error("attribute {0:#06x} of the connection manager")]
    Attribute(u16),
}

/// A message with the transaction that it belongs to.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Mad {
    /// Transaction ID: replies have that of the request.
    pub transaction: u64,
    /// The message.
    pub message: Message,
}

impl Mad {
    /// Decodes a datagram. Reserved bits are ignored.
    ///
    /// # Errors
    /// It is not a message of a connection.
    pub fn parse(bytes: &[u8]) -> Result<Self, MadError> {
        if !is_connection_manager(bytes) {
            return Err(MadError::Class);
        }
        let (Some((header, _)), Some(body)) = (bytes.split_first_chunk::<HEADER_LEN>(), bytes.last_chunk()) else {
            return Err(MadError::Class);
        };
        let attribute = u16::from_be_bytes(field::<16, _, _>(header));
        let message = Message::from_bytes(attribute, body).ok_or(MadError::Attribute(attribute))?;
        Ok(Self { transaction: u64::from_be_bytes(field::<8, _, _>(header)), message })
    }

    /// Encodes the datagram.
    pub fn to_bytes(&self) -> [u8; MAD_LEN] {
        let mut bytes = [0; MAD_LEN];
        put::<0, _, _>(&mut bytes, [BASE_VERSION, CLASS, CLASS_VERSION, METHOD_SEND]);
        put::<8, _, _>(&mut bytes, self.transaction.to_be_bytes());
        put::<16, _, _>(&mut bytes, self.message.attribute().to_be_bytes());
        put::<HEADER_LEN, BODY_LEN, _>(&mut bytes, self.message.to_bytes());
        bytes
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::message::Rtu;

    fn mad() -> Mad {
        let rtu = Rtu { local_id: 1, remote_id: 2, private_data: [3; 224] };
        Mad { transaction: 0x0102_0304_0506_0708, message: Message::Rtu(rtu) }
    }

    #[test]
    fn what_was_encoded_is_decoded() {
        let bytes = mad().to_bytes();
        assert_eq!(bytes[..24], *b"\x01\x07\x02\x03\0\0\0\0\x01\x02\x03\x04\x05\x06\x07\x08\0\x14\0\0\0\0\0\0");
        assert_eq!(Mad::parse(&bytes), Ok(mad()));
    }

    #[test]
    fn other_classes_lengths_and_attributes_are_refused() {
        let good = mad().to_bytes();
        for length in (0..MAD_LEN).chain([MAD_LEN + 1]) {
            let mut bytes = good.to_vec();
            bytes.resize(length, 0);
            assert_eq!(Mad::parse(&bytes), Err(MadError::Class));
        }
        for at in 0..4 {
            let mut bytes = good;
            bytes[at] ^= 0x80;
            assert_eq!(Mad::parse(&bytes), Err(MadError::Class));
        }
        for attribute in [0, 0x0f, 0x17, 0x18, 0x19, 0x1a, 0x1b, 0xff10] {
            let mut bytes = good;
            put::<16, _, _>(&mut bytes, u16::to_be_bytes(attribute));
            assert_eq!(Mad::parse(&bytes), Err(MadError::Attribute(attribute)));
        }
    }
}
