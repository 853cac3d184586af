//! `ibv_rc_pingpong` on the adapter itself at one end, a device at the other: this module speaks the program's protocol
//! over TCP.
//!
//! The guest's address is on the host's interface, so the program reaches the guest by it.

use std::io::{Read, Write};
use std::net::TcpStream;

use anyhow::{Context, Result, ensure};
use pvrdma_dev::testing::{Path, Placement, RecvWr, SendWr, status, wc_opcode};
use pvrdma_verbs::Backend;
use pvrdma_verbs_types::Gid;

use pvrdma_verbs::testing::gid;

use crate::device_pair::{Side, SideOptions};

/// Length of `0000:000000:000000:` and a GID, with the zero of a C string.
const HELLO: usize = 52;
const SIZE: usize = 3000;
const ROUNDS: u64 = 200;
const PSN: u32 = 0x12_3456;

/// Plays the client against a server of this machine that was started with `-s 3000 -n 200`.
pub(super) fn client<B: Backend<Hca: 'static>>(backend: &B, port: u16) -> Result<()> {
    let mut side = Side::new(backend, 1, &SideOptions::new(1 << 16, Placement::Scattered))?;
    let mut stream = TcpStream::connect(("127.0.0.1", port)).context("ibv_rc_pingpong does not listen")?;
    let ours: String = gid(1).0.iter().map(|byte| format!("{byte:02x}")).collect();
    stream.write_all(format!("0000:{:06x}:{PSN:06x}:{ours}\0", side.qp.qpn).as_bytes())?;
    let mut hello = [0; HELLO];
    stream.read_exact(&mut hello)?;
    let (qpn, psn, dgid) = parse(&hello).context("the server's address is none")?;
    side.qp.connect(&Path { rq_psn: psn, sq_psn: PSN, ..Path::to(dgid, qpn) })?;
    let (from, to) = (side.buffer.sge(&side.mr, 0, SIZE), side.buffer.sge(&side.mr, 32_768, SIZE));
    let receives: Vec<_> = (0..32).map(|_| RecvWr::new(1, &[to])).collect();
    side.qp.post_recv(&receives)?;
    stream.write_all(b"done\0")?;
    for round in 0..ROUNDS {
        side.qp.post_send(&[SendWr::send(2, &[from])])?;
        for cqe in side.cq.wait_many(2) {
            ensure!(cqe.status == status::SUCCESS, "round {round}: {cqe:?}");
            if cqe.opcode == wc_opcode::RECV {
                ensure!(cqe.byte_len as usize == SIZE, "round {round}: {cqe:?}");
                side.qp.post_recv(&receives[..1])?;
            }
        }
    }
    println!("{ROUNDS} rounds with ibv_rc_pingpong");
    Ok(())
}

/// QP number, PSN and GID.
fn parse(hello: &[u8]) -> Option<(u32, u32, Gid)> {
    let text = std::str::from_utf8(hello).ok()?.trim_end_matches('\0');
    let mut fields = text.split(':').skip(1);
    let mut number = || u32::from_str_radix(fields.next()?, 16).ok();
    let (qpn, psn) = (number()?, number()?);
    let digits = fields.next()?;
    let byte = |i: usize| u8::from_str_radix(digits.get(2 * i..2 * i + 2)?, 16).ok();
    let bytes: Option<Vec<u8>> = (0..16).map(byte).collect();
    Some((qpn, psn, Gid(bytes?.try_into().ok()?)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_hello_of_the_program_is_parsed() {
        let text = format!("0000:00001a:abcdef:{}{:08x}{:08x}\0", "0".repeat(16), 0xffff, 0x0a00_0001);
        assert_eq!(text.len(), HELLO);
        assert_eq!(parse(text.as_bytes()), Some((0x1a, 0x00ab_cdef, gid(1))));
        assert_eq!(parse(b"0000:zz"), None);
    }
}
