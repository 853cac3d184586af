//! The `TUNSETIFF` request, which attaches a file to a tap device.
#![expect(unsafe_code, reason = "TUNSETIFF is a request that no safe library has")]

use std::os::fd::OwnedFd;

use rustix::fs::{Mode, OFlags};
use rustix::io::Errno;
use rustix::ioctl::{Opcode, Updater, ioctl, opcode};

use super::error::TapError;
use crate::InterfaceName;

/// `TUNSETIFF` of linux/if_tun.h.
const TUNSETIFF: Opcode = opcode::write::<libc::c_int>(b'T', 202);
const _: () = assert!(TUNSETIFF as libc::Ioctl == libc::TUNSETIFF);

/// `struct ifreq` of linux/if.h, as far as TUNSETIFF uses it.
#[repr(C)]
struct Request {
    name: [u8; libc::IFNAMSIZ],
    flags: libc::c_short,
    rest: [u8; 22],
}

const _: () = assert!(size_of::<Request>() == size_of::<libc::ifreq>());

/// Attaches to an interface, which is created if it does not exist.
pub(super) fn attach(name: &InterfaceName) -> Result<OwnedFd, TapError> {
    let flags = OFlags::RDWR | OFlags::NONBLOCK | OFlags::CLOEXEC;
    let device =
        rustix::fs::open("/dev/net/tun", flags, Mode::empty()).map_err(|errno| TapError::NoTun(errno.into()))?;
    let mut request = Request { name: [0; libc::IFNAMSIZ], flags: 0, rest: [0; 22] };
    // The last byte remains zero and terminates the name.
    for (byte, &letter) in request.name.iter_mut().zip(name.as_str().as_bytes()) {
        *byte = letter;
    }
    request.flags = libc::c_short::try_from(libc::IFF_TAP | libc::IFF_NO_PI).unwrap_or(0);
    // SAFETY: TUNSETIFF reads and writes a `struct ifreq`, which `Request` is in size and layout; any bytes are valid
    // for it.
    let result = unsafe { ioctl(&device, Updater::<TUNSETIFF, Request>::new(&mut request)) };
    result.map_err(|errno| match errno {
        Errno::PERM => TapError::NotPermitted(name.clone()),
        Errno::BUSY => TapError::Busy(name.clone()),
        errno => TapError::Other { name: name.clone(), source: errno.into() },
    })?;
    Ok(device)
}
