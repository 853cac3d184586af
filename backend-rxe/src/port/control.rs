//! Frames to the other end of the Ethernet link, which bridges do not forward (IEEE 802.1Q, 8.6.3).
//!
//! A switch takes them for frames of its neighbour, which is the host. A pause stops the port of the host, a frame of
//! the spanning tree may block it, and a wrong one of link aggregation takes it out of its group. A port of a bridge
//! therefore does not pass on such frames. Switches of Cisco have two more addresses, for the same purposes.

/// Address of pauses (IEEE 802.3, annex 31B) and of priority flow control.
const PAUSE: [u8; 6] = [1, 0x80, 0xc2, 0, 0, 1];

/// Returns `true` if a frame is for the other end of the link. `bridge`: the guest may be a bridge, which speaks to
/// other bridges. It does not pause the link either.
pub(super) fn is_control(frame: &[u8], bridge: bool) -> bool {
    match frame.first_chunk() {
        Some(&PAUSE) => true,
        Some([1, 0x80, 0xc2, 0, 0, 0..=0x0f] | [1, 0, 0x0c, 0xcc, 0xcc, 0xcc | 0xcd]) => !bridge,
        _ => false,
    }
}
