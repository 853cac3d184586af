//! Requests of a client, parsed from the bodies of messages.
//!
//! A request is parsed as a whole or refused with an errno; sizes are compared with what the command needs before
//! anything is looked at.

use rustix::io::Errno;

use super::message::{Command, MAX_DATA_XFER_SIZE};

/// Fixed part of `vfio_region_info`.
pub(crate) const REGION_INFO_SIZE: u32 = 32;

/// Fixed part of `vfio_device_info` and of `vfio_irq_info`.
pub(crate) const SHORT_INFO_SIZE: u32 = 16;

/// One element of a multiple write.
const WRITE_MULTI_ELEMENT: usize = 24;

/// Version negotiation.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Version<'a> {
    /// Major version the client speaks.
    pub major: u16,
    /// Minor version the client speaks.
    pub minor: u16,
    /// JSON with the client's capabilities, possibly absent.
    pub data: &'a [u8],
}

/// A range of bus addresses appears.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct DmaMap {
    /// `VFIO_DMA_MAP_FLAG_*`.
    pub flags: u32,
    /// Where the range starts in the file that comes with the message.
    pub offset: u64,
    /// First bus address.
    pub address: u64,
    /// Bytes.
    pub size: u64,
}

/// Ranges of bus addresses go away.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct DmaUnmap {
    /// `VFIO_DMA_UNMAP_FLAG_*`.
    pub flags: u32,
    /// First bus address.
    pub address: u64,
    /// Bytes.
    pub size: u64,
}

/// Where interrupts go.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct SetIrqs<'a> {
    /// `VFIO_IRQ_SET_*`.
    pub flags: u32,
    /// Interrupt type.
    pub index: u32,
    /// First interrupt of the type.
    pub start: u32,
    /// How many.
    pub count: u32,
    /// One byte for each with `VFIO_IRQ_SET_DATA_BOOL`.
    pub data: &'a [u8],
}

/// Which part of which region.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct RegionAccess {
    /// Byte in the region.
    pub offset: u64,
    /// Which region.
    pub region: u32,
    /// Bytes.
    pub count: u32,
}

/// Several small writes, in order.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct WriteMulti<'a> {
    elements: &'a [u8],
}

impl<'a> WriteMulti<'a> {
    /// The writes.
    pub fn writes(&self) -> impl Iterator<Item = (RegionAccess, &'a [u8])> + use<'a> {
        // Checked when the request was parsed, so nothing is skipped here.
        self.elements.chunks_exact(WRITE_MULTI_ELEMENT).filter_map(|element| parse_write(element).ok())
    }
}

fn parse_write(element: &[u8]) -> Result<(RegionAccess, &[u8]), Errno> {
    let mut fields = Fields(element);
    let access = RegionAccess { offset: fields.u64()?, region: fields.u32()?, count: fields.u32()? };
    let count = usize::try_from(access.count).map_err(|_| Errno::INVAL)?;
    Ok((access, fields.0.get(..count).ok_or(Errno::INVAL)?))
}

/// A request with all its sizes checked.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Request<'a> {
    /// [`Command::VERSION`]
    Version(Version<'a>),
    /// [`Command::DMA_MAP`]
    DmaMap(DmaMap),
    /// [`Command::DMA_UNMAP`]
    DmaUnmap(DmaUnmap),
    /// [`Command::DEVICE_GET_INFO`]
    DeviceInfo,
    /// [`Command::DEVICE_GET_REGION_INFO`]
    RegionInfo {
        /// Which region.
        index: u32,
        /// Bytes that the client has room for, at least those of the fixed part.
        room: u32,
    },
    /// [`Command::DEVICE_GET_IRQ_INFO`] for this index
    IrqInfo(u32),
    /// [`Command::DEVICE_SET_IRQS`]
    SetIrqs(SetIrqs<'a>),
    /// [`Command::REGION_READ`]
    RegionRead(RegionAccess),
    /// [`Command::REGION_WRITE`]
    RegionWrite(RegionAccess, &'a [u8]),
    /// [`Command::REGION_WRITE_MULTI`]
    RegionWriteMulti(WriteMulti<'a>),
    /// [`Command::DEVICE_RESET`]
    DeviceReset,
}

impl<'a> Request<'a> {
    /// Parses the body of a request.
    ///
    /// # Errors
    /// The command is not served (`ENOTSUP`), or the body is not what the command needs (`EINVAL`).
    // Long: one arm for each command.
    pub fn parse(command: Command, body: &'a [u8]) -> Result<Self, Errno> {
        let mut fields = Fields(body);
        match command {
            Command::VERSION => {
                Ok(Self::Version(Version { major: fields.u16()?, minor: fields.u16()?, data: fields.0 }))
            }
            Command::DMA_MAP => {
                fields.argsz(32)?;
                let request =
                    DmaMap { flags: fields.u32()?, offset: fields.u64()?, address: fields.u64()?, size: fields.u64()? };
                fields.end().map(|()| Self::DmaMap(request))
            }
            Command::DMA_UNMAP => {
                fields.argsz(24)?;
                let request = DmaUnmap { flags: fields.u32()?, address: fields.u64()?, size: fields.u64()? };
                fields.end().map(|()| Self::DmaUnmap(request))
            }
            Command::DEVICE_GET_INFO => {
                fields.argsz(SHORT_INFO_SIZE)?;
                fields.u32()?;
                fields.u64().map(|_| Self::DeviceInfo)
            }
            Command::DEVICE_GET_REGION_INFO => {
                let room = fields.argsz(REGION_INFO_SIZE)?;
                fields.u32()?;
                let index = fields.u32()?;
                fields.u32()?;
                fields.u64()?;
                fields.u64().map(|_| Self::RegionInfo { index, room })
            }
            Command::DEVICE_GET_IRQ_INFO => {
                fields.argsz(SHORT_INFO_SIZE)?;
                fields.u32()?;
                let index = fields.u32()?;
                fields.u32().map(|_| Self::IrqInfo(index))
            }
            Command::DEVICE_SET_IRQS => {
                fields.argsz(20)?;
                let (flags, index) = (fields.u32()?, fields.u32()?);
                let (start, count) = (fields.u32()?, fields.u32()?);
                Ok(Self::SetIrqs(SetIrqs { flags, index, start, count, data: fields.0 }))
            }
            Command::REGION_READ => {
                let access = fields.region_access()?;
                fields.end().map(|()| Self::RegionRead(access))
            }
            Command::REGION_WRITE => {
                let access = fields.region_access()?;
                if usize::try_from(access.count).ok() != Some(fields.0.len()) {
                    return Err(Errno::INVAL);
                }
                Ok(Self::RegionWrite(access, fields.0))
            }
            Command::REGION_WRITE_MULTI => {
                let count = fields.u64()?;
                let (elements, []) = fields.0.as_chunks::<WRITE_MULTI_ELEMENT>() else { return Err(Errno::INVAL) };
                if u64::try_from(elements.len()).ok() != Some(count) {
                    return Err(Errno::INVAL);
                }
                // All or nothing: a bad element must not leave half of the writes done.
                elements.iter().try_for_each(|element| parse_write(element).map(|_| ()))?;
                Ok(Self::RegionWriteMulti(WriteMulti { elements: fields.0 }))
            }
            Command::DEVICE_RESET => fields.end().map(|()| Self::DeviceReset),
            _ => Err(Errno::NOTSUP),
        }
    }
}

/// The rest of a body.
struct Fields<'a>(&'a [u8]);

impl Fields<'_> {
    fn take<const N: usize>(&mut self) -> Result<[u8; N], Errno> {
        let (&field, rest) = self.0.split_first_chunk::<N>().ok_or(Errno::INVAL)?;
        self.0 = rest;
        Ok(field)
    }

    fn u16(&mut self) -> Result<u16, Errno> {
        self.take().map(u16::from_le_bytes)
    }

    fn u32(&mut self) -> Result<u32, Errno> {
        self.take().map(u32::from_le_bytes)
    }

    fn u64(&mut self) -> Result<u64, Errno> {
        self.take().map(u64::from_le_bytes)
    }

    /// How much the client says it has room for. Clients count differently (Cloud Hypervisor adds the header), so only
    /// less than the fixed part is wrong.
    fn argsz(&mut self, least: u32) -> Result<u32, Errno> {
        self.u32().and_then(|argsz| if argsz < least { Err(Errno::INVAL) } else { Ok(argsz) })
    }

    fn region_access(&mut self) -> Result<RegionAccess, Errno> {
        let access = RegionAccess { offset: self.u64()?, region: self.u32()?, count: self.u32()? };
        if access.count > MAX_DATA_XFER_SIZE { Err(Errno::INVAL) } else { Ok(access) }
    }

    const fn end(&self) -> Result<(), Errno> {
        if self.0.is_empty() { Ok(()) } else { Err(Errno::INVAL) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn write_multi_is_all_or_nothing() {
        let element = |count: u32| {
            let mut bytes = Vec::from(8u64.to_le_bytes());
            bytes.extend(2u32.to_le_bytes());
            bytes.extend(count.to_le_bytes());
            bytes.extend([1, 2, 3, 4, 5, 6, 7, 8]);
            bytes
        };
        let body = |counts: &[u32], announced: u64| {
            let mut bytes = Vec::from(announced.to_le_bytes());
            counts.iter().for_each(|&count| bytes.extend(element(count)));
            bytes
        };
        let good = body(&[4, 8], 2);
        let Ok(Request::RegionWriteMulti(multi)) = Request::parse(Command::REGION_WRITE_MULTI, &good) else {
            panic!("refused");
        };
        let writes: Vec<_> = multi.writes().collect();
        assert_eq!(writes[0], (RegionAccess { offset: 8, region: 2, count: 4 }, &[1, 2, 3, 4][..]));
        assert_eq!(writes[1].1.len(), 8);
        for bad in [body(&[4, 9], 2), body(&[4, 8], 3), body(&[4, 8], u64::MAX), body(&[4], 0)] {
            assert_eq!(Request::parse(Command::REGION_WRITE_MULTI, &bad), Err(Errno::INVAL));
        }
    }

    proptest! {
        /// Any bytes are parsed or refused; every fixed-size body that is cut short is refused.
        #[test]
        fn any_bytes(command in 0u16..20, body in proptest::collection::vec(any::<u8>(), 0..200)) {
            if let Ok(Request::RegionWriteMulti(multi)) = Request::parse(Command(command), &body) {
                prop_assert_eq!(multi.writes().count(), (body.len() - 8) / 24);
            }
        }

        #[test]
        fn cut_short(command in prop::sample::select(vec![(1u16, 4usize), (2, 32), (3, 24), (4, 16), (5, 32), (7, 16), (8, 20), (9, 16), (10, 16), (15, 8)]), cut in 0usize..32) {
            let (command, size) = command;
            let body = vec![0x20; cut.min(size - 1)];
            prop_assert_eq!(Request::parse(Command(command), &body), Err(Errno::INVAL));
        }
    }
}
