//! The exchange of the program `rping`, in both roles. The client names a buffer with data, which the server reads, and
//! then a buffer for data, into which the server writes the data that it has read. The client compares both.

use anyhow::{Context, Result, ensure};
use pvrdma_verbs_types::{RemoteAddress, WcStatus};

use super::IwarpPeer;

/// Length of a message: address (8), key (4) and length (4) of a buffer.
const MESSAGE: usize = 16;
/// Places in the memory: messages that arrive and leave, and the two buffers.
const ARRIVES: usize = 0;
const LEAVES: usize = 64;
const START: usize = 4096;

/// Size of the memory that an exchange with buffers of this length needs.
pub(crate) const fn memory(length: usize) -> usize {
    START + 2 * length
}

/// Performs exchanges as the client, and compares the data.
pub(crate) fn client(peer: &mut IwarpPeer, length: usize, count: u8) -> Result<()> {
    let target = START + length;
    for number in 0..count {
        let data = pattern(length, number)?;
        peer.memory(START, length)?.copy_from_slice(&data);
        peer.memory(target, length)?.fill(0);
        for buffer in [START, target] {
            tell(peer, buffer, length)?;
            succeeds(peer)?;
            message(peer)?;
        }
        ensure!(peer.memory(target, length)? == data, "exchange {number}: other data came back");
    }
    Ok(())
}

/// Performs exchanges as the server, with a client that compares the data.
pub(crate) fn server(peer: &mut IwarpPeer, length: usize, count: u8) -> Result<()> {
    peer.post_receive(ARRIVES, MESSAGE)?;
    for number in 0..count {
        let source = message(peer).with_context(|| format!("exchange {number}"))?;
        peer.read(source, START, length)?;
        succeeds(peer)?;
        tell(peer, START, length)?;
        succeeds(peer)?;
        let target = message(peer)?;
        peer.write(target, START, length)?;
        succeeds(peer)?;
        // The receive for the next exchange is posted first.
        tell(peer, START, length)?;
        succeeds(peer)?;
    }
    Ok(())
}

/// Data as the program expects it: a text that ends with zero.
fn pattern(length: usize, number: u8) -> Result<Vec<u8>> {
    let text = (b'a'..=b'z').cycle().skip(number.into());
    let mut data: Vec<u8> = text.take(length.checked_sub(1).context("a buffer of no bytes")?).collect();
    data.push(0);
    Ok(data)
}

/// Sends a message that names a buffer of this end, with a receive for the answer.
fn tell(peer: &mut IwarpPeer, buffer: usize, length: usize) -> Result<()> {
    peer.post_receive(ARRIVES, MESSAGE)?;
    let mut message = (buffer as u64).to_be_bytes().to_vec();
    message.extend(IwarpPeer::key().to_be_bytes());
    message.extend(u32::try_from(length)?.to_be_bytes());
    peer.memory(LEAVES, MESSAGE)?.copy_from_slice(&message);
    peer.send(LEAVES, MESSAGE)
}

/// Waits for a message, and returns the place of the buffer that it names.
pub(crate) fn message(peer: &mut IwarpPeer) -> Result<RemoteAddress> {
    let length = peer.received()?;
    ensure!(length as usize == MESSAGE, "a message of {length} bytes");
    let bytes = peer.memory(ARRIVES, MESSAGE)?;
    let (addr, rest) = bytes.split_first_chunk().context("an address")?;
    let (rkey, _) = rest.split_first_chunk().context("a key")?;
    Ok(RemoteAddress { addr: u64::from_be_bytes(*addr), rkey: u32::from_be_bytes(*rkey) })
}

fn succeeds(peer: &mut IwarpPeer) -> Result<()> {
    let status = peer.finished()?;
    ensure!(status == WcStatus::Success, "a request ended with {status:?}");
    Ok(())
}
