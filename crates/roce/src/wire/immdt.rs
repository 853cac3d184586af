//! Immediate data (IBA 9.3.7).

/// Immediate data extended transport header: four bytes that the receiver's consumer finds in its completion, in the
/// order in which they were in the memory of the sender's consumer.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Default)]
pub struct ImmDt(pub [u8; 4]);
