//! Client requests, parsed from message bodies.
//!
//! A request is either parsed completely or refused with an errno. Sizes are compared with the needs of the command
//! before any field is used.

use rustix::io::Errno;

use super::fields::Fields;
use super::message::{Command, MAX_DATA_XFER_SIZE};
use super::migration::feature::Feature;

/// Size of the fixed part of `vfio_region_info`.
pub(crate) const REGION_INFO_SIZE: u32 = 32;

/// Size of the fixed part of `vfio_device_info` and of `vfio_irq_info`.
pub(crate) const SHORT_INFO_SIZE: u32 = 16;

/// Size of the head of migration data.
const MIG_DATA_HEAD: u32 = 8;

/// Size of one element of a multiple write.
const WRITE_MULTI_ELEMENT: usize = 24;

/// Version negotiation.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Version<'a> {
    /// Major version of the client.
    pub major: u16,
    /// Minor version of the client.
    pub minor: u16,
    /// JSON with the client's capabilities; may be absent.
    pub data: &'a [u8],
}

/// Addition of a range of bus addresses.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct DmaMap {
    /// `VFIO_DMA_MAP_FLAG_*`.
    pub flags: u32,
    /// Offset of the range in the file that the message carries.
    pub offset: u64,
    /// First bus address.
    pub address: u64,
    /// Size in bytes.
    pub size: u64,
}

/// Removal of ranges of bus addresses.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct DmaUnmap {
    /// `VFIO_DMA_UNMAP_FLAG_*`.
    pub flags: u32,
    /// First bus address.
    pub address: u64,
    /// Size in bytes.
    pub size: u64,
}

/// Targets of interrupts.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct SetIrqs<'a> {
    /// `VFIO_IRQ_SET_*`.
    pub flags: u32,
    /// Interrupt type.
    pub index: u32,
    /// First interrupt of the type.
    pub start: u32,
    /// Number of interrupts.
    pub count: u32,
    /// One byte for each with `VFIO_IRQ_SET_DATA_BOOL`.
    pub data: &'a [u8],
}

/// Location of a region access.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct RegionAccess {
    /// Offset in the region, in bytes.
    pub offset: u64,
    /// Number of the region.
    pub region: u32,
    /// Size in bytes.
    pub count: u32,
}

/// Several small writes, in order.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct WriteMulti<'a> {
    elements: &'a [u8],
}

impl<'a> WriteMulti<'a> {
    /// Returns the writes.
    pub fn writes(&self) -> impl Iterator<Item = (RegionAccess, &'a [u8])> + use<'a> {
        // `parse` has checked the elements, so none is skipped here.
        self.elements.chunks_exact(WRITE_MULTI_ELEMENT).filter_map(|element| parse_write(element).ok())
    }
}

fn region_access(fields: &mut Fields<'_>) -> Result<RegionAccess, Errno> {
    let access = RegionAccess { offset: fields.u64()?, region: fields.u32()?, count: fields.u32()? };
    if access.count > MAX_DATA_XFER_SIZE { Err(Errno::INVAL) } else { Ok(access) }
}

fn parse_write(element: &[u8]) -> Result<(RegionAccess, &[u8]), Errno> {
    let mut fields = Fields(element);
    let access = RegionAccess { offset: fields.u64()?, region: fields.u32()?, count: fields.u32()? };
    let count = usize::try_from(access.count).map_err(|_| Errno::INVAL)?;
    Ok((access, fields.0.get(..count).ok_or(Errno::INVAL)?))
}

/// Request with all its sizes checked.
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
        /// Number of the region.
        index: u32,
        /// Bytes that the client has space for, at least the fixed part.
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
    /// [`Command::DEVICE_FEATURE`]
    Feature(Feature<'a>),
    /// [`Command::MIG_DATA_READ`] of at most this number of bytes
    MigDataRead(u32),
    /// [`Command::MIG_DATA_WRITE`]
    MigDataWrite(&'a [u8]),
}

impl<'a> Request<'a> {
    /// Parses the body of a request.
    ///
    /// # Errors
    /// The command is not supported (`ENOTSUP`), or the body does not fit the command (`EINVAL`).
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
                let access = region_access(&mut fields)?;
                fields.end().map(|()| Self::RegionRead(access))
            }
            Command::REGION_WRITE => {
                let access = region_access(&mut fields)?;
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
                // All elements are checked first: an invalid one must not leave half of the writes done.
                elements.iter().try_for_each(|element| parse_write(element).map(|_| ()))?;
                Ok(Self::RegionWriteMulti(WriteMulti { elements: fields.0 }))
            }
            Command::DEVICE_RESET => fields.end().map(|()| Self::DeviceReset),
            Command::DEVICE_FEATURE => Feature::parse(&mut fields).map(Self::Feature),
            Command::MIG_DATA_READ => {
                let (room, size) = (fields.argsz(MIG_DATA_HEAD)?, fields.u32()?);
                if size > MAX_DATA_XFER_SIZE || room < MIG_DATA_HEAD + size {
                    return Err(Errno::INVAL);
                }
                Ok(Self::MigDataRead(size))
            }
            Command::MIG_DATA_WRITE => {
                let (_, size) = (fields.argsz(MIG_DATA_HEAD)?, fields.u32()?);
                if usize::try_from(size).ok() != Some(fields.rest().len()) {
                    return Err(Errno::INVAL);
                }
                Ok(Self::MigDataWrite(fields.rest()))
            }
            _ => Err(Errno::NOTSUP),
        }
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
        /// Any bytes are parsed or refused; a truncated fixed-size body is refused.
        #[test]
        fn any_bytes(command in 0u16..22, body in proptest::collection::vec(any::<u8>(), 0..200)) {
            if let Ok(Request::RegionWriteMulti(multi)) = Request::parse(Command(command), &body) {
                prop_assert_eq!(multi.writes().count(), (body.len() - 8) / 24);
            }
        }

        #[test]
        fn cut_short(command in prop::sample::select(vec![(1u16, 4usize), (2, 32), (3, 24), (4, 16), (5, 32), (7, 16), (8, 20), (9, 16), (10, 16), (15, 8), (16, 8), (17, 8), (18, 8)]), cut in 0usize..32) {
            let (command, size) = command;
            let body = vec![0x20; cut.min(size - 1)];
            prop_assert_eq!(Request::parse(Command(command), &body), Err(Errno::INVAL));
        }
    }
}
