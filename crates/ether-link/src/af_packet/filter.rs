//! Socket filter of packet sockets: a classic BPF program that checks the tag and the destination.

use libc::sock_filter;
use pvrdma_packet::MacAddr;

/// Maximum number of addresses of a socket. It keeps the program below the limit of every kernel (4096 instructions).
pub const MAX_ADDRESSES: usize = 256;

const RETURN: u32 = libc::BPF_RET | libc::BPF_K;
const EQUAL: u32 = libc::BPF_JMP | libc::BPF_JEQ | libc::BPF_K;
const ANY_BIT: u32 = libc::BPF_JMP | libc::BPF_JSET | libc::BPF_K;
const AND: u32 = libc::BPF_ALU | libc::BPF_AND | libc::BPF_K;
const LOAD_BYTE: u32 = libc::BPF_LD | libc::BPF_B | libc::BPF_ABS;
const LOAD_HALF: u32 = libc::BPF_LD | libc::BPF_H | libc::BPF_ABS;
const LOAD_WORD: u32 = libc::BPF_LD | libc::BPF_W | libc::BPF_ABS;

/// VLAN identifier in a tag.
const VID: u32 = 0xfff;

/// VLANs of an interface whose frames are received.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum VlanFilter {
    /// All VLANs, and frames without a tag.
    #[default]
    All,
    /// Only frames outside any VLAN: without a tag, or with one for the priority alone.
    Untagged,
    /// Only frames with the tag of this VLAN, 1 to 4094.
    Tagged(u16),
}

fn step(code: u32, (jt, jf): (u8, u8), k: u32) -> sock_filter {
    sock_filter { code: u16::try_from(code).unwrap_or(0), jt, jf, k }
}

const NEXT: (u8, u8) = (0, 0);

/// Returns the program: it accepts frames to groups and to `addresses`, in the VLANs of `vlan`. Without addresses it
/// accepts none.
pub(super) fn program(addresses: &[MacAddr], vlan: VlanFilter) -> Vec<sock_filter> {
    let (pass, drop) = (step(RETURN, NEXT, u32::MAX), step(RETURN, NEXT, 0));
    if addresses.is_empty() {
        return vec![drop];
    }
    // The kernel removes the tag before the filter sees the frame, and provides it as ancillary data.
    let auxiliary = |what: i32| step(LOAD_WORD, NEXT, (libc::SKF_AD_OFF + what).cast_unsigned());
    let (tagged, tag) = (auxiliary(libc::SKF_AD_VLAN_TAG_PRESENT), auxiliary(libc::SKF_AD_VLAN_TAG));
    let mut program = match vlan {
        VlanFilter::All => Vec::new(),
        VlanFilter::Untagged => {
            vec![tagged, step(EQUAL, (4, 0), 0), tag, step(AND, NEXT, VID), step(EQUAL, (1, 0), 0), drop]
        }
        VlanFilter::Tagged(vid) => {
            vec![tagged, step(EQUAL, (3, 0), 0), tag, step(AND, NEXT, VID), step(EQUAL, (1, 0), vid.into()), drop]
        }
    };
    program.extend([step(LOAD_BYTE, NEXT, 0), step(ANY_BIT, (0, 1), 1), pass]);
    for &MacAddr([a, b, c, d, e, f]) in addresses {
        program.extend([
            step(LOAD_WORD, NEXT, 0),
            step(EQUAL, (0, 3), u32::from_be_bytes([a, b, c, d])),
            step(LOAD_HALF, NEXT, 4),
            step(EQUAL, (0, 1), u32::from_be_bytes([0, 0, e, f])),
            pass,
        ]);
    }
    program.push(drop);
    program
}

/// Returns the program that passes only frames from `mac` to itself.
pub(super) fn to_itself(MacAddr([a, b, c, d, e, f]): MacAddr) -> Vec<sock_filter> {
    let (high, low) = (u32::from_be_bytes([a, b, c, d]), u32::from_be_bytes([0, 0, e, f]));
    vec![
        step(LOAD_WORD, NEXT, 0),
        step(EQUAL, (0, 7), high),
        step(LOAD_HALF, NEXT, 4),
        step(EQUAL, (0, 5), low),
        step(LOAD_WORD, NEXT, 6),
        step(EQUAL, (0, 3), high),
        step(LOAD_HALF, NEXT, 10),
        step(EQUAL, (0, 1), low),
        step(RETURN, NEXT, u32::MAX),
        step(RETURN, NEXT, 0),
    ]
}
