//! Packet sockets: addresses, options and batched calls that no safe crate provides.
#![expect(unsafe_code, reason = "sockaddr_ll, packet socket options, recvmmsg and sendmmsg")]

use std::ffi::c_int;
use std::io::{IoSlice, IoSliceMut};
use std::mem::{MaybeUninit, size_of, size_of_val};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::ptr;

use pvrdma_packet::MacAddr;
use rustix::io::Errno;
use rustix::net::{AddressFamily, SendFlags, SocketFlags, SocketType, sockopt};

/// Requested size of socket buffers, in bytes. Without CAP_NET_ADMIN the system limits it.
const BUFFER: usize = 8 << 20;
/// Highest number of messages in one call.
pub(super) const MAX_MESSAGES: usize = 32;
/// `ETH_P_ALL` in network byte order, as required for `sll_protocol`.
const ALL_PROTOCOLS: u16 = 3_u16.to_be();
const ETHERNET: u16 = 1;
const LOOPBACK: u16 = 772;

/// Metadata of a received message.
#[derive(Clone, Copy, Debug)]
pub(super) struct Arrival {
    /// Bytes received.
    pub(super) length: usize,
    /// VLAN tag that the kernel removed.
    pub(super) tag: Option<[u8; 4]>,
    /// The message was longer than its buffer.
    pub(super) truncated: bool,
}

/// State of the interface as the socket reports it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Presence {
    /// Frames can pass.
    Up,
    /// The interface is down. The socket works again when it is up.
    Down,
    /// The interface was deleted. The socket cannot be used any more.
    Gone,
}

/// Opens a socket on an interface. It receives frames to groups and to [joined](join) addresses, as far as they pass
/// `filter`, and is prepared for offloads (`PACKET_VNET_HDR`). Also returns the index of the interface.
pub(super) fn open(interface: &str, filter: &[libc::sock_filter]) -> Result<(OwnedFd, c_int), Errno> {
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    // Protocol 0: the socket receives nothing before it is bound to its interface.
    let socket = rustix::net::socket_with(AddressFamily::PACKET, SocketType::RAW, flags, None)?;
    let index = index(socket.as_fd(), interface)?;
    attach_filter(socket.as_fd(), filter)?;
    set(socket.as_fd(), libc::SOL_PACKET, libc::PACKET_VNET_HDR, &1_i32)?;
    set(socket.as_fd(), libc::SOL_PACKET, libc::PACKET_AUXDATA, &1_i32)?;
    set(socket.as_fd(), libc::SOL_PACKET, libc::PACKET_IGNORE_OUTGOING, &1_i32)?;
    if sockopt::set_socket_recv_buffer_size_force(&socket, BUFFER).is_err() {
        sockopt::set_socket_recv_buffer_size(&socket, BUFFER)?;
    }
    if sockopt::set_socket_send_buffer_size_force(&socket, BUFFER).is_err() {
        sockopt::set_socket_send_buffer_size(&socket, BUFFER)?;
    }
    bind(socket.as_fd(), index)?;
    match sockopt::socket_error(&socket)? {
        // The interface is down; the socket works once it is up.
        Ok(()) | Err(Errno::NETDOWN) => {}
        Err(errno) => return Err(errno),
    }
    member(socket.as_fd(), libc::PACKET_ADD_MEMBERSHIP, index, libc::PACKET_MR_ALLMULTI, None)?;
    Ok((socket, index))
}

/// Returns the index of an interface in the network namespace of a socket.
pub(super) fn index(socket: BorrowedFd<'_>, interface: &str) -> Result<c_int, Errno> {
    let index = rustix::net::netdevice::name_to_index(socket, interface)?;
    c_int::try_from(index).map_err(|_| Errno::NODEV)
}

/// Makes the interface receive frames to `mac`, or all frames if it has no address filter. Returns the kind of
/// membership.
pub(super) fn join(socket: BorrowedFd<'_>, index: c_int, mac: MacAddr) -> Result<c_int, Errno> {
    let add = |kind| member(socket, libc::PACKET_ADD_MEMBERSHIP, index, kind, Some(mac)).map(|()| kind);
    add(libc::PACKET_MR_UNICAST).or_else(|_| add(libc::PACKET_MR_PROMISC))
}

/// Ends the membership of a [`join`].
pub(super) fn leave(socket: BorrowedFd<'_>, index: c_int, mac: MacAddr, kind: c_int) {
    // This fails if the interface, and with it the membership, has been deleted.
    let _ = member(socket, libc::PACKET_DROP_MEMBERSHIP, index, kind, Some(mac));
}

/// Queries the state of the interface by sending a message that is too short to leave.
pub(super) fn presence(socket: BorrowedFd<'_>) -> Presence {
    match rustix::net::send(socket, &[], SendFlags::DONTWAIT | SendFlags::NOSIGNAL) {
        Err(Errno::NETDOWN) => Presence::Down,
        Err(Errno::NXIO | Errno::NODEV) => Presence::Gone,
        _ => Presence::Up,
    }
}

/// Makes the socket receive frames that leave the interface, too.
pub(super) fn hear_outgoing(socket: BorrowedFd<'_>) -> Result<(), Errno> {
    set(socket, libc::SOL_PACKET, libc::PACKET_IGNORE_OUTGOING, &0_i32)
}

/// Returns the number of frames that the kernel dropped for lack of room since the last call.
pub(super) fn drops(socket: BorrowedFd<'_>) -> u32 {
    let mut stats = [0_u32; 2];
    let mut length = libc::socklen_t::try_from(size_of_val(&stats)).unwrap_or(0);
    // SAFETY: the kernel writes at most `length` bytes, which is the size of `stats`; any bytes are valid numbers.
    let result = unsafe {
        libc::getsockopt(
            socket.as_raw_fd(),
            libc::SOL_PACKET,
            libc::PACKET_STATISTICS,
            ptr::from_mut(&mut stats).cast(),
            &raw mut length,
        )
    };
    if result == 0 { stats[1] } else { 0 }
}

/// Sets the priority of frames sent from now on (`SO_PRIORITY`).
pub(super) fn set_priority(socket: BorrowedFd<'_>, priority: u8) -> Result<(), Errno> {
    set(socket, libc::SOL_SOCKET, libc::SO_PRIORITY, &c_int::from(priority))
}

/// Sets the socket filter.
pub(super) fn attach_filter(socket: BorrowedFd<'_>, program: &[libc::sock_filter]) -> Result<(), Errno> {
    let length = u16::try_from(program.len()).map_err(|_| Errno::INVAL)?;
    // The kernel copies the program before `set` returns, and does not write to it.
    let program = libc::sock_fprog { len: length, filter: program.as_ptr().cast_mut() };
    set(socket, libc::SOL_SOCKET, libc::SO_ATTACH_FILTER, &program)
}

fn member(socket: BorrowedFd<'_>, act: c_int, index: c_int, kind: c_int, mac: Option<MacAddr>) -> Result<(), Errno> {
    let mut address = [0; 8];
    let length = mac.map_or(0, |mac| {
        address[..6].copy_from_slice(&mac.0);
        6
    });
    let kind = u16::try_from(kind).map_err(|_| Errno::INVAL)?;
    let membership = libc::packet_mreq { mr_ifindex: index, mr_type: kind, mr_alen: length, mr_address: address };
    set(socket, libc::SOL_PACKET, act, &membership)
}

/// Sets an option whose value is a plain C structure.
fn set<T: Copy>(socket: BorrowedFd<'_>, level: c_int, name: c_int, value: &T) -> Result<(), Errno> {
    let length = libc::socklen_t::try_from(size_of::<T>()).map_err(|_| Errno::INVAL)?;
    // SAFETY: the kernel reads `length` bytes, which is the size of `value`.
    let result = unsafe { libc::setsockopt(socket.as_raw_fd(), level, name, ptr::from_ref(value).cast(), length) };
    check(result.into()).map(|_| ())
}

fn bind(socket: BorrowedFd<'_>, index: c_int) -> Result<(), Errno> {
    let mut address = libc::sockaddr_ll {
        sll_family: u16::try_from(libc::AF_PACKET).map_err(|_| Errno::INVAL)?,
        sll_protocol: ALL_PROTOCOLS,
        sll_ifindex: index,
        sll_hatype: 0,
        sll_pkttype: 0,
        sll_halen: 0,
        sll_addr: [0; 8],
    };
    let mut length = libc::socklen_t::try_from(size_of_val(&address)).map_err(|_| Errno::INVAL)?;
    // SAFETY: the kernel reads `length` bytes, which is the size of `address`.
    check(unsafe { libc::bind(socket.as_raw_fd(), ptr::from_ref(&address).cast(), length) }.into())?;
    // SAFETY: the kernel writes at most `length` bytes, which is the size of `address`; any bytes are valid.
    let named = unsafe { libc::getsockname(socket.as_raw_fd(), ptr::from_mut(&mut address).cast(), &raw mut length) };
    check(named.into())?;
    // Frames of other interface types do not begin with an Ethernet header.
    if matches!(address.sll_hatype, ETHERNET | LOOPBACK) { Ok(()) } else { Err(Errno::PROTONOSUPPORT) }
}

/// Buffer for one control message with `tpacket_auxdata`, aligned as `cmsghdr` requires.
type Control = [u64; 8];

/// Receives up to `arrivals.len()` messages without waiting; message `i` is stored in the `i`th run of `parts_each`
/// parts. Returns the number received.
pub(super) fn receive(
    socket: BorrowedFd<'_>,
    parts: &mut [IoSliceMut<'_>],
    parts_each: usize,
    arrivals: &mut [Arrival],
) -> Result<usize, Errno> {
    let mut control: [Control; MAX_MESSAGES] = [[0; 8]; MAX_MESSAGES];
    let mut headers = [const { MaybeUninit::<libc::mmsghdr>::zeroed() }; MAX_MESSAGES];
    let mut count = 0;
    for ((run, control), header) in
        parts.chunks_mut(parts_each.max(1)).zip(&mut control).zip(&mut headers).take(arrivals.len())
    {
        // SAFETY: all zeros are a valid mmsghdr: null pointers and zero lengths.
        let message = unsafe { header.assume_init_mut() };
        // `IoSliceMut` has the layout of `iovec`.
        message.msg_hdr.msg_iov = run.as_mut_ptr().cast();
        message.msg_hdr.msg_iovlen = number(run.len())?;
        message.msg_hdr.msg_control = control.as_mut_ptr().cast();
        message.msg_hdr.msg_controllen = number(size_of::<Control>())?;
        count += 1;
    }
    let (length, flags) = (number(count)?, number(libc::MSG_DONTWAIT)?);
    // SAFETY: the first `length` headers are initialised; their parts and control buffers are borrowed mutably for the
    // call and have the lengths given.
    let result =
        unsafe { libc::recvmmsg(socket.as_raw_fd(), headers.as_mut_ptr().cast(), length, flags, ptr::null_mut()) };
    let received = usize::try_from(check(result.into())?).map_err(|_| Errno::INVAL)?;
    for (header, arrival) in headers.iter().zip(arrivals).take(received) {
        // SAFETY: it was initialised above.
        let message = unsafe { header.assume_init_ref() };
        *arrival = Arrival {
            length: message.msg_len as usize,
            tag: tag(&message.msg_hdr),
            truncated: message.msg_hdr.msg_flags & libc::MSG_TRUNC != 0,
        };
    }
    Ok(received)
}

/// Returns the VLAN tag in a message's control data.
fn tag(message: &libc::msghdr) -> Option<[u8; 4]> {
    // SAFETY: the kernel has filled in the control buffer, which is still borrowed, and its length.
    let control = unsafe { libc::CMSG_FIRSTHDR(message).as_ref() }?;
    let needed = size_of::<libc::cmsghdr>() + size_of::<libc::tpacket_auxdata>();
    let is_aux = control.cmsg_level == libc::SOL_PACKET && control.cmsg_type == libc::PACKET_AUXDATA;
    if !is_aux || control.cmsg_len < number(needed).ok()? {
        return None;
    }
    // SAFETY: the message holds the structure, whose bytes are all valid; it may be less aligned.
    let aux = unsafe { ptr::read_unaligned(libc::CMSG_DATA(control).cast::<libc::tpacket_auxdata>()) };
    if aux.tp_status & libc::TP_STATUS_VLAN_VALID == 0 {
        return None;
    }
    let kind = if aux.tp_status & libc::TP_STATUS_VLAN_TPID_VALID == 0 { 0x8100 } else { aux.tp_vlan_tpid };
    let ([a, b], [c, d]) = (kind.to_be_bytes(), aux.tp_vlan_tci.to_be_bytes());
    Some([a, b, c, d])
}

/// Sends messages without waiting; each consists of the parts up to its end. Returns the number sent; an error refers
/// to the first message.
pub(super) fn send(socket: BorrowedFd<'_>, parts: &[IoSlice<'_>], ends: &[usize]) -> Result<usize, Errno> {
    let mut headers = [const { MaybeUninit::<libc::mmsghdr>::zeroed() }; MAX_MESSAGES];
    let (mut start, mut count) = (0, 0);
    for (&end, header) in ends.iter().zip(&mut headers) {
        let run = parts.get(start..end).ok_or(Errno::INVAL)?;
        // SAFETY: all zeros are a valid mmsghdr: null pointers and zero lengths.
        let message = unsafe { header.assume_init_mut() };
        // `IoSlice` has the layout of `iovec`. The kernel does not write through these pointers.
        message.msg_hdr.msg_iov = run.as_ptr().cast_mut().cast();
        message.msg_hdr.msg_iovlen = number(run.len())?;
        (start, count) = (end, count + 1);
    }
    let flags = number(libc::MSG_DONTWAIT)?;
    // SAFETY: the first `count` headers are initialised; their parts are borrowed for the call.
    let result = unsafe { libc::sendmmsg(socket.as_raw_fd(), headers.as_mut_ptr().cast(), count, flags) };
    usize::try_from(check(result.into())?).map_err(|_| Errno::INVAL)
}

/// Converts a number to the type that the C library uses, which differs between C libraries.
fn number<T, U: TryFrom<T>>(value: T) -> Result<U, Errno> {
    U::try_from(value).map_err(|_| Errno::INVAL)
}

fn check(result: i64) -> Result<i64, Errno> {
    if result < 0 {
        let error = std::io::Error::last_os_error();
        return Err(Errno::from_io_error(&error).unwrap_or(Errno::IO));
    }
    Ok(result)
}
