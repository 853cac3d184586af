//! Any bytes as a datagram, and scripts for a connection: messages of a peer with right and wrong IDs, decisions of the
//! owner, and time.
#![no_main]

use std::time::Duration;

use libfuzzer_sys::fuzz_target;
use pvrdma_ib_cm::{
    Connection, Event, IpAddresses, MAD_LEN, Mad, Message, RejectReason, Rep, Req, State, answer_without_connection,
};
use pvrdma_verbs_types::Qpn;

/// IDs of the two ends, and QPs.
const HERE: u32 = 0x22;
const THERE: u32 = 0x11;
const TRANSACTION: u64 = 7;

/// Decodes the bytes, and checks that encoding the message again preserves its meaning.
fn look(bytes: &[u8]) -> Option<Mad> {
    let mad = Mad::parse(bytes).ok()?;
    let again = mad.to_bytes();
    assert_eq!(Mad::parse(&again).as_ref(), Ok(&mad));
    if let Message::Req(req) = &mad.message
        && let Some(addresses) = req.private_data.first_chunk().and_then(IpAddresses::from_bytes)
    {
        let bytes = addresses.to_bytes().expect("both are of one kind");
        assert_eq!(IpAddresses::from_bytes(&bytes), Some(addresses));
    }
    if let Some(answer) = answer_without_connection(&mad) {
        assert!(Mad::parse(&answer).is_ok());
    }
    Some(mad)
}

/// A message: the script has its attribute, whether IDs are right, and up to 16 bytes behind the IDs.
fn message(script: &mut &[u8]) -> Option<Mad> {
    let (&[attribute, ids], rest) = script.split_first_chunk()?;
    let (fields, rest) = rest.split_at(rest.len().min(16));
    *script = rest;
    let mut bytes = [0; MAD_LEN];
    bytes[..4].copy_from_slice(&[1, 7, 2, 3]);
    bytes[8..16].copy_from_slice(&(TRANSACTION + u64::from(ids & 1)).to_be_bytes());
    bytes[17] = 0x10 + attribute % 7;
    bytes[24..28].copy_from_slice(&(THERE + u32::from(ids >> 1 & 1)).to_be_bytes());
    if bytes[17] != 0x10 {
        bytes[28..32].copy_from_slice(&(HERE + u32::from(ids >> 2 & 1)).to_be_bytes());
    }
    bytes[32..32 + fields.len()].copy_from_slice(fields);
    if ids & 8 != 0 {
        // The QP of this end, for a DREQ.
        bytes[32..35].copy_from_slice(&[0, 0, 0x22]);
    }
    look(&bytes)
}

fn play(input: &[u8]) {
    let Some((&role, mut script)) = input.split_first() else { return };
    let mut now = Duration::from_secs(1);
    let qpn = Qpn::new(HERE);
    let mut end = if role & 1 == 0 {
        Connection::outgoing(now, TRANSACTION, Req { local_id: HERE, qpn, ..Req::default() })
    } else {
        Connection::incoming(now, HERE, TRANSACTION, Req { local_id: THERE, ..Req::default() })
    };
    let mut established = 0;
    while let Some((&step, rest)) = script.split_first() {
        script = rest;
        let event = match step % 10 {
            0..=3 => message(&mut script).and_then(|mad| end.handle_message(now, &mad)),
            4 => {
                now = end.poll_timeout().unwrap_or(now);
                end.handle_timeout(now)
            }
            5 => {
                now += Duration::from_millis(u64::from(step) * 20);
                end.handle_timeout(now)
            }
            6 => {
                end.accept(now, Rep { qpn, ..Rep::default() });
                None
            }
            7 => {
                let before = end.state();
                end.confirm();
                established += u32::from(before == State::RepReceived);
                None
            }
            8 => {
                end.reject(now, RejectReason(step.into()), input);
                None
            }
            _ if step & 0x80 == 0 => {
                end.disconnect(now);
                None
            }
            _ => {
                established += u32::from(end.data_arrived());
                None
            }
        };
        established += u32::from(event == Some(Event::Established));
        assert!(established <= 1);
        let settled = matches!(end.state(), State::Established | State::Done);
        assert_eq!(end.poll_timeout().is_none(), settled, "{:?}", end.state());
        if let Some(bytes) = end.poll_transmit() {
            assert!(look(&bytes).is_some() && end.poll_transmit().is_none());
        }
    }
}

fuzz_target!(|input: &[u8]| {
    look(input);
    let mut helped = input.to_vec();
    helped.resize(MAD_LEN, 0);
    helped[..4].copy_from_slice(&[1, 7, 2, 3]);
    helped[16] = 0;
    helped[17] = 0x10 + helped[17] % 7;
    assert!(look(&helped).is_some());
    play(input);
});
